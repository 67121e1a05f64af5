# %% [markdown]
# # 03 · The scheduler
#
# One model, many users. Build the rule that decides who runs how many tokens in each step, watch it at
# work, and measure when batching wins, and when it does not. About 90 minutes.
#
# You should have done notebook 02 (or know prefill, decode and what a KV cache row is).

# %%
import torch

from tutorial_engine.engine import EngineConfig, LLMEngine, Scheduler, VirtualClock
from tutorial_engine.engine.generate import generate
from tutorial_engine.learn import Predictions, show_source
from tutorial_engine.model import TINY, load_model, load_tokenizer
from tutorial_engine.sampling import SamplingParams
from tutorial_engine.trace import Recorder

torch.set_grad_enabled(False)
torch.set_num_threads(1)  # for a model this small a second thread costs more than it brings
predictions = Predictions()
model, tokenizer = load_model(), load_tokenizer()
PROMPTS = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]
prompts = [tokenizer.encode(text).ids for text in PROMPTS]
print([len(ids) for ids in prompts], "tokens")

# %% [markdown]
# ## 1 · One forward for all
#
# **Objective:** count forwards. Three requests want 6, 3 and 5 new tokens. One after the other, each
# new token costs a forward: 14 in all. Notebook 02 showed that a few rows more cost a forward little. So
# run them together.

# %%
WANTED = [6, 3, 5]
params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in WANTED]
alone = [
    generate(model, [ids], own, tokenizer=tokenizer)[0].outputs[0].token_ids
    for ids, own in zip(prompts, params, strict=True)
]
print("new tokens:", [len(ids) for ids in alone])

# %%
predictions.ask(
    "forwards",
    "All three are in the engine at once, and a step is one forward for everybody. How many forwards?",
    ["14", "6", "3"],
)

# %%
engine = LLMEngine(model, tokenizer)
outputs = engine.generate(prompts, params)
predictions.reveal("forwards", str(engine.runner.num_forwards))
print("same tokens as alone:", [out.outputs[0].token_ids for out in outputs] == alone)

# %% [markdown]
# The longest decides, not the sum: that is *batching*. What if a fourth request comes in the middle? It
# joins at the next step. That is *continuous* batching, and the part of an engine that arranges it is the
# **scheduler**.

# %% [markdown]
# ## 2 · The one rule
#
# **Objective:** write it. Each request has tokens that are *known* (prompt and output so far) and tokens
# that are *computed* (their K and V are in the cache).

# %% [markdown]
# A step runs some of the difference, within a **token budget**. There is no prefill mode and no decode
# mode: a new prompt has a large difference, a request that decodes has a difference of 1.
#
# ### Exercise 1: how many tokens? (3 minutes)
#
# <details><summary>Hint</summary>Two limits: what is left of the request, and what is left of the
# budget.</details>


# %% tags=["exercise"]
def num_tokens_to_run(num_tokens, num_computed_tokens, budget_left):
    """How many of its tokens a request may run in this step."""
    ### BEGIN SOLUTION
    return min(num_tokens - num_computed_tokens, budget_left)
    ### END SOLUTION


# %%
from tutorial_engine.learn.checks_03 import check_num_tokens

check_num_tokens(num_tokens_to_run)

# %% [markdown]
# Who is asked first? Those who run already, in the order in which they came in; then those who wait, while
# there is budget left and no more than `max_num_seqs` run.
#
# ### Exercise 2: plan a step (10 minutes)
#
# <details><summary>Hint</summary>Go through <code>running</code>, then through the first
# <code>max_num_seqs - len(running)</code> of <code>waiting</code>. Subtract from the budget what each one
# runs.</details>


# %% tags=["exercise"]
def plan(running, waiting, budget, max_num_seqs):
    """running, waiting: lists of (name, tokens left to run). Returns {name: tokens in this step}."""
    ### BEGIN SOLUTION
    planned = {}
    for name, left in [*running, *waiting[: max_num_seqs - len(running)]]:
        if budget:
            planned[name] = num_tokens_to_run(left, 0, budget)
            budget -= planned[name]
    return planned
    ### END SOLUTION


# %%
from tutorial_engine.learn.checks_03 import check_plan

check_plan(plan)

# %% [markdown]
# The package's rule has two limits more: a cap for one prompt's chunk, and a switch that forbids chunks.
# (*Preempted* in the source: memory ran out, and a request had to give up its K and V. Its difference is
# large again: same rule.)

# %%
show_source(Scheduler.num_tokens_to_run)
show_source(Scheduler.schedule)

