# %% [markdown]
# # A2 · On a GPU
#
# This appendix comes after notebook 04, and takes about one hour. **You do not need a GPU.** The times in it were
# measured on one H100, a large GPU for servers. What our engine does today has not run on a GPU yet. So there are three
# names, in the pictures as well:
#
# | name | what it is |
# |---|---|
# | our engine | the package that you use here |
# | earlier engine | an earlier version of it, measured |
# | prototype | a first sketch of what our engine does now, measured as well |

# %%
import torch

from tutorial_engine.learn import Predictions, show_source
from tutorial_engine.model import load_model

torch.set_grad_enabled(False)
torch.set_num_threads(1)
predictions = Predictions("A2")
model = load_model()

# %% [markdown]
# ## 1 · Who waits for whom?
#
# **Objective:** say in two sentences why a decode step on a GPU was slow.
#
# A **GPU** is a second processor with a memory of its own, and with thousands of small arithmetic units. A program on the CPU
# tells it what to do.
#
# - A **kernel** is a small program for the GPU, such as a matrix product or a norm. A kernel with little work uses few units.
# - A **launch** is the call with which the CPU asks for one kernel.
# - A **stream** is a queue of launches. The GPU runs their kernels one after the other.
# - The GPU is **idle** while no kernel runs.

# %% [markdown]
# The CPU does not wait until a kernel is done. It prepares the next launch at once. (A stream is not the residual stream of
# notebook 01.)

# %% [markdown]
# **Bandwidth** is the number of bytes that a memory moves in a second. In notebook 02 it limited a decode step: each step
# reads all weights once. The memory of an H100 moved 2.95 TB a second when we measured it with a large copy. (Its data sheet
# says 3.35.) How long does it take to read the weights of a model
# in the shape of Qwen3-0.6B, in bf16?

# %%
from tutorial_engine.lab import BANDWIDTH, weight_bytes
from tutorial_engine.lab.sizing import QWEN3_06B
from tutorial_engine.model import ModelConfig

shape = ModelConfig.from_dict(QWEN3_06B | {"model_type": "qwen3"})
floor = weight_bytes(shape, itemsize=2) / BANDWIDTH
print(f"{BANDWIDTH / 1e12} TB a second: {1000 * floor:.1f} ms for all weights")

# %% [markdown]
# So a decode step takes at least about this long. But the earlier engine took 14.0 ms, for a single request.

# %%
predictions.ask(
    "work",
    "A decode step of one request took 14.0 ms on the H100. For how much of this time did the GPU work?",
    ["all of it", "half of it", "a sixth of it"],
)

# %% tags=["figure-timeline"]
from tutorial_engine.lab import ONE_BY_ONE
from tutorial_engine.viz import gpu_timeline

share = ONE_BY_ONE.busy / ONE_BY_ONE.seconds
near = {"all of it": 1, "half of it": 1 / 2, "a sixth of it": 1 / 6}
if chosen := predictions.reveal("work", min(near, key=lambda name: abs(near[name] - share))):
    print(f"{ONE_BY_ONE.launches} launches; the GPU worked {1000 * ONE_BY_ONE.busy:.1f} ms")
gpu_timeline(ONE_BY_ONE) if chosen else None

# %% [markdown]
# On average a launch takes 18.9 µs (millionths of a second), with the Python that leads to it. Its kernel takes 3.1 µs. Then the
# stream is empty, and the GPU is idle until the next launch arrives.
#
# The picture is drawn from three measured numbers: 14.0 ms, 741 launches, 2.3 ms of work. Single launches were not
# timed, so all of them are equally long here. The picture shows *that* the GPU is idle. It does not prove that the
# launches are the reason. Three more measurements test this.

# %%
predictions.ask(
    "longer",
    "First test: with a context of 2,048 tokens in place of 128 the GPU has more to read. How long is the step then?",
    ["about 14 ms again", "about 16.5 ms: it reads 18 % more bytes"],
)

# %%
from tutorial_engine.lab import CONTEXTS, DECODE_MS, TRANSFORMERS

