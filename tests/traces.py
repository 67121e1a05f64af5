"""Recorded runs for the tests of pictures: by hand, and from small random engines; and what is read
from a picture that is drawn: its items, its words, and whether they can be read.
"""

import html
import json
import random
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from engines import VOCAB, poison, random_model

from tutorial_engine.cache.cells import CellKVCache
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.engine.request import RequestOutput
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.lab.workload import Arrival, poisson_times, ragged, serve
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace import events
from tutorial_engine.trace.events import Event, Recorder, Trace
from tutorial_engine.viz.drawing.letters import text_width
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.scene import HATCHED, Scene
from tutorial_engine.viz.explorers.cell_explorer import append_tokens
from tutorial_engine.viz.run.block_run import BlockRun
from tutorial_engine.viz.run.cell_steps import CellsSnapshot, Changes, describe
from tutorial_engine.viz.views.cell_view import cells_scene, heat_scale

SVG = "{http://www.w3.org/2000/svg}"
NASTY = ["<script>alert(1)</script>", "naïve 😀 " + "x" * 80, '$x$ & "y" -- \']]>', "a\nb\x00c"]
POLICIES: dict[str, type[Scheduler]] = {
    "one by one": OneByOne,
    "static batching": StaticBatching,
    "prefill first": PrefillFirst,
    "one rule": Scheduler,
}


class Plan(NamedTuple):
    """One step by hand: who runs (first position, tokens), who was thrown out, got a token, ended.

    `added` has the prompt length of each request that comes before the step.
    """

    runs: dict[str, tuple[int, int]]
    preempted: Sequence[str] = ()
    sampled: Sequence[str] = ()
    finished: Sequence[str] = ()
    added: Mapping[str, int] = MappingProxyType({})


STORY = [
    Plan({"A": (0, 6), "B": (0, 2)}, sampled="A", added={"A": 6, "B": 13}),
    Plan({"A": (6, 1), "B": (2, 7)}, sampled="A", added={"C": 9}),
    Plan({"A": (7, 1), "B": (9, 4), "C": (0, 3)}, sampled="AB"),
    Plan({"A": (8, 1), "B": (13, 1), "C": (3, 6)}, sampled="ABC", added={"D": 5}),
    Plan({"A": (9, 1), "B": (14, 1), "C": (9, 1), "D": (0, 5)}, sampled="ABCD"),
    Plan({"A": (10, 1), "B": (15, 1), "C": (10, 1)}, preempted="D", sampled="ABC"),
    Plan({"A": (11, 1), "B": (16, 1), "C": (11, 1)}, sampled="ABC", finished="A"),
    Plan({"B": (17, 1), "C": (12, 1), "D": (0, 6)}, sampled="BCD"),
]


def story(*after: tuple[str, str]) -> Trace:
    """The story as the trace of an engine that did it: 10 ms a step and 1 ms a token.

    `after` it, (id, reason) of requests that end without a step.
    """
    found: list[Event] = []
    now, running = 0.0, set()
    for step, one in enumerate(STORY):
        for name, prompt in one.added.items():
            found.append(events.Added(step, now, name, tuple(range(prompt)), 99, now))
        found.append(events.StepBegan(step, now))
        for name in one.preempted:
            found.append(events.Preempted(step, now, name))
            running.discard(name)
        for name, (first, count) in one.runs.items():
            if name not in running:
                found.append(events.Admitted(step, now, name, 0))
                running.add(name)
            slots = tuple(range(first, first + count))
            found.append(events.Scheduled(step, now, name, first, slots))
        found.append(events.Planned(step, now))
        total = sum(count for _, count in one.runs.values())
        now += 0.01 + 0.001 * total
        found += [events.TokenSampled(step, now, name, 5) for name in one.sampled]
        found += [events.Finished(step, now, name, "stop", 0) for name in one.finished]
        found.append(events.StepEnded(step, now, total))
    found += [events.Finished(len(STORY), now, name, why, None) for name, why in after]
    return Trace({"policy": "Scheduler", "max_num_batched_tokens": 8}, tuple(found))


