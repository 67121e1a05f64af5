# %% [markdown]
# # A3 · The same requests in vLLM
#
# vLLM is an engine that serves many users on many GPUs. Here you see what it decided for some requests, and what the
# engine of these notebooks decides for the same ones.
#
# **At the end** you say what a step of vLLM will do: who runs, who gives memory back, which block is taken, and how many
# tokens are found.
#
# You do not need vLLM: its runs, recorded on a CPU with vLLM 0.32.0 and our small model, are in the package. This appendix
# comes after notebooks 03 to 05, and takes about 1½ hours; a beginner needs 2½. A good place for a pause is after section 3.

# %% [markdown]
# <details><summary>Words of notebooks 03 to 05 that come again</summary>
#
# - *step*: one forward for several requests; the *plan* of a step says which requests run, and how many tokens of each
# - *budget*: the most tokens that a step runs
# - *block*: a place for the K and V of 32 tokens here; all blocks are the *pool*; a request has a *block table*
# - *open* block: one that is not full yet; *ref* of a block: how many requests hold it
# - *prefill*: the tokens of a prompt run; *decode*: the newest token of a request runs
# - *hash*: a number under which a full block is found; a *hit* is a block that is found
# - to *admit* a request: it begins to run, or runs again; to *preempt* it: its blocks are taken away, and it waits
# - *queue of free blocks*: they are taken from its front
#
# </details>
#
# Some pictures appear only after you have chosen an answer. If you only read this page, the text or a fold below them says what
# they show. The file `notebooks/solutions/appendix/A3_vllm.ipynb` has all of them.

# %%
import torch

from tutorial_engine.learn import Predictions
from tutorial_engine.model import TINY, load_model, load_tokenizer

torch.set_grad_enabled(False)
torch.set_num_threads(1)
predictions = Predictions("A3")
model, tokenizer = load_model(), load_tokenizer()

# %% [markdown]
# ## Which one is vLLM?
#
# **Objective:** look for a difference between two engines.
#
# Four requests, A, B, C and L, were served twice: once by vLLM, and once by the engine of these notebooks. A line is a
# place in the batch, a box is a step. `L` comes later than the others, and has a long prompt.

# %% tags=["figure-first-runs"]
import random

from tutorial_engine.lab import recorded_run, serve_again
from tutorial_engine.viz import places

vllm_run = recorded_run("long_prompt")
ours_of_four = serve_again(vllm_run, model)
both_runs = [vllm_run, ours_of_four]
random.Random(1).shuffle(both_runs)
places(dict(zip(("upper run", "lower run"), both_runs, strict=True)), "Which run is vLLM's?")

# %% [markdown]
# Choose one before you read on.
#
# You cannot see it: box by box the two pictures are the same. (The next section prints which is which.) Is this luck? Section 2 compares another run, block by
# block. Section 3 shows that a wrong rule would be seen.

# %% [markdown]
# ## 1 · One script, two engines
#
# **Objective:** run a program for vLLM on this engine.
#
# What you import from `tutorial_engine` has the names of vLLM. This program works with both engines. (`TINY` is the
# folder of the small model. With `enforce_eager` vLLM does not compile the model, which would take long.)
#
# A block has 32 tokens: on a CPU vLLM 0.32 takes, for models like ours, blocks of 32, 64, 96, ... tokens. Its default there is 128.


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
# `recorded_run` gave the run of the *first picture* as a *trace*: the list of events from which the pictures of these
# notebooks are drawn. Its requests A, B and C had these prompts. There was one more request, `L`, with a long prompt, and the limits were
# smaller. The limits change the steps. Here they do not change the tokens.
#
# (On a GPU, with numbers of 16 bits, the same sum may be rounded differently in another batch. In a *near tie*, where two
# tokens are almost equally likely, the other one may be chosen.)

# %%
from tutorial_engine.trace.events import Added, TokenSampled

for number, name in enumerate("ABC"):
    its = [one for one in vllm_run.events if getattr(one, "request_id", "") == name]
    new = [one.token_id for one in its if isinstance(one, TokenSampled)]
    text = tokenizer.decode(new)
    print(f"vLLM: {text!r}", "is the same" if text == list(texts.values())[number] else "differs")
