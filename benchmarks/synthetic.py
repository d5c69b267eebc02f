"""Inputs made up for networks whose packages ship no data: voices, tones and sentences."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

RATE, WINDOW, HOP, MELS = 16000, 400, 160, 40
VOWELS = np.array([[730, 1090, 2440], [270, 2290, 3010], [300, 870, 2240], [530, 1840, 2480],
                   [570, 840, 2410], [660, 1720, 2410], [440, 1020, 2240]])  # fmt: skip

# -- voices ---------------------------------------------------------------------------------------


def speak(pitch: float, vowels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Harmonics of a wandering pitch, shaped by the formants of each vowel."""
    length = int(0.4 * RATE)
    sound = []
    for formants in vowels:
        time = np.arange(length) / RATE
        f0 = pitch * (1 + 0.03 * np.sin(2 * np.pi * 5 * time + rng.uniform(0, 6)))
        phase = 2 * np.pi * np.cumsum(f0) / RATE
        wave = np.zeros(length)
        for k in range(1, int(RATE / 2 / pitch)):
            wave += resonance(k * pitch, formants) / k * np.sin(k * phase)
        sound.append(wave * np.hanning(length) ** 0.3)
    return np.concatenate(sound) + 1e-3 * rng.standard_normal(len(vowels) * length)


def resonance(hertz: np.ndarray | float, formants: np.ndarray) -> np.ndarray:
    """What a vocal tract lets through; the formants are the last dimension of ``formants``."""
    return (1 / (1 + ((np.asarray(hertz)[..., None] - formants) / 90) ** 2)).sum(-1)


def voices(count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Two takes of each of ``count`` people as mel spectrograms: (count, 280, MELS) twice.

    A person is a pitch, a length of the vocal tract and a shift of each formant, and says the
    vowels in another order in each take.
    """
    said: tuple[list[Tensor], list[Tensor]] = ([], [])
    for _ in range(count):
        pitch, tract = rng.uniform(85, 255), rng.uniform(0.85, 1.2)
        own = VOWELS * tract * rng.uniform(0.8, 1.2, 3)
        for takes in said:
            takes.append(mel_spectrogram(speak(pitch, rng.permutation(own), rng)))
    first, second = (torch.stack(takes)[:, :280] for takes in said)
    return first, second


def mel_filters() -> np.ndarray:
    """Triangles that are even on the mel scale (Slaney's), of equal area: (mels, frequencies)."""

    def to_hertz(mel: np.ndarray) -> np.ndarray:
        return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))

    top = 15 + 27 * np.log(RATE / 2 / 1000) / np.log(6.4)
    edges = to_hertz(np.linspace(0, top, MELS + 2))
    hertz = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    rise = (hertz - edges[:-2, None]) / np.diff(edges)[:-1, None]
    fall = (edges[2:, None] - hertz) / np.diff(edges)[1:, None]
    return np.maximum(0, np.minimum(rise, fall)) * (2 / (edges[2:] - edges[:-2]))[:, None]


def mel_spectrogram(wave: np.ndarray) -> Tensor:
    wave = wave / np.abs(wave).max() * 0.1
    window = torch.hann_window(WINDOW, dtype=torch.float64)
    spectrum = torch.stft(torch.from_numpy(wave), WINDOW, HOP, window=window, return_complex=True)
    return (torch.from_numpy(mel_filters()) @ spectrum.abs() ** 2).T.float()


# -- tones ----------------------------------------------------------------------------------------


