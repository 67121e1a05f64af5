"""The players of the site: `python -m tools.publish.players`.

One table: what each shows, which run of the engine it is made of, and where the lesson about it is.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from tools.publish.build import NOTEBOOKS
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.learn.jukebox import jukebox_film
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz.attention_explorer import AttentionExplorer
from tutorial_engine.viz.block_explorer import BlockExplorer
from tutorial_engine.viz.cache_explorer import CacheExplorer
from tutorial_engine.viz.cell_explorer import CellExplorer
from tutorial_engine.viz.explorer import Explorer
from tutorial_engine.viz.kv_edit_view import transplant_choices, transplant_frames
from tutorial_engine.viz.player import Card, Frame, save_player
from tutorial_engine.viz.rope_explorer import RopeExplorer
from tutorial_engine.viz.scheduler_explorer import CLASSES, SchedulerExplorer
from tutorial_engine.viz.softmax_view import record_softmax, softmax_frames

PLAYERS = NOTEBOOKS.parent / "build" / "players"
PROMPTS = ("Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day")
NEW_TOKENS = (6, 3, 5)  # that they want


class Run(NamedTuple):
    """What a player is made of: its frames, what a step is called, where it starts.

    `tabs`: several runs by their names, of which `frames` are the first; None: there is one.
    """

    frames: Sequence[Frame]
    step_name: str = "step"
    start: int = 0
    choices: Mapping[str, Sequence[str]] | None = None  # lists to choose a frame by
    tabs: Mapping[str, Sequence[Frame]] | None = None

    def captions(self) -> str:
        """All that it says."""
        every = self.tabs.values() if self.tabs else [self.frames]
        return " ".join(frame.caption for frames in every for frame in frames)


class Show(NamedTuple):
    """A player: its file, its title, what is seen, the lesson's section, and how it is made.

    `card`: its small moving picture on the first page of the site; not all have one.
    """

    name: str
    title: str
    words: str
    lesson: str
    heading: str
    make: Callable[[Qwen3ForCausalLM, Tokenizer], Run]
    card: Card | None = None

    @property
    def file(self) -> str:
        """Its file's name."""
        return f"{self.name}.html"


def run_of(explorer: Explorer, start: int = 0, **knobs: Any) -> Run:
    """All steps of an explorer, its knobs turned."""
    if knobs:
        explorer.set(**knobs)
    steps = range(explorer.num_steps)
    frames = [Frame(explorer.scene(step), explorer.caption(step)) for step in steps]
    return Run(frames, explorer.step_name, start)


