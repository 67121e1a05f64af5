"""Older policies, to be compared with the one rule on equal terms.

Each overrides a small method or two of Scheduler; all give the same tokens, at other times.
"""

from tutorial_engine.engine.request import SampleGroup, ScheduledRequest
from tutorial_engine.engine.scheduler import Scheduler, StepPlan


class StaticBatching(Scheduler):
    """Requests run in batches: nobody joins before the slowest of a batch is done.

    That was the way before Orca (Yu et al., 2022). Kinder than its usual form: nothing is padded.
    """

    batch: frozenset[SampleGroup] = frozenset()  # the samples of a prompt are of one batch

    def schedule_waiting(self, plan: StepPlan) -> None:
        """As Scheduler.schedule_waiting; a new batch is chosen when the old one is over."""
        waiting = [request.group for request in self.waiting]
        if not self.running and self.batch.isdisjoint(waiting):
            self.batch = frozenset(waiting[: self.config.max_num_seqs])
        super().schedule_waiting(plan)

    def may_admit(self, plan: StepPlan) -> bool:
        """As Scheduler.may_admit, and only who is of the batch."""
        return super().may_admit(plan) and self.next_waiting().group in self.batch


class OneByOne(Scheduler):
    """One request at a time, as in a plain loop over `generate`."""

    def may_admit(self, plan: StepPlan) -> bool:
        """As Scheduler.may_admit, and only into an empty engine."""
        return super().may_admit(plan) and not self.running


class PrefillFirst(Scheduler):
    """Continuous batching in two phases: a step prefills whole prompts, or decodes; never both.

    New prompts go first, and all who decode wait for them (as in nano-vllm, and vLLM before v1).
    Only a resumed request that outgrew the budget is cut, and its rest runs beside decodes.
    """

    can_chunk = False  # every prompt runs whole

    def schedule(self) -> list[ScheduledRequest]:
        """As Scheduler.schedule."""
        plan = StepPlan(self.config.max_num_batched_tokens)
        self.schedule_waiting(plan)
        if not plan.scheduled:
            self.schedule_running(plan)
        return plan.scheduled