print("In the first picture the upper run is", "vLLM's" if both_runs[0] is vllm_run else "ours")

# %% [markdown]
# If vLLM is installed here, the next cell gives it the program itself. Otherwise the cell does nothing. Five longer programs are in the folder `examples`, with the output that vLLM gave.

# %%
import importlib.util
import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM in this process, where it can be seen
if importlib.util.find_spec("vllm"):
    import vllm

    is_same = program(vllm.LLM, vllm.SamplingParams) == texts
    print("vLLM says the same" if is_same else "a text differs: perhaps a near tie, see above")

# %% [markdown]
# ## 2 · Does vLLM decide the same?
#
# **Objective:** read a run of vLLM in pictures that you know.
#
# In the next run three users sent their requests to vLLM at the same time. Each asks for 24 new tokens. The memory was
# small: 5 blocks of 32 tokens. A step runs at most three requests, and at most 64 tokens. In step 0 `r0` has 20
# tokens and `r1` has 24, so only 20 are left for `r2`, whose prompt has 24. A request takes its second block in the step that
# runs its 33rd token. (vLLM never gives its block 0 to a request, see section 7. So vLLM's block 1 is block 0 in the pictures.)

# %%
from tutorial_engine.trace import history

theirs = recorded_run("small_pool")
begin = list(history(theirs))[:2]
for name, request in begin[0].planned.requests.items():
    print(f"{name}: a prompt of {request.num_prompt_tokens} tokens")
for step in begin:
    print(
        f"step {step.number} runs",
        {name: len(event.slots) for name, event in step.scheduled.items()},
    )

# %%
predictions.ask(
    "victim",
    "From step 2 on each request runs one token in a step. When must vLLM take memory away, and whose?",
    ["in step 13, that of r2", "in step 13, that of r0", "in step 20, that of r1", "in no step"],
)

# %% [markdown]
# `serve_again` gives the same requests and the same limits to our engine, and returns its trace. The picture has both
# runs, of 36 steps each.

# %% tags=["figure-which"]
from tutorial_engine.trace.events import Preempted

ours = serve_again(theirs, model)
gone = [(event.step, event.request_id) for event in theirs.events if isinstance(event, Preempted)]
runs = [theirs, ours]
random.Random(3).shuffle(runs)
shown = dict(zip(("upper run", "lower run"), runs, strict=True))
title = "Which run is vLLM's?"
places(shown, title) if predictions.reveal(
    "victim", "in step {}, that of {}".format(*gone[0])
) else None

# %% [markdown]
# <details><summary>What the picture shows</summary>Two runs that are the same. In each, <code>r0</code> and
# <code>r1</code> run in steps 0 to 23, and <code>r2</code> runs in steps 0 to 12. In steps 13 to 23 its place runs nothing. In step 24
# <code>r2</code> runs again, in place 1, until step 35.</details>
#
# The picture does not show blocks. In step 13 `r0` needs a block and none is free, so `r2` loses its blocks. Until step 23 its
# place runs nothing, because there is no memory for `r2` ("wasted" in notebook 03). Section 3 shows why it is `r2`, and why it
# waits so long.
#
# <details><summary>More of this picture</summary>In step 9 <code>r1</code> takes block 3, and in step 10 <code>r2</code> takes block 4.
# In step 23 first <code>r0</code> ends, then <code>r1</code>. <code>r1</code> ended last, so the picture puts <code>r2</code> in step 24
# into its place 1. (A plan of vLLM has no places.)</details>
#
# A picture may hide a difference. `plans` reads from a trace what each step ran, and all block tables. (`history` gives, for each
# step, the state after its plan, `planned`, and at its end, `after`.)


# %%
def plans(trace):
    """For each step: how many tokens each request runs, and the block tables."""
    for step in history(trace):
        tables = {name: r.table for name, r in step.planned.requests.items() if r.table}
        yield {name: len(event.slots) for name, event in step.scheduled.items()}, tables