times = DECODE_MS[ONE_BY_ONE.what]
options = {"about 14 ms again": 14, "about 16.5 ms: it reads 18 % more bytes": 16.5}
if predictions.reveal("longer", min(options, key=lambda name: abs(options[name] - times[-1]))):
    for context, ms in zip(CONTEXTS, times, strict=True):
        print(f"context of {context:>4}: {ms} ms a step")
    for engine in (ONE_BY_ONE, TRANSFORMERS):
        print(f"{engine.what}: {engine.launches} launches, {1000 * engine.seconds:.0f} ms")

# %% [markdown]
# The step is not longer: the GPU had time left. (This test is weak. The keys and values of 1,920 more tokens are less than a
# fifth of the weights.)
#
# The second test has more launches. transformers, another library, runs the same model with about twice as many, and its
# step takes almost twice as long. So a step takes as long as the CPU needs for its launches. Section 2 has the strongest
# test: nearly the same kernels, without the launches.

# %% [markdown]
# Each call of PyTorch costs time, even without a GPU. How long does `x + x` take on your CPU?

# %% tags=["nbval-ignore-output"]
from timeit import repeat

for count in (1, 100, 10_000, 1_000_000):
    x = torch.ones(count)
    seconds = min(repeat("x + x", globals={"x": x}, number=100)) / 100
    print(f"{count:>9,} numbers: {1e6 * seconds:6.1f} µs")
print(f"The H100's memory would read and write these in {1e6 * 2 * x.nbytes / BANDWIDTH:.1f} µs")

# %% [markdown]
# A hundred numbers take as long as one. There is hardly anything to compute, so this is the time to ask PyTorch. Only many
# numbers take longer. For the memory of the H100 even a million is little work: it takes less time than one launch of the
# earlier engine, 18.9 µs. (A launch costs more than your shortest time here. The Python of the model and the call to the
# GPU come on top.)

# %% [markdown]
# **Say it in two sentences:** why was the step slow?
#
# <details><summary>Compare</summary>The CPU launches hundreds of small kernels, one after the other, and each launch takes
# longer than its kernel. So the GPU is idle most of the time, and the step takes as long as the CPU needs to launch everything.</details>

# %% [markdown]
# **Where do so many launches come from?** You can count them without a GPU. PyTorch has a device with the name `meta`: its
# tensors have shapes, but no numbers. `count_launches` runs a step of Qwen3-0.6B there, and counts the operations that
# compute something: each is at least one launch.

# %%
from tutorial_engine.lab import count_launches, launches_of_layer

alone, layer = count_launches(1, one_call=False), launches_of_layer(1, one_call=False)
print(f"{alone} launches for one request. Each of the 28 layers has {layer.total()}:")
print(", ".join(f"{count} {name}" for name, count in layer.most_common()))

# %% [markdown]
# Only four of a layer's launches are matrix products (`linear`): q, k and v are one product here, gate and up another. RoPE takes 12 for q and k: 4 `mul`, 4 `addcmul`
# (`a + b * c`), 2 `cat` and 2 `to`. `index_copy` writes the new key and value to their slot, and `index_select` gathers all keys and values.
#
# 28 layers have 812 launches. The other nine are outside the layers, such as the embedding, the last norm, and the cosines
# and sines of RoPE.

# %% [markdown]
# The 741 of the picture were seen on the GPU, with the earlier engine. The 821 are counted here, in today's code. They also
# differ because the slots of this context are not neighbours, so they have to be gathered.
#
# The number does not depend on the model's width or on the length of the context. A wider model has longer kernels, but not
# more of them. So a GPU is idle most when the model is small.

# %% [markdown]
# ## 2 · Record once, replay often
#
# **Objective:** say what a recorded step needs.
#
# All decode steps with the same number of sequences launch the same kernels, in the same order. So the launches can be
# written down once. (The contexts grow from step to step. Rule 2 below and exercise 1 deal with this.)
#
# - To **capture** a step is to write down its launches.
# - A **CUDA graph** is what was written down, here also called a recording. (CUDA is NVIDIA's software for its GPUs.)
# - To **replay** it takes a single launch. Then the GPU runs all of its kernels.

# %% tags=["figure-replayed"]
from tutorial_engine.lab import REPLAYED, WHOLE_ENGINE_MS

