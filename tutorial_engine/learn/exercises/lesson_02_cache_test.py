"""The check of the exercise on tests: does the learner's test notice every bug of the cache?"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.runner import decode, prefill
from tutorial_engine.learn.exercises.facts import AsIs, told
from tutorial_engine.learn.exercises.verdict import CannotBe, Verdict, close, guarded, must_answer
from tutorial_engine.learn.stories.bugs import planted
from tutorial_engine.learn.stories.bugs_02 import BUGS_02
from tutorial_engine.model.checkpoint import load_model

CacheTest = Callable[[Callable[..., Tensor]], object]
ROOM = 256  # slots of the cache
MOST = 3  # calls that are shown
FEWEST = 4  # tokens that catch all: two chunks of two


class Ran(NamedTuple):
    """A call of logits_of."""

    sequence: list[int]
    new: list[int]
    chunk_size: int | None

    def forwards(self) -> list[tuple[int, int]]:
        """Queries and keys of each forward that it ran."""
        length = len(self.sequence)
        size = self.chunk_size or length
        chunks = [(min(size, length - at), min(at + size, length)) for at in range(0, length, size)]
        return chunks + [(1, length + n) for n in range(1, len(self.new) + 1)]


def _shown(call: Ran) -> str:
    """A call, its forwards, and what none of them shows."""
    forwards = call.forwards()
    asked = AsIs(f"logits_of({call.sequence}, {call.new}, {call.chunk_size})")
    each = AsIs(", ".join(f"{queries} and {keys}" for queries, keys in forwards))
    facts: dict[str, object] = {"asked": asked, "queries and keys of each forward": each}
    if not any(1 < queries < keys for queries, keys in forwards):
        facts["two or more queries and earlier keys"] = AsIs("in none")
    if len({*call.sequence, *call.new}) == 1:
        facts["its tokens"] = AsIs("all alike, and so are all V of a layer")
    return told(facts)


def check_cache_test(test: CacheTest) -> Verdict:
    """Check a learner's function(logits_of) → logits: each bug of BUGS_02 must change them."""
    model, ran = load_model(), list[Ran]()

    def logits_of(
        sequence: Sequence[int], new: Sequence[int] = (), chunk_size: int | None = None
    ) -> Tensor:
        """As the notebook has it; notes what runs."""
        request = Request("A", list(sequence))
        if len(sequence) == 0:
            raise CannotBe("give logits_of at least one token of a prompt")
        if len(sequence) + len(new) > ROOM:
            raise CannotBe(f"use at most {ROOM} tokens; far fewer are enough")
        cache = StaticKVCache.from_config(model.config, max_len=ROOM)
        cache.storage.k.zero_()  # what memory that was never written may well hold
        cache.storage.v.zero_()
        rows = [prefill(model, cache, [request], chunk_size=chunk_size)]
        for token in new:
            request.token_ids.append(token)
            rows.append(decode(model, cache, [request]))
        ran.append(Ran([*sequence], [*new], chunk_size))
        return torch.cat(rows)

    def answer() -> Tensor:
        got = test(logits_of)
        must_answer("cache_test", got, test)
        if not isinstance(got, Tensor):
            raise CannotBe(f"return what logits_of gave, a tensor; got {type(got).__name__}")
        if not got.is_floating_point():
            raise CannotBe("return the logits, and not tokens: a bug may change logits alone")
        return got

    def run() -> Verdict:
        right = answer()
        calls = [*ran]

        def notices_nothing() -> bool:
            got = answer()
            return got.shape == right.shape and close(got, right, 1e-4)

        if not notices_nothing():
            raise CannotBe("two runs without a bug give different logits")
        missed = []
        for name in BUGS_02:
            with planted(name, BUGS_02):
                missed += [name] if notices_nothing() else []
        said = f"cache_test: {len(BUGS_02) - len(missed)} of {len(BUGS_02)} bugs are caught"
        if missed:
            lines = [f"{said}. Not caught: {'; '.join(missed)}", *map(_shown, calls[:MOST])]
            if len(calls) > MOST:
                lines.append(f"  calls that are not shown: {len(calls) - MOST}")
            return Verdict(False, "\n".join(lines))
        tokens = sum(len(call.sequence) + len(call.new) for call in calls)
        enough = "; fewer are enough" if tokens > FEWEST else ""
        return Verdict(True, f"{said}, by a test that runs {tokens} tokens{enough}")

    with torch.no_grad():
        return guarded("cache_test", run, test)