@cache
def served(
    policy: str,
    num_requests: int = 4,
    rate: float = 0.0,
    seed: int = 0,
    seqs: int = 2,
    budget: int = 16,
    prompts: tuple[int, int] = (3, 12),
    outputs: tuple[int, int] = (2, 9),
) -> tuple[Trace, list[RequestOutput]]:
    """A random workload through a small random engine, at `rate` a second, or all at once."""
    recorder = Recorder()
    config = EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=64)
    engine = LLMEngine(
        random_model(),
        config=config,
        scheduler=POLICIES[policy],
        clock=VirtualClock(),
        trace=recorder,
    )
    arrivals = ragged(num_requests, VOCAB, seed, prompts, outputs)
    times = poisson_times(rate, num_requests, seed) if rate else [0.0] * num_requests
    named = [
        Arrival(time, one.prompt, one.params, chr(65 + i))
        for i, (one, time) in enumerate(zip(arrivals, times, strict=True))
    ]
    outputs_ = serve(engine, named, max_steps=2000)
    return recorder.trace(), outputs_


@cache
def chunked(budget: int) -> Trace:
    """A decodes when L comes with 40 tokens; the budget says whether that runs in one step."""
    recorder = Recorder()
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=budget, max_model_len=64)
    engine = LLMEngine(random_model(), config=config, clock=VirtualClock(), trace=recorder)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engine.add_request("A", [1, 2, 3], params)
    for _ in range(5):
        engine.step()
    engine.add_request("L", list(range(40)), params)
    engine.run()
    return recorder.trace()


def crowd(policy: str = "one rule") -> Trace:
    """12 requests, more than 60 steps."""
    return served(policy, 12, 60.0, 3, 4, 24, (4, 24), (4, 22))[0]


def seven(policy: str) -> Trace:
    """Seven requests on four places."""
    return served(policy, 7, 60.0, 3, 4, 24, (4, 24), (4, 16))[0]


def six(policy: str) -> Trace:
    """Six requests at once on two places."""
    return served(policy, 6)[0]


def renamed(trace: Trace, names: dict[str, str]) -> Trace:
    """The same run with other request ids."""
    text = trace.to_json()
    for old, new in names.items():
        text = text.replace(f'"request_id": "{old}"', f'"request_id": {json.dumps(new)}')
    return Trace.from_json(text)


PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
TWIN = [5, 6, 7, 8, 9, 10, 11, 12, 23, 24]  # begins with the same two blocks of 4
OTHER = [31, 32, 33, 34, 35, 36]


class Pool(NamedTuple):
    """What a live engine's memory was between two steps."""

    tables: dict[str, tuple[int, ...]]
    ref_cnts: dict[int, int]
    hashes: dict[int, str]
    free: tuple[int, ...]
    held: dict[str, int]


