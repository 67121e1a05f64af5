# %% [markdown]
# # A2 · On a GPU
#
# This appendix belongs to notebooks 02 and 03, and takes about half an hour. **You do not need a GPU.** The times in it
# were measured on one H100, a large GPU for servers, with an earlier version of this engine and a prototype of what came
# after it. Everything else runs on your machine. Cells that look at a GPU say so, and do nothing where there is none.

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
# **Objective:** say why a decode step takes longer than the GPU works.
#
# A GPU is a second processor with a memory of its own. It does nothing by itself. A program on the CPU, here Python with
# PyTorch, asks it to run small programs one after the other. Such a small program is a **kernel**: a matrix product, a norm,
# an addition. To ask for one kernel is a **launch**. The CPU does not wait for the result. It goes on to the next launch
# while the GPU works. So there are two clocks. If a launch takes longer than the kernel, the GPU has to wait.

# %% [markdown]
# In notebook 02 a decode step was limited by memory: all weights are read once for each token. The memory of an H100
# gives 2.95 TB a second. How long does it take to read the weights of a model in the shape of Qwen3-0.6B, in bf16?

# %%
from tutorial_engine.lab import BANDWIDTH, weight_bytes
from tutorial_engine.lab.sizing import QWEN3_06B
from tutorial_engine.model import ModelConfig

shape = ModelConfig.from_dict(QWEN3_06B | {"model_type": "qwen3"})
floor = weight_bytes(shape, itemsize=2) / BANDWIDTH
print(f"{BANDWIDTH / 1e12} TB a second: {1000 * floor:.1f} ms for all weights")

# %% [markdown]
# So a decode step cannot be faster. But it took 14.0 ms on this GPU.

# %%
predictions.ask(
    "work",
    "A decode step of one request took 14.0 ms on the H100. How much of this time did the GPU work?",
    ["all of it", "half of it", "a sixth of it"],
)

# %%
from tutorial_engine.lab import ONE_BY_ONE

share = ONE_BY_ONE.busy / ONE_BY_ONE.seconds
near = {"all of it": 1, "half of it": 1 / 2, "a sixth of it": 1 / 6}
if predictions.reveal("work", min(near, key=lambda name: abs(near[name] - share))):
    print(f"{ONE_BY_ONE.launches} launches; the GPU worked {1000 * ONE_BY_ONE.busy:.1f} ms")

# %% tags=["figure-timeline"]
from tutorial_engine.viz import gpu_timeline

gpu_timeline(ONE_BY_ONE)

# %% [markdown]
# The picture is drawn from three measured numbers: 14.0 ms, 741 launches, 2.3 ms of work. (Single launches were not
# recorded.) Python needs 18.9 µs for an average launch. The kernel needs 3.1 µs. The GPU waits for the rest. So the step takes as
# long as its launches. A faster GPU would change nothing.

# %% [markdown]
# **Where do so many launches come from?** You can count them without a GPU. PyTorch has a device with the name `meta`: its
# tensors have shapes, but no numbers. `count_launches` runs a step of Qwen3-0.6B there, and counts the operations that compute something.

# %%
from tutorial_engine.lab import count_launches

alone = count_launches(1, one_call=False)
print(f"{alone} launches for one request, in 28 layers: about {alone / 28:.0f} a layer")

# %% [markdown]
# In an earlier version 741 launches were profiled on a GPU. Here the operations of today's version are counted, and one
# operation can launch more than one kernel. The number does not depend on the model's
# width or on the length of the context. A larger model has longer kernels, but as many in each layer. So a small model on a
# large GPU waits most.

# %% [markdown]
# The next cell looks at your own GPU, if you have one. (The model is the small one of these notebooks.)

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
    print("no GPU here: the picture above shows what was measured on an H100")

# %% [markdown]
# ## 2 · Record once, replay often
#
# **Objective:** say what a recorded step needs.
#
# All decode steps of a size are alike: the same kernels in the same order. Only the numbers in the tensors differ. So the
# step is recorded once. The recording is a **CUDA graph**. To replay it is a single launch for all of its kernels.