# %% [markdown]
# ## 3 · Three requests, a budget of 8
#
# **Objective:** step by hand. A has 10 prompt tokens, B 7, C 3. At most 8 tokens run in a step. Time is a
# **virtual clock**, so that it is the same on every laptop: 10 ms a forward, 1 ms a token of it.

# %%
names = ["A", "B", "C"]


def make_engine(policy=Scheduler, clock=None, **limits):
    config = EngineConfig(**({"max_model_len": 64} | limits))
    parts = {"scheduler": policy, "clock": clock or VirtualClock(), "trace": Recorder()}
    return LLMEngine(model, tokenizer, config, **parts)


engine = make_engine(max_num_batched_tokens=8)
for name, ids, own in zip(names, prompts, params, strict=True):
    engine.add_request(ids, own, name)
print("waiting:", engine.state().waiting)
first, second = engine.step(), engine.step()  # two steps; what they ran is asked below

# %%
predictions.ask(
    "second",
    "Step 0 runs the first 8 tokens of A. What does step 1 run?",
    ["A 2", "A 2, B 6", "A 2, B 7, C 3", "B 7, A 1"],
)

# %%
from tutorial_engine.learn.dry_run import steps

ran = steps(engine.trace.trace())[1]
predictions.reveal("second", ", ".join(f"{name} {n}" for name, n in ran.items()))

# %%
predictions.ask(
    "token",
    "Which requests have got a new token in step 1?",
    ["only A", "A and B", "nobody: prompts come first"],
)

# %%
got = {result.request_id for result in second}
predictions.reveal("token", {1: "only A", 2: "A and B", 0: "nobody: prompts come first"}[len(got)])
for name, state in sorted(engine.state().requests.items()):
    known = len(state.token_ids)
    print(f"{name}: {state.status}, {state.num_computed_tokens} of {known} known tokens computed")

# %% [markdown]
# A chunk that stops short of the end yields no token: what follows it is known, the prompt says so. On to
# the end. Each
# number is a count of tokens; all tokens of a step go through the model in one forward.

# %%
while engine.has_unfinished_requests:
    engine.step()
for number, ran in enumerate(steps(engine.trace.trace())):
    told = ", ".join(f"{name} {n}" for name, n in ran.items())
    print(f"step {number}: {told:15} = {sum(ran.values())} of 8")
print("steps:", engine.num_steps, "forwards:", engine.runner.num_forwards)

# %% tags=["figure-three-requests"]
from tutorial_engine.viz.timeline import timeline

timeline(engine.trace.trace())

# %% [markdown]
# ## 4 · The batch that the model sees
#
# **Objective:** know what "together" means. We plan one step by hand, and look at its batch. The scheduler
# says who runs how many tokens and, in an `allocation`, where these go; the batch lays them end to end.

# %%
from tutorial_engine.model import Batch

by_hand = make_engine(max_num_batched_tokens=8)
for name, ids, own in zip(names, prompts, params, strict=True):
    by_hand.add_request(ids, own, name)
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

# %%
predictions.ask(
    "entries",
    "A runs its 11th token, B its 7th, C its three prompt tokens. How many (query, key) pairs may look "
    "at each other?",
    ["25", "24", "105"],
)

# %% tags=["figure-flat-batch"]
from tutorial_engine.model import causal_mask
from tutorial_engine.viz.batch_plots import flat_batch
from tutorial_engine.viz.tokens import token_labels

seen = [s.stop - s.start for s in batch.context_slots]
pairs = sum(int(causal_mask(q, kv).sum()) for q, kv in zip(batch.query_lens, seen, strict=True))
predictions.reveal("entries", str(pairs))
flat_batch(batch, names, token_labels(tokenizer, batch.input_ids.tolist()))

# %% [markdown]
# Linear layers see five rows and do not ask whose they are: they read each weight once for all. Attention
# goes sequence by sequence; the white parts are never computed, nothing is padded. Then one forward, by
# hand:

# %%
hidden = model(batch, by_hand.runner.attention)
print("hidden [tokens, hidden size]:", list(hidden.shape))
ready = [item.request.request_id for item in scheduled if item.yields_token]
print("get a token:", ready)
next_ids = model.compute_logits(hidden[list(batch.last_token_indices)]).argmax(-1)
print("as alone:", [int(i) for i in next_ids] == [alone[0][1], alone[1][0], alone[2][0]])

# %% [markdown]
# The engine does the same, for ever: schedule, one forward, sample, update, deliver.

# %%
show_source(LLMEngine._step)