class Paged:
    """A real engine on pages that is recorded, and the pool that it had after every step."""

    def __init__(
        self, num_blocks: int = 12, block_size: int = 4, prefix_caching: bool = True, **limits: Any
    ) -> None:
        self.model = random_model(3)
        self.memory = PagedKVCache.from_config(
            self.model.config,
            block_size=block_size,
            num_blocks=num_blocks,
            prefix_caching=prefix_caching,
            trace=Recorder(),
        )
        poison(self.memory)
        self.engine = LLMEngine(
            self.model,
            config=EngineConfig(**{"max_model_len": 64} | limits),
            memory=self.memory,
            clock=VirtualClock(),
        )
        self.pools: list[Pool] = []

    def add(
        self, name: str, prompt: list[int] = PROMPT, num_tokens: int = 5, n: int = 1
    ) -> "Paged":
        more: dict[str, Any] = {"n": n, "temperature": 1.0, "seed": 3} if n > 1 else {}
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **more)
        self.engine.add_request(name, prompt, params)
        return self

    def step(self, times: int = 1) -> "Paged":
        for _ in range(times):
            before = self.engine.num_steps
            self.engine.step()
            if self.engine.num_steps > before:  # it had something to run
                self.pools.append(self.look())
        return self

    def finish(self) -> "Paged":
        while self.engine.has_unfinished_requests():
            assert len(self.pools) < 300, "this goes on for ever"
            self.step()
        return self

    def look(self) -> Pool:
        blocks = self.memory.blocks
        lens = {r.request_id: r.num_computed_tokens for r in self.engine.scheduler.running}
        held = self.memory._held  # its num_cached is that of those that run, too: at their start
        return Pool(
            {name: tuple(table) for name, table in blocks.tables.items()},
            {i: b.ref_cnt for i, b in enumerate(blocks.blocks) if b.ref_cnt},
            {i: b.hash.hex()[:12] for i, b in enumerate(blocks.blocks) if b.hash is not None},
            tuple(blocks.free_queue),
            {name: lens.get(name, held[name].num_cached) for name in blocks.tables},
        )

    @property
    def trace(self) -> Trace:
        assert self.engine.trace is not None
        return self.engine.trace.trace()

    @property
    def run(self) -> BlockRun:
        return BlockRun.of(self.trace, {})


@dataclass(frozen=True)
class Case:
    """A random run on pages: `seed` decides who comes when, and who is aborted."""

    seed: int
    num_blocks: int
    block_size: int
    prefix_caching: bool = True
    n: int = 1
    budget: int = 64

    @cache  # noqa: B019 -- a few cases, all of them constants
    def live(self) -> Paged:
        """The run, once for all tests: they only look at it."""
        draw = random.Random(self.seed)
        budget = {"max_num_batched_tokens": self.budget}
        live = Paged(self.num_blocks, self.block_size, self.prefix_caching, **budget)
        most = min(self.num_blocks * self.block_size - 2, 20)
        with torch.inference_mode():
            for number in range(draw.randint(2, 4)):
                prompt = draw.choice([PROMPT, TWIN, OTHER, draw.sample(range(VOCAB), 13)])
                many = draw.choice([1, self.n])
                live.add(chr(65 + number), prompt[:most], draw.randint(1, 9), many)
                live.step(draw.randint(0, 3) if live.engine.has_unfinished_requests() else 0)
                if draw.random() < 0.15 and live.engine.requests:
                    live.engine.abort_request(draw.choice(sorted(live.engine.requests)))
            return live.finish()


CASES = [
    Case(1, 12, 4),
    Case(2, 12, 4, n=2),
    Case(3, 6, 4),
    Case(4, 6, 4, n=3),
    Case(5, 7, 4, prefix_caching=False, n=2),
    Case(6, 30, 1, n=2),
    Case(8, 14, 2, n=2, budget=7),
    Case(9, 4, 8, n=2),
    Case(10, 3, 16, n=3),
    Case(11, 6, 4, n=2, budget=3),
    Case(12, 7, 3, n=3),
]


# -- cells ----------------------------------------------------------------------------------------


def new_cells(num_cells: int = 6, num_layers: int = 3) -> CellKVCache:
    """Empty cells of a random model, poisoned."""
    model = small_model(num_layers)
    return poison(CellKVCache.from_config(model.config, num_cells))


def run_cells(cells: CellKVCache, tokens: list[int], seq_id: int = 0) -> None:
    append_tokens(small_model(cells.storage.spec.num_layers), cells, seq_id, tokens)


@cache
def small_model(num_layers: int) -> CausalLM:
    return random_model(num_hidden_layers=num_layers)


def cells_picture(now: CellsSnapshot) -> Picture:
    """A moment as the explorer shows it, without its slider."""
    scene = cells_scene(now, Changes((), (), ()), "cells", heat_scale([now]))
    return Picture(scene.svg(), b"", describe(now))  # no PNG: it takes longest


# -- reading a picture ----------------------------------------------------------------------------


class Words(NamedTuple):
    """A text in a picture, and the room that it takes."""

    text: str
    size: float
    left: float
    top: float
    right: float
    bottom: float


