"""The players of the site: `python -m tools.publish.players`.

One table: what each shows, which run of the engine it is made of, and where the lesson about it is.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from tools.publish import facts
from tools.publish.build import NOTEBOOKS
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.lab.vllm import recorded_run, serve_again
from tutorial_engine.learn.stories.jukebox import jukebox_film
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.drawing.png import at_night, png_of
from tutorial_engine.viz.drawing.scene import Frame, Scene
from tutorial_engine.viz.explorers.attention_explorer import AttentionExplorer
from tutorial_engine.viz.explorers.block_explorer import BlockExplorer
from tutorial_engine.viz.explorers.cache_explorer import CacheExplorer
from tutorial_engine.viz.explorers.cell_explorer import CellExplorer
from tutorial_engine.viz.explorers.explorer import Explorer
from tutorial_engine.viz.explorers.fact_page import TITLE, fact_poster
from tutorial_engine.viz.explorers.player import Card, save_player
from tutorial_engine.viz.explorers.rope_explorer import RopeExplorer
from tutorial_engine.viz.explorers.scheduler_explorer import CLASSES, SchedulerExplorer
from tutorial_engine.viz.run.record_softmax import record_softmax
from tutorial_engine.viz.run.recorded import labels
from tutorial_engine.viz.run.scheduler_run import SchedulerRun
from tutorial_engine.viz.views.running_softmax_picture import softmax_frames
from tutorial_engine.viz.views.scheduler_view import SchedulerView
from tutorial_engine.viz.views.transplant_picture import transplant_choices, transplant_runs

PLAYERS = NOTEBOOKS.parent / "build" / "players"
PROMPTS = ("Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day")
NEW_TOKENS = (6, 3, 5)  # that they want
VLLM_RUN = "long_prompt"  # one that vLLM decided, with other requests


class Film(NamedTuple):
    """What a player is made of: its runs, what a step is called, where it starts.

    `choices`: control -> its options; there is a run for each way to choose.
    """

    runs: Sequence[Sequence[Frame]]
    step_name: str = "step"
    start: int = 0
    choices: Mapping[str, Sequence[str]] | None = None

    def captions(self) -> str:
        """All that it says."""
        return " ".join(frame.caption for run in self.runs for frame in run)


@dataclass(frozen=True)
class Entry:
    """A page among the players: its file, its title, what is seen, and the lesson's section."""

    name: str
    title: str
    words: str
    lesson: str
    heading: str

    @property
    def file(self) -> str:
        """Its file's name."""
        return f"{self.name}.html"


@dataclass(frozen=True)
class Show(Entry):
    """A player of recorded steps, and how it is made.

    `card`: its small moving picture on the first page of the site; not all have one.
    """

    make: Callable[[CausalLM, Tokenizer], Film]
    card: Card | None = None


def frames_of(explorer: Explorer, **knobs: Any) -> list[Frame]:
    """All steps of an explorer, its knobs turned."""
    if knobs:
        explorer.set(**knobs)
    steps = range(explorer.num_steps)
    return [Frame(explorer.scene(step), explorer.caption(step)) for step in steps]


def film_of(explorer: Explorer, start: int = 0) -> Film:
    """The one run of an explorer as it is."""
    return Film([frames_of(explorer)], explorer.step_name, start)


def _policies(model: CausalLM, tokenizer: Tokenizer) -> Film:
    """Three requests under each policy, ours first; then a run of vLLM, and the same one here."""
    explorer = SchedulerExplorer(model, tokenizer, PROMPTS, NEW_TOKENS, budget=12, max_num_seqs=2)
    names = sorted(CLASSES, key=lambda name: CLASSES[name] is not Scheduler)
    runs = {name: frames_of(explorer, policy=name) for name in names}
    recorded = recorded_run(VLLM_RUN)
    for name, trace in (
        ("vLLM, other requests", recorded),
        ("this engine on those", serve_again(recorded, model)),
    ):
        run = SchedulerRun.of(trace, labels(trace, tokenizer))
        scene = SchedulerView(run, details=False).scene
        runs[name] = [Frame(scene(step), run.caption(step)) for step in range(len(run.steps))]
    options = [f"{name}: {len(frames)} steps" for name, frames in runs.items()]
    return Film([*runs.values()], choices={"policy": options})