# %% [markdown]
# ## 5 · The life of a request
#
# **Objective:** know its states. Only the scheduler moves a request from one to the next; what may follow
# what is a table in the code, and this picture is drawn from it.

# %% tags=["figure-life"]
from tutorial_engine.engine.request import TRANSITIONS, RequestStatus
from tutorial_engine.viz.request_plots import state_machine

state_machine(TRANSITIONS)

# %%
engine = make_engine(max_num_seqs=1)
for name, ids, own in zip("AB", prompts, params, strict=False):
    engine.add_request(ids, own, name)
a, b = engine.requests["A"], engine.requests["B"]
print(a.status.value, b.status.value)
engine.step()
print(a.status.value, b.status.value)
engine.run()
print(a.status.value, b.status.value)
try:
    a.status = RequestStatus.RUNNING
except ValueError as error:
    print(error)

# %% [markdown]
# "Preempted" needs a cache that runs out in the middle of a request. Rows cannot: each has room for the
# longest text. Notebook 04 shows what that costs.
#
# ## 6 · The trace
#
# **Objective:** trust the pictures. The engine writes down what it does, as small frozen events. Every
# timeline here is drawn from such a trace, nothing by hand.

# %%
trace = engine.trace.trace()
for event in trace.events[:9]:
    told = [getattr(event, name, "") for name in ("request_id", "row", "slots", "token_id")]
    print(f"{event.time * 1000:3.0f} ms  step {event.step}  {type(event).__name__:13}", *told)

# %% [markdown]
# From the events alone the state at any step can be rebuilt: queues, tokens, rows, slots. Here a replay is
# compared with the live engine, step by step:

# %%
from tutorial_engine.trace import Trace
from tutorial_engine.trace.history import history

engine = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
for name, ids, own in zip(names, prompts, params, strict=True):
    engine.add_request(ids, own, name)
live = []
while engine.has_unfinished_requests:
    engine.step()
    live.append(engine.state())
trace = engine.trace.trace()
print("steps:", len(live), "events:", len(trace.events))
print("replay = live engine:", [step.after.unfinished() for step in history(trace)] == live)
print("JSON and back:", Trace.from_json(trace.to_json()) == trace)

# %% [markdown]
# ## 7 · What a user feels
#
# **Objective:** know the words. *TTFT*: from arrival to the first token. *ITL*: the gap between two
# tokens. *TPOT*: their mean. On the virtual clock they can be checked by hand. The three come 5 ms apart; two
# may run; 8 tokens a step.

# %%
from tutorial_engine.lab.workload import Arrival, serve

engine = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
arrivals = [
    Arrival(0.005 * i, ids, own, name)
    for i, (name, ids, own) in enumerate(zip(names, prompts, params, strict=True))
]
for out in serve(engine, arrivals):
    m = out.metrics
    ms = [round(1000 * x) for x in (m.queue_time, m.ttft, m.tpot, m.total)]
    print(f"{out.request_id}: waits {ms[0]}, TTFT {ms[1]}, TPOT {ms[2]}, total {ms[3]} ms")

# %% tags=["figure-one-request"]
from tutorial_engine.viz.request_plots import one_request

one_request(engine.trace.trace(), "C")

# %% [markdown]
# ### Exercise 3: TTFT and TPOT (3 minutes)
#
# <details><summary>Hint</summary>n tokens have n − 1 gaps between them.</details>


# %% tags=["exercise"]
def ttft_and_tpot(arrival, token_times):
    """Times in seconds; token_times has one entry per token. Returns (TTFT, TPOT)."""
    ### BEGIN SOLUTION
    tpot = (token_times[-1] - token_times[0]) / (len(token_times) - 1)
    return token_times[0] - arrival, tpot
    ### END SOLUTION


# %%
from tutorial_engine.learn.checks_03 import check_metrics

check_metrics(ttft_and_tpot)

# %% [markdown]
# ## 8 · Four policies
#
# **Objective:** see what each one wastes. *One by one*: a queue. *Static batching*: a batch runs until its
# slowest is done. *Prefill first*: continuous, but a step prefills whole prompts or decodes. *The one
# rule*: both in a step. Eight requests come, one every 30 ms.

# %%
from tutorial_engine.engine.policies import OneByOne, PrefillFirst, StaticBatching

lengths = [6, 24, 4, 12, 8, 24, 4, 12]
eight = [
    Arrival(0.03 * i, prompts[i % 3], SamplingParams(max_tokens=n, ignore_eos=True), "ABCDEFGH"[i])
    for i, n in enumerate(lengths)
]
policies = {
    "one by one": OneByOne,
    "static batching": StaticBatching,
    "prefill first": PrefillFirst,
    "one rule": Scheduler,
}
show_source(StaticBatching.schedule_waiting)

