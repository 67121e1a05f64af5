"""The bug zoo of blocks: a request alone in a fresh pool shows none.

Each one runs without an error: see bugs.planted. `stress` tells which test sees which.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

from tutorial_engine.cache.blocks import BlockManager
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.learn.parts.memory import poison
from tutorial_engine.learn.stories.bugs import Zoo, edited, planted
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Admitted, Recorder

BLOCK_SIZE = 4
MAX_TOKENS = 3
MAX_STEPS = 200  # no run needs as many: one that does goes round in circles


class StaleBlocks(BlockManager):
    """A BlockManager with a bug in one method. Who is the first to read another's tokens?"""

    def forget(self, block: int) -> bool:
        """Nobody finds this block from now on → whether it could be found until now."""
        key, self.blocks[block].hash = self.blocks[block].hash, None
        return key is not None


BUGS_04: Zoo = {
    "a taken block keeps its hash": (BlockManager, "forget", StaleBlocks.forget),
    "a hash of own tokens only": edited(
        BlockManager, "hash_of", ("(parent or self._root)", "self._root")
    ),
    "found too early": edited(
        BlockManager,
        "cache_full_blocks",
        (
            "size, chain = self.block_size, self._chains[seq_id].hashes",
            "size, chain = self.block_size, self._chains[seq_id].hashes; "
            "num_tokens = min(len(token_ids), len(self.tables[seq_id]) * size)",
        ),
    ),
    "a shared block is written": edited(
        BlockManager,
        "_is_own",
        ("self.blocks[block].ref_cnt == 1 and self.blocks[block].hash is None", "True"),
    ),
    "blocks are freed head first": edited(BlockManager, "_give_back", ("reversed(table)", "table")),
}


# ---- serving with a bug


Tokens = dict[str, tuple[tuple[int, ...], ...]]  # request_id -> the tokens of each sample


class Served(NamedTuple):
    """What came of a run: tokens by request, tokens found in the cache, the first complaint.

    `complaint` is what check_integrity said after a step, or the assertion that ended the run.
    """

    tokens: Tokens
    num_found: int
    complaint: str


def pages(
    model: CausalLM, num_blocks: int, blocks: type[BlockManager] = BlockManager
) -> PagedKVCache:
    """A pool of blocks of 4, NaN where nobody wrote, under a block manager of yours; traced."""
    kind: type[PagedKVCache] = type("Pages", (PagedKVCache,), {"block_manager": blocks})
    memory = kind.from_config(
        model.config,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        dtype=model.dtype,
        device=model.device,
        trace=Recorder(),
    )
    poison(memory.storage)
    return memory


def serve(
    model: CausalLM,
    memory: PagedKVCache | None,
    prompts: Mapping[str, Sequence[int]],
    params: SamplingParams,
    config: EngineConfig,
) -> Served:
    """Run the prompts to their end, with an integrity check after each step. None: on rows.

    What was found is read from the memory's trace.
    """
    recorder = Recorder() if memory is None else memory.trace
    engine = LLMEngine(model, config=config, memory=memory, clock=VirtualClock(), trace=recorder)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    tokens: Tokens = {}
    complaint = ""
    while engine.has_unfinished_requests() and engine.num_steps < MAX_STEPS:
        try:
            for output in engine.run(max_steps=1):
                tokens[output.request_id] = tuple(
                    tuple(completion.token_ids) for completion in output.outputs
                )
        except AssertionError as stopped:
            complaint = complaint or str(stopped)
            break
        try:
            engine.check_integrity()
        except AssertionError as error:
            complaint = complaint or str(error)
    events = [] if recorder is None else recorder.events
    found = sum(event.num_cached for event in events if isinstance(event, Admitted))
    return Served(tokens, found, complaint)


# ---- what each test sees


class Seen(NamedTuple):
    """One row of the table: how many answers are right in each test, and what else shows.

    `alone`: each in a pool of its own. `together`: in chunks, some begin like others. `samples`:
    several of one prompt. `small_pool`: one after the other, blocks are used again; `found` counts
    the tokens that were found there. `integrity` is the first complaint of check_integrity.
    """

    bug: str
    alone: str
    together: str
    samples: str
    small_pool: str
    found: int
    integrity: str = "fine"


