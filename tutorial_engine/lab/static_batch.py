"""Static batching as it was: nobody is answered before the slowest.

Our `StaticBatching` hands out an answer when its request is over, which is kinder. The loops before
Orca (Yu et al., 2022) ran a batch as one padded array and returned it as a whole. Knows a trace.
"""

from tutorial_engine.trace.events import Added, Finished, Forked, Trace
from tutorial_engine.trace.history import history


def batches(trace: Trace) -> list[tuple[str, ...]]:
    """Who ran together, in the order of the batches. ValueError for a run of another policy."""
    if trace.settings.get("policy") != "StaticBatching":
        raise ValueError(
            f"this trace is of {trace.settings.get('policy')}: record a run with "
            "scheduler=StaticBatching"
        )
    places = int(trace.settings["max_num_seqs"] or 0)
    prompt_of = {e.request_id: e.parent_id for e in trace.events if isinstance(e, Forked)}
    together: list[tuple[str, ...]] = []
    for step in history(trace):
        waiting = {prompt_of.get(name, name): None for name in step.before.waiting}
        last = together[-1] if together else ()
        if not step.before.running and not any(name in waiting for name in last):
            together.append(tuple(waiting)[:places])
    return together


def static_as_it_was(trace: Trace) -> dict[str, float]:
    """Request → when its answer would be given, in seconds: with the last one of its batch.

    Who never ran has no entry, nor has a batch that is not over.
    """
    prompt_of = {e.request_id: e.parent_id for e in trace.events if isinstance(e, Forked)}
    ends = dict[str, float]()
    for event in trace.events:
        if isinstance(event, Finished):
            name = prompt_of.get(event.request_id, event.request_id)
            ends[name] = max(ends.get(name, 0.0), event.time)
    given = dict[str, float]()
    for batch in batches(trace):
        if all(name in ends for name in batch):
            given |= dict.fromkeys(batch, max(ends[name] for name in batch))
    order = [e.request_id for e in trace.events if isinstance(e, Added)]
    return {name: given[name] for name in order if name in given}