pairs = list(zip(plans(theirs), plans(ours), strict=True))
same = sum(a == b for a, b in pairs)
print(f"{same} of {len(pairs)} steps have the same plan and the same block tables")
print("the upper run is", "vLLM's" if runs[0] is theirs else "ours")

# %% [markdown]
# The two pictures are the same. In each step both engines run the same requests, with as many tokens and in the same
# blocks, and they preempt the same one: this engine follows vLLM's rules. Its tests compare it with 41 recorded runs of
# vLLM 0.32.0. In all 3,884 steps the plans are equal, and so are the blocks. (In some runs vLLM had served other requests
# before, and numbers its blocks differently. There the numbers are matched: a block of vLLM must stand for one and the same block of ours through
# the whole run.)

# %% [markdown]
# In these runs every layer sees all earlier tokens, and there is no LoRA (small changes of the weights), no guessed tokens and
# no blocks from another machine (section 7).
# One feature that changes plans and is on by default on a GPU was off, as always on a CPU: *asynchronous scheduling*. With
# it, the next step is planned before the tokens of the last one are known.

# %% [markdown]
# ## 3 · Read a plan of vLLM
#
# **Objective:** explain a preemption, a hit, and the order of the free blocks.
#
# To *preempt* a request means: its blocks are taken away, and it waits. A *hit* is a block that a request finds in the pool.
# The request does not run its tokens again. Each full block has a *hash*: a number made of its tokens and of the hash of
# the block before it. So it depends on all tokens before it, too. A block is found by its hash. The pictures write it as
# "hash ← hash of the block before", or "← root" where there is none before.

# %% [markdown]
# Why does `r2` leave its place after step 12, and why does it wait so long? Here is vLLM's pool at the end of step 12. In
# step 13 each of the three requests has one token to run.

# %% tags=["figure-before"]
from tutorial_engine.viz import block_view

block_view(theirs, 12)

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
from tutorial_engine.trace.events import Admitted

step = list(history(theirs))[13]
if predictions.reveal("block", f"block {step.planned.requests['r0'].table[-1]}"):
    print("preempted:", *step.by_request(Preempted))
    print("step 13 runs", {name: len(event.slots) for name, event in step.scheduled.items()})

# %% [markdown]
# No block is free. So the request that was admitted last is preempted: `r2` gives its blocks 2 and 4 back, and becomes
# the first of the waiting requests. Its token ids are kept. Why did `r0` get block 4 and not block 2? Block 4 was not full,
# so it has no hash, and no request can find it. Such a block is taken first.
# (The rule “the last block of a table first” would choose it here, too. In step 24 the two rules differ.)

# %%
predictions.ask(
    "again",
    "r2 has 36 tokens: 35 were computed, and one was chosen. How many does it find when it runs again?",
    ["0", "32", "35", "36"],
)

# %% tags=["figure-preempted"]
back = next(step for step in list(history(theirs))[14:] if "r2" in step.by_request(Admitted))
num_found = back.by_request(Admitted)["r2"].num_cached
if chosen := predictions.reveal("again", num_found):
    print(f"step {back.number}: r2 finds {num_found} tokens")
block_view(theirs, 13) if chosen else None

# %% [markdown]
# The picture shows the end of step 13. Block 2 is pale: nobody has it, and its K and V are still there. It was full, so it
# has a hash, and can be found. So `r2` finds 32 tokens, and has to run the other 4. The only free block is block 2, which `r2` would find. `r2`
# needs a second block, and there is none. So it waits.

# %% [markdown]
# In step 23 first `r0` ends and gives back its blocks 0 and 4. Then `r1` ends and gives back 1 and 3. Blocks 0, 1 and 2
# can be found. Free blocks stand in a queue, and the first one is taken next. Think of your `free` in notebook 05: which blocks go to the
# front of the queue? And of two requests that end in one step, whose come first?

# %%
predictions.ask(
    "second",
    "In step 24 r2 finds block 2, and needs one more. Which block does it take?",
    ["block 0", "block 1", "block 3", "block 4"],
)

