"""Introduced in notebook 02. The equality ledger: every path against one reference, in numbers.

Knows paths only as runners. Later notebooks add a Path; nothing else has to change.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tutorial_engine.cache.rows import GrowingKVCache
from tutorial_engine.engine.runner import CachedRunner, RecomputeRunner, Runner, make_runner
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

REFERENCE = "no cache"
SAFE_MARGIN = 1e-3  # top1 − top2 above this: rounding cannot swap two tokens


class AnyPath(Protocol):
    """One way to the same tokens."""

    def run(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, tokens: Tensor | None = None
    ) -> Tensor:
        """Logits of every step, [S, num_tokens, V]; fed with tokens [S, num_tokens], or its own."""
        ...


@dataclass(frozen=True)
class Path:
    """A path through a runner: a fresh one for n sequences, and how the prompts go in."""

    make_runner: Callable[[int], Runner]
    together: bool = False  # all prompts in one batch, or each alone
    chunk_size: int | None = None

    def run(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, tokens: Tensor | None = None
    ) -> Tensor:
        """As AnyPath.run."""
        if not self.together and len(prompts) > 1:
            alone = [
                self.run([prompt], num_tokens, None if tokens is None else tokens[s : s + 1])
                for s, prompt in enumerate(prompts)
            ]
            return torch.cat(alone)
        runner, seq_ids = self.make_runner(len(prompts)), list(range(len(prompts)))
        steps = [runner.prefill(prompts, seq_ids, self.chunk_size)]
        for step in range(num_tokens - 1):
            forced = steps[-1].argmax(-1) if tokens is None else tokens[:, step]
            steps.append(runner.decode(forced.tolist(), seq_ids))
        return torch.stack(steps, dim=1)


class LedgerRow(NamedTuple):
    """What one path gave, against the reference, over all prompts and steps.

    `difference` is the largest |Δ| of any logit; `tolerance` 1e-4 · max(1, largest logit). `equal`
    counts steps whose greedy token is the reference's; `margin` is the smallest top1 − top2.
    """

    path: str
    difference: float
    tolerance: float
    equal: int
    steps: int
    margin: float
    is_reference: bool = False

    @property
    def within(self) -> bool:
        """Logits within the tolerance; never when one of them is NaN or infinite."""
        return self.difference <= self.tolerance < math.inf

    @property
    def ok(self) -> bool:
        """Logits within the tolerance, and all tokens equal."""
        return self.within and self.equal == self.steps


def our_paths(model: Qwen3ForCausalLM, max_len: int = 128) -> dict[str, Path]:
    """The paths through this engine, name -> Path, the reference first."""

    def static(num_seqs: int) -> Runner:
        return make_runner(model, num_seqs=num_seqs, max_len=max_len)

    return {
        REFERENCE: Path(lambda _: RecomputeRunner(model)),
        "torch.cat cache": Path(lambda _: CachedRunner(model, GrowingKVCache(model.device))),
        "static cache": Path(static),
        "chunked, 3 tokens": Path(static, chunk_size=3),
        "batched, unequal prompts": Path(static, together=True),
        "batched and chunked": Path(static, together=True, chunk_size=2),
    }


def ledger(
    paths: Mapping[str, AnyPath],
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    reference: str = REFERENCE,
) -> list[LedgerRow]:
    """Every path over the same prompts, num_tokens greedy tokens each → a row per path.

    The reference chooses the tokens; all others are fed with these (teacher forcing), so that one
    difference does not hide the next. Tokens that are equal step by step here are equal in a free
    run as well. ValueError when the reference is none of the paths.
    """
    if reference not in paths:
        raise ValueError(f"no path {reference!r}; there are {sorted(paths)}")
    want = paths[reference].run(prompts, num_tokens)
    tokens = want.argmax(-1)  # [S, steps]
    best = want.topk(2).values
    margin = float((best[..., 0] - best[..., 1]).min())
    tolerance = 1e-4 * max(1.0, float(want.abs().max()))
    rows = []
    for name, path in paths.items():
        got = path.run(prompts, num_tokens, tokens)
        difference = float((got - want).abs().max())
        equal = int((got.argmax(-1) == tokens).sum())
        of_all = (difference, tolerance, equal, tokens.numel(), margin)
        rows.append(LedgerRow(name, *of_all, is_reference=name == reference))
    return rows


def table(rows: Sequence[LedgerRow]) -> str:
    """The ledger as text: verdicts, integers and bounds, no digits that differ between machines."""
    lines = [f"{'path':<40}{'max |Δ logit|':<16}{'greedy tokens':<16}"]
    for row in rows:
        what = "≤ tolerance" if row.within else "> tolerance"
        if row.within and row.is_reference:
            what = "reference"
        lines.append(f"{row.path:<40}{what:<16}{row.equal} of {row.steps} {'✔' if row.ok else '✘'}")
    safe = "above" if rows[0].margin > SAFE_MARGIN else "BELOW"
    lines.append(f"tolerance: 1e-4 · largest logit; smallest top1 − top2 is {safe} {SAFE_MARGIN:g}")
    return "\n".join(lines)
