"""The equality ledger: every path gives the same logits and tokens, and every mistake is seen."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path as Folder
from typing import Any

import pytest
import torch
from checkpoints import (
    largest_difference,
    load_reference,
    random_sequences,
    save_random,
)
from engines import VOCAB, BackendRunner, one_thread, poison, random_model
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.cache.config import CacheConfig
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.runner import CachedRunner, Runner
from tutorial_engine.lab.hf import OurCache, TransformersRunner
from tutorial_engine.lab.ledger import (
    REFERENCE,
    SAFE_MARGIN,
    LedgerRow,
    Path,
    ledger,
    our_paths,
    table,
)
from tutorial_engine.learn.bugs import planted
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY, load_model
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

SEEDS = range(20)
SHAPES: dict[str, dict[str, Any]] = {
    "two heads a group": {"num_hidden_layers": 2},
    "one K/V head for all": {"num_key_value_heads": 1, "num_attention_heads": 6},
    "as many K/V heads as heads": {"num_key_value_heads": 4, "head_dim": 24},
    "head_dim 20, two layers": {
        "head_dim": 20,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_hidden_layers": 2,
        "rope_theta": 1_000_000.0,
    },
}
LENGTHS, STEPS, MAX_LEN = [1, 9, 5], 6, 32


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with one_thread():
        yield


def new_cache(model: Qwen3ForCausalLM, rows: int = 1, **config: Any) -> StaticKVCache:
    config = {"max_seqs": rows, "max_len": MAX_LEN, **config}
    cache = StaticKVCache.from_config(model.config, CacheConfig(**config))
    poison(cache)
    return cache


def poisoned(path: Path) -> Path:
    """The same path; its storage is full of NaN before anything runs."""

    def make_runner(rows: int) -> Runner:
        runner = path.make_runner(rows)
        if isinstance(runner, CachedRunner):
            poison(runner.cache)
        return runner

    return replace(path, make_runner=make_runner)


def every_path(model: Qwen3ForCausalLM, theirs: Any) -> dict[str, Path]:
    """All that there is, ours and transformers', the reference first."""

    def static(rows: int) -> Runner:
        return CachedRunner(model, new_cache(model, rows))

    def slots_first(rows: int) -> Runner:
        return CachedRunner(model, new_cache(model, rows, slots_first=True))

    def naive(rows: int) -> Runner:
        return BackendRunner(model, new_cache(model, rows))

    paths = {name: poisoned(path) for name, path in our_paths(model, MAX_LEN).items()}
    paths |= {f"chunked, {n}": Path(static, chunk_size=n) for n in (1, 2, 5)}
    paths |= {
        "batched and chunked, 3": Path(static, together=True, chunk_size=3),
        "naive attention": Path(naive),
        "naive attention, batched": Path(naive, together=True),
        "slots first": Path(slots_first),
        "slots first, batched and chunked": Path(slots_first, together=True, chunk_size=2),
        "transformers, no cache": Path(lambda _: TransformersRunner(theirs, use_cache=False)),
        "transformers, its cache": Path(lambda _: TransformersRunner(theirs), chunk_size=4),
        "transformers, our cache": Path(
            lambda _: TransformersRunner(theirs, lambda: OurCache(new_cache(model)))
        ),
        "transformers, our cache, slots first, chunked": Path(
            lambda _: TransformersRunner(
                theirs, lambda: OurCache(new_cache(model, slots_first=True))
            ),
            chunk_size=2,
        ),
    }
    return paths


def pair(folder: Folder, seed: int, shape: str) -> tuple[Qwen3ForCausalLM, Any]:
    """One random checkpoint in both engines; ours prepacked for every other seed."""
    save_random(folder, seed=seed, max_position_embeddings=64, **SHAPES[shape])
    return load_model(folder, prepack=seed % 2 == 0), load_reference(folder)


def random_prompts(seed: int) -> list[list[int]]:
    return random_sequences(LENGTHS, VOCAB, seed)