# %% [markdown]
# We recorded vLLM's own queue after each step. The picture has it before and after step 23:

# %% tags=["figure-ended"]
from tutorial_engine.viz import queue_picture

table = back.planned.requests["r2"].table
queue_picture(theirs, [23]) if predictions.reveal("second", f"block {table[-1]}") else None

# %% tags=["figure-second"]
if predictions.made("second"):
    print("in step 24 r2 has the blocks", *table)
block_view(theirs, 24) if predictions.made("second") else print("Choose an answer above.")

# %% [markdown]
# In step 24 `r2` finds block 2, and takes block 3, the first one of the queue. In the picture the first blocks of `r0` and
# `r1` are pale: they can still be found.
#
# <details><summary>What these two pictures show</summary>The first one: before step 23 the queue is 2#, and after it 3, 4,
# 2#, 0#, 1#. A block with # has a hash. The second one: in step 24 <code>r2</code> has the blocks 2 (32 tokens, found again) and 3
# (4 tokens, written in this step). Block 4 is empty and the next one. Blocks 0 and 1 can still be found.</details>
#
# What is the rule of this order? Here are two more steps, from the run of section 1. In step 13 `L` ends, and in step 19
# three requests end: first `A`, then `B`, then `C`. Say it in a sentence before you open the answer.

# %% tags=["figure-queue"]
queue_picture(vllm_run, [13, 19])

# %% [markdown]
# <details><summary>Answer</summary>
# <p>It is the rule of your <code>free</code> in notebook 05, for one request after the other. Blocks without a hash go to the
# front, because no request can find them. Blocks with a hash go to the end, so that they can be found for as long as
# possible. In both parts the last block of a table goes first: the first one is the most useful, because every search begins
# there. A block that several tables have comes back with the last of them.</p>
# <p>Each request that ends puts its open block before all others at the front, and its full blocks behind all others at the end. So of several requests,
# the open block of the last one is taken first (2, 1, 0), and the full blocks of the first one are lost first. For hits
# only the second matters: a block without a hash cannot be found. Why vLLM takes the newest of these first, section 6
# says.</p></details>
#
# How many tokens would be found with another rule? In `ToTheEnd` all free blocks go to the end of the queue, those without a hash as well. With
# `Pages` our engine uses this pool:

# %%
from tutorial_engine.cache import BlockManager, PagedKVCache


class ToTheEnd(BlockManager):
    """A pool with another order of its free blocks."""

    def _give_back(self, table):
        for block in reversed(table):
            self.blocks[block].ref_cnt -= 1
            if self.blocks[block].ref_cnt == 0:
                self.free_queue[block] = None  # a dictionary in order: a new key comes last


class Pages(PagedKVCache):
    block_manager = ToTheEnd


# %% [markdown]
# One more run was recorded in vLLM, with the same pool of 5 blocks. The prompt of `A` has 40 tokens: one full block and
# 8 tokens more. `A` ends. Then five short requests come, `s1` to `s5`, each when the one before it has ended. Each needs
# one block. At last the prompt of `A` comes again.

# %%
predictions.ask(
    "lost",
    "How many tokens does the prompt of A find when it comes again: with vLLM's rule, and with ToTheEnd?",
    ["32 and 32", "32 and 0", "0 and 32", "0 and 0"],
)

# %% tags=["figure-lost"]
from tutorial_engine.trace.events import BlockTaken

rules = {"vLLM": recorded_run("came_back")}
rules["ToTheEnd"] = serve_again(rules["vLLM"], model, pages=Pages)
last = [[e for e in run.events if isinstance(e, Admitted)][-1] for run in rules.values()]
if chosen := predictions.reveal("lost", f"{last[0].num_cached} and {last[1].num_cached}"):
    for name, run in rules.items():
        short = [e for e in run.events if isinstance(e, BlockTaken) and e.request_id[0] == "s"]
        print(f"{name:8} gives", ", ".join(f"{e.request_id} block {e.block}" for e in short))
    print("The queue with ToTheEnd:")
