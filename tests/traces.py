"""Recorded runs for the tests of pictures: by hand, and from small random engines; and a look at
where a picture has its words.
"""

import html
import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from engines import VOCAB, random_model
from PIL import Image

from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.engine import EngineConfig, LLMEngine
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.engine.request import RequestOutput
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.lab.workload import Arrival, poisson_times, ragged, serve
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace import events
from tutorial_engine.trace.events import Event, Recorder, Trace
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import text_width

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


def played(plan: Sequence[Plan], budget: int = 8) -> Trace:
    """The plan as the trace of an engine that did it: 10 ms a step and 1 ms a token."""
    found: list[Event] = []
    now, running = 0.0, set()
    for step, one in enumerate(plan):
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
    return Trace({"policy": "Scheduler", "max_num_batched_tokens": budget}, tuple(found))


def story(*after: tuple[str, str]) -> Trace:
    """The storyboard's run; `after` it, (id, reason) of requests that end without a step."""
    trace = played(STORY)
    step, now = len(STORY), trace.events[-1].time
    more = [events.Finished(step, now, name, reason, None) for name, reason in after]
    return trace._replace(events=(*trace.events, *more))


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
    engine.add_request([1, 2, 3], params, "A")
    for _ in range(5):
        engine.step()
    engine.add_request(list(range(40)), params, "L")
    engine.run()
    return recorder.trace()


def renamed(trace: Trace, names: dict[str, str]) -> Trace:
    """The same run with other request ids."""
    text = trace.to_json()
    for old, new in names.items():
        text = text.replace(f'"request_id": "{old}"', f'"request_id": {json.dumps(new)}')
    return Trace.from_json(text)


class Words(NamedTuple):
    """A text in a picture, and the room that it takes."""

    text: str
    size: float
    left: float
    top: float
    right: float
    bottom: float


def items(picture: Picture) -> dict[str, ET.Element]:
    """The named items of a scene's SVG."""
    return {e.attrib["id"]: e for e in ET.fromstring(picture.svg).iter() if "id" in e.attrib}


def words(picture: Picture) -> list[Words]:
    """All texts of a scene's SVG that are seen without a pointer."""
    found = []
    for e in items(picture).values():
        if e.tag != f"{SVG}text" or not e.text:
            continue
        x, y, size = (float(e.attrib[key]) for key in ("x", "y", "font-size"))
        wide = text_width(e.text, size, e.get("font-weight") == "bold")
        left = x - {"middle": wide / 2, "end": wide}.get(e.get("text-anchor", ""), 0.0)
        box = (left, y - 0.74 * size, left + wide, y + 0.1 * size)
        if "transform" in e.attrib:  # turned by 90 degrees: upwards from (x, y)
            box = (x - 0.74 * size, y - wide, x + 0.1 * size, y)
        found.append(Words(e.text, size, *box))
    return found


def check_words(picture: Picture) -> None:
    """AssertionError for words that are too small, cut off, or written over others."""
    root = ET.fromstring(picture.svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert width <= 1000
    seen = words(picture)
    for one in seen:
        assert one.size >= 10, one
        assert one.left >= 0 and one.right <= width + 0.5, (one, width)
        assert one.top >= 0 and one.bottom <= height, (one, height)
    for i, one in enumerate(seen):
        for other in seen[:i]:
            apart = one.left >= other.right or other.left >= one.right
            assert apart or one.top >= other.bottom or other.top >= one.bottom, (one, other)


def plot_words(picture: Picture) -> list[str]:
    """The words of a matplotlib SVG: drawn as outlines, but kept as comments."""
    return [html.unescape(text) for text in re.findall(r"<!-- (.*?) -->", picture.svg, re.S)]


def check_plot(draw: Callable[[], Picture], pixels: int = 1300, shown: str = "") -> Picture:
    """Draw it twice: the same sound, light files; no tiny text, no formula.

    Its caption is in it, or what is `shown` in its place.
    """
    picture = draw()
    assert draw() == picture
    assert ET.fromstring(picture.svg).tag == f"{SVG}svg" and len(picture.png) <= 90_000
    with Image.open(io.BytesIO(picture.png)) as image:
        assert image.format == "PNG" and image.width <= pixels
        assert len(set(image.convert("RGB").getdata())) > 3
    said = plot_words(picture)
    caption = (shown or picture.caption).replace("--", "- -")  # what an XML comment makes of it
    assert " ".join(caption.split()) in " ".join(" ".join(said).split())
    assert not [word for word in said if "mathdefault" in word or "\\times" in word]
    # matplotlib draws outlines of 100 units a letter height, in points: 100 dots are 72 points
    scales = [float(s) for s in re.findall(r"scale\(([\d.]+) -", picture.svg)]
    assert scales and min(scales) * 100 * 100 / 72 >= 9
    return picture
