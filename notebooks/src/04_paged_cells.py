# %% [markdown]
# # 04 · Pages and cells
#
# A KV cache is two things: a **storage** (the K and V of each layer, by slot) and a **map** (which slot
# holds whose token). Here you change the map only: model, scheduler and engine are those
# of notebook 03; do that first. Two sittings: to section 10 (90 minutes), then the rest (60).

# %%
import torch

from tutorial_engine.cache import CellKVCache, PagedKVCache
from tutorial_engine.engine import EngineConfig, LLMEngine, VirtualClock
from tutorial_engine.learn import Predictions, show_source
from tutorial_engine.model import TINY, load_model, load_tokenizer
from tutorial_engine.sampling import SamplingParams
from tutorial_engine.trace import Recorder
from tutorial_engine.trace.history import history
from tutorial_engine.viz.tokens import token_label

torch.set_grad_enabled(False)
torch.set_num_threads(1)  # for a model this small a second thread costs more than it brings
predictions = Predictions()
model, tokenizer = load_model(), load_tokenizer()
labels = {i: token_label(tokenizer, i) for i in range(tokenizer.get_vocab_size())}

# %% [markdown]
# ## 1 · What rows waste
#
# **Objective:** measure it. The three requests of notebook 03, on rows: each gets room for the longest
# text there may be, here 64 tokens.

# %%
PROMPTS = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]
prompts = [tokenizer.encode(text).ids for text in PROMPTS]
params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (6, 3, 5)]


def make_engine(memory=None, **limits):
    config = EngineConfig(**({"max_model_len": 64, "max_num_seqs": 3} | limits))
    trace = Recorder() if memory is None else memory.trace
    return LLMEngine(model, tokenizer, config, memory=memory, clock=VirtualClock(), trace=trace)


def serve_three(engine, params=params):
    for name, ids, own in zip("ABC", prompts, params, strict=True):
        engine.add_request(ids, own, name)
    return {out.request_id: out.outputs[0].token_ids for out in engine.run()}


on_rows = make_engine()
right = serve_three(on_rows)
print([len(ids) for ids in prompts], "prompt tokens,", [len(right[k]) for k in "ABC"], "new ones")

# %%
predictions.ask(
    "waste",
    "Three rows of 64 slots are reserved. At the fullest moment, how many of the 192 hold a token?",
    ["about 30", "about 100", "about 190"],
)

# %%
states = [step.after for step in history(on_rows.trace.trace())]
used = [sum(len(request.slots) for request in state.requests.values()) for state in states]
predictions.reveal("waste", "about 30" if max(used) < 60 else "about 100")
print("slots in use after each step:", used, "(those that ended are gone)")

# %% tags=["figure-waste"]
from tutorial_engine.viz.memory_plots import waste_over_time

waste_over_time({"rows": on_rows.trace.trace()})

# %% [markdown]
# Nobody else may use the rest: it is *reserved*. On a GPU, memory limits how many requests run at once.
# (Kwon et al., 2023, found 20 to 38 % of it in use in the engines of the time.)

# %% [markdown]
# ## 2 · Blocks for a budget
#
# **Objective:** turn bytes into blocks. A **block** is room for a few tokens, in *all* layers.

# %% [markdown]
# ### Exercise 1: how many blocks? (5 minutes)
#
# <details><summary>Hint</summary>A token leaves a K and a V vector per K/V head in each layer. A part of a
# block is no block: <code>//</code>.</details>


# %% tags=["exercise"]
def num_blocks(budget_bytes, num_layers, num_kv_heads, head_dim, itemsize, block_size):
    """Blocks of block_size tokens that fit into a budget."""
    ### BEGIN SOLUTION
    per_token = 2 * num_layers * num_kv_heads * head_dim * itemsize
    return budget_bytes // (per_token * block_size)
    ### END SOLUTION


# %%
from tutorial_engine.learn.checks_04 import check_num_blocks

check_num_blocks(num_blocks)

# %% [markdown]
# Forget the layers, and a budget of 10 GiB gives 40,960 blocks instead of 1,280: each looks 32 times as
# small as it is. This mistake is in circulation:

# %% tags=["figure-layer-factor"]
from tutorial_engine.cache import KVCacheSpec
from tutorial_engine.viz.memory_plots import layer_factor

wide = KVCacheSpec(
    num_layers=32, num_kv_heads=32, k_head_dim=128, v_head_dim=128, dtype=torch.bfloat16
)
layer_factor(wide, 10 * 2**30)

