"""For the tests of explorers: one of each, turning their knobs, and reading what a learner sees."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any, TypeVar

import ipywidgets as widgets
from tokenizers import Tokenizer

from tutorial_engine.lab.dial import Dial
from tutorial_engine.lab.workload import Arrival
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.trace.pool import ROWS
from tutorial_engine.viz.drawing.scene import Item
from tutorial_engine.viz.explorers.attention_explorer import MAX_TOKENS, AttentionExplorer
from tutorial_engine.viz.explorers.block_explorer import BlockExplorer
from tutorial_engine.viz.explorers.cache_explorer import CacheExplorer
from tutorial_engine.viz.explorers.cell_explorer import APPEND, CellExplorer, Operation, story
from tutorial_engine.viz.explorers.dial_explorer import DialExplorer
from tutorial_engine.viz.explorers.explorer import Explorer
from tutorial_engine.viz.explorers.fact_explorer import FactExplorer
from tutorial_engine.viz.explorers.memory_calculator import MemoryCalculator, preset
from tutorial_engine.viz.explorers.race_explorer import RaceExplorer
from tutorial_engine.viz.explorers.rope_explorer import RopeExplorer
from tutorial_engine.viz.explorers.sampling_explorer import SamplingExplorer
from tutorial_engine.viz.explorers.scheduler_explorer import SchedulerExplorer
from tutorial_engine.viz.run.recorded import LATE_LONG

SVG = "{http://www.w3.org/2000/svg}"
AnyExplorer = TypeVar("AnyExplorer", bound=Explorer)
Make = Callable[[CausalLM, Tokenizer, str], Explorer]
PROMPT = "Anna had a red kite. Ben had a hat. Anna"
MANY = ["Anna had a red kite. ", "Ben had a blue ball. ", "The sun was warm and the sky was blue "]


def turn(explorer: AnyExplorer, step: int | None = None, **knobs: Any) -> AnyExplorer:
    """As `set`, without making the PNG, and as a learner does it: nothing is taken back."""
    for name, value in knobs.items():
        explorer.parameters[name].value = value
    if step is not None:
        explorer.slider.value = step
    return explorer


def cut(tokenizer: Tokenizer, num_tokens: int) -> str:
    """A prompt of so many tokens."""
    return tokenizer.decode(tokenizer.encode("".join(MANY * 5)).ids[:num_tokens])


def cells(model: CausalLM, tokenizer: Tokenizer, prompt: str) -> CellExplorer:
    script = [Operation(APPEND, 0, text=prompt), Operation("seq_cp", 0, 1), Operation("seq_rm", 0)]
    return CellExplorer(model, tokenizer, num_cells=16, script=script)


def race(
    model: CausalLM, tokenizer: Tokenizer, prompts: list[str], new_tokens: int = 3
) -> RaceExplorer:
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    arrivals = [Arrival(0.0, text, params, f"user {i}") for i, text in enumerate(prompts)]
    dial = Dial(model, arrivals, num_slots=256, max_len=64, tokenizer=tokenizer)
    return RaceExplorer({"rows": dial.at(ROWS).trace, "pages": dial.at(4).trace})


MAKE: dict[str, Make] = {
    "attention": AttentionExplorer,
    "rope": lambda *_: RopeExplorer(),
    "cache": lambda m, t, p: CacheExplorer(m, t, [p, "One day", "Mia"], new_tokens=4),
    "sampling": SamplingExplorer,
    "calculator": lambda *_: MemoryCalculator(preset("Qwen3-0.6B")),
    "scheduler": lambda m, t, p: SchedulerExplorer(
        m, t, [p, "One day"], new_tokens=3, details=True
    ),
    "blocks": lambda m, t, p: BlockExplorer(m, t, [p, "One day"], new_tokens=3, num_blocks=20),
    "pages": lambda m, t, p: BlockExplorer(m, t, [p], new_tokens=3, num_blocks=20, simple=True),
    "cells": cells,
    "dial": lambda m, t, p: turn(DialExplorer(m, t, [p, "One day"], 3), block_size=4),
    "race": lambda m, t, p: race(m, t, [p, "One day", "Mia", "Tom", "Ben"]),
    "fact": lambda m, t, p: FactExplorer(
        m, t, *(f"{name} had a coat. {p} was a friend of N" for name in ("Namo", "Nedo"))
    ),
}
# the largest that each can show
LARGEST: dict[str, Make] = {
    "attention": lambda m, t, _: AttentionExplorer(m, t, cut(t, MAX_TOKENS)),
    "rope": lambda *_: RopeExplorer(128),
    "cache": lambda m, t, _: CacheExplorer(m, t, [cut(t, 16)] * 3),
    "sampling": lambda m, t, p: turn(SamplingExplorer(m, t, p), top_k=50, top_p=0.9, min_p=0.1),
    "calculator": lambda *_: MemoryCalculator(preset("Llama-3.1-8B")),
    "scheduler": lambda m, t, _: turn(
        SchedulerExplorer(m, t, [*MANY, "One day", "Mia"], 16, 64, 6, details=True),
        arrivals=LATE_LONG,
    ),
    "blocks": lambda m, t, _: BlockExplorer(m, t, MANY, n=2, block_size=2, num_blocks=64),
    "pages": lambda m, t, _: BlockExplorer(m, t, MANY, block_size=2, num_blocks=32, simple=True),
    "cells": lambda m, t, _: CellExplorer(m, t, num_cells=16, script=story(cut(t, 14), 14)),
    "dial": lambda m, t, _: turn(DialExplorer(m, t, MANY, 12, 512, 128), block_size=1),
    "race": lambda m, t, _: race(m, t, (MANY * 4), 16),
    "fact": lambda m, t, _: FactExplorer(
        m, t, f"Namo had {cut(t, 40)}", f"Nedo had {cut(t, 40)}", replace="K and V"
    ),
}


# -- what a learner sees --------------------------------------------------------------------------


class Text(HTMLParser):
    """The words of a piece of HTML, and every tag that is in it."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.words, self.tags = "", list[str]()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words += data


def svg_of(explorer: Explorer) -> str:
    return explorer._scene_html.value


def caption_of(explorer: Explorer) -> str:
    """The caption as the learner reads it below the live picture."""
    return Text(explorer._caption_html.value).words


def message_of(explorer: Explorer) -> str:
    return Text(explorer._message_html.value).words


def seen(explorer: Explorer) -> tuple[str, str, int, int, dict[str, Any]]:
    """All that is seen: picture, caption, steps, and where the knobs stand."""
    knobs = {name: knob.value for name, knob in explorer.parameters.items()}
    return svg_of(explorer), caption_of(explorer), explorer.num_steps, explorer.step, knobs


def tips(explorer: Explorer) -> list[str]:
    """What hovering says, in the order of drawing."""
    groups = [g for g in ET.fromstring(svg_of(explorer)).iter(f"{SVG}g")]
    return [g.findtext(f"{SVG}text") or "" for g in groups if g.get("class") == "te-tip"]


def items(explorer: Explorer, pattern: str) -> dict[str, Item]:
    """The items of the picture with such names."""
    found = explorer.shown.items.items()
    return {name: item for name, item in found if re.fullmatch(pattern, name)}


def words(explorer: Explorer, pattern: str) -> list[str]:
    """What the items with such names say."""
    return [item.text for item in items(explorer, pattern).values()]


def inside(widget: widgets.Widget) -> list[widgets.Widget]:
    """A widget and all that it contains."""
    return [widget, *(w for child in getattr(widget, "children", ()) for w in inside(child))]