# %%
predictions.ask(
    "policies",
    "Room for 4 requests, 16 tokens a step. Compared with static batching, the one rule needs ...",
    ["about as many steps", "about half as many", "a tenth as many"],
)

# %%
runs, results, texts = {}, {}, {}
for name, policy in policies.items():
    engine = make_engine(policy, max_num_seqs=4, max_num_batched_tokens=16)
    results[name] = serve(engine, eight)
    runs[name] = engine.trace.trace()
    texts[name] = [out.outputs[0].token_ids for out in results[name]]
ratio = runs["one rule"].num_steps / runs["static batching"].num_steps
options = predictions.questions["policies"].options
predictions.reveal("policies", options[0 if ratio > 0.8 else 1 if ratio > 0.25 else 2])
print("same tokens under every policy:", all(t == texts["one rule"] for t in texts.values()))

# %% tags=["figure-policies"]
from tutorial_engine.viz.timeline import timelines

timelines(runs)

# %%
from tutorial_engine.engine.metrics import percentile

print(f"{'':16}{'steps':>6}{'tok/s':>7}{'TTFT p50':>10}{'p95':>6}{'longest gap':>13}   (ms)")
for name, outs in results.items():
    ttft = [1000 * out.metrics.ttft for out in outs]
    gaps = [1000 * gap for out in outs for gap in out.metrics.itl]
    speed = sum(lengths) / max(out.metrics.finished for out in outs)
    p50, p95 = percentile(ttft, 50), percentile(ttft, 95)
    steps_run = runs[name].num_steps
    print(f"{name:16}{steps_run:6}{speed:7.0f}{p50:10.0f}{p95:6.0f}{max(gaps):13.0f}")

# %% [markdown]
# (p50: half are at most this. p95: 19 of 20 are; of eight, that is the worst.) The gaps: prefill first stops
# all who decode while a prompt runs; the one rule lets them run along. Sharing makes each token a little
# later, and the first token, and the end, much earlier:

# %% tags=["figure-distributions"]
from tutorial_engine.viz.serving_plots import latency_distributions

latency_distributions({name: [out.metrics for out in outs] for name, outs in results.items()})

# %% [markdown]
# The same on this machine's own clock, where nothing costs a round number of milliseconds. Times differ
# from run to run, and the two continuous policies may trade places. In TTFT and total, static batching and
# one by one stay behind.

# %% tags=["nbval-ignore-output", "figure-measured"]
from tutorial_engine.engine import WallClock

make_engine(clock=WallClock()).generate(prompts, params)  # warm up
measured = {}  # on this machine's own clock
for name, policy in policies.items():
    engine = make_engine(policy, WallClock(), max_num_seqs=4, max_num_batched_tokens=16)
    outs = serve(engine, [one._replace(time=one.time / 10) for one in eight])  # all is quicker
    measured[name] = [out.metrics for out in outs]
latency_distributions(measured)

# %% [markdown]
# ## 9 · How many at once?
#
# **Objective:** weigh throughput against latency. `max_num_seqs` is the largest batch. Sixteen requests of
# 16 tokens each, all there from the start.

# %%
predictions.ask(
    "sixteen",
    "From 1 to 16 at once. The time between two tokens of a request ...",
    ["shrinks", "stays", "grows, but far less than 16 times"],
)

# %%
SIZES = [1, 2, 4, 8, 16]
sixteen = [
    Arrival(0.0, prompts[i % 3], SamplingParams(max_tokens=16, ignore_eos=True)) for i in range(16)
]


def throughput_and_tpot(size, clock):
    engine = make_engine(clock=clock, max_num_seqs=size, max_num_batched_tokens=64)
    start = clock.now()
    outs = serve(engine, sixteen)
    tpot = percentile([out.metrics.tpot for out in outs], 50)
    return 256 / (clock.now() - start), 1000 * tpot


# %%
virtual = {size: throughput_and_tpot(size, VirtualClock()) for size in SIZES}
growth = virtual[16][1] / virtual[1][1]
shrinks, stays, grows = predictions.questions["sixteen"].options
predictions.reveal("sixteen", grows if growth > 1.1 else stays if growth > 0.9 else shrinks)
for size, (speed, tpot) in virtual.items():
    print(f"{size:2} at once: {speed:4.0f} tokens/s in all, {tpot:3.0f} ms a token for each")

