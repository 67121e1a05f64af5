"""What is said of a run beside the scheduler's picture: a step, in sentences.

Knows why somebody waits, and what comes of a step; draws nothing. A step is shown while its forward
runs: it is planned, and nothing of it counts yet.
"""

from tutorial_engine.trace.events import Preempted, TokenSampled
from tutorial_engine.viz.run.run import Run
from tutorial_engine.viz.words import POLICIES, counted, listed, tokens, verb


class SchedulerRun(Run):
    """A run, and what the scheduler's picture says of any step of it."""

    def why_waiting(self, step: int) -> str:
        """Why nobody else of the queue was admitted, as a clause; empty when nobody waits.

        The first reason that the trace shows. Whom a policy of one's own would have asked next, a
        trace does not say: for it the last reason names no request.
        """
        now, policy = self.steps[step], self.settings["policy"]
        waiting, running = now.planned.waiting, now.planned.running
        if not waiting:
            return ""
        if now.by_request(Preempted) and policy != "PrefillFirst":
            return "a step that preempts admits nobody"
        if policy == "OneByOne" and running:
            return f"one runs at a time, and {running[0]} is not done"
        if policy == "StaticBatching" and self.origin(waiting[0]) not in self._batch(step):
            return f"nobody joins before {verb(running, 'is', 'are')} done"
        if len(running) >= self.max_num_seqs:
            places = (
                f"all {self.max_num_seqs} places are" if self.max_num_seqs > 1 else "the place is"
            )
            return f"{places} taken (max_num_seqs)"
        left, wanted = self.budget - now.num_tokens, self.to_run(waiting[0], step)
        if left <= 0:
            return "no budget is left"
        if policy not in POLICIES:
            return f"{policy} admits nobody else, or no memory is free"
        whole = policy == "PrefillFirst" or not self.settings.get("enable_chunked_prefill", True)
        if whole and left < wanted <= self.budget:
            return (
                f"{waiting[0]} must run its {tokens(wanted)} in one step, and {left} of the budget "
                f"{'is' if left == 1 else 'are'} left"
            )
        return "no memory is free"

    def _batch(self, step: int) -> set[str]:
        """Whom StaticBatching has put into the batch of a step, by the rule of its own."""
        batch = set[str]()
        for now in self.steps[: step + 1]:
            waiting = [self.origin(name) for name in now.before.waiting]
            if not now.before.running and batch.isdisjoint(waiting):
                batch = set(waiting[: self.max_num_seqs])
        return batch

    def facts(self, step: int) -> list[str]:
        """Who waits and who stalls, and why, and who is done: a sentence each."""
        found, waiting = [], self.steps[step].planned.waiting
        if waiting:
            found.append(f"{verb(waiting, 'waits', 'wait')}: {self.why_waiting(step)}")
        if stalled := self.doing("stalls", step):  # the one rule never does that
            found.append(f"{verb(stalled, 'stalls', 'stall')}: {self._why_stalled(step)}")
        if ended := self.ended(step):
            reasons = listed(dict.fromkeys(ended.values()))
            found.append(f"{verb(ended, 'ends', 'end')} with this step ({reasons})")
        return found

    def _why_stalled(self, step: int) -> str:
        if self.settings["policy"] == "PrefillFirst":
            return "this step only prefills"
        is_used_up = self.steps[step].num_tokens >= self.budget
        return "no budget is left" if is_used_up else "the policy gave nothing"

    def ran(self, name: str, step: int) -> str:
        """What a step ran of a request: "B prefill 6 (1 left, no token yet)"."""
        share = self.share(name, step)
        assert share is not None and share.num_tokens, f"step {step} ran nothing of {name}"
        left = self.to_run(name, step) - share.num_tokens
        rest = f" ({left} left, no token yet)" if left else ""
        return f"{name} {share.kind} {share.num_tokens}{rest}"

    def state(self, name: str, step: int) -> str:
        """In which queue a request is while the step runs, in words."""
        now, share = self.steps[step], self.share(name, step)
        if share is None:
            return "not here yet" if step < self.came(name) else "finished"
        if name in now.planned.waiting:
            return "waiting"
        return "waiting → running" if name in now.before.waiting else "running"

    def budget_left(self, name: str, step: int) -> int:
        """What was left of the budget when its turn came, or at the end if it got nothing."""
        left = self.budget
        for who, event in self.steps[step].scheduled.items():
            if who == name:
                break
            left -= len(event.slots)
        return left

    def outcome(self, name: str, step: int) -> str:
        """What comes of a step for one request: a new token, or why there is none."""
        share = self.share(name, step)
        if share is None:
            if step < self.came(name):
                return f"comes before step {self.came(name)}"
            life = self.life(name)
            return f"since step {life.end_step} ({life.reason})"
        if share.kind == "waits":
            return f"waits: {self.why_waiting(step)}"
        if share.kind == "preempted":
            return "gives way: no memory is free"
        if not share.num_tokens:
            return f"runs nothing: {self._why_stalled(step)}"
        known = len(self.steps[step].planned.requests[name].token_ids)
        if left := self.to_run(name, step) - share.num_tokens:
            is_left = f"{left} of its {tokens(known)} {'is' if left == 1 else 'are'} not run yet"
            return f"no new token: {is_left}"
        if name not in self.steps[step].by_request(TokenSampled):
            return "no new token"
        end = f", the last one ({self.ended(step)[name]})" if name in self.ended(step) else ""
        return f"new token “{self.word(name, known)}”{end}"

    def token_kinds(self, name: str, step: int) -> list[str]:
        """For each token of a request that is known by the end of a step, what has become of it.

        "cached" before the step, "written" in it, "known" and not run, "sampled" by it, or "gone".
        """
        now = self.steps[step]
        request, event = now.planned.requests[name], now.scheduled.get(name)
        known = len(request.token_ids)
        if step and name in self.over(step - 1):
            return ["gone"] * known
        done, count = request.num_computed_tokens, len(event.slots) if event else 0
        kinds = ["cached"] * done + ["written"] * count + ["known"] * (known - done - count)
        return kinds + ["sampled"] * (name in now.by_request(TokenSampled))

    def caption(self, step: int) -> str:
        """One sentence: who ran what, who waits and why, who is done and who is to come."""
        now, start = self.steps[step], f"Step {step} of {self.last}"
        ran = ", ".join(self.ran(name, step) for name in now.scheduled)
        parts = [
            f"{start}, {self.policy}: one forward runs {now.num_tokens} of {self.budget} budget "
            f"tokens for {counted(len(now.scheduled), 'request')}: {ran}"
        ]
        parts += self.facts(step)
        if self.to_come(step):
            late = [f"{name} (before step {self.came(name)})" for name in self.to_come(step)]
            parts.append(f"still to come: {listed(late)}")
        return "; ".join(parts) + "."
