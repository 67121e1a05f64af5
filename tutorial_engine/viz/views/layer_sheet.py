"""One decoder layer as a dataflow: the residual stream and two branches.

Draws the shapes that a walk through the model recorded; computes nothing.
"""

from collections.abc import Mapping, Sequence

from tutorial_engine.model.config import ModelConfig
from tutorial_engine.viz.drawing.parts import BOLD, CENTRE, Sheet
from tutorial_engine.viz.drawing.request_look import Box, tint
from tutorial_engine.viz.drawing.style import BLUE, GREEN, INK, ORANGE, PAPER, QUIET, RULE

WIDE, TALL = 960.0, 640.0
STREAM = 96.0  # x of the residual stream
NORM, MATRIX, INNER, MIX = 184.0, 336.0, 490.0, 684.0  # left edges of the four columns of boxes
WIDTHS = {NORM: 72.0, MATRIX: 64.0, INNER: 100.0, MIX: 84.0}
NOTES = 784.0  # x of the sentences at the right
ROWS_QKV, BACK_ATTENTION = (166.0, 211.0, 256.0), 318.0  # heights of q, k, v, and of the way back
ROWS_MLP, BACK_MLP = (390.0, 435.0), 494.0
FRAME = (14.0, 128.0, 932.0, 402.0)
END = 606.0  # height of what follows the layers
GREY = "#eef1f3"
FILLS = {"attention": tint(BLUE, 0.2), "mlp": tint(ORANGE, 0.25)}  # of what is learned
SIZE = 11.5  # letters of shapes
Point = tuple[float, float]