def _policies(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> Run:
    """The same three requests in two places, under each policy; our own rule first."""
    explorer = SchedulerExplorer(model, tokenizer, PROMPTS, NEW_TOKENS, budget=12, max_num_seqs=2)
    names = sorted(CLASSES, key=lambda name: CLASSES[name] is not Scheduler)
    runs = {name: run_of(explorer, policy=name).frames for name in names}
    tabs = {f"{name}: {len(frames)} steps": frames for name, frames in runs.items()}
    return Run(runs[names[0]], tabs=tabs)


SHOWS = (
    Show(
        "attention",
        "Causal attention: who looks at whom",
        "Each row is a token that looks back. The mask hides what comes later. The colour says how "
        "much attention an earlier token gets.",
        "01_attention_rope",
        "The causal mask",
        lambda m, t: run_of(
            AttentionExplorer(m, t, "Anna had a red kite. Ben had a hat. Anna", 3, 3)
        ),
        Card((10, 0, 505, 546)),
    ),
    Show(
        "rope",
        "RoPE: position as rotation",
        "Query (solid hand) and key (dashed hand) move on together. All hands turn, but the angle "
        "between two hands stays the same, and so does the score.",
        "01_attention_rope",
        "RoPE: position as rotation",
        lambda *_: run_of(RopeExplorer()),
    ),
    Show(
        "jukebox",
        "Which part of the model is broken?",
        "Six stories from the same prompt; in each of them one part of the model is broken. Guess "
        "which part it is. One story sounds right, although its logits are not.",
        "01_attention_rope",
        "The same logits as transformers",
        lambda m, t: Run(jukebox_film(m, t, PROMPTS[0])),
    ),
    Show(
        "cache",
        "The KV cache fills",
        "The prompts are read in one forward. After that each forward runs one token of each "
        "request, and the keys and values of all earlier tokens are read from the cache.",
        "02_kv_cache",
        "One storage and a map",
        lambda m, t: run_of(CacheExplorer(m, t, ["One day", "Mia", "Ben had"], new_tokens=4)),
        Card((0, 66, 780, 230), 0.8, phone=(336, 66, 446, 236)),
    ),
    Show(
        "transplant",
        "A memory transplant: whose story is it now?",
        "Two texts differ in one token. Choose what the memory of one gets from the memory of the "
        "other, and read how the story goes on. The text on the screen stays as it is.",
        "02_kv_cache",
        "Edit the memory",
        lambda m, t: Run(
            transplant_frames(m, t),
            "choice",
            start=3,
            choices=transplant_choices(m.config.num_hidden_layers),
        ),
    ),
    Show(
        "softmax",
        "Attention block by block, with a running softmax",
        "One query reads its blocks one after the other. When a block has a larger score, the sums "
        "before it are corrected. The last answer is that of softmax over all tokens at once.",
        "04_paged_cells",
        "Attention that reads the pages in place",
        lambda m, t: Run(
            softmax_frames(record_softmax(m, t, PROMPTS, layer=2, head=1)), "blocks read"
        ),
    ),
    Show(
        "scheduler",
        "The scheduler: four policies",
        "Three requests share two places. With one rule a step reads prompts and decodes in the "
        "same forward, and C has the place of B in the next step. The other policies wait or stand "
        "still.",
        "03_scheduler",
        "Four policies and their idle places",
        _policies,
        Card((0, 36, 700, 150), phone=(0, 0, 372, 122), rows=1),
    ),
    Show(
        "pages",
        "Pages: block tables and the pool",
        "A request takes a block of four slots when it needs one. Its block table says where each "
        "block lies in the pool. C waits until there are enough, and takes those that A has left.",
        "04_paged_cells",
        "The same engine, on pages",
        lambda m, t: run_of(
            BlockExplorer(m, t, PROMPTS[::-1], new_tokens=8, num_blocks=8, simple=True)
        ),
        Card((0, 56, 880, 430), phone=(548, 56, 330, 290)),
    ),
    Show(
        "pages-shared",
        "Pages: sharing and preemption",
        "B begins with the words of A, so it uses two blocks of A. Later the pool is full: C, and "
        "then B, gives its blocks back, waits, and is computed again.",
        "05_sharing",
        "Memory is full",
        lambda m, t: run_of(
            BlockExplorer(
                m,
                t,
                [PROMPTS[0], f"{PROMPTS[0]} Ben had a dog.", PROMPTS[2]],
                new_tokens=12,
                num_blocks=10,
            )
        ),
    ),
    Show(
        "cells",
        "Cells: one token each",
        "A cell knows its position and its owners. A copy of a sequence only adds an owner; a "
        "freed cell is used again at once.",
        "04_paged_cells",
        "Cells",
        lambda m, t: run_of(CellExplorer(m, t)),
    ),
)


def show_of(name: str) -> Show:
    """The player of that name. KeyError for one that there is not."""
    return {show.name: show for show in SHOWS}[name]


def write(folder: Path, links: Callable[[Show], Mapping[str, str]] | None = None) -> list[Path]:
    """Run the engine and write all players into the folder, each with a still → the players.

    `links` says which pages a player leads to: words -> address.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(), load_tokenizer()
    files = []
    for show in SHOWS:
        run = show.make(model, tokenizer)
        poster = run.frames[len(run.frames) // 2].scene.png(zoom=0.8)
        (folder / f"{show.name}.png").write_bytes(poster)
        files.append(
            save_player(
                run.tabs or run.frames,
                folder / show.file,
                show.title,
                step_name=run.step_name,
                start=run.start,
                choices=run.choices,
                card=show.card,
                links=links(show) if links else None,
            )
        )
    return files


def main() -> None:
    """Write them into build/players, or into the folder that is named."""
    for file in write(Path(sys.argv[1]) if sys.argv[1:] else PLAYERS):
        print(f"wrote {file}, {file.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
