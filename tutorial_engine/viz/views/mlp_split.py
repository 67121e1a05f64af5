"""A small MLP divided among ranks, feature by feature.

Every number is computed from the tensors that are handed in.
"""

from torch import Tensor
from torch.nn import functional

from tutorial_engine.viz.drawing.parts import BOLD, KEY, RIGHT, Sheet
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.request_look import chip, look
from tutorial_engine.viz.views.ranks_picture import FIRST_LOOK, MOST_RANKS
from tutorial_engine.viz.words import counted, listed


def mlp_split(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, num_ranks: int = 2) -> Picture:
    """A small MLP by its inner features, divided among ranks: what each feature adds, and the sums.

    x [hidden], gate and up [I, hidden], down [hidden, I]; every number in the picture is computed
    from them. ValueError where num_ranks does not divide I, or for more than can be seen.
    """
    count, hidden = gate.shape
    if count % num_ranks or count > 8 or hidden > 4 or num_ranks > MOST_RANKS:
        raise ValueError(
            f"{count} inner features of {hidden} numbers on {num_ranks} ranks: give at most 8 of "
            "at most 4, which the ranks can share"
        )
    inner = functional.silu(gate @ x) * (up @ x)
    adds = inner[:, None] * down.T  # what each feature adds to the output
    lefts = {"rank": 10.0, "feature": 110.0, "gate": 190.0, "up": 310.0, "inner": 430.0}
    lefts |= {"down": 640.0, "adds": 790.0}
    heads = {
        "feature": "feature",
        "gate": "row of gate",
        "up": "row of up",
        "inner": "inner = silu(gate·x)·(up·x)",
        "down": "column of down",
        "adds": "inner · column",
    }
    size, row, top = count // num_ranks, 26.0, 92.0
    band = row * size + 40
    scene = Sheet(960, top + band * num_ranks + 60, tip_at=(10, 44))
    scene.heading(f"An MLP of {count} inner features on {counted(num_ranks, 'rank')}", size=16)
    scene.note("says", 10, 44, f"x = {_vector(x)} is on every rank", 12)
    for name, words in heads.items():
        scene.note(f"head.{name}", lefts[name], top - 12, words, KEY)
    for rank in range(num_ranks):
        y, colours = top + band * rank, look(FIRST_LOOK + rank)
        box = (lefts["feature"] - 10, y - 2, 960 - lefts["feature"], band - 8)
        scene.rect(f"band.{rank}", box, colours.light, stroke=colours.colour, rx=6)
        chip(scene, f"rank.{rank}", lefts["rank"], y + band / 2 - 6, f"rank {rank}", colours)
        for i in range(rank * size, (rank + 1) * size):
            line = y + 18 + row * (i - rank * size)
            entries = {"feature": str(i), "gate": _vector(gate[i]), "up": _vector(up[i])}
            entries |= {"inner": _vector(inner[i : i + 1])[1:-1], "down": _vector(down[:, i])}
            entries |= {"adds": _vector(adds[i])}
            for name, words in entries.items():
                scene.text(f"{name}.{i}", lefts[name], line, words, 12.5)
        line, partial = y + 18 + row * size, adds[rank * size : (rank + 1) * size].sum(0)
        scene.text(f"part.{rank}", lefts["adds"], line, f"Σ {_vector(partial)}", 12.5, **BOLD)
        words = f"partial sum of rank {rank}:"
        scene.text(f"part.{rank}.what", lefts["adds"] - 12, line, words, 12.5, **RIGHT)
    low, total = top + band * num_ranks + 18, adds.sum(0)
    words = "all-reduce, the sum of the partial sums = the whole MLP:"
    scene.text("all.what", lefts["adds"] - 12, low, words, 12.5, **RIGHT)
    scene.text("all", lefts["adds"], low, f"Σ {_vector(total)}", 12.5, **BOLD)
    parts = listed([_vector(shard.sum(0)) for shard in adds.split(size)])
    return scene.picture(f"The ranks’ partial sums {parts} add up to {_vector(total)}.", zoom=1.0)


def _vector(values: Tensor) -> str:
    """(1, −2) or (0.73, 3.52): whole numbers as they are, others with two digits."""
    said = [f"{v:.0f}" if v.is_integer() else f"{v:.2f}" for v in (values + 0.0).tolist()]
    return f"({', '.join(said)})".replace("-", "−")
