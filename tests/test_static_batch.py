"""Static batching as it was: each answer comes with the slowest of its batch."""

import pytest
from traces import served

from tutorial_engine.lab.static_batch import batches, static_as_it_was
from tutorial_engine.trace.events import Admitted, Finished


@pytest.mark.parametrize(("number", "rate", "places"), [(7, 0.0, 3), (9, 40.0, 2), (5, 500.0, 4)])
def test_an_answer_comes_with_the_last_of_its_batch(number: int, rate: float, places: int) -> None:
    trace, _ = served("static batching", number, rate, seqs=places, budget=8)
    ends = {e.request_id: e.time for e in trace.events if isinstance(e, Finished)}
    starts = {e.request_id: e.time for e in trace.events if isinstance(e, Admitted)}
    found, given = batches(trace), static_as_it_was(trace)
    assert sorted(name for batch in found for name in batch) == sorted(ends) == sorted(given)
    for batch, after in zip(found, [*found[1:], ()], strict=True):
        assert 1 <= len(batch) <= places
        assert {given[name] for name in batch} == {max(ends[name] for name in batch)}
        assert all(starts[name] >= given[batch[0]] for name in after), "nobody joins before"
    later = [given[name] - ends[name] for name in ends]
    assert min(later) == 0 < max(later), "the slowest loses nothing, somebody loses something"


def test_another_policy_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"this trace is of Scheduler: .* scheduler=StaticBatching"
    ):
        static_as_it_was(served("one rule")[0])