gpu_timeline(ONE_BY_ONE, REPLAYED, floor=floor)

# %% [markdown]
# This is the strongest test. The prototype replays nearly the same kernels, and its step takes 2.5 ms. The kernels alone
# took 2.3 ms before (the black dashed line). So the GPU no longer waits for Python.
#
# The 2.5 ms belong to a context of 128 tokens. Here are other contexts, and transformers.

# %%
print("ms a step, after a prompt of", ", ".join(f"{context:,}" for context in CONTEXTS), "tokens")
for what, ms in DECODE_MS.items():
    numbers = " / ".join(map(str, ms)) if len(ms) > 1 else f"{ms[0]} (context not noted)"
    print(f"{what:46} {numbers}")
print(f"{'prototype, whole engine, in other runs':46}", " to ".join(map(str, WHOLE_ENGINE_MS)))

# %% [markdown]
# A longer context means more keys and values to read: 2.7 ms at 2,048 tokens. The last line is for each token, with scheduler
# and sampling.
#
# transformers can be fast as well. Its static cache never changes shape. So PyTorch can compile the step, and capture
# it, too. (A compiler makes a few larger kernels out of many small ones.) The first step took 87 s, because PyTorch compiled
# then. The prototype compiles nothing here. It captured 7 recordings in 0.3 s.

# %% [markdown]
# PyTorch works in one stream, the default, if nobody asks for another. CUDA cannot capture this one. So our engine uses a
# second stream (`_beside`) to capture:
#
# - It runs a whole decode step (`compute()`). Libraries prepare themselves in their first call, and this must not be captured.
# - It calls `compute()` again, inside `torch.cuda.graph`. Now the GPU computes nothing: PyTorch writes down the launches.
# - It returns `play`, which the engine calls at each step from now on. The logits are computed after it, outside. So
#   a recording need not keep memory for them.
#
# `a.wait_stream(b)` makes stream `a` wait until stream `b` is done. `pool` is memory that all recordings share.

# %%
from tutorial_engine.engine.replay import CudaGraphs

show_source(CudaGraphs.__call__)

# %% [markdown]
# A recording knows *places* in the GPU's memory, not tensors. So:
#
# 1. **The same places.** Ids, positions and slots lie in fixed tensors, filled before each replay. These live as long as the
#    recording.
# 2. **The same shapes.** A recording of 4 rows always runs 4 rows. If there are fewer, rows are added: copies of a
#    real one, which write the same numbers into the same slot. Such rows, and slots that no sequence needs, are **padding**.
# 3. **No decisions.** Python does not run in a replay. So no `.item()` and no `if` may look at a number.
# 4. **The result is overwritten.** `play` returns the same `out` each time. Copy what you need longer.

# %% [markdown]
# ### Exercise 1: which size, and what does padding cost? (5 minutes)
#
# Our engine has a recording for each number of sequences and each longest context. Both are rounded up to a power of two
# (1, 2, 4, 8 ...), and the context is 64 at least. Before attention, each layer copies the keys and values of all sequences
# into one piece of `rows * longest` slots, needed or not. `lens` are the context lengths of a step's sequences. Return the rows, the longest context, and the part of all slots that nobody needs.
# Do not round this part: `size([100])` is `(1, 128, 0.21875)`.
#
# <details><summary>Hint</summary>Double a number, from 1 on, until it is not below n. (Or use
# <code>1 &lt;&lt; (n - 1).bit_length()</code>, with the number of bits of n − 1.) Of all slots, those that the sequences need are
# <code>sum(lens)</code>.</details>


# %% tags=["exercise"]
def size(lens):
    """-> rows, longest context, and the unused part of the slots (0 .. 1)."""
    ### BEGIN SOLUTION
    rows = 1 << (len(lens) - 1).bit_length()
    longest = max(64, 1 << (max(lens) - 1).bit_length())
    return rows, longest, 1 - sum(lens) / (rows * longest)
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_size

check_size(size)

# %% [markdown]
# Padding adds no launches, but it adds bytes: a recording copies keys and values of all its `rows * longest` slots before attention.

# %%
predictions.ask(
    "past",
    "63 requests have a context of 200 tokens, and one grows from 512 to 513. What does the step copy then?",
    ["one slot more", "512 slots more", "twice as many slots"],
)

