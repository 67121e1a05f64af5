"""What vLLM 0.32 decided on 41 runs, recorded from it, and what this engine decides on them.

In the last one prompts of whole blocks are asked again: their last block is computed twice, and
both copies can be found.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.lab.beside_vllm import compare, read_runs, recorded_decisions, vllm_path
from tutorial_engine.lab.ledger import REFERENCE, ledger, our_paths
from tutorial_engine.learn.exercises.lesson_03 import check_shortest
from tutorial_engine.learn.parts.scheduler import ShortestFirst, num_tokens_to_run, plan_step
from tutorial_engine.learn.parts.server import VLLM_RUNS, OwnServer
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.model.decoder import CausalLM

pytestmark = pytest.mark.slow
RUNS = recorded_decisions() + read_runs(Path(__file__).parent / "vllm_asked_again.json.gz")


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_it_decides_as_vllm_does(number: int, model: CausalLM) -> None:
    """Tokens, plans, hits, preemptions, free blocks and, but for their numbers, block tables."""
    assert not (difference := compare(RUNS[number], model)), difference


def leaves_two_tokens(self: BlockManager, token_ids: Sequence[int]) -> list[bytes]:
    """What is found is counted without the last token: two are left to run, where one will do."""
    return FIND(self, token_ids[:-1])


def frees_heads_first(self: BlockManager, table: Sequence[int]) -> None:
    GIVE_BACK(self, table[::-1])


def hashes_only_the_first(
    self: BlockManager, seq_id: str, token_ids: Sequence[int], num_tokens: int
) -> None:
    """Of two equal blocks the second one has no name, and is taken again first."""
    CACHE(self, seq_id, token_ids, num_tokens)
    for block in [block for twins in self._twins.values() for block in twins]:
        self.forget(block)


CACHE, FIND = BlockManager.cache_full_blocks, BlockManager.find
GIVE_BACK = BlockManager._give_back
MISTAKES = {
    "an equal block without a hash": ("cache_full_blocks", hashes_only_the_first),
    "hits without the last token": ("find", leaves_two_tokens),
    "the free order reversed": ("_give_back", frees_heads_first),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_seen(name: str, model: CausalLM) -> None:
    with patch.object(BlockManager, *MISTAKES[name]):
        assert any(compare(run, model) for run in reversed(RUNS))  # the last one has equal blocks


# -- the learner's parts: the solutions of 03, 04 and 05 show what is said of right ones (nbval) ---


def asks_who_waits_first(
    running: Sequence[tuple[str, int]],
    waiting: Sequence[tuple[str, int]],
    budget: int,
    max_num_seqs: int,
) -> dict[str, int]:
    turned = waiting[: max_num_seqs - len(running)], running
    return plan_step(*turned, budget, max_num_seqs + len(running))


def plans_nothing(*_: object) -> dict[str, int]:
    return {}


def server_with(memory: str, *parts: Callable[..., Any]) -> OwnServer:
    server = OwnServer(load_model(), load_tokenizer(), memory)
    server.parts.own |= {part.__name__: part for part in parts}
    return server


def first_gives_way(
    request: Any, running: list[Any], allocate: Callable[..., Any], preempt: Callable[..., Any]
) -> Any:
    """As `slots_for`, but who came first gives way."""
    while (slots := allocate(request)) is None:
        preempt(gone := running[0])
        if gone is request:
            return None
    return slots


WRONG = {  # of each part that drives and may be named with pages, and of one that runs beside ours
    "num_tokens_to_run": lambda known, computed, budget, *_: min(known - computed, budget, 5),
    "plan_step": asks_who_waits_first,
    "slots_for": first_gives_way,
    "find": lambda *_: [],
}


@pytest.mark.parametrize("name", WRONG)
def test_no_part_is_named_that_decides_nothing(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong one is seen: in the plans, the blocks or the tokens, or it is taken out."""
    server = server_with("pages")
    server.parts.own[name] = WRONG[name]
    told, said = repr(server.beside_vllm()), capsys.readouterr().out
    assert name in said if "package's parts" in told else told.startswith(f"✘ With your {name}, ")


def test_a_part_that_is_not_asked_is_not_named_and_cells_are_not_compared() -> None:
    server = server_with("rows", plan_step, num_tokens_to_run)
    server.use(ShortestFirst, check_shortest)  # vLLM serves in order of arrival
    assert "✔ With your plan_step, 653 of 653" in repr(server.beside_vllm())
    assert server.policy == "ShortestFirst", "it serves on"
    with pytest.raises(ValueError, match="vLLM has blocks"):
        server_with("cells").beside_vllm()


def test_a_part_that_fails_is_told_and_taken_out(capsys: pytest.CaptureFixture[str]) -> None:
    server = server_with("rows")
    server.parts.own["plan_step"] = plans_nothing
    assert "✔ With the package's parts" in repr(server.beside_vllm())
    assert "your plan_step gave {}" in capsys.readouterr().out


def test_with_rows_all_runs_count_in_which_memory_decides_nothing() -> None:
    def decides(step: Mapping[str, Any]) -> bool:
        return bool(step["preempted"] or any(step["cached"].values()))

    free = [i for i, run in enumerate(recorded_decisions()) if not any(map(decides, run["steps"]))]
    assert VLLM_RUNS["rows"] == (*free,)


# -- a row of the ledger --------------------------------------------------------------------------

PROMPTS = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]


def test_vllms_logits_are_ours() -> None:
    model, tokenizer = load_model(), load_tokenizer()
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    paths = {REFERENCE: our_paths(model)[REFERENCE], "vLLM": vllm_path}
    row = ledger(paths, prompts, num_tokens=12)[1]
    assert row.ok and 0 < row.difference < 1e-4
    for wrong, match in (
        ([[1, 2, 3]], "were recorded for the three prompts"),
        (prompts[:1], "12 tokens were recorded, not 13"),
    ):
        with pytest.raises(ValueError, match=match):
            vllm_path(wrong, 13)
    with pytest.raises(ValueError, match="cannot be fed with other tokens"):
        vllm_path(prompts[:1], 2, torch.tensor([[0, 0]]))
