# %% [markdown]
# # A3 · The same requests in vLLM
#
# This appendix belongs to notebooks 03 to 05, and takes about half an hour. vLLM
# is an engine that serves many users on many GPUs. Here you see what it decided for some requests, and what the engine of
# these notebooks decides for the same ones. You do not need vLLM. Its runs were recorded with vLLM 0.32.0 on a CPU, with
# the small model of these notebooks, and the records are part of the package.

# %%
import torch

from tutorial_engine.lab import at_one_pace, serve_again
from tutorial_engine.learn import Predictions
from tutorial_engine.model import TINY, load_model, load_tokenizer

torch.set_grad_enabled(False)
torch.set_num_threads(1)
predictions = Predictions()
model, tokenizer = load_model(), load_tokenizer()

# %% [markdown]
# ## 1 · One script, two engines
#
# **Objective:** run a program for vLLM on this engine.
#
# What you import from `tutorial_engine` has the names of vLLM. This program works with both engines. (`TINY` is the
# folder of the small model. `enforce_eager` saves vLLM a preparation that is not worth it here.)


# %%
def program(LLM, SamplingParams):
    """Three prompts in, three texts out. `LLM` and `SamplingParams` are those of an engine."""
    prompts = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]
    llm = LLM(str(TINY), dtype="float32", max_model_len=320, block_size=32, enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=20)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {output.prompt: output.outputs[0].text for output in outputs}


# %%
import tutorial_engine

texts = program(tutorial_engine.LLM, tutorial_engine.SamplingParams)
for prompt, text in texts.items():
    print(f"{prompt!r} -> {text!r}")

# %% [markdown]
# We gave these prompts to vLLM, too, and recorded what it said. `recorded_run` gives such a run as a *trace*. A trace
# is the list of events from which every picture of these notebooks is drawn.

# %%
from tutorial_engine.lab import recorded_run
from tutorial_engine.trace.events import Added, TokenSampled

said = recorded_run("long_prompt")
for number, name in enumerate("ABC"):
    mine = [one for one in said.events if getattr(one, "request_id", "") == name]
    new = [one.token_id for one in mine if isinstance(one, TokenSampled)]
    text = tokenizer.decode(new)
    print(f"vLLM: {text!r}", "is the same" if text == list(texts.values())[number] else "differs")

# %% [markdown]
# The next cell gives the program itself to vLLM, if it is installed beside this notebook. Most readers do not have it.
# Five longer programs are in the folder `examples`, with the output that vLLM gave.

# %%
import importlib.util
import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM in this process, where it can be seen
if importlib.util.find_spec("vllm"):
    import vllm

    assert program(vllm.LLM, vllm.SamplingParams) == texts

# %% [markdown]
# ## 2 · Which is which?
#
# **Objective:** read a run of vLLM in pictures that you know.
#
# In the next run three users sent their requests at the same time, and the memory was small: 5 blocks of 32 tokens. (vLLM
# counts its blocks from 1. The trace counts them from 0, as this engine does.) `serve_again` gives the same requests and the same limits to our engine, and returns its trace. `at_one_pace`
# gives each step 20 ms in both, because the real times would give the answer away.

# %%
theirs = recorded_run("small_pool")
ours = serve_again(theirs, model)

# %% tags=["figure-which"]
from tutorial_engine.viz import places

two = {"one engine": at_one_pace(theirs), "the other engine": at_one_pace(ours)}
places(two, title="Who has each place in each step")

# %%
predictions.ask(
    "which",
    "One of these two runs is vLLM's. What tells you which one?",
    [
        "the order of the requests",
        "the number of steps",
        "who waits and who ends first",
        "nothing",
    ],
)

# %% [markdown]
# Look closer: `plans` reads from a trace what each step ran, and all block tables.

# %%
from tutorial_engine.trace import history


def plans(trace):
    """For each step: how many tokens each request runs, and the block tables."""
    for step in history(trace):
        tables = {name: r.table for name, r in step.planned.requests.items() if r.table}
        yield {name: len(event.slots) for name, event in step.scheduled.items()}, tables


pairs = list(zip(plans(theirs), plans(ours), strict=True))
same = sum(a == b for a, b in pairs)
if predictions.reveal("which", "nothing" if same == len(pairs) else 0):
    print(f"{same} of {len(pairs)} steps have the same plan and the same block tables")