# %% tags=["nbval-ignore-output", "figure-batch-size"]
from tutorial_engine.viz.serving_plots import sweep

measured_here = {size: throughput_and_tpot(size, WallClock()) for size in SIZES}
for size, (speed, tpot) in measured_here.items():
    print(f"{size:2} at once, here: {speed:4.0f} tokens/s, {tpot:4.1f} ms a token for each")
panels = {"virtual clock": virtual, "measured here": measured_here}
sweep(
    SIZES,
    {name: [speed for speed, _ in by.values()] for name, by in panels.items()},
    xlabel="requests at once (max_num_seqs)",
    ylabel="tokens per second",
)

# %% [markdown]
# On the virtual clock 16 at once give 5.6 times the tokens per second, for 2.6 times the gap between two
# tokens of one request. And nearly everybody ends sooner: one at a time, the last of sixteen waits for
# fifteen others. A clock that charges nothing for the forward itself gains nothing:

# %%
for per_forward in (0.010, 0.001, 0.0):
    clock = [VirtualClock(per_forward, per_token=0.001) for _ in range(2)]
    one, many = (throughput_and_tpot(n, c)[0] for n, c in zip((1, 16), clock, strict=True))
    print(f"{1000 * per_forward:2.0f} ms a forward, 1 ms a token: 16 at once are {many / one:.1f}x")

# %% [markdown]
# That is the other end of the roofline: where arithmetic is the limit, a batch has nothing to share.
#
# ## 10 · A long prompt comes
#
# **Objective:** protect those who decode. A is being served. Then L comes, with 106 prompt tokens.

# %%
LONG = tokenizer.encode(" ".join([PROMPTS[0]] * 9)).ids
reader = Arrival(0.0, prompts[1], SamplingParams(max_tokens=24, ignore_eos=True), "A")
late = Arrival(0.1, LONG, SamplingParams(max_tokens=4, ignore_eos=True), "L")


def with_budget(budget):
    engine = make_engine(max_num_batched_tokens=budget, max_model_len=160)
    outs = serve(engine, [reader, late])
    return engine.trace.trace(), outs


whole, outs_whole = with_budget(128)
gaps = [round(1000 * gap) for gap in outs_whole[0].metrics.itl]
print(len(LONG), "prompt tokens; the gaps of A in ms:")
print(gaps)

# %%
predictions.ask(
    "chunks",
    "One gap of 117 ms: A stands still while L is prefilled. Now with a budget of 16 tokens a step. The "
    "first token of L comes ...",
    ["earlier", "at the same time", "later"],
)

# %%
chunked, outs_chunked = with_budget(16)
ttft_whole, ttft_chunked = (
    round(1000 * outs[1].metrics.ttft) for outs in (outs_whole, outs_chunked)
)
later = ttft_chunked > ttft_whole
predictions.reveal("chunks", "later" if later else "earlier")
print("longest gap of A:", max(gaps), "and", round(1000 * max(outs_chunked[0].metrics.itl)), "ms")
print("TTFT of L:", ttft_whole, "and", ttft_chunked, "ms")

# %% tags=["figure-chunks"]
from tutorial_engine.viz.serving_plots import itl_over_time

itl_over_time({"whole prompt": whole, "chunks": chunked}, "A")

# %% [markdown]
# **Chunked prefill** spreads the prompt over steps that decode as well. A slows from 11 to 26 ms for some
# tokens instead of standing still for 117; L pays, for each step costs its 10 ms. The budget is the dial between the two:

# %% tags=["figure-budget"]
from tutorial_engine.viz.serving_plots import sweep

BUDGETS = [4, 8, 16, 32, 64, 128]
by_budget = [with_budget(budget)[1] for budget in BUDGETS]
longest = [1000 * max(outs[0].metrics.itl) for outs in by_budget]
first = [1000 * outs[1].metrics.ttft for outs in by_budget]
sweep(
    BUDGETS,
    {"longest gap of A": longest, "TTFT of L": first},
    xlabel="token budget of a step (max_num_batched_tokens)",
    ylabel="ms",
)

# %% [markdown]
# Same tokens at every budget, of course:

# %%
texts = [[out.outputs[0].token_ids for out in outs] for outs in by_budget]
print(all(tokens == texts[0] for tokens in texts))

# %% [markdown]
# ## 11 · Too many users
#
# **Objective:** add users, and watch what the slowest of them feel. They come at random (a Poisson process), 48 in all, more and more per
# second, with the lengths of section 8. The engine runs at most 8 at once.

