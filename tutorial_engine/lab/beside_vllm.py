"""What vLLM decided and computed, recorded from it, and this engine beside it.

`recorded_decisions` has 40 runs: requests, what vLLM said, and what its scheduler decided in each
step. `decide_again` serves the same requests in an engine of ours, `compare` looks at both.
`vllm_path` is vLLM's row of the ledger. vLLM is not needed for it.
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.lab.vllm import RUNS
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Admitted, Preempted, Recorder
from tutorial_engine.trace.history import history

Run = Mapping[str, Any]
Step = Mapping[str, Any]
LIMITS = ("max_num_batched_tokens", "max_num_seqs", "max_model_len")
NOTHING: Step = {"num_tokens": {}, "cached": {}, "preempted": [], "waiting": 0}
LOGITS = RUNS / "logits.safetensors"
NO_LOGITS = "vLLM's logits were recorded for the three prompts of the notebooks, {}; {} is none"


def recorded_decisions() -> list[Run]:
    """The runs that ship, of vLLM 0.32.0 with the shipped model on a CPU; fp32, greedy."""
    return read_runs(RUNS / "decisions.json.gz")


def read_runs(path: Path) -> list[Run]:
    """The runs of a recording: JSON, gzipped or not."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    runs: list[Run] = json.loads(text)["records"]
    return runs


class Decided(NamedTuple):
    """What an engine decided in each step, as `recorded_decisions` has it, and what it said."""

    steps: list[Step]
    tokens: list[list[int]]  # of each request


def decide_again(run: Run, engine: LLMEngine) -> Decided:
    """The requests of a run, served by a fresh engine that has a trace. Rows have no blocks."""
    names = [f"r{i}" for i in range(len(run["prompts"]))]
    for name, prompt, max_tokens in zip(names, run["prompts"], run["max_tokens"], strict=True):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(name, prompt, params)
    tokens = {output.request_id: list(output.outputs[0].token_ids) for output in engine.run()}
    assert engine.trace is not None, "what was decided is read from it"
    steps: list[Step] = []
    for step in history(engine.trace.trace()):
        decided: dict[str, Any] = {
            "num_tokens": {name: len(e.slots) for name, e in step.scheduled.items()},
            "cached": {name: e.num_cached for name, e in step.by_request(Admitted).items()},
            "preempted": sorted(step.by_request(Preempted)),
            "waiting": len(step.planned.waiting),
        }
        if isinstance(engine.memory, PagedKVCache):
            tables = {name: list(r.table) for name, r in step.planned.requests.items()}
            held = {block for table in tables.values() for block in table}
            decided["free_blocks"] = run["num_blocks"] - len(held)
            decided["blocks"] = {name: tables[name] for name in step.planned.running}
        steps.append(decided)
    return Decided(steps, [tokens[name] for name in names])


class Beside(NamedTuple):
    """In how many of vLLM's steps another engine decided the same, and how many requests had the
    same tokens; of what differs, the first. `steps` are what the other engine decided.

    In `num_planned` of them it runs, finds and preempts the same, in these blocks or in others.
    """

    num_same: int
    num_planned: int
    num_steps: int
    same_tokens: int
    num_requests: int
    first_difference: str  # both sides of it; "" if there is none
    steps: Sequence[Step]


def beside(run: Run, decided: Decided, name: str = "ours") -> Beside:
    """vLLM's side of a run, and that of another engine, which is called `name`.

    The numbers of blocks may be others, if one renaming, one to one, explains them over the whole
    run: two pools begin with free queues in two orders.
    """
    renamed, num_same, num_planned, told = dict[int, int](), 0, 0, ""
    steps = decided.steps
    for number, theirs in enumerate(run["steps"]):
        ours = steps[number] if number < len(steps) else NOTHING
        blocks = _renamed(theirs, ours, renamed)
        if any(_fact(fact, theirs, theirs) != _fact(fact, ours, theirs) for fact in ours):
            blocks = "another plan"
        else:
            num_planned += 1
        if blocks and not told:
            told = f"step {number}: {blocks}\n{side_by_side(theirs, ours, name)}"
        num_same += not blocks
    if len(steps) > len(run["steps"]) and not told:
        told = f"vLLM needs {len(run['steps'])} steps, {name} {len(steps)}"
    pairs = zip(run["token_ids"], decided.tokens, strict=True)
    others = [number for number, (theirs, ours) in enumerate(pairs) if theirs != ours]
    if others and not told:
        told = _other_tokens(run, decided, others[0], name)
    num_requests = len(run["token_ids"])
    same_tokens = num_requests - len(others)
    num_steps = len(run["steps"])
    return Beside(num_same, num_planned, num_steps, same_tokens, num_requests, told, steps)