# %% [markdown]
# Real shapes, on the `meta` device: tensors with a shape and no memory. (`tp`: the heads are shared among
# that many GPUs; section 15.)

# %%
from tutorial_engine.cache import KVStorage
from tutorial_engine.cache.paged import num_blocks_in

shapes = {
    "GPT-2 124M": (12, 12, 64, 1024),
    "Llama-2-7B, tp 4": (32, 32 // 4, 128, 4096),
    "Qwen3-0.6B": (28, 8, 128, 32768),
}
for name, (layers, heads, dim, length) in shapes.items():
    spec = KVCacheSpec(
        num_layers=layers, num_kv_heads=heads, k_head_dim=dim, v_head_dim=dim, dtype=torch.bfloat16
    )
    row = KVStorage(spec, length, device="meta")
    print(
        f"{name:17} {spec.bytes_per_token:7,} bytes a token, a row of {length:6,}: "
        f"{row.num_bytes / 2**20:6,.0f} MiB; 1 GiB = {num_blocks_in(2**30, spec, 16):5,} blocks of 16"
    )

# %%
try:
    num_blocks_in(1, spec, 16)
except ValueError as error:
    print(error)

# %% [markdown]
# ## 3 · The block table
#
# **Objective:** find a token. A request counts its own blocks 0, 1, 2: *logical* blocks. Its table says which
# *physical* block of the pool each one is. Position p lies in block `table[p // block_size]`, at offset
# `p % block_size`.
#
# ### Exercise 2: table to slots (5 minutes)
#
# <details><summary>Hint</summary>The slot of a position is its physical block times the block size, plus
# the offset.</details>


# %% tags=["exercise"]
def slots(block_table, block_size, num_tokens):
    """The slot of each of the positions 0 .. num_tokens - 1."""
    ### BEGIN SOLUTION
    return [block_table[p // block_size] * block_size + p % block_size for p in range(num_tokens)]
    ### END SOLUTION


# %%
from tutorial_engine.learn.checks_04 import check_slots

check_slots(slots)

# %% [markdown]
# Writing is a scatter by slot, reading a gather by slot. A pool full of NaN shows that nothing else is
# touched. Five tokens go to slots in blocks 5, 12 and 7 of 16 tokens each, chosen freely; slot −1 is skipped:

# %%
spec = KVCacheSpec(num_layers=2, num_kv_heads=1, k_head_dim=4, v_head_dim=4)
pool = KVStorage(spec, 13 * 16)
pool.k.fill_(float("nan"))
new = torch.arange(6.0).view(6, 1, 1).expand(6, 1, 4)
pool.scatter(0, torch.tensor([80, 81, 195, 196, 127, -1]), new, new)
print("written:", (~pool.k[0, 0, :, 0].isnan()).nonzero().flatten().tolist())
print("layer 1 untouched:", pool.k[1].isnan().all().item())
keys, _ = pool.read(0, torch.tensor([80, 81, 195, 196, 127]))
print("read in order:", keys[:, 0, 0].tolist())

# %% [markdown]
# ## 4 · The same engine, on pages
#
# **Objective:** watch blocks come and go. Twelve blocks of 4 tokens: a quarter of the memory that the rows
# had. A memory that is to be traced is given its recorder when it is made.


# %%
def pages(num_blocks=12, block_size=4):
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    return PagedKVCache.from_config(model.config, **sizes, trace=Recorder())


memory = pages()
on_pages = make_engine(memory)
print("same tokens as on rows:", serve_three(on_pages) == right)
memory.check_integrity()
print("free blocks at the end:", memory.blocks.num_free, "of", memory.blocks.num_blocks)

# %%
predictions.ask(
    "border",
    "C has 3 prompt tokens. Step 0 runs them, and each step samples one token more. When does C take a "
    "second block of 4?",
    [
        "in step 0: a block ahead",
        "in step 1: its fifth token is sampled",
        "in step 2: its fifth token is run",
    ],
)

# %%
from tutorial_engine.trace.events import BlockTaken

taken = [
    (event.step, event.block)
    for event in on_pages.trace.events
    if isinstance(event, BlockTaken) and event.request_id == "C"
]
predictions.reveal("border", predictions.questions["border"].options[taken[1][0]])
print("C takes (step, block):", taken)

# %% [markdown]
# A sampled token has no K and V yet; it needs a slot when it is *run*. A prompt takes all its blocks when it
# is let in; from then on a block comes at the last moment. Logical blocks left, tables in the middle, the pool
# right:

# %% tags=["figure-pages"]
from tutorial_engine.viz.block_view import block_view

block_view(on_pages.trace.trace(), step=2, labels=labels)

# %% [markdown]
# Once a prompt is computed, waste is at most the open end of its request's last block. The storage is the same as ever;
# the classic five axes are a view of it:

# %%
k_pages, _ = memory.pages()
print("[layers, blocks, kv_heads, block_size, head_dim] =", list(k_pages.shape))
print("a view, no copy:", k_pages.data_ptr() == memory.storage.k.data_ptr())
# %% [markdown]
# ## 5 · Sharing a beginning
#
# **Objective:** compute a prompt once for many. A full block gets a name: a hash of its tokens *and of the
# name of the block before it*. Whoever begins with the same blocks finds them: the **prefix cache**.

# %%
STORY = PROMPTS[0] + " " + PROMPTS[1]
ask_a, ask_b = STORY + " Anna had a dog.", STORY + " Anna had a cat."
engine = make_engine(pages())
engine.add_request(ask_a, params[0], "A")
engine.step()
engine.add_request(ask_b, params[0], "B")
engine.step()
ids_a, ids_b = (tokenizer.encode(text).ids for text in (ask_a, ask_b))
same = next(i for i, (x, y) in enumerate(zip(ids_a, ids_b, strict=False)) if x != y)
print(f"A has {len(ids_a)} prompt tokens, B {len(ids_b)}; the first {same} are the same")

# %%
from tutorial_engine.trace.events import Admitted

predictions.ask(
    "shared",
    f"The first {same} tokens are the same; blocks have 4. How many tokens does B find in the cache?",
    [str(same), str(same // 4 * 4), "0: A is still running"],
)

# %% tags=["figure-shared"]
found = {e.request_id: e.num_cached for e in engine.trace.events if isinstance(e, Admitted)}
predictions.reveal("shared", str(found["B"]))
block_view(engine.trace.trace(), step=1, labels=labels)

# %% [markdown]
# Partial blocks are never shared this way. And at least one token must run, or there are no logits:

# %%
predictions.ask(
    "full",
    "A prompt of 48 tokens, blocks of 16, everything is in the cache. How many tokens are found?",
    ["48", "47", "32"],
)

# %%
long = (ids_a * 3)[:48]
engine = make_engine(pages(num_blocks=8, block_size=16))
for name in "AB":
    engine.add_request(long, SamplingParams(max_tokens=4), name)
    engine.run()
found = {e.request_id: e.num_cached for e in engine.trace.events if isinstance(e, Admitted)}
predictions.reveal("full", str(found["B"]))
print("B came when A was over: what it left in free blocks was found all the same")

# %% [markdown]
# A hash alone proves nothing, unless nobody can make two texts with the same one. So it is SHA-256, and
# never Python's `hash`:

# %%
from tutorial_engine.cache.blocks import BlockManager

show_source(BlockManager.hash_of)
show_source(BlockManager.find)

# %% [markdown]
# ## 6 · Two answers to one prompt
#
# **Objective:** see *copy on write*. `n=2` asks for two continuations. The prompt is computed once; then the
# request is **forked**: both tables hold the same blocks, the open last one as well.

# %%
predictions.ask(
    "copies",
    "10 prompt tokens, blocks of 4: blocks 0 and 1 are full, block 2 is open. Both go on writing. How many "
    "blocks are copied?",
    ["none", "1", "3"],
)

# %%
from tutorial_engine.trace.events import BlockCopied, Forked

engine = make_engine(pages())
two = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
engine.add_request(PROMPTS[0], two, "A")
(answers,) = engine.run()
copied = [event for event in engine.trace.events if isinstance(event, BlockCopied)]
predictions.reveal("copies", str(len(copied)))
for event in engine.trace.events:
    if isinstance(event, Forked):
        print(f"step {event.step}: {event.request_id} shares {event.num_tokens} tokens")
for event in copied:
    print(f"step {event.step}: {event.request_id} copies block {event.source} to {event.block}")
for one in answers.outputs:
    print(one.index, repr(one.text))

# %% tags=["figure-fork"]
block_view(engine.trace.trace(), step=1, labels=labels)

# %% [markdown]
# Whoever writes first to an open block that others hold gets a copy; the last holder keeps it. (A.1 runs the
# last prompt token once more: it needs logits of its own.)

# %%
alone = []
for i in range(2):
    engine = make_engine()
    engine.add_request(PROMPTS[0], two.sample(i), "A")
    alone.append(engine.run()[0].outputs[0].token_ids)
print("as two requests alone:", [one.token_ids for one in answers.outputs] == alone)

# %% [markdown]
# ## 7 · Who is evicted first?
#
# **Objective:** order the queue. Freed blocks keep their content and hash, and can be found until someone
# takes them. The queue decides who is taken next.

# %%
blocks = BlockManager(num_blocks=7, block_size=4)
story = ids_a[:12]
blocks.admit("A", story)
blocks.commit("A", story, 12)
print("A has blocks", blocks.tables["A"], "of", blocks.num_blocks)
blocks.free("A")

# %%
predictions.ask(
    "queue",
    "A is over. Blocks 3 to 6 were never used. In which order are the blocks taken from now on?",
    ["3 4 5 6 0 1 2", "3 4 5 6 2 1 0", "0 1 2 3 4 5 6"],
)

# %%
predictions.reveal("queue", " ".join(map(str, blocks.free_queue)))
blocks.admit("B", [1] * 20)
print("B has blocks", blocks.tables["B"])
blocks.free("B")
later = ids_a[:13]  # A's story and a token more
print("of A's three blocks C finds", len(blocks.find(later)))
blocks.admit("C", later)
print("C has blocks", blocks.tables["C"])

# %% [markdown]
# B needed five blocks and took A's *tail*, block 2. C still finds blocks 0 and 1, and computes the rest anew.
# Had the head gone first, C would have found nothing: a chain is searched from its start.
#
# ### Exercise 3: write eviction (10 minutes)
#
# <details><summary>Hint</summary>In <code>free</code>, go through the table backwards. In
# <code>take</code>, a block that gets new content must not be found under its old hash.</details>


# %% tags=["exercise"]
def free(table, ref_cnt, free_queue):
    """One request gives its table back. ref_cnt: {block: holders}; free_queue: a list."""
    ### BEGIN SOLUTION
    for block in reversed(table):
        ref_cnt[block] -= 1
        if ref_cnt[block] == 0:
            free_queue.append(block)
    ### END SOLUTION


def take(free_queue, hash_of, cached):
    """The next block. hash_of: {block: hash or None}; cached: {hash: block that is found}."""
    ### BEGIN SOLUTION
    block = free_queue.pop(0)
    if hash_of[block] is not None:
        del cached[hash_of[block]]
        hash_of[block] = None
    return block
    ### END SOLUTION


# %%
from tutorial_engine.learn.checks_04 import check_eviction

check_eviction(free, take)
# %% [markdown]
# Now somebody else's block manager. It takes a block as ours does, and differs in `forget`. Now and then
# it serves wrong text to somebody else.

# %%
from tutorial_engine.learn.bugs_04 import StaleBlocks

show_source(BlockManager._claim)
show_source(StaleBlocks.forget)

# %% [markdown]
# ### Exercise 4: the freed-block bug (10 minutes)
#
# Write its `forget` anew. `self.blocks[block].hash` is the block's name, `self.cached` finds blocks by name.
# Return whether the block could be found until now.
#
# <details><summary>Hint</summary>Compare with your <code>take</code>.</details>


# %% tags=["exercise"]
class Mended(StaleBlocks):
    """StaleBlocks, with the bug taken out."""

    def forget(self, block):
        ### BEGIN SOLUTION
        one = self.blocks[block]
        key, one.hash = one.hash, None
        if key is not None:
            del self.cached[key]
        return key is not None
        ### END SOLUTION


# %%
from tutorial_engine.learn.checks_04 import check_mended

check_mended(Mended)

# %% [markdown]
# Five planted bugs, and four tests: each request alone in a fresh pool; several together, in chunks; three
# samples of one prompt; one after the other in a pool so small that blocks are used again.

# %%
predictions.ask(
    "zoo",
    "How many of the five bugs give a wrong token to a request that is alone in a fresh pool?",
    ["none of them", "two", "all five"],
)

# %%
from tutorial_engine.learn.bugs_04 import stress, table

rows = stress(model, prompts)
wrong_alone = sum(row.alone != rows[0].alone for row in rows)
predictions.reveal("zoo", {0: "none of them", 2: "two", 5: "all five"}[wrong_alone])
print(table(rows))

# %% [markdown]
# None shows alone. Two need company, one samples, one reuse. Freeing head first gives right tokens everywhere:
# only *found* (8 to 0) tells. Test a cache with all of them, and call `check_integrity` after each step.
# %% [markdown]
# ## 8 · Too little memory
#
# **Objective:** give way, come back, and say the same. The three want 16 tokens each now. The pool has 12
# blocks of 4; at their ends they would hold 7, 6 and 5: 18.

# %%
more = [SamplingParams(max_tokens=16, ignore_eos=True)] * 3
plenty = make_engine()
right_16 = serve_three(plenty, more)
scarce = make_engine(pages())

# %%
predictions.ask(
    "preempt",
    "All three are admitted (3 + 2 + 1 blocks). In the middle of the way there is no free block. What happens?",
    [
        "the engine refuses the last request",
        "everybody waits until somebody is done",
        "the last one gives its blocks back and is computed again later",
    ],
)

# %%
from tutorial_engine.trace.events import Preempted

got_16 = serve_three(scarce, more)
victims = [(e.step, e.request_id) for e in scarce.trace.events if isinstance(e, Preempted)]
options = predictions.questions["preempt"].options
predictions.reveal("preempt", options[2 if victims else 1])
print("preempted (step, request):", victims)
print("same tokens as with plenty of memory:", got_16 == right_16)

# %% tags=["figure-preempted"]
from tutorial_engine.viz.timeline import timeline

timeline(scarce.trace.trace())

# %% [markdown]
# The victim is the *last* that was admitted; it goes to the front of the queue with its tokens kept, and
# runs prompt and output again like one long prompt. That is *preemption by recompute*. Its price:

# %%
again = scarce.runner.num_tokens - plenty.runner.num_tokens
print(f"{plenty.runner.num_tokens} tokens run with plenty, {again} more with 12 blocks")
print(f"steps: {plenty.num_steps} and {scarce.num_steps}")
found = [(e.request_id, e.num_cached) for e in scarce.trace.events if isinstance(e, Admitted)]
print("found in the cache when admitted:", found)

# %% [markdown]
# A resumed request may find its own old blocks, if nobody took them. What could never fit is refused at the
# door, with the numbers:

# %%
try:
    scarce.add_request([65] * 48)
except ValueError as error:
    print(error)

# %% [markdown]
# ## 9 · Who may come in?
#
# **Objective:** see *thrash*. A prompt may run in chunks. Is it enough if its first chunk fits? This
# variant thinks so:

# %%
from tutorial_engine.learn.eager_pages import EagerPages, cost, crowd, tokens

show_source(PagedKVCache.tokens_to_admit)
show_source(EagerPages.tokens_to_admit)

# %%
predictions.ask(
    "thrash",
    "Prompts of 12, 18 and 18 tokens, 6 blocks of 4, chunks of 4. C is let in as soon as its first chunk "
    "fits. How often is it preempted?",
    ["never", "once", "again and again"],
)

# %%
parts = [ids_a[:12], ids_a[2:20], ids_a[5:23]]
limits = {"num_blocks": 6, "max_tokens": 6, "budget": 16, "chunk": 4}
admissions = {"the whole prompt must fit": PagedKVCache, "the first chunk fits": EagerPages}
runs = {name: crowd(kind, model, parts, **limits) for name, kind in admissions.items()}
patient, eager = runs.values()
times = cost(eager).preempted["C"]
predictions.reveal("thrash", "again and again" if times > 2 else "once")
print("C gives way", times, "times")
print("same tokens:", tokens(patient) == tokens(eager))
for name, trace in runs.items():
    its = cost(trace)
    print(f"{name:26}{its.num_preemptions} preempted, {its.num_recomputed:2} tokens run again")

# %% tags=["figure-thrash"]
from tutorial_engine.viz.timeline import timelines

timelines(runs, title="The same requests under two rules of admission")

# %% [markdown]
# Admit, throw out, admit again: tokens are run twice, and nobody gets anything for it. The cure: a waiting request
# comes in only if its *whole* prompt (less what is found) fits now.

# %% [markdown]
# ## 10 · The pool, step by step
#
# **Objective:** play. Each change of a knob runs the engine again. Try: the largest number of blocks at which
# somebody is preempted. Then blocks of 1: who shares what?

# %% tags=["figure-block-explorer"]
from tutorial_engine.viz.block_explorer import BlockExplorer

BALL = "Once upon a time Anna had a blue ball."
explorer = BlockExplorer(model, tokenizer, [PROMPTS[0], BALL, PROMPTS[2]], num_blocks=12)
explorer.set(step=3)
explorer
# %% [markdown]
# ## 11 · Cells
#
# A good place for a break. Afterwards, *Run → Run All Above Selected Cell* brings you back here.
#
# **Objective:** turn the dial to its end. llama.cpp has no blocks: a **cell** per token. One table of cells
# (position, owners, pending shift) serves all layers.

# %%
from tutorial_engine.cache.cell_table import CellTable

table = CellTable(5)
for pos, word in enumerate(["How", "are", "you"]):
    (cell,) = table.find_slot(1)
    table.place([cell], "A", [pos])
    print(f"{word!r}: position {pos} in cell {cell}")
print(table)

# %%
predictions.ask(
    "cell",
    "Cells 0, 1, 2 are used, 3 and 4 are free. A token of sequence A comes whose position is 5. Which cell?",
    ["cell 5: there is none, so it fails", "cell 3", "cell 0: 5 modulo 5"],
)

# %%
(cell,) = table.find_slot(1)
table.place([cell], "A", [5])
options = predictions.questions["cell"].options
predictions.reveal("cell", options[1 if cell == 3 else 2])
print("visible at position 5:", table.visible("A", 5), "at position 4:", table.visible("A", 4))

# %% [markdown]
# A cell's number says where K and V lie, in every layer; its *position*, where the token stands. Who
# may see it depends on positions and owners, never on cell numbers.
#
# ### Exercise 5: who sees what? (5 minutes)
#
# List the cells that a query of `seq_id` at `pos` may read, by position.
#
# <details><summary>Hint</summary>Three conditions, then sort by position.</details>


# %% tags=["exercise"]
def visible(cells, seq_id, pos):
    """cells: a list of (position or None, owners). Numbers of those that a query may attend to."""
    ### BEGIN SOLUTION
    seen = [(p, i) for i, (p, owners) in enumerate(cells) if p is not None and seq_id in owners]
    return [i for p, i in sorted(seen) if p <= pos]
    ### END SOLUTION


# %%
from tutorial_engine.learn.checks_04 import check_visible

check_visible(visible)

# %% [markdown]
# Now with K and V, and the real model. B shares what A has, up to "are" (`seq_cp`). Then B goes on alone, A
# forgets its last word (`seq_rm`), and B's next token falls into the hole. Whoever changes cells by hand says
# the same of the requests:

# %%
from tutorial_engine.engine import Request, decode, prefill

cache = CellKVCache.from_config(model.config, 8)
cache.storage.k.fill_(float("nan"))
cache.storage.v.fill_(float("nan"))
how, we, they = (tokenizer.encode(text).ids for text in ("How are you", " we", " the"))
a, b = Request("A", how), Request("B", how[:4] + we[:1])
prefill(model, cache, [a])
before = cache.storage.k.nan_to_num().clone()
print("B shares cells", cache.seq_cp("A", "B", 0, 4))
b.num_computed_tokens = 4
print("K was moved:", not torch.equal(before, cache.storage.k.nan_to_num()))
decode(model, cache, [b])
print("A leaves cell", cache.seq_rm("A", 4, 5))
a.token_ids, a.num_computed_tokens = how[:4], 4
b.token_ids.append(they[0])
decode(model, cache, [b])
cache.check_integrity()
print(cache.table)

# %% [markdown]
# Position 5 lies in cell 4. One table, and each layer has the same cells with numbers of its own. A similar
# story, step by step: here sequence 0 first says one word more, then sequence 1 shares. The buttons are yours.
# Try: make sequence 0 forget all, and see which cells are freed.

# %% tags=["figure-cell-explorer"]
from tutorial_engine.viz.cell_explorer import CellExplorer

CellExplorer(model, tokenizer)

# %% [markdown]
# The same `CellKVCache` answers the scheduler's question. The engine does not notice:

# %%
on_cells = make_engine(CellKVCache.from_config(model.config, 48))
print("same tokens as on rows:", serve_three(on_cells) == right)
two_on_cells = make_engine(CellKVCache.from_config(model.config, 48, trace=Recorder()))
two_on_cells.add_request(PROMPTS[0], two, "A")
(answers,) = two_on_cells.run()
print("two samples, as alone:", [one.token_ids for one in answers.outputs] == alone)
states = [step.after for step in history(two_on_cells.trace.trace())]
used = [{slot for one in state.requests.values() for slot in one.slots} for state in states]
print("most slots used:", max(map(len, used)))

# %% [markdown]
# ## 12 · The context is full
#
# **Objective:** know what a *context shift* costs. llama.cpp can drop the oldest tokens and go on: `seq_rm`,
# then `seq_add` moves the others' positions down, and every key is turned back by as much (RoPE: R(p + d) =
# R(d) R(p)). Nothing is computed again.

# %%
show_source(CellKVCache.apply_shifts)

# %%
predictions.ask(
    "shift",
    "Drop the first 6 of 20 tokens and shift. Are the logits those of a fresh run over the 14 that are left?",
    ["yes, up to rounding", "only in a model with one layer", "no, never"],
)

# %% tags=["figure-shift"]
from tutorial_engine.lab.shift import random_model, shift_gap
from tutorial_engine.viz.memory_plots import shift_picture

twenty = (ids_a + ids_b)[:20]
gaps = [shift_gap(random_model(depth), [i % 97 for i in twenty], 6) for depth in (1, 3)]
exact = [gap.logits < 1e-5 for gap in gaps]
options = predictions.questions["shift"].options
predictions.reveal(
    "shift", options[1] if exact == [True, False] else options[0 if all(exact) else 2]
)
for gap in gaps:
    print(f"layers {gap.num_layers}: max |Δ logit| {'<' if gap.logits < 1e-5 else '>'} 1e-5")
shift_picture(gaps, discard=6)
# %% [markdown]
# Deeper keys and values were made from hidden states that had *seen* the dropped tokens. Turning a key
# changes its position, not what it remembers. (Many find the error acceptable; it is not the same text.)
# Back in the explorer: share, then shift one of the two. It is refused: a shared cell has one position.

# %% [markdown]
# ## 13 · By token and by layer
#
# **Objective:** see why the table is kept by token and the data by layer. The same numbers in three orders
# of memory:

# %% tags=["figure-layouts"]
from tutorial_engine.lab.layouts import layouts
from tutorial_engine.viz.layout_plots import layouts_picture

small = torch.arange(36.0).view(3, 2, 3, 2, 1)  # layers, K and V, tokens, heads, dim
layouts_picture(layouts(small), layer=1, token=1)

# %%
torch.manual_seed(0)
kv = torch.randn(8, 2, 512, 8, 64)
three = layouts(kv)
for name, layout in three.items():
    read, write = layout.touched_by_read(3, 512), layout.touched_by_write(511)
    print(
        f"{name:22} layer 3 of token 7 at byte {layout.address(3, 7):10,}; reading layer 3: "
        f"{read.runs:4} runs; writing a token: {write.runs:3} runs"
    )

# %%
q = torch.randn(1, 16, 64)
outs = [layout.attend(3, q, 512, textbook=True) for layout in three.values()]
print("same attention:", all(torch.allclose(out, outs[0], atol=1e-6) for out in outs))

# %% [markdown]
# A *run* is a piece of memory without a gap. A forward reads all tokens of one layer: by layer that is 2 long
# runs, by token 512 short ones. A write touches one token in all layers; it is small, and differs less than
# this machine's noise. Measured here:

# %% tags=["nbval-ignore-output", "figure-layout-race"]
from tutorial_engine.lab.layouts import time_layout
from tutorial_engine.viz.layout_plots import layout_race

measured = {name: time_layout(layout, num_heads=16) for name, layout in three.items()}
layout_race(measured)

# %% [markdown]
# ## 14 · The dial
#
# **Objective:** choose a block size. Rows, pages, cells: three maps over *one* storage, and the block
# size is the dial between them. Twelve requests, eight of them with the same beginning, on 256 slots:

# %%
predictions.ask(
    "dial",
    "Where is the prefix cache of most use, and the waste smallest?",
    ["small blocks", "blocks of 16", "whole rows"],
)

# %%
from tutorial_engine.lab.dial import sharing, sweep_block_sizes

points = sweep_block_sizes(model, sharing(ids_a[:8], 512), num_slots=256, max_len=64)
best = min(points[1:], key=lambda point: (point.mean_waste, -point.tokens_found))
predictions.reveal("dial", "small blocks" if best.position == 1 else "blocks of 16")
print("same tokens everywhere:", all(point.tokens_equal for point in points))
print(f"{'':12}{'waste':>6}{'entries':>9}{'found':>7}{'at once':>9}{'preempted':>11}{'steps':>7}")
for p in points:
    print(
        f"{p.name:12}{p.mean_waste:6.0f}{p.most_entries:9}{p.tokens_found:7}{p.most_running:9}"
        f"{p.preemptions:11}{p.num_steps:7}"
    )

# %% tags=["figure-dial"]
from tutorial_engine.viz.memory_plots import dial

dial(points)

# %% [markdown]
# Small blocks waste little, and share what big ones cannot: 8 equal tokens fill no block of 16. Cells have no
# prefix cache here. Rows copy nothing when they are read, but only four run at once, so they are slow all the
# same. Measured here (speeds are noisy: run it twice):

# %% tags=["nbval-ignore-output"]
for p in points:
    speed, cost = p.measured.tokens_per_second, 1e6 * p.measured.bookkeeping
    print(f"{p.name:12}{speed:6.0f} tokens/s, {cost:5.1f} µs of bookkeeping a token (measured)")

# %% tags=["figure-dial-explorer"]
from tutorial_engine.viz.dial_explorer import DialExplorer

dials = DialExplorer(model, tokenizer, [ask_a, ask_b, *PROMPTS[1:]])
for position in ("cells", 16, "rows", 4):
    dials.set(block_size=position)  # runs the engine there
dials.set(step=5)
dials

# %% [markdown]
# ## 15 · Two ranks
#
# **Objective:** split a model. *Tensor parallelism*: each rank has half of the heads, with their K and V, and
# half of the MLP's columns. What they computed is added up twice per layer: an **all-reduce**.

# %%
predictions.ask(
    "ranks",
    "The tiny model has 4 layers. How many all-reduces does a forward of 20 tokens need?",
    ["2", "8", "160"],
)

# %%
from tutorial_engine.parallel import run_ranks

report = run_ranks(2)  # two processes, torch.distributed, gloo
predictions.reveal("ranks", str(report.traffic.calls // report.num_forwards))
print(report.summary())

# %% tags=["figure-ranks"]
from tutorial_engine.viz.parallel_plots import ranks_picture

ranks_picture(report)

# %% [markdown]
# Each rank runs scheduler and engine by itself; all decide the same, because all see the same logits. The
# storage of one rank holds only its own heads. Heads that do not divide are refused before a process starts:

# %%
try:
    run_ranks(4)
except ValueError as error:
    print(error)
# %% [markdown]
# ## 16 · The ledger is complete
#
# **Objective:** prove it. Every way through this engine, from notebook 02's first cache to two ranks, against
# one reference, and against `transformers`.

# %%
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tutorial_engine.lab.hf import TransformersRunner
from tutorial_engine.lab.ledger import engine_paths, ledger, memory_paths, our_paths, runner_path
from tutorial_engine.lab.ledger import table as ledger_table
from tutorial_engine.parallel import parallel_paths

logging.disable_progress_bar()
theirs = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
paths = our_paths(model) | {"transformers": runner_path(lambda n: TransformersRunner(theirs))}
paths |= engine_paths(model, neighbours=[ids_a, ids_b]) | memory_paths(model) | parallel_paths(TINY)
print(ledger_table(ledger(paths, prompts, num_tokens=12)))

# %% [markdown]
# ## 17 · Now read vLLM, SGLang, llama.cpp
#
# **Objective:** find your way in real engines. What you built, and what to search for there. (SGLang keeps
# prefixes in a radix tree, token by token, where vLLM and we have hashes by block.)

# %%
from tutorial_engine.learn.elsewhere import table as names_elsewhere

print(names_elsewhere())

# %% [markdown]
# ## 18 · A real model
#
# The same, with any dense Qwen3 (downloaded once):
#
# ```python
# model = load_model("Qwen/Qwen3-0.6B", dtype=torch.bfloat16)
# memory = PagedKVCache.from_config(model.config, memory_bytes=2 * 2**30, dtype=torch.bfloat16)
# engine = LLMEngine(model, load_tokenizer("Qwen/Qwen3-0.6B"), memory=memory)
# ```

# %% tags=["nbval-ignore-output"]
if torch.cuda.is_available():
    gpu = load_model(TINY, device="cuda", dtype=torch.bfloat16)
    memory = PagedKVCache.from_config(
        gpu.config, memory_bytes=2**26, dtype=torch.bfloat16, device="cuda"
    )
    print(LLMEngine(gpu, tokenizer, memory=memory).generate(PROMPTS, params)[0].outputs[0].text)
else:
    print("No GPU here. With one, this cell would run pages there.")

# %% [markdown]
# ## What you can do now
#
# Turn bytes into blocks and positions into slots; say what is shared, copied, evicted and recomputed, and
# when; read a block table and a table of cells; choose a block size; split a model in two. That is an
# inference engine. All of it is in this package, and you have seen it run.

# %%
print(predictions.score())
