"""Introduced in notebook 03. The gaps between one request's tokens while another one comes.

Every caption is computed from the same trace that is drawn.
"""

from collections.abc import Mapping
from typing import Any

from tutorial_engine.engine.metrics import percentile
from tutorial_engine.trace.events import Trace
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.speed_plots import MARKS
from tutorial_engine.viz.style import DASHES, INK, QUIET, SERIES, finish, house_style, new_figure
from tutorial_engine.viz.timeline_words import ms
from tutorial_engine.viz.tokens import cut_label
from tutorial_engine.viz.trace_rows import Life, Rows, rows


def itl_over_time(
    traces: Mapping[str, Trace], request_id: str, newcomer: str | None = None
) -> Picture:
    """Inter-token latency of a request over time, a line per run; marked: a long prompt's arrival.

    `newcomer` is the id of the long prompt (else: the longest of the others that came after its
    first token). ValueError where a trace lacks one of them, or the request has no two tokens.
    """
    if not traces:
        raise ValueError("give at least one trace: {name: trace, ...}")
    runs = {name: rows(trace) for name, trace in traces.items()}
    lives = {name: run.life(request_id) for name, run in runs.items()}
    for name, life in lives.items():
        if len(life.token_times) < 2:
            raise ValueError(f"{name}: request {request_id!r} has fewer than two tokens: no gap")
    late = {name: _newcomer(name, run, lives[name], newcomer) for name, run in runs.items()}
    with house_style():
        figure = new_figure(10, 4)
        ax = figure.subplots()
        for i, (name, life) in enumerate(lives.items()):
            start = runs[name].start
            times = [1000 * (when - start) for when in life.token_times[1:]]
            gaps = [1000 * gap for gap in life.metrics.itl]
            look: dict[str, Any] = {"color": SERIES[i % 6], "marker": MARKS[i % 6]}
            ax.plot(
                times, gaps, linestyle=DASHES[i % 6], markersize=5.5, label=name,
                drawstyle="steps-pre", **look,
            )  # fmt: skip
        top = 1000 * max(max(life.metrics.itl) for life in lives.values())
        arrivals = sorted({round(1000 * (late[n].arrival - runs[n].start), 3) for n in runs})
        for i, when in enumerate(arrivals):
            ax.axvline(when, color=INK, linestyle=(0, (4, 2)), linewidth=1.3)
            if i == 0:
                other = next(iter(late.values()))
                words = f"{_name(other)} comes, prompt of {other.num_prompt_tokens}"
                ax.annotate(words, (when, 1.17 * top), (6, 0), textcoords="offset points", va="top")
        ax.set(
            xlim=(0, None),
            ylim=(0, 1.2 * top),
            xlabel="time, ms",
            ylabel="gap before the token, ms",
        )
        ax.set_title(f"Inter-token latency of {_name(next(iter(lives.values())))}")
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
        ax.grid(axis="y", color=QUIET, alpha=0.2)
        return finish(figure, _caption(lives, late))


def _name(life: Life) -> str:
    return cut_label(life.request_id, 16)


def _newcomer(name: str, run: Rows, life: Life, wanted: str | None) -> Life:
    if wanted is not None:
        return run.life(wanted)
    others = [o for o in run.lives if o is not life and o.arrival >= life.token_times[0]]
    if not others:
        raise ValueError(f"{name}: nobody came after the first token of {life.request_id!r}")
    return max(others, key=lambda other: other.num_prompt_tokens)


def _caption(lives: Mapping[str, Life], late: Mapping[str, Life]) -> str:
    first, other = next(iter(lives.values())), next(iter(late.values()))
    parts = []
    for name, life in lives.items():
        gaps, ttft = life.metrics.itl, late[name].metrics.ttft
        its = "no token" if ttft is None else f"its first token after {ms(ttft)}"
        middle = ms(percentile(gaps, 50))
        parts.append(f"“{name}” {ms(max(gaps))} (p50 {middle}), {_name(late[name])} has {its}")
    return (
        f"{_name(other)} comes with a prompt of {other.num_prompt_tokens} tokens while "
        f"{_name(first)} decodes; longest gap between two tokens of {_name(first)}: "
        f"{'; '.join(parts)}."
    )
