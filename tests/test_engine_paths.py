"""The engine's rows of the ledger: each runs what its name says, and a mistake would be seen."""

from collections.abc import Iterator

import pytest
import torch
from checkpoints import random_sequences
from engines import VOCAB, one_thread, random_model, watched
from torch import Tensor
from tutorial_engine.lab.engine_paths import EnginePath, ForcedSampler, engine_paths

from tutorial_engine.engine.engine import EngineConfig, LLMEngine, StepOutput
from tutorial_engine.lab.ledger import REFERENCE, ledger, our_paths
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken

PROMPTS = random_sequences([5, 1, 9], VOCAB)
NEIGHBOURS = random_sequences([7, 3], VOCAB, seed=2)
STEPS = 4


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def small() -> Qwen3ForCausalLM:
    return random_model()


def logits_of(token: int) -> Tensor:
    logits = torch.zeros(10)
    logits[token] = 1.0
    return logits


# -- the sampler ----------------------------------------------------------------------------------


def test_a_forced_sampler_says_what_it_is_told_and_keeps_what_it_saw() -> None:
    sampler = ForcedSampler(SamplingParams(), [4, 2])
    assert [sampler.sample(logits_of(7)), sampler.sample(logits_of(8))] == [
        SampledToken(4),
        SampledToken(2),
    ]
    assert [int(logits.argmax()) for logits in sampler.logits] == [7, 8]


def test_without_tokens_it_is_greedy() -> None:
    sampler = ForcedSampler(SamplingParams())
    assert [sampler.sample(logits_of(i)).token_id for i in (7, 8)] == [7, 8]
    assert len(sampler.logits) == 2


def test_it_keeps_a_copy_of_the_logits() -> None:
    sampler, logits = ForcedSampler(SamplingParams()), logits_of(7)
    sampler.sample(logits)
    logits.zero_()
    assert int(sampler.logits[0].argmax()) == 7


def test_logits_that_are_no_numbers_are_refused_and_not_kept() -> None:
    sampler = ForcedSampler(SamplingParams(), [4])
    with pytest.raises(ValueError, match="not numbers"):
        sampler.sample(torch.full((10,), float("nan")))
    assert sampler.logits == []
    assert sampler.sample(logits_of(1)) == SampledToken(4)


# -- the paths ------------------------------------------------------------------------------------


def test_every_path_of_the_engine_is_equal_to_no_cache(small: Qwen3ForCausalLM) -> None:
    engine = engine_paths(small, NEIGHBOURS, max_len=32)
    paths = {REFERENCE: our_paths(small)[REFERENCE], **engine}
    rows = ledger(paths, PROMPTS, STEPS)
    assert [row.path for row in rows if not row.ok] == []
    assert len(rows) == 6 and all(row.steps == len(PROMPTS) * STEPS for row in rows)


def test_a_path_follows_the_tokens_that_it_is_fed_with(small: Qwen3ForCausalLM) -> None:
    path = engine_paths(small, NEIGHBOURS, max_len=32)["engine, batched"]
    free = path.run(PROMPTS, STEPS)
    assert free.shape == (3, STEPS, VOCAB)
    own = path.run(PROMPTS, STEPS, free.argmax(-1))
    torch.testing.assert_close(own, free)
    other = path.run(PROMPTS, STEPS, (free.argmax(-1) + 1) % VOCAB)
    torch.testing.assert_close(other[:, 0], free[:, 0])
    assert not torch.allclose(other[:, 1], free[:, 1], atol=1e-2)


def forwards(model: Qwen3ForCausalLM, name: str) -> list[Batch]:
    """What a path runs, forward by forward."""
    path = engine_paths(model, NEIGHBOURS, max_len=32)[name]
    with watched(model) as batches:
        path.run(PROMPTS, STEPS)
    return batches


def test_the_batched_path_runs_all_in_every_forward(small: Qwen3ForCausalLM) -> None:
    runs = [batch.query_lens for batch in forwards(small, "engine, batched")]
    assert runs == [(5, 1, 9), (1, 1, 1), (1, 1, 1), (1, 1, 1)]