# -- all paths ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_path_gives_the_same(tmp_path: Folder, shape: str, seed: int) -> None:
    """Logits to 1e-4 of the largest; tokens wherever the best is more than 1e-3 ahead."""
    model, theirs = pair(tmp_path, seed, shape)
    paths, prompts = every_path(model, theirs), random_prompts(seed)
    want = paths[REFERENCE].run(prompts, STEPS)  # [S, steps, V]
    tokens, best = want.argmax(-1), want.topk(2).values
    safe = best[..., 0] - best[..., 1] > SAFE_MARGIN
    assert tokens.unique().numel() >= 6, "a model that repeats itself proves nothing"
    assert safe.sum() >= 16, "of 18"
    tolerance = 1e-4 * max(1.0, want.abs().max().item())
    wrong = {}
    for name, path in paths.items():
        got = path.run(prompts, STEPS, tokens)
        difference = largest_difference(got, want)
        equal = torch.equal(got.argmax(-1)[safe], tokens[safe])
        if not difference <= tolerance or not equal:  # NaN is in no order
            wrong[name] = (difference, tolerance, equal)
    assert not wrong


@pytest.mark.parametrize("shape", SHAPES)
def test_ledger_says_so_too(tmp_path: Folder, shape: str) -> None:
    rows = ledger(every_path(*pair(tmp_path, 1, shape)), random_prompts(1), STEPS)
    assert len(rows) == 18 and rows[0].path == REFERENCE
    assert rows[0].margin > SAFE_MARGIN
    assert [row.path for row in rows if not row.ok] == []
    assert {row.steps for row in rows} == {len(LENGTHS) * STEPS}
    assert "✘" not in table(rows)


