"""Introduced in notebook 03. Three older policies, to be compared with the one rule on equal terms.

Each overrides one small method of Scheduler; all give the same tokens, at other times.
"""

from tutorial_engine.scheduler import ScheduledRequest, Scheduler, StepPlan


class StaticBatching(Scheduler):
    """Requests run in batches: nobody joins before the slowest of a batch is done.

    That was the way before Orca (Yu et al., 2022). Kinder than its usual form: nothing is padded.
    """

    def schedule_waiting(self, plan: StepPlan) -> None:
        """As Scheduler.schedule_waiting, but only into an empty engine."""
        if not self.running:
            super().schedule_waiting(plan)


class OneByOne(Scheduler):
    """One request at a time, as in a plain loop over `generate`."""

    def schedule_waiting(self, plan: StepPlan) -> None:
        """As Scheduler.schedule_waiting, but one, and only into an empty engine."""
        if not self.running and self.waiting:
            self.admit(plan, self.next_waiting())


class PrefillFirst(Scheduler):
    """Continuous batching in two phases: a step prefills whole prompts, or decodes; never both.

    New prompts go first, and all who decode wait for them (as in nano-vllm, and vLLM before v1).
    Only a resumed request that outgrew the budget is cut, and its rest runs beside decodes.
    """

    @property
    def can_chunk(self) -> bool:
        """As Scheduler.can_chunk: here every prompt runs whole."""
        return False

    def schedule(self) -> list[ScheduledRequest]:
        """As Scheduler.schedule."""
        plan = StepPlan(self.config.max_num_batched_tokens)
        self.schedule_waiting(plan)
        if not plan.scheduled:
            self.schedule_running(plan)
        return plan.scheduled