# %% tags=["figure-replayed"]
from tutorial_engine.lab import REPLAYED

gpu_timeline(ONE_BY_ONE, REPLAYED, floor=floor)

# %% [markdown]
# This is how our engine records. We run the step once before. Then libraries are ready. During the
# recording nothing is computed. (Around a replay a few launches remain: the tensors are filled before it, and behind it come the
# logits and the best token of each.)

# %%
from tutorial_engine.engine.replay import CudaGraphs

show_source(CudaGraphs.__call__)

# %% [markdown]
# A recording knows *places* in the GPU's memory. It does not know Python's tensors. From this follow three rules:
#
# 1. **The same places.** Ids, positions and slots lie in fixed tensors, which are filled before each replay. What a recording
#    reads must live as long as the recording.
# 2. **The same shapes.** A recording of 4 rows always runs 4 rows. Fewer requests are padded.
# 3. **Nobody looks.** Python must not read a number from the GPU in the recorded part, for instance with `.item()` or `if`.

# %% [markdown]
# ### Exercise 1: which size, and what does padding cost? (5 minutes)
#
# Our engine has a recording for each number of sequences and each longest context. Both are rounded up to a power of two
# (1, 2, 4, 8 ...), and a context to 64 at least. A step reads `rows * longest` slots, needed or not. `lens` are the
# context lengths of a step's sequences. Return the rows, the longest context, and the part of all slots that nobody needs.
#
# <details><summary>Hint</summary>The smallest power of two that is not below n is
# <code>1 << (n - 1).bit_length()</code>. The unused part is <code>1 - sum(lens) / (rows * longest)</code>.</details>


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
# Padding costs reading and copying, and no further launch. This is why engines accept it. With more sizes less is
# padded, but more recordings must be made and kept.

# %%
from tutorial_engine.learn import box

box("graphs")

# %%
predictions.ask(
    "prefill",
    "When does a graph hardly help?",
    [
        "a decode step of one request",
        "a decode step of 64 requests",
        "a prompt of 2000 tokens",
    ],
)

# %% [markdown]
# Count the arithmetic. A prompt of 2000 tokens has as many kernels as one token, but 2000 times the work in each.

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
        print(f"{what}: {flops / 1e6:,.0f} million operations of arithmetic for each launch")

# %% [markdown]
# With long kernels the GPU waits less, so a recording gains less. Steps with a prompt also differ in shape, and the same shape
# would rarely come again. So our engine records decode steps only. A step with a prompt in it runs as it comes.

# %% [markdown]
# ### A runner that forgets
#
# Rule 1 is broken easily. `GpuMemory` is a memory in small. It does two things as a GPU's memory does under PyTorch: it gives the
# place of a tensor that nobody knows any more to the next tensor, and its recordings know places only.


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
other = gpu.tensor([0] * 8)  # somebody needs memory
print("sequences see", step([3, 5]).sum(1).tolist(), "positions: wrong")

# %%
predictions.ask(
    "gone",
    "Which tensor was given away?",
    ["lens", "positions", "new_lens", "other"],
)

# %%
kept = step.__code__.co_freevars  # the names that step still knows
if predictions.reveal("gone", next(name for name in ("lens", "positions") if name not in kept)):
    print("step knows", *kept, "- nobody knows positions, and `other` got its place")

# %% [markdown]
# ### Exercise 2: mend it (5 minutes)
#
# Make a step for the same two tensors, with `recorded_step`, that stays right. On a real GPU this mistake shows
# later and in another place: as a wrong token, or as an "illegal memory access" that ends the process.
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
# Now 64 users decode at once. The weights are read once for all of them, so the matrix products cost little more than for
# one. But each user has keys and values of their own. On pages, the engine of notebook 04 needs three launches for each
# sequence in each of 28 layers: it copies the keys together, it copies the values together, and it attends.

# %%
predictions.ask(
    "calls",
    "How many times as many launches does a step of 64 requests have then, compared with one request?",
    ["as many", "twice", "8 times", "64 times"],
)