def _other_tokens(run: Run, decided: Decided, number: int, name: str) -> str:
    """Some tokens of a request, from the first one that differs."""
    theirs, ours = run["token_ids"][number], decided.tokens[number]
    same = [a == b for a, b in zip(theirs, ours, strict=False)]
    first = same.index(False) if False in same else len(same)
    some = slice(first, first + 8)
    lines = f"  {'vLLM':<6}{theirs[some]}\n  {name:<6}{ours[some]}"
    return f"new token {first} of r{number}, and those behind it\n{lines}"


def _fact(name: str, step: Step, theirs: Step) -> Any:
    """What must be the same."""
    if name == "cached":  # vLLM tells the hits of those that it admits for the first time
        return {request: step["cached"].get(request) for request in theirs["cached"]}
    if name == "blocks":
        return {request: len(table) for request, table in step["blocks"].items()}
    return step[name]


def _renamed(theirs: Step, ours: Step, renamed: dict[int, int]) -> str:
    """Go on with the renaming of vLLM's blocks; what is wrong with it, or ""."""
    for request, table in ours.get("blocks", {}).items():
        for block, mine in zip(theirs["blocks"].get(request, ()), table, strict=False):
            if block not in renamed and mine in renamed.values():
                return f"two of vLLM's blocks are one here, {mine}"
            if renamed.setdefault(block, mine) != mine:
                return f"vLLM's block {block} was {renamed[block]} here, and is {mine} now"
    return ""


def compare(run: Run, model: CausalLM) -> str:
    """What this engine decides or says otherwise than vLLM, both sides; "" if nothing."""
    memory = PagedKVCache.from_config(
        model.config,
        block_size=run["block_size"],
        num_blocks=run["num_blocks"],
        prefix_caching=run["enable_prefix_caching"],
        trace=Recorder(),
    )
    config = EngineConfig(**{name: run[name] for name in LIMITS})
    engine = LLMEngine(model, config=config, memory=memory)
    return beside(run, decide_again(run, engine)).first_difference


def side_by_side(theirs: Step, ours: Step, name: str = "ours") -> str:
    """A step of vLLM and one of another engine, a line for each fact; → marks what differs."""
    left, right = _lines(theirs, theirs, ours), _lines(ours, theirs, ours)
    width = max(map(len, ["vLLM", *left.values()])) + 3
    told = [f"  {'':<14}{'vLLM':<{width}}{name}"]
    for line in dict.fromkeys([*left, *right]):
        a, b = left.get(line, "-"), right.get(line, "-")
        same = len(a.split()) == len(b.split()) if line.endswith("'s blocks") else a == b
        told.append(f"{' ' if same else '→'} {line:<14}{a:<{width}}{b}")
    return "\n".join(told)


def _lines(step: Step, theirs: Step, ours: Step) -> dict[str, str]:
    """What is told of a step: name of the line → its text. Of blocks, if both engines have some."""
    hit = [name for name, n in theirs["cached"].items() if n or ours["cached"].get(name)]
    lines = {f"{name} runs": str(n) for name, n in step["num_tokens"].items()}
    lines |= {f"{name} finds": str(step["cached"].get(name, "-")) for name in hit}
    lines |= {"preempted": " ".join(step["preempted"]) or "nobody", "waiting": str(step["waiting"])}
    if "blocks" in ours:
        lines["free blocks"] = str(step["free_blocks"])
        for name, table in step["blocks"].items():
            lines[f"{name}'s blocks"] = " ".join(map(str, table))
    return lines


def vllm_path(
    prompts: Sequence[Sequence[int]], num_tokens: int, tokens: Tensor | None = None
) -> Tensor:
    """A path of the ledger: the logits that vLLM gave for the prompts of notebooks 02 to 04.

    [S, num_tokens, V]. ValueError for another prompt, more tokens, or other `tokens` than it said.
    """
    recorded = load_file(LOGITS)
    known = {tuple(recorded[f"prompt.{s}"].tolist()): s for s in range(len(recorded) // 2)}
    rows = []
    for number, prompt in enumerate(prompts):
        if tuple(prompt) not in known:
            raise ValueError(NO_LOGITS.format([*known], list(prompt)))
        logits = recorded[f"logits.{known[tuple(prompt)]}"][:num_tokens]
        if len(logits) < num_tokens:
            raise ValueError(f"{len(logits)} tokens were recorded, not {num_tokens}")
        said = logits.argmax(-1)
        if tokens is not None and not torch.equal(said[:-1], tokens[number, :-1]):
            raise ValueError(f"vLLM said {said.tolist()}, and cannot be fed with other tokens")
        rows.append(logits)
    return torch.stack(rows)