def items(shown: Picture | Scene) -> dict[str, ET.Element]:
    """The named items of a scene's SVG. One that stripes lie on is filled with HATCHED."""
    svg = shown.svg if isinstance(shown, Picture) else shown.svg()
    found: dict[str, ET.Element] = {}
    last = None
    for e in ET.fromstring(svg).iter():
        if "data-name" in e.attrib:
            found[e.attrib["data-name"]] = last = e
        elif e.get("class") == "te-stripes" and last is not None:
            last.set("fill", HATCHED)
    return found


def box(element: ET.Element) -> tuple[float, float, float, float]:
    """x, y, width and height of a rectangle."""
    x, y, width, height = (float(element.attrib[key]) for key in ("x", "y", "width", "height"))
    return x, y, width, height


def words(shown: Picture | Scene) -> list[Words]:
    """All texts of a scene that are seen without a pointer, by the font's own measures."""
    found = []
    for e in items(shown).values():
        if e.tag != f"{SVG}text" or not e.text:
            continue
        x, y, size = (float(e.attrib[key]) for key in ("x", "y", "font-size"))
        wide = text_width(e.text, size, "font-weight" in e.attrib)
        left = x - {"middle": wide / 2, "end": wide}.get(e.get("text-anchor", ""), 0.0)
        place = (left, y - 0.72 * size, left + wide, y)
        if "transform" in e.attrib:  # turned by 90 degrees: upwards from (x, y)
            place = (x - 0.72 * size, y - wide, x, y)
        found.append(Words(e.text, size, *place))
    return found


def check_words(shown: Picture | Scene, widest: float = 1000) -> None:
    """AssertionError for words that are too small, cut off, or written over others."""
    svg = shown.svg if isinstance(shown, Picture) else shown.svg()
    width, height = (float(ET.fromstring(svg).attrib[key]) for key in ("width", "height"))
    assert width <= widest, f"{width:.0f} pixels wide: fold what is longer"
    seen = sorted(words(shown), key=lambda one: one.top)
    for i, one in enumerate(seen):
        assert one.size >= 9, one
        assert one.left >= 0 and one.right <= width + 0.5, (one, width)
        assert one.top >= 0 and one.bottom <= height, (one, height)
        for other in seen[i + 1 :]:
            if other.top >= one.bottom:
                break
            assert one.left >= other.right or other.left >= one.right, (one, other)


def check_phone(scenes: Sequence[Scene], least: float = 9) -> None:
    """On a screen of 390 pixels each word is whole in one part, and no letter is smaller.

    A part that moves from step to step shows what is new; all others show it all.
    """
    shapes = {tuple(len(boxes) for boxes in scene.parts) for scene in scenes}
    assert len(shapes) == 1, f"the parts of the steps differ, so none is shown: {shapes}"
    every = [[box for boxes in scene.parts for box in boxes] for scene in scenes]
    moves = [len(set(boxes)) > 1 for boxes in zip(*every, strict=True)]
    for scene, boxes in zip(scenes, every, strict=True):
        scales = [358 / sum(box[2] for box in each) for each in scene.parts for _ in each]
        parts = list(zip(boxes, scales, moves, strict=True))
        parts += [(box, 1.0, False) for box in scene.keys]
        top = min(box[1] for box in boxes)
        for one in words(scene):
            found = [
                min(scale, 1)
                for (x, y, wide, tall), scale, panned in parts
                if y <= one.top + 1 and one.bottom <= y + tall + 1
                if panned or (x <= one.left + 1 and one.right <= x + wide + 1)
            ]
            is_title = one.bottom < top + 8  # the page and the caption say it
            assert found or is_title, (one, "is cut on a phone")
            assert one.size * max(found, default=1) >= least - 0.01, (one, found)


def plot_words(picture: Picture) -> list[str]:
    """The words of a matplotlib SVG: drawn as outlines, but kept as comments."""
    return [html.unescape(text) for text in re.findall(r"<!-- (.*?) -->", picture.svg, re.S)]
