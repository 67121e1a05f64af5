"""What other rules and mistakes get beside vLLM: not every answer comes near its steps."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from tutorial_engine.engine.policies import StaticBatching
from tutorial_engine.lab.beside_vllm import Beside, recorded_decisions
from tutorial_engine.learn.own_scheduler import waiting_first
from tutorial_engine.learn.own_server import VLLM_RUNS, OwnServer
from tutorial_engine.model.decoder import CausalLM


def others_beside_vllm(model: CausalLM, tokenizer: Tokenizer, lesson: int) -> str:
    """The runs of `OwnServer.beside_vllm` in notebook 03, 04 or 05, with two other answers each."""
    server = OwnServer(model, tokenizer, "rows" if lesson == 3 else "pages")
    runs, own = [recorded_decisions()[i] for i in VLLM_RUNS[server.memory]], server.parts.own
    if lesson == 3:
        static = server.decide(runs, StaticBatching)
        own["plan_step"] = waiting_first
        waiting = server.decide(runs, name="this rule")
        first = f"The first step that differs when they go first: {waiting[-1].first_difference}"
        return _told({"those who wait go first": waiting, "static batching": static}) + "\n" + first
    if lesson == 4:
        twice = [{**run, "num_blocks": 2 * run["num_blocks"]} for run in runs]
        found = {"num_blocks that forgets V": server.decide(twice)}
        own["slots"] = lambda table, size, n: [table[p // size] * size for p in range(n)]
        return _told(found | {"slots without the offset": server.decide(runs)})
    found = {}
    for name, step in {"head first": 1, "tail first": -1}.items():
        own["free"] = partial(_free_to_the_end, step)
        found[f"free: {name}, to the end of the queue"] = server.decide(runs)
    return _told(found)


def _told(found: Mapping[str, list[Beside]]) -> str:
    lines = []
    for name, each in found.items():
        same, planned = sum(run.num_same for run in each), sum(run.num_planned for run in each)
        steps, requests = sum(run.num_steps for run in each), sum(run.num_requests for run in each)
        plans = f" ({planned} have its plan)" if planned > same else ""
        lines.append(
            f"{name}: {same} of {steps} steps are vLLM's{plans}, and "
            f"{sum(run.same_tokens for run in each)} of {requests} requests have vLLM's tokens"
        )
    return "\n".join(lines)


def _free_to_the_end(
    step: int, table: list[int], ref_cnt: dict[int, int], queue: list[int], hashes: dict[int, Any]
) -> None:
    """All blocks that nobody holds any more go to the end of the queue, with or without a hash."""
    for block in table[::step]:
        ref_cnt[block] -= 1
        if ref_cnt[block] == 0:
            queue.append(block)
