"""Draw the five pictures of docs/five-pictures.md: ``make pictures``.

Every number and name in them is asked of fxprune, of one small network. Each SVG has a ground of
its own, light or dark as the system of whoever reads is.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import torch
from torch import nn

import fxprune
from fxprune.proving.proof import prove

HUES = ["#56b4e9", "#f0a830", "#2fb58a", "#d98cb8"]  # one a channel
STYLE = """
  .ground { fill: #fbfbfc; stroke: #d5d8de } .soft { fill: #eceef2 } .line { stroke: #6b7280 }
  text { fill: #1f2430; font: 14px sans-serif } .code { font-family: monospace; font-size: 13px }
  .head { font-weight: bold } .quiet { fill: #5b6270 } .on { fill: #14171d }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #1d2028; stroke: #3a3f4b } .soft { fill: #2b303b } .line { stroke: #a2a9b6 }
    text { fill: #eceef2 } .quiet { fill: #a2a9b6 } .on { fill: #14171d }
  }
"""

CODE = """\
def forward(self, x):
    y = torch.sigmoid(self.a(x))
    y = y + self.b(y)
    n, c, h, w = y.shape
    return self.fc(y.view(n, 4 * h * w))"""


class Net(nn.Module):
    """What is drawn: ``forward`` is CODE."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        y = torch.sigmoid(self.a(x))
        y = y + self.b(y)
        n, _, h, w = y.shape
        return self.fc(y.view(n, 4 * h * w))


class Picture:
    def __init__(self, title: str, height: int, width: int = 760) -> None:
        self.size, self.title = (width, height), title
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}" xml:space="preserve">'
            f"{escape(words)}</text>"
        )

    def box(self, x: float, y: float, w: float, h: float, fill: str = "", **more: str) -> None:
        look = f'fill="{fill}"' if fill else 'class="soft"'
        rest = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in more.items())
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="3" {look}{rest}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        end = "" if dashed else ' marker-end="url(#tip)"'
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="line" '
            f'stroke-width="1.5"{dash}{end}/>'
        )

    def cells(
        self, x: float, y: float, labels: list[int], step: float = 26, gone: tuple[int, ...] = (),
        high: float = 22, words: bool = True,
    ) -> None:  # fmt: skip
        """A row of slices, coloured by their label; those of ``gone`` are outlines."""
        for i, label in enumerate(labels):
            if label in gone:
                self.box(x + i * step, y, step - 3, high, "none", stroke=HUES[label],
                         stroke_width="2", stroke_dasharray="3 2")  # fmt: skip
            else:
                self.box(x + i * step, y, step - 3, high, HUES[label])
            if words:
                where = x + i * step + (step - 3) / 2
                self.text(where, y + high - 6, str(label), "" if label in gone else "on", "middle")

    def save(self, folder: Path, name: str) -> None:
        w, h = self.size
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" '
            f'height="{h}" role="img" aria-label="{escape(self.title)}">',
            f"<title>{escape(self.title)}</title><style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#8a919e"/>'
            "</marker></defs>",
            f'<rect x="0.5" y="0.5" width="{w - 1}" height="{h - 1}" rx="8" class="ground"/>',
            *self.parts,
            "</svg>",
        ]
        (folder / f"{name}.svg").write_text("\n".join(lines) + "\n")


def record(net: nn.Module, x: torch.Tensor) -> Picture:
    graph = fxprune.trace(net, x).graph
    picture = Picture("One run of the code is recorded as a graph", 320)
    picture.text(24, 34, "the code runs once …", "head")
    for i, line in enumerate(CODE.splitlines()):
        picture.text(24, 70 + 24 * i, line, "code")
    picture.text(400, 34, "… and each call is a node", "head")
    nodes = [node for node in graph.nodes if node.op != "output"]
    for i, node in enumerate(nodes):
        y = 60 + 20 * i
        picture.box(400, y - 13, 74, 17)
        picture.text(408, y, node.name, "code")
        picture.text(486, y, _call(node), "code quiet")
    picture.arrow(340, 118, 392, 118)
    picture.text(24, 230, "Sizes are calls too: what the code took from", "quiet")
    picture.text(24, 250, "y.shape is an expression, and the 4 that it", "quiet")
    picture.text(24, 270, "holds as a number is seen to be one.", "quiet")
    return picture


def _call(node: torch.fx.Node) -> str:
    if node.op == "placeholder":
        return "the input"
    name = getattr(node.target, "__name__", node.target)
    sort = {"call_module": f"self.{name}", "call_method": f".{name}"}.get(node.op, name)
    return f"{sort}({', '.join(map(str, node.args))})"


def labels(plan: fxprune.PruningPlan) -> Picture:
    picture = Picture("Labels of channels flow through the graph", 330)
    rows = [
        ("a.weight, its rows", "a makes four channels: four labels", [0, 1, 2, 3]),
        ("torch.sigmoid", "each stays where it is", [0, 1, 2, 3]),
        ("b.weight, its rows", "b makes four more …", [0, 1, 2, 3]),
        ("y + b(y)", "… that meet the first, and share their labels", [0, 1, 2, 3]),
        ("y.view(n, 4 * h * w)", "the view is run on the labels", _repeat(4)),
        ("fc.weight, its columns", "what fc reads has these labels", _repeat(4)),
    ]
    for i, (what, why, found) in enumerate(rows):
        y = 30 + 48 * i
        picture.text(24, y + 16, what, "code")
        step = 26 if len(found) == 4 else 20
        picture.cells(220, y, found, step)
        picture.text(350 if len(found) == 4 else 550, y + 16, why, "quiet")
        if i + 1 < len(rows):
            picture.arrow(270, y + 25, 270, y + 45, dashed=i == 2)
    return picture


