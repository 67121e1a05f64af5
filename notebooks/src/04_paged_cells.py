# %% [markdown]
# # 04 · Pages, cells and layers
#
# In notebook 03 each request had a whole row of memory. Here you give memory out in small pieces, when it is needed. Only
# the *map* changes: where K and V of each token lie.
#
# | sitting | about | time |
# |---|---|---|
# | sections 1 to 6 | blocks, block tables, attention in place | 2¼ hours |
# | sections 7 to 9 | cells, block size, vLLM's blocks | 1¼ hours |
# | 10 and 11, optional | context shift, order in memory | 30 minutes |
#
# A beginner needs up to half more. You should have done notebook 03, or know how a scheduler admits requests. Skip folded code.

# %%
import torch

from tutorial_engine.cache import PagedKVCache
from tutorial_engine.engine import EngineConfig, LLMEngine, VirtualClock
from tutorial_engine.learn import OwnServer, Predictions, show_source
from tutorial_engine.model import load_model, load_tokenizer
from tutorial_engine.sampling import SamplingParams
from tutorial_engine.trace import Recorder
from tutorial_engine.viz import token_label

torch.set_grad_enabled(False)
torch.set_num_threads(1)  # for a model this small a second thread costs more than it brings
predictions = Predictions("04")
model, tokenizer = load_model(), load_tokenizer()
PROMPTS = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]
prompts = [tokenizer.encode(text).ids for text in PROMPTS]
labels = {i: token_label(tokenizer, i) for i in range(tokenizer.get_vocab_size())}
print([len(ids) for ids in prompts], "tokens")


# %% jupyter={"source_hidden": true}
def make_pages(num_blocks=12, block_size=4, **options):
    """A pool of blocks, with a recorder."""
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    return PagedKVCache.from_config(model.config, **sizes, **options, trace=Recorder())


def make_engine(memory=None, runner=None, **limits):
    """An engine on rows of 64 slots, or on another memory."""
    config = EngineConfig(**({"max_model_len": 64, "max_num_seqs": 3} | limits))
    trace = Recorder() if memory is None else memory.trace
    parts = {"memory": memory, "runner": runner, "trace": trace}
    return LLMEngine(model, tokenizer, config, clock=VirtualClock(), **parts)


# %% jupyter={"source_hidden": true}
NAMES = "Anna Ben Mia Tom Lily Sam Nora Max Ella Finn Ruby Leo".split()
THINGS = ["a red kite", "a blue ball", "a green hat"]
users = [f"{name} had {THINGS[i % 3]}." for i, name in enumerate(NAMES)]
twelve = SamplingParams(max_tokens=12, ignore_eos=True)


def serve_users(memory, places, **limits):
    """Twelve new tokens for each user → tokens by request, and the trace."""
    engine = make_engine(memory, max_num_seqs=places, **limits)
    for i, text in enumerate(users):
        engine.add_request("ABCDEFGHIJKL"[i], text, twelve)
    tokens = {out.request_id: out.outputs[0].token_ids for out in engine.run()}
    return tokens, engine.trace.trace()


# %% [markdown]
# First, a race. Twelve users send a short prompt at the same moment, and each gets 12 new tokens. Two engines
# serve them. Both have the same model, and the same memory for K and V. The first engine gives each user a row of 64
# slots, and has four rows. The second engine gives each user four slots at a time, when they are needed.
#
# Move the slider to 0, and press ▶.

# %% tags=["figure-race"]
from tutorial_engine.viz import RaceExplorer

pages = make_pages(64)
(tokens_rows, few), (tokens_pages, many) = serve_users(None, 4), serve_users(pages, 12)
print(f"memory for K and V in both: {pages.storage.num_bytes // 1024} KiB")
print("same tokens for all twelve:", tokens_rows == tokens_pages)
race = RaceExplorer({"rows": few, "pages": many})
race.set(step=35)
race

# %% [markdown]
# The same memory serves four users at once, or twelve. No answer differs. In the rows most slots are hatched: they are
# reserved for a user, and hold nothing. (The milliseconds are those of the virtual clock of notebook 03. A to D are answered
# sooner on rows: section 5 says why.)
#
# In this notebook you write the second engine: how many blocks there are, who gets which, and an attention that reads
# them where they lie. Your functions for blocks then run this race (section 5).

# %% [markdown]
# # First sitting: pages

# %% [markdown]
# ## 1 · What rows waste
#
# **Objective:** measure how much of the memory of rows ever holds a token.
#
# The three requests of notebook 03 are served on rows of 64 slots. The prompts have 10, 7 and 3 tokens, and 6, 3 and
# 5 new tokens are asked for. Time is counted by the virtual clock, so all numbers are the same on your machine.


# %%
params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (6, 3, 5)]


def serve_three(engine, params=params):
    """Request → its new tokens."""
    for name, ids, own in zip("ABC", prompts, params, strict=True):
        engine.add_request(name, ids, own)
    return {out.request_id: out.outputs[0].token_ids for out in engine.run()}


on_rows = make_engine()
right = serve_three(on_rows)

# %%
predictions.ask(
    "waste",
    "Three rows of 64 slots are reserved, 192 in all. In the fullest step, how many of them hold a token?",
    ["fewer than 60", "60 to 150", "more than 150"],
)

# %% jupyter={"source_hidden": true}
from tutorial_engine.trace import PoolHistory

rows_trace = on_rows.trace.trace()
usage = [snapshot.usage for snapshot in PoolHistory.of(rows_trace).snapshots]
most = max(step.used for step in usage)
if predictions.reveal("waste", (most >= 60) + (most > 150)):
    print("step   with a token   reserved without one   free")
    for step in usage:
        print(f"{step.step:4}{step.used:15}{step.reserved:23}{step.free:7}")

# %% [markdown]
# Nobody else may use the *reserved* slots. Room that is reserved and stays empty is called *internal fragmentation*.
# Where rows have different lengths, gaps between them can be too short for the next request: *external
# fragmentation*. On a GPU, the memory for K and V decides how many requests can run at once, so both cost users. Kwon
# et al. ("PagedAttention", SOSP 2023) measured that between a fifth and two fifths of this memory held tokens in the
# engines of that time. You now build what they proposed. (The paper calls room that is used later *reserved*, and only
# room that is never used internal fragmentation. Our pictures count both as waste.)