# %% tags=["figure-padding"]
from tutorial_engine.cache import KVCacheSpec
from tutorial_engine.engine.replay import Size
from tutorial_engine.viz import padding_picture

before, after = (Size.of(64, longest).num_slots for longest in (512, 513))
more = {1: "one slot more", 512: "512 slots more", before: "twice as many slots"}
per_slot = KVCacheSpec.from_model(shape, torch.bfloat16).bytes_per_token
if chosen := predictions.reveal("past", more[after - before]):
    for longest, copied in ((512, before), (513, after)):
        written = copied * per_slot
        print(
            f"{longest}: writes {written / 1e9:.1f} GB in all layers, {1000 * written / BANDWIDTH:.1f} ms"
        )
padding_picture([200] * 63 + [512], [200] * 63 + [513]) if chosen else None

# %% [markdown]
# Each of the 64 rows grows with the longest context. So one token more makes the whole copy twice as large. (The layers copy
# one after the other, into the same memory. So the GPU need not hold all of it at once.) These times are
# computed from the bandwidth. They were not measured. A request that runs alone copies a 64th of this.
#
# With more sizes there is less padding, but there are more recordings to make and to keep. A step of more than
# 2^17 = 131,072 slots is not recorded: its copy would need too much memory and time. Then the CPU launches the kernels one by one, as before.

# %%
from tutorial_engine.learn import box

box("graphs")

# %%
predictions.ask(
    "prefill",
    "Which step gains least from a recording?",
    [
        "a decode step of one request",
        "a decode step of 64 requests",
        "a prompt of 2000 tokens",
    ],
)

# %% [markdown]
# A recording saves the time of launches. So count how much arithmetic one launch asks for.

# %%
from tutorial_engine.lab import Work

works = {
    "a decode step of one request": Work(num_seqs=1, new=1, old=0),
    "a decode step of 64 requests": Work(num_seqs=64, new=1, old=0),
    "a prompt of 2000 tokens": Work(num_seqs=1, new=2000, old=0),
}
per_launch = {what: work.flops(shape) / alone for what, work in works.items()}
if predictions.reveal("prefill", max(per_launch, key=per_launch.get)):
    for what, flops in per_launch.items():
        times = flops / per_launch["a decode step of one request"]
        print(f"{what}: {flops / 1e6:,.1f} million operations a launch, {times:,.0f} times")

# %% [markdown]
# (64 requests have one call of attention together here, as in section 3.) The prompt has as many kernels as one token. They have more work, so they are longer, and the GPU is idle for a smaller part
# of the step. (It is not 2,000 times as much, because the logits are computed for the last token only. Attention over the earlier tokens
# brings it back up by a quarter.) And prompts seldom
# have the same length twice. So our engine records decode steps only.

# %% [markdown]
# ### A runner that forgets
#
# It is easy to break rule 1. `GpuMemory` is a small model of a GPU's memory. It does two things that PyTorch does on a GPU:
#
# - When no variable and no function refers to a tensor any more, its place is free, and the next tensor gets it.
# - A recording knows only the places of its tensors. It does not keep these tensors: rule 1 is left to us.


# %%
from tutorial_engine.learn import GpuMemory


def recorded_step(gpu, lens, positions):
    """-> step(new_lens): which of the positions each sequence sees, replayed."""
    replay = gpu.record(lambda lens, positions: positions < lens[:, None], lens, positions)

    def step(new_lens):
        lens.copy_(torch.tensor(new_lens))  # fill, then replay
        return replay()

    return step


def forgetful_step(gpu):
    """A step for 2 sequences and 8 positions."""
    return recorded_step(gpu, lens=gpu.tensor([1, 1]), positions=gpu.tensor(range(8)))


# %%
gpu = GpuMemory()
step = forgetful_step(gpu)
print("sequences see", step([3, 5]).sum(1).tolist(), "positions: right")
other = gpu.tensor([0] * 8)  # another part of the program needs memory
print("sequences see", step([3, 5]).sum(1).tolist(), "positions: wrong")