def _pages(explorer: BlockExplorer, knob: str, name: str, values: Mapping[Any, Any]) -> Film:
    """A run for each value of a knob, with what else changes with it: value -> other knobs."""
    runs = [frames_of(explorer, **{knob: value} | more) for value, more in values.items()]
    return Film(runs, choices={name: [*map(str, values)]})


FACTS = Entry(  # no recorded steps: the visitor chooses, and a real model has answered before
    "facts",
    TITLE,
    "A real model has read a text about France. Replace some numbers of its KV cache by those "
    "of a text about Italy, and the answer is Rome. Search by halves: 64 of 11,520 numbers are "
    "enough.",
    "06_real_model",
    "Where is Paris?",
)
SHOWS = (
    Show(
        "attention",
        "Causal attention: who looks at whom",
        "Each row is a token that looks back. The mask hides what comes later. The colour says how "
        "much attention an earlier token gets.",
        "01_attention_rope",
        "The causal mask",
        lambda m, t: film_of(
            AttentionExplorer(m, t, "Anna had a red kite. Ben had a hat. Anna", 3, 5), start=8
        ),
    ),
    Show(
        "rope",
        "RoPE: position as rotation",
        "Query (solid hand) and key (dashed hand) move on together. All hands turn, but the angle "
        "between two hands stays the same, and so does the score.",
        "01_attention_rope",
        "RoPE: position as rotation",
        lambda *_: film_of(RopeExplorer()),
    ),
    Show(
        "jukebox",
        "Which part of the model is broken?",
        "Six stories from the same prompt; in each of them one part of the model is broken. Guess "
        "which part it is. One story sounds right, although its logits are not.",
        "01_attention_rope",
        "The same logits as transformers",
        lambda m, t: Film([jukebox_film(m, t, PROMPTS[0])]),
    ),
    Show(
        "cache",
        "The KV cache fills",
        "The prompts are read in one forward. After that each forward runs one token of each "
        "request, and the keys and values of all earlier tokens are read from the cache.",
        "02_kv_cache",
        "One storage and a map",
        lambda m, t: film_of(CacheExplorer(m, t, ["One day", "Mia", "Ben had"], new_tokens=4)),
        Card((0, 62, 766, 234), 0.8, phone=(313, 62, 453, 234)),
    ),
    Show(
        "transplant",
        "A memory transplant: whose story is it now?",
        "Two texts differ in one token. Step by step another layer of its memory comes from the "
        "other text, and at last all layers. Read whose story follows; the text on the screen "
        "stays as it is.",
        "02_kv_cache",
        "Edit the memory",
        lambda m, t: Film(transplant_runs(m, t), choices=transplant_choices()),
        Card((0, 0, 590, 374), 0.6, phone=(0, 0, 476, 374)),
    ),
    Show(
        "softmax",
        "Attention block by block, with a running softmax",
        "One query reads its blocks one after the other. When a block has a larger score, one "
        "factor, exp(old m − new m), corrects all sums before it, so no block is read twice. The "
        "last answer is that of softmax over all tokens at once.",
        "04_paged_cells",
        "Attention that reads the pages in place",
        lambda m, t: Film(
            [softmax_frames(record_softmax(m, t, PROMPTS, layer=2, head=1))], "blocks read"
        ),
    ),
    Show(
        "scheduler",
        "The scheduler: four policies, and vLLM",
        "Three requests share two places. With one rule a step reads prompts and decodes in the "
        "same forward, and C has the place of B in the next step. The other policies wait or stand "
        "still. The last two runs are a recording of vLLM, and this engine on the same requests.",
        "03_scheduler",
        "Four policies and their idle places",
        _policies,
        Card((0, 36, 700, 150), phone=(0, 0, 372, 122), rows=1),
    ),
    Show(
        "pages",
        "Pages: block tables and the pool",
        "A request takes a block of slots when it needs one. Its block table says where each block "
        "lies in the pool. C waits until there are enough, and takes those that A has left.",
        "04_paged_cells",
        "The same engine, on pages",
        lambda m, t: _pages(
            BlockExplorer(m, t, PROMPTS[::-1], new_tokens=8, num_blocks=8, simple=True),
            "block_size",
            "block size",
            {4: {"num_blocks": 8}, 1: {"num_blocks": 32}, 16: {"num_blocks": 2}},
        ),
        Card((0, 56, 880, 430), phone=(554, 56, 325, 290)),
    ),
    Show(
        "sharing",
        "Pages: a beginning that is shared",
        "B begins with the words of A. With the prefix cache it uses two blocks of A, whose K and "
        "V are there; without it B computes and stores all of them again.",
        "05_sharing",
        "Sharing a beginning",
        lambda m, t: _pages(
            BlockExplorer(
                m, t, [PROMPTS[0], f"{PROMPTS[0]} Ben had a dog."], new_tokens=5, num_blocks=10
            ),
            "prefix_caching",
            "prefix cache",
            {"on": {}, "off": {}},
        ),
    ),
    Show(
        "preemption",
        "Pages: memory is full",
        "The pool is full, and a request needs a block: the one that came last gives all its "
        "blocks back, waits, and is computed again.",
        "05_sharing",
        "Memory is full",
        lambda m, t: film_of(
            BlockExplorer(m, t, PROMPTS, new_tokens=12, num_blocks=8, simple=True)
        ),
    ),
    Show(
        "cells",
        "Cells: one token each",
        "A cell knows its position and its owners. A copy of a sequence only adds an owner; a "
        "freed cell is used again at once.",
        "04_paged_cells",
        "Cells",
        lambda m, t: film_of(CellExplorer(m, t, most_layers=2)),
    ),
)


