"""Timelines: every box, bar and number is that of the trace; nothing is cut off or hidden."""

import functools
import re
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from traces import (
    NASTY,
    POLICIES,
    STORY,
    SVG,
    check_words,
    chunked,
    items,
    played,
    renamed,
    served,
    story,
    words,
)

from tutorial_engine.engine.request import Request
from tutorial_engine.engine.scheduler import Scheduler, SchedulerConfig, StepPlan
from tutorial_engine.learn.dry_run import Job, dry_run
from tutorial_engine.trace import events
from tutorial_engine.trace.events import Trace
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import look, text_width
from tutorial_engine.viz.timeline_plots import TALL, timeline, timelines
from tutorial_engine.viz.trace_rows import rows

every_policy = pytest.mark.parametrize("policy", POLICIES)


def box(element: ET.Element) -> tuple[float, float, float, float]:
    x, y, w, h = (float(element.attrib[key]) for key in ("x", "y", "width", "height"))
    return x, y, w, h


def crowd(policy: str = "one rule") -> Trace:
    """12 requests, more than 60 steps."""
    return served(policy, 12, 60.0, 3, 4, 24, (4, 24), (4, 22))[0]


@functools.cache
def drawn(policy: str) -> Picture:
    return timeline(crowd(policy))


@functools.cache
def told() -> Picture:
    """The story with its ends."""
    return timeline(story(("C", "abort"), ("D", "error")))


def drawn_kinds(trace: Trace, request_id: str) -> str:
    """What a request did, step by step: p3 d1 w s x r6, in short."""
    life = rows(trace).life(request_id)
    short = {"waits": "w", "stalls": "s", "preempted": "x"}
    parts = [short.get(s.kind) or f"{s.kind[0]}{s.num_tokens}" for s in life.shares.values()]
    return " ".join(parts)


def test_story_is_told_request_by_request() -> None:
    assert drawn_kinds(story(), "A") == "p6 d1 d1 d1 d1 d1 d1"
    assert drawn_kinds(story(), "B") == "p2 p7 p4 d1 d1 d1 d1 d1"
    assert drawn_kinds(story(), "C") == "w p3 p6 d1 d1 d1 d1"
    assert drawn_kinds(story(), "D") == "w p5 x w r6"


def test_caption_has_the_numbers_of_the_run() -> None:
    assert told().caption == (
        "8 steps ran 54 tokens of 4 requests in 134 ms, 6.8 of 8 a step on average; A: first token "
        "in step 0, finished (stop) in step 6; B: first token in step 2, not over; C: first token "
        "in step 3, aborted before step 8; D: first token in step 4, error before step 8; "
        "1 preempted, 5 tokens computed again."
    )
    assert timeline(played(STORY[:1])).caption == (
        "1 step ran 8 tokens of 2 requests in 18 ms, 8.0 of 8 a step on average; A: first token in "
        "step 0, not over; B: no token, not over."
    )


@every_policy
def test_every_share_of_every_step_is_a_box(policy: str) -> None:
    trace = crowd(policy)
    order = [e.request_id for e in trace.events if isinstance(e, events.Added)]
    wanted = {
        f"box.{order.index(e.request_id)}.{e.step}"
        for e in trace.events
        if isinstance(e, events.Scheduled)
    }
    found = items(drawn(policy))
    assert {name for name in found if name.startswith("box.") and name.count(".") == 2} == wanted
    assert len(wanted) > 60


@every_policy
def test_budget_bars_are_as_high_as_the_tokens_that_ran(policy: str) -> None:
    trace, high = crowd(policy), Counter[int]()
    for name, element in items(drawn(policy)).items():
        if name.startswith("budget.") and name.count(".") == 2 and name[7].isdigit():
            high[int(name.split(".")[2])] += round(box(element)[3] * 24 / TALL)
    ran = {e.step: e.num_tokens for e in trace.events if isinstance(e, events.StepEnded)}
    assert high == ran


