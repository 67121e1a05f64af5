# %% [markdown]
# # 03 · The scheduler
#
# One model, many users. You write the rule that decides which request runs how many tokens in each step. It serves
# requests in the real engine. At the end of the first sitting, recorded runs of vLLM judge it. Then you measure what
# batching gains and costs.
#
# | sitting | what it is about | time |
# |---|---|---|
# | sections 1 to 6 | the rule, the batch, what a user feels, your rule beside vLLM | 1½ hours |
# | sections 7 to 13 | policies, throughput and latency, fairness, bugs | 2 hours |
#
# A beginner needs up to half more. You should have done notebook 02. You may skip folded code.

# %%
import torch

from tutorial_engine.engine import EngineConfig, LLMEngine, Scheduler, VirtualClock
from tutorial_engine.engine import generate
from tutorial_engine.learn import OwnServer, Predictions, show_source, steps
from tutorial_engine.model import TINY, load_model, load_tokenizer
from tutorial_engine.sampling import SamplingParams
from tutorial_engine.trace import Recorder

torch.set_grad_enabled(False)
torch.set_num_threads(1)  # for a model this small a second thread costs more than it brings
predictions = Predictions("03")
model, tokenizer = load_model(), load_tokenizer()
PROMPTS = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]
prompts = [tokenizer.encode(text).ids for text in PROMPTS]
names = ["A", "B", "C"]
print({name: len(ids) for name, ids in zip(names, prompts, strict=True)}, "prompt tokens")

# %% [markdown]
# Sharing one engine can go wrong. The engine below has a small mistake, where requests share what others have computed. Read its last answer:

# %% jupyter={"source_hidden": true}
from tutorial_engine.learn import leak

anna, tom = "One day Anna had an old lamp.", "One day Tom had a yellow coat."
print(leak(model, tokenizer, {"user 1": anna, "user 2": tom, "user 1 again": anna}))

# %% [markdown]
# User 1 never wrote of a coat: it is from the text of user 2. You will find the mistake in notebook 05. Here you write
# the part that decides who runs.

# %% [markdown]
# # First sitting: the rule and the engine
#
# ## 1 · One forward for all
#
# **Objective:** count the forwards that three requests need, one after the other and together.
#
# A wants 6 new tokens, B wants 3, C wants 5. The first forward of a request runs its prompt and gives its
# first new token. Each later forward gives one more. So one after the other they need 6 + 3 + 5 = 14
# forwards. Now we run the three together.

# %%
WANTED = [6, 3, 5]
params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in WANTED]  # exactly so many
alone = {}  # the new tokens of each request when it runs alone
for name, ids, own in zip(names, prompts, params, strict=True):
    alone[name] = generate(model, [ids], own, tokenizer=tokenizer)[0].outputs[0].token_ids
print({name: len(ids) for name, ids in alone.items()}, "new tokens")

# %%
predictions.ask(
    "forwards",
    "All three are in the engine from the start, and each forward runs all who still want tokens. How "
    "many forwards does it take?",
    ["14", "6", "3"],
)

# %%
engine = LLMEngine(model, tokenizer)
outputs = engine.generate(prompts, params)
if predictions.reveal("forwards", engine.runner.num_forwards):
    same = [out.outputs[0].token_ids for out in outputs] == list(alone.values())
    print("the same tokens as alone:", same)

# %% [markdown]
# All prompts fit into the first forward. So each forward gives one token to every request that is not finished, and the
# longest decides the number of forwards. This is *batching*. B leaves after 3 forwards. Who joins the others then?
#
# - *Static batching*: nobody, until the whole batch is finished.
# - **Continuous batching**: the next request that waits, in the very next forward. The batch never has to end.
#
# Below are the first 48 forwards of 24 requests. At most four may run at once: the engine has four *places*.
# Each line of the picture is one place. A newcomer takes the place that became free last. A hatched box is a place that is
# empty although somebody waits.

# %% tags=["figure-first-places"] jupyter={"source_hidden": true}
from tutorial_engine.engine import StaticBatching
from tutorial_engine.viz import places, read_places

lengths = [6, 24, 4, 12, 8, 24, 4, 12]  # new tokens that the requests want
two = {}
for name, policy in (("static batching", StaticBatching), ("continuous batching", Scheduler)):
    limits = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    parts = {"scheduler": policy, "clock": VirtualClock(), "trace": Recorder()}
    engine = LLMEngine(model, tokenizer, limits, **parts)
    for i in range(24):
        own = SamplingParams(max_tokens=lengths[i % 8], ignore_eos=True)
        engine.add_request("ABCDEFGHIJKLMNOPQRSTUVWX"[i], prompts[i % 3], own)
    engine.run(max_steps=48)
    two[name] = engine.trace.trace()
    part = read_places(two[name])
    told = f"{part.wasted} of {part.total} places are empty, although somebody waits"
    print(f"{name}: {told} ({part.wasted / part.total:.0%})")
places(two, "24 requests, four places: who has each place in each step")

# %% [markdown]
# **About half of the places are empty, against none.** The lengths are chosen: 4 to 24 tokens. The more they differ, the more
# is wasted. In these 48 steps static batching finishes 8 requests,
# and continuous batching 16. A forward of a model like ours reads all weights, whoever is in it. So on a large GPU an empty
# place costs nearly as much as a full one. (A fuller forward lasts a little longer. Section 6 counts time.)
#
# The part of an engine that decides who runs is the **scheduler**. One forward, together with its
# planning before and its sampling after, is a **step**.

# %% [markdown]
# ## 2 · The one rule
#
# **Objective:** write the rule that decides how many tokens each request runs.
#
# Some tokens of a request are *known*: its prompt and its output so far. Some of them are *computed*: their K and V
# are in the cache. The others are left to run: there are known − computed of them. For a new prompt this is a large
# number, and for a decoding request it is 1. A step runs some of them: the **token budget** limits how many tokens one
# step runs for all requests together. There is no prefill or decode mode: the pictures use these words only to say which
# tokens run.

# %% [markdown]
# ### Exercise 1: how many tokens? (5 minutes)
#
# The requests of a step are asked one after the other. `budget_left` says how many tokens of the budget are still free
# after those that were asked before this one.
#
# <details><summary>Hint</summary>There are two limits: what the request has left to run, and what the
# budget has left.</details>


# %% tags=["exercise"]
def num_tokens_to_run(num_tokens, num_computed_tokens, budget_left):
    """How many of its num_tokens known tokens a request runs in this step."""
    ### BEGIN SOLUTION
    return min(num_tokens - num_computed_tokens, budget_left)
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_num_tokens

server = OwnServer(model, tokenizer)
server.use(num_tokens_to_run, check_num_tokens)

# %% [markdown]
# `server` is the real engine. If your part is right, it runs there from now on. If it is not, the package's part runs,
# and the cell says so. `serve` serves all prompts together. Its last line compares all tokens with those that each
# request gets alone.

# %%
run = server.serve(PROMPTS, params, max_num_batched_tokens=8)