queue_picture(rules["ToTheEnd"], [2, 14]) if chosen else None

# %% [markdown]
# And this is vLLM's own queue, before and after step 14:

# %% tags=["figure-kept"]
queue_picture(rules["vLLM"], [14]) if predictions.made("lost") else print("Choose an answer above.")

# %% [markdown]
# <details><summary>What these pictures show</summary>With <code>ToTheEnd</code> the queue is 2, 3, 4, 1, 0# after step 2, and 0#, 2, 3,
# 4, 1 after step 14: block 0 is the next one. In vLLM it is 1, 2, 3, 4, 0# after step 14: block 0 is the last one.</details>
#
# In vLLM each short request takes block 1. First `A` gave it back, and then each short request gives it back again. It has no
# hash, so it goes to the front each time. With `ToTheEnd` each takes the block that has been free for the longest time. After step 14 this is block 0, which `A` left. So `s5` writes over it, and all 40
# tokens of the prompt are run again. With vLLM's rule only 8 are.
#
# Does the comparison of section 2 see a wrong rule? The next cell runs the requests of section 2 again, with `ToTheEnd`:

# %%
from tutorial_engine.trace.events import FreeQueue


def queues(trace):
    """The queue of free blocks at the end of each step, as the engine itself has it."""
    return [event.blocks for event in trace.events if isinstance(event, FreeQueue)]


other = serve_again(theirs, model, pages=Pages)
equal = [a == b for a, b in zip(plans(theirs), plans(other), strict=True)]
first = equal.index(False)
print(f"{sum(equal)} of {len(equal)} steps are equal; the first other one is step {first}")
for name, run in {"vLLM": theirs, "ToTheEnd": other}.items():
    steps = list(history(run))
    print(f"{name:8} after step {first - 1} the queue is", *queues(run)[first - 1], end="; ")
    print(f"in step {first} r2 has the blocks", *steps[first].planned.requests["r2"].table)

# %% [markdown]
# It does. In step 24 `r2` finds block 2 and needs one more. vLLM put blocks 3 and 4, which have no hash, to the front of
# the queue, so `r2` takes block 3. With `ToTheEnd` the blocks stand in the order in which they were given back: first 2, in step
# 13, then `r0`'s 4 and 0, then `r1`'s 3 and 1. After block 2, which `r2` finds, block 4 is the first one.
#
# Here this costs nothing: `r2` finds as many tokens as in vLLM. In the run before, the same rule lost 32 tokens.

# %% [markdown]
# `ToTheEnd` was once vLLM's own rule. [Pull request 42656](https://github.com/vllm-project/vllm/pull/42656), opened in May 2026, changed
# it, because blocks that no request can find pushed out blocks that can be found. In an example of its description two long prompts
# alternate. Before, no block was found when a prompt came again. Now blocks of both are found. In another one, on a GPU, the
# partly filled blocks of many requests had pushed everything out of a cache of more than 2,000 blocks. You wrote the new rule in notebook 05.

# %% [markdown]
# Here is a good place for a pause. If you begin here after a restart, first run all cells above (menu Run, "Run All Above
# Selected Cell").

# %% [markdown]
# ## 4 · Predict the hits of a burst
#
# **Objective:** say what vLLM will find before it runs.
#
# A *burst* is several requests that come at once. Here four come to an empty pool. Their prompts have a common beginning,
# as the requests of one application often do. Three of them may run at the same time.

# %%
burst = recorded_run("burst")
prompts = [event.prompt_token_ids for event in burst.events if isinstance(event, Added)]
print(f"{len(prompts[0])} tokens")
for prompt in prompts[1:]:
    both = list(zip(prompts[0], prompt, strict=False))
    common = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
    print(f"{len(prompt)} tokens; the first {common} are the same as in the first prompt")

# %%
predictions.ask(
    "hits",
    "Blocks have 32 tokens. How many tokens do the four requests find?",
    ["0, 0, 0, 0", "0, 0, 0, 64", "0, 64, 32, 64", "0, 68, 44, 68"],
)