def _repeat(times: int) -> list[int]:
    return [label for label in range(4) for _ in range(times)]


def groups(plan: fxprune.PruningPlan) -> Picture:
    picture = Picture("What hangs together is a group", 250)
    said = {"out": "makes", "in": "reads", "shift": "shifts"}
    roles = {(s.name, dim): s.role for s in plan._relations.sources for dim in s.dims}
    for i, group in enumerate(plan.groups):
        x = 24 + 242 * i
        picture.box(x, 24, 228, 200)
        picture.text(x + 14, 50, group.name, "head")
        if group.frozen:
            words = group.frozen.replace("they are read", "read").split()
            for j in range(0, len(words), 5):
                picture.text(x + 14, 74 + 4 * j, " ".join(words[j : j + 5]), "quiet")
        else:
            picture.cells(x + 14, 62, [0, 1, 2, 3], gone=tuple(group.removed.tolist()))
        for j, (name, dim) in enumerate(group.members):
            y = (110 if not group.frozen else 150) + 18 * j
            picture.text(x + 14, y, f"{name}, dim {dim}", "code")
            picture.text(x + 214, y, said[roles[name, dim]], "quiet", "end")
    return picture


def constants(plan: fxprune.PruningPlan, net: Net, small: nn.Module) -> Picture:
    (gone,) = plan.groups[1].removed.tolist()
    with torch.no_grad():
        says = torch.sigmoid(net.a.bias[gone])
        total = says + net.b.bias[gone]
        columns = net.fc.weight[:, 4 * gone : 4 * gone + 4]
        expected = net.fc.bias + columns.sum(1) * total
        reads = net.b.weight[:, gone, 0, 0] * says + net.b.bias
    kept = [i for i in range(4) if i != gone]
    # What b reads comes into its bias, and from there into what the kept channels say.
    assert torch.allclose(small.b.bias, reads[kept])
    assert torch.allclose(small.fc.bias, expected)
    picture = Picture("What a removed channel still says goes into the next bias", 300)
    picture.text(
        24, 34, f"channel {gone} switched off: its weights are zero, its bias stays", "head"
    )
    steps = [
        (f"a.bias[{gone}]", net.a.bias[gone], "the same at every pixel, for every input"),
        ("sigmoid of it", says, f"× b.weight[:, {gone}]: goes into b.bias"),
        (f"+ b.bias[{gone}]", total, "b's row is zero too: its bias is added"),
    ]
    for i, (what, value, why) in enumerate(steps):
        y = 54 + 46 * i
        picture.text(24, y + 16, what, "code")
        picture.box(200, y, 74, 24, HUES[gone])
        picture.text(237, y + 17, f"{value.item():+.3f}", "on code", "middle")
        picture.text(300, y + 16, why, "quiet")
        picture.arrow(237, y + 26, 237, y + 43)
    y = 192
    picture.text(24, y + 16, "fc reads it in", "code")
    picture.cells(200, y, _repeat(4), 20, gone=(gone,))
    picture.text(540, y + 16, f"columns {4 * gone} to {4 * gone + 3}", "quiet")
    picture.arrow(237, y + 26, 237, y + 43)
    before, after = (", ".join(f"{v:+.3f}" for v in b.tolist()) for b in (net.fc.bias, expected))
    picture.text(24, y + 62, "fc.bias", "code")
    picture.text(200, y + 62, f"{before}   becomes   {after}", "code")
    picture.text(24, y + 88, "weight times constant is a constant: the columns can go, and nothing "
                 "is lost", "quiet")  # fmt: skip
    return picture


def proof(plan: fxprune.PruningPlan, error: float) -> Picture:
    (gone,) = plan.groups[1].removed.tolist()
    kept = [i for i in range(4) if i != gone]
    picture = Picture("The masked and the pruned model give the same outputs", 330)
    picture.text(24, 34, "masked: all sizes as they were", "head")
    picture.text(400, 34, "pruned: smaller tensors", "head")
    rows = [("a", [0, 1, 2, 3]), ("b", [0, 1, 2, 3]), ("fc", _repeat(4))]
    for i, (name, found) in enumerate(rows):
        y, step = 52 + 44 * i, 26 if len(found) == 4 else 18
        for x, shown in ((24, found), (400, [label for label in found if label != gone])):
            picture.text(x, y + 16, name, "code")
            picture.cells(x + 34, y, shown, step, gone=(gone,))
    source = next(line for line in plan.code[""].source.splitlines() if "view(" in line)
    picture.text(24, 200, "the code said 4 * h * w", "code quiet")
    picture.text(400, 200, source.split(";")[0].strip(), "code")
    picture.arrow(190, 216, 330, 252)
    picture.arrow(520, 216, 430, 252)
    picture.box(250, 256, 260, 52)
    picture.text(380, 278, "one input, all outputs compared", "", "middle")
    picture.text(380, 298, f"largest difference {error:.0e}", "code", "middle")
    assert len(kept) == 3
    return picture


def main(folder: Path = Path(__file__).parent / "images") -> None:
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    plan = fxprune.plan(net, x, sparsity=0.25)
    small = plan.apply(net)
    record(net, x).save(folder, "1-record")
    labels(plan).save(folder, "2-labels")
    groups(plan).save(folder, "3-groups")
    constants(plan, net, small).save(folder, "4-constants")
    proof(plan, prove(plan, net, small, x)).save(folder, "5-proof")


if __name__ == "__main__":
    main()