def test_boxes_say_what_they_are_and_how_many_tokens() -> None:
    found = items(told())
    said = {key: element.text for key, element in found.items() if key.endswith(".word")}
    assert [said[f"box.1.{step}.word"] for step in range(4)] == [
        "prefill 2",
        "prefill 7",
        "prefill 4",
        "decode 1",
    ]
    assert said["box.3.5.word"] == "preempted" and said["box.3.7.word"] == "recompute 6"
    assert found["box.3.5"].attrib["fill"].startswith("url(#")  # hatched, whatever its colour
    assert found["end.0"].text == "finished · stop" and found["end.2"].text == "aborted"
    assert "end.1" not in found


def test_a_finished_request_is_labelled_right_of_its_last_box() -> None:
    for picture in (told(), drawn("one rule")):
        found = items(picture)
        for name, element in found.items():
            if re.fullmatch(r"end\.\d+", name):
                row = name[4:]
                ends = [sum(box(e)[::2]) for n, e in found.items() if n.startswith(f"box.{row}.")
                        if n.count(".") == 2]  # fmt: skip
                assert float(element.attrib["x"]) > max(ends)


def test_by_time_boxes_are_as_wide_as_their_steps_took() -> None:
    trace = story()
    found, steps = items(timelines({"": trace})), rows(trace).steps
    x0 = box(found["box.0.1.0"])
    scale = x0[2] / (steps[0].ended - steps[0].began)
    for step in steps:
        x, _, w, _ = box(found[f"box.0.1.{step.number}"])  # B runs in every step
        assert w == pytest.approx((step.ended - step.began) * scale, rel=0.05)
        assert x - x0[0] == pytest.approx((step.began - steps[0].began) * scale, rel=0.05, abs=2)


def test_by_step_all_boxes_are_equally_wide() -> None:
    found = items(timeline(story()))
    wide = {
        round(box(e)[2], 1) for n, e in found.items() if n.startswith("box.") and "." not in n[6:]
    }
    assert len(wide) == 1


def test_waiting_is_drawn_from_the_arrival_on() -> None:
    trace, outputs = served("one by one", 3)
    found = items(timelines({"": trace}))
    pills = {n.split(".")[2]: box(e) for n, e in found.items() if n.startswith("idle.")
             if e.tag == f"{SVG}rect"}  # fmt: skip
    total = rows(trace).end - rows(trace).start
    left, right = (float(found[name].attrib["x1"]) for name in ("ms.0.line", "0.end"))
    for row, output in enumerate(outputs):
        queue_time = output.metrics.queue_time
        assert queue_time is not None
        if queue_time:
            x, _, w, _ = pills[str(row)]
            assert x == pytest.approx(left, abs=4)
            assert w == pytest.approx((right - left) * queue_time / total, abs=6)
    assert set(pills) == {"1", "2"}


@every_policy
def test_rows_agree_with_the_replayed_queues(policy: str) -> None:
    trace = crowd(policy)
    run = rows(trace)
    stalls = 0
    for step in run.steps:
        for life in run.lives:
            share = life.shares.get(step.number)
            if share is None:
                continue
            if life.request_id in step.after.waiting:
                assert share.kind == "waits"
            elif life.request_id in step.after.running:
                assert share.num_tokens or share.kind == "stalls"
            stalls += share.kind == "stalls"
        ran = sum(life.shares[step.number].num_tokens for life in run.lives
                  if step.number in life.shares)  # fmt: skip
        assert ran == step.num_tokens
    assert (stalls > 0) == (policy == "prefill first")


@every_policy
def test_metrics_read_from_the_trace_are_the_engines_own(policy: str) -> None:
    for rate in (0.0, 40.0):
        trace, outputs = served(policy, 6, rate, 5)
        assert {life.request_id: life.metrics for life in rows(trace).lives} == {
            one.request_id: one.metrics for one in outputs
        }


def test_decode_begins_where_the_prompt_ends() -> None:
    trace, outputs = served("one rule", 6, 0.0, 5)
    prompts = {one.request_id: len(one.prompt_token_ids) for one in outputs}
    for life in rows(trace).lives:
        kinds = {"prefill": 0, "decode": 0}
        for share in life.ran.values():
            kinds[share.kind] += share.num_tokens
        assert kinds["prefill"] == prompts[life.request_id]
        assert kinds["decode"] == len(life.token_times) - 1


