"""Places: who holds which is the engine's own row; what is idle or wasted is counted right."""

import functools
import re

import pytest
from traces import NASTY, POLICIES, STORY, check_words, items, played, renamed, served, story

from tutorial_engine.trace.events import Trace
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.place_plots import IDLE, WASTED, Held, places, read_places
from tutorial_engine.viz.trace_rows import rows

every_policy = pytest.mark.parametrize("policy", POLICIES)


def crowd(policy: str) -> Trace:
    return served(policy, 7, 60.0, 3, 4, 24, (4, 24), (4, 16))[0]


def told() -> Trace:
    """The story, with its preemption, in an engine that has three places and says so."""
    trace = story(("C", "abort"), ("D", "error"))
    return trace._replace(settings={**trace.settings, "max_num_seqs": 4})


@functools.cache
def drawn() -> Picture:
    return places({policy: crowd(policy) for policy in POLICIES})


@every_policy
def test_a_place_is_the_row_that_the_engine_gave(policy: str) -> None:
    found = read_places(crowd(policy))
    for s, step in enumerate(found.run.steps):
        column = [line[s] for line in found.grid]
        held = {one.request_id: p for p, one in enumerate(column) if isinstance(one, Held)}
        requests = step.planned.requests
        assert held == {name: requests[name].table[0] for name in step.planned.running}
        free = {one for one in column if isinstance(one, str)}
        assert free <= {WASTED if step.planned.waiting else IDLE}
        for one in column:
            if isinstance(one, Held):
                life = found.run.lives[one.request]
                assert life.request_id == one.request_id and life.shares[s].kind == one.kind
                assert one.is_last == (life.end_step == s)


@every_policy
def test_every_place_of_every_step_is_held_idle_or_wasted_and_drawn(policy: str) -> None:
    found, i = read_places(crowd(policy)), list(POLICIES).index(policy)
    kinds = ("prefill", "decode", "recompute", "stalls", IDLE, WASTED)
    assert sum(found.count(kind) for kind in kinds) == found.total
    assert (found.count("stalls") > 0) == (policy == "prefill first")
    shown = {name: e for name, e in items(drawn()).items() if name.startswith(f"box.{i}.")}
    boxes = {name for name in shown if name.count(".") == 3}
    assert boxes == {
        f"box.{i}.{p}.{s}"
        for p, line in enumerate(found.grid)
        for s, one in enumerate(line)
        if isinstance(one, Held)
    }
    ends = {name.removesuffix(".end") for name in shown if name.endswith(".end")}
    lasts = {
        (p, s)
        for p, line in enumerate(found.grid)
        for s, one in enumerate(line)
        if isinstance(one, Held) and one.is_last
    }
    assert ends == {f"box.{i}.{p}.{s}" for p, s in lasts} and len(ends) == len(found.run.lives)
    for p, line in enumerate(found.grid):
        idle = [name for name in items(drawn()) if re.fullmatch(rf"idle\.{i}\.{p}\.\d+", name)]
        free = [isinstance(one, str) and one for one in line]
        starts = [s for s, one in enumerate(free) if one and (s == 0 or free[s - 1] != one)]
        assert idle == [f"idle.{i}.{p}.{s}" for s in starts]


def test_the_caption_counts_what_is_wasted_and_what_nobody_needs() -> None:
    wasted, idle = {}, []
    for policy in POLICIES:
        found = read_places(crowd(policy))
        wasted[policy], total = found.wasted, found.total
        assert f"“{policy}” {found.wasted} of {total}" in drawn().caption
        assert found.wasted == found.count(WASTED) + found.count("stalls")
        idle.append(str(found.count(IDLE)))
    assert f"nobody waits: {', '.join(idle[:-1])} and {idle[-1]}." in drawn().caption
    assert wasted["one by one"] > wasted["static batching"] > wasted["one rule"]


def test_who_gives_way_leaves_its_place_and_takes_one_again() -> None:
    grid = read_places(told()).grid
    held = {line[s].kind for line in grid for s in (4, 7) if isinstance(line[s], Held)}
    assert held == {"decode", "prefill", "recompute"}
    assert [[isinstance(line[s], Held) for line in grid].count(True) for s in (4, 5, 6)] == [
        4,
        3,
        3,
    ]
    assert [line[5] for line in grid].count(WASTED) == 1  # D waits again
    names = {e.text for name, e in items(places({"": told()})).items() if name.startswith("who.")}
    assert names == set("ABCD")


def test_each_request_has_its_colour_and_only_some_may_be_coloured() -> None:
    found, shown = read_places(crowd("one rule")), items(drawn())
    fills, steps = dict[tuple[str, str], str | None](), dict[str, list[int]]()
    for p, line in enumerate(found.grid):
        for s, one in enumerate(line):
            if isinstance(one, Held):
                fill = shown[f"box.{len(POLICIES) - 1}.{p}.{s}"].get("fill")
                assert fills.setdefault((one.request_id, one.kind), fill) == fill
                steps.setdefault(one.request_id, []).append(s)
    assert len(set(fills.values())) == len(fills) == 2 * len(steps) > 12
    some = places({"a": crowd("one rule"), "b": crowd("static batching")}, only=["A", "C"])
    seen = {e.get("fill") for e in items(some).values()} & set(fills.values())
    assert seen == {fill for (who, _), fill in fills.items() if who in "AC"}
    told = [f"{who} in steps {min(steps[who])} to {max(steps[who])}" for who in "AC"]
    assert some.caption.startswith(f"“a” runs {told[0]} and {told[1]}; “b” runs A in steps ")


def test_words_are_readable_whatever_they_are() -> None:
    check_words(drawn())
    assert drawn.__wrapped__() == drawn()
    nasty = renamed(told(), dict(zip("ABCD", NASTY, strict=True)))
    check_words(places({NASTY[0]: nasty, "b": crowd("one rule")}))
    assert len(drawn().png) < 70_000


def test_what_cannot_be_drawn_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="at least one trace"):
        places({})
    with pytest.raises(ValueError, match="does not say max_num_seqs"):
        places({"a": played(STORY)})
    many = told()._replace(settings={"max_num_seqs": 65})
    with pytest.raises(ValueError, match="65 places are too many"):
        places({"a": many})
    assert rows(many).steps