# %% [markdown]
# ## 2 · Blocks for a budget
#
# **Objective:** turn bytes into blocks.
#
# A **block** (also: *page*) is room for a fixed number of tokens, in *all* layers. When an engine starts, it takes
# all the memory that it may use, once, and divides it into blocks: the **pool**. Requests then take blocks from the
# pool and give them back.
#
# ### Exercise 1: how many blocks? (5 minutes)
#
# Compute how many blocks fit into the memory that is left for K and V.
#
# <details><summary>Hint</summary>In each layer a token leaves a K vector and a V vector for each K/V head.
# A vector has head_dim numbers of itemsize bytes. A part of a block is no block, so divide with
# <code>//</code>.</details>


# %% tags=["exercise"]
def num_blocks(budget_bytes, num_layers, num_kv_heads, head_dim, itemsize, block_size):
    """How many blocks of block_size tokens fit into a budget."""
    ### BEGIN SOLUTION
    per_token = 2 * num_layers * num_kv_heads * head_dim * itemsize
    return budget_bytes // (per_token * block_size)
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_num_blocks

server = OwnServer(model, tokenizer, memory="pages", num_blocks=12, block_size=4)
server.use(num_blocks, check_num_blocks)

# %% [markdown]
# `server` is the engine of notebook 03, now on pages. It is made of parts. If your function for a part is right, it
# runs in `server` from now on. `serve` sends it all prompts at once, and compares every token with the one that the
# request gets when it is alone. Below, your function decides how many blocks the pool has. Without `memory_bytes` it
# has 12.
#
# You write the parts `find`, `free`, `take` and `slots_for` in notebook 05. In this notebook the package's versions run.

# %%
run = server.serve(PROMPTS, params, memory_bytes=200_000)
print("the pool has", run.trace.settings["num_blocks"], "blocks")

# %% [markdown]
# When vLLM starts, it prints a line like this: `KV cache size: … tokens, Maximum concurrency for … tokens per request: …x`. (Below we
# print it as two lines.)
#
# - *Concurrency*: the blocks of the pool, divided by the blocks of one request of the greatest allowed length.
# - *Size*: this concurrency times that length. Here the length is a multiple of the block size, so the size is the number of
#   all slots. (Appendix A3 has the other case.)
#
# (vLLM counts its block 0 here, too, which it never gives out.)

# %%
predictions.ask(
    "concurrency",
    "The pool has 12 blocks of 4 tokens. A request may have up to 32 tokens. Which number "
    "follows 'Maximum concurrency for 32 tokens per request'?",
    ["1.00x", "1.50x", "3.00x"],
)

# %%
from tutorial_engine.lab import log_of_pool as pool_log

small = make_pages()
if predictions.reveal("concurrency", f"{small.storage.num_slots / 32:.2f}x"):
    print(pool_log(small, 32))

# %% [markdown]
# The concurrency is for the worst case: every request is as long as it may be. Your three requests are shorter, and
# all three run at once on 12 blocks (section 4).

# %% [markdown]
# ## 3 · The block table
#
# **Objective:** find any token of a request in the pool.
#
# A request counts its own blocks 0, 1, 2, and so on. These are its *logical* blocks. Its **block table** says which
# *physical* block of the pool each of them is. So position p lies in the block `table[p // block_size]`, at the
# offset `p % block_size`. The blocks of a table need not be neighbours.
#
# ### Exercise 2: from table to slots (5 minutes)
#
# Give the slot of each position by this rule.
#
# <details><summary>Hint</summary>Block b begins at slot b · block_size. The slot of a position is the
# beginning of its physical block plus the offset.</details>


