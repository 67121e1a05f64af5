"""What pictures of runs tell is what the engine was and did: replay equals live, step by step."""

import functools
import random
import re
from functools import cache
from typing import Any
from unittest.mock import patch

import matplotlib
import pytest
import torch
from engines import VOCAB, random_model
from inputs import recorded_batches
from matplotlib.colors import to_hex
from traces import (
    CASES,
    OTHER,
    POLICIES,
    TWIN,
    Case,
    Paged,
    crowd,
    items,
    new_cells,
    run_cells,
    served,
    seven,
)

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.engine.scheduler import Scheduler, StepPlan
from tutorial_engine.model.attention import NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace import events
from tutorial_engine.trace.events import (
    EngineState,
    Preempted,
    Recorder,
    TokenSampled,
)
from tutorial_engine.viz import cell_steps
from tutorial_engine.viz.batch_plots import flat_batch
from tutorial_engine.viz.block_facts import BlockRun, without_hashes
from tutorial_engine.viz.block_plots import BlockView, SimpleBlockView
from tutorial_engine.viz.cell_steps import describe, find_changes, take_snapshot
from tutorial_engine.viz.cell_view import cells_scene, heat_scale
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.place_plots import IDLE, WASTED, Held, places, read_places
from tutorial_engine.viz.request_look import look, tint
from tutorial_engine.viz.request_plots import one_request
from tutorial_engine.viz.scene import HATCHED
from tutorial_engine.viz.scheduler_steps import SchedulerRun
from tutorial_engine.viz.timeline_plots import timeline
from tutorial_engine.viz.trace_rows import rows
from tutorial_engine.viz.words import listed, signed

# -- timelines -------------------------------------------------------------------------------------


every_policy = pytest.mark.parametrize("policy", POLICIES)


@functools.cache
def timeline_of(policy: str) -> Picture:
    return timeline(crowd(policy))


@every_policy
def test_every_share_of_every_step_is_a_box(policy: str) -> None:
    trace = crowd(policy)
    order = [e.request_id for e in trace.events if isinstance(e, events.Added)]
    wanted = {
        f"box.{order.index(e.request_id)}.{e.step}"
        for e in trace.events
        if isinstance(e, events.Scheduled)
    }
    found = items(timeline_of(policy))
    assert {name for name in found if name.startswith("box.") and name.count(".") == 2} == wanted
    assert len(wanted) > 60


@every_policy
def test_rows_agree_with_the_replayed_queues(policy: str) -> None:
    trace = crowd(policy)
    run = rows(trace)
    stalls = 0
    for step in run.steps:
        for life in run.lives:
            share = life.shares.get(step.number)
            if share is None:
                continue
            if life.request_id in step.after.waiting:
                assert share.kind == "waits"
            elif life.request_id in step.after.running:
                assert share.num_tokens or share.kind == "stalls"
            stalls += share.kind == "stalls"
        ran = sum(life.shares[step.number].num_tokens for life in run.lives
                  if step.number in life.shares)  # fmt: skip
        assert ran == step.num_tokens
    assert (stalls > 0) == (policy == "prefill first")


@every_policy
def test_metrics_read_from_the_trace_are_the_engines_own(policy: str) -> None:
    for rate in (0.0, 40.0):
        trace, outputs = served(policy, 6, rate, 5)
        assert {life.request_id: life.metrics for life in rows(trace).lives} == {
            one.request_id: one.metrics for one in outputs
        }


# -- places ----------------------------------------------------------------------------------------


@every_policy
def test_a_place_is_the_row_that_the_engine_gave(policy: str) -> None:
    found = read_places(seven(policy))
    for s, step in enumerate(found.run.steps):
        column = [line[s] for line in found.grid]
        held = {one.request_id: p for p, one in enumerate(column) if isinstance(one, Held)}
        requests = step.planned.requests
        assert held == {name: requests[name].table[0] for name in step.planned.running}
        free = {one for one in column if isinstance(one, str)}
        assert free <= {WASTED if step.planned.waiting else IDLE}
        for one in column:
            if isinstance(one, Held):
                life = found.run.lives[one.request]
                assert life.request_id == one.request_id and life.shares[s].kind == one.kind
                assert one.is_last == (life.end_step == s)


