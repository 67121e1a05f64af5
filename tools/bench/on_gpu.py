"""What is special about a race on a GPU: who of ours runs, and what a step launches there.

Knows contenders and PyTorch's profiler (lab.on_gpu).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tools.bench.contenders import OurServer, serving_config
from tools.bench.memory import pages_for
from tools.bench.race import OURS, Asked, Contender
from tutorial_engine.lab.on_gpu import profile_step
from tutorial_engine.model.decoder import CausalLM

NO_LLAMA = "left out: llama-cpp-python, as pip installs it, runs on the CPU"
# name → (decode steps are replayed, on pages); the first is what an engine does by itself
WAYS = {
    OURS: (True, False),
    f"{OURS} eager": (False, False),
    f"{OURS} pages": (True, True),
    f"{OURS} pages eager": (False, True),
}
SHORT, MORE = 2, 8  # tokens of the shorter run that is profiled, and how many more the longer has

Field = tuple[dict[str, Contender], dict[str, str]]


def with_ours(
    field: Field, kind: type[OurServer], model: CausalLM, requests: Sequence[Asked]
) -> Field:
    """The contenders and notes, and our engine in all ways."""
    everyone, notes = field
    for name, (replayed, on_pages) in WAYS.items():
        config = serving_config(requests, cuda_graphs=replayed)
        memory = pages_for(model, config, prefix_caching=False) if on_pages else None
        everyone[name] = kind(model, config, memory)
        notes[name] = f"LLMEngine, {'pages' if on_pages else 'rows'}, decode steps "
        notes[name] += "replayed" if replayed else "one launch after the other"
    return everyone, notes


def steps(everyone: Mapping[str, Contender], asked: Sequence[Asked]) -> dict[str, Any]:
    """A decode step of each: the difference of a longer run and a shorter one, by the tokens."""
    (request,) = asked
    found = {}
    for name, one in everyone.items():
        short, long = (
            profile_step(partial(one.serve, [request._replace(new_tokens=n)]))._asdict()
            for n in (SHORT, SHORT + MORE)
        )
        found[name] = {
            key: (long[key] - short[key]) / MORE for key in ("seconds", "launches", "busy")
        }
    return {"context": len(request.prompt), "of": found}
