"""Latency, sweeps and gaps: captions agree with the data, files are the same every time."""

import functools
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest
from traces import NASTY, POLICIES, SVG, check_plot, chunked, plot_words, renamed, served

from tutorial_engine.engine.metrics import RequestMetrics, percentile
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.serving_plots import (
    itl_over_time,
    latency_distributions,
    sweep,
    throughput_latency,
)
from tutorial_engine.viz.trace_rows import rows

FAST = [RequestMetrics(0.0, 0.0, (0.01 * i, 0.01 * i + 0.005), 0.1 * i) for i in range(1, 21)]
SLOW = [RequestMetrics(0.0, 0.0, (0.1 * i, 0.1 * i + 0.05), 1.0 * i) for i in range(1, 21)]


def policies() -> dict[str, list[RequestMetrics]]:
    return {name: [o.metrics for o in served(name, 6)[1]] for name in POLICIES}


PICTURES: dict[str, Callable[[], Picture]] = {
    "two": lambda: latency_distributions({"fast": FAST, "slow $x$ <s>": SLOW}),
    "four": lambda: latency_distributions(policies()),
    "one line": lambda: sweep(
        [1, 2, 4, 8], {"virtual": [1, 2, 3, 4], "here": [10, 15, 20, 19]}, "batch", "tok/s"
    ),
    "lines": lambda: sweep(
        [5, 10], {"virtual": {"p50": [20, 25], "p95 $x$": [30, None]}}, "rate", "TTFT, ms"
    ),
    "limits": lambda: sweep(
        [0.1, 0.2, 0.3],
        {"TTFT": {"worst": [5, 6, 9], "mean": [4, 3, 2], "free": [1, 1, 1]}},
        "patience",
        "ms",
        at_most={"worst": 6, "mean": 3},
    ),
    "curve": lambda: throughput_latency(
        {
            "one rule": [(8, 99.5, 34.0), ("16 $x$", 194.0, 42.0), (32, 317.0, 260.0)],
            "static": [(8, 98.0, 304.0)],
        },
        "TTFT p95",
        "users",
    ),
    "gaps": lambda: itl_over_time({"whole prompt": chunked(64), "chunked": chunked(8)}, "A"),
}


@functools.cache
def drawn(name: str) -> Picture:
    strips = "A mark is a request, the line is p50, the diamond is p95."
    return check_plot(PICTURES[name], 1000, strips if name in ("two", "four") else "")


@pytest.mark.parametrize("name", PICTURES)
def test_plot_is_sound_and_no_number_is_a_power(name: str) -> None:
    assert not [word for word in plot_words(drawn(name)) if re.search(r"\de[+-]\d", word)]


def test_percentiles_are_those_of_the_values() -> None:
    said = drawn("two").caption
    assert said == (
        "p50 (line) / p95 (diamond): TTFT fast 100 / 190 ms, slow $x$ <s> 1000 / 1900 ms; TPOT "
        "fast 5 / 5 ms, slow $x$ <s> 50 / 50 ms."
    )
    assert {"p50 100", "p95 190", "p50 1000", "p95 1900", "slow $x$ <s>"} <= set(
        plot_words(drawn("two"))
    )


def test_what_never_happened_is_left_out() -> None:
    both = [RequestMetrics(0.0), RequestMetrics(1.0, 2.0, (4.0, 5.0, 8.0), 9.0)]
    assert latency_distributions({"x": both}).caption.split(": ")[1] == (
        "TTFT x 3000 / 3000 ms; TPOT x 2000 / 2000 ms."
    )


def test_marks_stand_where_the_percentiles_are() -> None:
    """The strips of real runs: the caption's numbers, recomputed from the engine's outputs."""
    for name, metrics in policies().items():
        ttft = [m.ttft for m in metrics if m.ttft is not None]
        p50, p95 = (1000 * percentile(ttft, p) for p in (50, 95))
        text = [f"{v:.0f}" if v >= 100 else f"{v:.3g}" for v in (p50, p95)]
        said = drawn("four").caption.split("; ")[0]
        assert f"{name} {text[0]} / {text[1]} ms" in said


def test_sweep_says_where_its_lines_begin_and_end() -> None:
    assert drawn("one line").caption == (
        "Batch from 1 to 8: virtual (tok/s) from 1 to 4; here (tok/s) from 10 to 19."
    )
    assert drawn("lines").caption == (
        "Rate from 5 to 10: virtual (TTFT, ms) p50 from 20 to 25, p95 $x$ 30 (at 5)."
    )


