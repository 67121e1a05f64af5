"""Introduced in notebook 04. Who holds what: the model on its ranks, and the sums between them.

Drawn from the report of a run: its sizes, its bytes, its count of all-reduces.
"""

from collections.abc import Mapping
from typing import Any

from tutorial_engine.parallel.report import ParallelReport
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import Look, chip, look, patch, text_width
from tutorial_engine.viz.scene import Scene
from tutorial_engine.viz.style import INK, PAPER, QUIET, RULE

MOST_RANKS, MOST_HEADS = 8, 64
FIRST_LOOK = 3  # a rank is no request: the first requests' colours are not used
TOP, BAND = 104.0, 104.0  # where the first rank's band begins, and how high each is
EMBEDDING, ATTENTION, SUM_1, MLP, SUM_2, HEAD = 168.0, 296.0, 578.0, 636.0, 822.0, 896.0
WIDE = {"whole": 92.0, "attention": 262.0, "sum": 34.0, "mlp": 166.0}
WHOLE = "#e9edf0"  # what every rank has


def ranks_picture(report: ParallelReport) -> Picture:
    """What each rank holds of a layer and where the ranks are summed, with this run's counts.

    ValueError for more than 8 ranks or 64 heads: they could not be told apart.
    """
    sizes = report.sizes
    heads = sizes["num_attention_heads"]
    if report.tp_size > MOST_RANKS or heads > MOST_HEADS:
        raise ValueError(
            f"{report.tp_size} ranks and {heads} heads are too many to be seen: draw at most "
            f"{MOST_RANKS} and {MOST_HEADS}"
        )
    low = TOP + BAND * report.tp_size
    scene = Scene(1000, low + 92, tip_at=(10, 42))
    ranks = f"{report.tp_size} rank{'s' * (report.tp_size > 1)}"
    scene.text("title", 10, 22, f"One model on {ranks}", 16, font_weight="bold")
    says = "what a rank has of each layer; Σ adds up the parts of all ranks, and all get the sum"
    scene.text("says", 10, 42, says, 11.5, fill=QUIET)
    _frame(scene, sizes, low)
    for rank in range(report.tp_size):
        _band(scene, report, rank, TOP + BAND * rank)
    _sum(scene, report, 1, SUM_1, low, "attention")
    _sum(scene, report, 2, SUM_2, low, "MLP")
    _legend(scene, report, low)
    return scene.picture(_caption(report), zoom=1.0)


def _frame(scene: Scene, sizes: Mapping[str, int], low: float) -> None:
    """What repeats, and the names of the columns."""
    box = (ATTENTION - 12, 54, SUM_2 + WIDE["sum"] + 12 - ATTENTION + 12, low - 54 + 4)
    dashes: dict[str, Any] = {"stroke": QUIET, "stroke_dasharray": "5 3", "rx": 8}
    scene.rect("layer", box, "none", pointer_events="none", **dashes)
    layers = sizes["num_hidden_layers"]
    words = "the one layer" if layers == 1 else f"each of {layers} layers"
    scene.text("layer.name", ATTENTION, 72, words, 12.5, font_weight="bold")
    columns = {
        "embedding": EMBEDDING + WIDE["whole"] / 2,
        "attention: qkv_proj, o_proj": ATTENTION + WIDE["attention"] / 2,
        "MLP: gate_up_proj, down_proj": MLP + WIDE["mlp"] / 2,
        "head": HEAD + WIDE["whole"] / 2,
    }
    for words, x in columns.items():
        scene.text(f"column.{words}", x, TOP - 8, words, 11, fill=QUIET, text_anchor="middle")