# %% [markdown]
# Both engines choose the same requests, give them the same numbers of tokens and the same blocks, and take memory away
# from the same request. This is no accident: the scheduler of these notebooks follows vLLM's rules. The tests of the
# package compare it with 40 recorded runs of vLLM, step by step. (These runs were made with `async_scheduling=False`.
# Section 7 says what this is.)

# %% [markdown]
# ## 3 · Read a plan of vLLM
#
# **Objective:** explain a preemption and a hit from the state of the pool.
#
# Why does `r2` leave its place after step 12, and why does it wait so long? Here is vLLM's pool at the end of step 12. In
# step 13 each of the three requests has one token to run.

# %% tags=["figure-before"]
from tutorial_engine.viz import block_view

labels = {i: tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())}
block_view(theirs, 12, labels)

# %%
now = list(history(theirs))[12].after
for name, request in now.requests.items():
    print(f"{name}: {request.num_computed_tokens} tokens computed, blocks {request.table}")
print("in the order in which they were admitted:", *now.running)

# %%
predictions.ask(
    "block",
    "r0 has filled its block, and needs another one. Which block does it get in step 13?",
    ["block 2", "block 3", "block 4", "none: it waits"],
)

# %%
from tutorial_engine.trace.events import Admitted, Preempted

step = list(history(theirs))[13]
if predictions.reveal("block", f"block {step.planned.requests['r0'].table[-1]}"):
    print("preempted:", *step.by_request(Preempted))
    print("step 13 runs", {name: len(event.slots) for name, event in step.scheduled.items()})

# %% [markdown]
# No block is free. So the request that was admitted last is preempted: `r2` gives its blocks back, and waits at the
# front of the queue. Its tokens are kept.
#
# One of the blocks that `r2` gave back was full, so it has a hash. The other one was not full, and nobody can find
# it. Blocks that nobody can find are taken first: `r0` gets block 4.

# %%
predictions.ask(
    "again",
    "r2 has 36 tokens: 35 were computed, and one was chosen. How many does it find when it runs again?",
    ["0", "32", "35", "36"],
)

# %%
back = next(step for step in list(history(theirs))[14:] if "r2" in step.by_request(Admitted))
num_found = back.by_request(Admitted)["r2"].num_cached
if predictions.reveal("again", num_found):
    print(f"step {back.number}: r2 finds {num_found} tokens")

# %% [markdown]
# From step 13 on block 2 is free. But `r2` waits until step 24, when others have ended: it is admitted only if all of
# its 36 tokens fit, and they need two blocks.

# %% [markdown]
# ## 4 · Predict the hits of a burst
#
# **Objective:** say what vLLM will find before it runs.
#
# Now four requests come at once to an empty pool. Their prompts have a common beginning, as the requests of one
# application often do. Three of them may run at the same time, and the fourth finds the same when its turn comes.

# %%
burst = recorded_run("burst")
prompts = [event.prompt_token_ids for event in burst.events if isinstance(event, Added)]
for prompt in prompts:
    pairs = list(zip(prompts[0], prompt, strict=False))
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    print(f"{len(prompt)} tokens; the first {common} are those of the first prompt")

# %% [markdown]
# ### Exercise 1: how many tokens does each request find? (10 minutes)
#
# All requests come at once and in this order. The pool is large enough for all. A prompt finds the longest beginning
# that an earlier prompt has, too. Only full blocks can be found, and at least one token must be left to run.
#
# <details><summary>Hint</summary>For each prompt, go through all earlier prompts and through the ends of blocks:
# <code>range(block_size, len(prompt), block_size)</code>. Compare <code>prompt[:end]</code> with
# <code>earlier[:end]</code>.</details>


# %% tags=["exercise"]
def hits(prompts, block_size):
    """A list: for each prompt of a burst the number of tokens that it finds."""
    ### BEGIN SOLUTION
    found = []
    for number, prompt in enumerate(prompts):
        best = 0
        for earlier in prompts[:number]:
            for end in range(block_size, len(prompt), block_size):
                if prompt[:end] == earlier[:end]:
                    best = max(best, end)
        found.append(best)
    return found
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_hits

check_hits(hits)

# %% [markdown]
# The second request comes in the same step as the first one. It finds blocks that are not written yet. This is right,
# because in each layer the keys and values of all tokens are written before any token reads them. The picture shows
# the pool at the end of this step.

# %% tags=["figure-burst"]
block_view(burst, 0, labels)

# %% [markdown]
# ## 5 · Two numbers of vLLM's log
#
# **Objective:** find the arithmetic of notebook 04 in the log of a server.
#
# Section 2 of notebook 04 told of two numbers in vLLM's log. The next cell has the line that vLLM 0.32.0 wrote with
# our small model, 1 GiB, blocks of 32 and `max_model_len=300`. (On a GPU it begins with "GPU KV cache size".) It also prints
# the bytes of one token, as in notebook 02.