# %% [markdown]
# ### Exercise 1: how many tokens does each request find? (10 minutes)
#
# All requests come at once and in this order, and pool and budget are large enough. A prompt finds the full blocks
# that it shares with the beginning of any earlier prompt, also with one of the same step. At least one token must be left to run.
#
# <details><summary>Hint</summary>For each prompt, go through all earlier prompts. Try the ends of blocks (32, 64, 96, ... for blocks of 32):
# are the first <code>end</code> tokens of both prompts equal? Keep the largest such end. It must be smaller than the
# length of the prompt.</details>


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

# %%
admitted = [
    (one.step, one.request_id, one.num_cached) for one in burst.events if isinstance(one, Admitted)
]
if predictions.reveal("hits", ", ".join(str(found) for *_, found in admitted)):
    for number, name, found in admitted:
        print(f"step {number}: {name} is admitted and finds {found} tokens")

# %% [markdown]
# The second request shares 68 tokens, but only two full blocks: 64. The hash of a prompt's block is computed when the
# request comes. A block can be found as soon as the tokens that fill it are planned, while the rest of the
# step is still being planned. So the second request finds blocks that are
# not written yet, in the step that writes them. This is right, because in each layer the keys and values of all tokens
# are written before any token reads them.

# %% [markdown]
# The third prompt has only one full block, so it finds at most 32 tokens. The fourth request waits until step
# 12, because only three may run. The blocks are still there: it finds 64 tokens, too. The picture shows the end of step
# 0. The last 8 blocks of the pool are not drawn: they are free.

# %% tags=["figure-burst"]
block_view(burst, 0, num_drawn=8)

# %% [markdown]
# In step 11 the first three requests end, one after the other. A block is free when the last request that holds it ends.
#
# | who ends | gives back | free now: no hash, to the front | free now: with a hash, to the end | still held |
# |---|---|---|---|---|
# | `r0` | 0 1 2 | 2 | | 0 and 1, by others |
# | `r1` | 0 1 3 | 3, before 2 | 1 | 0, by `r2` |
# | `r2` | 0 4 5 | 5, before 3 | 4, then 0 | |

# %% [markdown]
# So the queue is 5 3 2, then the blocks that were free before, then 1 4 0. (Block 4 is full by now: `r2` wrote its answer
# into it, too.) In step 12 `r3` finds blocks 0 and 1, and takes block 5.

# %% tags=["figure-shared"]
queue_picture(burst, [11])

# %% [markdown]
# ## 5 · Two numbers of vLLM's log
#
# **Objective:** find the arithmetic of notebook 04 in the log of a server.
#
# Section 2 of notebook 04 showed two numbers of vLLM's log: how many tokens fit, and how many of the longest
# requests can run at once. The next cell prints lines that were copied from the log: vLLM 0.32.0 wrote them with our small model, 1 GiB, blocks of 32, and
# `max_model_len` of 300 and of 320. (On a GPU the line begins with "GPU KV cache size".) It also prints the bytes of K and V of one token, as in notebook 02.

# %%
from tutorial_engine.cache import KVCacheSpec

print("CPU KV cache size: 491,520 tokens, Maximum concurrency for 300 tokens per request: 1638.40x")
print("CPU KV cache size: 524,288 tokens, Maximum concurrency for 320 tokens per request: 1638.40x")
print(KVCacheSpec.from_model(model.config, torch.float32).bytes_per_token, "bytes per token")

# %% [markdown]
# ### Exercise 2: where do these numbers come from? (10 minutes)
#
# Find the rule for both numbers. `num_bytes` is the memory for keys and values, here 1 GiB.
#
# - It is divided into blocks. A rest that is too small for a block is not used.
# - All blocks count, also the *null block*, which vLLM never gives to a request (section 7).
# - A request of 300 tokens takes 10 blocks, 320 slots. But in the first number it counts as 300 tokens.
# - The first number is rounded down. The second one is not rounded (only the log prints two decimals).
#
# <details><summary>Hint</summary>Begin with the second number: how many blocks are there, and how many does the longest
# request take? The first number follows from it.</details>
# <details><summary>Second hint</summary><code>-(-a // b)</code> is a / b, rounded up.</details>


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
# So the first number is what fits when every request has the greatest length. The pool has 524,288 slots in both lines.
# With 300 tokens each request leaves 20 of its 320 slots empty, and 491,520 are left. In notebook 04 the longest request
# had 32 tokens, which are 8 whole blocks of 4. So no slot stayed empty. With 320 tokens it is the same here.