def _band(scene: Scene, report: ParallelReport, rank: int, y: float) -> None:
    """One rank: its bytes, its heads, its MLP columns."""
    sizes, one = report.sizes, look(FIRST_LOOK + rank)
    chip(scene, f"rank.{rank}", 10, y + 26, f"rank {rank}", one)
    for i, (number, words) in enumerate(
        ((report.weight_bytes[rank], "weights"), (report.kv_bytes[rank], "K/V pages"))
    ):
        scene.text(f"rank.{rank}.bytes.{i}", 10, y + 52 + 16 * i, f"{_bytes(number)} {words}", 11)
    _whole(scene, f"embedding.{rank}", EMBEDDING, y, sizes["vocab_size"])
    _whole(scene, f"head.{rank}", HEAD, y, sizes["vocab_size"])
    _heads(scene, report, rank, one, y)
    _columns(scene, report, rank, one, y)
    arrows = [
        (EMBEDDING + WIDE["whole"], ATTENTION),
        (ATTENTION + WIDE["attention"], SUM_1),
        (SUM_1 + WIDE["sum"], MLP),
        (MLP + WIDE["mlp"], SUM_2),
        (SUM_2 + WIDE["sum"], HEAD),
    ]
    for i, (start, end) in enumerate(arrows):
        _arrow(scene, f"arrow.{rank}.{i}", start + 2, end - 2, y + 44)


def _whole(scene: Scene, name: str, x: float, y: float, rows: int) -> None:
    scene.rect(name, (x, y + 22, WIDE["whole"], 44), WHOLE, stroke=INK, rx=3)
    middle = x + WIDE["whole"] / 2
    for i, words in enumerate((f"all {rows:,}", "tokens’ rows")):
        scene.text(f"{name}.{i}", middle, y + 41 + 15 * i, words, 11, text_anchor="middle")


def _heads(scene: Scene, report: ParallelReport, rank: int, one: Look, y: float) -> None:
    """All query heads in a row, below them the K/V head that each group reads; own ones filled."""
    rows = (
        ("q", report.sizes["num_attention_heads"], y + 12),
        ("k, v", report.sizes["num_key_value_heads"], y + 44),
    )
    left = ATTENTION + 32
    room = WIDE["attention"] - 32
    for words, count, top in rows:
        scene.text(f"{words}.{rank}", left - 6, top + 18, words, 11.5, text_anchor="end")
        own, wide = count // report.tp_size, room / count
        for head in range(count):
            box = (left + wide * head, top, max(wide - 2, wide * 0.7), 26.0)
            name, mine = f"{words}.{rank}.{head}", head // own == rank
            _cell(scene, name, box, one, mine, str(head), f"{words} head {head}")
    words = f"{rows[0][1] // report.tp_size} of {rows[0][1]} query heads, "
    words += f"{rows[1][1] // report.tp_size} of {rows[1][1]} K/V heads"
    scene.text(
        f"heads.{rank}", left + room / 2, y + 86, words, 11, fill=QUIET, text_anchor="middle"
    )


def _columns(scene: Scene, report: ParallelReport, rank: int, one: Look, y: float) -> None:
    """The MLP's columns as one bar, cut where the ranks are; this rank's part filled."""
    total = report.sizes["intermediate_size"]
    own, wide = total // report.tp_size, WIDE["mlp"] / report.tp_size
    for part in range(report.tp_size):
        box = (MLP + wide * part, y + 26, wide - 2, 36.0)
        tip = f"columns {own * part} .. {own * (part + 1) - 1}"
        _cell(scene, f"mlp.{rank}.{part}", box, one, part == rank, "", tip)
    words = f"{own:,} of {total:,} columns"
    scene.text(
        f"mlp.{rank}", MLP + WIDE["mlp"] / 2, y + 86, words, 11, fill=QUIET, text_anchor="middle"
    )