# %%
predictions.ask(
    "gone",
    "The place of one tensor was given to “other”. Which tensor lay there before?",
    ["lens", "positions", "new_lens"],
)

# %% tags=["figure-places"] jupyter={"source_hidden": true}
from tutorial_engine.viz import gpu_memory_picture

again = GpuMemory()  # the same tensors get the same places in it
tensors = {"lens": again.tensor([3, 5]), "positions": again.tensor(range(8))}
reads = {name: (again.place_of(tensor), len(tensor)) for name, tensor in tensors.items()}
times = {"at the first call": (again.numbers(10), reads)}
tensors.popitem()  # nothing refers to this one any more
tensors["other"] = again.tensor([0] * 8)
owners = {name: (again.place_of(tensor), len(tensor)) for name, tensor in tensors.items()}
times["at the second call"] = (again.numbers(10), owners)
at = gpu.place_of(other)
chosen = predictions.reveal("gone", next(name for name, (begin, _) in reads.items() if begin == at))
gpu_memory_picture(times, reads) if chosen else None

# %% [markdown]
# `step` fills `lens`, so it keeps `lens`. Nothing refers to `positions` after `forgetful_step` has returned. So its place
# became free, and the zeros of `other` were written there. The recording reads them as positions, and 0 is below every
# length. (`new_lens` is a list in Python. It never lies in the GPU's memory.)

# %% [markdown]
# ### Exercise 2: mend it (5 minutes)
#
# Make a step for the same two tensors, with `recorded_step`, that stays right. Record once. Each call of the step is one
# replay. On a real GPU this mistake is seen later: as a wrong token, or as an "illegal memory access" that ends the program.
#
# <details><summary>Hint</summary>A function can have attributes: <code>step.keeps = ...</code>. What it keeps lives as
# long as the function.</details>


# %% tags=["exercise"]
def make_step(gpu):
    """As forgetful_step, and right whatever others do with the memory."""
    ### BEGIN SOLUTION
    lens, positions = gpu.tensor([1, 1]), gpu.tensor(range(8))
    step = recorded_step(gpu, lens, positions)
    step.keeps = positions  # it lives as long as the step
    return step
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_step

check_step(make_step)

# %% [markdown]
# ## 3 · One call for all
#
# **Objective:** lay the sequences of a batch end to end, for one kernel.
#
# Now 64 requests decode at once. One matrix product serves all of them. But each request has keys and values of its own.
# On pages, the engine of notebook 04 needs three launches for each request in each of 28 layers: it copies the keys
# together, it copies the values together, and it attends.

# %%
predictions.ask(
    "calls",
    "How many times as many launches does a step of 64 requests have then, compared with one request?",
    ["as many", "twice", "7 to 8 times", "64 times"],
)

# %%
each = count_launches(64, one_call=False)
options = {"as many": 1, "twice": 2, "7 to 8 times": 7.5, "64 times": 64}
if predictions.reveal("calls", min(options, key=lambda name: abs(options[name] - each / alone))):
    print(f"{each:,} launches, {each / alone:.1f} times as many as {alone}")
    joins = count_launches(2, one_call=False) - alone - 3 * 28  # beside those of one request more
    print(f"3 launches * 63 more requests * 28 layers = {3 * 63 * 28:,}")
    print(f"{alone} + {3 * 63 * 28:,} + {joins} = {each:,}; the {joins} join the results")

# %% [markdown]
# Attention is only a part of the launches. So there are about 7½ times as many, and not 64 times.
#
# *FlashAttention* is a kernel that never stores the matrix of scores. Its *varlen* form (variable length) takes all sequences
# in one call, end to end, as in our `Batch`. Two lists are needed:
#
# - `cu_seqlens` (cumulative sequence lengths) says where each sequence begins. It starts with 0, and ends with the number
#   of all tokens.
# - The other one has the slots of all sequences. With it one copy gathers all keys, and one copy gathers all values.

# %% [markdown]
# (In a recording this list has a fixed length, `rows * longest`. Added rows lie in it like real ones: attention runs for them
# as well, and nobody reads the result. Slots that no row needs lie at its end, where attention ignores them.)

# %% tags=["figure-end-to-end"]
from tutorial_engine.viz import end_to_end_picture