# %%
predictions.ask(
    "load",
    "At 16 requests a second the p95 of TTFT is about 40 ms. At 32 it is ...",
    ["about 40 ms: they run together", "about 80 ms: twice the users", "more than 160 ms"],
)

# %%
from tutorial_engine.lab.workload import poisson_times

RATES = [8, 16, 24, 32, 48, 64]
many = [lengths[i % 8] for i in range(48)]


def under_load(rate, policy=Scheduler):
    engine = make_engine(policy, max_num_seqs=8, max_num_batched_tokens=64)
    crowd = [
        Arrival(t, prompts[i % 3], SamplingParams(max_tokens=many[i], ignore_eos=True))
        for i, t in enumerate(poisson_times(rate, 48, seed=1))
    ]
    ttft = [1000 * out.metrics.ttft for out in serve(engine, crowd)]
    return percentile(ttft, 95), sum(many) / engine.clock.now()


load = {rate: under_load(rate) for rate in RATES}
same, twice, more = predictions.questions["load"].options
p95 = load[32][0]
predictions.reveal("load", more if p95 > 160 else twice if p95 > 60 else same)

# %% tags=["figure-load"]
static = {rate: under_load(rate, StaticBatching) for rate in RATES}
both = {"one rule": load, "static batching": static}
for rate in RATES:
    told = [
        f"{name}: p95 {by[rate][0]:4.0f} ms, {by[rate][1]:3.0f} tok/s" for name, by in both.items()
    ]
    print(f"{rate:2} requests/s, " + "; ".join(told))
sweep(
    RATES,
    {
        panel: {name: [row[i] for row in by.values()] for name, by in both.items()}
        for i, panel in enumerate(("TTFT p95, ms", "tokens per second"))
    },
    xlabel="requests per second",
    ylabel="",
)

# %% [markdown]
# Throughput follows the users until the engine is full; from then on it is flat, and the queue grows as
# long as they keep coming. No scheduler cures that; a better one moves the cliff to the right.
#
# ## 12 · Head of line, and fairness
#
# **Objective:** see what "first come, first served" costs, and what "shortest first" does.

# %%
queue = [Arrival(0.0, LONG, SamplingParams(max_tokens=8, ignore_eos=True), "L")]
short = SamplingParams(max_tokens=6, ignore_eos=True)
queue += [Arrival(0.01, prompts[i % 3], short, "ABCD"[i]) for i in range(4)]


def queue_times(policy, arrivals, **limits):
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 160}
    outs = serve(make_engine(policy, **(sizes | limits)), arrivals)
    return {out.request_id: round(1000 * out.metrics.ttft) for out in outs}


print("one place, TTFT in ms:", queue_times(Scheduler, queue))

# %% [markdown]
# Everybody waits for L: *head-of-line blocking*. Even with more places nobody may overtake the first in
# the queue, or a large request might never find room.
#
# ### Exercise 4: shortest prompt first (5 minutes)
#
# <details><summary>Hint</summary>A request knows its <code>num_prompt_tokens</code>, and <code>min</code>
# takes a <code>key</code>.</details>


# %% tags=["exercise"]
class ShortestFirst(Scheduler):
    """Of those who wait, the one with the shortest prompt is next."""

    def next_waiting(self):
        ### BEGIN SOLUTION
        return min(self.waiting, key=lambda request: request.num_prompt_tokens)
        ### END SOLUTION


# %%
from tutorial_engine.learn.checks_03 import check_shortest

check_shortest(ShortestFirst)

# %%
predictions.ask(
    "starve",
    "Shortest first, one place. L and a short request come at 0, then a short one every 40 ms, twelve in "
    "all. Each takes about 70 ms. L ...",
    ["is second", "is somewhere in the middle", "is last"],
)


# %%
from tutorial_engine.learn.checks_03 import OurShortestFirst

mine = ShortestFirst if check_shortest(ShortestFirst).ok else OurShortestFirst
crowd = [queue[0]] + [Arrival(0.04 * i, prompts[2], short, f"s{i}") for i in range(12)]
fcfs, shortest = queue_times(Scheduler, crowd), queue_times(mine, crowd)
last = max(shortest, key=shortest.get) == "L"
predictions.reveal("starve", "is last" if last else "is somewhere in the middle")
for name, times in {"first come, first served": fcfs, "shortest first": shortest}.items():
    mean = sum(times.values()) / len(times)
    print(f"{name:25} mean TTFT {mean:3.0f} ms, of L {times['L']:3} ms")

