"""What other rules and mistakes get beside vLLM: not every answer comes near its steps."""

from collections.abc import Mapping

from tokenizers import Tokenizer

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.lab.beside_vllm import Beside, recorded_decisions
from tutorial_engine.learn.parts.scheduler import Work, plan_step, waiting_first
from tutorial_engine.learn.parts.server import VLLM_RUNS, OwnServer
from tutorial_engine.learn.stories.bugs import Zoo, edited, planted
from tutorial_engine.model.decoder import CausalLM

TO_THE_END = (("nameless + named", "gone"), ("in reversed(nameless)", "in ()"))
OTHERS: Mapping[int, Zoo] = {  # of the lessons 04 and 05
    4: {
        "slots without the offset": edited(
            PagedKVCache,
            "_slots_of",
            ("as_slots(blocks)", "torch.tensor(blocks)"),
            ("+ torch.arange(size)", "+ torch.zeros(size, dtype=int)"),
        )
    },
    5: {
        "free: head first, to the end of the queue": edited(
            BlockManager, "_give_back", ("reversed(table)", "table"), *TO_THE_END
        ),
        "free: tail first, to the end of the queue": edited(
            BlockManager, "_give_back", *TO_THE_END
        ),
    },
}


def one_newcomer(running: Work, waiting: Work, budget: int, max_num_seqs: int) -> dict[str, int]:
    """As plan_step, but only the first of those who wait may join in a step."""
    return plan_step(running, waiting[:1], budget, max_num_seqs)


def others_beside_vllm(model: CausalLM, tokenizer: Tokenizer, lesson: int) -> str:
    """The runs of `OwnServer.beside_vllm` in notebook 03, 04 or 05, with two other answers each."""
    server = OwnServer(model, tokenizer, "rows" if lesson == 3 else "pages")
    recorded = recorded_decisions()
    runs, found = [recorded[i] for i in VLLM_RUNS[server.memory]], {}
    if lesson == 3:
        rules = {
            "those who wait go first": waiting_first,
            "at most one newcomer in a step": one_newcomer,
        }
        for name, rule in rules.items():
            server.parts.own["plan_step"] = rule
            found[name] = server.decide(runs, name="this rule")
        first = found["those who wait go first"][-1].first_difference
        told = f"Where those who wait go first, the last run goes its own way in {first}"
        return f"{len(runs)} runs of vLLM:\n{_told(found)}\n{told}"
    if lesson == 4:
        twice = [{**run, "num_blocks": 2 * run["num_blocks"]} for run in runs]
        found["num_blocks that forgets V"] = server.decide(twice)
    for name in OTHERS[lesson]:
        with planted(name, OTHERS[lesson]):
            found[name] = server.decide(runs)
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