def test_a_step_that_was_broken_off_and_begun_again_counts_once() -> None:
    trace = story()
    first = [i for i, e in enumerate(trace.events) if isinstance(e, events.Scheduled)][1]
    began = next(e for e in trace.events if isinstance(e, events.StepBegan))
    scheduled = [e for e in trace.events[: first + 1] if isinstance(e, events.Scheduled)]
    broken = (*trace.events[: first + 1], began, *scheduled, *trace.events[first + 1 :])
    assert timeline(Trace(trace.settings, broken)) == timeline(trace)


def test_a_step_that_never_ended_is_not_drawn() -> None:
    trace = story()
    last = max(i for i, e in enumerate(trace.events) if isinstance(e, events.StepEnded))
    run = rows(Trace(trace.settings, trace.events[:last]))
    assert (
        len(run.steps) == 7
        and "7 steps" in timeline(Trace(trace.settings, trace.events[:last])).caption
    )


def test_hovering_says_what_a_box_is() -> None:
    assert "step 1, B: prefill 7" in told().svg
    assert "step 1: B runs 7 of 8" in told().svg


def test_words_are_readable_whole_and_the_picture_is_the_same_every_time() -> None:
    assert timeline(story(("C", "abort"), ("D", "error"))) == told()
    for picture in (told(), drawn("one rule"), drawn("prefill first")):
        check_words(picture)
    for trace in (played(STORY[:1]), served("one rule", 2)[0]):
        check_words(timeline(trace))


def test_words_in_a_box_fit_into_it() -> None:
    for picture in (told(), drawn("one rule"), drawn("prefill first")):
        found = items(picture)
        for name, element in found.items():
            if name.startswith("box.") and name.endswith(".word"):
                wide = text_width(element.text or "", float(element.attrib["font-size"]))
                assert wide <= box(found[name.removesuffix(".word")])[2]


def test_any_id_is_written_literally_and_fits() -> None:
    trace = renamed(story(("C", "abort"), ("D", "error")), dict(zip("ABCD", NASTY, strict=True)))
    plain, picture = told(), timeline(trace)
    names = [one.text for one in words(picture) if one.size == 13 and one.left < 100]
    assert names[0].startswith("<script>") and names[0].endswith("…")
    tags = [Counter(e.tag for e in ET.fromstring(p.svg).iter() if "caption" not in e.get("id", ""))
            for p in (picture, plain)]  # fmt: skip
    assert tags[0][f"{SVG}script"] == 0 and tags[0][f"{SVG}rect"] == tags[1][f"{SVG}rect"]
    body = [one for one in words(picture) if one.size != 13 or one.left < 100]
    assert all(one.right <= 1000 for one in body)


def test_a_budget_far_above_what_runs_does_not_flatten_the_bars() -> None:
    found = items(timeline(played(STORY, budget=512)))
    heights = [
        box(e)[3] for n, e in found.items() if n.startswith("budget.0.") and n.count(".") == 2
    ]
    assert max(heights) > TALL / 3
    assert found["budget.words.0"].text == "budget 512,"
    assert "6.8 of 512 a step" in timeline(played(STORY, budget=512)).caption


def test_a_trace_without_settings_is_drawn_too() -> None:
    picture = timeline(Trace({}, story().events))
    assert (
        "6.8 a step on average" in picture.caption and "budget" not in picture.svg.split("<text")[2]
    )


def test_no_two_requests_look_the_same_without_colour() -> None:
    looks = [look(i) for i in range(36)]
    assert len({(one.colour, one.hatch) for one in looks}) == 36
    assert len({one.hatch for one in looks[:6]}) == 6  # in grey too


@functools.cache
def compared() -> Picture:
    return timelines({name: served(name, 6)[0] for name in POLICIES})