# %% [markdown]
# As long as short ones come, L *starves*. First come, first served is slower on average and fair: nobody
# waits for ever. (Some engines, vLLM among them, let a request carry a priority instead.)
#
# ## 13 · Naive schedulers
#
# **Objective:** know which test finds which bug. This scheduler looks harmless:


# %%
class Overdrawn(Scheduler):
    def num_tokens_to_run(self, request, plan):
        return min(request.num_new_tokens, self.config.max_num_batched_tokens)


engine = make_engine(Overdrawn, max_num_batched_tokens=8)
for name, ids, own in zip(names, prompts, params, strict=True):
    engine.add_request(ids, own, name)
outs = engine.run()
right = {name: ids for name, ids in zip(names, alone, strict=True)}
print("right tokens:", all(out.outputs[0].token_ids == right[out.request_id] for out in outs))

# %% tags=["figure-overdrawn"]
timeline(engine.trace.trace())

# %% [markdown]
# All tokens are right. But look at the budget: on a GPU that was sized for 8 tokens a step, this is "out of
# memory", some busy day.
#
# ### Exercise 5: mend it (5 minutes)
#
# <details><summary>Hint</summary><code>plan.budget</code> is what the step has left.</details>


# %% tags=["exercise"]
class Mended(Scheduler):
    """Overdrawn, with the bug taken out."""

    def num_tokens_to_run(self, request, plan):
        ### BEGIN SOLUTION
        return min(request.num_new_tokens, plan.budget)
        ### END SOLUTION


# %%
from tutorial_engine.learn.checks_03 import check_budget

check_budget(Mended)

# %% [markdown]
# Four planted bugs, one at a time: a prompt read only in part already gets a token; a neighbour's row of the
# cache is read; all requests draw from one random generator; each request has the whole budget (you know
# this one). The budget is 8 in every run.

# %%
predictions.ask(
    "zoo",
    "How many of the four give wrong tokens in a test that runs one request at a time?",
    ["none of them", "one", "all four"],
)

# %%
from tutorial_engine.learn.bugs import planted
from tutorial_engine.learn.bugs_03 import BUGS_03

warm = [SamplingParams(max_tokens=8, temperature=1.0, seed=i, ignore_eos=True) for i in (5, 6, 7)]


def run_them(chosen):
    """New tokens of the chosen requests, served together, and the fullest step."""
    engine = make_engine(max_num_batched_tokens=8)
    for i in chosen:
        engine.add_request(prompts[i], warm[i], names[i])
    texts = {out.request_id: out.outputs[0].token_ids for out in engine.run()}
    return texts, max(sum(ran.values()) for ran in steps(engine.trace.trace()))


def each_alone():
    return {names[i]: run_them([i])[0][names[i]] for i in range(3)}


# %%
truth, found_alone, lines = each_alone(), 0, []
for bug in BUGS_03:
    with planted(bug, BUGS_03):
        single, (together, fullest) = each_alone(), run_them(range(3))
    found_alone += single != truth
    told = f"right alone: {single == truth!s:5}, right together: {together == truth!s:5}"
    lines.append(f"{bug:35}{told}, fullest step {fullest} of 8")
predictions.reveal("zoo", {0: "none of them", 1: "one", 4: "all four"}[found_alone])
print("\n".join(lines))

# %% [markdown]
# Only the first: A has 10 tokens, so even alone it is read in chunks. Two need company to show, and one gives
# right tokens always: only its budget tells. Test a scheduler in company, chunked, and with its limits watched.

# %% [markdown]
# ## 14 · Streaming, aborting, failing
#
# **Objective:** let requests come and go. `stream` yields tokens as they come, from all prompts at once:

# %%
engine = make_engine(max_num_batched_tokens=8)
line = []
for result in engine.stream(PROMPTS, params):
    line.append(f"{result.request_id}:{result.text!r}")
print(" ".join(line))

# %% [markdown]
# `abort` ends a request in any state and frees its row at once. The others do not notice:

# %%
engine = make_engine(max_num_seqs=2, max_num_batched_tokens=8)
for name, ids, own in zip(names, prompts, params, strict=True):
    engine.add_request(ids, own, name)
for _ in range(3):
    engine.step()
print("running:", engine.state().running, "waiting:", engine.state().waiting)
engine.abort("A")
print("running:", engine.state().running, "free rows:", engine.memory.num_free_rows)
for out in engine.run():
    done = out.outputs[0]
    same = done.token_ids == right[out.request_id][: len(done.token_ids)]
    print(f"{out.request_id}: {done.finish_reason}, {len(done.token_ids)} tokens, as alone: {same}")

