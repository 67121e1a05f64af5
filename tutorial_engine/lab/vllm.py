"""A vLLM that runs in this process, recorded: its decisions as the events of our own trace.

`record` surrounds the methods in which vLLM (seen with 0.32) decides; it changes no decision. What
it yields is a trace like our engine's, so every picture draws it. `recorded_run` loads one of the
runs that ship, and `serve_again` gives the requests of a run to our engine. vLLM is never imported
here. Its block n is our n − 1: its block 0 holds nothing.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.clock import Clock
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace import events
from tutorial_engine.trace.events import Recorder, RequestEvent, Setting, Trace

Call = Callable[..., Any]
RUNS = Path(__file__).parent / "vllm_runs"
FULL_ATTENTION = "FullAttentionManager"  # vLLM's class for layers that keep K and V of all tokens


def recorded_run(name: str) -> Trace:
    """A run of vLLM that ships: "burst", "came_back", "long_prompt" or "small_pool".

    With the shipped model, greedy. ValueError for another name.
    """
    names = sorted(file.stem for file in RUNS.glob("*.json"))
    if name not in names:
        raise ValueError(f"there is no recorded run {name!r}, only: {', '.join(names)}")
    return Trace.load(RUNS / f"{name}.json")


class _WithQueue(Recorder):
    """Has the queue of free blocks at the end of each step, too."""

    blocks: BlockManager

    def record(self, kind: type[events.Event], *values: object) -> None:
        if kind is events.StepEnded:
            super().record(events.FreeQueue, tuple(self.blocks.free_queue))
        super().record(kind, *values)


def serve_again(
    trace: Trace,
    model: CausalLM,
    clock: Clock | None = None,
    pages: type[PagedKVCache] = PagedKVCache,
) -> Trace:
    """The requests of a trace of vLLM, in our engine with the same limits → our trace.

    Each comes before the step before which it came there. Greedy, up to its max_tokens or the end
    of the text: what else was asked of it, a trace does not say. `pages` may be a memory of your
    own, and give free blocks out by another rule: the trace has its queue after each step.
    """
    size, recorder = trace.settings, _WithQueue()
    limits: dict[str, Any] = {
        name: size[name] for name in EngineConfig.__dataclass_fields__ if name in size
    }
    memory = pages.from_config(
        model.config,
        block_size=int(size["block_size"] or 0),
        num_blocks=int(size["num_blocks"] or 0),
        dtype=model.dtype,
        device=model.device,
        prefix_caching=bool(size["prefix_caching"]),
        trace=recorder,
    )
    recorder.blocks = memory.blocks
    engine = LLMEngine(model, config=EngineConfig(**limits), memory=memory, clock=clock)
    for one in trace.events:
        if isinstance(one, events.Added):
            engine.run(max_steps=one.step - engine.num_steps)
            params = SamplingParams(max_tokens=one.max_tokens)
            engine.add_request(one.request_id, list(one.prompt_token_ids), params)
    engine.run()
    return recorder.trace()


@contextmanager
def record(llm: Any) -> Iterator[Recorder]:
    """Inside, what vLLM's `LLM` (or `LLMEngine`) decides is recorded; `.trace()` has it so far.

    The queue of free blocks is vLLM's own, after each step. Requests have their ids in vLLM, r0 for
    its 0; the other samples of r0 are r0.1, r0.2, ... What
    was cached before can be found: `llm.reset_prefix_cache()` makes an empty start. Afterwards
    vLLM is as it was. ValueError, with the way out, for an engine that a trace cannot show.
    """
    engine = getattr(llm, "llm_engine", llm)
    _check(engine)
    watch = _Watch(engine)
    scheduler = engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    with ExitStack() as undo:
        for owner, methods in (
            (engine, "step"),
            (engine.output_processor, "process_outputs"),
            (scheduler, "add_request schedule _preempt_request"),
            (scheduler, "_update_request_with_output _free_request"),
            (manager, "allocate_slots free"),
            (manager.block_pool, "touch get_new_blocks _maybe_evict_cached_block"),
            (manager.block_pool, "cache_full_blocks"),
        ):
            for method in methods.split():
                _surround(undo, owner, method, getattr(watch, method))
        yield watch.recorder


def _check(engine: Any) -> None:
    """ValueError for what cannot be seen from here, or is more than one step at a time."""
    if isinstance(engine, LLMEngine):
        raise ValueError(
            "this is the engine of the course, and it records itself: run = Recorder() of "
            "tutorial_engine.trace, then LLM(..., trace=run), and run.trace() is the trace"
        )
    core = getattr(getattr(engine, "engine_core", None), "engine_core", None)
    if core is None:
        raise ValueError(
            f"{type(engine).__name__}: only a vLLM engine in this process can be recorded, and "
            "vLLM starts another one: set os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] = '0' "
            "before vLLM is imported, and make an LLM (an AsyncLLM is always another process)"
        )
    scheduler, config = core.scheduler, core.vllm_config
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    kinds = [type(manager).__name__ for manager in managers]
    if core.batch_queue is not None or config.scheduler_config.async_scheduling:
        raise ValueError(
            "this vLLM plans a step before the last one has its tokens, and a trace shows one step "
            "after the other: make it with LLM(..., async_scheduling=False)"
        )
    if config.speculative_config is not None or scheduler.connector is not None:
        raise ValueError(
            "speculative tokens and K and V from other machines are more than a trace can show: "
            "leave speculative_config and kv_transfer_config out"
        )
    if kinds != [FULL_ATTENTION]:
        raise ValueError(
            f"this model's layers have several kinds of memory ({', '.join(kinds)}), and a trace "
            "has one table for each request: record a model whose layers all keep all tokens"
        )
    if engine.has_unfinished_requests():
        raise ValueError(
            "requests are running already, and a trace must know how they came: begin to record "
            "when all are over"
        )


def _surround(undo: ExitStack, owner: Any, method: str, watcher: Call) -> None:
    """Until `undo` is closed, watcher(call, ...) is called in place of call(...)."""
    call = getattr(owner, method, None)
    if call is None:
        raise ValueError(
            f"this vLLM's {type(owner).__name__} has no {method}: the recorder was written for "
            "vLLM 0.32"
        )

    def seen(*args: Any, **options: Any) -> Any:
        return watcher(call, *args, **options)

    if method in vars(owner):  # it is recorded already
        undo.callback(setattr, owner, method, call)
    else:
        undo.callback(delattr, owner, method)
    setattr(owner, method, seen)


class _Watch:
    """Tells a recorder what vLLM does. Each method surrounds the one of vLLM that has its name.

    `call` is vLLM's own, `request` vLLM's request.
    """

    def __init__(self, engine: Any) -> None:
        scheduler = engine.engine_core.engine_core.scheduler
        self.recorder = Recorder()
        self.recorder.bind(self._now, _settings(scheduler))
        self._start = time.perf_counter()
        self._states = engine.output_processor.request_states
        self._manager = scheduler.kv_cache_manager
        self._block_size: int = scheduler.block_size
        self._names: dict[str, str] = {}  # vLLM's id of a request that is not over -> ours
        self._name = ""  # whose blocks are being allocated
        self._evicted: set[int] = set()  # vLLM's numbers of blocks that were found until now
        self._num_tokens = 0  # of the step that is planned and not over
        self._stopped: dict[str, str | None] = {}  # vLLM's id -> the stop string that it met

    def _now(self) -> float:
        return round(time.perf_counter() - self._start, 6)

    def _record(self, kind: type[RequestEvent], request: Any, *values: object) -> None:
        self.recorder.record(kind, self._names[request.request_id], *values)

    # -- a step

    def step(self, call: Call) -> Any:
        """Over when stop strings are found, too: vLLM looks for them when its forward is done."""
        outputs = call()
        if self._num_tokens:
            queue = self._manager.block_pool.free_block_queue.get_all_free_blocks()
            free = tuple(block.block_id - 1 for block in queue)
            self.recorder.record(events.FreeQueue, free)
            self.recorder.record(events.StepEnded, self._num_tokens)
            self.recorder.step += 1
            self._num_tokens = 0
        return outputs

    def schedule(self, call: Call, *args: Any, **options: Any) -> Any:
        """The plan. allocate_slots tells who is in it."""
        self.recorder.record(events.StepBegan)
        plan = call(*args, **options)
        self._num_tokens = plan.total_num_scheduled_tokens
        if self._num_tokens:
            self.recorder.record(events.Planned)
        return plan

    def _preempt_request(self, call: Call, request: Any, *args: Any, **options: Any) -> None:
        call(request, *args, **options)
        self._record(events.Preempted, request)

    # -- requests come and go

    def add_request(self, call: Call, request: Any) -> None:
        """Into the queue. vLLM reads its arrival from the clock of the day."""
        call(request)
        self._names[request.request_id] = self._new_name(request.request_id)
        arrival = round(self._now() - max(0.0, time.time() - request.arrival_time), 6)
        prompt = tuple(request.prompt_token_ids)
        self._record(events.Added, request, prompt, request.max_tokens, arrival, None)

    def _new_name(self, request_id: str) -> str:
        """vLLM's "0-1a2b3c4d" is r0, its "1_0-1a2b3c4d" is r0.1, the second sample of r0."""
        state = self._states[request_id]
        name = str(state.external_req_id)
        name = f"r{name}" if name.isdecimal() else name
        name = f"{name}.{state.request_index}" if state.request_index else name
        return request_id if name in self._names.values() else name

    def _update_request_with_output(
        self, call: Call, request: Any, new_token_ids: list[int], *args: Any, **options: Any
    ) -> Any:
        """Its new token."""
        kept, stopped = call(request, new_token_ids, *args, **options)
        for token_id in kept:
            self._record(events.TokenSampled, request, token_id)
        return kept, stopped

    def process_outputs(self, call: Call, *args: Any, **options: Any) -> Any:
        """Tokens become text. Those that met a stop string are aborted next."""
        done = call(*args, **options)
        told = {one.request_id: one.outputs for one in done.request_outputs}
        for request_id in done.reqs_to_abort:
            outputs = told.get(request_id.rpartition("-")[0], [])
            self._stopped[request_id] = outputs[0].stop_reason if outputs else None
        return done

    def _free_request(self, call: Call, request: Any, *args: Any, **options: Any) -> Any:
        """It is over, for whatever reason."""
        result = call(request, *args, **options)
        reason, detail = str(request.get_finished_reason()), request.stop_reason
        if request.request_id in self._stopped:
            reason, detail = "stop", self._stopped.pop(request.request_id)
        self._record(events.Finished, request, reason, detail)
        del self._names[request.request_id]
        return result

    # -- blocks

    def allocate_slots(
        self,
        call: Call,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Blocks for its next tokens, if there are enough. Then it runs them in this step."""
        self._name = self._names[request.request_id]
        blocks = call(request, num_new_tokens, num_new_computed_tokens, *args, **options)
        if blocks is not None:
            first = request.num_computed_tokens + num_new_computed_tokens
            slots = self._slots(request, first + num_new_tokens)
            if request.status.name != "RUNNING":
                self._record(events.Admitted, request, first, slots[:first])
            self._record(events.Scheduled, request, first, slots[first:])
        return blocks

    def _table(self, request: Any) -> list[int]:
        return [block - 1 for block in self._manager.get_block_ids(request.request_id)[0]]

    def _slots(self, request: Any, num_tokens: int) -> tuple[int, ...]:
        table, size = self._table(request), self._block_size
        return tuple(table[i // size] * size + i % size for i in range(num_tokens))

    def touch(self, call: Call, blocks: Any) -> None:
        """Blocks with its beginning, which were found."""
        call(blocks)
        for block in blocks:
            self.recorder.record(events.BlockShared, self._name, block.block_id - 1)

    def get_new_blocks(self, call: Call, num_blocks: int) -> Any:
        """The first ones of the free queue."""
        self._evicted.clear()
        blocks = call(num_blocks)
        for block in blocks:
            evicted = block.block_id in self._evicted
            self.recorder.record(events.BlockTaken, self._name, block.block_id - 1, evicted)
        return blocks

    def _maybe_evict_cached_block(self, call: Call, block: Any) -> bool:
        gone: bool = call(block)
        if gone:
            self._evicted.add(block.block_id)
        return gone

    def cache_full_blocks(
        self,
        call: Call,
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        *args: Any,
        **options: Any,
    ) -> None:
        """More blocks of it can be found. vLLM says so when it plans, before the forward."""
        call(request, blocks, num_cached_blocks, num_full_blocks, *args, **options)
        for block in blocks[num_cached_blocks:num_full_blocks]:
            if block.block_hash is not None:
                found_by = block.block_hash.hex()[:12]
                self._record(events.BlockCached, request, block.block_id - 1, found_by)

    def free(self, call: Call, request: Any) -> None:
        """All its blocks, in the order in which each goes to its end of the queue."""
        pool, table = self._manager.block_pool.blocks, self._table(request)
        nameless = [block for block in table if pool[block + 1].block_hash is None]
        call(request)
        for block in (*nameless, *(block for block in table[::-1] if block not in nameless)):
            self._record(events.BlockFreed, request, block)


def _settings(scheduler: Any) -> dict[str, Setting]:
    """vLLM's limits, under the names that ours have."""
    limits, cache = scheduler.scheduler_config, scheduler.cache_config
    return {
        "policy": f"vLLM {sys.modules['vllm'].__version__}",
        "max_num_seqs": scheduler.max_num_running_reqs,
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
        "max_model_len": scheduler.max_model_len,
        "long_prefill_token_threshold": limits.long_prefill_token_threshold or None,
        "enable_chunked_prefill": limits.enable_chunked_prefill,
        "num_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,
        "block_size": scheduler.block_size,
        "prefix_caching": bool(cache.enable_prefix_caching),
    }
