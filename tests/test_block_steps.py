"""What a trace says of pages: the pool of the live engine after every step, and its picture."""

import random
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from engines import VOCAB, random_model
from traces import check_words, items, story

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.events import Recorder, RequestEvent, Trace
from tutorial_engine.viz.block_facts import BlockRun, without_hashes
from tutorial_engine.viz.block_plots import MAX_REQUESTS, BlockView, block_view
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import look, text_width
from tutorial_engine.viz.scene import HATCHED
from tutorial_engine.viz.simple_blocks import SimpleBlockView

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
TWIN = [5, 6, 7, 8, 9, 10, 11, 12, 23, 24]  # begins with the same two blocks of 4
OTHER = [31, 32, 33, 34, 35, 36]
THICK = 2.6


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return random_model(3)


class Pool(NamedTuple):
    """What a live engine's memory was between two steps."""

    tables: dict[str, tuple[int, ...]]
    ref_cnts: dict[int, int]
    hashes: dict[int, str]
    free: tuple[int, ...]
    held: dict[str, int]
    slots: dict[str, tuple[int, ...]]  # of those that run, by position
    parents: dict[str, str | None]


class Live:
    """A real engine on pages that is recorded, and the pool that it had after every step."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        num_blocks: int = 12,
        block_size: int = 4,
        prefix_caching: bool = True,
        **limits: Any,
    ) -> None:
        self.memory = PagedKVCache.from_config(
            model.config,
            block_size=block_size,
            num_blocks=num_blocks,
            prefix_caching=prefix_caching,
            trace=Recorder(),
        )
        self.memory.storage.k.fill_(float("nan"))
        self.engine = LLMEngine(
            model,
            config=EngineConfig(**{"max_model_len": 64} | limits),
            memory=self.memory,
            clock=VirtualClock(),
        )
        self.pools: list[Pool] = []
        self.full: dict[str, bytes] = {}  # hash as it is seen -> the whole of it

    def add(self, name: str, prompt: list[int] = PROMPT, num_tokens: int = 5, n: int = 1) -> "Live":
        more: dict[str, Any] = {"n": n, "temperature": 1.0, "seed": 3} if n > 1 else {}
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **more)
        self.engine.add_request(prompt, params, name)
        return self

    def step(self, times: int = 1) -> "Live":
        for _ in range(times):
            before = self.engine.num_steps
            self.engine.step()
            if self.engine.num_steps > before:  # it had something to run
                self.pools.append(self.look())
        return self

    def finish(self) -> "Live":
        while self.engine.has_unfinished_requests:
            assert len(self.pools) < 300, "this goes on for ever"
            self.step()
        return self

    def look(self) -> Pool:
        blocks, parents = self.memory.blocks, dict[str, str | None]()
        self.full |= {key.hex()[:12]: key for key in blocks.cached}
        for chain in blocks._chains.values():
            for before, key in zip([None, *chain], chain, strict=False):
                parents[key.hex()[:12]] = before and before.hex()[:12]
        lens = {r.request_id: r.num_computed_tokens for r in self.engine.scheduler.running}
        forked = self.memory._num_cached  # also of those that run: what they began with
        return Pool(
            {name: tuple(table) for name, table in blocks.tables.items()},
            {i: b.ref_cnt for i, b in enumerate(blocks.blocks) if b.ref_cnt},
            {i: b.hash.hex()[:12] for i, b in enumerate(blocks.blocks) if b.hash is not None},
            tuple(blocks.free_queue),
            {name: lens.get(name, forked[name]) for name in blocks.tables},
            {name: self.memory.describe(name).slots[:many] for name, many in lens.items()},
            parents,
        )

    @property
    def trace(self) -> Trace:
        assert self.engine.trace is not None
        return self.engine.trace.trace()

    @property
    def run(self) -> BlockRun:
        return BlockRun(self.trace, {})


@dataclass(frozen=True)
class Case:
    """A random run: `seed` decides who comes when, and who is aborted."""

    seed: int
    num_blocks: int
    block_size: int
    prefix_caching: bool = True
    n: int = 1
    budget: int = 64

    def live(self, model: Qwen3ForCausalLM) -> Live:
        draw = random.Random(self.seed)
        live = Live(
            model,
            self.num_blocks,
            self.block_size,
            self.prefix_caching,
            max_num_batched_tokens=self.budget,
        )
        most = min(self.num_blocks * self.block_size - 2, 20)
        for number in range(draw.randint(2, 4)):
            prompt = draw.choice([PROMPT, TWIN, OTHER, draw.sample(range(VOCAB), 13)])
            many = draw.choice([1, self.n])
            live.add(chr(65 + number), prompt[:most], draw.randint(1, 9), many)
            live.step(draw.randint(0, 3) if live.engine.has_unfinished_requests else 0)
            if draw.random() < 0.15 and live.engine.requests:
                live.engine.abort(draw.choice(sorted(live.engine.requests)))
        return live.finish()


@cache
def live_of(case: Case) -> Live:
    """The run of a case, once for all tests: they only look at it."""
    with torch.inference_mode():
        return case.live(random_model(3))


CASES = [
    Case(1, 12, 4),
    Case(2, 12, 4, n=2),
    Case(3, 6, 4),
    Case(4, 6, 4, n=3),
    Case(5, 7, 4, prefix_caching=False, n=2),
    Case(6, 30, 1, n=2),
    Case(7, 14, 2, budget=5),
    Case(8, 14, 2, n=2, budget=7),
    Case(9, 4, 8, n=2),
    Case(10, 3, 16, n=3),
    Case(11, 6, 4, n=2, budget=3),
    Case(12, 7, 3, n=3),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed {case.seed}")


# -- the pool after a step ------------------------------------------------------------------------


@every_case
def test_a_step_is_the_pool_that_the_engine_had_after_it(case: Case) -> None:
    live = live_of(case)
    run = live.run
    for number, (step, pool) in enumerate(zip(run.steps, live.pools, strict=True)):
        assert step.step.number == number
        assert step.tables == pool.tables
        assert step.hashes == pool.hashes
        assert step.free == pool.free
        assert step.held == pool.held
        for name, slots in pool.slots.items():
            assert tuple(run.slot(number, name, i) for i in range(step.held[name])) == slots
        owners = run.owners(number)
        assert {block: len(own) for block, own in owners.items()} == pool.ref_cnts
        for block, own in owners.items():
            for owner in own:
                assert pool.tables[owner.name][owner.entry] == block


@every_case
def test_a_hash_follows_from_the_tokens_of_its_block_and_the_hash_before(case: Case) -> None:
    live = live_of(case)
    run, hash_of, checked = live.run, live.memory.blocks.hash_of, 0
    for step, pool in zip(run.steps, live.pools, strict=True):
        for block, name in pool.hashes.items():
            token_ids, before = run.hashed[name]
            assert name not in pool.parents or before == pool.parents[name]
            if block in step.free:
                parent = live.full[before] if before else None
                assert hash_of(parent, token_ids).hex()[:12] == name
                checked += 1
    assert checked or not case.prefix_caching


@every_case
def test_the_caption_counts_blocks_tokens_and_slots(case: Case) -> None:
    live = live_of(case)
    run, size = live.run, case.block_size
    for number, pool in zip(range(len(run.steps)), live.pools, strict=True):
        said = run.caption(number)
        assert said.startswith(f"Step {number} of 0–{run.last}: ") and said.endswith(".")
        slots: list[int] = []
        for name, table in pool.tables.items():
            slots += [table[i // size] * size + i % size for i in range(pool.held[name])]
        used, stored = len(pool.ref_cnts), len(set(slots))
        if not used:
            assert "no block is in use" in said
        else:
            many, requests = f"{stored} token", f"of {len(pool.tables)} request"
            assert re.search(
                rf"{used} of {case.num_blocks} blocks holds? {many}s? {requests}", said
            )
            assert re.search(rf"{used * size - stored} of (its|their) {used * size} slots", said)
        twice = sum(slots.count(slot) > 1 for slot in set(slots))
        assert (f"({twice} of them stored once for " in said) == (twice > 0)
        assert (f"; counted by request they are {len(slots)})" in said) == (twice > 0)
        assert re.search(rf"; {len(pool.free)} blocks? (is|are) free", said)
        found = sum(block in pool.hashes for block in pool.free)
        assert (f"{found} of them still findable" in said) == (found > 0)


@every_case
def test_kinds_of_slots_are_cached_then_run_then_known_then_empty(case: Case) -> None:
    live = live_of(case)
    run, order = live.run, ["cached", "run", "known", "empty"]
    for number, step in enumerate(run.steps):
        seen = 0
        for name, table in step.tables.items():
            size = len(table) * case.block_size
            kinds = [run.token_kind(number, name, i) for i in range(size)]
            assert kinds == sorted(kinds, key=order.index)
            assert kinds.count("cached") + kinds.count("run") == step.held[name]
            known = len(step.state.requests[name].token_ids)
            assert kinds.count("empty") == max(size - known, 0)
            seen += kinds.count("run")
        over = step.ended.keys() - (run.steps[number - 1].ended.keys() if number else set())
        many = step.step.num_tokens
        assert seen == many or (seen < many and over)


# -- what happened, in words ----------------------------------------------------------------------


def test_facts_of_a_prefix_that_is_found(model: Qwen3ForCausalLM) -> None:
    run = Live(model).add("A").step(2).add("B", TWIN).finish().run
    said = [step.facts for step in run.steps]
    assert said[:4] == [
        ["A takes blocks 0, 1 and 2", "blocks 0 and 1 are full and can be found from now on"],
        [],
        [
            "B finds 8 tokens in blocks 0 and 1",
            "B takes block 3",
            "block 2 is full and can be found from now on",
        ],
        ["A takes block 4"],
    ]
    assert said[4][0] == "A ends (length) and leaves blocks 4, 2, 1 and 0"
    assert run.steps[2].touched == {0: ["shared"], 1: ["shared"], 2: ["cached now"], 3: ["taken"]}
    assert "no block changes hands" in run.caption(1)
    assert "stored once" not in run.caption(1)
    once = "(8 of them stored once for A and B; counted by request they are 22)"
    assert f"14 tokens of 2 requests {once}" in run.caption(2)


def test_a_fork_shares_the_open_block_and_whoever_writes_first_gets_a_copy(
    model: Qwen3ForCausalLM,
) -> None:
    run = Live(model).add("A", n=2).finish().run
    forked, copied = run.steps[0], run.steps[1]
    assert forked.tables == {"A": (0, 1, 2), "A.1": (0, 1, 2)}
    assert "A.1 is forked from A: 9 tokens in blocks 0, 1 and 2 are shared" in forked.facts
    assert "A.1 waits with 9 shared tokens" in run.caption(0) and run.forks == {"A.1": "A"}
    assert copied.facts == [
        "A is to write to block 2, which A.1 has too: it copies 2 tokens to block 3"
    ]
    assert copied.touched == {3: ["copy of 2"], 2: ["copied to 3"]}
    assert [(e.source, e.block) for e in copied.copies] == [(2, 3)]
    assert copied.tables == {"A": (0, 1, 3), "A.1": (0, 1, 2)}
    assert not run.steps[2].copies


def test_several_forks_are_said_once(model: Qwen3ForCausalLM) -> None:
    run = Live(model).add("A", n=3).finish().run
    facts = [fact for fact in run.steps[0].facts if "forked" in fact]
    assert facts == ["A.1 and A.2 are forked from A: 9 tokens in blocks 0, 1 and 2 are shared"]
    assert "; A.1 and A.2 wait with 9 shared tokens; " in run.caption(0)


def test_who_is_preempted_loses_blocks_and_that_is_said_until_it_runs_again(
    model: Qwen3ForCausalLM,
) -> None:
    live = Live(model, num_blocks=6).add("A", num_tokens=8).add("B", OTHER * 2, num_tokens=4)
    run = live.finish().run
    (when,) = [i for i, s in enumerate(run.steps) if any("is preempted" in f for f in s.facts)]
    before, step = run.steps[when - 1], run.steps[when]
    (fact,) = [f for f in step.facts if "is preempted" in f]
    lost = step.lost["B"]
    assert lost.step == when and lost.blocks == before.tables["B"][::-1]
    assert lost.num_tokens == before.held["B"]
    assert fact.startswith("B is preempted and loses blocks ")
    assert f"({lost.num_tokens} tokens)" in fact
    back = next(i for i in range(when, run.last) if "B" in run.steps[i].tables)
    for number in range(when, back):
        assert f"B waits since step {when} took blocks" in run.caption(number)
    assert "B waits" not in run.caption(back)


def test_an_evicted_block_is_named_by_the_hash_that_is_lost(model: Qwen3ForCausalLM) -> None:
    run = Live(model, num_blocks=4).add("A").finish().add("B", OTHER * 2).finish().run
    when, step = next(
        (i, s) for i, s in enumerate(run.steps) if any("evicted" in f for f in s.facts)
    )
    before = run.steps[when - 1].hashes
    gone = {
        block: name[:4]
        for block, name in before.items()
        if f"{name[:4]} evicted" in str(step.touched.get(block, ()))
    }
    assert gone
    (fact,) = [f for f in step.facts if "evicted" in f]
    for block, name in gone.items():
        assert name in fact and str(block) in fact and block in step.tables["B"]
        assert step.hashes.get(block) != before[block]


def test_a_free_block_that_is_found_again_is_not_called_shared(model: Qwen3ForCausalLM) -> None:
    run = Live(model).add("A").finish().add("B", TWIN).finish().run
    step = next(s for s in run.steps if "B" in s.tables)
    assert step.touched[0] == step.touched[1] == ["found again"]
    assert "B finds 8 tokens in blocks 0 and 1" in step.facts


def test_an_abort_between_steps_belongs_to_the_next_one(model: Qwen3ForCausalLM) -> None:
    live = Live(model).add("A").add("B", OTHER).step(2)
    live.engine.abort("B")
    run = live.finish().run
    assert "B" in run.steps[1].tables and "B" not in run.steps[2].tables
    assert run.steps[2].facts[0] == "B ends (abort) and leaves blocks 4 and 3"


def test_a_step_that_was_broken_off_is_no_step_and_nothing_of_it_is_lost(
    model: Qwen3ForCausalLM,
) -> None:
    live, now = Live(model).add("A").step(2), {"bad": True}

    def interrupt(*_: Any) -> None:
        if now["bad"]:
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(interrupt)
    live.add("B", TWIN)
    try:
        with pytest.raises(KeyboardInterrupt):
            live.step()
        now["bad"] = False
        run = live.finish().run
    finally:
        handle.remove()
    assert [step.tables for step in run.steps] == [pool.tables for pool in live.pools]
    assert "B finds 8 tokens in blocks 0 and 1" in run.steps[2].facts
    assert [i for i in range(12) if run.steps[2].is_written("B", i)] == [8, 9]


def test_events_of_later_versions_are_ignored(model: Qwen3ForCausalLM) -> None:
    class BlockPainted(RequestEvent):
        """Nobody knows it yet."""

    trace = Live(model).add("A").finish().trace
    more = [BlockPainted(0, 0.0, "A")]
    events = [e for event in trace.events[1:] for e in (event, *more)]
    other = trace._replace(events=(trace.events[0], *events))
    run = BlockRun(trace, {})
    assert [BlockRun(other, {}).caption(i) for i in range(run.last)] == [
        run.caption(i) for i in range(run.last)
    ]


def test_a_trace_of_rows_and_an_engine_that_never_ran_are_refused(
    model: Qwen3ForCausalLM,
) -> None:
    with pytest.raises(ValueError, match="not of an engine on pages"):
        block_view(story(), 0)
    with pytest.raises(ValueError, match="no step of this trace ran"):
        block_view(Live(model).trace, 0)
    trace = Live(model).add("A").finish().trace
    for step in (-1, 5):
        with pytest.raises(ValueError, match=rf"step {step} is outside 0 .. 4"):
            block_view(trace, step)


# -- what hovering says ---------------------------------------------------------------------------


def test_a_token_says_how_its_slot_is_found(model: Qwen3ForCausalLM) -> None:
    live = Live(model).add("A").step(2).add("B", TWIN).finish()
    run = BlockRun(live.trace, {23: "cup"})
    assert run.about_token(2, "B", 8) == (
        "B, position 8 “cup”: 8 = 2·4 + 0 → entry 2 of its table, block 3, offset 0 → slot "
        "3·4 + 0 = 12; written in this step"
    )
    assert "“24”: 9 = 2·4 + 1" in run.about_token(2, "B", 9)  # no label: its number
    assert run.about_token(2, "B", 11).endswith("the slot is reserved, no token yet")
    for number, pool in enumerate(live.pools):
        for name, slots in pool.slots.items():
            for position, slot in enumerate(slots):
                assert f" = {slot}; " in run.about_token(number, name, position)


def test_a_block_says_all_that_is_known_of_it(model: Qwen3ForCausalLM) -> None:
    live = Live(model).add("A").step(2).add("B", TWIN).finish()
    run = live.run
    names = live.pools[2].hashes
    assert run.about_block(2, 1) == (
        f"block 1 · ref 2: A and B · positions 4–7 · 9|10|11|12 · hash {names[1]} ← {names[0]} · "
        "shared"
    )
    assert f"hash {names[0]} ← root" in run.about_block(2, 0)
    assert run.about_block(2, 4) == "block 4 · free, goes next"
    assert run.about_block(2, 6) == "block 6 · free, 2 go before it"
    last = run.about_block(run.last, 1)
    assert "free, " in last and "9|10|11|12" in last and f"hash {names[1]}" in last


def test_equal_blocks_that_were_filled_at_once_are_told_apart(model: Qwen3ForCausalLM) -> None:
    run = Live(model).add("A").add("B").finish().run
    assert "hash" in run.about_block(0, 0)
    assert "an equal block is the one to be found" in run.about_block(0, 3)
    off = Live(model, prefix_caching=False).add("A").add("B").finish().run
    assert "equal" not in off.about_block(0, 3)


# -- the picture ----------------------------------------------------------------------------------

LONG = "W" * 30


def view(live: Live, step: int, label: Callable[[int], str] = str) -> Picture:
    return block_view(live.trace, step, {i: label(i) for i in range(VOCAB)})


def sketch(live: Live, step: int, label: Callable[[int], str] = str) -> Picture:
    """The same scene, without its caption and without the time that a PNG takes."""
    run = BlockRun(live.trace, {i: label(i) for i in range(VOCAB)})
    return Picture(BlockView(run, [step]).scene(step).svg(), b"", run.caption(step))


@every_case
def test_the_picture_shows_the_tables_and_the_pool_of_the_live_engine(case: Case) -> None:
    live = live_of(case)
    run, size = live.run, case.block_size
    for number, pool in list(zip(range(len(run.steps)), live.pools, strict=True))[::3]:
        picture = sketch(live, number)
        seen = items(picture)
        assert picture.caption == run.caption(number)
        for name, table in pool.tables.items():
            shown = [seen[f"block.{i}.{name}"].text for i in range(len(table))]
            assert shown == [str(block) for block in table]
            held = pool.held[name]
            for position in range(len(table) * size):
                box = seen[f"token.{position}.{name}"]
                assert (box.attrib["fill"] == HATCHED) == (position >= held)
        assert {k.split(".")[1] for k in seen if k.startswith("number.")} == {
            str(block) for block in range(case.num_blocks)
        }
        for block in range(case.num_blocks):
            count = pool.ref_cnts.get(block, 0)
            ref = seen[f"ref.{block}"].text if f"ref.{block}" in seen else ""
            assert ref == (f"ref {count}" if count else "next" if pool.free[0] == block else "")
            words = [e.text for k, e in seen.items() if k.startswith(f"words.{block}.")]
            found = any((pool.hashes.get(block, "none")[:4]) in (word or "") for word in words)
            assert found == (block in pool.hashes)
            fills = [seen[f"slot.{block * size + i}"].attrib["fill"] for i in range(size)]
            assert count or set(fills) == {"#ffffff"}
            own = run.owners(number).get(block, [])
            filled = max((owner.filled for owner in own), default=size)
            assert [fill == HATCHED for fill in fills] == [i >= filled for i in range(size)]
        queue = " ".join(e.text or "" for k, e in seen.items() if k.startswith("free."))
        assert re.findall(r"\d+", queue) == [str(block) for block in pool.free]


def test_shared_slots_have_a_band_in_each_holders_colour(model: Qwen3ForCausalLM) -> None:
    seen = items(sketch(Live(model).add("A", n=3).finish(), 2))
    bands = [seen[f"slot.0.{i}"].attrib for i in range(3)]
    assert [band["fill"] for band in bands] == [look(i).dark for i in range(3)]
    assert seen["slot.0"].attrib["fill"] == "none" and "slot.0.3" not in seen
    assert [seen[f"who.0.{i}"].text for i in range(3)] == ["A,", "A.1,", "A.2"]
    corners = [tuple(map(float, p.split(","))) for p in bands[1]["points"].split()]
    assert len(corners) == 6  # the middle one of three, from edge to edge


def test_what_this_step_wrote_is_thick_and_nothing_else(model: Qwen3ForCausalLM) -> None:
    live = Live(model).add("A").step(2).add("B", TWIN).finish()
    seen, run = items(sketch(live, 2)), live.run
    thick = {k for k, e in seen.items() if e.get("stroke-width") == str(THICK)}
    slots = {f"slot.{run.slot(2, name, i)}" for name, i in (("A", 11), ("B", 8), ("B", 9))}
    assert thick == slots | {"token.11.A", "token.8.B", "token.9.B", "key.written in this step"}


def test_a_copy_has_an_arrow_from_its_source_and_other_steps_have_none(
    model: Qwen3ForCausalLM,
) -> None:
    live = Live(model).add("A", n=3).finish()
    seen = items(sketch(live, 1))
    copies = live.run.steps[1].copies
    assert len(copies) == 2
    for i, event in enumerate(copies):
        points = [
            tuple(map(float, p.split())) for p in seen[f"copy.{i}.line"].attrib["d"][1:].split("L")
        ]
        for (x, y), block in ((points[0], event.source), (points[-1], event.block)):
            card = {k: float(v) for k, v in seen[f"block.{block}"].attrib.items() if k in "xy"}
            wide, tall = (float(seen[f"block.{block}"].attrib[k]) for k in ("width", "height"))
            assert card["x"] - 3 <= x <= card["x"] + wide + 3
            assert card["y"] < y < card["y"] + tall
    assert not any(k.startswith("copy.") for k in items(sketch(live, 2)))


def simple(live: Live, step: int, label: Callable[[int], str] = str) -> Picture:
    run = BlockRun(without_hashes(live.trace), {i: label(i) for i in range(VOCAB)})
    return Picture(SimpleBlockView(run, [step]).scene(step).svg(), b"", run.caption(step))


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.block_size > 1], ids=lambda c: f"seed {c.seed}"
)
def test_the_simple_picture_has_every_token_at_its_slot_and_a_line_from_each_entry(
    case: Case,
) -> None:
    live, size = live_of(case), case.block_size
    requests = [now.state.requests for now in live.run.steps]
    for number, pool in list(enumerate(live.pools))[::3]:
        picture = simple(live, number)
        check_words(picture)
        seen, said = items(picture), {}
        for name, table in pool.tables.items():
            assert [seen[f"block.{i}.{name}"].text for i in range(len(table))] == [*map(str, table)]
            for i, block in enumerate(table):
                line, dot = (seen[f"{what}.{i}.{name}"].attrib for what in ("line", "dot"))
                x, y = (float(seen[f"number.{block}"].attrib[k]) for k in "xy")
                ends = line["d"].split()[-2:], (dot["cx"], dot["cy"])
                for end in ends:
                    assert abs(float(end[0]) - x) < 8 and abs(float(end[1]) - y) < 9
            for position in range(pool.held[name]):
                slot = table[position // size] * size + position % size
                said[slot] = str(requests[number][name].token_ids[position])
        words = {k.split(".")[1]: e.text for k, e in seen.items() if re.match(r"slot.*word", k)}
        assert words == {str(slot): word for slot, word in said.items()}
        assert not re.search("hash|find(able| again)|evicted|cached", picture.caption)


PICTURES: dict[str, tuple[Case, int]] = {
    "blocks of 1": (Case(6, 30, 1, n=2), 3),
    "blocks of 2": (Case(8, 14, 2, n=2, budget=7), 4),
    "blocks of 4": (Case(2, 12, 4, n=2), 2),
    "blocks of 8": (Case(9, 4, 8, n=2), 2),
    "blocks of 16": (Case(10, 3, 16, n=3), 1),
    "scarce": (Case(4, 6, 4, n=3), 5),
    "no prefix cache": (Case(5, 7, 4, prefix_caching=False, n=2), 3),
}


@pytest.mark.parametrize("label", [str, lambda _: LONG, lambda i: "il"[i % 2]])
@pytest.mark.parametrize("name", PICTURES)
def test_no_word_covers_another_or_is_cut_off(name: str, label: Callable[[int], str]) -> None:
    case, step = PICTURES[name]
    live = live_of(case)
    for number in {0, step, live.run.last}:
        check_words(sketch(live, number, label))


@pytest.mark.parametrize(("blocks", "size"), [(40, 4), (64, 1), (20, 4), (12, 4), (33, 3)])
def test_six_requests_and_forty_blocks_can_be_read(
    blocks: int, size: int, model: Qwen3ForCausalLM
) -> None:
    live = Live(model, blocks, size)
    prompts = (PROMPT[:7], TWIN, OTHER, [40, 41, 42], [50] * 5, [60, 61])
    for name, prompt in zip("ABCDEF", prompts, strict=True):
        live.add(name, prompt)
    run = live.finish().run
    for step in (0, 2, run.last):
        check_words(sketch(live, step))
    picture = view(live, 2)
    check_words(picture)
    assert len(picture.png) < (60_000 if blocks <= 40 else 70_000)
    widest = max(text_width(run.about_block(1, block), 13) for block in range(blocks))
    assert widest < 2000  # and what is drawn of it is cut to the picture
    for e in ET.fromstring(sketch(live, 1).svg).iter("{http://www.w3.org/2000/svg}text"):
        if e.text and "x" not in e.attrib:  # on the line of tips
            assert text_width(e.text, 13) <= 985, e.text


def test_more_than_can_be_read_is_refused_with_what_fits(model: Qwen3ForCausalLM) -> None:
    many = Live(model, 40)
    for number in range(MAX_REQUESTS + 1):
        many.add(f"r{number}", OTHER[: number + 1])
    trace = many.finish().trace
    with pytest.raises(ValueError, match=r"7 requests, 40 blocks of 4 tokens: .* 6 requests, 64"):
        block_view(trace, 0)
    with pytest.raises(ValueError, match=r"40 blocks of 4 tokens.* room for 32 blocks"):
        block_view(trace, 0, simple=True)
    with pytest.raises(ValueError, match=r"room for .* 64 blocks"):
        block_view(Live(model, 65).add("A").finish().trace, 0)
    with pytest.raises(ValueError, match="blocks of 16 tokens"):
        block_view(Live(model, 2, 17).add("A").finish().trace, 0)
    tall = Live(model, 64, 4)
    for name in "ABCDEF":
        tall.add(name, [ord(name)] + [1] * 40, num_tokens=2)
    with pytest.raises(ValueError, match=r"has 11 entries: with 6 requests .* up to 8 each"):
        block_view(tall.finish().trace, 0)


def test_stepping_moves_nothing(model: Qwen3ForCausalLM) -> None:
    run = Live(model, 8).add("A", n=2).step().add("B", TWIN).finish().run
    drawing, places = BlockView(run), dict[str, tuple[Any, ...]]()
    heights = set()
    for step in range(run.last + 1):
        scene = drawing.scene(step)
        heights.add(scene.height)
        for name, item in scene.items.items():
            if name.split(".")[0] in (
                "token",
                "entry",
                "request",
                "slot",
                "block",
                "number",
                "key",
            ):
                place = (item.attributes.get("x"), item.attributes.get("y"))
                assert places.setdefault(name, place) == place, (name, step)
    assert len(heights) == 1
