"""Who holds what: the model on its ranks, and the sums between them.

Drawn from the report of a run: its sizes, its bytes, its count of all-reduces.
"""

from itertools import pairwise

from tutorial_engine.parallel.report import ParallelReport
from tutorial_engine.viz.drawing.letters import text_width
from tutorial_engine.viz.drawing.parts import BOLD, CENTRE, DEAF, KEY, RIGHT, Sheet, Style
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import Box, Look, chip, look, patch
from tutorial_engine.viz.drawing.style import INK, PAPER, QUIET, RULE
from tutorial_engine.viz.words import counted, si

MOST_RANKS, MOST_HEADS = 8, 64
FIRST_LOOK = 3  # a rank is no request: the first requests' colours are not used
TOP, BAND = 104.0, 104.0  # where the first rank's band begins, and how high each is
WHOLE = "#e9edf0"  # what every rank has
# left edge, width, what is written above; a band's arrows go from one column to the next
COLUMNS = {
    "embedding": (156.0, 110.0, "embedding"),
    "attention": (296.0, 262.0, "attention: qkv_proj, o_proj"),
    "sum.1": (578.0, 34.0, ""),
    "mlp": (636.0, 166.0, "MLP: gate_up_proj, down_proj"),
    "sum.2": (822.0, 34.0, ""),
    "head": (884.0, 110.0, "LM head"),
}


def ranks_picture(report: ParallelReport) -> Picture:
    """What each rank holds of a layer and where the ranks are summed, with this run's counts.

    ValueError for more than 8 ranks or 64 heads: they could not be told apart.
    """
    heads = report.sizes["num_attention_heads"]
    if report.tp_size > MOST_RANKS or heads > MOST_HEADS:
        raise ValueError(
            f"{report.tp_size} ranks and {heads} heads are too many to be seen: draw at most "
            f"{MOST_RANKS} and {MOST_HEADS}"
        )
    low = TOP + BAND * report.tp_size
    scene = Sheet(1000, low + 92, tip_at=(10, 42))
    scene.heading(f"One model on {counted(report.tp_size, 'rank')}", size=16)
    says = "what a rank has of each layer; Σ adds up the partial sums, and all ranks get the sum"
    scene.note("says", 10, 42, says, 11.5)
    left, right = COLUMNS["attention"][0] - 12, sum(COLUMNS["sum.2"][:2]) + 12
    dashes: Style = {"stroke": QUIET, "stroke_dasharray": "5 3", "rx": 8}
    scene.rect("layer", (left, 54, right - left, low - 50), "none", **dashes, **DEAF)
    layers = report.sizes["num_hidden_layers"]
    words = "the one layer" if layers == 1 else f"each of {layers} layers"
    scene.text("layer.name", left + 12, 72, words, 12.5, **BOLD)
    for x, wide, words in COLUMNS.values():
        scene.note(f"column.{x}", x + wide / 2, TOP - 8, words, KEY, **CENTRE)
    for rank in range(report.tp_size):
        _band(scene, report, rank, TOP + BAND * rank)
    _sum(scene, report, "sum.1", low, "attention")
    _sum(scene, report, "sum.2", low, "MLP")
    patch(scene, "legend.own", (10, low + 13, 16, 14), look(FIRST_LOOK))
    scene.rect("legend.other", (10, low + 35, 16, 14), PAPER, stroke=RULE)
    scene.rect("legend.whole", (10, low + 57, 16, 14), WHOLE, stroke=INK)
    whole = f"on every rank, with the norms: {report.replicated_bytes:,} bytes of weights"
    for i, words in enumerate(("on this rank, in its colour and hatch", "on another rank", whole)):
        scene.text(f"legend.{i}", 34, low + 24 + 22 * i, words, KEY)
    return scene.picture(_caption(report), zoom=1.0)