# %% [markdown]
# There are `max_num_seqs` places, because the cache has so many rows, one for each request that runs. Who is asked first?
# First come the requests that have a place, in the order in which they got it (were *admitted*). Then come those that wait,
# as long as there is budget left and a free place.
#
# ### Exercise 2: plan a step (10 minutes)
#
# Write the rule for all requests of a step. Leave out a request that runs nothing.
#
# <details><summary>Hint</summary>Go through <code>running</code>, then through the first
# <code>max_num_seqs - len(running)</code> of <code>waiting</code>. Subtract what each one runs from the
# budget. Your exercise 1 can be used:
# <code>num_tokens_to_run(left, 0, budget)</code>.</details>


# %% tags=["exercise"]
def plan_step(running, waiting, budget, max_num_seqs):
    """running, waiting: lists of (name, tokens left to run) -> {name: tokens in this step}.

    plan_step([("X", 1)], [("Y", 9)], 6, 2) -> {"X": 1, "Y": 5}
    """
    ### BEGIN SOLUTION
    planned = {}
    for name, left in [*running, *waiting[: max_num_seqs - len(running)]]:
        if budget:
            planned[name] = num_tokens_to_run(left, 0, budget)
            budget -= planned[name]
    return planned
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_plan

server.use(plan_step, check_plan)

# %%
run = server.serve(PROMPTS, params, max_num_batched_tokens=8, max_num_seqs=2)

# %% [markdown]
# While memory lasts, this is the rule of vLLM, an engine for many users and many GPUs. At the end of this sitting
# your `plan_step` meets what vLLM decided. From here on it decides every step of `server`.
#
# ## 3 · Three requests, a budget of 8
#
# **Objective:** follow a run step by step, first on paper and then in the explorer.
#
# A has 10 prompt tokens, B has 7, C has 3. A step runs at most 8 tokens. There are 16 places, so only the budget limits. The first two steps run in the
# next cell, which prints nothing about them. Plan them on paper with your rule.


# %% jupyter={"source_hidden": true}
def make_engine(policy=Scheduler, clock=None, model=model, **limits):
    """An engine that records what it does. Its clock is virtual: section 6 explains it."""
    config = EngineConfig(**({"max_model_len": 64} | limits))
    parts = {"scheduler": policy, "clock": clock or VirtualClock(), "trace": Recorder()}
    return LLMEngine(model, tokenizer, config, **parts)


def with_three(**limits):
    """An engine in which A, B and C wait."""
    engine = make_engine(**limits)
    for name, ids, own in zip(names, prompts, params, strict=True):
        engine.add_request(name, ids, own)
    return engine


two_steps = with_three(max_num_batched_tokens=8)
print("waiting:", two_steps.state().waiting)
given = [two_steps.step(), two_steps.step()]
after_two = two_steps.state()

# %%
predictions.ask(
    "second",
    "Step 0 runs the first 8 tokens of A. What does step 1 run?",
    ["A 2", "A 2, B 6", "A 2, B 7, C 3", "B 7, A 1"],
)

# %%
planned = steps(two_steps.trace.trace())
if predictions.reveal("second", ", ".join(f"{name} {n}" for name, n in planned[1].items())):
    for number, ran in enumerate(planned):
        print(f"step {number} runs {ran}, {sum(ran.values())} of 8 tokens")
    for name, state in sorted(after_two.requests.items()):
        known, computed = len(state.token_ids), state.num_computed_tokens
        print(f"{name}: {state.status}, {computed} of {known} known tokens are computed")
    print("step 1 gave a new token to:", *[result.request_id for result in given[1]])

# %% [markdown]
# B has read a *chunk*, 6 of 7 tokens. After token 6 the model could only guess token 7, which the prompt
# has. So nothing is sampled. A request gets a new token only in a step that computes the
# last of its known tokens. (A's new token is already the 11th known one.)
#
# Now watch a longer run. D and E come too, and there are only two places. Each
# box of the upper part has the number of tokens that a request ran in a step. Below it are the budget of the
# step, and the numbers of your rule: known, computed, to run, budget left. Step through the run with the buttons or the
# slider.

# %% tags=["figure-scheduler-explorer"]
from tutorial_engine.viz import SchedulerExplorer

FIVE, FIVE_WANTED = [*PROMPTS, "Tom saw a dog.", "Mia had a red hat."], [*WANTED, 8, 4]
explorer = SchedulerExplorer(
    model, tokenizer, FIVE, FIVE_WANTED, budget=8, max_num_seqs=2, mine=server.as_written
)
explorer.set(step=1)
explorer

# %% [markdown]
# **Try it.** Set *budget* to 16. *policy* has four ways to batch (section 7). How many steps does each take? (The first is step 0.)
#
# <details><summary>Answer</summary>One by one 26, static batching 18, prefill first 17, one rule 14.</details>
#
# The fifth, **mine**, runs your last rule. Break exercise 2 in two ways. After each change run the exercise, its check and the
# explorer's cell, and choose *mine*:
#
# 1. Let each request run all that it has left. What happens in step 0?
# 2. Put that limit back, and let those who wait go first. Who *stalls* (has a place, but runs no token in a step), and when?
#
# Then put your rule right.
#
# <details><summary>Answer</summary>Without the budget, step 0 runs 17 tokens where 8 are allowed (10, if your
# loop stops when no budget is left). With those who wait in front, C stalls in step 8, and D in step 10.</details>
#
# <details><summary>What is under <i>show</i>?</summary>With “the steps, the cache and all tokens” you see the rows of the cache,
# too. Hatched slots are reserved for a request, and empty.</details>


# %% [markdown]
# ## 4 · The batch that the model sees
#
# **Objective:** know what "together" means for the model.
#
# We plan one step by hand and look at its batch. `schedule` says for each request how many tokens run, and
# in its `allocation` which slots of the cache they get. The batch puts all these tokens end to end. A row
# has `max_model_len` slots, here 64, so position 6 of B, in the second row, is slot 64 + 6.

# %%
from tutorial_engine.model import Batch

by_hand = with_three(max_num_batched_tokens=8)
by_hand.step()
by_hand.step()
scheduled = by_hand.scheduler.schedule()
who = [item.request.request_id for item in scheduled]
batch = Batch.from_allocations(
    [item.token_ids for item in scheduled], [item.allocation for item in scheduled], who
)
print("tokens of", who, batch.query_lens)
print("positions:", batch.positions.tolist())
print("slots:    ", batch.slot_mapping.tolist())

# %% [markdown]
# A runs its 11th token, B its 7th, C its three prompt tokens. Each token looks at itself and at the earlier tokens
# of its own request:

# %% tags=["figure-flat-batch"]
from tutorial_engine.viz import flat_batch, token_labels

labels = token_labels(tokenizer, batch.input_ids.tolist())
flat_batch(batch, names, labels)

# %% [markdown]
# The linear layers get five rows of numbers, and it does not matter whose they are. They read each weight
# once for all five. Attention works request by request here. The white parts of the picture are never
# computed, and nothing is padded. Now run this batch, by hand:

# %%
hidden = model(batch, by_hand.runner.attention)
print("hidden [tokens, hidden size]:", list(hidden.shape))
ready = [item.request.request_id for item in scheduled if item.yields_token]
print("these get a token:", ready)
next_ids = model.compute_logits(hidden[list(batch.last_token_indices)]).argmax(-1).tolist()
print("the tokens that they get alone:", next_ids == [alone["A"][1], alone["B"][0], alone["C"][0]])

