"""The bug zoo of the scheduler: a lone, whole prompt shows none of them.

Each one runs without an error: see bugs.planted.
"""

from tutorial_engine.engine.request import ScheduledRequest
from tutorial_engine.engine.scheduler import Scheduler
from tutorial_engine.learn.stories.bugs import Zoo, edited
from tutorial_engine.model.batch import Batch
from tutorial_engine.sampling.sampler import Sampler

BUGS_03: Zoo = {
    "a half-read prompt answers": edited(
        ScheduledRequest,
        "yields_token",
        (
            "return self.allocation.first_position + self.num_tokens == "
            "len(self.request.token_ids)",
            "return True",
        ),
    ),
    "a neighbour's row is read": edited(  # where each has one token: the shapes fit
        Batch,
        "from_allocations",
        (
            "[one.context_slots for one in allocations]",
            "[one.context_slots for one in "
            "(allocations[::-1] if len(ids) == len(firsts) else allocations)]",
        ),
    ),
    "one generator for all requests": edited(
        Sampler, "__init__", ("= torch.Generator()", "= torch.default_generator")
    ),
    "each request has the whole budget": edited(
        Scheduler,
        "num_tokens_to_run",
        ("min(wanted, plan.budget,", "min(wanted, self.config.max_num_batched_tokens,"),
    ),
}
