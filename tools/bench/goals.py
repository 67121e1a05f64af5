"""What the engine should reach, and whether a run of the bench did.

Every goal is a ratio of two things that were measured in the same run, or microseconds of
bookkeeping. Knows the figures as the JSON file has them; measures nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

LLAMA, NONE = "llama.cpp", (None, None)  # the other peer, and no goal beside either
Figures = Mapping[str, Any]  # what `python -m tools.bench --json` writes

# (shape, dtype) -> phase -> at least so many times the speed of (transformers, llama.cpp)
SPEED: dict[tuple[str, str], dict[str, tuple[float, float | None]]] = {
    ("tiny", "float32"): {"decode": (2.0, None), "ragged": (2.0, 2.0)},
    ("qwen3-0.6b", "float32"): {"prefill": (2.2, 1.3), "decode": (3.5, 1.0), "ragged": (4.0, 3.0)},
    ("qwen3-0.6b", "bfloat16"): {
        "prefill": (1.15, 1.3),
        "decode": (2.2, 1.0),
        "ragged": (2.5, 3.0),
    },
}
CONTEXTS = (128, 512)  # at which prefill and decode have goals
# (shape, dtype) -> at the first of them a decode step takes at most so many times what it takes to
# read the weights once
FLOOR = {("qwen3-0.6b", "float32"): 1.2, ("qwen3-0.6b", "bfloat16"): 1.3}
PAGES_RAGGED, PAGES_LONG = 1.10, 1.25  # at most, times the seconds on rows
STEP, MEMORY = 20.0, 10.0  # at most, µs per running request: the scheduler; a memory alone
BLOCK = "pages, blocks of 16"


class Verdict(NamedTuple):
    """A goal, what a run measured, and the bound: at least that much, or at most.

    `limit`: what an engine would reach that takes no more than the machine's floor (report.Floor).
    """

    what: str
    measured: float
    bound: float
    at_least: bool
    unit: str = "×"
    limit: float | None = None

    @property
    def is_met(self) -> bool:
        """On the right side of the bound?"""
        if self.at_least:
            return self.measured >= self.bound
        return self.measured <= self.bound

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        mark, unit = "✔" if self.is_met else "✘", self.unit
        out_of_reach = self.limit is not None and self.limit < self.bound
        why = f"; {self.limit:.2f}{unit} would be this machine's limit" if out_of_reach else ""
        goal = f"goal {sign} {self.bound:g}{unit}{why}"
        return f"{mark} {self.what}: {self.measured:.2f}{unit} ({goal})"


def verdicts(figures: Figures) -> list[Verdict]:
    """Each goal that this run says something about. A contender that is missing has none."""
    return [*_speed(figures), *_floors(figures), *_pages(figures), *_bookkeeping(figures)]


def _key(figures: Figures) -> tuple[str, str]:
    return figures["settings"]["shape"], figures["machine"]["dtype"]


def _speed(figures: Figures) -> Iterator[Verdict]:
    goals, ours = SPEED.get(_key(figures), {}), figures["settings"]["ours"]
    rows = [row for row in figures["rows"] if row["context"] in CONTEXTS]
    races = [(f"{row['phase']} at {row['context']}", row["phase"], row) for row in rows]
    if "serving" in figures:
        serving = figures["serving"]
        races.append((f"{serving['num_requests']} ragged requests", "ragged", serving))
    # weights that fit into the processor's caches can be read faster: there a floor is no limit
    real = figures["floors"] if _key(figures) in FLOOR else []
    floors = {(floor["phase"], floor["context"]): floor["times"] for floor in real}
    for what, phase, race in races:
        seconds, limits = race["seconds"], floors.get((phase, race.get("context")), {})
        least_of = zip((figures["settings"]["peer"], LLAMA), goals.get(phase, NONE), strict=True)
        for peer, least in least_of:
            if least is not None and peer in seconds:
                ratio, limit = seconds[peer] / seconds[ours], limits.get(peer)
                yield Verdict(f"{what}, {peer}", ratio, least, True, limit=limit)


def _floors(figures: Figures) -> Iterator[Verdict]:
    most, ours = FLOOR.get(_key(figures)), figures["settings"]["ours"]
    for floor in figures["floors"]:
        if most is not None and floor["phase"] == "decode" and floor["context"] == CONTEXTS[0]:
            what = f"decode at {floor['context']}, time to read the weights once"
            yield Verdict(what, floor["times"][ours], most, False)


def _pages(figures: Figures) -> Iterator[Verdict]:
    if "memory" not in figures:
        return
    ragged, long = figures["memory"]["ragged"], figures["memory"]["long_context"]
    for what, race, most in (
        ("ragged requests on pages, time on rows", ragged, PAGES_RAGGED),
        (f"{long['batch']} contexts of {long['context']} on pages, time on rows", long, PAGES_LONG),
    ):
        yield Verdict(what, race["seconds"]["pages"] / race["seconds"]["rows"], most, False)


def _bookkeeping(figures: Figures) -> Iterator[Verdict]:
    for cost in figures.get("step_costs", []):
        what = f"schedule, batch and update with {cost['running']} running, per request"
        own = cost["schedule"] + cost["batch"] + cost["update"]
        yield Verdict(what, own, STEP, False, " µs")
    for cost in figures.get("memory", {}).get("allocation", []):
        if cost["memory"] == BLOCK:
            what = f"allocate, commit and free in {BLOCK}, per request"
            yield Verdict(what, cost["together"], MEMORY, False, " µs")