def _cell(
    scene: Scene,
    name: str,
    box: tuple[float, float, float, float],
    one: Look,
    mine: bool,
    words: str,
    tip: str,
) -> None:
    """A part of the model: in the rank's look if it has it, else an empty place."""
    x, y, wide, high = box
    if not mine:
        scene.rect(name, box, PAPER, f"{tip}: on another rank", stroke=RULE)
        return
    patch(scene, name, box, one, f"{tip}: on this rank")
    if words and text_width("00", 11) + 6 <= wide:
        middle, half = x + wide / 2, text_width(words, 11, True) / 2 + 3
        scene.rect(f"{name}.tag", (middle - half, y + 6, 2 * half, high - 12), PAPER, rx=2)
        scene.text(
            f"{name}.word", middle, y + high / 2 + 4, words, 11, font_weight="bold",
            text_anchor="middle", pointer_events="none",
        )  # fmt: skip


def _sum(
    scene: Scene, report: ParallelReport, number: int, x: float, low: float, after: str
) -> None:
    """An all-reduce: a bar through all ranks, and what went through it in this run."""
    box = (x, TOP + 6, WIDE["sum"], low - TOP - 18)
    calls, num_bytes = (count // 2 for count in report.traffic)
    tip = f"all-reduce after the {after}: the sum of all ranks’ parts goes to every rank"
    scene.rect(f"sum.{number}", box, PAPER, tip, stroke=INK, stroke_width=2.4, rx=6)
    middle = x + WIDE["sum"] / 2
    for rank in range(report.tp_size):
        y = TOP + BAND * rank + 50
        scene.text(f"sum.{number}.{rank}", middle, y, "Σ", 17, text_anchor="middle")
    lines = (f"all-reduce {number}", f"{calls} in this run", f"{num_bytes:,} bytes")
    for i, words in enumerate(lines):
        bold = {"font_weight": "bold"} if i == 0 else {}
        scene.text(
            f"sum.{number}.line.{i}", middle, low + 24 + 16 * i, words, 11.5,
            text_anchor="middle", **bold,
        )  # fmt: skip


def _arrow(scene: Scene, name: str, start: float, end: float, y: float) -> None:
    line = f"M{start:.1f} {y:.1f}H{end - 5:.1f}"
    scene.add(name, "path", d=line, stroke=QUIET, stroke_width=1.4, fill="none")
    head = f"M{end:.1f} {y:.1f}L{end - 7:.1f} {y - 4:.1f}L{end - 7:.1f} {y + 4:.1f}Z"
    scene.add(f"{name}.head", "path", d=head, fill=QUIET)


def _legend(scene: Scene, report: ParallelReport, low: float) -> None:
    one = look(FIRST_LOOK)
    patch(scene, "legend.own", (10, low + 13, 16, 14), one)
    scene.rect("legend.other", (10, low + 35, 16, 14), PAPER, stroke=RULE)
    scene.rect("legend.whole", (10, low + 57, 16, 14), WHOLE, stroke=INK)
    itself = f"on every rank, with the norms: {report.replicated_bytes:,} bytes of weights"
    entries = ("on this rank, in its colour and hatch", "on another rank", itself)
    for i, words in enumerate(entries):
        scene.text(f"legend.{i}", 34, low + 24 + 22 * i, words, 11)


def _bytes(number: int) -> str:
    """As a reader compares them: 3.5 MB, 98 kB."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number} bytes"


def _caption(report: ParallelReport) -> str:
    sizes, n = report.sizes, report.tp_size
    shares = [
        f"{sizes[key] // n:,} of {sizes[key]:,} {words}"
        for key, words in (
            ("num_attention_heads", "query heads"),
            ("num_key_value_heads", "K/V heads"),
            ("intermediate_size", "MLP columns"),
        )
    ]
    return (
        f"Each of {n} ranks has {shares[0]}, {shares[1]} and {shares[2]} of every layer, "
        f"{report.weight_bytes[0]:,} of {report.weight_bytes_alone:,} bytes of weights and "
        f"{report.kv_bytes[0]:,} of {report.kv_bytes_alone:,} of K/V; {report.num_tokens} tokens "
        f"in {report.num_forwards} forwards took {report.traffic.calls} all-reduces (2 a layer "
        f"and forward) of {report.traffic.bytes:,} bytes together, "
        f"{report.reduced_bytes_per_token:,} a token."
    )