def test_limits_are_drawn_and_said_and_where_all_are_kept() -> None:
    said = set(plot_words(drawn("limits")))
    assert {"worst: at most 6", "mean: at most 3", "all kept"} <= said
    assert drawn("limits").caption.endswith("free from 1 to 1, all limits kept at 0.2.")
    never = sweep([1, 2], {"": {"a": [5, 6], "b": [1, 1]}}, "x", "ms", at_most={"a": 4})
    assert "all kept" not in plot_words(never)
    assert never.caption.endswith("nowhere are all limits kept.")


def test_throughput_meets_latency_at_points_that_say_what_they_are() -> None:
    said = set(plot_words(drawn("curve")))
    assert {"8", "16 $x$", "32", "numbers: users", "TTFT p95, ms", "one rule", "static"} <= said
    assert drawn("curve").caption == (
        "TTFT p95 against throughput: “one rule” goes from 34 ms at 99.5 tok/s to 260 ms at 317 "
        "tok/s; “static” has 304 ms at 98 tok/s."
    )


def test_lines_differ_in_more_than_colour() -> None:
    def looks(picture: Picture) -> list[str]:
        """The outlines of the markers of each line: matplotlib keeps them as definitions."""
        root = ET.fromstring(picture.svg)
        curved = [e.attrib["d"] for e in root.iter(f"{SVG}path") if e.get("id", "").startswith("m")]
        return [outline for outline in curved if outline.strip().endswith("z")]

    assert "stroke-dasharray" in drawn("lines").svg
    assert len(set(looks(drawn("lines")))) == 2  # a circle and a square
    assert len(set(looks(drawn("one line")))) == 2  # one in each panel


def test_gaps_are_those_of_the_trace() -> None:
    whole, parts = (rows(chunked(budget)).life("A").metrics for budget in (64, 8))
    late = rows(chunked(64)).life("L").metrics, rows(chunked(8)).life("L").metrics
    assert late[0].ttft and late[1].ttft
    caption = drawn("gaps").caption
    assert "L comes with a prompt of 40 tokens while A decodes" in caption
    p50 = [1000 * percentile(m.itl, 50) for m in (whole, parts)]
    longest = [1000 * max(m.itl) for m in (whole, parts)]
    assert f"“whole prompt” {longest[0]:.3g} ms (p50 {p50[0]:.3g} ms), L has its" in caption
    assert f"“chunked” {longest[1]:.3g} ms (p50 {p50[1]:.3g} ms), L has" in caption
    for one in late:
        assert f"L has its first token after {1000 * (one.ttft or 0):.3g} ms" in caption
    assert longest[0] > 2 * longest[1]  # chunked prefill protects who decodes
    assert "L comes, prompt of 40" in plot_words(drawn("gaps"))


def test_gaps_of_any_id_are_drawn_literally() -> None:
    trace = renamed(chunked(8), {"A": NASTY[0], "L": NASTY[2]})
    picture = itl_over_time({"$run$": trace}, NASTY[0])
    assert "$run$" in plot_words(picture)
    assert f"Inter-token latency of {NASTY[0][:15]}…" in plot_words(picture)


REFUSED: dict[str, tuple[Callable[[], Picture], str]] = {
    "no policy": (lambda: latency_distributions({}), "at least one policy"),
    "no values": (lambda: latency_distributions({"a": [RequestMetrics(0.0)]}), "'a' has no TTFT"),
    "no x": (lambda: sweep([], {"a": []}, "x", "y"), "at least one x"),
    "no panel": (lambda: sweep([1], {}, "x", "y"), "one panel"),
    "no line": (lambda: sweep([1], {"a": {}}, "x", "y"), "a: give at least one line"),
    "too short": (lambda: sweep([1, 2], {"a": [1]}, "x", "y"), "for each of 2 x"),
    "only None": (lambda: sweep([1], {"a": [None]}, "x", "y"), "only None"),
    "no curve": (lambda: throughput_latency({}), "at least one point"),
    "no point": (lambda: throughput_latency({"a": []}), r"to each: \['a'\]"),
    "no trace": (lambda: itl_over_time({}, "A"), "at least one trace"),
    "nobody": (lambda: itl_over_time({"a": chunked(8)}, "Z"), "no request 'Z'"),
    "nobody came": (lambda: itl_over_time({"a": chunked(8)}, "L"), "nobody came after"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_drawn_is_refused_in_words(what: str) -> None:
    draw, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        draw()
