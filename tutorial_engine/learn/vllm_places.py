"""Where each thing of this engine is in vLLM, and what vLLM does more there.

Each name of ours is checked to be there. Theirs were opened in the source of the version that is
named.
"""

import textwrap
from collections.abc import Mapping
from html import escape
from typing import NamedTuple

from tutorial_engine.learn.elsewhere import find

OPENED = "vLLM 0.32.0"
SOURCE = "https://github.com/vllm-project/vllm/blob/v0.32.0/"  # of this version
TO_BEGIN_WITH = ("plan a step", "take memory away", "let in, give blocks", "order of free blocks")


class Place(NamedTuple):
    """One thing: our function, vLLM's in its file (below vllm/), what it does more, and why."""

    what: str
    ours: str  # room.module.name, below tutorial_engine; "" where there is none
    file: str
    theirs: Mapping[str, int]  # a name there -> the line where to read
    more: str


PLACES = (
    Place(
        "the loop",
        "engine.engine.LLMEngine.step",
        "v1/engine/core.py",
        {"EngineCore.step": 657, "EngineCore.step_with_batch_queue": 698},
        "step does plan, forward, update, as here. With asynchronous scheduling "
        "step_with_batch_queue runs in its place: it plans a step while the last one still runs. "
        "The loop has a process of its own: another process sends it the requests and gets the "
        "tokens.",
    ),
    Place(
        "plan a step",
        "engine.scheduler.Scheduler.schedule",
        "v1/core/sched/scheduler.py",
        {"Scheduler.schedule": 591},
        "The same two loops, first who runs, then who waits. In between are the cases of other "
        "users: pictures and sound (they have a budget of their own), small changes of the weights "
        "(LoRA), answers in a given form, blocks that come from another machine.",
    ),
    Place(
        "share the budget",
        "engine.scheduler.Scheduler.num_tokens_to_run",
        "v1/core/sched/scheduler.py",
        {"Scheduler.schedule": 710},
        "There it is not a method of its own: each loop has a min(...) with what is left of the "
        "budget (in the second one request_token_budget). Tokens that were guessed (speculative "
        "decoding) need room, too. The option "
        "long_prefill_token_threshold limits a long prompt, unless its request is the only one "
        "(look for num_eligible_reqs > 1).",
    ),
    Place(
        "take memory away",
        "engine.scheduler.Scheduler.preempt",
        "v1/core/sched/scheduler.py",
        {"Scheduler._preempt_request": 1571},
        "Scheduler.schedule chooses who gives way (look for preempted_req): the last one, or "
        "another one with --scheduling-policy priority. _preempt_request then takes its blocks and "
        "puts it back into the queue. With asynchronous scheduling a token of it may still be on "
        "its way.",
    ),
    Place(
        "let in, give blocks",
        "cache.paged.PagedKVCache.allocate",
        "v1/core/kv_cache_manager.py",
        {"KVCacheManager.allocate_slots": 371},
        "A model with several kinds of layers (some with a sliding window, for example) has a "
        "table for each kind. A watermark is a part of the blocks that stays free when requests "
        "are admitted; it is 0 by default. Here a request is admitted only if all its tokens fit. "
        "There this is an option, scheduler_reserve_full_isl, and it is on.",
    ),
    Place(
        "order of free blocks",
        "cache.blocks.BlockManager.free",
        "v1/core/block_pool.py",
        {"BlockPool.free_blocks": 774},
        "The queue is a linked list that the blocks themselves make up (FreeKVCacheBlockQueue in "
        "v1/core/kv_cache_utils.py): a block that is found leaves it from the middle in one move, "
        "and no Python object is made.",
    ),
    Place(
        "hash a block",
        "cache.blocks.BlockManager.hash_of",
        "v1/core/kv_cache_utils.py",
        {"hash_block_tokens": 695},
        "Other things go into the hash as well (extra_keys): which LoRA, which picture. A salt "
        "(something secret that keeps users apart) belongs to the whole cache here, and to each "
        "request there. A hash is made as soon as the tokens of a block are known: for a prompt "
        "when the request comes, for the output when a token fills the block.",
    ),
    Place(
        "find a beginning",
        "cache.blocks.BlockManager.find",
        "v1/core/kv_cache_manager.py",
        {"KVCacheManager.get_computed_blocks": 264},
        "The same rule leaves one token to run: see max_cache_hit_length. A connector (section 7) "
        "may find more, in the memory of the computer or of another machine. For a model with "
        "several kinds of layers the last block of a beginning need not be full (see "
        "cache_partial_block in v1/core/block_pool.py).",
    ),
    Place(
        "block tables",
        "cache.blocks.BlockManager",
        "v1/worker/gpu/block_table.py",
        {"BlockTables": 17},
        "A tensor on the GPU, a row for each request, changed in place: nothing is sent twice. The "
        "scheduler keeps its own, as lists of block objects on the CPU; with several GPUs the "
        "workers are other processes. (This file is of the new runner, the part that runs the "
        "model. On a CPU the old runner is used: v1/worker/block_table.py.)",
    ),
    Place(
        "slots of tokens",
        "cache.paged.PagedKVCache._slots_of",
        "v1/worker/gpu/block_table.py",
        {"BlockTables.compute_slot_mappings": 187},
        "The same formula in a program for the GPU (a Triton kernel): block number · block size + "
        "offset. If the tokens of one request are divided among GPUs, each computes its own.",
    ),
    Place(
        "choose a token",
        "sampling.sampler.Sampler",
        "v1/worker/gpu/sample/sampler.py",
        {"Sampler.__call__": 134},
        "All requests at once, as tensors. Ours does so for those that are plainly greedy, and "
        "goes from row to row for the others (Sampler.takes_best). The docstring of the old "
        "runner's Sampler (v1/sample/sampler.py) has the nine steps in order.",
    ),
    Place(
        "count what was run",
        "engine.scheduler.Scheduler.update",
        "v1/core/sched/scheduler.py",
        {"Scheduler.update_from_output": 2026},
        "Look at _update_after_schedule, too: there the computed tokens of a step are counted when "
        "it is planned, and corrected afterwards. So the next step can be planned before.",
    ),
    Place(
        "plan ahead",
        "",
        "v1/core/sched/async_scheduler.py",
        {"AsyncScheduler": 14},
        "The default there. num_output_placeholders counts tokens that are planned and not "
        "known yet; the block that they fill gets its hash when they arrive.",
    ),
    Place(
        "make text",
        "sampling.stopping.StopChecker",
        "v1/engine/detokenizer.py",
        {"FastIncrementalDetokenizer.decode_next": 222},
        "It is done in another process than the steps, so that text costs the GPU no time.",
    ),
    Place(
        "stop",
        "sampling.stopping.StopChecker.update",
        "v1/core/sched/utils.py",
        {"check_stop": 98},
        "Ids and lengths are looked at here, in the process of the steps; stop strings where the "
        "text is (check_stop_strings in v1/engine/detokenizer.py). So a step more may have been "
        "run, whose token is dropped.",
    ),
)


