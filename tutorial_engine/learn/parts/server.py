"""The learner's functions, serving requests in the real LLMEngine.

`OwnServer` makes engines whose scheduler, memory and attention are taken apart where the exercises
are. A wrong part is told, and the package's runs in its place.
"""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from tokenizers import Tokenizer

from tutorial_engine.cache.config import KVCacheSpec, length_for
from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.cache.paged import num_blocks_in
from tutorial_engine.cache.paged_attention import NaivePagedAttention
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.inputs import (
    Prompt,
    list_of_prompts,
    params_for_each,
    token_ids_of,
)
from tutorial_engine.engine.request import RequestOutput
from tutorial_engine.engine.runner import ModelRunner
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.lab.beside_vllm import (
    LIMITS,
    Beside,
    Run,
    beside,
    decide_again,
    recorded_decisions,
    side_by_side,
)
from tutorial_engine.lab.ledger import LedgerPath, engine_path
from tutorial_engine.learn.exercises.verdict import Verdict, names_in
from tutorial_engine.learn.parts.engine import OwnSampler
from tutorial_engine.learn.parts.holder import Parts, PartsHolder, Plugged
from tutorial_engine.learn.parts.memory import (
    PARTS_04,
    PARTS_05,
    InBlocks,
    OwnCells,
    OwnPages,
)
from tutorial_engine.learn.parts.model import PARTS, OwnAttention, OwnModel
from tutorial_engine.learn.parts.scheduler import PARTS_03, POLICIES, with_parts
from tutorial_engine.model.attention import AttentionBackend
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.model.rope import RotaryEmbedding
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Recorder, Trace

# parts of notebook 01
IN_MODEL = ("project", "rope", "layer", "attention", "kv_head", "window_mask")
EARLIER = {name: PARTS[name] for name in (*IN_MODEL, "keep_top_p")}
# memory -> the parts of the notebooks that it is about
NAMES = {
    "rows": ("num_tokens_to_run", "plan_step", "ttft_and_tpot", *POLICIES),
    "pages": (
        *("num_blocks", "slots", "allocate", "find", "free", "take", "slots_for"),
        "block_attention",
    ),
    "cells": ("visible",),
}
VLLM_RUNS = {
    # with rows all runs in which nobody is preempted, and nobody finds blocks
    "rows": (0, 7, 8, 20, 21, 22, 23, 27, 35, 37),
    "pages": (17, 28),
}
DECIDING = {
    "num_tokens_to_run",
    "plan_step",
    "num_blocks",
    "slots",
    "allocate",
    *PARTS_05,
}
INSIDE = {"num_tokens_to_run": "plan_step", "project": "layer", "rope": "layer"}


@dataclass(frozen=True, repr=False)
class OwnRun:
    """What came of `OwnServer.serve`: the trace, and an output for each request, in their order.

    `bytes_gathered` of K and V were copied for attention; a request could have `max_len` tokens.
    """

    trace: Trace
    outputs: tuple[RequestOutput, ...]
    bytes_gathered: int
    max_len: int

    def __repr__(self) -> str:
        return f"{len(self.outputs)} requests in {self.trace.num_steps} steps"


class BesideVLLM(NamedTuple):
    """How many of vLLM's steps and tokens the learner's parts give, too, and the first other one.

    `names` are those of the parts that were asked; `shown` has both sides of a step.
    """

    names: Sequence[str]
    runs: Sequence[Beside]
    shown: str = ""

    def __repr__(self) -> str:
        who = f"your {', '.join(self.names)}" if self.names else "the package's parts"
        same = sum(run.num_same for run in self.runs)
        steps = sum(run.num_steps for run in self.runs)
        tokens = sum(run.same_tokens for run in self.runs)
        requests = sum(run.num_requests for run in self.runs)
        others = [run.first_difference for run in self.runs if run.first_difference]
        lines = [
            f"{'✘' if others else '✔'} With {who}, {same} of {steps} steps are vLLM's, "
            f"and {tokens} of {requests} requests have vLLM's tokens."
        ]
        if others:
            lines.append(f"The first difference: {others[0]}")
        if self.shown:
            lines.append(self.shown)
        return "\n".join(lines)


