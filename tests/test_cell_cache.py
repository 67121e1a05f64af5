"""Cells under tensors: by hand (shared, shifted, copied) and as the engine's memory."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engines import one_thread, random_model
from torch import Tensor
from workloads import (
    LIMITS,
    POLICIES,
    POOL_SIZE,
    Differs,
    Party,
    Workload,
    alone,
    pool,
    several,
    small_model,
    the_tokenizer,
)

from tutorial_engine.cache.cells import CellKVCache, CellSequences, CellTable
from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.memory import KVCacheManager
from tutorial_engine.cache.rows import Allocation, TokenCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import CachedRunner, decode, forward, prefill
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.model.rope import RotaryEmbedding, apply_rope
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import Sampler
from tutorial_engine.sampling.stopping import StopChecker
from tutorial_engine.trace.events import Preempted, Recorder
from tutorial_engine.trace.events import EngineState

LAYOUTS = pytest.mark.parametrize("slots_first", [False, True], ids=["heads first", "slots first"])
MODEL = random_model(seed=1)
ONE_LAYER = random_model(seed=1, num_hidden_layers=1)
PROMPT = [(7 * i + i * i) % 97 for i in range(24)]


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with one_thread():
        yield


def poison(storage: KVStorage) -> None:
    storage.k.fill_(float("nan"))
    storage.v.fill_(float("nan"))


def sequences(
    num_cells: int = 64, slots_first: bool = False, model: Qwen3ForCausalLM = MODEL
) -> CellSequences:
    made = CellSequences.from_config(model.config, num_cells, slots_first=slots_first)
    poison(made.storage)
    return made


def with_holes(cache: CellSequences) -> CellSequences:
    """Somebody has every third cell, so that no five neighbours are empty."""
    table = cache.table
    for cell in range(1, table.num_cells, 3):
        table.place([cell], 9, [cell])
    return cache


def close(got: Tensor, want: Tensor, atol: float = 1e-5) -> None:
    """Logits to 1e-5, of the largest one."""
    torch.testing.assert_close(got, want, atol=atol * max(1.0, float(want.abs().max())), rtol=0)


def fresh_logits(model: Qwen3ForCausalLM, tokens: Sequence[int]) -> Tensor:
    """Of the last token, without any cache."""
    with torch.inference_mode():
        hidden = model(Batch.from_sequences([tokens]))
        return model.compute_logits(hidden[-1:])


# -- by hand: what StaticKVCache does, in any cell -------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_prefill_and_decode_on_cells_give_the_logits_of_no_cache(
    slots_first: bool, holes: bool, chunk_size: int | None
) -> None:
    cache = sequences(64, slots_first)
    if holes:
        with_holes(cache)
    texts = [PROMPT[:9], PROMPT[5:8], PROMPT[10:17]]
    got = prefill(MODEL, cache, texts, chunk_size=chunk_size)
    cache.check_integrity()
    for step in range(5):
        for row, text in zip(got, texts, strict=True):
            close(row[None], fresh_logits(MODEL, text))
        texts = [[*text, 3 * step + i] for i, text in enumerate(texts)]
        got = decode(MODEL, cache, [text[-1] for text in texts])
        cache.check_integrity()
    assert cache.seq_lens[:3] == (14, 8, 12)


def test_it_is_a_token_cache() -> None:
    cache: TokenCache = sequences(40)
    assert cache.max_len == 40 and cache.seq_lens == ()
    outputs = generate(CachedRunner(MODEL, cache), [[3, 4, 5], [6]], SamplingParams(max_tokens=8))
    want = generate(MODEL, [[3, 4, 5], [6]], SamplingParams(max_tokens=8))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in want]


def test_asking_for_a_batch_takes_nothing_and_writes_nothing() -> None:
    cache = with_holes(sequences(30))
    prefill(MODEL, cache, [PROMPT[:4]])
    shelf, book = cache.storage.k.clone(), repr(cache.table)
    first = cache.batch([[1, 2], [3]])
    again = cache.batch([[1, 2], [3]])
    assert repr(cache.table) == book and torch.equal(first.slot_mapping, again.slot_mapping)  # type: ignore[arg-type]
    assert torch.equal(cache.storage.k.nan_to_num(), shelf.nan_to_num())
    assert first.positions.tolist() == [4, 5, 0]


def test_same_cell_in_every_layer_with_other_contents() -> None:
    """One table, L pairs of tensors; the position is not the cell."""
    cache = sequences(5)
    prefill(MODEL, cache, [PROMPT[:3]])
    cache.table.place([3], 0, [4])  # as if two tokens in between had gone
    cache.seq_rm(0, 4, -1)
    decode(MODEL, cache, [PROMPT[5]])
    assert list(cache.table.cells_of(0)) == [0, 1, 2, 3] and cache.table[3].pos == 3
    assert len(cache.storage.k) == MODEL.config.num_hidden_layers == 3
    for kind in (cache.storage.k, cache.storage.v):
        rows = [cache.storage.read(layer, slice(3, 4))[0] for layer in range(3)]
        assert all(row.isfinite().all() for row in rows) and kind[:, :, 4].isnan().all()
        assert not torch.allclose(rows[0], rows[1]) and not torch.allclose(rows[1], rows[2])


def test_how_are_you() -> None:
    """Cells 0, 1, 2 are used, 3 and 4 free: the token of position 5 goes to cell 3."""
    cache = sequences(5)
    prefill(MODEL, cache, [PROMPT[:3]])
    cache.seq_add(0, 2, -1, 2)  # positions 0, 1, 4
    batch = cache.batch([[PROMPT[5]]])
    assert (batch.positions.tolist(), batch.slot_mapping.tolist()) == ([5], [3])  # type: ignore[union-attr]
    assert batch.context_slots == (slice(0, 4),)


def test_neighbours_are_read_as_a_view_and_scattered_cells_by_number() -> None:
    cache = sequences(64)
    prefill(MODEL, cache, [PROMPT[:5], PROMPT[:3]])
    assert cache.slots(0) == slice(0, 5) and cache.slots(1) == slice(5, 8)
    decode(MODEL, cache, [1, 2])
    assert cache.slots(0).tolist() == [0, 1, 2, 3, 4, 8]  # type: ignore[union-attr]
    assert cache.slots(0, 5) == slice(0, 5) and cache.slots(1).tolist() == [5, 6, 7, 9]  # type: ignore[union-attr]
    assert cache.slots(7) == slice(0, 0)


@LAYOUTS
def test_cells_that_were_freed_are_used_again(slots_first: bool) -> None:
    cache = sequences(12, slots_first)
    prefill(MODEL, cache, [PROMPT[:6], PROMPT[:4]])
    cache.reset(0)
    got = prefill(MODEL, cache, [PROMPT[8:16]], [5])  # 6 old cells and 2 new ones
    close(got, fresh_logits(MODEL, PROMPT[8:16]))
    assert set(cache.table.cells_of(5)) == {0, 1, 2, 3, 4, 5, 10, 11}
    cache.reset()
    assert cache.seq_lens == () and cache.table.num_used == 0


# -- by hand: refusals ----------------------------------------------------------------------------


def test_a_batch_is_committed_once_and_only_while_it_fits() -> None:
    cache = sequences(16)
    batch = cache.batch([[1, 2], [3]])
    cache.commit(batch)
    before = repr(cache.table)
    with pytest.raises(ValueError, match="position 0 of sequence 0, which holds 2"):
        cache.commit(batch)
    early = cache.batch([[4]], [0])
    cache.commit(cache.batch([[5]], [1]))  # takes the cell that the other was promised
    with pytest.raises(ValueError, match="cell 3 was taken"):
        cache.commit(early)
    late = cache.batch([[4]], [0])
    cache.seq_rm(0, 0, 1)
    with pytest.raises(ValueError, match="the sequence changed"):
        cache.commit(late)
    with pytest.raises(ValueError, match="no cells"):
        cache.commit(Batch.from_sequences([[1]]))
    assert before != repr(cache.table)
    cache.check_integrity()


@pytest.mark.parametrize(
    ("tokens", "seq_ids", "says"),
    [
        ([[1] * 9], None, "9 tokens need a cell each, 8 of 12 are empty"),
        ([[1] * 5, [2] * 4], [2, 3], "9 tokens need a cell each, 8 of 12"),
        ([[1], [2]], [1, 1], "each once"),
        ([[1], [2]], [1], "2 sequences"),
        ([1, 2], None, "a list of token id lists"),
        ([[1]], [-1], "seq_id.*-1"),
        ([[]], None, "empty"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_happens(
    tokens: list[Any], seq_ids: list[int] | None, says: str
) -> None:
    cache = sequences(12)
    prefill(MODEL, cache, [PROMPT[:4]])
    before = repr(cache.table)
    with pytest.raises(ValueError, match=says):
        forward(MODEL, cache, tokens, seq_ids)
    assert repr(cache.table) == before


def test_angles_of_another_head_size_are_refused() -> None:
    with pytest.raises(ValueError, match="heads of 8, the storage has 16"):
        CellSequences(sequences().storage, RotaryEmbedding(8, 10_000.0))


def test_no_memory_is_an_error_with_the_bytes() -> None:
    with pytest.raises(ValueError, match=r"no memory for 1(,000){5} slots of \d[\d,]+ bytes"):
        CellSequences.from_config(MODEL.config, 10**15)


# -- sharing --------------------------------------------------------------------------------------


@LAYOUTS
def test_a_copied_sequence_moves_no_data_and_goes_its_own_way(slots_first: bool) -> None:
    cache = sequences(64, slots_first)
    prefill(MODEL, cache, [PROMPT[:10]])
    shelf = cache.storage.k.clone()
    assert len(cache.seq_cp(0, 1)) == 10 and cache.table.num_used == 10
    assert torch.equal(cache.storage.k.nan_to_num(), shelf.nan_to_num())
    texts = [PROMPT[:10], PROMPT[:10]]
    for step in range(3):
        texts = [[*text, 11 + 17 * i + step] for i, text in enumerate(texts)]
        got = decode(MODEL, cache, [text[-1] for text in texts])
        for row, text in zip(got, texts, strict=True):
            close(row[None], fresh_logits(MODEL, text))
        cache.check_integrity()
    assert cache.table.num_used == 16
    cache.seq_rm(0)
    assert cache.table.num_used == 13, "what the other one still has stays"
    got = decode(MODEL, cache, [5], [1])
    close(got, fresh_logits(MODEL, [*texts[1], 5]))


@LAYOUTS
def test_an_own_copy_can_be_moved_and_the_others_stay(slots_first: bool) -> None:
    cache = sequences(64, slots_first, ONE_LAYER)
    prefill(ONE_LAYER, cache, [PROMPT[:8]])
    cache.seq_cp(0, 1)
    with pytest.raises(ValueError, match=r"cell 4 .* seq_unshare\(1, 4, -1\)"):
        cache.seq_add(1, 4, -1, -4)
    pairs = cache.seq_unshare(1, 4, -1)
    assert [old for old, _ in pairs] == [4, 5, 6, 7] and cache.table.num_used == 12
    for old, new in pairs:
        for x in (cache.storage.k, cache.storage.v):
            a, b = (x[:, i] if slots_first else x[:, :, i] for i in (old, new))
            assert torch.equal(a, b) and a.isfinite().all()
    cache.seq_rm(1, 0, 4)
    cache.seq_add(1, 4, -1, -4)
    got = decode(ONE_LAYER, cache, [3, 3])
    close(got[:1], fresh_logits(ONE_LAYER, [*PROMPT[:8], 3]))
    close(got[1:], fresh_logits(ONE_LAYER, [*PROMPT[4:8], 3]))


def frees_what_others_have(self: CellTable, seq_id: int, cells: Sequence[int]) -> list[int]:
    for other in self.seq_ids:
        right_drop(self, other, [cell for cell in cells if other in self[cell].owners])
    return list(cells)


right_drop = CellTable._drop


def test_planted_bug_a_cell_freed_while_it_has_an_owner_is_caught() -> None:
    with patch.object(CellTable, "_drop", frees_what_others_have), pytest.raises(AssertionError):
        test_a_copied_sequence_moves_no_data_and_goes_its_own_way(False)


def test_no_room_for_a_copy_changes_nothing() -> None:
    cache = sequences(10)
    prefill(MODEL, cache, [PROMPT[:8]])
    cache.seq_cp(0, 1)
    before = repr(cache.table)
    with pytest.raises(ValueError, match="shares 8 cells, 2 are empty"):
        cache.seq_unshare(1)
    assert repr(cache.table) == before


# -- K-shift --------------------------------------------------------------------------------------

SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, k_head_dim=16, v_head_dim=6)


def check_shift(slots_first: bool, adds: Sequence[int] = (-3, 5), at: int = 40) -> float:
    """Shift a sequence among holes and another's tokens; K must be that of the new positions.

    Returns the largest error, on keys of which no number is above 1.
    """
    storage = KVStorage(SPEC, 30, slots_first=slots_first)
    poison(storage)
    rope = RotaryEmbedding(16, 10_000.0)
    cache = with_holes(CellSequences(storage, rope))
    raw = torch.rand(SPEC.num_layers, 12, 2, 16) * 2 - 1
    v = torch.randn(SPEC.num_layers, 12, 2, 6)
    cells = cache.table.find_slot(12)
    assert cells is not None
    positions = torch.cat((torch.arange(4), at + torch.arange(8)))
    slots = torch.tensor(cells)
    for layer in range(SPEC.num_layers):
        storage.write(layer, slots, apply_rope(raw[layer], *rope(positions)), v[layer])
    cache.table.place(cells, 0, positions.tolist())
    before = [x.clone() for x in storage.read(0, slots)]
    for delta in adds:
        cache.seq_add(0, int(positions[4:].min()), -1, delta)
        positions[4:] += delta
    assert torch.equal(storage.read(0, slots)[0], before[0]), "nothing before the next forward"
    cache.apply_shifts()
    assert cache.apply_shifts() == 0 and not cache.table.has_shifts
    cache.check_integrity()
    worst = 0.0
    for layer in range(SPEC.num_layers):
        got_k, got_v = storage.read(layer, slots)
        assert torch.equal(got_v, v[layer]), f"V of layer {layer} changed"
        want = apply_rope(raw[layer], *rope(positions))
        assert torch.equal(got_k[:4], want[:4]), f"layer {layer}: what was not moved changed"
        worst = max(worst, float((got_k - want).abs().max()))
        rest = [c for c in range(30) if c not in cells]
        k, other = storage.read(layer, torch.tensor(rest))
        assert k.isnan().all() and other.isnan().all(), "a cell of another sequence was written"
    assert worst <= bound(int(positions.max())), f"K is off by {worst}"
    return worst


def bound(position: int) -> float:
    """An fp32 angle is rounded like the position itself, so the error grows with it."""
    return 2e-6 + 5e-8 * position


@LAYOUTS
@pytest.mark.parametrize("adds", [(-3,), (-3, 5), (4, 4, -20, 1), (9,)])
def test_a_shift_turns_the_keys_of_every_layer_and_leaves_the_values(
    slots_first: bool, adds: tuple[int, ...]
) -> None:
    check_shift(slots_first, adds)


def test_error_of_a_shift_grows_with_the_position() -> None:
    errors = [check_shift(False, (-at // 2,), at) for at in (100, 1000, 4000, 32_000)]
    assert errors[0] < 2e-5 and errors[-1] > 10 * errors[0], errors


def test_a_shift_there_and_back_leaves_the_bits() -> None:
    cache = sequences()
    prefill(MODEL, cache, [PROMPT[:8]])
    before = cache.storage.k.clone()
    cache.seq_add(0, 4, -1, 7)
    cache.seq_add(0, 11, -1, -7)
    assert cache.apply_shifts() == 0
    assert torch.equal(cache.storage.k.nan_to_num(), before.nan_to_num())


def shifted_logits(model: Qwen3ForCausalLM, slots_first: bool = False) -> tuple[Tensor, Tensor]:
    """Context shift: forget the first half, move the rest to the front, go on; and a fresh run."""
    cache = sequences(64, slots_first, model)
    prefill(model, cache, [PROMPT[:20]])
    cache.seq_rm(0, 0, 10)
    cache.seq_add(0, 10, -1, -10)
    got = decode(model, cache, [5])
    cache.check_integrity()
    assert cache.seq_lens == (11,) and cache.table.next_pos(0) == 11
    return got, fresh_logits(model, [*PROMPT[10:20], 5])


@LAYOUTS
def test_context_shift_is_a_fresh_run_in_one_layer(slots_first: bool) -> None:
    got, fresh = shifted_logits(ONE_LAYER, slots_first)
    assert (got - fresh).abs().max() <= 1e-5


@LAYOUTS
def test_context_shift_is_no_fresh_run_in_three_layers(slots_first: bool) -> None:
    """Keys and values above the first layer have seen the tokens that are gone."""
    got, fresh = shifted_logits(MODEL, slots_first)
    assert (got - fresh).abs().max() > 0.05


def test_generation_goes_on_beyond_the_cells_with_context_shifts() -> None:
    """Sixteen cells, sixty tokens; in one layer each step is that of the tokens that are left."""
    cache = sequences(16, model=ONE_LAYER)
    text = PROMPT[:12]
    logits = prefill(ONE_LAYER, cache, [text])
    for _ in range(48):
        if cache.table.num_free == 0:
            cache.seq_rm(0, 4, 10)  # keeps the first four, as attention sinks
            cache.seq_add(0, 10, -1, -6)
            text = [*text[:4], *text[10:]]
        text = [*text, int(logits.argmax())]
        logits = decode(ONE_LAYER, cache, text[-1:])
        cache.check_integrity()
        close(logits, fresh_logits(ONE_LAYER, text), 2e-5)


# -- any operations, one after the other ----------------------------------------------------------


class Tokens:
    """The obvious twin: each sequence is a list of (position, token, number of the cell's like)."""

    def __init__(self) -> None:
        self.books: dict[int, list[tuple[int, int, int]]] = {s: [] for s in range(3)}
        self.made = 0

    def new(self, pos: int, token: int) -> tuple[int, int, int]:
        self.made += 1
        return pos, token, self.made

    def within(self, seq: int, p0: int, p1: int) -> list[tuple[int, int, int]]:
        return [e for e in self.books[seq] if p0 <= e[0] and (p1 < 0 or e[0] < p1)]

    def shared(self, seq: int, p0: int, p1: int) -> list[tuple[int, int, int]]:
        others = {e for s, book in self.books.items() if s != seq for e in book}
        return [e for e in self.within(seq, p0, p1) if e in others]

    def logits(self, seq: int) -> Tensor:
        """Of the last token, by a fresh run with these positions."""
        book = sorted(self.books[seq])
        batch = Batch(
            torch.tensor([token for _, token, _ in book]),
            torch.tensor([pos for pos, _, _ in book]),
            (0, len(book)),
        )
        with torch.inference_mode():
            return ONE_LAYER.compute_logits(ONE_LAYER(batch)[-1:])


@pytest.mark.parametrize("number", range(6))
def test_after_any_operations_one_layer_gives_the_logits_of_a_fresh_run(number: int) -> None:
    draw, twin, done = random.Random(number), Tokens(), Counter[str]()
    cache = sequences(40, bool(number % 2), ONE_LAYER)
    for _ in range(120):
        seq, other = draw.sample(range(3), 2)
        p0, p1 = draw.randint(0, 12), draw.choice([-1, draw.randint(1, 30)])
        book = twin.books[seq]
        name = draw.choice(["run", "run", "run", "rm", "cp", "add", "add", "unshare", "keep"])
        done[name] += 1
        match name:
            case "run":
                tokens = [draw.randrange(97) for _ in range(draw.choice([1, 1, 3]))]
                if cache.table.num_free < len(tokens):
                    cache.reset(seq)
                    book.clear()
                if cache.table.num_free < len(tokens):
                    continue
                first = max((pos for pos, _, _ in book), default=-1) + 1
                book += [twin.new(first + i, token) for i, token in enumerate(tokens)]
                got = prefill(ONE_LAYER, cache, [tokens], [seq])
                close(got, twin.logits(seq), 2e-5)
            case "rm":
                cache.seq_rm(seq, p0, p1)
                twin.books[seq] = [e for e in book if e not in twin.within(seq, p0, p1)]
            case "cp":
                cache.seq_cp(seq, other, p0, p1)
                there = twin.books[other]
                there += [e for e in twin.within(seq, p0, p1) if e not in there]
            case "add":
                moved, delta = twin.within(seq, p0, p1), draw.randint(-9, 9)
                if twin.shared(seq, p0, p1):
                    done["refused"] += 1
                    with pytest.raises(ValueError, match="Copy first"):
                        cache.seq_add(seq, p0, p1, delta)
                    continue
                cache.seq_add(seq, p0, p1, delta)
                kept = [e for e in book if e not in moved]
                shifted = [twin.new(pos + delta, token) for pos, token, _ in moved]
                twin.books[seq] = kept + [e for e in shifted if e[0] >= 0]
            case "unshare":
                old = twin.shared(seq, p0, p1)
                if cache.table.num_free >= len(old):
                    cache.seq_unshare(seq, p0, p1)
                    copies = [twin.new(pos, token) for pos, token, _ in old]
                    twin.books[seq] = [e for e in book if e not in old] + copies
            case "keep" if draw.random() < 0.2:
                cache.seq_keep(seq)
                twin.books = {s: b if s == seq else [] for s, b in twin.books.items()}
        cache.check_integrity()
        for s, entries in twin.books.items():
            positions = [cache.table[cell].pos for cell in cache.table.cells_of(s)]
            assert positions == sorted(pos for pos, _, _ in entries), (name, s)
    assert min(done[name] for name in ("run", "rm", "cp", "add", "unshare")) >= 5, done


# -- planted bugs in the shift --------------------------------------------------------------------

right_take = CellTable.take_shifts
right_angles = RotaryEmbedding.forward
right_apply = CellSequences.apply_shifts


def other_sign(self: CellTable) -> dict[int, int]:
    return {cell: -shift for cell, shift in right_take(self).items()}


def never_cleared(self: CellTable) -> dict[int, int]:
    return dict(self._shifts)


def last_add_only(self: CellTable, cell: int, shift: int) -> None:
    self._shifts[cell] = shift - self._shifts.get(cell, 0)


def turns_values_too(self: CellSequences) -> int:
    cells = torch.tensor(list(self.table._shifts))
    done = right_apply(self)
    for layer in range(self.storage.spec.num_layers):
        if done:
            k, v = self.storage.read(layer, cells)
            self.storage.write(layer, cells, k, v.roll(1, -1))
    return done


def first_layer_only(self: CellSequences) -> int:
    rest = self.storage.k[1:].clone()
    done = right_apply(self)
    self.storage.k[1:] = rest
    return done


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (CellTable, "take_shifts", other_sign),
        (CellTable, "take_shifts", never_cleared),
        (CellTable, "_set_shift", last_add_only),
        (CellSequences, "apply_shifts", turns_values_too),
        (CellSequences, "apply_shifts", first_layer_only),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_planted_bug_in_the_shift_is_caught(owner: type, name: str, wrong: Any) -> None:
    check_shift(False)
    with patch.object(owner, name, wrong), pytest.raises(AssertionError):
        check_shift(False)


# -- cells as the engine's memory -----------------------------------------------------------------


def manager(num_cells: int = 16) -> CellKVCache:
    return CellKVCache.from_config(MODEL.config, num_cells)


def request(name: str, tokens: int = 3) -> Request:
    params = SamplingParams()
    return Request(name, list(range(tokens)), Sampler(params), StopChecker(params))


def listed(room: Allocation | None) -> tuple[int, list[int], list[int]]:
    """An allocation in plain numbers."""
    assert room is not None
    slots = room.context_slots
    told = list(range(slots.start, slots.stop)) if isinstance(slots, slice) else slots.tolist()
    return room.first_position, list(room.new_slots), told


def test_a_prompts_cells_are_held_from_its_first_chunk_on() -> None:
    memory: KVCacheManager = manager(16)
    a, b = request("a", 9), request("b", 8)
    assert listed(memory.allocate(a, 4)) == (0, [0, 1, 2, 3], [0, 1, 2, 3])
    assert memory.table_of(a) == tuple(range(9)) and memory.slots_of(a) == ()
    assert memory.allocate(b, 1) is None, "7 cells are left, and all of b must fit"
    memory.commit(a, 4)
    assert memory.slots_of(a) == (0, 1, 2, 3)
    assert listed(memory.allocate(a, 5)) == (4, [4, 5, 6, 7, 8], list(range(9)))
    memory.check_integrity()


def test_asked_twice_before_a_commit_the_answer_is_the_same() -> None:
    memory = manager(16)
    a, b = request("a", 5), request("b", 4)
    first = listed(memory.allocate(a, 2))
    memory.allocate(b, 4)
    book = repr(memory.table)
    assert listed(memory.allocate(a, 2)) == first and repr(memory.table) == book
    memory.commit(a, 5)
    memory.commit(b, 4)
    a.token_ids.append(5)
    first = listed(memory.allocate(a, 1))
    assert first == (5, [9], [0, 1, 2, 3, 4, 9]) == listed(memory.allocate(a, 1))


def test_without_room_nothing_changes() -> None:
    memory = manager(8)
    a, b = request("a", 4), request("b", 5)
    memory.allocate(a, 4)
    memory.commit(a, 4)
    book = repr(memory.table)
    a.token_ids += range(5)
    assert memory.allocate(b, 5) is None and memory.allocate(a, 5) is None
    assert repr(memory.table) == book and memory.table_of(b) == ()
    assert memory.allocate(a, 4) is not None
    memory.check_integrity()


def test_freed_cells_are_the_next_ones_taken_and_freeing_twice_changes_nothing() -> None:
    memory = manager(12)
    a, b, c = request("a", 4), request("b", 4), request("c", 6)
    for one in (a, b):
        memory.allocate(one, 4)
        memory.commit(one, 4)
    memory.free(a)
    memory.free(a)
    memory.free(request("strange"))
    assert memory.slots_of(a) == memory.table_of(a) == ()
    assert listed(memory.allocate(c, 6))[1] == [0, 1, 2, 3, 8, 9]
    memory.check_integrity()


def test_books_of_the_manager_that_do_not_add_up_are_noticed() -> None:
    def lost(memory: CellKVCache) -> None:
        del memory._seq_ids["a"]

    def overwritten(memory: CellKVCache) -> None:
        memory._stored["a"] = 5

    def moved(memory: CellKVCache) -> None:
        memory.sequences.seq_add(0, 2, -1, 2)

    def tensor(memory: CellKVCache) -> None:
        memory.sequences._numbers[0]._numbers[4] = 1

    for corrupt, says in [
        (lost, "are requests'"),
        (overwritten, "4 cells and 5 tokens"),
        (moved, "a has positions"),
    ]:
        memory = manager()
        memory.allocate(request("a", 4), 4)
        memory.check_integrity()
        corrupt(memory)
        with pytest.raises(AssertionError, match=says):
            memory.check_integrity()
    memory = manager()
    for name in "ab":
        memory.allocate(request(name, 4), 4)
        memory.commit(request(name, 4), 4)
    memory.allocate(request("a", 5), 1)
    memory.check_integrity()
    tensor(memory)
    with pytest.raises(AssertionError, match="its tensor says"):
        memory.check_integrity()


def test_the_engine_serves_texts_on_cells(model: Qwen3ForCausalLM, tokenizer: Any) -> None:
    """The shipped model, in memory for a little more than one request."""
    prompts = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]
    params = SamplingParams(max_tokens=12)
    memory = CellKVCache.from_config(model.config, 30)
    poison(memory.storage)
    recorder = Recorder()
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=30)
    engine = LLMEngine(model, tokenizer, config, memory=memory, trace=recorder)
    outputs = engine.generate(prompts, params)
    alone_ = [generate(model, text, params, tokenizer=tokenizer)[0] for text in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == [o.token_ids for o in alone_]
    assert any(isinstance(event, Preempted) for event in recorder.events)
    assert memory.table.num_used == 0 and memory.settings == {"num_cells": 30}


def test_a_prompt_longer_than_all_cells_is_refused_with_the_numbers() -> None:
    engine = LLMEngine(MODEL, config=EngineConfig(max_model_len=40), memory=manager(16))
    with pytest.raises(ValueError, match=r"16 tokens.*limited to 16"):
        engine.add_request([1] * 16)
    engine.add_request([1] * 15, SamplingParams(max_tokens=9, ignore_eos=True))
    (output,) = engine.run()
    assert len(output.outputs[0].token_ids) == 1 and output.outputs[0].finish_reason == "length"


# -- whatever comes: every request is served as if it were alone -----------------------------------


class PoisonedCells(CellKVCache):
    """What is freed becomes NaN at once."""

    def free(self, request: Request) -> None:
        gone = self.table_of(request)
        super().free(request)
        if gone:
            k = torch.full((len(gone), *self.storage.read(0, slice(0, 1))[0].shape[1:]), torch.nan)
            for layer in range(self.storage.spec.num_layers):
                self.storage.write(layer, torch.tensor(gone), k, k)


class CellParty(Party):
    """A workload of workloads.py in an engine on as many cells as its `capacity` says."""

    memory: PoisonedCells  # type: ignore[assignment]

    def __init__(self, workload: Workload) -> None:
        assert workload.capacity is not None
        self.workload, self.recorder = workload, Recorder()
        model = small_model()
        self.memory = PoisonedCells.from_config(  # type: ignore[assignment]
            model.config, workload.capacity, slots_first=workload.slots_first, trace=self.recorder
        )
        poison(self.memory.storage)
        config = EngineConfig(
            max_num_seqs=workload.max_num_seqs,
            max_num_batched_tokens=workload.budget,
            max_model_len=workload.limit,
            long_prefill_token_threshold=workload.threshold,
            enable_chunked_prefill=workload.chunked,
        )
        self.engine = LLMEngine(
            model,
            the_tokenizer(),
            config,
            scheduler=POLICIES[workload.policy],
            memory=self.memory,
            clock=VirtualClock(),
            trace=self.recorder,
        )
        self.diaries, self.aborted, self.refused = {}, set(), 0
        self.live: list[EngineState] = []

    def check(self) -> None:
        engine = self.engine
        assert not engine.requests and self.memory.table.num_used == 0, "cells leaked"
        assert engine.step() == [], "an empty engine has nothing to deliver"
        assert engine.model_runner.num_forwards == engine.num_steps, "one forward per step"
        for number, visitor in enumerate(self.workload.visitors):
            name = f"v{number}"
            if name in self.diaries:
                want = alone(visitor.index, self.workload.limit)
                self.check_request(name, self.diaries[name], want)
        self.check_trace()


def check(workload: Workload) -> Counter[str]:
    party = CellParty(workload)
    party.run()
    party.check()
    counts = party.count()
    counts["with preemption"] = min(1, counts["preemptions"])
    return counts


BUSY = several(range(POOL_SIZE), max_num_seqs=6, budget=34, capacity=max(LIMITS) + 4)


@pytest.mark.parametrize("policy", ["Scheduler", "PrefillFirst", "StaticBatching"])
@pytest.mark.parametrize("slots_first", [False, True])
def test_those_who_give_way_come_back_and_end_the_same(policy: str, slots_first: bool) -> None:
    counts = check(replace(BUSY, policy=policy, slots_first=slots_first))
    assert counts["preemptions"] >= 3 and counts["resumed"] == counts["preemptions"]


def test_holding_a_prompts_cells_prevents_thrash() -> None:
    """Admitted by the first chunk alone, requests throw each other out over and over."""

    def tokens_run(workload: Workload) -> tuple[int, int]:
        party = CellParty(workload)
        party.run()
        party.check()
        return party.count()["preemptions"], party.engine.model_runner.num_tokens

    long = [i for i in range(POOL_SIZE) if len(pool()[i].prompt) >= 12]
    slow = several(long, max_num_seqs=6, budget=8, capacity=max(LIMITS) + 4)
    held, work = tokens_run(slow)
    with patch.object(CellKVCache, "allocate", holds_no_more_than_the_chunk):
        greedy, waste = tokens_run(slow)
    assert greedy > 2 * held and waste > work, (held, greedy, work, waste)


def holds_no_more_than_the_chunk(
    self: CellKVCache, request: Request, max_new_tokens: int
) -> Allocation | None:
    if request.request_id in self._seq_ids:
        return right_allocate(self, request, max_new_tokens)
    num = request.num_tokens
    with patch.object(Request, "num_tokens", property(lambda r: min(num, max_new_tokens))):
        return right_allocate(self, request, max_new_tokens)


right_allocate = CellKVCache.allocate


# -- planted bugs in the engine's memory -----------------------------------------------------------


def ordered_by_number(self: CellSequences, seq_id: int, n: int | None = None) -> Any:
    slots = right_slots(self, seq_id, n)
    return slots if isinstance(slots, slice) else slots.sort().values


right_slots = CellSequences.slots


def neighbours_assumed(self: CellSequences, seq_id: int, n: int | None = None) -> Any:
    cells = self.table.cells_of(seq_id)
    size = len(cells) if n is None else n
    return slice(min(cells[0], self.table.num_cells - size), cells[0] + size)


def keeps_its_cells(self: CellKVCache, request: Request) -> None:
    self._seq_ids.pop(request.request_id, None)
    self._stored.pop(request.request_id, None)


def frees_the_first_only(self: CellKVCache, request: Request) -> None:
    seq_id = self._seq_ids.pop(request.request_id, None)
    if seq_id is not None:
        del self._stored[request.request_id]
        self.sequences.seq_rm(seq_id, 0, 1)


def one_position_further(self: CellKVCache, request: Request, n: int) -> Allocation | None:
    room = right_allocate(self, request, n)
    if room is None or room.first_position == 0:
        return room
    return room._replace(first_position=room.first_position + 1)


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (CellSequences, "slots", ordered_by_number),
        (CellSequences, "slots", neighbours_assumed),
        (CellKVCache, "free", keeps_its_cells),
        (CellKVCache, "free", frees_the_first_only),
        (CellKVCache, "allocate", one_position_further),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_planted_bug_in_the_memory_is_caught(owner: type, name: str, wrong: Any) -> None:
    with patch.object(owner, name, wrong), pytest.raises((AssertionError, Differs)):
        check(BUSY)
