"""Inter-token latency of a request over time, and who came meanwhile.

The caption is computed from the same numbers that are drawn; those of a virtual clock are the
same on every machine.
"""

from collections.abc import Mapping

from tutorial_engine.engine.metrics import percentile
from tutorial_engine.trace.events import Trace
from tutorial_engine.viz.drawing.charts import line_look, panels
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.drawing.style import INK, QUIET, finish, house_style
from tutorial_engine.viz.run.run import Life, Run
from tutorial_engine.viz.tokens import cut_label, written
from tutorial_engine.viz.words import ms


@house_style()
def itl_over_time(traces: Mapping[str, Trace], request_id: str) -> Picture:
    """Inter-token latency of a request over time, a line per run; marked: a long prompt's arrival.

    The long prompt is the longest of those that came after the request's first token. ValueError
    where none did, and for a request that is not there or has no two tokens.
    """
    figure, (ax,) = panels(10, 4)
    parts, arrivals, top = [], [], 0.0
    for i, (name, trace) in enumerate(traces.items()):
        run = Run.of(trace)
        life = run.life(request_id)
        gaps = [1000 * gap for gap in life.metrics.itl]
        if not gaps:
            raise ValueError(f"{name}: request {request_id!r} has fewer than two tokens: no gap")
        late = _newcomer(name, run, life)
        times = [1000 * (when - run.start) for when in life.token_times[1:]]
        ax.plot(times, gaps, markersize=5.5, label=name, drawstyle="steps-pre", **line_look(i))
        top = max(top, *gaps)
        arrivals.append(round(1000 * (late.arrival - run.start), 3))
        ttft = late.metrics.ttft
        its = "no token" if ttft is None else f"its first token after {ms(ttft)}"
        middle = ms(percentile(life.metrics.itl, 50))
        longest = ms(max(life.metrics.itl))
        parts.append(f"“{name}” {longest} (p50 {middle}), {_name(late)} has {its}")
    for when in set(arrivals):
        ax.axvline(when, color=INK, linestyle=(0, (4, 2)), linewidth=1.3)
    words = f"{_name(late)} comes, prompt of {late.num_prompt_tokens}"
    at = (min(arrivals), 1.17 * top)
    ax.annotate(words, at, (6, 0), textcoords="offset points", va="top")
    ax.set(
        xlim=(0, None), ylim=(0, 1.2 * top), xlabel="time, ms", ylabel="gap before the token, ms"
    )
    ax.set_title(f"Inter-token latency of {_name(life)}")
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    ax.grid(axis="y", color=QUIET, alpha=0.2)
    return finish(
        figure,
        f"{_name(late)} comes with a prompt of {late.num_prompt_tokens} tokens while "
        f"{_name(life)} decodes; longest gap between two tokens of {_name(life)}: "
        f"{'; '.join(parts)}.",
    )


def _name(life: Life) -> str:
    return cut_label(written(life.request_id), 16)


def _newcomer(name: str, run: Run, life: Life) -> Life:
    """Who came with the long prompt."""
    others = [o for o in run.lives if o is not life and o.arrival >= life.token_times[0]]
    if not others:
        raise ValueError(f"{name}: nobody came after the first token of {life.request_id!r}")
    return max(others, key=lambda other: other.num_prompt_tokens)
