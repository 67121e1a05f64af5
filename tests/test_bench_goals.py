"""The goals of the bench and the page of record, from the figures that are stored."""

import copy
import json
from typing import Any

import pytest

from tools.bench.goals import verdicts
from tools.bench.page import FOLDER, PAGE, page, stored

FIGURES = stored()


@pytest.fixture
def tiny() -> dict[str, Any]:
    return copy.deepcopy(FIGURES["tiny-float32-intel.json"])


def said(figures: dict[str, Any], start: str) -> bool:
    (verdict,) = (one for one in verdicts(figures) if one.what.startswith(start))
    assert str(verdict).startswith("✔" if verdict.is_met else "✘")
    return verdict.is_met


def change(figures: dict[str, Any], where: str, factor: float) -> None:
    """Multiply one measured number; `where` is its path in the figures."""
    *path, last = where.split("/")
    for key in path:
        figures = figures[int(key) if isinstance(figures, list) else key]
    figures[last] *= factor


@pytest.mark.parametrize(
    "goal, where, up",
    [
        ("decode at 128, transformers", "rows/1/seconds/transformers", True),
        ("64 ragged requests, transformers", "serving/seconds/ours", False),
        ("ragged requests on pages", "memory/ragged/seconds/rows", True),
        ("8 contexts of 2048", "memory/long_context/seconds/pages", False),
        ("schedule, batch and update with 256", "step_costs/1/batch", False),
        ("allocate, commit and free", "memory/allocation/2/together", False),
    ],
)
def test_each_goal_follows_what_was_measured(
    tiny: dict[str, Any], goal: str, where: str, up: bool
) -> None:
    better, worse = copy.deepcopy(tiny), tiny
    change(better, where, 100.0 if up else 0.01)
    change(worse, where, 0.01 if up else 100.0)
    assert said(better, goal) and not said(worse, goal)


def test_a_run_without_peers_or_servers_has_fewer_verdicts(tiny: dict[str, Any]) -> None:
    for part in ("serving", "memory", "step_costs"):
        del tiny[part]
    assert [one.what for one in verdicts(tiny)] == [
        f"decode at {n}, transformers" for n in (128, 512)
    ]
    tiny["settings"]["shape"] = "qwen3-32b"
    assert verdicts(tiny) == []


def test_large_weights_are_measured_by_the_time_to_read_them() -> None:
    figures = FIGURES["qwen3-0.6b-float32-amd.json"]
    (floor,) = (one for one in verdicts(figures) if "read the weights" in one.what)
    assert floor.measured == figures["floors"][1]["times"]["ours"] and not floor.at_least


def test_a_goal_beyond_the_machine_says_so() -> None:
    figures = copy.deepcopy(FIGURES["qwen3-0.6b-float32-amd.json"])
    told = {one.what: one for one in verdicts(figures)}
    times = figures["floors"][1]["times"]
    assert told["decode at 128, transformers"].limit == times["transformers"]
    assert (
        told["prefill at 512, transformers"].limit == figures["floors"][2]["times"]["transformers"]
    )
    figures["floors"][1]["times"] |= {"transformers": 1.3, "llama.cpp": 1.01}
    told = {one.what: str(one) for one in verdicts(figures)}
    assert (
        "(goal ≥ 3.5×; 1.30× would be this machine's limit)" in told["decode at 128, transformers"]
    )
    assert "limit" not in told["decode at 128, llama.cpp"], "that goal is within it"
    assert all(one.limit is None for one in verdicts(FIGURES["tiny-float32-intel.json"]))


def test_the_page_of_record_is_made_from_the_figures_beside_it() -> None:
    assert (FOLDER / PAGE).read_text() == page(FIGURES), "python -m tools.bench.page"
    for name, figures in FIGURES.items():
        alone = page({name: figures})
        assert figures["machine"]["processor"] in alone and f"--json docs/bench/{name}" in alone
        for row in figures["rows"]:
            assert f"{1000 * min(row['samples']['ours']):.3g} to" in alone
        assert json.loads(json.dumps(figures)) == figures