# %% [markdown]
# The engine does the same in each step: schedule, one forward, sample, update.
#
# ## 5 · Inside the scheduler
#
# **Objective:** find your rule in the real scheduler.
#
# `schedule` goes through the running requests, and then through the waiting ones. For each it asks
# `num_tokens_to_run`, its version of your exercise 1, and then the cache for slots (in `schedule_running` and `admit`, both
# not shown). `plan` notes what
# the step runs so far, and `plan.budget` is what is left.
#
# If memory runs out, a running request gives its memory back and waits again: it is *preempted*. Here each request has a
# row of its own, so this never happens: skip the lines with `plan.preempted`.

# %%
show_source(Scheduler.schedule)
print()
show_source(Scheduler.schedule_waiting)
print()
show_source(Scheduler.num_tokens_to_run)

# %% [markdown]
# `may_admit` says whether there is a place and some budget left. `admit` lets one request run, if budget and memory
# have room for it, and returns whether it did. If not, the loop ends: nobody overtakes the first one in the queue. Else a long prompt might wait for ever.
#
# `num_new_tokens` is known − computed, and the last line of `num_tokens_to_run` is your exercise 1. The `if` with
# `can_chunk` is for policies that never cut a prompt (prefill first, section 7); its second half is for preempted requests. `cap` limits what one request runs in a step. Usually it is `None`: then `cap or wanted` is `wanted`.
#
# In the scheduler of vLLM you find the same parts under these names:

# %%
from tutorial_engine.learn import box, in_vllm

print(in_vllm())

# %% [markdown]
# The subtraction and the order are the same there.
#
# <details><summary>What differs in vLLM</summary>Both loops stand in one long <code>schedule</code>.
# <code>num_computed_tokens</code> moves on before the forward, in <code>_update_after_schedule</code>; ours moves on
# after it. <code>cap</code> does not count if there is only one request in all. The second loop skips a request that waits for something
# else than budget or memory (a LoRA adapter, for example), so others overtake it. With priorities the request with the lowest priority is preempted. A step in which somebody
# was preempted admits nobody, even if it is then empty.</details>

# %% [markdown]
# ## 6 · What a user feels
#
# **Objective:** compute the times that users notice.
#
# Real times differ between machines. So the engine here reads a **virtual clock**: a forward costs 10 ms, and each token that it runs costs 1 ms more. A real forward, too, reads all weights once and computes for each
# token. On a GPU both happen at once, so a step lasts about as long as the longer part (the *roofline* of notebook 02). Our
# clock adds them, which is simpler, and at most doubles a step. On a large GPU a token costs far less: 1 ms is chosen so
# that you can see it (section 8). Reading K and V is left out.

# %% [markdown]
# **TTFT**, the time to first token, counts from the arrival of a request. In notebook 02 it was the time of
# the prefill; here it includes the wait in the queue. **ITL**, the inter-token latency, is the gap between
# two tokens. **TPOT**, the time per output token, is the mean of these gaps.
#
# ### Exercise 3: TTFT and TPOT (5 minutes)
#
# Compute both from the time of arrival and the times of the tokens.
#
# <details><summary>Hint</summary>n tokens have n − 1 gaps between them, and together these gaps last from
# the first token to the last.</details>


# %% tags=["exercise"]
def ttft_and_tpot(arrival, token_times):
    """arrival and the times of two or more tokens, in seconds -> (TTFT, TPOT) in seconds."""
    ### BEGIN SOLUTION
    tpot = (token_times[-1] - token_times[0]) / (len(token_times) - 1)
    return token_times[0] - arrival, tpot
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_metrics

server.use(ttft_and_tpot, check_metrics)

# %% [markdown]
# From now on `serve` prints these times, and calls your `ttft_and_tpot` for them.

# %%
run = server.serve(PROMPTS, params, max_num_batched_tokens=8, max_num_seqs=2)

# %% [markdown]
# The times can be checked by hand: a step lasts 10 ms and 1 ms for each of its tokens. The picture shows C. Why does it
# wait? In step 0 there is a free place, but A has used up the budget. From step 1 on A and B have both places (in step 1 the budget is used up, too). From step
# 2 on there is budget left, but no place. C is admitted when B is finished.

# %% tags=["figure-one-request"]
from tutorial_engine.trace import history
from tutorial_engine.viz import one_request

waited = [step for step in history(run.trace) if "C" in step.planned.waiting]
lasted = [round(1000 * (step.ended - step.began)) for step in waited]
print(f"C waits for {' + '.join(map(str, lasted))} = {sum(lasted)} ms")
one_request(run.trace, "C")

# %% [markdown]
# ## Your rule beside vLLM
#
# **Objective:** see where your rule decides as a real server does.
#
# The package has recorded runs: what vLLM's scheduler decided for random requests. Your rule knows nothing of memory. So
# we take only the ten runs in which memory is never short, and no request can reuse K and V that another has computed
# (notebook 05). They have 40 requests in all, which wait from the start. (vLLM plans a step here only when the one before has
# ended; appendix A3 has the other way.)
#
# `server` gets the same requests. A step counts as the same if it runs as many tokens of each request. First: what do two
# other rules get?

# %%
from tutorial_engine.learn import num_lines, others_beside_vllm

ready = server.use(plan_step, check_plan)
print(others_beside_vllm(model, tokenizer, lesson=3))

# %% [markdown]
# In most steps these rules plan as vLLM does, so even a wrong rule has many of them right. In fp32 another plan changes only the last digits of the
# logits (notebook 02, section 14), and in these runs the likeliest token is ahead by more than that. So here a plan decides *when* a token comes, not *which* one: with both rules all requests have vLLM's tokens.
#
# In step 1 of the last run, r0 still has 10 tokens of its prompt to run. If those who wait go first, r1, which came
# later, takes the whole budget. And your rule?

# %%
server.beside_vllm()

# %%
print(f"The file of the scheduler: 3,436 lines in vLLM 0.32.0, {num_lines(Scheduler)} here.")

# %% [markdown]
# If the line with ✔ names your `plan_step`, these are vLLM's decisions from your few lines. Its scheduler is longer because a server needs much more: images in prompts,
# several machines, priorities.
#
# ---
#
# **The first sitting ends here.** You have written a rule that makes the same plan as vLLM in every step of these runs, and
# you can follow a step from the queue to the model and back.
#
# ---

# %% [markdown]
# # Second sitting: what batching gains and costs
#
# If you begin here after a restart of the notebook, run all cells above first (menu Run, "Run All Above
# Selected Cell"): it takes less than a minute. Your exercises run in the engine again, and your predictions are kept.

# %% [markdown]
# ## 7 · Four policies and their idle places
#
# **Objective:** see what four ways of batching waste.
#
# A *policy* says who may run when.
#
# - *One by one*: a request runs alone until it is finished.
# - *Static batching*: a batch fills the places. Nobody joins before the last of the batch is finished. (Ours is kind: it
#   answers each request at its end. Older servers often gave all answers back only when the whole batch was over.)
# - *Prefill first*: whoever waits may join at any step. But a step either reads whole prompts or decodes.
# - *The one rule*: the scheduler of section 2. A step does both.

# %% [markdown]
# Eight requests wait from the start, and there are four places. A place is *wasted* if it is empty while somebody
# waits, or if its request runs nothing in this step.
#
# Static batching changes two methods of the one rule:
#
# | method | what it adds |
# |---|---|
# | `schedule_waiting` | if nobody runs, and nobody of the batch waits (`isdisjoint`), the next `max_num_seqs` become the batch |
# | `may_admit` | it also asks whether the next one is in the batch |
#
# (A `group` holds all answers that one user asked for. Here each user asks for one, so read `group` as the request.)

