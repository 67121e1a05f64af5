# %% [markdown]
# # 05 · Shared beginnings and full memory
#
# In notebook 04 each request had blocks of its own. Here requests *share* blocks, and the memory gets full. You write
# the search, the eviction and the preemption. At the end, recorded runs of vLLM judge your parts: in
# how many steps do they decide the same?
#
# | sitting | about | time |
# |---|---|---|
# | sections 1 to 3 | sharing, eviction, a strange answer | 1¾ hours |
# | sections 4 to 7 | misses, full memory, your whole engine | 1¼ hours |
#
# A beginner needs up to half more. You should have done notebook 04 up to section 4, or know what a block table is.

# %%
import torch

from tutorial_engine.cache import PagedKVCache
from tutorial_engine.engine import EngineConfig, LLMEngine, VirtualClock
from tutorial_engine.learn import OwnServer, Predictions, show_source
from tutorial_engine.model import TINY, load_model, load_tokenizer
from tutorial_engine.sampling import SamplingParams
from tutorial_engine.trace import Recorder
from tutorial_engine.viz import token_label

torch.set_grad_enabled(False)
torch.set_num_threads(1)  # for a model this small a second thread costs more than it brings
predictions = Predictions("05")
model, tokenizer = load_model(), load_tokenizer()
PROMPTS = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]
prompts = [tokenizer.encode(text).ids for text in PROMPTS]
labels = {i: token_label(tokenizer, i) for i in range(tokenizer.get_vocab_size())}
print([len(ids) for ids in prompts], "tokens")

# %% jupyter={"source_hidden": true}
params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (6, 3, 5)]


def make_pages(num_blocks=12, block_size=4, **options):
    """A pool of blocks, with a recorder."""
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    return PagedKVCache.from_config(model.config, **sizes, **options, trace=Recorder())


def make_engine(memory):
    """An engine for three requests at once, on this memory."""
    config = EngineConfig(max_model_len=64, max_num_seqs=3)
    trace = memory.trace
    return LLMEngine(model, tokenizer, config, memory=memory, clock=VirtualClock(), trace=trace)


# %% [markdown]
# `server` is the engine of notebook 04. The next cell reads your notebook 04 from its saved file. What is right there runs
# in `server` from the beginning.

# %%
from tutorial_engine.learn import bring

server = OwnServer(model, tokenizer, memory="pages", num_blocks=12, block_size=4)
bring(server, "04_paged_cells.ipynb")

# %% [markdown]
# First, something strange. An engine serves three requests, one after the other, in a pool of 9 blocks of 4. Read what
# it answers:

# %% jupyter={"source_hidden": true}
from tutorial_engine.learn import leak

anna, tom = "One day Anna had an old lamp.", "One day Tom had a yellow coat."
asked = {"user 1": anna, "user 2": tom, "user 1 again": anna}
story = leak(model, tokenizer, asked)
print(story)

# %% [markdown]
# The last answer speaks of the coat of user 2. How can it know? Section 3 asks you, and there your own code prevents it.

# %% [markdown]
# # First sitting: sharing

# %% [markdown]
# ## 1 · Sharing a beginning
#
# **Objective:** compute a beginning once for all requests that have it.
#
# Many requests begin with the same instructions or document. The **prefix cache** finds such
# beginnings. A **hash** is a number of fixed size, computed from data: the same data always give
# the same one, and two different texts almost never give the same one. Each full block gets a hash, made of its tokens *and
# of the hash of the block before it*. So it stands for all tokens from the start.

# %% [markdown]
# The engine keeps a dictionary that leads from a hash to its block. A new request looks up its hashes there. One that is found is a **hit**: the request takes the block and does not run its tokens. A hash
# that is not found is a **miss**, and the search ends. This happens once, when the request is admitted: what others compute later, it does not find.

# %% jupyter={"source_hidden": true}
from tutorial_engine.trace import Admitted

STORY = PROMPTS[0] + " " + PROMPTS[1]
ids_a, ids_b = (
    tokenizer.encode(STORY + end).ids for end in (" Anna had a dog.", " Anna had a cat.")
)
same = next(i for i, (x, y) in enumerate(zip(ids_a, ids_b, strict=False)) if x != y)


def found_by(engine):
    """Request → how many of its tokens were found in the prefix cache when it was admitted."""
    return {e.request_id: e.num_cached for e in engine.trace.events if isinstance(e, Admitted)}


print(f"A has {len(ids_a)} prompt tokens, B {len(ids_b)}; the first {same} are the same")

