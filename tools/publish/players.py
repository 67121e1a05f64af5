"""The players of the site: `python -m tools.publish.players`.

One table: what each shows, which run of the engine it is made of, and where the lesson about it is.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from tools.publish.build import NOTEBOOKS
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz.attention_explorer import AttentionExplorer
from tutorial_engine.viz.block_explorer import BlockExplorer
from tutorial_engine.viz.cache_explorer import CacheExplorer
from tutorial_engine.viz.cell_explorer import CellExplorer
from tutorial_engine.viz.explorer import Explorer
from tutorial_engine.viz.player import Card, Frame, save_player
from tutorial_engine.viz.rope_explorer import RopeExplorer
from tutorial_engine.viz.scheduler_explorer import CLASSES, SchedulerExplorer
from tutorial_engine.viz.softmax_view import record_softmax, softmax_frames

PLAYERS = NOTEBOOKS.parent / "build" / "players"
PROMPTS = ("Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day")
NEW_TOKENS = (6, 3, 5)  # that they want


class Run(NamedTuple):
    """What a player is made of: its frames, what a step is called, where it starts."""

    frames: Sequence[Frame]
    step_name: str = "step"
    start: int = 0


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


def _policy(policy: type[Scheduler]) -> Callable[[Qwen3ForCausalLM, Tokenizer], Run]:
    """The same three requests in two places, under a policy."""
    name = next(name for name, one in CLASSES.items() if one is policy)

    def make(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> Run:
        explorer = SchedulerExplorer(
            model, tokenizer, PROMPTS, NEW_TOKENS, budget=12, max_num_seqs=2
        )
        return run_of(explorer, policy=name)

    return make


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
        Card((284, 34, 306, 318), 4),
    ),
    Show(
        "cache",
        "The KV cache fills",
        "The prompts are read in one forward. After that each forward runs one token of each "
        "request, and the keys and values of all earlier tokens are read from the cache.",
        "02_kv_cache",
        "One storage and a map",
        lambda m, t: run_of(CacheExplorer(m, t, ["One day", "Mia", "Ben had"], new_tokens=4)),
        Card((0, 66, 780, 230), 0.8),
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
        Card((0, 54, 560, 290), 0.6, phone=(0, 54, 402, 290)),
    ),
    Show(
        "scheduler-one-rule",
        "The scheduler, continuous batching",
        "Three requests share two places. A step reads prompts and decodes in the same forward. "
        "When B is finished, C has its place in the next step.",
        "03_scheduler",
        "Three requests, a budget of 8",
        _policy(Scheduler),
        Card((0, 36, 700, 150), phone=(0, 0, 372, 122), rows=1),
    ),
    Show(
        "scheduler-prefill-first",
        "The scheduler, prefill first",
        "The same three requests. A step either reads whole prompts or decodes, so A stands still "
        "while the prompts of B and C are read.",
        "03_scheduler",
        "Four policies and their idle places",
        _policy(PrefillFirst),
    ),
    Show(
        "scheduler-static",
        "The scheduler, static batching",
        "The same three requests. B is finished early, but C may not join before A is finished as "
        "well.",
        "03_scheduler",
        "Four policies and their idle places",
        _policy(StaticBatching),
    ),
    Show(
        "scheduler-one-by-one",
        "The scheduler, one by one",
        "The same three requests. Each runs alone until it is finished, so this takes the most "
        "steps.",
        "03_scheduler",
        "Four policies and their idle places",
        _policy(OneByOne),
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
        Card((0, 36, 690, 430), 0.6, phone=(8, 36, 352, 298)),
    ),
)


def show_of(name: str) -> Show:
    """The player of that name. KeyError for one that there is not."""
    return {show.name: show for show in SHOWS}[name]


def write(folder: Path, links: Callable[[Show], Mapping[str, str]] | None = None) -> list[Path]:
    """Run the engine and write all players into the folder → their files.

    `links` says which pages a player leads to: words -> address.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(), load_tokenizer()
    files = []
    for show in SHOWS:
        run = show.make(model, tokenizer)
        files.append(
            save_player(
                run.frames,
                folder / show.file,
                show.title,
                step_name=run.step_name,
                start=run.start,
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