def test_shipped_model_is_equal_on_every_path(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    texts = ["Once upon a time", "Anna had a red kite. One day", "Tom"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    rows = ledger(every_path(model, load_reference(TINY)), prompts, 8)
    assert [row.path for row in rows if not row.ok] == []


# -- planted mistakes ---------------------------------------------------------------------------


class Bugged:
    """A runner with a bug of the zoo in it; the reference beside it has none."""

    def __init__(self, inner: Runner, bug: str) -> None:
        self.inner, self.bug = inner, bug
        self.max_len, self.eos_token_ids = inner.max_len, inner.eos_token_ids

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        seq_ids: Sequence[int],
        chunk_size: int | None = None,
    ) -> Tensor:
        with planted(self.bug):
            return self.inner.prefill(prompts, seq_ids, chunk_size)

    def decode(self, tokens: Sequence[int], seq_ids: Sequence[int]) -> Tensor:
        with planted(self.bug):
            return self.inner.decode(tokens, seq_ids)


class SkipsAPosition(StaticKVCache):
    """decode start = prompt length + step, step from 1: position P is left out."""

    def batch(
        self, sequences: Sequence[Sequence[int]], seq_ids: Sequence[int] | None = None
    ) -> Batch:
        batch = super().batch(sequences, seq_ids)
        if all(self.seq_lens[s] == 0 for s in batch.seq_ids):
            return batch  # the prompt is right
        return replace(batch, positions=batch.positions + 1)


def skipping(model: Qwen3ForCausalLM) -> Callable[[int], Runner]:
    def make_runner(rows: int) -> Runner:
        right = new_cache(model, rows)
        return CachedRunner(model, SkipsAPosition(right.storage, rows, MAX_LEN))

    return make_runner


@pytest.mark.parametrize(
    "bug",
    ["RoPE turns neighbours", "q_norm and k_norm after RoPE", "query head h reads K/V head h % n"],
)
def test_planted_bug_is_caught(bug: str) -> None:
    model = random_model()

    def static(rows: int) -> Runner:
        return CachedRunner(model, new_cache(model, rows))

    def naive(rows: int) -> Runner:
        return BackendRunner(model, new_cache(model, rows))

    right = naive if "head h %" in bug else static  # this one sits in the textbook attention
    paths = {
        REFERENCE: our_paths(model)[REFERENCE],
        "right": Path(right, together=True),
        "wrong": Path(lambda rows: Bugged(right(rows), bug), together=True),
    }
    rows = {row.path: row for row in ledger(paths, random_prompts(0), STEPS)}
    assert rows["right"].ok and rows[REFERENCE].ok
    assert not rows["wrong"].ok
    assert rows["wrong"].difference > 100 * rows["wrong"].tolerance
    assert rows["wrong"].equal < rows["wrong"].steps


@pytest.mark.parametrize("together", [False, True])
def test_skipped_position_is_caught(together: bool) -> None:
    model = random_model()
    paths = {REFERENCE: our_paths(model)[REFERENCE], "wrong": Path(skipping(model), together)}
    rows = ledger(paths, random_prompts(0), STEPS)
    assert [row.ok for row in rows] == [True, False]
    assert rows[1].difference > 100 * rows[1].tolerance


def test_skipped_position_leaves_the_first_token_right_and_changes_the_rest() -> None:
    model, prompts = random_model(), random_sequences([5] * 16, VOCAB)
    right, wrong = our_paths(model)[REFERENCE], Path(skipping(model), together=True)
    want = right.run(prompts, STEPS)
    got = wrong.run(prompts, STEPS, want.argmax(-1))
    difference = (got - want).abs().amax(dim=(0, 2))  # of each step
    tolerance = 1e-4 * want.abs().max()
    assert difference[0] <= tolerance
    assert (difference[1:] > 100 * tolerance).all()
    # left to itself: the first token of every sequence is right, and most go astray after it
    free = wrong.run(prompts, STEPS).argmax(-1)
    assert torch.equal(free[:, 0], want.argmax(-1)[:, 0])
    assert (free != want.argmax(-1)).any(dim=1).sum() >= 8


def test_unwritten_slot_is_caught() -> None:
    class ReadsTooFar(StaticKVCache):
        """Gives out one slot more than is there."""

        def update(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> Any:
            beyond = [slice(s.start, s.stop + 1) for s in batch.context_slots]  # type: ignore[union-attr]
            return super().update(layer, k, v, replace(batch, context_slots=tuple(beyond)))

    model = random_model()

    def reading_too_far(rows: int) -> Runner:
        return CachedRunner(model, ReadsTooFar(new_cache(model, rows).storage, rows, MAX_LEN))

    paths = {REFERENCE: our_paths(model)[REFERENCE], "wrong": Path(reading_too_far)}
    row = ledger(paths, random_prompts(0), 3)[1]
    assert row.difference != row.difference, "NaN"
    assert not row.ok and "✘" in table([row])


# -- verdicts -----------------------------------------------------------------------------------


class Scripted:
    """A runner that says what it was told to; it notes the tokens that it is fed."""

    max_len, eos_token_ids = 99, ()

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.fed, self.step = logits, [], 0  # [S, steps, V]

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        seq_ids: Sequence[int],
        chunk_size: int | None = None,
    ) -> Tensor:
        return self._next()

    def decode(self, tokens: Sequence[int], seq_ids: Sequence[int]) -> Tensor:
        self.fed.append(list(tokens))
        return self._next()

    def _next(self) -> Tensor:
        self.step += 1
        return self.logits[:, self.step - 1]


def verdict(want: Tensor, got: Tensor) -> tuple[LedgerRow, LedgerRow]:
    """The ledger's rows for the reference and for one other path."""
    paths = {
        REFERENCE: Path(lambda _: Scripted(want), together=True),
        "other": Path(lambda _: Scripted(got), together=True),
    }
    first, second = ledger(paths, [[1], [2]], want.shape[1])
    return first, second


def scripted_logits(largest: float = 1.0) -> Tensor:
    """Two sequences, three steps, five tokens; the best is `largest`, far ahead."""
    logits = torch.zeros(2, 3, 5)
    logits[..., 2] = largest
    return logits


@pytest.mark.parametrize("largest", [0.5, 1.0, 20.0])
@pytest.mark.parametrize(("times", "ok"), [(0.0, True), (0.98, True), (1.02, False), (50.0, False)])
def test_tolerance_is_a_ten_thousandth_of_the_largest_logit(
    largest: float, times: float, ok: bool
) -> None:
    want = scripted_logits(largest)
    got = want.clone()
    got[1, 2, 4] -= times * 1e-4 * max(1.0, largest)
    _, row = verdict(want, got)
    assert row.tolerance == pytest.approx(1e-4 * max(1.0, largest))
    assert row.equal == row.steps == 6
    assert row.ok is ok
    assert (" > tolerance" in table([row])) is not ok


@pytest.mark.parametrize("step", [0, 1, 2])
def test_one_token_that_differs_is_enough(step: int) -> None:
    want = scripted_logits()
    want[0, step, 3] = 1 - 2e-5
    got = want.clone()
    got[0, step, 3] = 1 + 2e-5
    first, row = verdict(want, got)
    assert row.difference <= row.tolerance and (row.equal, row.steps) == (5, 6)
    assert first.ok and not row.ok
    assert "5 of 6 ✘" in table([first, row]) and "BELOW 0.001" in table([first, row])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [(0, 0, 2), (1, 2, 4)])