# %%
predictions.ask(
    "shared",
    f"A runs its first step, then B comes. Their first {same} tokens are the same, and blocks have 4. How many "
    "tokens does B find in the prefix cache?",
    [str(same), str(same // 4 * 4), "0, because A is still running"],
)

# %% tags=["figure-shared"]
from tutorial_engine.viz import block_view

sharing_two = make_engine(make_pages())
for name, ids in (("A", ids_a), ("B", ids_b)):
    sharing_two.add_request(name, ids, params[0])
    sharing_two.step()
chosen = predictions.reveal("shared", found_by(sharing_two)["B"])
block_view(sharing_two.trace.trace(), step=1, labels=labels) if chosen else None

# %% [markdown]
# In the picture, `ref` (in the code: `ref_cnt`) is the number of tables that hold a block. Below a block stand the first
# characters of its hash, and after the arrow those of the block before it. The first block has `root` there.
# Only full blocks have a hash, so the rest of the common beginning runs twice.
#
# The blocks of an answer are cached like those of a prompt: A's block 5 holds its first new token, and has a hash. This helps in a
# chat, where each prompt begins with the conversation so far. If the user's program sends exactly the same tokens, the full
# blocks of the conversation are found, as long as they are still there.

# %% [markdown]
# At least one token must run, because without a forward there are no logits to choose the next token from. So if all
# three blocks of a prompt of 12 tokens are cached, only two of them are hits.

# %% [markdown]
# ### Exercise 1: search the prefix cache (10 minutes)
#
# `find` gets the tokens of a new request, and returns the physical blocks that hold its beginning already.
# The dictionary `cached` has the block for each known hash. The hash of a full block comes from
# `hash_of(parent, tokens)`: `parent` is the hash of the block before it, or None for the first block, and
# `tokens` are the tokens of this block alone. The search ends at the first miss, and it leaves at least one token to
# run.
#
# <details><summary>Hint</summary>Go through the prompt block by block, and remember the hash of the last block.
# For 12 tokens in blocks of 4, how many blocks may be found? And for 13?</details>
#
# <details><summary>Second hint</summary><code>range(block_size, len(token_ids), block_size)</code> gives the places
# where such blocks end.</details>


# %% tags=["exercise"]
def find(token_ids, block_size, hash_of, cached):
    """The blocks of the longest beginning that is cached. cached: {hash: block}."""
    ### BEGIN SOLUTION
    found, last = [], None
    for end in range(block_size, len(token_ids), block_size):
        last = hash_of(last, token_ids[end - block_size : end])
        if last not in cached:
            break
        found.append(cached[last])
    return found
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_find

server.use(find, check_find)

# %% [markdown]
# B comes a little after A, when A has run its prompt. So B's common beginning is in the cache, and your `find`
# has to find it. Compare the TTFT of both: B does not run these tokens, so its TTFT is shorter.

# %%
both = [STORY + " Anna had a dog.", STORY + " Anna had a cat."]
run = server.serve(both, SamplingParams(max_tokens=8), times=[0.0, 0.05], num_blocks=32)
print("tokens found in the prefix cache:", found_by(run))

# %% [markdown]
# If two different texts had the same hash, one user would read another user's K and V. The package uses
# SHA-256, a well-known hash function, which makes this practically impossible. But a short TTFT tells a user that
# somebody has sent this text before. A **salt** prevents this: a text of your choice goes into the hash of the first
# block. Then only requests with the same salt share blocks, for example those of one user. In vLLM each request may bring
# its own.

# %% [markdown]
# SGLang has the same idea with a tree in place of hashes. It keeps texts in a *radix tree* until their memory is needed: a branch holds tokens,
# and a new request walks down as far as its tokens agree. So it also finds the tokens that fill no block (by default its blocks, called pages, have one token). C is a third text:

# %% tags=["figure-radix"]
from tutorial_engine.viz import radix_tree

ids_c = tokenizer.encode(STORY + " One day Ben").ids
radix_tree([ids_a, ids_b, ids_c], labels, block_size=4)

# %%
from tutorial_engine.learn import box

box("radix")

# %% [markdown]
# Four more questions:
#
# <details><summary>What if a second request with this beginning comes in the same step?</summary>It finds the blocks. A
# block gets its hash when the step is planned, before its K and V are written. In each layer, attention first
# writes the K and V of all tokens of the step, and only then reads.</details>
#
# <details><summary>What if the forward fails?</summary>Then some layers may have written K and V, and others not. So
# our engine takes the hashes of this step back. The request that was computing the tokens runs them again. If it was
# cancelled (its user went away), the request that found these blocks runs them.</details>
#
# <details><summary>What if two requests compute the same block?</summary>(For example, a prompt of 12 tokens comes twice. Its
# third block runs again, because one token must run.) Both get the same hash. The first one is found; when
# it gets other content, the second one is found.</details>
#
# <details><summary>What if a user asks for two answers to one prompt (<code>n=2</code>)?</summary>vLLM runs two requests, and
# the second one finds the full blocks of the prompt. Our engine <i>forks</i> the request: both hold the same blocks, the open
# last one included. The one that writes first to this block gets a copy of it. This is <i>copy on write</i>.</details>

# %%
box("fork")

# %% [markdown]
# ## 2 · Who is evicted first?
#
# **Objective:** decide which block is given away next.
#
# A full block that nobody holds any more keeps its content and its hash, and can be found until somebody takes it. Free blocks stand in a
# queue. The block at its front is taken next, and what it held is gone: it is *evicted* from the
# prefix cache. A freed block with a hash goes to the end, so of these the *least recently used* one is evicted first
# (*LRU*).

# %% [markdown]
# Below, A had a prompt of 12 tokens, asked for one new token (which never ran), and held the blocks 0, 1 and 2 of 7. It has
# ended, and they go to the end of the queue.
# In which order?


# %%
predictions.ask(
    "queue",
    "Blocks 3 to 6 were never used. In which order are the blocks taken from now on?",
    ["3 4 5 6 0 1 2", "3 4 5 6 2 1 0", "0 1 2 3 4 5 6"],
)

# %% tags=["figure-queue"]
from tutorial_engine.viz import queue_picture

pool_of_7 = make_engine(make_pages(num_blocks=7))
pool_of_7.add_request("A", ids_a[:12], SamplingParams(max_tokens=1))
pool_of_7.run()
order = " ".join(map(str, pool_of_7.memory.blocks.free_queue))
chosen = predictions.reveal("queue", order)
queue_picture(pool_of_7.trace.trace(), [0]) if chosen else None

# %% [markdown]
# A gives its last block back first (you will see why below). A block with # has a hash, so it can still be found. Now B comes with 19 tokens, and
# needs five blocks. It has A's first sentence, but not at its beginning, so it finds nothing. Then C comes, whose
# first 12 tokens are A's:

# %% tags=["figure-evicted"]
pool_of_7 = make_engine(make_pages(num_blocks=7))
ids_new = prompts[1] + prompts[0] + prompts[2][:2]
for name, ids, n in (("A", ids_a[:12], 1), ("B", ids_new, 2), ("C", ids_a[:13], 1)):
    pool_of_7.add_request(name, ids, SamplingParams(max_tokens=n))
    pool_of_7.run()
print("tokens found by each of them:", found_by(pool_of_7))
queue_picture(pool_of_7.trace.trace(), [1])

# %% [markdown]
# The *tail* of A, block 2, goes to B and is evicted. Blocks 0 and 1 stay in the queue with their hashes, so C finds them.
# The engine takes a found block out of the queue, wherever it stands there. Here both stand at the front.
# The content of a found block stays. (The function `take` of exercise 3 is for the other blocks, those that get new content.)
# If block 0 had gone first, C would have found nothing, because the search starts at the first block and stops at the
# first miss.

# %% [markdown]
# All three blocks of A were full. The last block of a request is often open when the request ends. An open block has no
# hash, so nobody can find it, and nothing is lost when it is taken. Therefore blocks without a hash go to the *front*
# of the queue. In vLLM `BlockPool.free_blocks` (vllm/v1/core/block_pool.py) does the same since pull request
# [42656](https://github.com/vllm-project/vllm/pull/42656) (2026).

# %% [markdown]
# ### Exercise 2: a request ends and gives its blocks back (10 minutes)
#
# `free` changes `ref_cnt` and `free_queue` in place, and only reads `hashes`. A block that another request still holds
# stays out of the queue. Blocks without a hash go to the front, the others to the end. In both groups the last block of the
# table comes first. (After a step that failed, several blocks of a request have no hash.)
#
# For example, `table` is `[0, 1, 2, 3, 4]`, blocks 3 and 4 have no hash, and another request holds 0, too. Then
# `ref_cnt[0]` goes from 2 to 1, the others from 1 to 0, and `free_queue` from `[7, 8]` to `[4, 3, 7, 8, 2, 1]`.
#
# <details><summary>Hint</summary>First count the holders down. Then list the blocks that nobody holds any more, from the
# last to the first, and divide the list in two. <code>free_queue[:] = ...</code> changes a list in place.</details>


# %% tags=["exercise"]
def free(table, ref_cnt, free_queue, hashes):
    """A request gives its table back. ref_cnt: {block: holders}; hashes: {block: its hash or None}."""
    ### BEGIN SOLUTION
    for block in table:
        ref_cnt[block] -= 1
    gone = [block for block in reversed(table) if ref_cnt[block] == 0]
    without = [block for block in gone if hashes[block] is None]
    with_hash = [block for block in gone if hashes[block] is not None]
    free_queue[:] = without + free_queue + with_hash
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_free

server.use(free, check_free)

# %% [markdown]
# ## 3 · How can the answer know of the coat?
#
# **Objective:** explain an answer that cannot be right.
#
# At the beginning of this notebook, user 1 sent the same prompt twice, and user 2 wrote of a coat in between. All choices
# were greedy, so both answers to user 1 should be the same.

# %%
predictions.ask(
    "coat",
    "The second answer to user 1 speaks of the yellow coat of user 2. How can it know of the coat?",
    [
        "both prompts begin with “One day”, so they share a block",
        "two different texts have the same hash",
        "a block is found by its old hash, and holds the text of user 2",
    ],
)

# %% tags=["figure-leak"]
from tutorial_engine.viz import leak_picture

chosen = predictions.reveal("coat", 2 if story.stale else 0)
leak_picture(story) if chosen else None

# %% [markdown]
# The hashes of user 1's beginning led to blocks 0 and 1. At first, they held user 1's text. But
# user 2 had taken both (block 0 last, so the end of his text lies there), and *nobody forgot their old hashes*. (For this demonstration we took out the line that forgets a
# hash. The package has it, and in exercise 3 you write it.) So the model read K and V of " yellow",
# " coat" and others as those of user 1's first words. (These tokens are of the answer to user 2, which repeats his coat.)

# %% [markdown]
# The three keys in block 0 are still rotated for the positions 32 to 34 (RoPE, notebook 01), and not for 0 to 2; those in
# block 1 for 28 to 31, and not for 4 to 7. So the positions are wrong, too. But K and V of a wrong word are numbers like any
# others: the model cannot see it, and no error is raised.
#
# The two prompts begin alike, with “One day”. Still they share no block: a full block has 4 tokens, and `O ne day Anna` is
# another block than `O ne day Tom`, so their hashes differ.

# %% [markdown]
# This is a *stale* hash: it is old, and the block no longer holds its text. Such bugs happen. One was reported in July 2026 for
# vLLM 0.25.1. A streaming session (a request whose prompt comes in parts) could replace tokens of a block that had its
# hash already. The hash stayed. A later request with the old tokens could find the block, and read K and V of the new
# ones ([issue 49449](https://github.com/vllm-project/vllm/issues/49449)).

# %% [markdown]
# ### Exercise 3: hand out a free block (5 minutes)
#
# `take` hands out the next block. This is where a block is evicted: it gets new content, so it must not be found
# under its old hash. (Here each hash belongs to one block. When two blocks hold the same text, the engine does the
# bookkeeping for you.)
#
# <details><summary>Hint</summary>Which block of the queue is next? If it has a hash, which two dictionaries still know
# this hash?</details>
#
# <details><summary>Second hint</summary>Take the hash out of <code>cached</code> with <code>del</code>, and set
# <code>hashes[block]</code> to None. A block without a hash is only taken out of the queue.</details>


# %% tags=["exercise"]
def take(free_queue, hashes, cached):
    """The next block of a list. hashes: {block: its hash or None}; cached: {hash: block found}."""
    ### BEGIN SOLUTION
    block = free_queue.pop(0)
    if hashes[block] is not None:
        del cached[hashes[block]]
        hashes[block] = None
    return block
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_take

server.use(take, check_take)

# %% [markdown]
# Here are the same three requests in `server`, with your `take`. It calls them A, B and C, in the order in which they
# come. Now A and C get the same answer. (B has evicted A's blocks, so C runs its whole prompt again.)

# %%
one_by_one = {"times": [0, 1, 2], "num_blocks": 9, "max_model_len": 36}
run = server.serve([anna, tom, anna], SamplingParams(max_tokens=28), **one_by_one)

# %% [markdown]
# Which test finds such a bug? We plant five:
#
# - a taken block keeps its hash: it can still be found, as above;
# - a hash of own tokens only: the hash of the block before is left out of it;
# - found too early: a block is found now, but its K and V are written only in a *later* step (in the same step it would be
#   fine: section 1);
# - a shared block is written: two answers to one prompt write to it;
# - blocks are freed head first: block 0 of a table before the others.

# %% [markdown]
# The tests are:
#
# - *alone*: each request in a fresh pool;
# - *together*: several at once, in chunks; some begin like another, and one begins with another's *second* block;
# - *samples*: three answers to one prompt;
# - *small pool*: one after the other in a small pool.
#
# After each step `check_integrity` compares tables, counts, free queue and hashes.
# It never looks at tokens, K or V.

# %%
predictions.ask(
    "zoo",
    "How many of the five bugs give a wrong token to a request that is alone in a fresh pool?",
    ["none of them", "two", "all five"],
)

# %% jupyter={"source_hidden": true}
from tutorial_engine.learn import stress, stress_table

rows = stress(model, prompts)
wrong_alone = sum(row.alone != rows[0].alone for row in rows)
if predictions.reveal("zoo", {0: "none of them", 2: "two", 5: "all five"}[wrong_alone]):
    print(stress_table(rows))

# %% [markdown]
# The first four columns are the tests, each with its number of right answers. `found` counts the prompt tokens that were hits in
# the last test. Fewer than in “no bug” mean wasted work, more mean that wrong blocks were found. `integrity` is the
# first error of `check_integrity`. (“Found under another hash”: the dictionary leads to a block whose own hash is another one, or none.)

# %% [markdown]
# No bug shows when a request is alone in a fresh pool: it finds no block, shares none, and takes none that was used
# before. Two show in the test with several together. “Found too early” needs another
# request at the same time. “A hash of own tokens only” does not need this: it shows, for example, where a prompt begins with
# the second block of an earlier prompt. Only the test *together* has such prompts.

# %% [markdown]
# One bug shows only with samples, and one
# only in the small pool, where blocks are used a second time. If blocks are freed head first, only `found` shows it. So
# testing requests alone is not enough: a cache needs the three other tests, and the count of hits.

# %% [markdown]
# Two bugs give a wrong token, and `check_integrity` says “fine”: tables, counts and hashes agree, but a hash stands for the
# wrong text, or K and V are not there yet.

# %% [markdown]
# ---
#
# **The first sitting ends here.** You know what is shared, and in which order blocks are evicted.
#
# ---

# %% [markdown]
# # Second sitting: misses, full memory, your whole engine
#
# After a restart of the notebook, run all cells above first (menu Run, "Run All Above Selected Cell").

# %% [markdown]
# ## 4 · Why is my hit rate zero?
#
# **Objective:** find out why a prefix is not found. Many users ask this.
#
# The *hit rate* is the share of prompt tokens that were hits in the prefix cache. Below are five real runs
# of our engine, with three requests each. A and C have much text in common, but the hit rate
# is 0 %. (In run 3, prompts run in chunks, and take their blocks chunk by chunk.) Here are six explanations. One of them is
# never the cause: not in our engine, and not in vLLM if all layers of the model have attention.

# %% jupyter={"source_hidden": true}
from tutorial_engine.lab import BEGINS, EVICTED, NOT_YET, RUNNING, SALT, SHORT, cases

runs = cases(model, tokenizer)
names = {"SHORT": SHORT, "BEGINS": BEGINS, "SALT": SALT, "EVICTED": EVICTED}
names |= {"RUNNING": RUNNING, "NOT_YET": NOT_YET}
for name, cause in names.items():
    print(f"{name:10} {cause}")

# %% jupyter={"source_hidden": true}
for case in runs[:3]:
    print(case.describe(), end="\n\n")

# %% jupyter={"source_hidden": true}
for case in runs[3:]:
    print(case.describe(), end="\n\n")

# %% [markdown]
# ### Exercise 4: name the causes (10 minutes)
#
# Find out why each of the five runs found nothing.
#
# <details><summary>Hint</summary>Ask five questions of each run. Is there a full block at all? Is the first
# block really the same? Do both requests use the same salt? Is the block still there when the second request
# comes? Was it full by then? Section 1 showed that one of them is never the cause.</details>


# %% tags=["exercise"]
def causes():
    """The cause of each run: {"run 1": SHORT, "run 2": SALT}, and so on, for all five."""
    ### BEGIN SOLUTION
    four = {"run 1": EVICTED, "run 2": SHORT, "run 3": NOT_YET, "run 4": SALT}
    return four | {"run 5": BEGINS}
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_causes

check_causes(causes() or {}, runs)

# %% [markdown]
# In run 3, A and C come in the same step. This alone is no cause in our engine: with larger chunks, C finds what A computes
# in this very step. Other engines differ. In a service with several copies of the engine (*replicas*), ask first
# whether the second request went to the same replica: each has a prefix cache of its own.
#
# <details><summary>A case of <code>SHORT</code> that surprises users of vLLM</summary>
#
# *Hybrid models* have state-space layers beside those with attention. Such a layer keeps one state of fixed size, in place
# of K and V. The state after a whole text does not tell the state after half of it, so a hit is possible only where a state was
# saved. In vLLM 0.32:
#
# - A state is saved by default in two places: where the last full block of a prompt ends, and where the last full block of a
#   shared beginning ends, after a later request has shown that it is shared. So the second request with this beginning may miss,
#   and the third can find it. (Until August 2026 a state stayed for each chunk of a prompt: pull request
#   [52216](https://github.com/vllm-project/vllm/pull/52216).)
# - Of layers with a *sliding window* (as in Gemma and gpt-oss) as little is kept: only the blocks of the window before these two
#   places can be found. Without them, the blocks of the other layers are of no use.
# - A block of K and V gets at least as many bytes as this state, so it has some hundred to several thousand tokens. A common
#   beginning shorter than a block finds nothing, and a longer one finds nothing if no state was saved inside it (issues
#   [45238](https://github.com/vllm-project/vllm/issues/45238), [40696](https://github.com/vllm-project/vllm/issues/40696) and
#   [53749](https://github.com/vllm-project/vllm/issues/53749)).
# - Since July 2026 `--prefix-match-unit` lets a hit end inside a block (pull request [46384](https://github.com/vllm-project/vllm/pull/46384)), but only where a state was saved.
#
# </details>

# %%
box("same_step")

# %% [markdown]
# ## 5 · Memory is full
#
# **Objective:** see what the engine does when no block is free.
#
# The three requests want 16 new tokens each. Finished, they would need 7, 6 and 5 blocks, which is 18. The
# pool has 12.

# %% jupyter={"source_hidden": true}
more = [SamplingParams(max_tokens=16, ignore_eos=True)] * 3


def serve_three(engine):
    """Request → its new tokens."""
    for name, ids, own in zip("ABC", prompts, more, strict=True):
        engine.add_request(name, ids, own)
    return {out.request_id: out.outputs[0].token_ids for out in engine.run()}


plenty, scarce = make_engine(make_pages(24)), make_engine(make_pages())
right_16, got_16 = serve_three(plenty), serve_three(scarce)

# %%
predictions.ask(
    "preempt",
    "C, which was admitted last, is preempted first: it gives its blocks back. Later B has computed 21 tokens, and is "
    "preempted, too. It is admitted again in the next step. How many of these 21 tokens run again?",
    ["none", "1", "21"],
)

# %% tags=["figure-victims"] jupyter={"source_hidden": true}
from tutorial_engine.lab import when_memory_full as when_full
from tutorial_engine.viz import timeline

lost = when_full(scarce.trace.trace())
again = [one.num_tokens - one.num_found for one in lost]
chosen = predictions.reveal("preempt", {0: "none"}.get(again[1], str(again[1])))
for one, number in zip(lost, again, strict=True) if chosen else ():
    print(f"{one.request_id} had {one.num_tokens}, finds {one.num_found}, ", end="")
    print(f"runs {number} again; with its newest token: {number + 1}")
if chosen:
    print("same tokens as with plenty of memory:", got_16 == right_16)
timeline(scarce.trace.trace()) if chosen else None

# %% [markdown]
# The *victim*, the preempted request, loses its blocks and keeps its tokens, the new ones included. It waits at the front of the waiting requests. When it
# is admitted again, it searches the prefix cache like a new request: all its tokens are one long prompt now. What it does
# not find runs again. This is *preemption by recompute*. In the picture,
# *recompute* counts the lost tokens that run again and the newest one. (So C's 13 are 12 lost tokens and the newest one. The 13 lost
# tokens below the picture are C's 12 and one of B.)

# %% [markdown]
# C comes back after six steps. In the meantime A and B took its blocks. B comes back after one step.
# A took only B's open block: it has no hash, so it stood at the front (section 2). The five full ones are hits.

# %% [markdown]
# ### Exercise 5: who gives way? (10 minutes)
#
# To give way means to be preempted. `running` has the running requests in the order of admission. Your function must find
# slots for one of them, `request`:
#
# - `allocate(request)` gives its slots, or None if there is no room. (This is the engine's, for all new tokens of a
#   request, and not your `allocate` of notebook 04.)
# - If there is no room, the *last* of `running` is the victim, as in vLLM without priorities. `preempt(victim)` takes it out of `running`. Then ask again.
# - The victim may be `request` itself. Then return None.
#
# <details><summary>Example</summary><code>running</code> is [A, B, C], and A asks. <code>allocate(A)</code> gives None, so C
# is preempted. It gives None again, so B is preempted. Then it gives slots: return them.</details>
# <details><summary>Hint</summary>Repeat while <code>allocate</code> gives None: the victim is <code>running[-1]</code>.
# After the asking request itself has given way, nothing more is to be done: return None.</details>


# %% tags=["exercise"]
def slots_for(request, running, allocate, preempt):
    """The slots for a request, or None if it had to give way itself."""
    ### BEGIN SOLUTION
    while (slots := allocate(request)) is None:
        victim = running[-1]
        preempt(victim)
        if victim is request:
            return None
    return slots
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_slots_for

server.use(slots_for, check_slots_for)

# %% [markdown]
# It is the pool of 12 blocks again, so your `slots_for`, `free` and `take` work hard:

# %%
run = server.serve(PROMPTS, more)

# %% [markdown]
# This is what `preempt` does:

# %%
from tutorial_engine.engine import Scheduler

show_source(Scheduler.preempt)

# %% [markdown]
# **Try it.** This explorer has all that you know by now: the prefix cache, several answers (`n`), eviction and preemption.
# A and B begin alike. With 7 blocks, C evicts block 2, which A had left, in step 8. Make the pool smaller until somebody is preempted. Then
# set 24 blocks of 4, and go to step 3: how many tokens does B find? Set 24 blocks of 1. How many now, and why?
#
# <details><summary>Answer</summary>With 8 blocks no cached block is evicted, and with 7 one is, with 6 two are. With 5, C is preempted. With blocks of 4, B
# finds 4 tokens. With blocks of 1 it finds 7: every common token is found, because each of them fills a block.</details>

# %% tags=["figure-full-explorer"]
from tutorial_engine.viz import BlockExplorer

shared_start = [PROMPTS[0], "Once upon a time Anna had a blue ball.", PROMPTS[2]]
explorer = BlockExplorer(model, tokenizer, shared_start, num_blocks=7)
explorer.set(step=8)
explorer

# %% [markdown]
# So a lack of memory costs time, and here, in fp32, no token changed. (In bf16 roundings may change one, as in notebook 02. A request that does not fit into the pool alone ends early, or is
# refused when it is added.)
#
# <details><summary>Why are the blocks of the victim not copied away, and back later?</summary>This is called
# <i>swapping</i>. In the first vLLM, as here, a block is one piece of K and one of V in every layer, and each piece needs a
# copy of its own. So with small blocks recompute was cheaper, and with large ones swapping. Today's vLLM (its second
# design, called v1) cannot swap.</details>

# %%
box("swap")

# %% [markdown]
# ## 6 · Who may come in?
#
# **Objective:** see *thrash*, and what prevents it.
#
# The package admits a request if its whole prompt fits. A second rule asks only for room for the
# first chunk, because blocks are taken chunk by chunk. Both serve these requests:
#
# | setting | value |
# |---|---|
# | pool | 100 blocks of 4, no prefix cache |
# | prompts of users A to D | 10, 7, 11 and 15 tokens |
# | new tokens | 32 each, E 4 |
# | prompt of E, the last in the queue | 387 (97 blocks): fits when the others are done |
# | first chunk of E | 256 |
#
# <details><summary>Hint for the next question</summary>The first chunk of E needs 64 of the 100 blocks, so 36 are left. A to D begin
# with 12 blocks, and together they need about one more block in each step. E comes in every second step (0, 2, 4, ...), as long as
# the users need at most 36: in the step between, its second chunk finds no room.</details>

# %%
predictions.ask(
    "thrash",
    "All five come at once, and each step runs at most one chunk of E. How often is E preempted under the second rule?",
    ["never", "once", "13 times", "32 times"],
)

# %% tags=["figure-thrash"] jupyter={"source_hidden": true}
from tutorial_engine.learn import cost, drama, tokens
from tutorial_engine.viz import timelines

rules = drama(model, tokenizer)
patient, eager = rules.values()
chosen = predictions.reveal("thrash", f"{cost(eager).preempted['E']} times")
for name, its in zip(rules, map(cost, rules.values()), strict=True) if chosen else ():
    print(f"{name:26}{its.num_preemptions:3} preempted, {its.num_tokens:5,} tokens run,", end="")
    print(f" {its.num_recomputed:5,} of them again, {its.milliseconds:5,.0f} ms")
if chosen:
    print(f"{cost(eager).num_tokens / cost(patient).num_tokens:.1f} times as many tokens run")
    print("same tokens:", tokens(patient) == tokens(eager))
timelines(rules, title="The same requests under two rules of admission") if chosen else None

# %% [markdown]
# Under the second rule, E runs its first chunk. In the next step its second chunk finds no room. E is the
# last that runs, so it is preempted (✕). A step that preempts somebody admits nobody, so E comes again one step later. A wide bar is a slow step: A's decode
# waits for E's chunk, which is thrown away. This is *thrash*. Under the first rule, E waits until they are done.

# %% [markdown]
# The second rule is no invention: vLLM used it until 2026. The author of
# [pull request 37307](https://github.com/vllm-project/vllm/pull/37307), which added the first rule, saw in one bad case that
# throughput fell from about 100 to 1.5 tokens a second on each GPU. (The command in its test plan has the prefix cache off, as the runs above.)
#
# E's first chunk takes 64 of the 100 blocks, so 36 are left. The users fill all 36 in step 24, and need 39 in
# step 26. So E comes in the steps 0, 2, … 24, and each time gives way one step later: 13 times. In step 32 it comes again
# and stays.

# %% [markdown]
# The runs above have no prefix cache. This is the second rule with one:

# %%
kept = drama(model, tokenizer, prefix_caching=True)["the first chunk fits"]
print(f"{cost(kept).num_preemptions} preempted, {cost(kept).num_tokens:,} tokens run")
for one in when_full(kept):
    print(f"{one.request_id} had {one.num_tokens}, finds {one.num_found}")

# %% [markdown]
# Now E is preempted once, and waits until step 32.
#
# <details><summary>Why only once?</summary>
#
# E's text begins like A's, so E finds 8 tokens. With its first chunk of 256 it has 264 when it is preempted. Just after
# that, E would find up to 264 tokens. A hit on a free block needs no forward, but it takes the block out of the free queue. So it counts like a new one. The
# other 123 are one chunk. Together this is the whole prompt, so here the second rule asks for as much as the
# first, and E waits. Meanwhile the users take 8 of these blocks, so in step 32 E finds 232 tokens and not 264. If the
# rest did not fit into one chunk, E could thrash again.
#
# </details>

# %%
box("admission")

# %% [markdown]
# ## 7 · Your engine
#
# **Objective:** let everything that you wrote serve requests together.
#
# The next cell reads your notebooks 01 to 03 from their saved files. What is right there becomes a part of `server`. If a
# line says that the package's part runs, save that notebook with your answers in it, and run the cell again. Some
# parts stay behind, such as your cache of notebook 02: pages have taken its place.

# %%
print(bring(server, "01_attention_rope.ipynb"))
print(bring(server, "02_kv_cache.ipynb"))
print(bring(server, "03_scheduler.ipynb"))

# %% [markdown]
# Now twelve users, A to L, share a pool that is too small for them. Your code runs from the first matrix product to the last
# block that is given back. (Your `block_attention` has taken the place of `attention`, `kv_head` and `window_mask` of notebook 01.
# `keep_top_p` is not called: all choices are greedy.) In the
# picture, look at *recompute*. E had computed 17 tokens and runs only 2: one that it lost and its newest one. The others were
# hits. F to L found nothing, because others had taken their blocks. So they run all their tokens again.

# %% tags=["figure-preempted"]
from tutorial_engine.trace import Preempted

NAMES = "Anna Ben Mia Tom Lily Sam Nora Max Ella Finn Ruby Leo".split()
THINGS = ["a red kite", "a blue ball", "a green hat"]
users = [f"{name} had {THINGS[i % 3]}." for i, name in enumerate(NAMES)]
run = server.serve(users, SamplingParams(max_tokens=12), num_blocks=24)
print(sum(isinstance(e, Preempted) for e in run.trace.events), "preemptions")
timeline(run.trace)

# %% [markdown]
# The ledger of notebook 02 has grown. A path is right (✔) if its greedy tokens are those without
# a cache, and its logits differ by at most 1/10,000 of the largest one. The last path is your server:

# %% jupyter={"source_hidden": true}
from transformers import AutoModelForCausalLM, logging

from tutorial_engine.lab import engine_paths, in_place_paths, loop_path, memory_paths, our_paths
from tutorial_engine.lab import equality_ledger as ledger
from tutorial_engine.lab import run_transformers, vllm_path

logging.disable_progress_bar()
theirs = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
groups = {
    "caches, chunks, batches": our_paths(model),
    "the scheduler": engine_paths(model, neighbours=[ids_a, ids_b]),
    "pages and cells: shared, forked, preempted": memory_paths(model),
    "pages read in place": in_place_paths(model),
    "transformers": {"transformers": loop_path(lambda n: run_transformers(theirs))},
    "vLLM": {"vLLM 0.32, recorded here": vllm_path},
}

# %% jupyter={"source_hidden": true}
groups["yours" if server.parts.own else "the package's parts"] = {"server": server.path()}
paths = {name: path for group in groups.values() for name, path in group.items()}
rows = {row.path: row for row in ledger(paths, prompts, num_tokens=12)}
for name, group in (groups | {"all": paths}).items():
    print(f"{name:44}{sum(rows[path].ok for path in group):2} of {len(group):2} paths ✔")

# %% [markdown]
# Do the parts also decide what vLLM decides? The package has recorded runs of vLLM 0.32. We take two in which memory is too
# small, and `server` serves the same requests with your parts. A step has vLLM's *plan* if three things are equal: how many tokens of
# each request run, how many tokens a new request finds, and who is preempted. A step *is vLLM's* if it uses the same blocks,
# too. The numbers of the blocks may differ, but always in the same way: if vLLM's block 5 is our block 0 once, it must be so
# in every step.

# %% [markdown]
# Can this comparison fail at all? We try it with two other functions `free`, which also give right tokens. They put all blocks at the end of the queue, those without a hash as well. (*Head
# first*: block 0 of the table is freed first; *tail first*: the last one.)

# %%
from tutorial_engine.lab import recorded_decisions
from tutorial_engine.learn import others_beside_vllm

print(len(recorded_decisions()), "runs of vLLM 0.32 are in the package, and one more in the tests.")
print("Two of them:")
print(others_beside_vllm(model, tokenizer, lesson=5))

# %% [markdown]
# All tokens are right. With the last block first, every plan is vLLM's, and only the choice of blocks differs. With
# the first block first, some steps have another plan, too. After the first wrong block, no step of these two runs
# has vLLM's blocks again.
#
# In the second run, no block is free at the end of step 40. Three requests run. These are their blocks, in the order of admission.
# (They are vLLM's numbers minus 1: a request of vLLM never gets its block 0.)

# %% jupyter={"source_hidden": true}
before, after = recorded_decisions()[28]["steps"][40:42]
for name, table in before["blocks"].items():
    print(f"{name}: {' '.join(map(str, table))}")

# %%
predictions.ask(
    "full",
    "In step 41, r1 needs one more block. Somebody gives way, and so nobody is admitted. How many blocks are free after this step?",
    ["1", "2", "4"],
)

# %% [markdown]
# The next cell shows this step, as vLLM planned it and as `server` did. In how many steps do your parts decide the same?

# %%
chosen = predictions.reveal("full", after["free_blocks"])
server.beside_vllm(show_step=41) if chosen else None

# %% [markdown]
# The numbers differ, but the blocks correspond: 9 is always our 0, 7 our 1, 4 our 4.
#
# r4 came last, so it gives way. Blocks 9 and 7 are still in other tables, so three of its five blocks become free. r1 takes
# one of them: the last of r4's table.

# %% [markdown]
# <details><summary>All of this with a real model</summary>
#
# Llama 2 and 3, SmolLM2, Qwen2, Qwen2.5 and Qwen3 (without experts), and Mistral without a sliding window run. A model is downloaded once.
# [Notebook 06](06_real_model.ipynb) does this with SmolLM2-135M-Instruct, which is fast enough without a GPU. With a GPU,
# give `device="cuda"` to `load_model` and to `PagedKVCache.from_config`:
#
# ```python
# name = "Qwen/Qwen3-0.6B"
# model, tokenizer = load_model(name, dtype=torch.bfloat16), load_tokenizer(name)
# memory = PagedKVCache.from_config(model.config, memory_bytes=2 * 2**30, dtype=torch.bfloat16)
# engine = LLMEngine(model, tokenizer, memory=memory)
# print(engine.generate("What is a KV cache?")[0].outputs[0].text)
# ```
#
# </details>
#
# <details><summary>Not in this lesson</summary>
#
# - Replicas and routing: a router that sends requests with the same beginning to the same replica.
# - K and V on other machines and disks: a prefix that is fetched instead of computed.
# - Requests that ask for the logprobs of their prompt. They need a forward of all of it, so vLLM does not look them up.
# - Speculative decoding: guessed tokens take slots, too; when a guess was wrong, its slot is written again.
#
# [Reading on](../docs/reading-on.md) says where to begin with most of these.
#
# </details>
#
# ## What you can do now
#
# You can say what is shared, evicted and computed again, and when. You find out why a prefix is not found, and which
# test sees a stale hash. This is an inference engine, and large parts of it are yours. In the last notebook,
# [06](06_real_model.ipynb), it runs a real language model, and you find the place in the cache through which a fact
# passes. The appendix `A1_two_ranks` runs one model on two processes. In `A3_vllm` you see what vLLM decided for the
# same requests, and find its functions.

# %%
print(predictions.score())