# %%
from tutorial_engine.engine import OneByOne, PrefillFirst
from tutorial_engine.lab import Arrival, serve

policies = {
    "one by one": OneByOne,
    "static batching": StaticBatching,
    "prefill first": PrefillFirst,
    "one rule": Scheduler,
}


def wants(num_tokens):
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


eight = [
    Arrival(0.0, prompts[i % 3], wants(n), name)
    for i, (n, name) in enumerate(zip(lengths, "ABCDEFGH", strict=True))
]

# %%
show_source(StaticBatching.schedule_waiting)
print()
show_source(StaticBatching.may_admit)

# %%
predictions.ask(
    "wasted",
    "You know static batching and the one rule from section 1. Prefill first lets a newcomer join at any step, "
    "too. But then all who decode pause. What share of the places does it waste here?",
    ["about 2 %", "about 14 %", "about 50 %"],
)

# %% jupyter={"source_hidden": true}
runs, results = {}, {}
for name, policy in policies.items():
    engine = make_engine(policy, max_num_seqs=4, max_num_batched_tokens=16)
    results[name] = serve(engine, eight)
    runs[name] = engine.trace.trace()
tokens = {name: [out.outputs[0].token_ids for out in outs] for name, outs in results.items()}
print("the same tokens under every policy:", all(t == tokens["one rule"] for t in tokens.values()))


# %% tags=["figure-places"] jupyter={"source_hidden": true}
counted = read_places(runs["prefill first"])
part = counted.wasted / counted.total
nearest = min(range(3), key=lambda i: abs(part - (0.02, 0.14, 0.5)[i]))
if chosen := predictions.reveal("wasted", nearest):
    lone = read_places(runs["one by one"])
    print(
        f"one by one wastes {lone.wasted} of {lone.total} places ({lone.wasted / lone.total:.0%})"
    )
shared = {name: run for name, run in runs.items() if name != "one by one"}
places(shared) if chosen else None

# %% [markdown]
# Whenever somebody joins under prefill first, all who decode run nothing for a step. The one rule wastes two places: in
# step 0 the prompts of A and B fill the budget.
#
# Under static batching the first batch lasts as long as B, and about half of its places are wasted. The second lasts
# as long as F. Nobody waits for its idle places: they do not count. So static batching wastes 28 % here, and
# 51 % in section 1: there somebody waits in each of the 48 steps.
#
# Now the times. At least half of the requests are at or below *p50*, and at least 19 of 20 at or below *p95* (of eight: the largest).

# %% jupyter={"source_hidden": true}
from tutorial_engine.engine import percentile


def in_ms(seconds, percent):
    return f"{1000 * percentile(seconds, percent):8.0f}"


print(f"{'times in ms':16}{'steps':>6}{'tok/s':>7}    TTFT p50, p95  TPOT p50  longest gap")
for name, outs in results.items():
    times = [out.metrics for out in outs]
    ttft = [one.ttft for one in times]
    gaps = [gap for one in times for gap in one.itl]
    speed = sum(lengths) / max(one.finished for one in times)
    told = in_ms(ttft, 50) + in_ms(ttft, 95) + in_ms([one.tpot for one in times], 50)
    print(f"{name:16}{runs[name].num_steps:6}{speed:7.0f}  {told}  {in_ms(gaps, 100)}")

# %% [markdown]
# One by one has the smallest TPOT, because nobody shares its forwards. But its users wait longest for their
# first token. Sharing makes the gaps a little longer, and most first tokens come much earlier.
#
# Prefill first stops all who decode while prompts run. So A waits 20 + 20 ms for those of B, C and D, and 14 for its own step: 54 ms. The one rule lets it run along.
#
# **Prefill first is alive.** SGLang 0.5.19 reads new prompts before it decodes, by default. In July
# 2026 a user [reported](https://github.com/sgl-project/sglang/issues/32549) what this does when long prompts keep coming: those who decoded got a step about once in 24 seconds.
#
# <details><summary>Could they not run along with a chunk?</summary>SGLang cuts prompts into chunks, too, but nobody decodes between
# them. This was with <i>speculative decoding</i>: something
# small guesses several tokens, and the model checks them in one forward. In SGLang such decodes cannot run along with a
# chunk.</details>
# <details><summary>What our clock leaves out</summary>On a GPU a step is cheaper if it was recorded before and is only
# replayed (a <i>CUDA graph</i>, appendix A2). Where every request runs one token, steps look alike, and one recording serves
# many of them. A step with a chunk of a prompt looks different each time. vLLM 0.32 records pure decode steps whole, and steps
# with prompts only in pieces, with attention between them. By default it replays nothing in a step of more than 512 tokens (1,024 on
# the newest GPUs of data centres). So a prompt in a step can make it slower than its tokens
# say.</details>

# %%
print(box("step_order"))

# %% [markdown]
# ## 8 · Throughput against latency
#
# **Objective:** choose how many requests run at once.
#
# *Throughput* counts the tokens of all requests per second. *Latency* is what one user waits for, here the
# TPOT. `max_num_seqs` trades one for the other. Sixteen requests of 16 new tokens wait from the start.

# %%
predictions.ask(
    "sixteen",
    "On the virtual clock, we go from 1 request at once to 16. What happens to the time between two tokens of a "
    "request?",
    ["it stays nearly the same", "it grows 2 to 3 times", "it grows 8 times", "it grows 16 times"],
)

# %% jupyter={"source_hidden": true}
SIZES = [1, 2, 4, 8, 16]
sixteen = [Arrival(0.0, prompts[i % 3], wants(16), f"r{i}") for i in range(16)]


def at_once(size, clock, model=model):
    """Tokens per second of all, TPOT in ms (p50), and when each request ends."""
    limits = {"max_num_seqs": size, "max_num_batched_tokens": 64}
    engine = make_engine(clock=clock, model=model, **limits)
    start = clock.now()
    outs = serve(engine, sixteen)
    tpot = percentile([out.metrics.tpot for out in outs], 50)
    ends = [out.metrics.finished - start for out in outs]
    return 256 / (clock.now() - start), 1000 * tpot, ends


virtual = {size: at_once(size, VirtualClock()) for size in SIZES}
cheap = {size: at_once(size, VirtualClock(0.010, 0.00005)) for size in SIZES}

# %% tags=["figure-throughput-latency"] jupyter={"source_hidden": true}
from tutorial_engine.viz import throughput_latency

growth = virtual[16][1] / virtual[1][1]
if answered := predictions.reveal("sixteen", sum(growth > limit for limit in (1.5, 4, 12))):
    print(f"16 at once: {virtual[16][0] / virtual[1][0]:.1f} times the tokens per second,", end=" ")
    print(f"{growth:.1f} times the TPOT")
    ends = zip(virtual[16][2], virtual[1][2], strict=True)
    later = [f"r{i}" for i, (many, one) in enumerate(ends) if many > one]
    print(f"all requests end sooner than one at a time, except {' and '.join(later)}")
    for a, b in ((1, 2), (8, 16)):
        tokens_more, tpot_more = (100 * (virtual[b][i] / virtual[a][i] - 1) for i in (0, 1))
        print(f"from {a} to {b}: {tokens_more:.0f} % more tokens, {tpot_more:.0f} % more TPOT")