# %% [markdown]
# ## 6 · Where to read in vLLM
#
# **Objective:** open the function of vLLM that does what you know.
#
# Before you read code of vLLM, look at what `BlockPool.free_blocks` of vLLM did. The next cell prints vLLM's own queue, in
# vLLM's own numbers (the block that it calls 1 is our block 0), around step 19 of the first run: `A`, `B` and `C` end, each with one block
# that is not full. It also compares the queue after each step with ours. Where vLLM is installed, it prints the function.

# %%
before, after = queues(vllm_run)[18:20]
print("vLLM, before step 19:", *(block + 1 for block in before), f"({len(before)} are free)")
print("vLLM, after step 19: ", *(block + 1 for block in after), f"({len(after)} are free)")
both = {"four requests": (vllm_run, ours_of_four), "small pool": (theirs, ours)}
for name, (run, again) in both.items():
    pairs = list(zip(queues(run), queues(again), strict=True))
    print(
        f"{name}: the queue equals ours after {sum(a == b for a, b in pairs)} of {len(pairs)} steps"
    )
if importlib.util.find_spec("vllm"):
    import inspect

    from vllm.v1.core.block_pool import BlockPool

    print(inspect.getsource(BlockPool.free_blocks))

# %% [markdown]
# `C` ended last, and its block, vLLM's 3, is the first one now.
#
# The file of vLLM's scheduler has 3,436 lines (0.32.0). The next cell counts ours. Most other lines serve what our engine
# does not have, for example images in a prompt, or more than one machine. Each row names our function and vLLM's. The link
# leads to its line in version 0.32.0 (it needs the internet). Begin with the four rows that are open. The others open with a click.
#
# **A question for vLLM's code.** Open `BlockPool.free_blocks` in the table below. Of the blocks without a hash, those of
# the request that ended last are taken first. A comment says why. What is the reason?
#
# <details><summary>Answer</summary>"LIFO reuse of non-cached blocks for better GPU locality" (LIFO: last in, first out).
# This probably means: the block that was given back last was used last, so parts of it may still be in the fast caches of the GPU.</details>

# %%
from tutorial_engine.engine import Scheduler
from tutorial_engine.learn import Places, num_lines

print("lines of our scheduler:", num_lines(Scheduler))
Places()

# %% [markdown]
# ## 7 · What differs, and what is missing here
#
# **Objective:** know what changes when a program moves to vLLM, and what is missing here.
#
# - **Greedy.** Without a `temperature` this engine takes the likeliest token. vLLM's `SamplingParams` have 1.0. If
#   `generate` gets no `SamplingParams` at all, vLLM takes the values in the model's file `generation_config.json`.
# - **`dtype`.** By default ours is float32; vLLM's is that of the model's files, but 16 bits where they name float32.
# - **Hashes.** vLLM's hash also depends on what else changes K and V: an image, or a LoRA. A request
#   may have a *salt* of its own, a secret that keeps users apart. Ours has one salt for a pool.

# %% [markdown]
# - **Asynchronous scheduling.** On a GPU vLLM by default plans the next step before the last one has its tokens. So the GPU
#   does not wait for Python, as long as a plan takes less time than a forward. To plan a step, vLLM must know *how many* tokens
#   each request runs. It need not know *which* token was chosen: this token is on the GPU already, and the next step reads
#   it there.

# %% [markdown]
# The picture has a plan of 3 ms and a forward of 7 ms (chosen, not measured). In the lower half plan 3 is ready before the
# tokens of step 2 are known. (Only one plan is ahead at a time.) So a request whose end token comes in step 2 is still in
# plan 3.