end_to_end_picture(tables=[[2, 0], [3], [5, 1]], lens=[5, 3, 6], block_size=4)

# %% [markdown]
# ### Exercise 3: lay them end to end (5 minutes)
#
# Each sequence has a block table, and a length. Position p of a sequence lies in slot
# `table[p // block_size] * block_size + p % block_size`. Return the list `cu_seqlens`, and the list of all slots.
#
# <details><summary>Hint</summary>Begin with <code>cu_seqlens = [0]</code> and <code>slots = []</code>. When all slots of a
# sequence are in the list, its length says where the next sequence begins.</details>


# %% tags=["exercise"]
def end_to_end(tables, lens, block_size):
    """-> cu_seqlens [S + 1], and the slots of all sequences in one list."""
    ### BEGIN SOLUTION
    cu_seqlens, slots = [0], []
    for table, length in zip(tables, lens, strict=True):
        for p in range(length):
            slots.append(table[p // block_size] * block_size + p % block_size)
        cu_seqlens.append(len(slots))
    return cu_seqlens, slots
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_end_to_end

check_end_to_end(end_to_end)

# %% [markdown]
# The upper bars are the launches of a step, counted here. The lower bars were measured on the H100. They show *wanted* tokens a
# second: those that the requests asked for. Padding does not count. *Rows* and *pages* are now
# the memories of notebooks 02 and 04. *Padded* means: each sequence is filled up to the longest one.

# %% tags=["figure-serving"]
from tutorial_engine.lab import SERVING
from tutorial_engine.viz import serving_picture

together = count_launches(64, one_call=True)
serving_picture(
    {"64 requests, a call for each": each, "64 requests, one call for all": together}, SERVING
)

# %% [markdown]
# 822 is one more than the 821 of a single request: a launch joins the lists of slots, once a step.
#
# On pages, the prototype with one call for all got 1,329 to 2,027 in its second run. The earlier engine, with a call for each
# request, got 310. The two differ in other things as well, so not all of this comes from attention.

# %% [markdown]
# The first run is slower. A likely reason (we did not measure it): libraries prepare a kernel when they first see a shape.
# With a call for each request, each length is a new shape.
#
# Replay makes one request 5.6 times as fast. 64 requests gain less: 2,508 against 1,329 to 2,027 without replay, so 1.2 to
# 1.9 times as many. We did not measure the reason.
# Padding may be a part of it: some of these contexts pass 512 tokens. (Nor do we know why transformers' continuous batching
# is slower than its padding here.)

# %% [markdown]
# The answers stay the same. Here both new parts run on your CPU. Attention goes sequence by sequence in place of the
# kernel, and the step is called in place of a replay.
# The last two rows are what this engine does on a CPU: of more than four requests, those of about one length attend in
# one call.

# %%
from tutorial_engine.lab import batched_paths, equality_ledger as ledger, ledger_table, our_paths

prompts = [[65, 66, 67, 68, 69], [70, 71]]
paths = {"no cache": our_paths(model)["no cache"]} | batched_paths(model)
print(ledger_table(ledger(paths, prompts, num_tokens=6)))

# %%
box("one_call")

# %% [markdown]
# ## 4 · What is left
#
# **Objective:** name what still costs time in a replayed step.

# %%
predictions.ask(
    "batch",
    "A step of 64 requests reads the weights, and the keys and values of all. How many times as many bytes is this "
    "as for one request, with contexts of 200 tokens?",
    ["about twice as many", "about 10 times", "64 times"],
)

# %%
one, many = (Work(num_seqs=n, new=1, old=199).num_bytes(shape, itemsize=2) for n in (1, 64))
options = {"about twice as many": 2, "about 10 times": 10, "64 times": 64}
if predictions.reveal("batch", min(options, key=lambda name: abs(options[name] - many / one))):
    kv = (many - one) / 63  # keys and values of one request
    rows = {"weights": (one - kv, one - kv), "keys and values": (kv, 64 * kv)}
    rows["both: what a step reads"] = one, many
    rows["both, K and V copied before"] = one + 2 * kv, many + 2 * 64 * kv
    rows["the same, padded to 1,024 slots"] = (
        reads + 2 * n * 1024 * per_slot for n, reads in ((1, one), (64, many))
    )
    print(f"{'':32}{'1 request':>12}{'64 requests':>14}{'64, at full bandwidth':>24}")
    for what, (of_one, of_all) in rows.items():
        ms = 1000 * of_all / BANDWIDTH
        print(f"{what:32}{of_one / 1e9:9.2f} GB{of_all / 1e9:11.2f} GB{ms:21.1f} ms")
    second = SERVING[-2].second
    print(f"measured: {second:,} tokens/s, so 64 tokens in {64000 / second:.0f} ms on average")

# %% [markdown]
# 64 requests read about twice as much as one, because the weights are read once for all. And each of the more than 700
# kernels runs once for all. So a step of 64 requests is not 64 times as long.

# %% [markdown]
# Our engine copies keys and values: it reads them, writes the copy, and then attention reads the copy. This is the fourth line
# of the table. The last line has padding. In the measured run a context could grow to 512 + 128 tokens. So each request gets
# 1,024 slots (exercise 1). Even that would take only 6 ms, at full bandwidth.

# %% [markdown]
# In that run 64 tokens took 26 ms on average. This is not the time of one step. It includes prompts, scheduling and sampling.
# And the requests end at different times, so many steps have fewer than 64. A step alone was not measured.
#
# A kernel can also read them **in place**: it gets the block table, and looks up each slot by itself. Then nothing is
# copied. The prototype did this for rows.

# %%
gathered, in_place = SERVING[-2:]
for one in (gathered, in_place):
    print(f"{one.what}: {one.second:,} tokens a second")
print(f"{in_place.second / gathered.second:.1f} times as many: no copy, and rows, not pages")

# %% [markdown]
# Two things changed here, and the effect of each alone was not measured. vLLM and SGLang read pages in place. Our engine
# does not do this on a GPU yet.
#
# What is left between the replayed step and the time for reading all weights?

# %%
from tutorial_engine.lab import COMPILED

for measured in (REPLAYED, COMPILED):
    print(f"{measured.what}: {1000 * measured.seconds:.1f} ms")
print(f"all weights read once: {1000 * floor:.1f} ms")

# %% [markdown]
# A replayed step still has more than 700 kernels. Each one has to start and to end, and most of them do little. A norm of 1024
# numbers uses a small part of a large GPU, for a moment. A compiler can join small operations into one kernel. The prototype
# was faster with it, but the compiler needed 16 seconds. Our engine does not do this.

# %%
box("fused")

# %% [markdown]
# ## On your GPU
#
# An earlier version of the engine ran on one. The recordings of this version have not been tried on one yet.
#
# - Give `device="cuda"` to `LLM` or `load_model`.
# - `dtype="bfloat16"` uses FlashAttention. In fp32, and on cards older than 2020 (before the A100), decode steps are padded
#   instead.
# - `engine.warm_up()` records all sizes at once.
# - If a recording fails, `EngineConfig(cuda_graphs=False)` turns recordings off, as `enforce_eager=True` does in vLLM.
#
# `make bench DEVICE=cuda SHAPE=qwen3-0.6b DTYPE=bfloat16` measures your card. `python -m tutorial_engine.lab.doctor` says which parts it can use, and why not.

# %% [markdown]
# The next cell measures a step of our small model on your GPU, first without recordings, then with them. Replayed, a few
# launches are left: the logits and the choice of the token are outside the recording.

# %% tags=["nbval-ignore-output"]
from tutorial_engine.engine import EngineConfig, LLMEngine
from tutorial_engine.lab import profile_step
from tutorial_engine.sampling import SamplingParams

for graphs in (False, True) if torch.cuda.is_available() else ():
    gpu_model = load_model(device="cuda", dtype="bfloat16")
    engine = LLMEngine(gpu_model, config=EngineConfig(cuda_graphs=graphs))
    engine.add_request(None, [65] * 100, SamplingParams(max_tokens=99, ignore_eos=True))
    engine.step()  # the prompt
    print("replayed:" if graphs else "one by one:", profile_step(engine.step))
if not torch.cuda.is_available():
    print("no GPU here: the pictures show what was measured on an H100")

# %%
print(predictions.score())
