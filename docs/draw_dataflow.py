"""Draw docs/dataflow.svg: one token's data flow, forward above, backward below, one colour per autograd function.

    python docs/draw_dataflow.py    writes dataflow.svg to this folder

Every number in it comes from dataflow_numbers.py; tests/test_docs_numbers.py compares the file with this script's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

from dataflow_numbers import (
    HP_BYTES,
    ROW_MAP_BYTES,
    TRACE_EXPERT,
    TRACE_RANK,
    Configuration,
    Edge,
    backward_edges,
    forward_edges,
    mebibytes,
)

from mxep.shapes import record_bytes


@dataclass(frozen=True)
class Stage:
    """One box: its autograd function, colour, and what it does forward, keeps, and does backward."""

    title: str
    function: str
    colour: str
    forward: tuple[str, ...]
    saves: tuple[str, ...]
    backward: tuple[str, ...]
    width: int = 112


def stages(config: Configuration) -> list[Stage]:
    """The boxes from left to right."""
    hp, mx = HP_BYTES * config.D, record_bytes(config.D)
    row_map = f"row map {mebibytes(config.sizes['P'] * ROW_MAP_BYTES)}"
    return [
        Stage(
            "sort",
            "_SortRows",
            "#7b5ea7",
            ("each row once", "per choice,", "by expert"),
            ("order",),
            ("sum over the", f"{config.C} choices", "in float32"),
        ),
        Stage(
            "dispatch",
            "AllToAll",
            "#1f77b4",
            ("quantise 1x32,", "exchange", f"{mx} B a row"),
            ("nothing",),
            ("exchange", "as it is", f"{hp} B a row"),
        ),
        Stage(
            "permute",
            "_Permute",
            "#2a9d8f",
            ("expert order,", f"pad to {config.alignment},", "same bytes"),
            (row_map,),
            ("rank order,", "padding", "dropped"),
        ),
        Stage(
            "gate, up GEMM",
            "_ExpertFFN",
            "#d1495b",
            ("w1, w3 1x32", "along D; one", "MXFP8 GEMM"),
            ("padded rows", "(MX), w1, w3"),
            ("d gate, d up", "1x32 along 2H;", "MXFP8 dgrad"),
            126,
        ),
        Stage(
            "SwiGLU",
            "_ExpertFFN",
            "#d1495b",
            ("silu(gate)", "times up,", "to MX"),
            ("gate, up",),
            ("derivative", "and h again:", "MX and bf16"),
            110,
        ),
        Stage(
            "down GEMM",
            "_ExpertFFN",
            "#d1495b",
            ("w2 1x32", "along H;", "MXFP8 GEMM"),
            ("w2",),
            ("w2 1x32", "along D;", "MXFP8 dgrad"),
            126,
        ),
        Stage(
            "unpermute",
            "_Unpermute",
            "#b5872b",
            ("rank order,", "padding", "dropped"),
            (row_map,),
            ("expert order,", "padding zero,", "same bytes"),
        ),
        Stage(
            "combine",
            "AllToAll",
            "#e07a1f",
            ("exchange", "as it is", f"{hp} B a row"),
            ("nothing",),
            ("quantise 1x32,", "exchange", f"{mx} B a row"),
        ),
        Stage(
            "sum",
            "_WeightedSum",
            "#4a7c3a",
            ("read where", "they lie, times", "scores, summed", "in float32"),
            ("slots, scores,", "rows in bf16"),
            ("times scores,", "rounded to bf16,", "expert order"),
            124,
        ),
    ]


GAP, MARGIN = 86, 18
FORWARD_TOP, BOX_HEIGHT, STRIP = 122, 150, 86
BACKWARD_TOP = FORWARD_TOP + BOX_HEIGHT + STRIP
WGRAD_TOP = BACKWARD_TOP + BOX_HEIGHT
HEIGHT = WGRAD_TOP + 150
INK, MUTED = "#1d2330", "#5b6472"
BADGES = {"mxfp8": ("MXFP8", "#0b7a53", "#d8f3e6"), "bf16": ("bf16", "#3d4a63", "#e6eaf2")}
CHARACTER = 0.62  # em; width of an average character of a wide sans-serif font


@dataclass(frozen=True)
class Text:
    """One line of text, its anchor point and size; `box` is its extent."""

    x: float
    y: float
    text: str
    size: float = 13
    weight: str = "normal"
    colour: str = INK
    anchor: str = "middle"

    @property
    def box(self) -> tuple[float, float, float, float]:
        """(left, top, right, bottom), estimated."""
        width = len(self.text) * self.size * CHARACTER
        left = self.x - {"middle": width / 2, "start": 0, "end": width}[self.anchor]
        return left, self.y - 0.8 * self.size, left + width, self.y + 0.22 * self.size

    def svg(self) -> str:
        return (
            f'<text x="{self.x:g}" y="{self.y:g}" font-size="{self.size:g}" font-weight="{self.weight}" fill="{self.colour}" '
            f'text-anchor="{self.anchor}">{escape(self.text)}</text>'
        )


class Picture:
    """Shapes first, text on top; keeps the texts so that a test can look for overlaps."""

    def __init__(self, config: Configuration) -> None:
        self.config, self.stages = config, stages(config)
        self.shapes: list[str] = []
        self.texts: list[Text] = []
        self.lefts: list[float] = []
        x: float = MARGIN + GAP
        for stage in self.stages:
            self.lefts.append(x)
            x += stage.width + GAP
        self.width = x + MARGIN
        self._bands()
        self._header()
        for index in range(len(self.stages)):
            self._stage(index)
        for index in range(len(self.stages) + 1):
            self._edge(index, forward_edges(config)[index], forward=True)
            self._edge(index, backward_edges(config)[index], forward=False)
        self._weight_gradients()
        self._legend()

    def text(self, x: float, y: float, text: str, **style: float | str) -> None:
        self.texts.append(Text(x, y, text, **style))  # type: ignore[arg-type]

    def rect(self, x: float, y: float, w: float, h: float, fill: str, more: str = "") -> None:
        self.shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" {more}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> None:
        self.shapes.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" {more}/>')

    def _middle(self, title: str) -> float:
        index = [stage.title for stage in self.stages].index(title)
        return self.lefts[index] + self.stages[index].width / 2

    def _bands(self) -> None:
        borders = [MARGIN, self._middle("dispatch"), self._middle("combine"), self.width - MARGIN]
        expert_rank = TRACE_EXPERT // self.config.L
        names = [f"rank {TRACE_RANK}: the token's rank", f"rank {expert_rank}: holds expert {TRACE_EXPERT}", f"rank {TRACE_RANK} again"]
        for index, name in enumerate(names):
            left, right = borders[index], borders[index + 1]
            self.rect(left, 66, right - left, WGRAD_TOP + 72 - 66, "#fbf6ec" if index == 1 else "#f1f5fb", 'rx="8"')
            self.text((left + right) / 2, 88, name, size=14, weight="bold", colour=MUTED)
        for border in borders[1:3]:
            self.line(border, 96, border, WGRAD_TOP + 72, "#9aa3b2", 'stroke-dasharray="5 5" stroke-width="1.5"')

    def _header(self) -> None:
        c, sizes = self.config, self.config.sizes
        self.text(MARGIN, 28, "One token through the MoE layer and back", size=20, weight="bold", anchor="start")
        letters = f"T={c.T} tokens a rank, C={c.C} choices, W={c.W} ranks, E={c.W * c.L} experts, L={c.L} a rank, D={c.D}, H={c.H}"
        self.text(MARGIN, 50, f"{letters}; T'=R={sizes['R']}, P={sizes['P']} rows. Sizes are per rank.", colour=MUTED, anchor="start")

    def _stage(self, index: int) -> None:
        stage, left = self.stages[index], self.lefts[index]
        middle = left + stage.width / 2
        for top, lines in ((FORWARD_TOP, stage.forward), (BACKWARD_TOP, stage.backward)):
            self.rect(left, top, stage.width, BOX_HEIGHT, "#ffffff", f'rx="9" stroke="{stage.colour}" stroke-width="2"')
            self.shapes.append(
                f'<path d="M{left:g} {top + 44:g} v-35 a9 9 0 0 1 9 -9 h{stage.width - 18:g} a9 9 0 0 1 9 9 v35 z" fill="{stage.colour}"/>'
            )
            self.text(middle, top + 19, stage.title, size=13.5, weight="bold", colour="#ffffff")
            self.text(middle, top + 36, stage.function if top == FORWARD_TOP else "backward", size=11.5, colour="#ffffff")
            for number, line in enumerate(lines):
                self.text(middle, top + 70 + 21 * number, line, size=12.5)
        strip = FORWARD_TOP + BOX_HEIGHT
        self.line(middle, strip + 4, middle, strip + 22, stage.colour, 'stroke-dasharray="3 3" stroke-width="1.5"')
        self.line(middle, strip + STRIP - 22, middle, strip + STRIP - 4, stage.colour, 'stroke-dasharray="3 3" stroke-width="1.5"')
        first = strip + STRIP / 2 + (4 if len(stage.saves) == 1 else -4)
        if stage.saves == ("nothing",):
            self.rect(middle - 28, first - 13, 56, 18, "#f6f6f4", 'rx="4"')  # over the border between two ranks
        for number, line in enumerate(stage.saves):
            self.text(middle, first + 16 * number, line, size=12, colour=MUTED)

    def _edge(self, index: int, edge: Edge, forward: bool) -> None:
        left = self.lefts[index] - GAP if index < len(self.stages) else self.lefts[-1] + self.stages[-1].width
        y = (FORWARD_TOP if forward else BACKWARD_TOP) + 82
        label, ink, paper = BADGES[edge.dtype]
        thick = 'stroke-width="3.5"' if edge.dtype == "mxfp8" else 'stroke-width="2.5"'
        start, end = (left + 5, left + GAP - 15) if forward else (left + GAP - 5, left + 15)
        self.line(start, y, end, y, ink, thick)
        tip = end + (10 if forward else -10)
        self.shapes.append(f'<path d="M{tip:g} {y:g} L{end:g} {y - 6:g} L{end:g} {y + 6:g} z" fill="{ink}"/>')
        middle = left + GAP / 2
        if edge.letters[0] == "T" and len(edge.letters) == 2:
            self.text(middle, y - 34, edge.name.replace("d ", "d"), size=14, weight="bold")  # x, y, dx, dy
        self.text(middle, y - 14, "(" + ", ".join(edge.letters) + ")", size=12.5)
        self.rect(middle - 27, y + 10, 54, 19, paper, f'rx="9" stroke="{ink}" stroke-width="1"')
        self.text(middle, y + 24, label, size=12, weight="bold", colour=ink)
        self.text(middle, y + 45, ("2 x " if "each" in edge.name else "") + mebibytes(edge.total_bytes), size=12, colour=MUTED)

    def _weight_gradients(self) -> None:
        c = self.config
        size = mebibytes(c.L * c.H * c.D * HP_BYTES)
        for title, name, shape, from_what in (
            ("gate, up GEMM", "dW1, dW3", "(L, H, D)", "bf16 gradient x MX rows' values"),
            ("down GEMM", "dW2", "(L, D, H)", "MX gradient's values x bf16 h"),
        ):
            middle = self._middle(title)
            self.line(middle, WGRAD_TOP + 2, middle, WGRAD_TOP + 14, "#d1495b", 'stroke-width="2.5"')
            self.shapes.append(f'<path d="M{middle:g} {WGRAD_TOP + 24:g} l-6 -10 h12 z" fill="#d1495b"/>')
            each = " each" if "," in name else ""
            self.text(middle, WGRAD_TOP + 41, f"{name} {shape} bf16, {size}{each}", size=12.5, weight="bold", colour="#a1283b")
            self.text(middle, WGRAD_TOP + 59, f"wgrad: {from_what}", size=12, colour=MUTED)

    def _legend(self) -> None:
        y = WGRAD_TOP + 102
        x: float = MARGIN + 4
        for dtype, what in (("mxfp8", "e4m3 data, one e8m0 scale per 32 values"), ("bf16", "high precision: the tensors' own dtype")):
            label, ink, paper = BADGES[dtype]
            self.rect(x, y - 14, 54, 19, paper, f'rx="9" stroke="{ink}" stroke-width="1"')
            self.text(x + 27, y, label, size=12, weight="bold", colour=ink)
            self.text(x + 64, y, what, size=12.5, colour=MUTED, anchor="start")
            x += 64 + len(what) * 12.5 * CHARACTER + 30
        self.text(x, y, "One colour per autograd function; grey: torch's own operators.", size=12.5, colour=MUTED, anchor="start")
        lines = "Upper row: forward, left to right. Lower row: backward, right to left. Between them: what forward keeps for backward."
        self.text(MARGIN + 4, y + 26, lines, size=12.5, colour=MUTED, anchor="start")

    def svg(self) -> str:
        """The whole document; deterministic."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {HEIGHT:g}" width="{self.width:g}" height="{HEIGHT:g}" '
            "font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\">\n<title>One token through the MoE layer and back</title>\n"
        )
        body = "\n".join(
            [f'<rect width="{self.width:g}" height="{HEIGHT:g}" fill="#ffffff"/>', *self.shapes, *(t.svg() for t in self.texts)]
        )
        return head + body + "\n</svg>\n"


def main() -> None:
    path = Path(__file__).with_name("dataflow.svg")
    path.write_text(Picture(Configuration()).svg())
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