class Scene(NamedTuple):
    """A test: who comes, in which order, what they ask, and the pool and limits they meet."""

    prompts: Mapping[str, Sequence[int]]
    params: SamplingParams
    config: EngineConfig
    num_blocks: int


WHOLE = EngineConfig(max_model_len=64, max_num_seqs=1)
TOGETHER = EngineConfig(max_model_len=64, max_num_seqs=3)
IN_CHUNKS = replace(TOGETHER, long_prefill_token_threshold=BLOCK_SIZE + 2)
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
THREE = replace(GREEDY, n=3, temperature=1.0, seed=0)


def scenes(prompts: Sequence[Sequence[int]]) -> dict[str, Scene]:
    """The tests but `alone`, from three prompts of at least 8, 4 and 1 tokens (else ValueError).

    C goes on where A ends, D where B ends; E begins with A's second block.
    """
    if len(prompts) != 3 or any(len(p) < n for p, n in zip(prompts, (8, 4, 1), strict=True)):
        raise ValueError(
            f"give three prompts of at least 8, 4 and 1 tokens, got {[len(p) for p in prompts]}"
        )
    a, b, c = (list(prompt) for prompt in prompts)
    every = {"A": a, "B": b, "C": a + b, "D": b + c, "E": a[BLOCK_SIZE:], "F": c}
    lengths = {name: len(prompt) + MAX_TOKENS for name, prompt in every.items()}

    def scene(names: str, params: SamplingParams, config: EngineConfig, num_tokens: int) -> Scene:
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        return Scene({name: every[name] for name in names}, params, config, num_blocks)

    ample = 2 * sum(lengths.values())
    return {
        "together": scene("ACBFE", GREEDY, IN_CHUNKS, ample),
        "samples": scene("A", THREE, TOGETHER, ample),
        "small_pool": scene("ABCD", GREEDY, WHOLE, max(lengths.values())),
    }


def stress(model: CausalLM, prompts: Sequence[Sequence[int]]) -> list[Seen]:
    """Plant no bug, then one after the other, and run every test → a row each.

    Right are the tokens of the request alone, on rows: there are no blocks that could be wrong. A
    request that ends with an error, or not at all, is not right.
    """
    every = scenes(prompts)
    lone = Scene(dict(zip("ABF", prompts, strict=True)), GREEDY, WHOLE, 16)
    greedy = {name: ids for scene in every.values() for name, ids in scene.prompts.items()}
    right = _one_by_one(model, lone._replace(prompts=greedy), on_rows=True)
    samples = _one_by_one(model, every["samples"], on_rows=True)
    rows = []
    for bug in ("", *BUGS_04):
        with planted(bug, BUGS_04) if bug else nullcontext():
            alone = _one_by_one(model, lone)
            runs = {
                name: serve(model, pages(model, scene.num_blocks), *scene[:3])
                for name, scene in every.items()
            }
        scores = {
            name: _score(run.tokens, samples if name == "samples" else right, every[name].prompts)
            for name, run in runs.items()
        }
        complaints = [run.complaint for run in runs.values() if run.complaint]
        found = runs["small_pool"].num_found
        row = Seen(bug or "no bug", _score(alone, right, lone.prompts), **scores, found=found)
        rows.append(row._replace(integrity=complaints[0] if complaints else "fine"))
    return rows


def _one_by_one(model: CausalLM, scene: Scene, on_rows: bool = False) -> Tokens:
    """Each request of a scene in an engine of its own."""
    tokens: Tokens = {}
    for name, prompt in scene.prompts.items():
        memory = None if on_rows else pages(model, scene.num_blocks)
        tokens |= serve(model, memory, {name: prompt}, *scene[1:3]).tokens
    return tokens


def _score(got: Tokens, want: Tokens, names: Iterable[str]) -> str:
    """How many samples have the right tokens, of how many."""
    pairs = [
        (got.get(name, ())[i : i + 1] == (sample,))
        for name in names
        for i, sample in enumerate(want[name])
    ]
    return f"{sum(pairs)} of {len(pairs)}"


def stress_table(rows: Sequence[Seen]) -> str:
    """The rows as text, in columns."""
    lines = [tuple(name.replace("_", " ") for name in Seen._fields), *rows]
    widths = [max(len(str(line[i])) for line in lines) for i in range(len(Seen._fields))]
    return "\n".join(
        "  ".join(str(cell).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