class OwnServer(PartsHolder):
    """The real LLMEngine with the learner's parts: `use` puts one in, `serve` serves requests.

    `memory` is "rows", "pages" or "cells"; num_blocks and block_size, or num_cells, are its sizes
    unless `serve` or `engine` is given others. Time is VirtualClock's. ValueError for another one.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        memory: str = "rows",
        num_blocks: int | None = None,
        block_size: int = 16,
        num_cells: int | None = None,
    ) -> None:
        super().__init__({**EARLIER, **PARTS_03, **PARTS_04, **PARTS_05}, "engine")
        if memory not in NAMES:
            raise ValueError(f"memory must be one of {sorted(NAMES)}, got {memory!r}")
        self.model, self.tokenizer, self.memory = model, tokenizer, memory
        self.sizes: dict[str, Any] = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "num_cells": num_cells,
        }
        self.policy = ""  # the one that was used last
        self.written: dict[str, Plugged] = {}  # what came of each part, right or wrong
        self.functions: dict[str, Callable[..., Any]] = {}  # and the part itself
        self.in_place = False  # was `block_attention` handed in?
        self.tells_times = memory != "rows"  # or was `ttft_and_tpot` handed in?

    @property
    def names(self) -> tuple[str, ...]:
        """The parts that this memory's notebook is about."""
        return NAMES[self.memory]

    def use(self, function: Callable[..., Any], check: Callable[..., Verdict]) -> Plugged:
        """A policy replaces the one before.

        A wrong part that calls another wrong one says so.
        After `block_attention` attention reads blocks in place, with the learner's or ours; after
        `ttft_and_tpot` serve prints times, as it always does with pages and cells.
        """
        plugged = super().use(function, check)
        known = getattr(function, "__globals__", {})
        wrong = [
            name
            for name in names_in(function)
            if name in self.functions and known.get(name) is self.functions[name]  # not a newer one
            if self.written[name].verdict.ok is False
        ]
        if plugged.verdict.ok is False and wrong:
            message = f"{plugged.verdict.message}; it calls your {wrong[0]}, whose check says ✘"
            plugged = plugged._replace(verdict=Verdict(False, message))
        self.written[plugged.name], self.functions[plugged.name] = plugged, function
        if plugged.name in POLICIES:
            self.policy = plugged.name
        self.in_place |= plugged.name == "block_attention"
        self.tells_times |= plugged.name == "ttft_and_tpot"
        return plugged

    # -- engines

    def as_written(self) -> tuple[type[Scheduler], str]:
        """The learner's rule as a scheduler, right or wrong, and a sentence about it.

        It is the last policy over `plan_step`, or where that is not written `num_tokens_to_run`.
        Nothing is taken out: a wrong rule runs as far as an engine can run it.
        """
        said = {name: plugged.verdict.ok for name, plugged in self.written.items()}
        done = [name for name in NAMES["rows"] if said.get(name) is not None]
        rules = [name for name in done if name == self.policy or name not in POLICIES]
        rules = [name for name in rules if name != "ttft_and_tpot" and INSIDE.get(name) not in done]
        parts = Parts(self.parts.package, self.parts.where)
        parts.own = {name: self.functions[name] for name in rules}
        own_policy = parts.own.get(self.policy, POLICIES.get(self.policy, Scheduler))
        scheduler = with_parts(cast("type[Scheduler]", own_policy), parts, "mine", is_checked=False)
        wrong = [name for name in rules if said[name] is False]
        sentence = f"This is your {' with your '.join(rules)}."
        if not rules:
            sentence = "You have not written a rule yet: this is the package's."
        elif wrong:
            sentence += f" The check of {' and '.join(wrong)} says ✘: see what it does."
        return scheduler, sentence

    def engine(
        self,
        *,
        policy: type[Scheduler] | None = None,
        memory_bytes: int | None = None,
        prefix_caching: bool = True,
        **limits: Any,
    ) -> LLMEngine:
        """A fresh engine with the parts as they are.

        `limits` are those of an EngineConfig, and sizes in place of the server's own.
        A `policy` of the package runs as it is, without the parts of notebook 03. Where parts run
        `memory_bytes`, the part `num_blocks` sizes the pool. PartFailed when it cannot be right.
        """
        sizes = {name: limits.pop(name, size) for name, size in self.sizes.items()}
        parts, config = self.parts, EngineConfig(**limits)
        in_model = [name for name in IN_MODEL if name in parts.own]
        model = OwnModel(self.model, parts) if in_model else self.model
        if memory_bytes is not None:
            sizes["num_blocks"] = self._num_blocks_in(memory_bytes, sizes["block_size"])
        memory = self._memory(config, prefix_caching, **sizes)
        if policy is None:
            chosen = parts.own.get(self.policy, POLICIES.get(self.policy, Scheduler))
            policy = with_parts(cast("type[Scheduler]", chosen), parts)
        attention: AttentionBackend | None = None
        if self.in_place and isinstance(memory, OwnPages):
            attention = NaivePagedAttention(memory, InBlocks(parts))
        elif in_model:
            attention = OwnAttention(parts, memory.storage)
        return LLMEngine(
            model,
            self.tokenizer,
            config,
            scheduler=policy,
            memory=memory,
            clock=VirtualClock(),
            runner=ModelRunner(model, memory.storage, attention),
        )

    def _memory(
        self,
        config: EngineConfig,
        prefix_caching: bool,
        num_blocks: int | None,
        block_size: int,
        num_cells: int | None,
    ) -> KVMemory:
        """The memory that this server is about; without a size, room for all who may run."""
        model, trace = self.model, Recorder()
        if self.memory == "rows":
            return StaticKVCache.from_config(
                model.config,
                max_seqs=config.max_num_seqs,
                max_len=config.max_model_len,
                dtype=model.dtype,
                device=model.device,
                trace=trace,
            )
        spec = KVCacheSpec.from_model(model.config, model.dtype)
        longest = length_for(model.config, config.max_model_len)
        if self.memory == "cells":
            cells = num_cells or config.max_num_seqs * longest
            rope = RotaryEmbedding.of(model.config).to(model.device)
            return OwnCells(self.parts, KVStorage(spec, cells, model.device), rope, trace)
        blocks = num_blocks or config.max_num_seqs * -(-longest // block_size)
        return OwnPages(
            self.parts,
            KVStorage(spec, blocks * block_size, model.device),
            block_size,
            max_len=model.config.max_position_embeddings,
            prefix_caching=prefix_caching,
            trace=trace,
        )

    def _num_blocks_in(self, memory_bytes: int, block_size: int) -> int:
        """The blocks that fit, beside the part `num_blocks`. ValueError for less than one."""
        spec = KVCacheSpec.from_model(self.model.config, self.model.dtype)
        shape = spec.num_layers, spec.num_kv_heads, spec.k_head_dim, self.model.dtype.itemsize
        self.parts.shadow("num_blocks", memory_bytes, *shape, block_size)
        return num_blocks_in(memory_bytes, spec, block_size)

    # -- serving

    def serve(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        times: Sequence[float] | None = None,
        **limits: Any,
    ) -> OwnRun:
        """Serve all prompts together, as requests A, B, C, ...; print what came of each.

        `times` are their arrivals in seconds (None: all at once); `limits` as in `engine`. A part
        that raises, or with which a request has other tokens than alone, is told and taken out.
        One that needs more slots than the pool has ends early: that is said, and nobody's fault.
        """
        sequences = [token_ids_of(prompt, self.tokenizer) for prompt in list_of_prompts(prompts)]
        each = params_for_each(params, len(sequences))
        asked = list(zip(_names(len(sequences)), sequences, each, strict=True))
        when = [0.0] * len(sequences) if times is None else list(times)
        if len(when) != len(sequences):
            raise ValueError(f"{len(sequences)} prompts need as many times, got {len(when)}")
        alone = self._each_alone(asked, limits.get("max_model_len"))

        def is_right(output: RequestOutput, max_len: int) -> bool:
            room = max_len - len(output.prompt_token_ids)
            return _tokens(output) == [ids[:room] for ids in alone[output.request_id]]

        def wrong(run: OwnRun) -> str:
            others = [o.request_id for o in run.outputs if not is_right(o, run.max_len)]
            verb = "has" if len(others) == 1 else "have"
            message = f"{' and '.join(others)} {verb} other tokens than alone."
            return message if others else ""

        before = {*self.parts.own}
        run = self.settle(lambda: self._run(asked, when, limits), wrong)
        right = sum(is_right(output, run.max_len) for output in run.outputs)
        for output in run.outputs:
            print(_line(output, self.tokenizer, self.tells_times))
        if self.in_place:
            print(f"attention copied {run.bytes_gathered:,} bytes of K and V")
        print(self.who_ran(INSIDE))
        mark = "✔" if right == len(alone) else "✘"
        whose = "with the package's part: " if before - {*self.parts.own} else ""
        result = f"{right} of {len(alone)} requests have the tokens that they have alone"
        needs = {name: len(ids) + max(map(len, alone[name])) for name, ids, _ in asked}
        early = [name for name, needed in needs.items() if needed > run.max_len]
        for name in early:
            print(f"{name} ended early: it needs {needs[name]} slots, the pool has {run.max_len}.")
        result += ", as far as they came" if early else ""
        print(f"{mark} {whose}{result}.")
        return run

    def _run(
        self,
        asked: Sequence[tuple[str, list[int], SamplingParams]],
        when: Sequence[float],
        limits: dict[str, Any],
    ) -> OwnRun:
        """All requests to their end, with an integrity check after each step."""
        self.parts.failure = None
        engine = self.engine(**limits)
        outputs: dict[str, RequestOutput] = {}
        to_come = sorted(zip(when, asked, strict=True), key=lambda pair: pair[0])
        total = sum(len(ids) + params.max_tokens for _, ids, params in asked)
        while to_come or engine.has_unfinished_requests():
            if to_come and not engine.has_unfinished_requests():
                engine.clock.wait_until(to_come[0][0])
            while to_come and to_come[0][0] <= engine.clock.now():
                time, (name, ids, params) = to_come.pop(0)
                sampler = self._sampler(params)
                engine.add_request(name, ids, params, arrival_time=time, sampler=sampler)
            for output in engine.run(max_steps=1):
                outputs[output.request_id] = output
            if self.parts.failure is not None:  # the engine ended one request, and went on
                raise self.parts.failure
            engine.check_integrity()
            if engine.num_steps > 20 * total:
                raise RuntimeError(f"{engine.num_steps} steps did not suffice: who makes progress?")
        for metrics in (output.metrics for output in outputs.values()):
            if len(metrics.token_times) > 1:
                self.parts.shadow("ttft_and_tpot", metrics.arrival, list(metrics.token_times))
        storage, trace = engine.memory.storage, engine.trace
        assert isinstance(storage, KVStorage) and trace is not None, "so is each memory made here"
        in_order = tuple(outputs[name] for name, *_ in asked)
        longest = engine.scheduler.max_len
        return OwnRun(trace.trace(), in_order, storage.bytes_gathered, longest)

    def _sampler(self, params: SamplingParams) -> OwnSampler | None:
        if "keep_top_p" not in self.parts.own or params.n > 1:
            return None
        return OwnSampler(params, self.model.config.eos_token_ids, self.parts)

    def _each_alone(
        self,
        asked: Sequence[tuple[str, list[int], SamplingParams]],
        max_model_len: int | None,
    ) -> dict[str, list[list[int]]]:
        """Request → its tokens when the package's engine serves nobody else."""
        config = EngineConfig(max_model_len=max_model_len)
        engine = LLMEngine(self.model, self.tokenizer, config)
        return {name: _tokens(engine.generate([ids], params)[0]) for name, ids, params in asked}

    # -- beside vLLM

    def beside_vllm(self, show_step: int | None = None) -> "BesideVLLM":
        """Situations that were recorded from vLLM, planned again by the parts: the same steps?

        The plans and the tokens are compared, with pages hits, preemptions and blocks, too.
        A policy is left out: in these runs vLLM serves in order of arrival. A part that was never
        called is not named. Of the last run `show_step` is shown.
        """
        if self.memory not in VLLM_RUNS:
            raise ValueError("vLLM has blocks: its runs fit memory='rows' and memory='pages'")
        recorded = recorded_decisions()
        runs = [recorded[number] for number in VLLM_RUNS[self.memory]]
        return self.settle(lambda: self._beside(runs, show_step), lambda _: "")

    def _beside(self, runs: Sequence[Run], show_step: int | None) -> "BesideVLLM":
        found = self.decide(runs)
        shown = ""
        if show_step is not None:
            theirs, ours = runs[-1]["steps"][show_step], found[-1].steps[show_step]
            shown = f"Step {show_step} of the last run:\n{side_by_side(theirs, ours, 'here')}"
        calls = self.parts.calls
        names = [name for name in self._deciding if name in DECIDING and calls[name]]
        return BesideVLLM(names, found, shown)

    def decide(self, runs: Sequence[Run], name: str = "yours") -> list[Beside]:
        """Each run, planned again by the parts in order of arrival."""
        found = []
        for run in runs:
            engine = self.engine(
                policy=with_parts(Scheduler, self.parts),
                memory_bytes=self._bytes_of(run),
                block_size=run["block_size"],
                prefix_caching=run["enable_prefix_caching"],
                **{name: run[name] for name in LIMITS},
            )
            # who computes attention decides nothing here
            engine.runner = ModelRunner(self.model, engine.memory.storage)
            found.append(beside(run, decide_again(run, engine), name))
        return found

    def _bytes_of(self, run: Run) -> int | None:
        """The memory of vLLM's blocks in a run, for the part `num_blocks`; with rows None."""
        spec = KVCacheSpec.from_model(self.model.config, self.model.dtype)
        size: int = run["num_blocks"] * run["block_size"] * spec.bytes_per_token
        return size if self.memory == "pages" else None

    @property
    def _deciding(self) -> list[str]:
        """The learner's parts that decide in an engine, those inside others aside."""
        own = self.parts.own
        return [
            name
            for name in dict.fromkeys((*NAMES["rows"], *self.names))
            if name in own
            and name != "ttft_and_tpot"
            and INSIDE.get(name) not in own
            and (name not in POLICIES or name == self.policy)
        ]

    @property
    def label(self) -> str:
        """The name of `path` in the ledger: which of the learner's parts decide there."""
        names = self._deciding
        return f"yours ({', '.join(names)})" if names else "server (the package's parts)"

    def path(self, **limits: Any) -> LedgerPath:
        """A row of the ledger: the parts as they are, each step followed by an integrity check."""
        return engine_path(lambda: self.engine(**limits))


def _names(count: int) -> list[str]:
    """A, B, C, ...; beyond Z A1, B1, ..."""
    letters = string.ascii_uppercase
    return [letters[i % 26] + (str(i // 26) if i >= 26 else "") for i in range(count)]


def _tokens(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def _line(output: RequestOutput, tokenizer: Tokenizer, with_times: bool) -> str:
    """A request's name, times and text, in one line."""
    metrics, times = output.metrics, ""
    if with_times:
        tpot = "     -" if metrics.tpot is None else f"{1000 * metrics.tpot:4.1f} ms"
        times = f"  TTFT {1000 * (metrics.ttft or 0):4.0f} ms, TPOT {tpot}"
    text = tokenizer.decode([*output.prompt_token_ids, *output.outputs[0].token_ids])
    return f"{output.request_id}{times}  {' '.join(text.split())}"
