"""What vLLM's scheduler decides on random workloads, step by step, as JSON.

    .venv-vllm/bin/python -P tools/vllm/record.py CHECKPOINT OUT.json SEED RUNS

Runs inside vLLM's environment and imports nothing of this repository. Requests are r0, r1, ... as
they came. Block 0 is vLLM's own null block: its block n is written as n − 1, and a pool as one
block less. tutorial_engine/lab/beside_vllm.py reads the file.
"""

import gc
import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import vllm
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

BLOCK_SIZE, MAX_MODEL_LEN = 32, 320  # tokens; on a CPU vLLM takes blocks of 32, 64, ...
RUNS_PER_ENGINE = 5  # one takes seconds to load
VOCABULARY = range(3, 512)  # the ids before it are no words
Step = dict[str, Any]


def workload(draw: random.Random) -> list[tuple[list[int], int]]:
    """Prompts, some of which begin alike or come twice, and how many tokens each wants."""
    shared = draw.choices(VOCABULARY, k=100)
    requests: list[tuple[list[int], int]] = []
    for _ in range(draw.choice([3, 6, 10])):
        beginning = shared[: draw.choice([0, 0, 20, 33, 64, 70, 96])]
        prompt = beginning + draw.choices(VOCABULARY, k=draw.randrange(1, 120))
        if requests and draw.random() < 0.2:  # the same again
            prompt = draw.choice(requests)[0]
        if (
            len(prompt) > BLOCK_SIZE and draw.random() < 0.3
        ):  # whole blocks: the last one is not found
            prompt = prompt[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE]
        requests.append((prompt, draw.randrange(1, 70)))
    return requests


def limits(draw: random.Random) -> dict[str, Any]:
    """Options of an engine: pools that are too small among them, and small budgets."""
    return {
        "num_gpu_blocks_override": draw.choice([11, 13, 16, 24, 60]),
        "max_num_batched_tokens": draw.choice([48, 64, 128, 512]),
        "max_num_seqs": draw.choice([2, 4, 8]),
        "enable_prefix_caching": draw.random() < 0.7,
    }


def name_of(request_id: str) -> str:
    """vLLM puts something random behind the number of a request."""
    return "r" + request_id.split("-")[0]


def facts(scheduler: Scheduler, plan: Any) -> Step:
    """What this plan decides, and the pool as it is then."""
    manager = scheduler.kv_cache_manager
    return {
        "num_tokens": {name_of(i): n for i, n in plan.num_scheduled_tokens.items()},
        "cached": {name_of(r.req_id): r.num_computed_tokens for r in plan.scheduled_new_reqs},
        "preempted": sorted(map(name_of, plan.preempted_req_ids or ())),
        "waiting": len(scheduler.waiting),
        "free_blocks": manager.block_pool.get_num_free_blocks(),
        "blocks": {
            name_of(r.request_id): [b - 1 for b in manager.get_block_ids(r.request_id)[0]]
            for r in scheduler.running
        },
    }


def watch(steps: list[Step]) -> None:
    """From now on every plan that is not empty is added to `steps`."""
    schedule: Callable[..., Any] = Scheduler.schedule

    def watched(self: Scheduler, *args: Any, **options: Any) -> Any:
        plan = schedule(self, *args, **options)
        if plan.num_scheduled_tokens:
            steps.append(facts(self, plan))
        return plan

    Scheduler.schedule = watched


def runs(checkpoint: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """`count` runs of random workloads, on an engine of other limits after every five."""
    steps: list[Step] = []
    watch(steps)
    draw = random.Random(seed)
    llm: Any = None
    for number in range(count):
        if number % RUNS_PER_ENGINE == 0:
            llm = None  # give the old one's memory back first
            gc.collect()
            options = limits(draw) | {"max_model_len": MAX_MODEL_LEN, "block_size": BLOCK_SIZE}
            llm = LLM(checkpoint, dtype="float32", enforce_eager=True, **options)
        llm.reset_prefix_cache()
        llm.request_counter.counter = 0  # the first request is r0 again
        steps.clear()
        requests = workload(draw)
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests],
            use_tqdm=False,
        )
        asked = dict(options)
        yield {
            "num_blocks": asked.pop("num_gpu_blocks_override") - 1,
            **asked,
            "prompts": [prompt for prompt, _ in requests],
            "max_tokens": [n for _, n in requests],
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
            "num_cached_tokens": [output.num_cached_tokens for output in outputs],
            "steps": list(steps),
        }


def main() -> None:
    """Record, and write one file."""
    checkpoint, path, seed, count = sys.argv[1:]
    records = list(runs(checkpoint, int(seed), int(count)))
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"vllm": vllm.__version__, "records": records}, file, separators=(",", ":"))


if __name__ == "__main__":
    main()