class LayerSheet(Sheet):
    """The picture; `shapes` has the recorded shape of each tensor, by name."""

    def __init__(self, config: ModelConfig, shapes: Mapping[str, str]) -> None:
        super().__init__(WIDE, TALL)
        self.config, self.shapes = config, shapes
        self.heading("One decoder layer, with the shape of every tensor", "T = number of tokens")
        self.stream()
        self.attention()
        self.mlp()
        self.end()

    # -- pieces -------------------------------------------------------------------------------

    def box(self, name: str, place: Box, words: str | Sequence[str], fill: str) -> None:
        """An operation; its words stand in the middle, one below the other."""
        self.rect(name, place, fill, rx=5, stroke=QUIET)
        lines = [words] if isinstance(words, str) else list(words)
        x, y, w, h = place
        for i, line in enumerate(lines):
            above = y + h / 2 + 15 * (i - (len(lines) - 1) / 2)
            self.inside(f"{name}.{i}", (x, above - 8, w, 16), line, 12, **(BOLD if not i else {}))

    def column(self, name: str, left: float, y: float, words: str, fill: str) -> None:
        """A box of one of the columns, its middle at height y."""
        self.box(name, (left, y - 15, WIDTHS[left], 30), words, fill)

    def flow(self, name: str, points: Sequence[Point], label: str, at: Point | None = None) -> None:
        """An arrow with what runs along it; the words stand above the middle of its last part."""
        self.arrow(name, points, INK, 1.5)
        (x0, _), (x, y) = points[-2:]
        x, y = at or ((x0 + x) / 2, y - 6)
        self.text(f"{name}.shape", x, y, label, SIZE, **CENTRE)

    def plus(self, name: str, y: float) -> None:
        """Where a branch is added to the stream."""
        self.add(f"{name}.ring", "circle", cx=STREAM, cy=y, r=12, fill=PAPER, stroke=INK)
        self.inside(name, (STREAM - 12, y - 12, 24, 24), "+", 17, **BOLD)
        self.text(f"{name}.shape", STREAM + 12, y + 30, self.shapes["stream"], SIZE)

    def sentences(self, name: str, x: float, y: float, lines: Sequence[str]) -> None:
        """What a branch does: a title and sentences below."""
        for i, line in enumerate(lines):
            if i == 0:
                self.text(f"{name}.0", x, y, line, 13, **BOLD)
            else:
                self.note(f"{name}.{i}", x, y + 4 + 15 * i, line, 11.5)

    # -- the picture --------------------------------------------------------------------------

    def stream(self) -> None:
        """The ids, their vectors, and the straight line that all branches read and add to."""
        layers = self.config.num_hidden_layers
        x, y, w, h = FRAME
        for i in range(min(2, layers - 1), 0, -1):  # the other layers, behind this one
            self.rect(f"behind{i}", (x + 6 * i, y + 6 * i, w, h), PAPER, rx=8, stroke=RULE)
        self.rect("frame", FRAME, "#fafbfc", rx=8, stroke=QUIET)
        self.text("ids", STREAM, 52, f"token ids {self.shapes['ids']}", SIZE, **CENTRE)
        self.arrow("embed", [(STREAM, 57), (STREAM, 72)], INK, 1.5)
        self.box("embedding", (STREAM - 70, 72, 140, 28), "embedding table", GREY)
        line: list[Point] = [(STREAM, 100), (STREAM, END - 16)]
        self.arrow("stream", line, GREEN, 5)
        self.text("stream.shape", STREAM + 12, 119, self.shapes["stream"], SIZE)
        for i, word in enumerate(("residual", "stream")):
            style = {**CENTRE, **BOLD, "fill": GREEN}
            self.text(f"stream.name{i}", STREAM - 42, 372 + 15 * i, word, 12.5, **style)

    def branch(self, name: str, y: float, rows: Sequence[float], words: Sequence[str]) -> None:
        """From the stream through a norm into the learned matrices of that branch."""
        shape = self.shapes[f"{name}.norm"]
        self.add(f"{name}.from", "circle", cx=STREAM, cy=y, r=4.5, fill=GREEN)
        self.flow(f"{name}.in", [(STREAM + 4, y), (NORM, y)], self.shapes["stream"])
        self.column(f"{name}.norm", NORM, y, "RMSNorm", GREY)
        right = NORM + WIDTHS[NORM]
        for row, matrix in zip(rows, words, strict=True):
            bus = [(right, y), (right + 12, y), (right + 12, row)] if row != y else [(right, y)]
            self.flow(f"{name}.to.{matrix}", [*bus, (MATRIX, row)], shape, (right + 48, row - 6))
            self.column(f"{name}.{matrix}", MATRIX, row, matrix, FILLS[name])

    def way_back(self, name: str, points: Sequence[Point], matrix: str, joined: str) -> None:
        """From the end of a branch through a last matrix back to the stream."""
        y = points[-1][1]
        self.flow(f"{name}.back", points, joined)
        self.column(f"{name}.{matrix}", MATRIX, y, matrix, FILLS[name])
        self.flow(f"{name}.out", [(MATRIX, y), (STREAM + 13, y)], self.shapes[f"{name}.out"])
        self.plus(f"{name}.plus", y)

    def attention(self) -> None:
        """Norm, q, k and v, their norms and RoPE, attention, and W_o."""
        config, left = self.config, MATRIX + WIDTHS[MATRIX]
        q, k, v = ROWS_QKV
        self.branch("attention", k, ROWS_QKV, ("W_q", "W_k", "W_v"))
        inner = INNER + WIDTHS[INNER]
        for name, y in (("q", q), ("k", k)):
            self.flow(f"{name}.raw", [(left, y), (INNER, y)], f"{name} {self.shapes[name]}")
            self.column(f"{name}.norm", INNER, y, f"{name}_norm, RoPE", GREY)
            self.flow(f"{name}.turned", [(inner, y), (MIX, y)], self.shapes[f"{name}.turned"])
        self.flow(
            "v.raw", [(left, v), (MIX, v)], f"v {self.shapes['v']}", ((left + INNER) / 2, v - 6)
        )
        mix = (MIX, q - 22, WIDTHS[MIX], v - q + 44)
        self.box("attend", mix, ("attention", "with", "causal mask"), FILLS["attention"])
        middle = MIX + WIDTHS[MIX] / 2
        down = [(middle, v + 22), (middle, BACK_ATTENTION), (left, BACK_ATTENTION)]
        joined = f"{self.shapes['mixed']}, heads joined: {self.shapes['joined']}"
        self.way_back("attention", down, "W_o", joined)
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        words = (
            "Attention",
            "alone lets a token",
            "read other tokens.",
            f"Query heads: {heads}",
            f"K/V heads: {groups}",
            f"Numbers per head: {config.head_dim}",
        )
        self.sentences("attention.words", NOTES, q - 12, words)

    def mlp(self) -> None:
        """Norm, gate and up, their product, and W_down."""
        gate, up = ROWS_MLP
        left, inner = MATRIX + WIDTHS[MATRIX], INNER + WIDTHS[INNER]
        self.branch("mlp", (gate + up) / 2, ROWS_MLP, ("W_gate", "W_up"))
        for name, y in (("gate", gate), ("up", up)):
            self.flow(f"{name}.raw", [(left, y), (INNER, y)], f"{name} {self.shapes['mlp.half']}")
        box = (INNER, gate - 20, inner - INNER, up - gate + 40)
        self.box("gated", box, ("SiLU(gate)", "times up"), FILLS["mlp"])
        middle = (INNER + inner) / 2
        down = [(middle, up + 20), (middle, BACK_MLP), (left, BACK_MLP)]
        self.way_back("mlp", down, "W_down", self.shapes["mlp.product"])
        words = ("MLP (SwiGLU)", "works on each token alone: no token sees another here.")
        self.sentences("mlp.words", inner + 20, gate + 10, words)

    def end(self) -> None:
        """The other layers, the last norm, and the logits."""
        others, (_, top, _, tall) = self.config.num_hidden_layers - 1, FRAME
        if others:
            more = f"the next {others} layers are built the same and have their own weights"
            more = more if others > 1 else "the next layer is built the same with its own weights"
            self.note("more", STREAM + 12, top + tall + 34, more, 12)
        self.box("norm", (STREAM - 36, END - 15, 72, 30), "RMSNorm", GREY)
        self.flow(
            "norm.out", [(STREAM + 36, END), (MATRIX, END)], f"last token {self.shapes['last']}"
        )
        self.box("head", (MATRIX, END - 15, 90, 30), "lm_head", GREY)
        logits = f"logits {self.shapes['logits']}"
        self.flow("logits", [(MATRIX + 90, END), (INNER + 90, END)], logits)
        words = "one number for each token of the vocabulary"
        self.note("logits.words", INNER + 100, END + 4, words, 12)
