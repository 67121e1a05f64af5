"""Who runs how many tokens in the next step: one rule, no phases.

Knows requests, two queues, a token budget, and memory as KVMemory; knows no model and no
text. The rule is vLLM's (v1): a request has tokens that are known and tokens that are computed,
and a step runs some of the difference. Decode is 1, prefill more, a resumed request all again.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tutorial_engine.cache.memory import KVMemory
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.request import Request, RequestStatus, SampleGroup, ScheduledRequest
from tutorial_engine.model.batch import Allocation
from tutorial_engine.sampling.sampler import SampledToken
from tutorial_engine.sampling.stopping import Finish
from tutorial_engine.trace import events
from tutorial_engine.trace.events import EngineState, RequestState


@dataclass
class StepPlan:
    """A step while it is being planned: the budget that is left, and who got what."""

    budget: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """First come, first served, in one rule. It alone changes requests and queues.

    `schedule()` plans a step, `update()` takes its result. A policy of your own is a subclass that
    overrides one of the small methods in between.
    """

    can_chunk = True  # may a prompt be spread over several steps? A policy may say no

    def __init__(
        self,
        config: EngineConfig,
        memory: KVMemory,
        now: Callable[[], float],
        trace: events.Recorder | None = None,
    ) -> None:
        self.config, self.memory, self.now, self.trace = config, memory, now, trace
        if callable(self.can_chunk):
            raise ValueError(f"{type(self).__name__}.can_chunk is True or False, and no method")
        self.can_chunk = self.can_chunk and config.enable_chunked_prefill
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission
        self._is_open = False  # is there a plan that was not counted?
        self._admitted: list[Request] = []  # by this plan

    @property
    def has_unfinished(self) -> bool:
        """Is there anything left to do?"""
        return bool(self.waiting or self.running)

    @property
    def max_len(self) -> int:
        """Tokens that a request can have, prompt and output."""
        limit = self.config.max_model_len
        return self.memory.max_len if limit is None else min(limit, self.memory.max_len)

    def check(self, name: str, prompt_len: int) -> None:
        """ValueError, with the numbers, for a prompt (`name` in the message) that can never run."""
        if prompt_len >= self.max_len:
            larger = (
                "raise max_model_len where model and memory allow"
                if self.max_len == self.config.max_model_len
                else "give the engine a larger memory"
            )
            raise ValueError(
                f"{name} has {prompt_len} tokens, but prompt and output together are limited to "
                f"{self.max_len}: shorten it, or {larger}"
            )
        budget = self.config.max_num_batched_tokens
        if not self.can_chunk and prompt_len > budget:
            raise ValueError(
                f"{name} has {prompt_len} tokens and must run in one step of at most {budget}: "
                "raise max_num_batched_tokens, or allow chunked prefill"
            )

    def add(self, request: Request, place: int | None = None) -> None:
        """To the end of the queue, or to a place in it. ValueError for what could never run."""
        self.check(f"the prompt of request {request.request_id}", request.num_prompt_tokens)
        self.waiting.insert(len(self.waiting) if place is None else place, request)
        if self.trace is not None:
            prompt, max_tokens = tuple(request.token_ids), request.params.max_tokens
            self._record(events.Added, request, prompt, max_tokens, request.arrival, place)

    def fork(self, parent: Request) -> None:
        """Queue its other samples; they begin with what it has computed, where memory can do it."""
        for child in self._queue_samples(parent.group):
            num_shared = min(parent.num_computed_tokens, child.num_tokens - 1)  # one is left to run
            num_tokens = self.memory.fork(parent.request_id, child.request_id, num_shared)
            self._record(events.Forked, child, parent.request_id, num_tokens)

    def _queue_samples(self, group: SampleGroup) -> list[Request]:
        """Behind preempted requests and earlier samples, before new prompts → those queued."""
        first = next(
            (
                i
                for i, request in enumerate(self.waiting)
                if request is request.group.samples[0]
                and request.status is not RequestStatus.PREEMPTED
            ),
            len(self.waiting),
        )
        queued, group.unqueued = group.unqueued, []
        for place, child in enumerate(queued, first):
            self.add(child, place)
        return queued

    def begin_plan(self) -> None:
        """If the last plan was broken off, what it promised was never written: forget it.

        Who was admitted by it may share such blocks, so it waits again.
        """
        if self._is_open:
            for request in reversed(self._admitted):
                if request in self.running:
                    self.preempt(request)
            for request in self.running:
                computed = request.num_computed_tokens
                self.memory.commit(request.request_id, request.token_ids, computed)
        self._is_open, self._admitted = True, []

    def schedule(self) -> list[ScheduledRequest]:
        """Plan the next step: who runs how many tokens. Empty only when there is nothing to do."""
        plan = StepPlan(self.config.max_num_batched_tokens)
        self.schedule_running(plan)
        # not when somebody was thrown out: it would be back at once
        if self.waiting and not (plan.preempted and plan.scheduled):
            self.schedule_waiting(plan)
        return plan.scheduled

    def schedule_running(self, plan: StepPlan) -> None:
        """Those who run already, in admission order. If memory is out, the last one gives way."""
        for request in list(self.running):
            if plan.preempted and request in plan.preempted:
                break  # and all after it
            num_tokens = self.num_tokens_to_run(request, plan)
            self.check_num_tokens(request, num_tokens)
            if num_tokens == 0:
                continue
            ask = request.request_id, request.token_ids, request.num_computed_tokens, num_tokens
            while (allocation := self.memory.allocate(*ask)) is None:
                victim = self.running[-1]
                self.preempt(victim)
                plan.preempted.append(victim)
                if victim is request:
                    return
            self._add_to_plan(plan, request, allocation)

    def schedule_waiting(self, plan: StepPlan) -> None:
        """Then those who wait, in order. If the first does not fit, nobody overtakes it."""
        while self.waiting and self.may_admit(plan) and self.admit(plan, self.next_waiting()):
            pass

    def may_admit(self, plan: StepPlan) -> bool:
        """Are there budget and a place for one more of those who wait?"""
        return plan.budget > 0 and len(self.running) < self.config.max_num_seqs

    def next_waiting(self) -> Request:
        """Whose turn is it? The first in the queue; a policy may choose another.

        Preempted requests and forks wait there, too: a policy may let others overtake them.
        """
        return self.waiting[0]

    def admit(self, plan: StepPlan, request: Request) -> bool:
        """Let a waiting request run, if budget and memory allow it."""
        self.check_choice(request)
        if len(self.running) >= self.config.max_num_seqs:
            raise ValueError(
                f"{type(self).__name__}.may_admit lets in more than max_num_seqs "
                f"({self.config.max_num_seqs}): call super().may_admit(plan) as well"
            )
        num_tokens = self.num_tokens_to_run(request, plan)
        self.check_num_tokens(request, num_tokens)
        if num_tokens == 0:
            return False
        ask = request.request_id, request.token_ids, request.num_computed_tokens, num_tokens
        allocation = self.memory.allocate(*ask)
        if allocation is None:
            return False
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = allocation.first_position  # so many were found
        self.waiting.remove(request)
        self.running.append(request)
        self._admitted.append(request)
        self._note_admission(request)
        self._add_to_plan(plan, request, allocation)
        return True

    def num_tokens_to_run(self, request: Request, plan: StepPlan) -> int:
        """How many of its tokens may run: min(what is left of it, chunk cap, what is left of us).

        Without chunked prefill all or none; but what is longer than a whole step has to be cut (a
        resumed request may have become so).
        """
        wanted = request.num_new_tokens
        cap = self.config.long_prefill_token_threshold
        if not self.can_chunk and wanted <= self.config.max_num_batched_tokens:
            return wanted if wanted <= plan.budget else 0
        return min(wanted, plan.budget, cap or wanted)

    def check_plan(self, scheduled: object) -> None:
        """What a policy of one's own can get wrong: no plan, a request twice, nothing at all."""
        policy, left = type(self).__name__, [r.request_id for r in (*self.running, *self.waiting)]
        if not isinstance(scheduled, list) or not all(
            isinstance(item, ScheduledRequest) for item in scheduled
        ):
            raise ValueError(
                f"{policy}.schedule gave {scheduled!r}: it must return the list that "
                "super().schedule() gives, plan.scheduled"
            )
        names = [item.request.request_id for item in scheduled]
        if len(set(names)) < len(names):
            raise ValueError(
                f"{policy}.schedule planned a request twice in one step: {names}: each runs once"
            )
        if not scheduled:
            overridden = vars(type(self)).keys() if type(self) is not Scheduler else ()
            methods = [name for name in overridden if callable(getattr(Scheduler, name, None))]
            rule = f"one of its own methods ({', '.join(methods)})" if methods else "its rule"
            raise RuntimeError(
                f"{policy} planned nothing, and {left} are not over: either {rule} gives none of "
                "them a token (is a `return` missing?), or the memory has no room for one of them "
                "alone: engine.abort_request(id) ends one"
            )

    def check_choice(self, request: object) -> None:
        """ValueError for what no policy may choose: it is no request that waits."""
        if request not in self.waiting:
            given = getattr(request, "request_id", request)
            hint = " (is a `return` missing?)" if given is None else f" ({type(request).__name__})"
            raise ValueError(
                f"{type(self).__name__}.next_waiting gave {given!r}{hint}: it must return one of "
                "the requests in self.waiting, and leave it there (admit takes it out)"
            )

    def check_num_tokens(self, request: Request, num_tokens: object) -> None:
        """ValueError for what no policy may say: it is no number of tokens."""
        if type(num_tokens) is not int or num_tokens < 0:
            hint = " (is a `return` missing?)" if num_tokens is None else ""
            raise ValueError(
                f"{type(self).__name__}.num_tokens_to_run gave {num_tokens!r} for request "
                f"{request.request_id}{hint}: it must return a whole number, 0 for none"
            )

    def _note_admission(self, request: Request) -> None:
        num_cached = request.num_computed_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
        if self.trace is not None:
            found = self.memory.describe(request.request_id).slots[:num_cached]
            self._record(events.Admitted, request, num_cached, found)

    def preempt(self, victim: Request) -> None:
        """Take its memory and put it first in the queue; its tokens so far are kept."""
        victim.status = RequestStatus.PREEMPTED
        self.memory.free(victim.request_id)
        victim.num_computed_tokens = 0
        self.running.remove(victim)
        self.waiting.appendleft(victim)
        self._record(events.Preempted, victim)

    def commit(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """K and V of the step are written. What memory raises leaves the requests as they were."""
        for request, num_tokens, allocation in scheduled:
            if not request.is_over:
                computed = allocation.first_position + num_tokens
                self.memory.commit(request.request_id, request.token_ids, computed)

    def update(
        self, scheduled: Sequence[ScheduledRequest], sampled: Mapping[str, SampledToken]
    ) -> None:
        """Take a step's result, request by request: count what was run, append, end what is over.

        `sampled` has the token of each request, by id, that is due one and could be sampled. What
        was run is committed already.
        """
        for request, num_tokens, allocation in scheduled:
            if request.is_over:  # its token could not be sampled
                continue
            computed = request.num_computed_tokens = allocation.first_position + num_tokens
            if request.group.unqueued and computed >= request.num_prompt_tokens:
                self.fork(request)
            token = sampled.get(request.request_id)
            if token is None:
                continue
            try:
                finish = request.append(token, self.now())
            except Exception as fault:  # of its own stop logic or text
                self.fail(request, fault)
                continue
            self._record(events.TokenSampled, request, token.token_id)
            if finish is not None:
                self.end(request, RequestStatus.FINISHED, finish)
        self._is_open = False

    def fail(self, request: Request, fault: Exception) -> None:
        """End it alone, with a reason; all others go on, the other samples of its prompt too."""
        self._queue_samples(request.group)
        if request.status is RequestStatus.RUNNING:  # nobody may find what gave no token, as NaN
            computed = request.num_computed_tokens
            self.memory.commit(request.request_id, request.token_ids, computed)
        error = f"{type(fault).__name__}: {fault}"
        self.end(request, RequestStatus.ERROR, Finish("error"), error)

    def abort(self, request: Request) -> None:
        """End it now, whatever it is doing."""
        self.end(request, RequestStatus.ABORTED, Finish("abort"))

    def end(
        self, request: Request, status: RequestStatus, finish: Finish, error: str | None = None
    ) -> None:
        """It leaves its queue and gives back its memory."""
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        request.end(status, finish, self.now(), error)
        if request in request.group.unqueued:
            request.group.unqueued.remove(request)
            return
        self.memory.free(request.request_id)
        with suppress(ValueError):  # a policy of one's own may have taken it out
            queue.remove(request)
        self._record(events.Finished, request, finish.reason, error or finish.stop_reason)

    def state(self) -> EngineState:
        """Queues and unfinished requests as they stand, in the form that a replay has."""
        requests = {}
        for request in (*self.waiting, *self.running):
            table, slots = self.memory.describe(request.request_id)
            requests[request.request_id] = RequestState(
                request.status.value,
                request.num_prompt_tokens,
                tuple(request.token_ids),
                request.num_computed_tokens,
                slots[: request.num_computed_tokens],
                table,
            )
        waiting = tuple(request.request_id for request in self.waiting)
        return EngineState(waiting, tuple(request.request_id for request in self.running), requests)

    def check_integrity(self) -> None:
        """AssertionError if a request is in the wrong queue, or in two, or the memory is wrong."""
        both = [*self.waiting, *self.running]
        assert len({id(request) for request in both}) == len(both), "a request is queued twice"
        assert len(self.running) <= self.config.max_num_seqs, "more run than may"
        for request in both:
            runs = request in self.running
            assert not request.is_over and runs == (request.status is RequestStatus.RUNNING), (
                f"request {request.request_id} is {request.status.value}"
            )
            computed, room = (
                request.num_computed_tokens,
                len(self.memory.describe(request.request_id).slots),
            )
            assert computed <= room, f"{request.request_id}: {computed} computed, room for {room}"
            assert computed < request.num_tokens, f"{request.request_id} has nothing left to run"
        self.memory.check_integrity()

    def _add_to_plan(self, plan: StepPlan, request: Request, allocation: Allocation) -> None:
        num_tokens = len(allocation.new_slots)
        plan.budget -= num_tokens
        plan.scheduled.append(ScheduledRequest(request, num_tokens, allocation))
        if request.first_scheduled is None:
            request.first_scheduled = self.now()
        if self.trace is not None:
            slots = tuple(allocation.new_slots)
            self._record(events.Scheduled, request, allocation.first_position, slots)

    def _record(self, kind: type[events.Event], request: Request, *values: object) -> None:
        if self.trace is not None:
            self.trace.record(kind, request.request_id, *values)
