"""One decode step of two requests on pages: every function of the package that it enters.

    python -m tools.trace_step

Runs the shipped model until both requests decode, then watches one `LLMEngine.step` through
sys.setprofile. Prints how many files and functions of the package the step enters and with how many
calls; then the path, as an outline: each function where it is entered for the first time, below
the one that called it. A comprehension or a lambda belongs to the function that it stands in; which
of them are frames of their own depends on the Python. So does a module's call: it only calls
`forward`, as PyTorch's own does for the modules that have no call of ours.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import tutorial_engine
from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.sampling.params import SamplingParams

PACKAGE = Path(tutorial_engine.__file__).parent
PROMPTS = ["Once upon a time, there was", "Tom and his dog"]


class Hop(NamedTuple):
    """A function of the package, entered `depth` of the package's own calls deep."""

    depth: int
    file: str
    function: str

    def __str__(self) -> str:
        return f"{'  ' * self.depth}{self.file}: {self.function}"


class Outline:
    """What ran: how often each function was entered, and the hops to the first entry of each."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()  # (file, function) -> entries
        self.hops: list[Hop] = []
        self.inner: set[tuple[str, str, int]] = set()  # what belongs to them

    @property
    def files(self) -> list[str]:
        """The files that were entered, in that order."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    def watch(self, run: Callable[[], Any]) -> None:
        """Call `run`, and note the package's functions that it enters."""
        sys.setprofile(self._note)
        try:
            run()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        here = place(frame)
        if event != "call" or here is None:
            return
        if is_inner(frame):
            self.inner.add((*here, frame.f_code.co_firstlineno))
            return
        if here not in self.calls:
            depth, above = 0, frame.f_back
            while above is not None:
                depth += place(above) is not None and not is_inner(above)
                above = above.f_back
            self.hops.append(Hop(depth, *here))
        self.calls[here] += 1

    def text(self) -> str:
        """The numbers and the hops, the same with every Python."""
        calls = self.calls.total()
        numbers = f"{len(self.files)} files, {len(self.calls)} functions, {calls} calls"
        return "\n".join([numbers, "", *map(str, self.hops)])


def place(frame: FrameType) -> tuple[str, str] | None:
    """(file, function) of a frame of the package, None for any other."""
    file = Path(frame.f_code.co_filename)
    if PACKAGE not in file.parents:
        return None
    return str(file.relative_to(PACKAGE)), frame.f_code.co_qualname.split(".<locals>.<")[0]


def is_inner(frame: FrameType) -> bool:
    """Is it a comprehension, a generator expression, or a lambda?"""
    return frame.f_code.co_name.startswith("<")


def decode_step() -> Outline:
    """The outline of one step in which two requests decode, on pages of 16 tokens."""
    model, tokenizer = load_model(), load_tokenizer()
    pages = PagedKVCache.from_config(model.config, block_size=16, num_blocks=8)
    engine = LLMEngine(model, tokenizer, memory=pages)
    for prompt in PROMPTS:
        engine.add_request(None, prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    for _ in range(2):  # the prompts, then a first decode
        engine.step()
    outline = Outline()
    outline.watch(engine.step)
    return outline


def main() -> None:
    """Print it."""
    with torch.inference_mode():
        outline = decode_step()
    print(outline.text())
    print(f"\n(and {len(outline.inner)} comprehensions, lambdas and calls of modules in them)")


if __name__ == "__main__":
    main()