def test_the_chunked_path_runs_four_tokens_at_most_and_cuts_prompts(
    small: Qwen3ForCausalLM,
) -> None:
    batches = forwards(small, "engine, chunked prefill, budget 4")
    runs = [batch.query_lens for batch in batches]
    assert runs[:3] == [(4,), (1, 1, 2), (1, 1, 2)]
    assert max(map(sum, runs)) == 4


def test_the_random_order_path_lets_them_come_one_after_the_other(
    small: Qwen3ForCausalLM,
) -> None:
    batches = forwards(small, "engine, random arrival order")
    assert [batch.num_seqs for batch in batches] == [1, 1, 2, 2, 2, 2, 1, 1]
    newest = [batches[i].input_ids[batches[i].seq_starts[-2] :].tolist() for i in (0, 2, 4)]
    assert sorted(newest) == sorted(PROMPTS) and newest != PROMPTS


def test_neighbours_run_along(small: Qwen3ForCausalLM) -> None:
    batches = forwards(small, "engine, neighbours")
    assert [batch.query_lens for batch in batches] == [
        (7, 3, 5, 1),
        (1, 1, 1, 1, 9),
        (1, 1, 1, 1, 1),
        (1, 1, 1, 1, 1),
        (1, 1, 1),
    ]


def test_a_neighbour_that_is_aborted_is_gone_from_the_next_forward(
    small: Qwen3ForCausalLM,
) -> None:
    batches = forwards(small, "engine, a neighbour aborted")
    assert [batch.num_seqs for batch in batches] == [4, 5, 5, 3, 1]


class Watched(LLMEngine):
    """Notes who was aborted after how many steps, and does not step for ever."""

    aborted: list[tuple[int, str]]

    def abort(self, request_id: str) -> None:
        self.aborted.append((self.num_steps, request_id))
        super().abort(request_id)

    def step(self) -> list[StepOutput]:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 200:
            raise TimeoutError("this never ends")
        return super().step()


def make(model: Qwen3ForCausalLM, max_len: int = 32) -> Watched:
    engine = Watched(model, config=EngineConfig(max_model_len=max_len))
    engine.aborted = []
    return engine


def test_neighbours_are_aborted_when_it_is_said_and_never_the_others(
    small: Qwen3ForCausalLM,
) -> None:
    engine = make(small)
    path = EnginePath(lambda: engine, neighbours=NEIGHBOURS, abort_after=2)
    logits = path.run(PROMPTS, STEPS)
    assert sorted(engine.aborted) == [(2, "r0"), (2, "r1")]
    torch.testing.assert_close(logits, EnginePath(lambda: make(small)).run(PROMPTS, STEPS))


def test_neighbours_that_are_not_aborted_outlast_the_prompts(small: Qwen3ForCausalLM) -> None:
    engine = make(small)
    EnginePath(lambda: engine, neighbours=NEIGHBOURS).run(PROMPTS, STEPS)
    assert engine.aborted == [] and engine.requests.keys() == {"r0", "r1"}


def test_the_paths_of_the_ledger_with_neighbours_have_them(small: Qwen3ForCausalLM) -> None:
    paths = engine_paths(small, NEIGHBOURS, max_len=32)
    with_them = {name for name, path in paths.items() if path.neighbours}
    assert with_them == {"engine, neighbours", "engine, a neighbour aborted"}
    assert all(paths[name].neighbours == NEIGHBOURS for name in with_them)
    assert paths["engine, a neighbour aborted"].abort_after == 3
    assert paths["engine, neighbours"].abort_after is None


def test_the_books_are_checked_after_every_step(
    small: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = []
    monkeypatch.setattr(
        LLMEngine, "check_integrity", lambda engine: checks.append(engine.num_steps)
    )
    EnginePath(lambda: make(small)).run(PROMPTS, STEPS)
    assert checks == [1, 2, 3, 4]


def test_a_path_that_cannot_give_so_many_tokens_says_so(small: Qwen3ForCausalLM) -> None:
    path = EnginePath(lambda: make(small, max_len=8))
    with pytest.raises((ValueError, RuntimeError)):
        path.run([[1, 2, 3, 4, 5]], num_tokens=6)