prices = {"0.05 ms a token, as on a large GPU": cheap, "1 ms a token": virtual}
curves = {name: [(n, *one[n][:2]) for n in SIZES] for name, one in prices.items()}
throughput_latency(curves, "TPOT", "requests at once (max_num_seqs)") if answered else None

# %% [markdown]
# Each point is an engine with another `max_num_seqs`. Why 2 to 3 times? At 1 ms a token, a step with one request lasts
# 10 + 1 ms, and one with 16 lasts 10 + 16 ms. (A little more here: the rest of the prompts is read between the first two
# tokens.) The first doubling is cheap: 79 % more tokens for 9 % more TPOT. The last is not. A server is tuned by choosing a point on
# such a curve. At the price of a large GPU TPOT hardly grows. (0.05 ms a token and 10 ms a forward are roughly
# a model of 16 billion weights in bf16 on an H100. Nothing was measured there.)

# %%
predictions.ask(
    "here",
    "The virtual clock has chosen prices. Measured on the machine that runs this notebook, how many "
    "times the tokens per second do 16 at once give, compared with one at a time?",
    ["less than 2 times", "2 to 4 times", "more than 4 times"],
)

# %% tags=["nbval-ignore-output"] jupyter={"source_hidden": true}
from tutorial_engine.engine import WallClock

rounds = [{size: at_once(size, WallClock()) for size in SIZES} for _ in range(3)]  # in turn
here = {size: max(each[size] for each in rounds) for size in SIZES}  # the fastest of each
gains = [one[16][0] / one[1][0] for one in (here, virtual)]  # measured, and by the chosen prices
if predictions.reveal("here", sum(gains[0] > limit for limit in (2, 4))):
    for size, (speed, tpot, _) in here.items():
        print(
            f"{size:2} at once, here: {speed:5.0f} tokens/s in all, {tpot:4.1f} ms a token for each"
        )
    print(f"16 at once: {gains[0]:.1f} times the tokens per second; virtual clock: {gains[1]:.1f}")

# %% [markdown]
# Here a forward has a price of its own as well: it reads the weights and starts its operations, for one token
# as for 16. So sharing it pays.
#
# **Two numbers that seem to disagree.** Suppose that a server reports 529 tokens per second and 108 ms per
# token. But 529 tokens in a second are one token every 2 ms.

# %%
predictions.ask(
    "paradox",
    "529 tokens per second in all, and 108 ms from one token of a request to its next. Both are true. "
    "How many requests run at once?",
    ["about 5", "about 57", "about 529"],
)

# %%
together = round(529 * 0.108)  # tokens per second in all · seconds per token of one
if predictions.reveal("paradox", f"about {together}"):
    print("our own engine, tokens per second · seconds per token:")
    for size, (speed, tpot, _) in virtual.items():
        print(f"{size:2} at once: {speed:3.0f} · {tpot / 1000:.3f} = {speed * tpot / 1000:4.1f}")

# %% [markdown]
# Throughput counts the tokens of all users, and TPOT those of one user. So 1 / throughput is not the TPOT.
# And throughput · TPOT is the number of requests that run at once. (This is *Little's law*. In our runs the product is
# a little smaller: a request also holds its place while its prompt is read, and TPOT leaves that longer step out.)

# %% [markdown]
# **When does a batch gain nothing?** The gain comes from the price of a forward, which all requests share. On the
# large GPU it is 10 of the 15 ms of a step with a hundred tokens, so servers run large batches. If a forward had no price of its own, a batch would gain nothing:
# each token would cost as much as before. It also gains nothing where nobody shares it: requests that come far apart.
#
# <details><summary>When a GPU gets there</summary>With a batch that is large enough the arithmetic of the tokens is the
# limit, and a larger batch gains nothing more: the right side of the roofline of notebook 02. And each request reads its own
# K and V, which a batch does not share. With long texts this becomes the limit earlier.</details>
#
# ## 9 · A long prompt comes
#
# **Objective:** protect the requests that decode from a long prompt.
#
# A decodes. After 100 ms L comes, with 106 prompt tokens. First the budget is so large that the prompt of
# L runs in one step.

# %% jupyter={"source_hidden": true}
LONG = tokenizer.encode(" ".join([PROMPTS[0]] * 9)).ids
decoding = Arrival(0.0, prompts[0], wants(24), "A")
newcomer = Arrival(0.1, LONG, wants(4), "L")


def with_budget(budget, per_token=0.001):
    """The run as a trace, the outputs of A and L, and tokens (prompts too) per second."""
    clock = VirtualClock(0.010, per_token)
    engine = make_engine(clock=clock, max_num_batched_tokens=budget, max_model_len=160)
    outs = serve(engine, [decoding, newcomer])
    trace = engine.trace.trace()
    ran = sum(sum(one.values()) for one in steps(trace))
    return trace, outs, ran / engine.clock.now()


whole, outs_whole, speed_whole = with_budget(128)
gaps = [round(1000 * gap) for gap in outs_whole[0].metrics.itl]
print(len(LONG), "prompt tokens of L; the gaps between two tokens of A in ms:")
print(gaps)

# %% [markdown]
# One gap lasts 117 ms: A stands still while the prompt of L runs. 117 ms are 10 for the forward, 106 for L
# and 1 for A.

# %%
predictions.ask(
    "gap",
    "Now at most 16 tokens run in a step, so the prompt of L is cut into chunks. What is the longest gap "
    "of A, in ms?",
    ["11", "16", "26", "117"],
)

# %% tags=["figure-chunks"]
from tutorial_engine.viz import itl_over_time

chunked, outs_chunked, speed_chunked = with_budget(16)
chosen = predictions.reveal("gap", round(1000 * max(outs_chunked[0].metrics.itl)))
itl_over_time({"whole prompt": whole, "chunks": chunked}, "A") if chosen else None

# %% [markdown]
# This is **chunked prefill**: the prompt is spread over several steps that decode as well. *Why does a
# smaller token budget make the inter-token latency better?* A decoding request gets a token in every step, as long as the
# budget is at least the number of decoding requests. Those who run are asked first, in the
# order in which they got their places. A half-read prompt takes all of the budget that is left, so nobody gets a place behind it: it is always
# the last. So all who decode are asked before it. (This holds as long as `cap` is not set.) Their gap is the length of one step, and no step runs more tokens than the budget.

# %% [markdown]
# ### Exercise 4: choose the budget (3 minutes)
#
# You promise A that no gap is longer than `max_gap_ms`, whatever prompts come. Which is the largest token budget that keeps
# the promise? The sum for the gap of 117 ms above shows how long a step lasts.
#
# <details><summary>Hint</summary>Solve 10 ms + budget · 1 ms = gap for the budget. A budget is a whole
# number of tokens: round down.</details>


# %% tags=["exercise"]
def largest_budget(max_gap_ms):
    """The largest token budget with which no gap of A can be longer than max_gap_ms."""
    ### BEGIN SOLUTION
    return int(max_gap_ms - 10)
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_budget

check_budget(largest_budget, lambda budget: 1000 * max(with_budget(budget)[1][0].metrics.itl))

# %%
predictions.ask(
    "speed",
    "With the budget of 16 the engine runs the same tokens. Compared with the budget of 128, how many "
    "tokens per second does it run?",
    ["more", "as many", "fewer"],
)