def entries() -> tuple[Entry, ...]:
    """All pages, in the order of their list."""
    return (FACTS, *SHOWS)


def show_of(name: str) -> Show:
    """The player of that name. KeyError for one that there is not."""
    return {show.name: show for show in SHOWS}[name]


def write(folder: Path, links: Callable[[Entry], Mapping[str, str]] | None = None) -> list[Path]:
    """Run the engine and write all players and cards into the folder, with stills → the pages.

    `links` says which pages a player leads to: words -> address.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(), load_tokenizer()
    more: dict[str, Any] = {"links": links(FACTS)} if links else {}
    files = [facts.write_page(folder / FACTS.file, **more)]
    _still(folder, FACTS.name, fact_poster(facts.known()), 0.9)
    for show in SHOWS:
        film = show.make(model, tokenizer)
        _still(folder, show.name, film.runs[0][len(film.runs[0]) * 2 // 5].scene, 0.8)
        same = {"lead": show.words, "step_name": film.step_name, "start": film.start}
        if show.card:
            file = folder / f"{show.name}-card.html"
            files.append(save_player(film.runs[:1], file, show.title, card=show.card, **same))
        more = {"choices": film.choices, "links": links(show) if links else None, **same}
        files.append(save_player(film.runs, folder / show.file, show.title, **more))
    return files


def _still(folder: Path, name: str, scene: Scene, zoom: float) -> None:
    """A still picture of a player, by day and by night."""
    (folder / f"{name}.png").write_bytes(scene.png(zoom))
    (folder / f"{name}-dark.png").write_bytes(png_of(at_night(scene.svg()), zoom))


def main() -> None:
    """Write them into build/players, or into the folder that is named."""
    for file in write(Path(sys.argv[1]) if sys.argv[1:] else PLAYERS):
        print(f"wrote {file}, {file.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
