"""A scheduler at work without a model: plans in microseconds.

Everything is real but the tokens: whoever is due one gets token 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tutorial_engine.cache.config import KVCacheSpec
from tutorial_engine.cache.rows import StaticKVCache
from tutorial_engine.cache.storage import KVStorage
from tutorial_engine.engine.clock import VirtualClock
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.request import Request
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.sampling.sampler import SampledToken
from tutorial_engine.trace.events import Planned, Recorder, StepBegan, StepEnded, Trace
from tutorial_engine.trace.history import history


class Job(NamedTuple):
    """A request of so many prompt tokens that wants so many new ones, from this step on."""

    name: str
    prompt_len: int
    new_tokens: int
    from_step: int = 0


def dry_run(policy: type[Scheduler], jobs: Sequence[Job], config: EngineConfig) -> Trace:
    """Schedule the jobs to their end. RuntimeError when that takes more than 1000 steps, or stalls.

    Time is VirtualClock's. Integrity is checked after every step.
    """
    longest = max(job.prompt_len + job.new_tokens for job in jobs) + 1
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, k_head_dim=1, v_head_dim=1)
    rows = config.max_num_seqs
    clock, trace = VirtualClock(), Recorder()
    memory = StaticKVCache(KVStorage(spec, rows * longest), rows, longest, trace)
    scheduler = policy(config, memory, clock.now, trace)
    trace.bind(clock.now, {})
    to_come = list(jobs)
    while to_come or scheduler.has_unfinished:
        for job in [job for job in to_come if job.from_step <= trace.step]:
            to_come.remove(job)
            params = SamplingParams(max_tokens=job.new_tokens)
            scheduler.add(Request(job.name, [0] * job.prompt_len, params, arrival=clock.now()))
        if scheduler.has_unfinished:
            trace.record(StepBegan)
            scheduled = scheduler.schedule()
            if not scheduled:
                raise RuntimeError(f"step {trace.step} runs no token, and there is work to do")
            trace.record(Planned)
            num_tokens = sum(item.num_tokens for item in scheduled)
            clock.forward_done(num_tokens)
            due = [item.request.request_id for item in scheduled if item.yields_token]
            scheduler.commit(scheduled)
            scheduler.update(scheduled, dict.fromkeys(due, SampledToken(0)))
            scheduler.check_integrity()
            trace.record(StepEnded, num_tokens)
        trace.step += 1
        if trace.step > 1000:
            raise RuntimeError("1000 steps did not suffice: does every request progress?")
    return trace.trace()


def steps(trace: Trace) -> list[dict[str, int]]:
    """What each step ran: request_id → number of tokens; idle steps are left out."""
    ran = (step.scheduled.items() for step in history(trace))
    return [{name: len(event.slots) for name, event in scheduled} for scheduled in ran]