def _band(scene: Sheet, report: ParallelReport, rank: int, y: float) -> None:
    """One rank: its bytes, its heads, its inner features."""
    sizes, size, colours = report.sizes, report.tp_size, look(FIRST_LOOK + rank)
    chip(scene, f"rank.{rank}", 10, y + 26, f"rank {rank}", colours)
    for i, (number, what) in enumerate(
        ((report.weight_bytes[rank], "weights"), (report.kv_bytes[rank], "K/V pages"))
    ):
        words = f"{si(number)}B {what}"
        scene.text(f"rank.{rank}.bytes.{i}", 10, y + 52 + 16 * i, words, KEY)
    for name in ("embedding", "head"):
        x, wide, _ = COLUMNS[name]
        scene.rect(f"{name}.{rank}", (x, y + 22, wide, 44), WHOLE, stroke=INK, rx=3)
        said = (f"all {sizes['vocab_size']:,}", "vocabulary rows")
        if name == "head" and sizes.get("tie_word_embeddings"):
            said = ("the same matrix", "once more")
        for i, words in enumerate(said):
            place = (x + wide / 2, y + 41 + 15 * i)
            scene.text(f"{name}.{rank}.{i}", *place, words, KEY, **CENTRE)
    _heads(scene, report, rank, colours, y)
    x, wide, _ = COLUMNS["mlp"]
    total = sizes["intermediate_size"]
    width = total // size
    for shard in range(size):
        box = (x + wide / size * shard, y + 26, wide / size - 2, 36.0)
        tip = f"features {width * shard} .. {width * (shard + 1) - 1}"
        _part(scene, f"mlp.{rank}.{shard}", box, colours, shard == rank, tip)
    words = f"{width:,} of {total:,} inner features"
    scene.note(f"mlp.{rank}", x + wide / 2, y + 86, words, KEY, **CENTRE)
    for i, ((x, wide, _), (end, *_)) in enumerate(pairwise(COLUMNS.values())):
        scene.arrow(f"arrow.{rank}.{i}", [(x + wide + 2, y + 44), (end - 2, y + 44)], QUIET, 1.8)


def _heads(scene: Sheet, report: ParallelReport, rank: int, look: Look, y: float) -> None:
    """All query heads in a row, below them the K/V head that each group reads; own ones filled."""
    x, wide, _ = COLUMNS["attention"]
    facts = []
    for name, what, key, top in (
        ("q", "query", "num_attention_heads", y + 12),
        ("k, v", "K/V", "num_key_value_heads", y + 44),  # below the query heads that read it
    ):
        count = report.sizes[key]
        scene.text(f"{name}.{rank}", x + 26, top + 18, name, 11.5, **RIGHT)
        each = (wide - 32) / count
        for head in range(count):
            box = (x + 32 + each * head, top, max(each - 2, each * 0.7), 26.0)
            mine = head // (count // report.tp_size) == rank
            _part(scene, f"{name}.{rank}.{head}", box, look, mine, f"{name} head {head}", str(head))
        facts.append(f"{count // report.tp_size} of {count} {what} heads")
    place = (x + (wide + 32) / 2, y + 86)
    scene.note(f"heads.{rank}", *place, ", ".join(facts), KEY, **CENTRE)


def _part(
    scene: Sheet, name: str, box: Box, look: Look, mine: bool, tip: str, words: str = ""
) -> None:
    """A part of the model: in the rank's look if it has it, else an empty place."""
    if not mine:
        scene.rect(name, box, PAPER, f"{tip}: on another rank", stroke=RULE)
        return
    patch(scene, name, box, look, f"{tip}: on this rank")
    x, y, wide, high = box
    if words and text_width("00", KEY) + 6 <= wide:
        half = text_width(words, KEY, True) / 2 + 3
        tag = (x + wide / 2 - half, y + 6, 2 * half, high - 12)
        scene.rect(f"{name}.tag", tag, PAPER, rx=2)
        scene.inside(f"{name}.word", box, words, KEY, **BOLD)


def _sum(scene: Sheet, report: ParallelReport, name: str, low: float, after: str) -> None:
    """An all-reduce: a bar through all ranks, and what went through it in this run."""
    x, wide, _ = COLUMNS[name]
    calls, num_bytes = (count // 2 for count in report.traffic)
    tip = f"all-reduce after the {after}: the sum of all ranks’ partial sums goes to every rank"
    box = (x, TOP + 6, wide, low - TOP - 18)
    scene.rect(name, box, PAPER, tip, stroke=INK, stroke_width=2.4, rx=6)
    for rank in range(report.tp_size):
        y = TOP + BAND * rank + 50
        scene.text(f"{name}.{rank}", x + wide / 2, y, "Σ", 17, **CENTRE)
    lines = (f"all-reduce {name[-1]}", f"{calls} in this run", f"{num_bytes:,} bytes")
    for i, words in enumerate(lines):
        style = CENTRE if i else CENTRE | BOLD
        scene.text(f"{name}.line.{i}", x + wide / 2, low + 24 + 16 * i, words, 11.5, **style)


def _caption(report: ParallelReport) -> str:
    sizes, n = report.sizes, report.tp_size
    heads, kv_heads, features = (
        f"{sizes[key] // n:,} of {sizes[key]:,}"
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    return (
        f"Each of {n} ranks has {heads} query heads, {kv_heads} K/V heads and {features} inner "
        f"features of every layer. The {report.traffic.calls} all-reduces of this run added up "
        f"{report.traffic.bytes:,} bytes on each rank."
    )
