"""State machine and a request's life: drawn from the code's table and from the trace."""

import functools
import re
from enum import Enum

import pytest
from traces import NASTY, STORY, check_words, items, played, renamed, served, story

from tutorial_engine.engine.request import TRANSITIONS, RequestOutput, RequestStatus
from tutorial_engine.trace import events
from tutorial_engine.trace.events import Trace
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_plots import one_request, state_machine
from tutorial_engine.viz.tokens import visible

WAITING, RUNNING, FINISHED = RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED


@functools.cache
def machine() -> Picture:
    return state_machine(TRANSITIONS)


def arrows(picture: Picture) -> set[tuple[str, str]]:
    """From where to where the arrows of the picture go, read from where they are drawn."""
    found = items(picture)
    boxes = {}
    for name, e in found.items():
        if name.startswith("state.") and name.count(".") == 1:
            x, y, w, h = (float(e.attrib[k]) for k in ("x", "y", "width", "height"))
            boxes[name[6:]] = (x - 1, y - 1, x + w + 1, y + h + 1)

    def at(point: tuple[float, float]) -> str:
        return next(
            n for n, (a, b, c, d) in boxes.items() if a <= point[0] <= c and b <= point[1] <= d
        )

    seen = set()
    for name, e in found.items():
        if name.startswith("arrow.") and not name.endswith(".head") and "legend" not in name:
            points = [float(n) for n in re.findall(r"-?[\d.]+", e.attrib["d"])]
            tip = [float(n) for n in re.findall(r"-?[\d.]+", found[f"{name}.head"].attrib["d"])]
            seen.add((at((points[0], points[1])), at((tip[0], tip[1]))))
    return seen


def test_arrows_go_from_and_to_what_the_table_says() -> None:
    table = {(a.value, b.value) for a, after in TRANSITIONS.items() for b in after}
    assert arrows(machine()) == table


@pytest.mark.parametrize("start", TRANSITIONS)
def test_an_edge_that_is_not_in_the_table_is_not_drawn(start: RequestStatus) -> None:
    less = {**TRANSITIONS, start: frozenset()}
    table = {(a.value, b.value) for a, after in less.items() for b in after}
    assert arrows(state_machine(less)) == table


def test_every_pair_of_states_can_be_drawn() -> None:
    every = {a: frozenset(RequestStatus) - {a} for a in RequestStatus}
    found = arrows(state_machine(every))
    assert found == {(a.value, b.value) for a in every for b in every if a is not b}


def test_caption_counts_states_and_edges() -> None:
    assert machine().caption == (
        "6 states and 10 transitions, as the code has them: from running a request may become "
        "aborted, error, finished or preempted; finished, aborted and error are final."
    )
    small = {WAITING: {FINISHED}, FINISHED: set[RequestStatus]()}
    assert state_machine(small).caption == (
        "2 states and 1 transition, as the code has them: from waiting a request may become "
        "finished; finished is final."
    )


def test_final_states_have_a_double_edge() -> None:
    double = {
        n.split(".")[1] for n in items(machine()) if n.startswith("state.") and n.endswith(".in")
    }
    assert double == {"finished", "aborted", "error"}


def test_the_picture_is_drawn_in_one_order_in_every_process() -> None:
    drawn = [n for n in items(machine()) if n.startswith("legend.")]
    assert drawn == ["legend.in", "legend.words", "legend.aborted", "legend.error"]


def test_an_unknown_state_is_refused() -> None:
    class Status(Enum):
        WAITING = "waiting"
        SWAPPED = "swapped"

    with pytest.raises(ValueError, match="no place for the state 'swapped'"):
        state_machine({Status.WAITING: {Status.SWAPPED}})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="its own entry"):
        state_machine({WAITING: {RUNNING}})
    with pytest.raises(ValueError, match="its own entry"):
        state_machine({})


def test_machine_is_readable_and_the_same_every_time() -> None:
    check_words(machine())
    assert state_machine(TRANSITIONS) == machine()