# %% tags=["figure-budget"] jupyter={"source_hidden": true}
from tutorial_engine.viz import sweep

BUDGETS = [4, 8, 16, 32, 64, 128]
by_budget = {budget: with_budget(budget) for budget in BUDGETS}
longest = {b: 1000 * max(outs[0].metrics.itl) for b, (_, outs, _) in by_budget.items()}
ttft_of_l = {b: 1000 * outs[1].metrics.ttft for b, (_, outs, _) in by_budget.items()}
texts = [[out.outputs[0].token_ids for out in outs] for _, outs, _ in by_budget.values()]
ratio = speed_chunked / speed_whole
if chosen := predictions.reveal("speed", sum(ratio < limit for limit in (1.01, 0.99))):
    print("the same tokens with every budget:", all(one == texts[0] for one in texts))
    for b, (by_b, _, speed) in by_budget.items():
        told = f"longest gap {longest[b]:3.0f} <= {10 + b:3} ms, TTFT of L {ttft_of_l[b]:3.0f} ms"
        print(f"budget {b:3}: {told}, {by_b.num_steps} steps, {speed:.0f} tokens/s")
lines = {"longest gap of A": [*longest.values()], "TTFT of L": [*ttft_of_l.values()]}
sweep(BUDGETS, lines, "token budget of a step", "ms") if chosen else None

# %% [markdown]
# | | large budget | small budget |
# |---|---|---|
# | longest gap of A | long: it lasts as long as the prompt of L | short: at most 10 ms + budget · 1 ms |
# | first token of L | soon | later |
# | tokens run per second, prompts too | 372 | 372 with 16, but fewer with 8 or 4 |
#
# So the budget is a dial between the users who decode and the user who comes. A smaller one gains no throughput. From 16 on it
# costs none here, because A needs these 24 steps anyway. With 8 or 4 the prompt of L needs more steps: 28 and 43.

# %% [markdown]
# **Which budget does a real server have?** Not 16. Here is a prompt of 8,000 tokens at the price of a large GPU, 0.05 ms a
# token, while A decodes:

# %%
import math

for b in (16, 512, 2048, 8192):  # one token of each step is A's
    num_steps = math.ceil(8000 / (b - 1))
    ttft = 10 * num_steps + 0.05 * (8000 + num_steps)
    gap = 10 + 0.05 * min(b, 8001)
    print(f"budget {b:5,}: longest gap of A {gap:4.0f} ms, TTFT of the prompt {ttft:5,.0f} ms")

# %% [markdown]
# With 16, each step reads all weights for almost no work. vLLM 0.32 chooses the budget (`max_num_batched_tokens`) by the
# GPU: its server takes 8,192 on an H100, and 2,048 on smaller GPUs and on the A100. (Attention is left out here: a real prompt of 8,000
# tokens takes longer, and each chunk reads the K and V of all earlier chunks again.)
#
# <details><summary>The rule, if no option is set</summary>The server takes 8,192 on GPUs with 70 GiB or more, such as H100 and H200 (but not
# on an A100), 16,384 from 160 GiB on, and 2,048 on smaller ones and on the A100. <code>LLM(...)</code> in a script takes
# 16,384 where the server takes 8,192, and 8,192 where it takes 2,048.</details>

# %% [markdown]
# ## 10 · Too many users
#
# **Objective:** see what the slowest users feel when more users come.
#
# 48 users come at random times (a *Poisson process*): the chance that one comes is the same in every millisecond, whoever came
# before. They have the `prompts` and `lengths` of section 1. At most 8 run at once.
#
# How many users per second can be served? When all places are taken, a user takes part in 11.75 steps, one
# for each new token. Eight share the 10 ms of each: 11.75 · 10 ms / 8 = 14.7 ms. The user also runs
# 6.67 prompt tokens and 10.75 new ones (the last never runs): 17.4 tokens, 1 ms each. These are means:

# %%
prompt, new = 6.67, sum(lengths) / len(lengths)  # tokens of a user, on average
shared_steps = new * 10 / 8  # ms: the steps of 8 users are shared
one_user = shared_steps + prompt + new - 1  # 1 ms a token; the last new token never runs
print(
    f"{shared_steps:.1f} + {prompt + new - 1:.1f} = {one_user:.1f} ms: {1000 / one_user:.0f} users/s"
)

# %%
predictions.ask(
    "load",
    "At 16 requests per second the p95 of TTFT is about 40 ms. What is it at 64, for these 48 users?",
    ["about 40 ms: they run together", "about 160 ms: four times the users", "more than 400 ms"],
)

# %% jupyter={"source_hidden": true}
from tutorial_engine.lab import poisson_times

RATES = [8, 16, 24, 32, 64]
wanted = [lengths[i % 8] for i in range(48)]


def under_load(rate, policy=Scheduler, users=48, seed=1):
    """Tokens per second, and p95 of TTFT in ms, of users who come at random times."""
    engine = make_engine(policy, max_num_seqs=8, max_num_batched_tokens=64)
    come = zip(poisson_times(rate, users, seed=seed), prompts * users, wanted * 2, strict=False)
    outs = serve(engine, [Arrival(t, prompt, wants(n)) for t, prompt, n in come])
    speed = sum(len(out.outputs[0].token_ids) for out in outs) / engine.clock.now()
    return speed, percentile([1000 * out.metrics.ttft for out in outs], 95)


load = {
    name: {rate: under_load(rate, policies[name]) for rate in RATES}
    for name in ("one rule", "static batching")
}
longer = under_load(64, users=96)

# %% tags=["figure-load"] jupyter={"source_hidden": true}
p95 = load["one rule"][64][1]
if chosen := predictions.reveal("load", sum(p95 > limit for limit in (100, 400))):
    for name, by_rate in load.items():
        told = [f"{rate}/s {late:.0f}" for rate, (_, late) in by_rate.items()]
        print(f"{name:16} p95 of TTFT in ms: {', '.join(told)}")
    print(f"one rule, 64/s, twice as many users: {longer[1]:.0f}, and {longer[0]:.0f} tokens/s")
    draws = [f"{under_load(24, seed=seed)[1]:.0f}" for seed in (1, 2, 3, 4)]
    print("one rule, 24/s, four draws of the times:", *draws)
curves = {
    name: [(rate, *point) for rate, point in by_rate.items()] for name, by_rate in load.items()
}
full = 1000 * new / one_user  # tokens of a user / the seconds that the user costs
throughput_latency(curves, "TTFT p95", "requests per second", full) if chosen else None

# %% [markdown]
# As long as there is room, throughput follows the users, and the latency hardly changes. Near the number of users per
# second that you counted, chance decides. The last line draws the times of arrival four times, at 24 a second: one draw, that of the picture, is
# three times another. Above 31 users a second there is no fixed p95: it grows while users keep coming, and with twice as many users it is nearly doubled. (At 64 a second, throughput is 332 tokens
# per second, below the dotted line at 366: at the beginning and at the end of so short a run, places are empty. In the run
# with twice as many users it is 349.)

# %% [markdown]
# More places would help, but the 17.4 tokens of a user cost 17.4 ms in any batch. So no number of places serves more
# than 57 users a second. At 64, users must wait or be refused, or the owner adds machines: no policy serves more than the
# machine can. A good one wastes no places and decides who waits. Static batching also wastes places, so its users wait long even if few
# come.