def tones(
    count: int, length: int, rng: np.random.Generator, harmonics: int = 40
) -> tuple[Tensor, Tensor]:
    """(``count`` sounds of ``length`` samples, the pitch in the middle of each in hertz).

    Half are voices, half are tones whose harmonics fade evenly; all have vibrato and noise.
    """
    pitch = np.exp(rng.uniform(np.log(60), np.log(800), (count, 1)))
    time = (np.arange(length) - length // 2) / RATE
    beat, start = rng.uniform(4, 7, (count, 1)), rng.uniform(0, 6, (count, 1))
    vibrato = 0.02 * rng.uniform(0, 1, (count, 1)) * np.sin(2 * np.pi * beat * time + start)
    f0 = pitch * (1 + vibrato)
    phase = 2 * np.pi * np.cumsum(f0, axis=1) / RATE
    formants = VOWELS[rng.integers(len(VOWELS), size=count)] * rng.uniform(0.85, 1.2, (count, 1))
    fade, is_voice = rng.uniform(0.5, 2.5, count), rng.random(count) < 0.5
    wave = np.zeros((count, length))
    for k in range(1, harmonics + 1):
        gain = np.where(is_voice, resonance(k * pitch[:, 0], formants) / k, k**-fade)
        gain *= k * pitch[:, 0] < RATE / 2
        wave += gain[:, None] * np.sin(k * phase + rng.uniform(0, 6, (count, 1)))
    loudness = wave.std(axis=1, keepdims=True)
    noise = 10 ** rng.uniform(-2, -0.25, (count, 1))
    wave += loudness * noise * rng.standard_normal(wave.shape)
    return torch.from_numpy(wave).float(), torch.from_numpy(f0[:, length // 2])


# -- sentences ------------------------------------------------------------------------------------

WHO = """the old farmer|my sister|a young nurse|our manager|the children|two engineers|the mayor
a tired driver|her grandmother|the orchestra|some tourists|the government|a small company
the football team|my neighbour|the scientist|an angry customer|the police""".replace("\n", "|")
DOES = """repairs|has sold|is looking for|wants to buy|forgot|describes|cannot find|likes|built
will replace|carefully cleans|complained about|is afraid of|often talks about|photographed
has stopped using|is going to paint|never saw""".replace("\n", "|")
WHAT = """the red bicycle|a new computer|the broken window|an old song|the winter coat|their garden
a cheap hotel|the tax reform|a loaf of bread|the quarterly report|a wooden boat|the medicine
a strange animal|the railway station|an electric car|the missing key|a difficult exam
the frozen lake""".replace("\n", "|")
WHERE = """in the morning|after the meeting|near the river|because it rains|for the first time
without any help|at the weekend|since last summer|in a foreign country|before dinner
during the holidays|on television|although it is expensive|when nobody is at home
as quickly as possible|at the end of the street""".replace("\n", "|")


def sentences(rng: np.random.Generator) -> Iterator[str]:
    """Plain sentences about everyday things, without end."""
    while True:
        who, does, what, where = (rng.choice(s.split("|")) for s in (WHO, DOES, WHAT, WHERE))
        order = (f"{who} {does} {what} {where}", f"{where}, {who} {does} {what}")
        sentence = order[rng.integers(2)]
        yield sentence[0].upper() + sentence[1:] + "."


# A sentence and its paraphrase.
PAIRS = """
A man is playing a guitar on stage. | Someone performs music with a guitar in front of people.
The cat sleeps on the warm windowsill. | A kitty is napping by the sunny window.
She bought fresh vegetables at the market. | Greens were purchased by her from the stall.
The company reported record profits this year. | Earnings of the firm reached an all-time high.
He forgot his umbrella and got wet. | Without protection from the rain, he was soaked.
The children built a castle out of sand. | Kids made a sandcastle on the beach.
A new planet was discovered by astronomers. | Scientists found an unknown world in space.
The train to London leaves at noon. | At twelve o'clock the railway service to London departs.
I am allergic to peanuts. | Eating nuts makes me ill.
The museum is closed on Mondays. | You cannot visit the gallery at the start of the week.
The doctor told him to stop smoking. | His physician advised giving up cigarettes.
Heavy snow blocked the mountain road. | The pass could not be driven because of the blizzard.
The programmer fixed a bug in the code. | A developer repaired an error in the software.
They got married in a small church. | Their wedding took place in a little chapel.
The soup is too salty. | There is far too much salt in this broth.
Bees make honey from nectar. | Honey is produced by insects that collect from flowers.
The team lost the final game. | They were beaten in the last match.
My phone battery is empty. | The mobile has run out of power.
The teacher explained the lesson again. | Once more the instructor went through the material.
Oil prices rose sharply on Friday. | Crude became much more expensive at the end of the week.
The dog chased a ball across the yard. | A puppy ran after a toy in the garden.
She speaks four languages fluently. | Four different tongues are mastered by her.
The movie was boring and too long. | I nearly fell asleep during that endless film.
Water boils at one hundred degrees. | At 100 Celsius the liquid turns to steam.
The thief stole a painting from the house. | A piece of art was taken by the burglar.
The old bridge will be repaired in spring. | Work to restore the crossing starts after the winter.
He drinks his coffee without sugar. | No sweetener goes into his morning cup.
The flight was delayed by fog. | Bad visibility kept the plane on the ground.
Regular exercise keeps the heart healthy. | Being active is good for the cardiovascular system.
The library lends books for four weeks. | You may keep what you borrow for a month.
The baby started to cry loudly. | An infant burst into tears.
Our neighbour plays the piano every evening. | Each night one hears keyboard music next door.
"""


def paraphrases() -> tuple[list[str], list[str]]:
    pairs = [line.split(" | ") for line in PAIRS.strip().splitlines()]
    return [a for a, _ in pairs], [b for _, b in pairs]