@every_policy
def test_every_place_of_every_step_is_held_idle_or_wasted_and_drawn(policy: str) -> None:
    found, picture = read_places(seven(policy)), places({policy: seven(policy)})
    kinds = ("prefill", "decode", "recompute", "stalls", IDLE, WASTED)
    assert sum(found.count(kind) for kind in kinds) == found.total
    assert (found.count("stalls") > 0) == (policy == "prefill first")
    assert found.wasted == found.count(WASTED) + found.count("stalls")
    assert f"“{policy}” {found.wasted} of {found.total}" in picture.caption
    boxes = {name for name in items(picture) if re.fullmatch(r"box\.0\.\d+\.\d+", name)}
    assert boxes == {
        f"box.0.{p}.{s}"
        for p, line in enumerate(found.grid)
        for s, one in enumerate(line)
        if isinstance(one, Held)
    }


# -- a request's life ------------------------------------------------------------------------------


def test_times_are_the_engines_own() -> None:
    trace, outputs = served("one rule", 4, 0.0, 1)
    for output in outputs:
        times, caption = output.metrics, one_request(trace, output.request_id).caption
        assert times.queue_time is not None and times.ttft and times.tpot and times.total
        for part in (
            f"Request {output.request_id} waits {1000 * times.queue_time:.3g} ms in the queue",
            f"first token after {1000 * times.ttft:.3g} ms (TTFT)",
            f"one every {1000 * times.tpot:.3g} ms on average (TPOT; ",
            f"{len(times.token_times)} tokens and {1000 * times.total:.3g} ms, ",
            f"{times.throughput:.1f} tok/s",
        ):
            assert part in caption


# -- pages -----------------------------------------------------------------------------------------


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed {case.seed}")


@every_case
def test_a_step_is_the_pool_that_the_engine_had_after_it(case: Case) -> None:
    live = case.live()
    run = live.run
    for number, (step, pool) in enumerate(zip(run.steps, live.pools, strict=True)):
        assert step.step.number == number
        assert step.tables == pool.tables
        assert step.hashes == pool.hashes
        assert step.free == pool.free
        assert step.held == pool.held
        for name, slots in pool.slots.items():
            places = [divmod(i, run.block_size) for i in range(step.held[name])]
            assert tuple(step.tables[name][b] * run.block_size + i for b, i in places) == slots
        owners = run.owners(number)
        assert {block: len(own) for block, own in owners.items()} == pool.ref_cnts
        for block, own in owners.items():
            for owner in own:
                assert pool.tables[owner.name][owner.entry] == block


@every_case
def test_the_caption_counts_blocks_tokens_and_slots(case: Case) -> None:
    live = case.live()
    run, size = live.run, case.block_size
    for number, pool in zip(range(len(run.steps)), live.pools, strict=True):
        said = run.caption(number)
        assert said.startswith(f"Step {number} of {run.last}: ") and said.endswith(".")
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
        alone = found == len(pool.free) == 1
        words = "is free and still findable" if alone else f"{found} of them still findable"
        assert (words in said) == (found > 0)


@every_case
def test_kinds_of_slots_are_cached_then_run_then_known_then_empty(case: Case) -> None:
    live = case.live()
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


def test_a_step_that_was_broken_off_is_no_step_and_nothing_of_it_is_lost() -> None:
    live, now = Paged().add("A").step(2), {"bad": True}

    def interrupt(*_: Any) -> None:
        if now["bad"]:
            raise KeyboardInterrupt

    handle = live.model.register_forward_pre_hook(interrupt)
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