# %% tags=["figure-abort"]
timeline(engine.trace.trace())

# %% [markdown]
# A request that fails ends alone, with a reason. Here a callback raises at B's second token:


# %%
def fussy(result):
    if result.token is not None and len(engine.requests["B"].tokens) == 2:
        raise RuntimeError("the connection is gone")


engine = make_engine(max_num_batched_tokens=8)
for name, ids, own in zip(names, prompts, params, strict=True):
    engine.add_request(ids, own, name, on_token=fussy if name == "B" else None)
for out in engine.run():
    print(f"{out.request_id}: {out.outputs[0].finish_reason:7}{out.error or ''}")
engine.check_integrity()
print("free rows:", engine.memory.num_free_rows, "of", engine.config.max_num_seqs)

# %% [markdown]
# What could never run is refused when it is added, with the numbers:

# %%
try:
    engine.add_request([65] * 64)
except ValueError as error:
    print(error)

# %% [markdown]
# ## 15 · Watch it run
#
# **Objective:** step through it. Change the budget, the places, the policy, the arrivals: the engine runs
# again. Everything shown comes from its trace. Try: the smallest budget at which nobody waits in step 0. Then
# one place: who waits longest?

# %% tags=["figure-scheduler-explorer"]
from tutorial_engine.viz.scheduler_explorer import SchedulerExplorer

explorer = SchedulerExplorer(model, tokenizer, PROMPTS)
explorer.set(step=2)
explorer

# %% [markdown]
# ## 16 · The ledger grows
#
# **Objective:** prove that company changes nothing. The engine joins the equality ledger of notebook 02:
# batched, chunked by a small budget, in random order, beside neighbours, beside one that is aborted.

# %%
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tutorial_engine.lab.hf import TransformersRunner
from tutorial_engine.lab.ledger import engine_paths, ledger, our_paths, runner_path, table

logging.disable_progress_bar()
theirs = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
paths = our_paths(model) | {"transformers": runner_path(lambda n: TransformersRunner(theirs))}
paths |= engine_paths(model, neighbours=[LONG[:30], LONG[5:12]])
print(table(ledger(paths, prompts, num_tokens=12)))

# %% [markdown]
# Sampled tokens, too: each request has its own generator, so its draws depend on its seed alone.

# %%
print("seeded, three together = each alone:", run_them(range(3))[0] == truth)

# %% [markdown]
# ## 17 · When it does not win
#
# **Objective:** know the limits of an idea. Three cases in which static batching ends as soon, and one in
# which it does not:

# %%
cases = {
    "one request": [(0.0, 12)],
    "equal lengths, all at once": [(0.0, 12)] * 4,
    "far apart": [(0.5 * i, n) for i, n in enumerate((4, 24, 8, 12))],
    "unequal, all at once": [(0.0, n) for n in (4, 24, 8, 12, 4, 24, 8, 12)],
}
for case, work in cases.items():
    jobs = [Arrival(t, prompts[1], SamplingParams(max_tokens=n, ignore_eos=True)) for t, n in work]
    ends = []
    for policy in (StaticBatching, Scheduler):
        engine = make_engine(policy, max_num_seqs=4)
        ends.append(max(out.metrics.finished for out in serve(engine, jobs)))
    print(f"{case:28} static batching takes {ends[0] / ends[1]:.2f} times the one rule's time")

# %% [markdown]
# ## 18 · A real model
#
# All of this runs with any dense Qwen3, downloaded once (`chat.render` as in notebook 02 makes prompts):
#
# ```python
# config = EngineConfig(max_num_seqs=16, max_model_len=2048)
# engine = LLMEngine.from_pretrained("Qwen/Qwen3-0.6B", config, dtype=torch.bfloat16)
# for out in engine.generate(questions, SamplingParams(max_tokens=200), progress=True):
#     print(out.outputs[0].text)
# ```

# %% tags=["nbval-ignore-output"]
if torch.cuda.is_available():
    on_gpu = LLMEngine.from_pretrained(TINY, device="cuda", dtype=torch.bfloat16)
    print([out.outputs[0].text for out in on_gpu.generate(PROMPTS, params)])
else:
    print("No GPU here. With one, this cell would serve the same requests there.")

# %% [markdown]
# ## What you can do now
#
# Plan any step by hand; read a timeline; tell TTFT from TPOT and say which policy hurts which; choose a
# budget and a batch size; say which test finds which bug. Next, `04_paged_cells`: rows waste
# memory, and what to do about it.

# %%
print(predictions.score())