# %% [markdown]
# ## 11 · Fairness
#
# **Objective:** write a policy that keeps a promise.
#
# There is one place. A long request L comes at 0 ms, and with it the first of twelve short ones, one every
# 40 ms. A short one takes about 70 ms, so a queue grows. You have promised your users two things: the mean
# TTFT is at most 300 ms, and nobody waits more than 600 ms for the first token. (Such a promise is called a
# service level objective, SLO.) Your `ttft_and_tpot` measures whether you keep it.

# %% jupyter={"source_hidden": true}
crowd = [Arrival(0.0, LONG, wants(8), "L")]
crowd += [Arrival(0.04 * i, prompts[2], wants(6), f"s{i}") for i in range(12)]
one_place = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 160}
ttfts, turns = {}, {}  # of each policy: TTFT by request in ms, and its trace


def measure(name, engine):
    times = {out.request_id: out.metrics for out in serve(engine, crowd)}
    your = {
        who: server.parts("ttft_and_tpot", m.arrival, m.token_times) for who, m in times.items()
    }
    ttfts[name] = {who: 1000 * float(ttft) for who, (ttft, _) in your.items()}
    turns[name] = engine.trace.trace()


# %% jupyter={"source_hidden": true}
from tutorial_engine.trace import Admitted


def mean_of(name):
    return sum(ttfts[name].values()) / len(crowd)


def before_l(name):
    """How many short ones are admitted before L."""
    order = [event.request_id for event in turns[name].events if isinstance(event, Admitted)]
    return order.index("L")


def kept(name):
    """Which of the two promises a policy keeps."""
    return mean_of(name) <= 300, max(ttfts[name].values()) <= 600


# %% jupyter={"source_hidden": true}
def tell(*names):
    print(f"{'TTFT in ms':26}mean           longest wait     short before L  TTFT of L")
    for name in names:
        mean, longest = ("kept  " if one else "broken" for one in kept(name))
        last = max(ttfts[name], key=ttfts[name].get)
        told = f"{mean_of(name):4.0f} {mean}    {ttfts[name][last]:4.0f} {longest} {f'({last})':5}"
        print(f"{name:26}{told}   {before_l(name):6}     {ttfts[name]['L']:9.0f}")


measure("first come, first served", make_engine(**one_place))
tell("first come, first served")

# %% [markdown]
# The mean is too large. All the short ones wait for L, which came first: this is *head-of-line blocking*. (The last
# columns say how many short ones were admitted before L, and its TTFT.)
#
# ### Exercise 5: shortest prompt first (5 minutes)
#
# A first idea: admit the request with the shortest prompt. (How long the output will be nobody knows.) `self.waiting`
# holds the requests that wait: a `deque`, which you can loop over, but which has no `sort`. Each request has `num_prompt_tokens` and `arrival`. Of equally short ones, the first to arrive
# is next. Return one of them, and do not remove it.
#
# <details><summary>Hint</summary><code>min(words, key=len)</code> is the shortest word: <code>key</code> is a function,
# and <code>min</code> compares what it gives. Of equal ones <code>min</code> keeps the first, and
# <code>self.waiting</code> is in order of arrival here.</details>


# %% tags=["exercise"]
class ShortestFirst(Scheduler):
    """Of those who wait, the one with the shortest prompt is next."""

    def next_waiting(self):
        ### BEGIN SOLUTION
        return min(self.waiting, key=lambda request: request.num_prompt_tokens)
        ### END SOLUTION


# %%
from tutorial_engine.learn import check_shortest

server.use(ShortestFirst, check_shortest)

# %%
predictions.ask(
    "starve",
    "Suppose that your policy is written correctly. Which of the two promises does it keep?",
    ["both", "only the mean", "only that nobody waits for long"],
)

# %%
server.use(ShortestFirst, check_shortest)  # in case that you come back from exercise 6
measure("shortest first", server.engine(**one_place))
answer = {(True, True): 0, (True, False): 1, (False, True): 2}[kept("shortest first")]
if predictions.reveal("starve", answer):
    tell("first come, first served", "shortest first")

# %% [markdown]
# As long as short requests come, L waits: it *starves*. No error says so, all tokens are right, and the mean
# is the best that you have seen. Only the longest wait tells. (`server` now uses your policy, also in the cells above.)
#
# ### Exercise 6: nobody starves (10 minutes)
#
# Write a policy between the two. The shortest prompt is next, as before, and of equally short ones the first to
# arrive. But a request that has waited for at least `patience` seconds goes before all others. If several have waited
# so long, the one that arrived first is next. `self.now()` is the time on the engine's clock. Read the limit as
# `self.patience`: the check changes it.
#
# <details><summary>Hint</summary><code>request.arrival</code> is the time at which a request came. Make a list
# of those who have waited long enough, and take the <code>min</code> by arrival. If it is empty, choose the
# shortest prompt.</details>


# %% tags=["exercise"]
class Fair(Scheduler):
    """The shortest prompt is next; but who has waited for at least `patience` seconds is first."""

    patience = 0.1  # seconds on the engine's clock

    def next_waiting(self):
        ### BEGIN SOLUTION
        late = [one for one in self.waiting if self.now() - one.arrival >= self.patience]
        if late:
            return min(late, key=lambda request: request.arrival)
        return min(self.waiting, key=lambda request: request.num_prompt_tokens)
        ### END SOLUTION


# %%
from tutorial_engine.learn import check_fair

server.use(Fair, check_fair)

# %%
engine = server.engine(**one_place)
print(f"patience: {engine.scheduler.patience:g} s")
measure("fair", engine)
three = ["first come, first served", "shortest first", "fair"]
tell(*three)

# %% [markdown]
# With a patience of 0.1 s, which is 100 ms, only the second promise is kept. Two short ones take 136 ms. Then L has
# waited for more than 100 ms and goes next, and the ten other short ones wait until it is finished. That is nearly first come, first served.

# %% [markdown]
# First come, first served lets no short one go before L, and shortest first lets all twelve:
#
# | short ones before L | mean | TTFT of L |
# |---|---|---|
# | 0 | 351 ms | 126 ms |
# | 12 | 227 ms | 942 ms |
# | promised | at most 300 ms | at most 600 ms |
#
# L lasts 203 ms (126 to its first token, then 7 · 11), and a short one 68 ms (13 + 5 · 11). A short one that passes L is served 203 ms sooner, and L 68 ms later. So the sum of the 13
# waits falls by 203 − 68 = 135, the mean by 10.4 ms.

# %%
predictions.ask(
    "patience",
    "How many short ones can be served before L, so that both promises are kept?",
    ["2 or 3", "5 or 6", "8 or 9", "no number keeps both"],
)

# %% tags=["figure-patience"] jupyter={"source_hidden": true}
server.use(Fair, check_fair)  # in case that exercise 6 was run again
first, last = three[:2]
later = (ttfts[last]["L"] - ttfts[first]["L"]) / 12  # ms that L waits for each short one
ends = [round(later * i) for i in range(13)]  # when L has waited for 0, 1, ... 12 of them
tried = [f"fair, patience {max(0, end - 1)} ms" for end in ends]  # it ends just before
for name, end in zip(tried, ends, strict=True):
    engine = server.engine(**one_place)
    engine.scheduler.patience = max(0, end - 1) / 1000  # your policy, with another patience
    measure(name, engine)