# %% tags=["figure-overlap"]
from tutorial_engine.viz import overlap_picture

overlap_picture(plan=3, forward=7, steps=4)

# %% [markdown]
# The tokens are the same, except in near ties (section 1). The steps may differ. It depends on how a request ends:
#
# | it ends by | vLLM knows it | steps too many |
# |---|---|---|
# | `max_tokens` | before | none |
# | an end token | when the token has arrived | up to one |
# | a stop string | later still: usually another process turns the tokens into text, and looks for it | one or more |

# %% [markdown]
# (With a stop string no step is too many if the text is made in the process that plans, and no step is planned ahead. Our engine
# works like this.)
#
# In each case the request keeps its place and its blocks until its last token has arrived; with a stop string, until the engine
# is told that it has ended. So a waiting request may come
# one plan later than here (with a stop string perhaps more).
#
# This is read from vLLM's code. No run with it is recorded here. Our engine plans one step after the other, so that
# you can look between them.

# %% [markdown]
# - **The null block.** vLLM never gives its block 0 to a request. A table may point to it where nothing is stored, for
#   example before a sliding window (a layer with such a window sees only the last tokens). This is why the trace counts
#   from 0 where vLLM counts from 1. vLLM's option `num_gpu_blocks_override` counts the null block: with 6, requests can
#   use 5. Our `LLM` counts in the same way.

# %% [markdown]
# - **Watermark:** a part of the blocks that stays free when requests are admitted. vLLM's default is none, as here.
# - **Connectors** (parts that bring keys and values from the computer's memory, or from another machine). We have none.
# - **Speculative tokens.** For example a small model guesses several tokens, and the large one checks them in one forward. We have none.
# - **Several samples.** Our samples of one prompt share all blocks, and copy one when they write to it. In vLLM
#   each sample is a request of its own. It finds the full blocks before the last token of the prompt, and runs the rest again.

# %% [markdown]
# ## When one machine is not enough
#
# You can take a program to vLLM: name the model and its `dtype`, write the temperature, and change the import line. `docs/vllm.md` of this course has the
# names that both know, and what differs. In vLLM `LLM(..., tensor_parallel_size=2)` divides the
# model among two GPUs, as appendix A1 does with two processes. To divide one model among several machines, vLLM needs Ray
# (a library that starts programs on many machines) or its option `--nnodes`.

# %% [markdown]
# **No run on several GPUs or machines was recorded for this course**: all its runs of vLLM are of one process on one CPU. According to vLLM's code, one scheduler plans
# for all GPUs among which `tensor_parallel_size` divides a model. (With data parallelism, each copy has its own.) So we expect the plans, blocks and
# hits that you know, if asynchronous scheduling is off and the layers are not divided among GPUs (*pipeline parallelism*). We have not seen it.

# %% [markdown]
# With `tutorial_engine.lab.record` you can look into your own vLLM, in the pictures of these notebooks. It needs an
# engine in the same process, without asynchronous scheduling, and a model whose layers all keep all tokens (none has a
# sliding window, for example).

# %%
if importlib.util.find_spec("vllm"):
    from tutorial_engine.lab import record

    # The second engine of this process: if there is no memory for it, write
    # gpu_memory_utilization=0.4 into this call of LLM(...), and into that of `program` above.
    llm = vllm.LLM(str(TINY), dtype="float32", block_size=32, max_model_len=320, enforce_eager=True,
                   async_scheduling=False)  # fmt: skip
    with record(llm) as run:
        llm.generate(["Once upon a time", "One day"], use_tqdm=False)
    print(run.trace().num_steps, "steps of your own vLLM were recorded")

# %% [markdown]
# ## What you can do now
#
# You can read a run of vLLM: who runs, who is preempted, and which block is taken next. You say before a burst what each
# request finds, and compute the two numbers of vLLM's log. You can open the functions of vLLM that decide who runs, who is
# preempted, and which blocks are taken and found.
# You know what was compared here (plans, blocks, queues and tokens, on one CPU), and what was not.

# %%
print(predictions.score())