# %% tags=["exercise"]
def slots(block_table, block_size, num_tokens):
    """The slot of each of the positions 0 .. num_tokens - 1, as a list."""
    ### BEGIN SOLUTION
    return [block_table[p // block_size] * block_size + p % block_size for p in range(num_tokens)]
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_slots

server.use(slots, check_slots)

# %%
run = server.serve(PROMPTS, params)

# %% [markdown]
# Your map now says where K and V are read. The engine calls it for each new table, and again when a table grows. That
# happened 6 times: there were 3 new tables, and each grew once.
#
# <details><summary>The same memory, seen with five axes</summary><code>small.pages()[0].shape</code> is [layers, blocks,
# K/V heads, block size, head_dim]. It is a view: nothing is copied. The package's map is
# <code>PagedKVCache._slots_of</code>. If the blocks of a table are neighbours in the pool, their slots are one piece,
# and attention reads them without a copy. (If more than four requests decode in a step, our engine may copy them all the
# same: one call for all of them is faster here than many.)</details>

# %% [markdown]
# ## 4 · The same engine, on pages
#
# **Objective:** watch blocks come and go.
#
# The three requests run on 12 blocks of 4 tokens. These are 48 slots, a quarter of what the rows had.

# %%
on_pages = make_engine(make_pages())
print("same tokens as on rows:", serve_three(on_pages) == right)
on_pages.memory.check_integrity()
blocks = on_pages.memory.blocks
print("free blocks at the end:", blocks.num_free, "of", blocks.num_blocks)

# %%
predictions.ask(
    "border",
    "C has 3 prompt tokens, so they fit into one block of 4. Step 0 runs them, and each step gives C one "
    "more token. In which step does C take its second block?",
    [
        "in step 0, one block ahead",
        "in step 1, when its fifth token is chosen",
        "in step 2, when its fifth token runs",
    ],
)

# %% tags=["figure-pages"]
from tutorial_engine.trace import BlockTaken
from tutorial_engine.viz import block_view

events = on_pages.trace.events
taken = [e for e in events if isinstance(e, BlockTaken) and e.request_id == "C"]
if chosen := predictions.reveal("border", taken[1].step):
    print("C takes (step, block):", [(event.step, event.block) for event in taken])
block_view(on_pages.trace.trace(), step=2, labels=labels, simple=True) if chosen else None

# %% [markdown]
# A token that was only chosen has no K and V yet. It needs a slot when it *runs*, one step later. So a request takes a
# new block at the last moment. Only its last block can be partly empty: it is *open*.

# %% [markdown]
# ### Exercise 3: a slot for the next token (5 minutes)
#
# Before a token runs, its position `pos` needs a slot. If the table has no block for it yet, take the first block out of
# `free_blocks`, and append it to the table. Change both lists in place. Return the slot. If a block is needed and none
# is free, change nothing and return `None`. (The table may be longer than `pos` needs. Then take no block,
# even if `pos` is the first position of its block: ask whether the table is long enough.)
#
# <details><summary>Hint</summary>In which logical block does <code>pos</code> lie? When does the table have no block for it
# yet? The slot is that of exercise 2.</details>
#
# <details><summary>Second hint</summary>There is no block yet if <code>pos // block_size</code> is
# <code>len(block_table)</code>. <code>free_blocks.pop(0)</code> takes the first block out.</details>


# %% tags=["exercise"]
def allocate(block_table, free_blocks, block_size, pos):
    """The slot of position pos, in a new block if it needs one; None if no block is free."""
    ### BEGIN SOLUTION
    if pos // block_size == len(block_table):
        if not free_blocks:
            return None
        block_table.append(free_blocks.pop(0))
    return block_table[pos // block_size] * block_size + pos % block_size
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_allocate

server.use(allocate, check_allocate)

# %%
run = server.serve(PROMPTS, params)

# %% [markdown]
# Your function gave a slot to each token that ran. In vLLM and in our `Batch` these slots are the `slot_mapping`:
# where a step writes. The block table says where it reads. The engine compares each slot with the one of its own
# block manager, the part that keeps tables and free blocks. If they differ, it says so, and runs the package's
# `allocate`. When no block is free, somebody has to give blocks back (notebook 05).

# %% [markdown]
# The explorer runs the same three requests, with 6 new tokens each. Which lines cross, and why? Step back and watch
# the tables grow. Then change the block size. (With 2 the 12 blocks are too few, and some requests must give
# theirs back, as in notebook 05. With 1 they must, too, and the pool has 12 slots. So a request has at most 12
# tokens, prompt and
# answer together: A ends after 2 new tokens and B after 5.)

# %% tags=["figure-block-explorer"]
from tutorial_engine.viz import ALL_AT_ONCE, BlockExplorer

pages_explorer = BlockExplorer(
    model, tokenizer, PROMPTS, num_blocks=12, arrivals=ALL_AT_ONCE, simple=True
)
pages_explorer.set(step=4)
pages_explorer

# %% [markdown]
# The lines of different requests cross, because each takes the next free block when it needs one. **Try it.** What is
# the largest block size at which C still takes a second block? Read the line above the picture, too: a block that is
# taken in the last step is given back in that step, so it is not drawn.
#
# <details><summary>Answer</summary>7. C runs its 3 prompt tokens and 5 of the 6 new ones, which are 8. The last new
# token never runs.</details>

# %% [markdown]
# ## 5 · Rows against pages
#
# **Objective:** see what the new map is worth.
#
# On pages, only open blocks have internal fragmentation, and any free block fits
# any request: there is no external one.

# %% tags=["figure-rows-and-pages"]
from tutorial_engine.viz import waste_over_time

waste_over_time({"rows": rows_trace, "pages": on_pages.trace.trace()})

# %% [markdown]
# <details><summary>Why 26 tokens in step 2 here, and 17 in the block picture?</summary>This picture counts B's 9
# tokens. The block picture shows the end of the step, and B has left by then: 26 − 9 = 17.</details>
#
# Back to the race. There are 256 slots: 4 rows of 64, or 64 blocks of 4. The prompts have 7 or 8 tokens, and each user
# gets 12 new ones.

# %%
predictions.ask(
    "users",
    "A user runs at most 8 + 11 = 19 tokens here. Rows of 20 slots would be enough, and 12 of them fit into the "
    "256 slots. Would such rows be as fast as pages?",
    ["no, pages are faster", "yes, as fast", "they would be faster"],
)

# %%
_, short = serve_users(None, 12, max_model_len=20)
last = {"pages": many.events[-1].time, "rows of 20": short.events[-1].time}
gain = last["pages"] - last["rows of 20"]
if predictions.reveal("users", 1 + (gain > 1e-9) - (gain < -1e-9)):
    for name, seconds in last.items():
        print(f"{name:11} all answered after {1000 * seconds:.0f} ms")

# %% [markdown]
# Such rows serve all twelve at once. But then nobody may have a longer text. An engine does not know how long an answer
# will be, so a row must have room for the longest one. Pages need not know it: a user with 19 tokens holds 5 blocks, and takes
# the sixth only if it goes on. If every user filled all 64 slots, the gain would be small.
#
# Now your functions run the race. `num_blocks` turns the memory into blocks, `allocate` gives them out, and `slots` says
# where K and V are read.

# %% tags=["figure-own-race"]
from tutorial_engine.trace import Finished

run = server.serve(users, twelve, memory_bytes=pages.storage.num_bytes)
for name, trace in (("rows", few), ("yours", run.trace)):
    ends = [1000 * event.time for event in trace.events if isinstance(event, Finished)]
    print(f"{name:6}{trace.num_steps} steps: first answer {ends[0]:.0f} ms, last {ends[-1]:.0f} ms")
own_race = RaceExplorer({"rows": few, "yours": run.trace})
own_race.set(step=35)
own_race

# %% [markdown]
# On pages there are 12 steps, not 36, and the last answer comes after 342 ms, not 582 ms. But the first four users wait
# longer than on rows: 342 ms, not 193 ms. On the virtual clock a step pays for each of its tokens, and a step on pages runs twelve
# tokens, not four. On a GPU a decode step mostly reads weights (notebook 02). With contexts as short as these, a step
# for twelve users takes hardly longer there than one for four.

# %% [markdown]
# ## 6 · Attention that reads the pages in place
#
# **Objective:** compute attention over scattered blocks without copying them.
#
# Pages have a price. The attention of notebook 01 wants all keys of a request in one tensor. If the blocks of a
# request are neighbours in the pool, a view is enough. If they are not, our engine *gathers* them before the
# attention of each layer: it copies the whole context into one tensor, in every decode step, for one new token. In
# section 4 it copied:

# %%
storage = on_pages.memory.storage
copied = storage.bytes_gathered // storage.spec.bytes_per_token
print(copied, "tokens were copied,", storage.bytes_gathered // 1024, "KiB")
print("the pool has", storage.num_slots, "slots,", storage.num_bytes // 1024, "KiB")

# %% [markdown]
# But paging does not mean copying. *PagedAttention* is the name of an attention that reads each block where it lies.
#
# How does it make a softmax over all tokens? It could keep the scores of all tokens, as the first *kernel* of vLLM did
# (a kernel is a small program that runs on the GPU).
# But for a long context they no longer fit into the chip's fast memory. A **running** softmax (also: *online* softmax)
# keeps only two numbers and one vector for a query. FlashAttention is built on it, and so is your exercise.

# %% [markdown]
# In fp32 exp(89) is infinite. So a softmax subtracts the largest score m from all scores s, and divides by l, the sum of
# all e^(s − m). Here the scores come block by block, and a later block may have a larger one.
#
# Take three scores: 1 and 0 in the first block, 2 in the second. After the first block m = 1 and l = e⁰ + e⁻¹ = 1.368. The
# second block has a larger score, so m′ = 2. The old weights were e^(s − 1) and must become e^(s − 2): multiply them by
# e^(1 − 2) = 0.368. So l′ = 1.368 · 0.368 + e⁰ = 1.503.

# %% [markdown]
# The weighted sum of the values, acc, needs the same factor. s and v are the scores and values of one block. m′, l′ and
# acc′ are m, l and acc after this block:
#
# - **m**, the largest score so far: m′ = max(m, max s)
# - **l**, the sum of the weights: l′ = l · e^(m − m′) + Σ e^(s − m′)
# - **acc**, the weighted sum of the values: acc′ = acc · e^(m − m′) + Σ e^(s − m′) · v
# - in the end the output is acc / l

# %% [markdown]
# Here e^(s − m) is the *weight* of a token. It is not yet a share, because it is not yet divided by l. (It is not a
# learned weight.)
#
# The factor e^(m − m′) corrects what was summed up with the old m: e^(s − m) · e^(m − m′) = e^(s − m′). In code, m′ is the
# new `m`, and `acc` is short for accumulator. Here one query reads its four blocks. In the
# second row of the picture, l′ = 2.15 · 0.231 + 1.30 = 1.80, where 1.30 is the sum of its four e^(s − m′):

# %% tags=["figure-running-softmax"]
from tutorial_engine.viz import record_softmax, running_softmax_picture

running_softmax_picture(record_softmax(model, tokenizer, PROMPTS, layer=2, head=1))

# %% [markdown]
# ### Exercise 4: attention in place (30 minutes)
#
# Read one block at a time, and never put blocks together. Stop after `kv_len` tokens: slots without a token may hold
# anything, also NaN (and 0 · NaN is NaN).
# The engine calls you once for each query, with `kv_len` = its position + 1. So `kv_len` is the causal mask: the first
# queries of a prompt get a table with blocks that they must not read. A score is q · k / √D, as in notebook 01.
#
# <details><summary>Hint</summary>How many blocks have a token of the request? (<code>-(-a // b)</code> rounds up.) How many
# slots of the last one count? Begin with <code>m = torch.tensor(-torch.inf)</code>, <code>l = 0</code>,
# <code>acc = 0</code>. Each block gives its scores, the new m and the factor. Then update l and acc.</details>
#
# <details><summary>Second hint</summary>With <code>block_size = k_pool.shape[1]</code>, go through the first
# <code>-(-kv_len // block_size)</code> blocks of the table. Of block i, <code>n = min(block_size, kv_len - i *
# block_size)</code> slots count. Their scores are <code>k_pool[block, :n] @ q / len(q) ** 0.5</code>.</details>


# %% tags=["exercise"]
def block_attention(q, k_pool, v_pool, block_table, kv_len):
    """One query of one head. q [D], pools [blocks, block_size, D] -> the output [D]."""
    ### BEGIN SOLUTION
    block_size = k_pool.shape[1]
    m, l, acc = torch.tensor(-torch.inf), 0, 0
    for i in range(-(-kv_len // block_size)):
        n = min(block_size, kv_len - i * block_size)
        k, v = k_pool[block_table[i], :n], v_pool[block_table[i], :n]
        scores = k @ q / len(q) ** 0.5
        new_m = torch.maximum(m, scores.max())
        p, correction = torch.exp(scores - new_m), torch.exp(m - new_m)
        m, l, acc = new_m, l * correction + p.sum(), acc * correction + p @ v
    return acc / l
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_block_attention

server.use(block_attention, check_block_attention)

# %%
run = server.serve(PROMPTS, params)

# %% [markdown]
# From now on `server` attends in place. Your function is called for each query, head and layer. Here is
# the package's loop, for all heads and all new tokens at once. Find your own lines in it. `by_kv_head` puts the
# query heads that share a K/V head together. `bmm` is `@` for all K/V heads at once. It has a mask, where
# yours has a `kv_len` for each query.

# %%
from tutorial_engine.cache import NaivePagedAttention, attend_in_blocks

show_source(attend_in_blocks)

# %% [markdown]
# A second version, `PagedAttention`, works on many blocks in one call. It cuts the context into pieces, and computes m, l and acc of
# each. To merge two pieces, bring both to the larger m (each times its own factor). Then add the two l and the two acc. All three ways (gather, block by block, many blocks) give the same tokens:

# %% jupyter={"source_hidden": true}
from tutorial_engine.lab import PagedAttention
from tutorial_engine.engine import ModelRunner

ways = {"gather": None, "block by block": NaivePagedAttention, "many blocks": PagedAttention}
for name, backend in ways.items():
    memory = make_pages()
    runner = ModelRunner(model, memory.storage, backend(memory) if backend else None)
    same = serve_three(make_engine(memory, runner)) == right
    print(f"{name:15} same tokens: {same}, {memory.storage.bytes_gathered / 1024:.0f} KiB copied")

# %% [markdown]
# No byte of K or V is copied any more. Is it faster, too? We measure a decode step over 960 tokens, whose blocks are
# scattered at random. Each way takes 11 steps, in turn with the others, and the median counts. The cell also
# measures other block sizes, for section 8, so it takes about 10 seconds.

# %% tags=["nbval-ignore-output"]
from tutorial_engine.lab import decode_table, decode_times

times = decode_times(model, ways, num_tokens=960, steps=11)  # measured here
for name, by_size in times.items():
    print(f"{name:15} {by_size[16]:6.1f} ms for a decode step, with blocks of 16")
whole = decode_times(model, {"a view": None}, [1024], num_tokens=960, steps=11)["a view"][1024]
print(f"{'a view':15} {whole:6.1f} ms, all in one block of 1,024: nothing to copy")

# %% [markdown]
# Here, in PyTorch on a CPU, the loop is the slowest. The copy costs little: compare *gather* with *a view*. The loop saves it, but
# each turn starts several PyTorch operations for one small block, in each layer. So our engine gathers unless it is told
# otherwise. (This measures PyTorch, not the method: vLLM and llama.cpp have kernels for CPUs, too, and these read in place.)
#
# <details><summary>And on a GPU?</summary>
#
# [Appendix A2](appendix/A2_on_a_gpu.ipynb) has such runs. There, rows that are read in place gave one and a half times as
# many tokens a second as pages that are copied. But these runs differ in two things, the map and the copy. So they do
# not say which of the two gained it.
#
# </details>

# %% [markdown]
# On a GPU this is what kernels are for. One kernel runs the whole loop on the chip: it reads the block table
# itself, loads a block, keeps m, l and acc in *registers* (the chip's fastest memory), and writes nothing but the
# output. *FlashAttention* is this loop as a kernel, for many queries at a time. On many GPUs vLLM calls a version of it that reads
# a block table. Cutting one long context into parts and merging their sums is called *split-KV* or
# *Flash-Decoding*.
#
# <details><summary>The same loop as a kernel, in the manner of Triton, which turns Python into kernels (text only: it does not run here)</summary>
#
# ```python
# @triton.jit
# def decode_kernel(Q, K, V, TABLES, KV_LENS, OUT, SCALE, MAX_BLOCKS, GROUP, SIZE: tl.constexpr):
#     seq, head = tl.program_id(0), tl.program_id(1)  # one program for each request and head, all at once
#     kv_len = tl.load(KV_LENS + seq)
#     query = load_vector(Q, seq, head) * SCALE
#     m, l, acc = -float("inf"), 0.0, zeros_like(query)
#     for i in range(tl.cdiv(kv_len, SIZE)):
#         block = tl.load(TABLES + seq * MAX_BLOCKS + i)  # the table is read here, on the chip
#         valid = i * SIZE + tl.arange(0, SIZE) < kv_len
#         kv_head = head // GROUP
#         keys, values = load_block(K, block, kv_head, valid), load_block(V, block, kv_head, valid)
#         score = tl.where(valid, tl.sum(keys * query, axis=1), -float("inf"))
#         largest = tl.maximum(m, tl.max(score))
#         weight, factor = tl.exp(score - largest), tl.exp(m - largest)
#         l, acc, m = l * factor + tl.sum(weight), acc * factor + weighted_sum(weight, values), largest
#     store_vector(OUT, seq, head, acc / l)
# ```
#
# `load_vector`, `load_block` and `store_vector` stand for address arithmetic, and `weighted_sum(w, v)` for Σ w · v over the
# block. Each request has a row of `MAX_BLOCKS` entries in `TABLES`. `GROUP` is how many query heads share a K/V head. They
# load the same keys again here; real kernels load them once.
#
# </details>

# %% [markdown]
# ---
#
# **The first sitting ends here.**
#
# ---

# %% [markdown]
# # Second sitting: cells, and the size of a block
#
# After a restart of the notebook, run all cells above first (menu Run, "Run All Above Selected Cell").

# %% [markdown]
# ## 7 · Cells
#
# **Objective:** give each token a place of its own.
#
# What if a block has room for one token only? Then no slot stays empty at the end of a block. llama.cpp always works
# like this. A **cell** is a slot for one token, in all layers. With its option `--kv-unified` all sequences share one
# table of cells, as here. (A *sequence* is the text of one answer: its prompt and its new tokens.) Each cell notes three things: the *position* of its token, its *owners* (the sequences that it
# belongs to), and a *shift*, which section 10 explains.


# %%
from tutorial_engine.cache import CellTable


def a_gap():
    """Five cells; sequence A had positions 0 to 3, and has lost position 1."""
    table = CellTable(5)
    for pos in range(4):
        table.place(table.find_slot(1), "A", [pos])  # find_slot(1): one empty cell
    table.seq_rm("A", 1, 2)  # positions from 1 up to 2, without 2
    return table


print(a_gap())

# %% [markdown]
# `head` in the print is no attention head. It is where the search for a free cell begins: behind the token that was
# placed last, or at a freed cell if that is earlier. After the last cell comes cell 0 again. A used cell is passed over.

# %%
predictions.ask(
    "cell",
    "The next token of A comes with position 4. Into which cell does it go? And in which cells are the positions "
    "0, 2, 3 and 4 then?",
    [
        "into cell 4; in cells 0, 2, 3, 4",
        "into cell 1; in cells 0, 2, 3, 1",
        "into cell 1; in cells 0, 1, 2, 3",
    ],
)

# %%
cells = a_gap()
(cell,) = cells.find_slot(1)
cells.place([cell], "A", [4])
seen = ", ".join(map(str, cells.visible("A", 4)))
if predictions.reveal("cell", f"into cell {cell}; in cells {seen}"):
    print(cells)

# %% [markdown]
# The number of a cell says where K and V lie. Its position says where the token stands in the text. Any cell may hold
# any position, so the order of the cells no longer tells what a token may see. A query may see a cell if its sequence
# owns the cell, and if the cell's position is not greater than its own.
#
# ### Exercise 5: who sees what? (5 minutes)
#
# Find the cells that a query may see.
#
# <details><summary>Hint</summary>A cell must be used, <code>seq_id</code> must be one of its owners, and its
# position must be at most <code>pos</code>.</details>


# %% tags=["exercise"]
def visible(cells, seq_id, pos):
    """cells: a list of (position or None, owners) -> numbers of the visible cells, in any order."""
    ### BEGIN SOLUTION
    return [i for i, (p, own) in enumerate(cells) if p is not None and seq_id in own and p <= pos]
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_visible

on_cells = OwnServer(model, tokenizer, memory="cells", num_cells=48)
on_cells.use(visible, check_visible)

# %% [markdown]
# The next cell asks for two answers to each prompt (`n=2`), so that cells get two owners. The engine has only 28 cells, which
# are too few, so that you see what happens then.

# %%
from tutorial_engine.trace import Preempted

two = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
run = on_cells.serve(PROMPTS, two, num_cells=28)
for out in run.outputs:
    print(out.request_id, "has two answers:", [answer.text for answer in out.outputs])
for event in run.trace.events:
    if isinstance(event, Preempted):
        print(f"step {event.step}: {event.request_id} gives all its cells back")

# %% [markdown]
# **What is shared.** The two answers of a request share all its prompt cells except the last one. The second answer of each
# (`A.1`, `B.1`, `C.1`) runs the last prompt token once more, in a cell of its own. For the engine it is one more request, and a
# request gets logits only by running a token.
#
# **What is lost.** The six answers need more than 28 cells. So four of them give all their cells back,
# and one of these does it twice. When cells are free again, each of the four answers runs all its lost tokens again, and then its
# newest one, in cells of its own. This costs time, and changes no token.

# %% [markdown]
# Our engine gathers the visible cells, sorted by position. llama.cpp gathers nothing: its attention reads all cells
# up to the last used one (rounded up), as they lie. A mask gives weight 0 to those that the query may not see. The
# order does not matter, because RoPE is in each key.

# %% [markdown]
# In the explorer you change cells by hand, and the real model runs on them. These are llama.cpp's names:
#
# - `seq_cp` shares cells: it adds an owner, and copies nothing (where all share one table).
# - `seq_rm` takes an owner away. A cell without owners is free.
# - `seq_keep` removes all other sequences.
# - `seq_add` and *apply K-shift* belong to section 10.
#
# `seq_unshare` is ours: it copies shared cells. The explorer opens at the end of a short story. Step back, and read what each
# operation did.

# %% tags=["figure-cell-explorer"]
from tutorial_engine.viz import CellExplorer

CellExplorer(model, tokenizer)

# %%
from tutorial_engine.learn import box

box("kv_unified")

# %%
predictions.ask(
    "freed",
    "Sequences 0 and 1 share the first four cells. Sequence 1 goes on in two cells of its own. Sequence 0 now "
    "leaves all its cells. How many cells become free?",
    ["none", "4", "6"],
)

# %%
cells = CellTable(8)
cells.place(cells.find_slot(4), 0, [0, 1, 2, 3])
cells.seq_cp(0, 1)
cells.place(cells.find_slot(2), 1, [4, 5])
freed = cells.seq_rm(0)
if predictions.reveal("freed", {0: "none"}.get(len(freed), str(len(freed)))):
    print(cells)

# %% [markdown]
# **Try it.** Now do it in the explorer. Do not change the fields (seq 0, p0 0, and p1 −1, which means: to the end). Press the button `seq_rm`.

# %% [markdown]
# ## 8 · Which block size?
#
# **Objective:** choose a block size by what it costs.
#
# Cells, pages and rows are three maps over the same kind of storage. The block size is the dial between them: at one end a cell for each token, at the other a row for each request. Cells and pages of 1 both give out
# room for one token at a time. They differ in the map. Cells have one table for all, with positions and owners. Pages have a
# block table for each request, and keep full blocks for later requests (notebook 05).
#
# Twelve requests come, one every 20 ms. Eight begin with the same 8 tokens. All share 256 slots.

# %%
predictions.ask(
    "dial",
    "On the virtual clock, where on the dial are the twelve requests done first?",
    ["cells", "small pages (1 to 8)", "pages of 16 or 32", "rows"],
)

# %% tags=["figure-dial"]
from tutorial_engine.lab import dial_table, sharing, sweep_block_sizes
from tutorial_engine.viz import dial

arrivals = sharing(prompts[0][:8], model.config.vocab_size)  # behind the 8 tokens: random ones
points = sweep_block_sizes(model, arrivals, num_slots=256, max_len=64)
first = min(points, key=lambda point: point.milliseconds).position
answer = {"cells": 0, "rows": 3}.get(first) if isinstance(first, str) else 1 + (first > 8)
if chosen := predictions.reveal("dial", answer):
    print("same tokens everywhere:", all(point.tokens_equal for point in points))
    print(dial_table(points))
dial(points) if chosen else None

# %% [markdown]
# (The picture appears when you have chosen an answer.) Begin with its left panel. The others show why:
#
# - **Pages of 1 to 8** all need 573 ms: they run the same 273 tokens. The engine *finds* K and V of the common 8 tokens
#   in blocks of an earlier request.
# - **Pages of 16 and 32** find nothing, because 8 tokens fill no such block. They also leave more slots empty. So
#   fewer requests run *at once*, and some are *preempted*: they give their memory back and run again.
# - **Cells** leave no slot empty at the end of a block, but here nobody keeps those of earlier requests.
# - **Rows** have room for four requests only.

# %% [markdown]
# (That cells find nothing is our engine's choice. llama.cpp's server keeps the cells of a request that has ended, and uses
# their beginning again.)

# %% [markdown]
# Small blocks have a price, which the virtual clock does not count: more *table entries* (above: the most in one step, all
# requests together). And our engine must *gather* K and V. From blocks of 1 to 8 the gathered bytes hardly change. With blocks of 16 and 32 they fall, because most contexts lie
# in one block or in neighbouring ones, where a view is enough.

# %% [markdown]
# **Why 16?** On a GPU vLLM's default is 16 tokens in a block for ordinary models. (Some attention kernels need 32, 64 or 128.
# For *hybrid models* see notebook 05, section 4.) In the run above pages of 8 and less were faster: its requests are short, with 8 common tokens. The next
# cell takes 32 requests with prompts of 32 to 512 tokens and 16 to 128 new ones. For each token it measures two durations:
# *bookkeeping* is the work of the block manager, *gathering* is to copy K of one layer out of blocks that lie anywhere.

# %% tags=["nbval-ignore-output"] jupyter={"source_hidden": true}
from tutorial_engine.lab import block_size_trade, trade_table

print(trade_table(block_size_trade()))  # bookkeeping and gathering are measured here

# %% [markdown]
# From blocks of 1 to blocks of 16 most of the bookkeeping goes away, and only about 2 % of the slots are wasted.
# Larger blocks save little more, and waste much more. From blocks of 4 on, gathering hardly depends on the size. (*Table entries* are here those of one
# request, on average.) Does reading in place depend on it? This is the decode step of section 6 with other block sizes.

# %% tags=["nbval-ignore-output"]
print(decode_table(times))  # measured in section 6

# %% [markdown]
# Reading in place does depend on it. In the loop each block is one turn. With blocks of 1 it takes many times
# as long as with blocks of 16, and larger blocks are still faster. With many blocks in one call, the time falls with the
# size, but less and less. Gathering hardly depends on the size.
#
# So on this engine 16 is a compromise. Larger blocks mean fewer turns and less bookkeeping. Smaller blocks waste less,
# and find more of a common beginning. In a kernel a turn starts no PyTorch operations, so small blocks cost less
# there. (We did not measure a GPU.) SGLang's default is 1 where the attention kernel allows it.

# %% [markdown]
# **Try it.** Now all twelve users begin with the same 10 tokens. Choose each block size in the explorer below. At which size are most tokens found and fewest slots wasted? From which size on is nothing found, and why?
#
# <details><summary>Answer</summary>At 1: eleven users find 10 tokens each, which is 110, and nothing is wasted. Blocks of 2
# find 110 as well, but waste 3.1 slots on average. Blocks of 4 and 8 find 8 tokens each, which is 88. From 16 on nothing
# is found: the 10 common tokens do not fill a block. Cells find nothing, because here nobody keeps cells of earlier requests. Their
# waste is 2.1 and not 0: a prompt takes all its cells when it is admitted, and if it runs in chunks, some of them stay
# empty for a step.</details>

# %% tags=["figure-dial-explorer"]
from tutorial_engine.viz import DialExplorer

alike = [f"{PROMPTS[0]} {text}" for text in users]
dials = DialExplorer(model, tokenizer, alike, 12, num_slots=256, max_len=64)
for position in ("cells", "rows", 4):
    dials.set(block_size=position)  # runs the engine there
dials.set(step=10)
dials

# %% [markdown]
# ## 9 · Your pages beside vLLM's
#
# **Objective:** compare your allocation with that of another engine, step by step.
#
# Two runs of vLLM 0.32 with the shipped model were recorded on a CPU: the blocks of each request in each step, and how
# many were free. In this version, vLLM's attention on a CPU takes (for models like ours) only blocks of a multiple of 32 tokens, 128 by
# default. These runs were recorded with 32, so `server` has such blocks, too.

# %% [markdown]
# Now `server` serves the requests of these two runs, 16 in all. The memory of `server` has as many bytes as vLLM's blocks together, without
# block 0, which vLLM gives to nobody. Your `num_blocks` turns these bytes into blocks. Your `allocate` is asked for each new
# token, and must give the same slot as the engine's own block manager.
#
# The two engines number blocks differently. So the check compares patterns: if vLLM's block 9 is our block 0 in one
# place, it must be so in every table and every step.

# %% [markdown]
# If your `slots` is wrong, the steps are the same and the answers are not. So the tokens are compared as
# well. (`block_attention` is not called here: no plan depends on it.)
#
# The output shows one step, in which four of the requests run: `r0` to `r3`. (vLLM's block n is shown as n − 1, because block 0
# is left out.)

# %%
server.beside_vllm(show_step=1)

# %% [markdown]
# The last lines are the block tables of both engines. The numbers differ because the free lists were in another order;
# only the pattern counts. All four requests share their first block, 9 there and 0 here: *finds* counts the prompt
# tokens that are in shared blocks already (notebook 05).
#
# Here are two mistakes, each in a server of its own.

# %%
from tutorial_engine.learn import others_beside_vllm

print(others_beside_vllm(model, tokenizer, lesson=4))

# %% [markdown]
# Without V, the pool gets twice as many blocks. All answers are right, but in no step are as many blocks free as in
# vLLM, so no step counts. Slots without the offset plan every step as vLLM does, because no plan depends on them. But
# attention reads wrong places, and no answer is right.

# %% [markdown]
# <details><summary>Not in this lesson</summary>
#
# - Models that mix layers of several kinds (a window, a state instead of K and V): the layers then share one pool with
#   blocks of different contents, and a block may have hundreds or thousands of tokens.
# - To send blocks to another machine, vLLM can keep all layers of a block side by side: then it is one piece.
# - K and V in 8 bits: twice as many tokens in the same memory as with 16 bits.
# - Multi-head latent attention: one short vector a token instead of K and V for each head.
# - llama.cpp can use a piece from the middle of an old text again, by moving its positions (`--cache-reuse`).
# - Does a sliding window save memory? Only if the engine gives back the blocks that no later query can see. In vLLM
#   this is the work of `SlidingWindowManager`.
#
# [Reading on](../docs/reading-on.md) says where to begin with most of these.
#
# </details>
#
# ## What you can do now
#
# You can turn a memory budget into blocks, find the slot of a position, and read K and V where they lie, with a running
# softmax. You can read a table of cells, and choose a block size by what it costs. In notebook 05
# requests *share* blocks, memory gets full, and a bug lets one user read from another user's conversation.

# %% [markdown]
# ---
#
# **The second sitting ends here.**
#
# ---

# %% [markdown]
# # Third sitting, optional: context shift, and the order in memory
#
# These two sections are for those who want to know more of cells and of the order in memory. Nothing later needs them.
# They take about 30 minutes.

# %% [markdown]
# ## 10 · The context is full
#
# **Objective:** know what a *context shift* does to the text.
#
# A conversation grows until all cells are used. An engine can then drop the oldest tokens and go on: `seq_rm` frees
# their cells, and `seq_add` moves the positions of the others down. A key was turned by its old position (RoPE,
# notebook 01), so in each layer it is turned back by the difference, its *shift*. This is fast, because the model
# runs no token again. The code takes cos and sin of each cell's shift:

# %%
from tutorial_engine.cache import CellKVCache

show_source(CellKVCache.apply_shifts)

# %% [markdown]
# llama.cpp can keep the first tokens, for example the instructions, and drop some behind them. Here A has positions 0
# to 7 in cells 0 to 7. It keeps 1 token and drops 3:

# %%
from tutorial_engine import lab

cells = CellTable(8)
cells.place(cells.find_slot(8), "A", range(8))
lab.context_shift(cells, "A", keep=1, discard=3)  # the package's: you write yours next
print(cells)

# %% [markdown]
# No token has left its cell. Cells 1 to 3 are free, and the others have new positions.
#
# ### Exercise 6: shift the context (5 minutes)
#
# Do this in the cache with its two operations `cache.seq_rm(seq_id, p0, p1)` and `cache.seq_add(seq_id, p0, p1, delta)`.
# Both mean the positions from p0 to p1 − 1, or to the end with p1 = −1. Afterwards the positions have no gap.
#
# <details><summary>Hint</summary>The dropped positions begin at <code>keep</code>. Where do they end? What stands
# behind them moves down, so <code>delta</code> is below 0.</details>


# %% tags=["exercise"]
def context_shift(cache, seq_id, keep, discard):
    """Keep the first positions, drop the next `discard` ones, and move the others down."""
    ### BEGIN SOLUTION
    cache.seq_rm(seq_id, keep, keep + discard)
    cache.seq_add(seq_id, keep + discard, -1, -discard)
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_context_shift

check_context_shift(context_shift)

# %%
predictions.ask(
    "shift",
    "We drop the first 6 of 20 tokens and shift the others. Are the logits those of a fresh run over the 14 "
    "tokens that are left?",
    ["yes, up to rounding", "only in a model with one layer", "never"],
)

# %% tags=["figure-shift"]
from tutorial_engine.lab import random_model, shift_gap
from tutorial_engine.viz import shift_picture

twenty = tokenizer.encode(f"{PROMPTS[0]} {PROMPTS[1]} Anna had a red").ids  # 20
own = context_shift if check_context_shift(context_shift).ok else None  # None: the package's
below_97 = [i % 97 for i in twenty]  # the random models have 97 tokens
gaps = {
    "random, 1 layer": shift_gap(random_model(1), below_97, 6, own),
    "random, 4 layers": shift_gap(random_model(4), below_97, 6, own),
    "trained, 4 layers": shift_gap(model, twenty, 6, own),
}
exact = [gap.logits < 1e-5 for gap in gaps.values()]
chosen = predictions.reveal("shift", 1 if exact == [True, False, False] else 2 - 2 * all(exact))
shift_picture(gaps, discard=6) if chosen else None

# %% [markdown]
# In every layer but the first, K and V are made from the output of the layer before. That layer had already read the
# dropped tokens. The shift changes only the position of a key. So these K and V still depend on the dropped tokens.
# How much does that matter? Here is the text that follows, once with the shift and once from a fresh run. The last
# four examples differ only in what is forgotten.

# %%
from tutorial_engine.lab import shifted_text

begins = [PROMPTS[0], "Once upon a time Anna had a green hat."]
begins += ["Mia had a yellow duck.", "Ben had a blue ball, he said."]
for text, discard in ((twenty, 6), *((begin + " Ben took the", 10) for begin in begins)):
    told = shifted_text(model, tokenizer, text, discard, shift=own)
    print(f"forgotten: {told.forgotten!r}, kept: {told.kept!r}")
    print(f"  with the shift: {told.shifted!r}")
    print(f"  afresh:         {told.fresh!r}")
    print(f"  {told.num_same} of {told.num_tokens} tokens are the same before the texts differ")

# %% [markdown]
# The texts differ from a fresh run. It looks as if "kite" and "yellow" were remembered. But with a green hat forgotten,
# the text also says "yellow kite", and with a blue ball "red kite". So these words are no proof of memory. Still, what was
# forgotten has influence: in these texts the tokens that stayed are the same, but their K and V depend on it.

# %%
box("context_shift")

# %% [markdown]
# ## 11 · By token and by layer
#
# **Objective:** see why the table is kept by token, and the data by layer.
#
# The cell table has one entry for each token, because position and owners are the same in every layer. But K and V
# lie layer by layer. Why not everything of one token side by side? In the picture, a *piece* is memory without a gap.
# Memory is read fastest in long pieces.
# In one layer, K of a token is two numbers here, one for each head, and V is two more.

# %% tags=["figure-layouts"]
from tutorial_engine.lab import kv_layouts as layouts
from tutorial_engine.viz import layouts_picture

few_numbers = torch.arange(48.0).view(2, 2, 6, 2, 1)  # layers, K and V, places, heads, head_dim
layouts_picture(layouts(few_numbers), layer=1, token=1, num_tokens=5)  # the last place is free

# %% [markdown]
# A forward reads K and V of one layer at a time. In how many pieces do those of 1000 tokens lie?
#
# | order | pieces |
# |---|---|
# | by token | 1000 |
# | by layer, neighbours | 2: K, V |
# | by layer, scattered blocks of 16 | up to 126: 63 of K, 63 of V |
# | by layer, scattered cells | 2000 |
#
# So in the order by layer neighbours make long pieces, and in the order by token they never do. (We did not time it. In a
# large model K of one token and layer is a long piece already.) vLLM, SGLang and llama.cpp keep the data by layer by default.

# %% [markdown]
# Our pages and cells are as in the second row of the picture, our rows as in the third.

# %% [markdown]
# In vLLM 0.32 the shape of a layer is [blocks, K/V heads, block size, 2 · head_dim] (pull request
# [44455](https://github.com/vllm-project/vllm/pull/44455)). Most attention kernels, FlashAttention among them, keep K and V of a token and head
# side by side in the last axis. The shape says how a tensor is indexed. Where the numbers lie is said by its *strides*, and these can
# have another order (pull request [51718](https://github.com/vllm-project/vllm/pull/51718), August 2026). Where the attention kernel does
# not ask for another order, the tokens of a block come before its heads, as in the second row. Some kernels ask for heads
# first, for example those on a CPU. (And these keep for each block and head first all K, then all V.)

# %%
print(predictions.score())