def in_vllm() -> str:
    """The parts of our scheduler and vLLM's, a line each. Errors as `find`."""
    decides = ("engine.scheduler.", "cache.paged.PagedKVCache.allocate")
    scheduler = [place for place in PLACES if place.ours.startswith(decides)]
    lines = [f"{'here':24}{OPENED}"]
    for place in scheduler:
        find(place.ours)
        theirs = ", ".join(place.theirs)
        lines.append(f"{place.ours.rpartition('.')[2]:24}{theirs}, vllm/{place.file}")
    return "\n".join(lines)


class Places:
    """All of them, as a table in a notebook, else as text."""

    def __init__(self) -> None:
        for place in PLACES:
            if place.ours:
                find(place.ours)

    def __repr__(self) -> str:
        lines = []
        for what, ours, file, theirs, more in PLACES:
            there = ", ".join(f"{name} (line {line})" for name, line in theirs.items())
            lines += [what, f"  here  {ours or 'nothing'}", f"  there {there}, vllm/{file}"]
            lines += textwrap.wrap(more, 92, initial_indent="  ", subsequent_indent="  ")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{c}</th>" for c in ("what", "here", OPENED, "what vLLM adds, and why"))
        first, others = "", ""
        for what, ours, file, theirs, more in PLACES:
            links = [
                f'<a href="{SOURCE}vllm/{file}#L{line}"><code>{escape(name)}</code></a>'
                for name, line in theirs.items()
            ]
            cells = (
                f"<b>{escape(what)}</b>",
                f"<code>{escape(ours)}</code>" if ours else "nothing",
                f"{', '.join(links)}<br/>vllm/{escape(file)}",
                escape(more),
            )
            row = "".join(f'<td style="text-align:left;vertical-align:top">{c}</td>' for c in cells)
            if what in TO_BEGIN_WITH:
                first += f"<tr>{row}</tr>"
            else:
                others += f"<tr>{row}</tr>"
        more = f"<summary>{len(PLACES) - len(TO_BEGIN_WITH)} more</summary>"
        return (
            f"<div><table><tr>{head}</tr>{first}</table>"
            f"<details>{more}<table><tr>{head}</tr>{others}</table></details></div>"
        )