@every_case
def test_the_picture_shows_the_tables_and_the_pool_of_the_live_engine(case: Case) -> None:
    live = case.live()
    run, size = live.run, case.block_size
    written: dict[int, tuple[tuple[str, ...], set[str]]] = {}  # block -> its tokens, who had them
    for number, pool in enumerate(live.pools):
        requests = run.steps[number].step.planned.requests
        for name, table in ((name, one.table) for name, one in requests.items()):
            for index, block in enumerate(table):
                words = tuple(map(str, requests[name].token_ids[index * size :][:size]))
                before = written.get(block, ((), set()))
                written[block] = (words, {name} | (before[1] if before[0] == words else set()))
        if number % 3:
            continue
        seen = items(BlockView(run, [number]).scene(number))
        for name, table in pool.tables.items():
            shown = [seen[f"block.{i}.{name}"].text for i in range(len(table))]
            assert shown == [str(block) for block in table]
            for position in range(len(table) * size):
                hatched = seen[f"token.{position}.{name}"].attrib["fill"] == HATCHED
                assert hatched == (position >= pool.held[name])
        for block in range(case.num_blocks):
            count = pool.ref_cnts.get(block, 0)
            ref = seen[f"ref.{block}"].text if f"ref.{block}" in seen else ""
            assert ref == (f"ref {count}" if count else "next" if pool.free[0] == block else "")
            words = [e.text for k, e in seen.items() if k.startswith(f"words.{block}.")]
            found = any((pool.hashes.get(block, "none")[:4]) in (word or "") for word in words)
            assert found == (block in pool.hashes)
            fills = [seen[f"slot.{block * size + i}"].attrib["fill"] for i in range(size)]
            said = [e.text for i in range(size) if (e := seen.get(f"slot.{block * size + i}.word"))]
            kept = not count and block in pool.hashes
            ids, who = written.get(block, ((), set()))
            pale = {tint(look(run.names.index(name)).colour, 0.14) for name in who}
            assert count or (
                set(fills) <= pale and set(fills) if kept else set(fills) == {"#ffffff"}
            )
            assert tuple(said) in ((), ids) if kept else not said
            own = run.owners(number).get(block, [])
            filled = max((owner.filled for owner in own), default=size)
            assert [fill == HATCHED for fill in fills] == [i >= filled for i in range(size)]
        queue = " ".join(e.text or "" for k, e in seen.items() if k.startswith("free."))
        assert re.findall(r"\d+", queue) == [str(block) for block in pool.free]


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.block_size > 1], ids=lambda c: f"seed {c.seed}"
)
def test_the_simple_picture_has_every_token_at_its_slot(case: Case) -> None:
    live, size = case.live(), case.block_size
    requests = [now.state.requests for now in live.run.steps]
    run = BlockRun(without_hashes(live.trace), {i: str(i) for i in range(VOCAB)})
    for number, pool in list(enumerate(live.pools))[::3]:
        seen, said = items(SimpleBlockView(run, [number]).scene(number)), {}
        for name, table in pool.tables.items():
            assert [seen[f"block.{i}.{name}"].text for i in range(len(table))] == [*map(str, table)]
            for position in range(pool.held[name]):
                slot = table[position // size] * size + position % size
                said[str(slot)] = str(requests[number][name].token_ids[position])
        assert {
            k.split(".")[1]: e.text for k, e in seen.items() if re.match(r"slot.*word", k)
        } == said
        assert not re.search("hash|find(able| again)|evicted|cached", run.caption(number))


# -- steps of the scheduler ------------------------------------------------------------------------


CLASSES = (Scheduler, PrefillFirst, StaticBatching, OneByOne)


THREE = {"A": [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], "B": [20] * 7, "C": [31, 32, 33]}


class Live:
    """A real engine that is recorded, and what it was at every forward."""

    def __init__(self, policy: type[Scheduler] = Scheduler, **limits: int) -> None:
        model, config = random_model(), EngineConfig(**{"max_model_len": 24, **limits})
        clock, recorder = VirtualClock(per_forward=1.0, per_token=0.0), Recorder()
        self.engine = LLMEngine(model, None, config, scheduler=policy, clock=clock, trace=recorder)
        self.planned: list[EngineState] = []  # at the forward
        self.after: list[EngineState] = []
        model.register_forward_pre_hook(lambda *_: self.planned.append(self.engine.state()))

    def add(self, *names: str) -> "Live":
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        for name in names:
            self.engine.add_request(name, THREE[name], params)
        return self

    def step(self, times: int = 1) -> "Live":
        for _ in range(times):
            self.engine.step()
            self.after += [self.engine.state()] * (len(self.planned) - len(self.after))
        return self

    def finish(self) -> "Live":
        while self.engine.has_unfinished_requests():
            self.step()
        return self

    @property
    def run(self) -> SchedulerRun:
        assert self.engine.trace is not None
        return SchedulerRun(self.engine.trace.trace(), {})


def three(policy: type[Scheduler] = Scheduler, **limits: int) -> Live:
    return Live(policy, **{"max_num_seqs": 3, "max_num_batched_tokens": 8, **limits}).add(*"ABC")


RUNS = [
    (policy, budget, rows, arrive)
    for policy in CLASSES
    for budget, rows, arrive in [(8, 3, 0), (16, 2, 2), (10, 1, 3), (64, 3, 1)]
    if not (policy is PrefillFirst and budget < 10)
]


@cache
def run_of(policy: type[Scheduler], budget: int, rows: int, arrive: int) -> Live:
    live = Live(policy, max_num_seqs=rows, max_num_batched_tokens=budget)
    for name in "ABC":
        live.add(name).step(arrive)
    return live.finish()


@pytest.mark.parametrize("case", RUNS)
def test_a_step_is_the_live_engine_at_its_forward_and_after_it(case: Any) -> None:
    live = run_of(*case)
    found = live.run.steps
    assert [step.number for step in found] == list(range(len(live.planned)))
    assert [step.planned.unfinished() for step in found] == live.planned
    assert [step.after.unfinished() for step in found] == live.after


@pytest.mark.parametrize("budget", [1, 3, 8, 11, 64])
def test_tokens_are_cached_then_run_then_known_then_sampled_and_nobody_stalls(budget: int) -> None:
    run = three(max_num_batched_tokens=budget).finish().run
    order = ["cached", "run", "known", "sampled"]
    seen: dict[str, int] = dict.fromkeys("ABC", 0)
    for step in run.steps:
        assert not run.doing("stalls", step.number), "the one rule does not do that"
        for name in step.planned.requests:
            kinds = run.token_kinds(name, step.number)
            if name in run.over(step.number):
                assert kinds == ["gone"] * len(run.tokens[name])
                continue
            assert kinds == sorted(kinds, key=order.index)
            assert kinds.count("cached") == seen[name]
            seen[name] += kinds.count("run")
            assert kinds.count("sampled") == (name in step.by_request(TokenSampled))
            yields = "run" in kinds and "known" not in kinds
            assert (name in step.by_request(TokenSampled)) == yields
    assert seen == {name: len(ids) - 1 for name, ids in run.tokens.items()}  # the last never runs


class Polite(Scheduler):
    """Lets nobody join while somebody runs, and is not called OneByOne."""

    def may_admit(self, plan: StepPlan) -> bool:
        return super().may_admit(plan) and not self.running


WIDE, MIDDLE = {"max_num_batched_tokens": 64}, {"max_num_batched_tokens": 16}


@pytest.mark.parametrize(
    ("policy", "limits", "step", "why"),
    [
        (Scheduler, {}, 0, "no budget is left"),
        (Scheduler, {}, 2, ""),  # nobody waits
        (Scheduler, {"max_num_seqs": 2}, 2, "all 2 places are taken (max_num_seqs)"),
        (Scheduler, {"max_num_seqs": 1}, 1, "the place is taken (max_num_seqs)"),
        (OneByOne, {}, 1, "one runs at a time, and A is not done"),
        (StaticBatching, {"max_num_seqs": 2}, 1, "nobody joins before A and B are done"),
        (StaticBatching, {"max_num_seqs": 2}, 0, "no budget is left"),
        # B is of the batch: it does join before A is done
        (StaticBatching, {"max_num_seqs": 2, "max_num_batched_tokens": 4}, 1, "no budget is left"),
        (StaticBatching, {"max_num_seqs": 1}, 1, "nobody joins before A is done"),
        (
            PrefillFirst,
            MIDDLE,
            0,
            "B must run its 7 tokens in one step, and 6 of the budget are left",
        ),
        (Polite, WIDE, 1, "Polite admits nobody else, or no memory is free"),
    ],
)
def test_the_reason_is_the_one_that_the_policy_had(
    policy: type[Scheduler], limits: dict[str, int], step: int, why: str
) -> None:
    run = three(policy, **limits).finish().run
    assert run.why_waiting(step) == why
    if why:
        waiting = run.steps[step].planned.waiting
        assert f"{listed(waiting)} wait{'s' * (len(waiting) == 1)}: {why}" in run.caption(step)


def test_a_stall_is_explained_where_it_is_the_policys() -> None:
    run = three(PrefillFirst, max_num_batched_tokens=16).finish().run
    assert run.doing("stalls", 1) == ["A"]
    assert "A stalls: this step only prefills" in run.caption(1)
    assert run.outcome("A", 1) == "runs nothing: this step only prefills"


def test_who_gives_way_is_said_and_explains_the_queue() -> None:
    live = Paged(num_blocks=6).add("A", num_tokens=8).add("B", OTHER * 2, num_tokens=4)
    run = SchedulerRun(live.finish().trace, {})
    gave_way = {step.number: [*step.by_request(Preempted)] for step in run.steps}
    assert any(gave_way.values())
    for step, who in gave_way.items():
        if who:
            assert run.why_waiting(step) == "a step that preempts admits nobody"
            assert run.steps[step].planned.waiting[0] == who[-1]
            assert run.outcome(who[-1], step) == "gives way: no memory is free"
    assert "no memory is free" in {run.why_waiting(step) for step in range(run.last)}


# -- the flat batch --------------------------------------------------------------------------------


@functools.cache
def batch_of(step: int) -> Picture:
    return flat_batch(recorded_batches()[step])


def allowed_cells(picture: Picture) -> set[tuple[int, int, int]]:
    """(sequence, row, column) of the cells that are not hatched."""
    found = set()
    for name, element in items(picture).items():
        if name.startswith("cell.") and not element.attrib["fill"].startswith("url("):
            s, row, column = (int(part) for part in name.split(".")[1:])
            found.add((s, row, column))
    return found


def test_the_mask_is_the_one_that_attention_used() -> None:
    """Without a cache all pairs with weight above 0 are drawn as allowed, and no other."""
    batch = Batch.from_sequences([[1, 2, 3, 4], [5], [6, 7]])
    seen = set()

    def observe(layer: int, s: int, weights: torch.Tensor) -> None:
        seen.update((s, r, c) for _, r, c in weights.nonzero().tolist())

    with torch.inference_mode():
        random_model()(batch, NaiveAttention(observe))
    assert allowed_cells(flat_batch(batch)) == seen and len(seen) == 10 + 1 + 3


def test_positions_and_slots_are_the_batches_own() -> None:
    batch, found = recorded_batches()[1], items(batch_of(1))
    assert batch.slot_mapping is not None
    rows = range(batch.num_tokens)
    assert [found[f"pos.{i}.word"].text for i in rows] == [str(p) for p in batch.positions.tolist()]
    slots = [str(slot) for slot in batch.slot_mapping.tolist()]
    assert [found[f"slot.{i}.word"].text for i in rows] == slots
    assert "head.slot" not in items(flat_batch(Batch.from_sequences([[1, 2]])))


# -- cells -----------------------------------------------------------------------------------------


def check_picture(picture: Picture, cells: CellKVCache, left_over: set[int]) -> None:
    """Every number and colour of the picture against the live table and shelves."""
    found, table = items(picture), cells.table
    assert float(found["head"].attrib["y"]) == float(found[f"row.{table.head}.cell"].attrib["y"])
    for cell in range(table.num_cells):
        pos, owners, shift = table[cell]
        assert found[f"row.{cell}.pos"].text == ("–" if pos is None else str(pos))
        assert found[f"row.{cell}.shift"].text == ("–" if pos is None else signed(shift))
        chips = {
            int(name.split(".")[2])
            for name in found
            if name.startswith(f"owner.{cell}.") and not name.endswith(".n")
        }
        assert chips == owners and (f"row.{cell}.owners" in found) == (not owners)
        assert (f"K.0.{cell}.lines" in found) == (pos is None and cell not in left_over)
        assert (f"V.1.{cell}.gone" in found) == (cell in left_over)
    for seq_id in table.seq_ids:
        order = [
            name.split(".")[2] for name in found
            if name.startswith(f"text.{seq_id}.") and name.endswith(".token")
        ]  # fmt: skip
        assert order == [str(cell) for cell in table.cells_of(seq_id)]


def check_colours(picture: Picture, cells: CellKVCache, scale: Any, left_over: set[int]) -> None:
    """Squares of the first and the last layer are the storage's numbers, evenly spaced."""
    found, colours = items(picture), matplotlib.colormaps["cividis"]
    for layer in (0, cells.storage.spec.num_layers - 1):
        both = cells.storage.read_slots(layer, slice(0, cells.table.num_cells))
        for kind, (name, x) in enumerate(zip("KV", both, strict=True)):
            low, high = scale[layer][kind]
            for cell in range(cells.table.num_cells):
                if cells.table[cell].pos is None and cell not in left_over:
                    continue
                for i in range(8):
                    number = float(x[cell, 0, i * x.shape[-1] // 8])
                    part = min(max((number - low) / (high - low), 0.0), 1.0)
                    want = to_hex(colours(part))
                    want = tint(want, 0.3) if cell in left_over else want
                    assert found[f"{name}.{layer}.{cell}.{i}"].attrib["fill"] == want


def test_a_shift_that_forgets_a_layer_is_seen() -> None:
    cells = new_cells()
    run_cells(cells, [5, 6, 7])
    start = take_snapshot(cells)
    cells.seq_add(0, 0, -1, 3)
    rest = cells.storage.k[1:].clone()
    cells.apply_shifts()
    cells.storage.k[1:] = rest
    assert "in 1 of 3 layers" in describe(take_snapshot(cells, before=start), start)


@pytest.mark.parametrize("number", range(4))
def test_picture_agrees_with_the_table_after_any_operations(number: int) -> None:
    draw, cells = random.Random(number), new_cells(10)
    before, left_over = take_snapshot(cells), set[int]()
    for step in range(60):
        used = {c for c in range(10) if cells.table[c].owners}
        seq, other = draw.sample(range(4), 2)
        p0, p1 = draw.randint(0, 6), draw.choice([-1, draw.randint(1, 12)])
        try:
            match draw.choice(["run", "run", "run", "rm", "cp", "add", "unshare", "shift", "keep"]):
                case "run":
                    run_cells(cells, [draw.randrange(97) for _ in range(draw.choice([1, 2]))], seq)
                case "rm":
                    cells.seq_rm(seq, p0, p1)
                case "cp":
                    cells.seq_cp(seq, other, p0, p1)
                case "add":
                    cells.seq_add(seq, p0, p1, draw.randint(-5, 5))
                case "unshare":
                    cells.seq_unshare(seq, p0, p1)
                case "shift":
                    cells.apply_shifts()
                case "keep" if draw.random() < 0.2:
                    cells.seq_keep(seq)
        except ValueError:
            pass  # refused: the picture shows that nothing changed
        now_used = {c for c in range(10) if cells.table[c].owners}
        left_over = (left_over | used) - now_used
        now = take_snapshot(cells, before=before)
        assert {c for c, row in enumerate(now.rows) if row.left_over} == left_over
        assert now.heat.isfinite().all((0, 1, 3)).tolist() == [
            c in now_used | left_over for c in range(10)
        ]
        if step % 6 == 0:
            scene = cells_scene(now, find_changes(before, now), "cells", heat_scale([now]))
            picture = Picture(scene.svg(), b"", describe(now, before))  # no PNG: it takes longest
            check_picture(picture, cells, left_over)
            check_colours(picture, cells, heat_scale([now]), left_over)
            used_words = f"{len(now_used)} of 10 cells are used"
            assert used_words in picture.caption or (not now_used and "empty" in picture.caption)
        before = now


def test_planted_bug_shelves_read_one_cell_further_are_caught() -> None:
    def shifted(cache: CellKVCache) -> torch.Tensor:
        return right_heat(cache).roll(1, 2)

    right_heat = cell_steps._heat
    with patch.object(cell_steps, "_heat", shifted), pytest.raises(AssertionError):
        test_picture_agrees_with_the_table_after_any_operations(0)