# %%
each = count_launches(64, one_call=False, context=16)
options = {"as many": 1, "twice": 2, "8 times": 8, "64 times": 64}
if predictions.reveal("calls", min(options, key=lambda name: abs(options[name] - each / alone))):
    print(f"{each:,} launches, {each / alone:.0f} times as many as {alone}")

# %% [markdown]
# A kernel of *FlashAttention* can take all sequences in one call, although they have different lengths. They lie one after the other,
# without padding, as our `Batch` has them. The kernel is told where each sequence begins. This list is called
# `cu_seqlens` (cumulative sequence lengths): it begins with 0, and ends with the number of all tokens. For K and V we also need the
# list of all slots, so that two copies gather what the whole batch reads.

# %% [markdown]
# ### Exercise 3: lay them end to end (10 minutes)
#
# Each sequence has a block table, and a length. Position p of a sequence lies in slot
# `table[p // block_size] * block_size + p % block_size`. Return the list `cu_seqlens`, and the list of all slots.
#
# <details><summary>Hint</summary>Begin with <code>cu_seqlens = [0]</code> and <code>slots = []</code>. For each sequence append
# the slots of its positions. Then append <code>len(slots)</code> to <code>cu_seqlens</code>.</details>


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

# %% tags=["figure-serving"]
from tutorial_engine.lab import SERVING
from tutorial_engine.viz import serving_picture

together = count_launches(64, one_call=True, context=16)
serving_picture(
    {"64 requests, a call for each": each, "64 requests, one call for all": together}, SERVING
)

# %% [markdown]
# The first run is slower than the second one, because libraries prepare a kernel when they first see a shape. With a call for each
# request the shapes are always new. (What "prototype" says was measured before it was built into the engine. The engine's own
# runner was not on a GPU yet when this was written.)
#
# The answers stay the same. Here both new parts run on your CPU: sequence by sequence in place of the kernel, and a call
# in place of a replay. All else is the same code.

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
    "Replayed, one request gets 400 tokens a second in its decode steps. 64 requests get 2,508 together (on "
    "pages, prompts included). Why is a step of 64 requests not 64 times as slow?",
    [
        "the GPU runs 64 programs, one for each request",
        "the weights are read once for all of them",
        "attention is left out",
    ],
)

# %%
one, many = (Work(num_seqs=n, new=1, old=199).num_bytes(shape, itemsize=2) for n in (1, 64))
if predictions.reveal("batch", "the weights are read once for all of them"):
    print(f"one request of 200 tokens reads {one / 1e9:.2f} GB, 64 of them {many / 1e9:.2f} GB")

# %% [markdown]
# All requests together must read at least twice as many bytes as one. (Our engine copies all contexts first, so it moves
# about five times as many.) What grows with each request are its
# keys and values, and Python's work for it: planning, filling, choosing a token.

# %% [markdown]
# What is left between the replayed step and the time for reading all weights?

# %%
from tutorial_engine.lab import COMPILED

for what, seconds in (
    ("replayed", REPLAYED.seconds),
    ("small operations compiled", COMPILED.seconds),
):
    print(f"{what}: {1000 * seconds:.1f} ms; all weights read once: {1000 * floor:.1f} ms")

# %% [markdown]
# Even a replayed step has more than 700 kernels. Each one has to start and to end, and most of
# them do little: a norm of 1024 numbers keeps a large GPU busy for a moment only. A compiler can join small operations
# into one kernel. With it the prototype needed less time, after it had compiled for a quarter of a minute. Our engine does not do this.

# %%
box("fused")

# %% [markdown]
# ## On your GPU
#
# An earlier version of these notebooks ran there. Recording has not been tried there yet; if it fails, turn it off as below. Give `device="cuda"` to `LLM` or `load_model`. Half precision, `dtype="bfloat16"`, takes the
# flash kernel. In fp32, and on cards that are older than Ampere, decode steps are padded instead. `engine.warm_up()` records all sizes at
# once. `EngineConfig(cuda_graphs=False)` turns recordings off, as `enforce_eager=True` does in vLLM.
#
# `make bench DEVICE=cuda` measures your card. `python -m tutorial_engine.lab.doctor` says which parts it can use, and why not.

# %%
print(predictions.score())