@functools.cache
def lives() -> list[tuple[RequestOutput, Picture]]:
    """Requests that an engine served, and their pictures."""
    trace, outputs = served("one rule", 4, 0.0, 1)
    return [(output, one_request(trace, output.request_id)) for output in outputs]


def test_times_are_the_engines_own() -> None:
    for output, picture in lives():
        times, caption = output.metrics, picture.caption
        assert times.queue_time is not None and times.ttft and times.tpot and times.total
        for part in (
            f"Request {output.request_id} waits {1000 * times.queue_time:.3g} ms in the queue",
            f"first token after {1000 * times.ttft:.3g} ms (TTFT)",
            f"one every {1000 * times.tpot:.3g} ms on average (TPOT; ",
            f"{len(times.token_times)} tokens and {1000 * times.total:.3g} ms, ",
            f"{times.throughput:.1f} tok/s",
        ):
            assert part in caption


def test_brackets_are_as_long_as_what_they_say() -> None:
    output, picture = lives()[-1]
    times, found = output.metrics, items(picture)
    assert times.queue_time and times.ttft and times.total
    assert times.queue_time > 0

    def length(name: str) -> float:
        x = [float(n) for n in re.findall(r"M(-?[\d.]+)", found[f"span.{name}"].attrib["d"])]
        return x[2] - x[0]

    total = length("total")
    assert length("TTFT") / total == pytest.approx(times.ttft / times.total, rel=0.01)
    assert length("queue") / total == pytest.approx(times.queue_time / times.total, rel=0.01)


def test_every_token_and_every_gap_is_marked() -> None:
    for output, picture in lives():
        times, found = output.metrics, items(picture)
        dots = [float(e.attrib["cx"]) for n, e in found.items() if n.startswith("token.")
                if n.count(".") == 1]  # fmt: skip
        assert len(dots) == len(times.token_times)
        gaps = [found[f"gap.{i}.ms"].text for i in range(len(times.itl))]
        assert gaps == [f"{1000 * gap:.3g}" for gap in times.itl]


def test_a_request_keeps_the_look_that_it_has_in_the_timeline() -> None:
    found = items(one_request(story(), "D"))
    assert found["who.0.swatch"].attrib["stroke"] == "#CC79A7" and "who.0.swatch.hatch" in found


@functools.cache
def ended(name: str) -> Picture:
    return one_request(story(("C", "abort"), ("D", "error")), name)


@pytest.mark.parametrize("name", "ABCD")
def test_any_life_is_readable_whole(name: str) -> None:
    check_words(ended(name))


@pytest.mark.parametrize("name", NASTY)
def test_any_id_is_written_literally_and_fits(name: str) -> None:
    picture = one_request(renamed(story(), {"D": name}), name)
    check_words(picture)
    start = visible(name)[:6].replace("·", " ")
    assert picture.caption.startswith(f"Request {start}")
    title = items(picture)["title"].text or ""
    assert title.startswith(f"One request: {start}")


def test_unfinished_aborted_and_failed_lives_are_told_apart() -> None:
    assert ended("A").caption.endswith("finished (stop) after 7 tokens and 116 ms, 60.3 tok/s.")
    assert ended("B").caption.endswith("so far it has 6 tokens.")
    assert "; aborted after 5 tokens and" in ended("C").caption
    assert "; error after 2 tokens and" in ended("D").caption
    assert "TPOT" not in one_request(played(STORY[:3]), "B").caption  # one token: no gap yet


def test_a_life_is_the_same_every_time() -> None:
    assert one_request(story(), "D") == one_request(story(), "D") != one_request(story(), "A")


def test_who_never_ran_has_no_picture() -> None:
    trace = story()
    last = trace.events[-1]
    late = (events.Added(last.step, last.time, "E", (1, 2), 3, last.time),)
    with pytest.raises(ValueError, match="'E' never ran"):
        one_request(Trace(trace.settings, trace.events + late), "E")
    with pytest.raises(ValueError, match="no request 'Z'"):
        one_request(trace, "Z")
