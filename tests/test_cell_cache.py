"""Cells under tensors, by hand: shared, cut, shifted, copied."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engines import poison, random_model
from torch import Tensor

from tutorial_engine.cache.cell_table import CellTable
from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import prefill
from tutorial_engine.learn.stories.bugs import Zoo, edited, planted
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.rope import RotaryEmbedding, apply_rope

MODEL = random_model(seed=1)
ONE_LAYER = random_model(seed=1, num_hidden_layers=1)


def prefilled() -> tuple[CellKVCache, Request]:
    """Cells, and a request "A" with eight tokens in the first of them."""
    cache, one = poison(CellKVCache.from_config(MODEL.config, 64)), Request("A", range(8))
    prefill(MODEL, cache, [one])
    return cache, one


# -- a sequence that was changed by hand, or shared -----------------------------------------------


@pytest.mark.parametrize(
    ("change", "computed"),
    [
        (lambda cache: cache.seq_rm("A", 6, -1), 8),  # cut, and not told
        (lambda cache: cache.seq_rm("A"), 8),
        (lambda cache: cache.seq_add("A", 0, -1, -2), 8),  # moved, and not told
        (lambda cache: cache.seq_add("A", 4, -1, 2), 8),
        (lambda cache: cache.seq_cp("A", "B"), 5),  # to be run again, and shared
        (lambda cache: cache.seq_rm("A", 5, 6), 4),  # to be run again, and not all there
    ],
)
def test_what_the_table_does_not_hold_is_refused_with_the_numbers(
    change: Any, computed: int
) -> None:
    cache, one = prefilled()
    change(cache)
    one.token_ids.append(3)
    one.num_computed_tokens = computed
    before = repr(cache.table)
    num_cells, end = len(cache.table.cells_of("A")), cache.table.next_pos("A")
    says = f"A says that {computed} tokens .* {num_cells} cells.* next position is {end}:"
    with pytest.raises(ValueError, match=says):
        prefill(MODEL, cache, [one])
    assert repr(cache.table) == before


def test_an_own_copy_has_what_was_shared_in_every_layer_and_a_shared_one_is_no_copy() -> None:
    cache, _ = prefilled()
    before = [x.nan_to_num() for x in (cache.storage.k, cache.storage.v)]
    assert len(cache.seq_cp("A", "B")) == 8 == cache.table.num_used
    for x, old in zip((cache.storage.k, cache.storage.v), before, strict=True):
        assert torch.equal(x.nan_to_num(), old)
    pairs = cache.seq_unshare("B", 4, -1)
    assert [old for old, _ in pairs] == [4, 5, 6, 7] and cache.table.num_used == 12
    for old, new in pairs:
        for x in (cache.storage.k, cache.storage.v):
            assert torch.equal(x[:, old], x[:, new]) and x[:, old].isfinite().all()


# -- K-shift --------------------------------------------------------------------------------------

SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, k_head_dim=16, v_head_dim=6)


def check_shift(slots_first: bool, adds: Sequence[int] = (-3, 5), at: int = 40) -> float:
    """Shift a sequence among holes and another's tokens; K must be that of the new positions.

    Returns the largest error, on keys of which no number is above 1.
    """
    storage = KVStorage(SPEC, 30, slots_first=slots_first)
    rope = RotaryEmbedding(16, 10_000.0)
    cache = poison(CellKVCache(storage, rope))
    for cell in range(1, 30, 3):  # somebody has every third
        cache.table.place([cell], "holes", [cell])
    raw = torch.rand(SPEC.num_layers, 12, 2, 16) * 2 - 1
    v = torch.randn(SPEC.num_layers, 12, 2, 6)
    cells = cache.table.find_slot(12)
    assert cells is not None
    positions = torch.cat((torch.arange(4), at + torch.arange(8)))
    slots = torch.tensor(cells)
    for layer in range(SPEC.num_layers):
        storage.write_slots(layer, slots, apply_rope(raw[layer], *rope(positions)), v[layer])
    cache.table.place(cells, "A", positions.tolist())
    before = [x.clone() for x in storage.read_slots(0, slots)]
    for delta in adds:
        cache.seq_add("A", int(positions[4:].min()), -1, delta)
        positions[4:] += delta
    assert torch.equal(storage.read_slots(0, slots)[0], before[0]), (
        "nothing before the next forward"
    )
    cache.apply_shifts()
    assert cache.apply_shifts() == 0 and not cache.table.has_shifts
    cache.check_integrity()
    worst = 0.0
    for layer in range(SPEC.num_layers):
        got_k, got_v = storage.read_slots(layer, slots)
        assert torch.equal(got_v, v[layer]), f"V of layer {layer} changed"
        want = apply_rope(raw[layer], *rope(positions))
        assert torch.equal(got_k[:4], want[:4]), f"layer {layer}: what was not moved changed"
        worst = max(worst, float((got_k - want).abs().max()))
        rest = [c for c in range(30) if c not in cells]
        k, other = storage.read_slots(layer, torch.tensor(rest))
        assert k.isnan().all() and other.isnan().all(), "a cell of another sequence was written"
    assert worst <= bound(int(positions.max())), f"K is off by {worst}"
    return worst


def bound(position: int) -> float:
    """An fp32 angle is rounded like the position itself, so the error grows with it."""
    return 2e-6 + 5e-8 * position


@pytest.mark.parametrize("slots_first", [False, True])
@pytest.mark.parametrize("adds", [(-3,), (-3, 5), (4, 4, -20, 1), (9,)])
def test_a_shift_turns_the_keys_of_every_layer_and_leaves_the_values(
    slots_first: bool, adds: tuple[int, ...]
) -> None:
    check_shift(slots_first, adds)


def test_error_of_a_shift_grows_with_the_position() -> None:
    errors = [check_shift(False, (-at // 2,), at) for at in (100, 1000, 4000, 32_000)]
    assert errors[0] < 2e-5 and errors[-1] > 10 * errors[0], errors


# -- any operations, one after the other ----------------------------------------------------------


class Tokens:
    """The obvious twin: each sequence is a list of (position, token, number of the cell's like)."""

    def __init__(self) -> None:
        self.cells: dict[str, list[tuple[int, int, int]]] = {s: [] for s in "ABC"}
        self.made = 0

    def new(self, pos: int, token: int) -> tuple[int, int, int]:
        self.made += 1
        return pos, token, self.made

    def within(self, seq: str, p0: int, p1: int) -> list[tuple[int, int, int]]:
        return [e for e in self.cells[seq] if p0 <= e[0] and (p1 < 0 or e[0] < p1)]

    def shared(self, seq: str, p0: int, p1: int) -> list[tuple[int, int, int]]:
        others = {e for s, own in self.cells.items() if s != seq for e in own}
        return [e for e in self.within(seq, p0, p1) if e in others]

    def logits(self, seq: str) -> Tensor:
        """Of the last token, by a fresh run with these positions."""
        own = sorted(self.cells[seq])
        batch = Batch(
            torch.tensor([token for _, token, _ in own]),
            torch.tensor([pos for pos, _, _ in own]),
            (0, len(own)),
        )
        with torch.inference_mode():
            return ONE_LAYER.compute_logits(ONE_LAYER(batch)[-1:])


@pytest.mark.parametrize("number", range(6))
def test_after_any_operations_one_layer_gives_the_logits_of_a_fresh_run(number: int) -> None:
    draw, twin, done = random.Random(number), Tokens(), Counter[str]()
    cache = poison(CellKVCache.from_config(ONE_LAYER.config, 40))
    for _ in range(120):
        seq, other = draw.sample("ABC", 2)
        p0, p1 = draw.randint(0, 12), draw.choice([-1, draw.randint(1, 30)])
        own = twin.cells[seq]
        name = draw.choice(["run", "run", "run", "rm", "cp", "add", "add", "unshare", "keep"])
        done[name] += 1
        match name:
            case "run":
                tokens = [draw.randrange(97) for _ in range(draw.choice([1, 1, 3]))]
                if cache.table.num_free < len(tokens):
                    cache.free(seq)
                    own.clear()
                if cache.table.num_free < len(tokens):
                    continue
                first = max((pos for pos, _, _ in own), default=-1) + 1
                own += [twin.new(first + i, token) for i, token in enumerate(tokens)]
                one = Request(seq, [0] * first + tokens)  # what is computed is not looked at
                one.num_computed_tokens = first
                got, want = prefill(ONE_LAYER, cache, [one]), twin.logits(seq)
                atol = 2e-5 * max(1.0, float(want.abs().max()))
                torch.testing.assert_close(got, want, atol=atol, rtol=0)
            case "rm":
                cache.seq_rm(seq, p0, p1)
                twin.cells[seq] = [e for e in own if e not in twin.within(seq, p0, p1)]
            case "cp":
                cache.seq_cp(seq, other, p0, p1)
                there = twin.cells[other]
                there += [e for e in twin.within(seq, p0, p1) if e not in there]
            case "add":
                moved, delta = twin.within(seq, p0, p1), draw.randint(-9, 9)
                if twin.shared(seq, p0, p1):
                    done["refused"] += 1
                    with pytest.raises(ValueError, match="Copy first"):
                        cache.seq_add(seq, p0, p1, delta)
                    continue
                cache.seq_add(seq, p0, p1, delta)
                kept = [e for e in own if e not in moved]
                shifted = [twin.new(pos + delta, token) for pos, token, _ in moved]
                twin.cells[seq] = kept + [e for e in shifted if e[0] >= 0]
            case "unshare":
                old = twin.shared(seq, p0, p1)
                if cache.table.num_free >= len(old):
                    cache.seq_unshare(seq, p0, p1)
                    copies = [twin.new(pos, token) for pos, token, _ in old]
                    twin.cells[seq] = [e for e in own if e not in old] + copies
            case "keep" if draw.random() < 0.2:
                cache.seq_keep(seq)
                twin.cells = {s: own if s == seq else [] for s, own in twin.cells.items()}
        cache.check_integrity()
        for s, entries in twin.cells.items():
            positions = [cache.table[cell].pos for cell in cache.table.cells_of(s)]
            assert positions == sorted(pos for pos, _, _ in entries), (name, s)
    assert min(done[name] for name in ("run", "rm", "cp", "add", "unshare")) >= 5, done


# -- planted bugs in the shift --------------------------------------------------------------------

BUGS: Zoo = {
    "the other sign": edited(CellTable, "take_shifts", ("].shift for", "].shift * -1 for")),
    "never cleared": edited(CellTable, "take_shifts", ("_replace(shift=0)", "_replace()")),
    "only the last add counts": edited(CellTable, "seq_add", ("shift + delta))", "delta))")),
    "in the first layer only": edited(
        CellKVCache, "apply_shifts", ("in self.storage.k:", "in self.storage.k[:1]:")
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_in_the_shift_is_caught(name: str) -> None:
    with planted(name, BUGS), pytest.raises(AssertionError):
        check_shift(False)