def test_compared_runs_say_who_ends_first_and_by_what_factor() -> None:
    runs = {name: rows(served(name, 6)[0]) for name in POLICIES}
    spans = {name: run.end - run.start for name, run in runs.items()}
    best, worst = min(spans, key=spans.__getitem__), max(spans, key=spans.__getitem__)
    caption = compared().caption
    rate = runs[best].num_output_tokens / spans[best]
    assert caption.startswith(
        f"“{best}” ends first, after {spans[best] * 1000:.0f} ms ({rate:.0f} tok/s)"
    )
    assert (
        f"“{worst}” takes {spans[worst] * 1000:.0f} ms, {spans[worst] / spans[best]:.2f} times"
        in caption
    )
    assert (best, worst) == ("one rule", "one by one")
    assert timelines({"a": story(), "b": story()}).caption == (
        "“a” ends first, after 134 ms (149 tok/s); “b” takes 134 ms, as long."
    )


def test_compared_runs_share_one_time_axis() -> None:
    found = items(compared())
    left = float(found["ms.0.line"].attrib["x1"])
    spans, widths = [], []
    for i, name in enumerate(POLICIES):
        run = rows(served(name, 6)[0])
        spans.append(run.end - run.start)
        widths.append(float(found[f"{i}.end"].attrib["x1"]) - left)
        assert found[f"{i}.title"].text == name
        reached = f"{spans[-1] * 1000:.0f} ms · {run.num_output_tokens / spans[-1]:.0f} tok/s"
        assert (found[f"{i}.reached"].text or "").startswith(reached)
    for span, width in zip(spans, widths, strict=True):
        assert width / widths[0] == pytest.approx(span / spans[0], rel=1e-3)


def test_boxes_of_a_kind_have_words_all_or_none_and_one_edge() -> None:
    pictures = [compared(), timeline(chunked(16)), timelines({"": chunked(16)})]
    for picture in pictures:
        found, written = items(picture), dict[str, set[bool]]()
        boxes = [name for name in found if re.fullmatch(r"box(\.\d+){2,3}", name)]
        for name in boxes:
            kind = re.findall(rf'id="{name}".*?: (\w+)[^<]*</text>', picture.svg)[0]
            written.setdefault(kind, set()).add(f"{name}.word" in found)
        assert boxes and all(len(states) == 1 for states in written.values()), written
        assert len({found[name].attrib["stroke-width"] for name in boxes}) == 1


def test_an_end_that_is_everybodys_is_said_once() -> None:
    found = items(compared())
    assert sum(e.text == "end: finished · length" for e in found.values()) == 1
    assert not any(e.text == "finished · length" for e in found.values())
    ends = [e for name, e in found.items() if re.fullmatch(r"end\.\d+\.\d+", name)]
    assert len(ends) == 6 * len(POLICIES) and {e.tag for e in ends} == {f"{SVG}rect"}


def test_compared_runs_are_readable_and_the_same_every_time() -> None:
    assert compared.__wrapped__() == compared()
    check_words(compared())
    check_words(timelines({"a": crowd(), NASTY[0]: crowd("prefill first")}))


def test_what_cannot_be_drawn_is_refused_in_words() -> None:
    nothing = Trace({}, story().events[:2])
    with pytest.raises(ValueError, match="no finished step"):
        timeline(nothing)
    with pytest.raises(ValueError, match="at least one trace"):
        timelines({})
    with pytest.raises(ValueError, match="no request 'Z', only: A, B, C, D"):
        rows(story()).life("Z")


class Overdrawn(Scheduler):
    """Gives each request the whole budget."""

    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> int:
        return min(request.num_new_tokens, self.config.max_num_batched_tokens)


def test_a_step_above_the_budget_rises_above_its_line_and_into_nothing_else() -> None:
    jobs = [Job("A", 10, 6), Job("B", 7, 3), Job("C", 3, 5)]
    trace = dry_run(Overdrawn, jobs, SchedulerConfig(max_num_batched_tokens=8))
    found = items(timeline(trace))
    bars = [box(e) for name, e in found.items() if re.fullmatch(r"budget\.\d+\.\d+", name)]
    zero, limit = (float(found[f"budget.{name}"].attrib["y1"]) for name in ("zero", "limit"))
    top = min(y for _, y, _, _ in bars)
    assert zero - top == pytest.approx(TALL)
    assert zero - limit == pytest.approx(TALL * 8 / 9, abs=0.01)