# %%
from tutorial_engine.cache import KVCacheSpec

print("CPU KV cache size: 491,520 tokens, Maximum concurrency for 300 tokens per request: 1638.40x")
print(KVCacheSpec.from_model(model.config, torch.float32).bytes_per_token, "bytes per token")

# %% [markdown]
# ### Exercise 2: where do these numbers come from? (5 minutes)
#
# `num_bytes` is the memory for keys and values, here 1 GiB. It is divided into blocks. The second number of the log is
# the number of all blocks, divided by the blocks of a request that is as long as it may be. It has a fraction.
# The first number is `max_model_len` times the second one, without the fraction. (So it is not always the whole pool: here
# the last block of each request has room that no request can use.)
#
# <details><summary>Hint</summary>A block is <code>bytes_per_token * block_size</code> bytes, and only whole
# blocks count: <code>//</code>. A request of <code>max_model_len</code> tokens needs
# <code>-(-max_model_len // block_size)</code> blocks: this division rounds up.</details>


# %% tags=["exercise"]
def log(num_bytes, bytes_per_token, block_size, max_model_len):
    """-> the first and the second number of the log."""
    ### BEGIN SOLUTION
    blocks = num_bytes // (bytes_per_token * block_size)
    requests = blocks / -(-max_model_len // block_size)
    return int(requests * max_model_len), requests
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_log

check_log(log)

# %% [markdown]
# ## 6 · Where to read in vLLM
#
# **Objective:** open the function of vLLM that does what you know.
#
# vLLM's scheduler has 3,436 lines, and ours has about 370. For requests like ours the decisions are the same. The difference
# is everything else that a server for many kinds of users needs. Each row names our function, and vLLM's function in its file.
# If you read vLLM, begin with four rows: *plan a step*, *take memory away*, *let in, give blocks* and *order of the free*.

# %%
from tutorial_engine.learn import Places

Places()

# %% [markdown]
# ## 7 · What differs on purpose
#
# **Objective:** know what changes when you move a program to vLLM.
#
# - **Greedy.** Without a `temperature` this engine takes the likeliest token. vLLM's `SamplingParams` have 1.0. Without
#   any `SamplingParams` vLLM takes what the model's file `generation_config.json` says.

# %% [markdown]
# - **Asynchronous scheduling.** By default vLLM plans the next step before the last one has its tokens, so the GPU does not
#   wait for Python. The tokens are the same, but a step need not be the same as ours then: a request may be planned once
#   more although it has just ended. Our engine plans one step after the other, so that you can look between the steps.
# - **The null block.** vLLM never gives out its block 0. A table may point to it where nothing is stored, for example before
#   a sliding window. This is why the trace counts from 0 where vLLM counts from 1.

# %% [markdown]
# - **Watermark.** vLLM can keep a part of the blocks free when it admits requests. The default is none, as here.
# - **Connectors** bring keys and values from another machine. We have none.
# - **Speculative tokens.** A small model guesses several tokens, and the large one checks them in one forward. We have none.
# - **Several samples.** Our samples of one prompt share all blocks, and copy one when they write to it. In vLLM
#   each sample is a request of its own. It finds the full blocks of the prompt, and runs the rest again.

# %% [markdown]
# ## When one machine is not enough
#
# You can take a program that you wrote here to vLLM: change the import line, and write the temperature. There
# `LLM(..., tensor_parallel_size=2)` divides the model among two GPUs, as appendix A1 does with two processes. For
# several machines vLLM needs Ray (a library that starts programs on many machines) or its option `--nnodes`.
# What you know about plans, blocks and hits is true there, too.
#
# With `tutorial_engine.lab.record` you can look into your own vLLM, in the pictures of these notebooks. It needs an
# engine in the same process, without asynchronous scheduling, and a model whose layers all keep all tokens.

# %%
if importlib.util.find_spec("vllm"):
    from tutorial_engine.lab import record

    llm = vllm.LLM(str(TINY), dtype="float32", block_size=32, max_model_len=320, enforce_eager=True,
                   async_scheduling=False)  # fmt: skip
    with record(llm) as run:
        llm.generate(["Once upon a time", "One day"], use_tqdm=False)
    print(run.trace().num_steps, "steps of your own vLLM were recorded")

# %%
print(predictions.score())