found = sorted({before_l(name) for name in tried if all(kept(name))})
if chosen := predictions.reveal("patience", " or ".join(map(str, found)) or 3):
    less = (mean_of(first) - mean_of(last)) / 12  # of the mean wait, for each short one
    print(f"each short one before L: L {later:.0f} ms later, the mean {less:.1f} ms less")
    print(f"four take {ends[4]} ms, five {ends[5]} ms, six {ends[6]} ms")
    tell(*tried[3:9])
worst, means = [max(ttfts[name].values()) for name in tried], [mean_of(name) for name in tried]
both, promised = {"longest wait": worst, "mean": means}, {"longest wait": 600, "mean": 300}
axis = "patience in ms"
sweep(ends, {"TTFT": both}, axis, "ms", at_most=promised, steps=True) if chosen else None

# %% [markdown]
# Your policy does not count short ones: it has a time, `patience`. A short one takes 68 ms. So five short ones go before L if `patience` is above
# 272 ms and at most 340 ms, and six from there to 408 ms. Where the picture is flat nothing changes: the policy is asked only when a place
# is free. Patience 0 is first come, first served, and a very large one shortest first. Another crowd needs another
# patience. Set `patience` in your class to a value that keeps both promises, and run its cells again: the line "fair" should
# say "kept" twice. (vLLM 0.32 has two orders: first come, first served, and `priority`: the smallest number goes first.)

# %% [markdown]
# ## 12 · Which test finds which bug?
#
# **Objective:** know what a test of a scheduler has to look at.
#
# Four bugs are planted into the engine, one after the other. Here are their changes: the line with - is right, and the
# line with + is the bug. What must a test run to see each?
#
# - *a neighbour's row*: `[::-1]` reverses the order of the cache rows, only in a step where each request runs one token.
#   `context_slots` are the slots that a request reads; `_on` only puts them on the device.
# - *one generator*: `torch.default_generator` is the one that all of PyTorch shares.
# - *the whole budget*: `cap` is a limit that is not set here.

# %%
from tutorial_engine.learn import BUGS_03, diff, planted

for name, bug in BUGS_03.items():
    print(f"{name}, in {bug[0].__name__}.{bug[1]}\n{diff(bug)}\n")

# %%
predictions.ask(
    "zoo",
    "A test runs A, then B, then C, each alone in the engine, and compares the sampled tokens (each request "
    "has a seed) with the right ones. "
    "The budget is 8. How many of the four bugs does it find?",
    ["none of them", "one", "all four"],
)

# %% jupyter={"source_hidden": true}
warm = [SamplingParams(max_tokens=8, temperature=1.0, seed=i, ignore_eos=True) for i in (5, 6, 7)]


def run_them(chosen):
    """New tokens of the chosen requests, served together, and the fullest step."""
    engine = make_engine(max_num_batched_tokens=8)
    for i in chosen:
        engine.add_request(names[i], prompts[i], warm[i])
    texts = {out.request_id: out.outputs[0].token_ids for out in engine.run()}
    return texts, max(sum(ran.values()) for ran in steps(engine.trace.trace()))


def each_alone():
    return {names[i]: run_them([i])[0][names[i]] for i in range(3)}


# %% jupyter={"source_hidden": true}
truth, found_alone, lines = each_alone(), 0, []
for bug in BUGS_03:
    with planted(bug, BUGS_03):
        single, (together, fullest) = each_alone(), run_them(range(3))
    found_alone += single != truth
    tests = {"alone": single != truth, "together": together != truth, "budget": fullest > 8}
    found = [test for test, sees_it in tests.items() if sees_it]
    lines.append(f"{bug:35}found by the tests: {', '.join(found)}")
if predictions.reveal("zoo", {0: "none of them", 1: "one", 4: "all four"}[found_alone]):
    print("\n".join(lines))

# %% [markdown]
# "alone" and "together" compare the tokens of sampled requests, and "budget" looks at the fullest step.
#
# - The half-read prompt: A has more prompt tokens than the budget, so even alone it is read in chunks.
# - The neighbour's row: whoever is alone has no neighbour.
# - The one generator: alone, a request makes all draws itself. In company the others draw in between.
# - The whole budget: all tokens are right, always. Only the limit tells. An engine whose memory is planned for 8 tokens a step may
#   fail there.
#
# So test a scheduler with several requests, in chunks, and watch its limits.

# %% [markdown]
# ## 13 · The ledger grows
#
# **Objective:** check, in fp32, that the company of others changes no token.
#
# The engine joins the equality ledger of notebook 02: with requests in one batch, with small chunks, in
# random order, beside neighbours, and beside one that is *aborted* (its user leaves: its row is free at once).
# transformers and the recorded logits of vLLM are in it, and `server` with your parts.

# %% jupyter={"source_hidden": true}
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tutorial_engine.lab import (
    engine_paths,
    equality_ledger as ledger,
    loop_path,
    our_paths,
    run_transformers,
    vllm_path,
)

logging.disable_progress_bar()
theirs = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
paths = our_paths(model) | {"transformers": loop_path(lambda n: run_transformers(theirs))}
paths |= engine_paths(model, neighbours=[LONG[:30], LONG[5:12]])
paths["vLLM 0.32, recorded here"] = vllm_path
paths[server.label] = server.path(max_num_batched_tokens=4, max_num_seqs=2)
rows = ledger(paths, prompts, num_tokens=12)
print(f"{sum(r.ok for r in rows)} of {len(rows)} paths ✔:", *[r.path for r in rows], sep="\n  ")

# %% [markdown]
# Your parts serve whole stories, up to the end of the text. The policy is your `Fair` of exercise 6.

# %%
run = server.serve(PROMPTS, SamplingParams(max_tokens=400), max_num_batched_tokens=16)

# %% [markdown]
# ## What you can do now
#
# You can plan any step by hand, read a timeline, and tell TTFT from TPOT. You can choose a policy, a token budget and a
# batch size for a server, and say what each costs. You know which test finds which bug. Rows waste memory: the
# hatched slots of the explorer stay empty. The next notebook, `04_paged_cells`, does better.
#
# In papers, planning anew for each step is called *iteration-level scheduling*
# ([Orca](https://www.usenix.org/conference/osdi22/presentation/yu), 2022), and by NVIDIA *in-flight batching*. Chunks beside
# those who decode come from [SARATHI](https://arxiv.org/abs/2308.16369) (2023).
#
# <details><summary>Not in this lesson</summary>
# <p><b>Speculative decoding.</b> A small model guesses tokens, and the large one checks several in one forward. It is
# the same subtraction: the guesses are known and not computed. vLLM: <code>num_tokens_with_spec +
# num_output_placeholders − num_computed_tokens</code>.</p>
# <p><b>Overlap.</b> The CPU plans step n + 1 while the GPU runs step n: async scheduling in vLLM, the overlap scheduler
# in SGLang. The token that is not known yet has a placeholder, and this is the second term above.</p>
# <p><b>Replicas.</b> Several copies of a model run behind a router. Prefill and decode can run on different machines.
# <i>Goodput</i> counts the requests per second that keep all promises (SLO).</p>
# <p>Where to read on: <a href="../docs/reading-on.md">Reading on</a>.</p></details>

# %%
print(predictions.score())
