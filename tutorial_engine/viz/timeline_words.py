"""Introduced in notebook 03. What a timeline says in words, from the same rows that are drawn.

Knows rows of a trace; draws nothing.
"""

from collections.abc import Mapping

from tutorial_engine.viz.cache_steps import tokens
from tutorial_engine.viz.tokens import SPACE, cut_label, visible
from tutorial_engine.viz.trace_rows import Life, Rows

FEW = 4  # requests that a caption tells one by one

POLICIES = {
    "Scheduler": "one rule",
    "StaticBatching": "static batching",
    "OneByOne": "one by one",
    "PrefillFirst": "prefill first",
}


def settings_line(run: Rows, policy: bool = True) -> str:
    """The engine's limits, and what its clock asks, as far as the trace knows them."""
    get, parts = run.settings.get, []
    if policy and "policy" in run.settings:
        name = str(get("policy"))
        parts.append(POLICIES.get(name, name))
    if budget(run) is not None:
        parts.append(f"budget {tokens(budget(run) or 0)} a step")
    if "max_num_seqs" in run.settings:
        parts.append(f"at most {get('max_num_seqs')} run at once")
    if get("enable_chunked_prefill") is False:
        parts.append("no chunked prefill")
    if get("long_prefill_token_threshold"):
        parts.append(f"chunks of at most {get('long_prefill_token_threshold')}")
    fixed, each = get("seconds_per_forward"), get("seconds_per_token")
    if isinstance(fixed, float | int) and isinstance(each, float | int):
        parts.append(f"virtual clock: {ms(fixed)} a forward + {ms(each)} a token")
    return " · ".join(parts)


def budget(run: Rows) -> int | None:
    """max_num_batched_tokens, if the trace says it."""
    found = run.settings.get("max_num_batched_tokens")
    return found if isinstance(found, int) else None


def ms(seconds: float) -> str:
    """Seconds as milliseconds: three digits at least where there are so many. 8.5 ms, 1265 ms."""
    value = seconds * 1000
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def rate(run: Rows) -> float:
    """Output tokens per second, from the first arrival to the last step's end."""
    return run.num_output_tokens / (run.end - run.start) if run.end > run.start else 0.0


def run_caption(run: Rows) -> str:
    """How much ran in how many steps, how full they were, and who ended when."""
    steps, lives = len(run.steps), run.lives
    limit = budget(run)
    mean = f"{run.num_tokens / steps:.1f}"
    per = f"{mean} a step on average" if limit is None else f"{mean} of {limit} a step on average"
    said = (
        f"{_steps(steps)} ran {tokens(run.num_tokens)} of {_requests(len(lives))} in "
        f"{ms(run.end - run.start)}, {per}"
    )
    over = [life for life in lives if life.end_step is not None]
    if len(lives) <= FEW:
        said += "".join(f"; {_told(life)}" for life in lives)
    elif over:
        last = max(over, key=lambda life: (life.finished or 0.0, life.end_step or 0))
        first = min(over, key=lambda life: (life.finished or 0.0, life.end_step or 0))
        said += f"; the first to end is {_told(first)}; the last is {_told(last)}"
    lost = sum(share.kind == "preempted" for life in lives for share in life.shares.values())
    if lost:
        again = sum(share.num_again for life in lives for share in life.shares.values())
        said += f"; {lost} preempted, {tokens(again)} computed again"
    return said + "."


def plain(request_id: str) -> str:
    """An id inside a sentence: at most 24 letters, line breaks and the like made visible."""
    return cut_label(visible(request_id).replace(SPACE, " "), 24)


def _told(life: Life) -> str:
    """One request: its first token and its end, by step."""
    name = plain(life.request_id)
    name = f"“{name}”" if len(name) > 2 else name
    first = f"first token in step {life.token_steps[0]}" if life.token_steps else "no token"
    if life.end_step is None:
        return f"{name}: {first}, not over"
    when = "in" if life.end_step_ran else "before"
    end = "finished" if life.ending.startswith("finished") else life.ending
    why = f" ({life.reason})" if end == "finished" else ""
    return f"{name}: {first}, {end}{why} {when} step {life.end_step}"


def runs_caption(runs: Mapping[str, Rows]) -> str:
    """Which of several runs ends first, and by what factor the others are slower."""
    spans = {name: run.end - run.start for name, run in runs.items()}
    best = min(spans, key=lambda name: spans[name])
    said = f"“{best}” ends first, after {ms(spans[best])} ({rate(runs[best]):.0f} tok/s)"
    others = sorted((span, name) for name, span in spans.items() if name != best)
    parts = [
        f"“{name}” takes {ms(span)}, "
        + ("as long" if span == spans[best] else f"{span / spans[best]:.2f} times as long")
        for span, name in others
    ]
    return "; ".join([said, *parts]) + "."


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count != 1)}"