def test_logits_that_are_no_numbers_never_pass(value: float, where: tuple[int, ...]) -> None:
    want, broken = scripted_logits(), scripted_logits()
    broken[where] = value
    for reference, other in ((want, broken), (broken, want), (broken, broken)):
        rows = verdict(reference, other)
        assert not rows[1].ok
        assert "✘" in table(rows) and table(rows).splitlines()[2].endswith("✘")
    assert not verdict(broken, broken)[0].ok, "the reference itself"


def test_margin_is_the_smallest_of_the_reference() -> None:
    want = scripted_logits()
    want[1, 1, 0] = 0.75
    first, row = verdict(want, scripted_logits())
    assert first.margin == row.margin == 0.25


@pytest.mark.parametrize(
    ("difference", "equal", "ok"),
    [
        (0.0, 6, True),
        (1e-4, 6, True),
        (1.001e-4, 6, False),
        (0.0, 5, False),
        (1.0, 0, False),
        (float("nan"), 6, False),
        (float("inf"), 6, False),
    ],
)
def test_row_passes_when_both_are_right(difference: float, equal: int, ok: bool) -> None:
    assert LedgerRow("path", difference, 1e-4, equal, 6, 0.5).ok is ok


def test_paths_are_fed_with_the_references_tokens() -> None:
    want = scripted_logits()
    want[1, 0, 4] = 3.0
    other = Scripted(-want)
    paths = {
        REFERENCE: Path(lambda _: Scripted(want), together=True),
        "other": Path(lambda _: other, together=True),
    }
    row = ledger(paths, [[1], [2]], 3)[1]
    assert other.fed == [[2, 4], [2, 2]]
    assert row.equal == 0 and not row.ok


def test_path_alone_gets_a_fresh_runner_for_each_prompt() -> None:
    made: list[int] = []

    def make_runner(rows: int) -> Runner:
        made.append(rows)
        return Scripted(scripted_logits()[:rows])

    assert Path(make_runner).run([[1], [2], [3]], 3).shape == (3, 3, 5)
    assert Path(make_runner, together=True).run([[1], [2]], 2).shape == (2, 2, 5)
    assert made == [1, 1, 1, 2]


def test_chunk_size_reaches_the_runner() -> None:
    seen: list[int | None] = []

    class Noting(Scripted):
        def prefill(self, prompts: Any, seq_ids: Any, chunk_size: int | None = None) -> Tensor:
            seen.append(chunk_size)
            return super().prefill(prompts, seq_ids)

    for chunk_size in (None, 7):
        Path(lambda _: Noting(scripted_logits()), True, chunk_size).run([[1], [2]], 1)
    assert seen == [None, 7]


def test_unknown_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no path 'oracle'.*'no cache'"):
        ledger(our_paths(random_model()), [[1]], 2, reference="oracle")


def test_any_path_can_be_the_reference() -> None:
    paths = our_paths(random_model(), MAX_LEN)
    rows = ledger(paths, random_prompts(0), 3, reference="static cache")
    said = {line[:40].strip(): line for line in table(rows).splitlines()}
    assert all(row.ok for row in rows)
    assert "reference" in said["static cache"] and "reference" not in said[REFERENCE]


def test_new_path_is_one_more_row() -> None:
    model = random_model()
    paths = our_paths(model, MAX_LEN) | {
        "mine": Path(lambda _: BackendRunner(model, new_cache(model)))
    }
    rows = ledger(paths, random_prompts(0), 3)
    assert rows[-1].path == "mine" and rows[-1].ok
    assert len(rows) == len(our_paths(model)) + 1


def test_table_has_verdicts_and_no_digits_that_differ_between_machines() -> None:
    rows = [
        LedgerRow("no cache", 0.0, 1e-4, 6, 6, 0.5, is_reference=True),
        LedgerRow("bit equal", 0.0, 1e-4, 6, 6, 0.5),
        LedgerRow("near", 3.14159e-6, 1e-4, 6, 6, 0.5),
        LedgerRow("far", 2.71828, 1e-4, 4, 6, 0.5),
        LedgerRow("no number", float("nan"), 1e-4, 6, 6, 0.5),
    ]
    assert [" ".join(line.split()) for line in table(rows).splitlines()] == [
        "path max |Δ logit| greedy tokens",
        "no cache reference 6 of 6 ✔",
        "bit equal ≤ tolerance 6 of 6 ✔",
        "near ≤ tolerance 6 of 6 ✔",
        "far > tolerance 4 of 6 ✘",
        "no number > tolerance 6 of 6 ✘",
        "tolerance: 1e-4 · largest logit; smallest top1 − top2 is above 0.001",
    ]
