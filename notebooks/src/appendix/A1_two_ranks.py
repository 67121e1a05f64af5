# %% [markdown]
# # A1 · Two ranks, and names in other engines
#
# This appendix comes after notebook 04, and takes about 40 minutes. In it one model runs on two processes at once, and
# your own function computes the MLP in both. The last section tells you what to search for when you read the source of
# vLLM, SGLang or llama.cpp.

# %%
import torch
import torch.nn.functional as F

from tutorial_engine.learn import Predictions, show_source
from tutorial_engine.model import TINY, load_model, load_tokenizer

torch.set_grad_enabled(False)
torch.set_num_threads(1)
predictions = Predictions("A1")
model, tokenizer = load_model(), load_tokenizer()
c = model.config
print(c.num_hidden_layers, "layers,", c.num_attention_heads, "query heads,", end=" ")
print(c.num_key_value_heads, "K/V heads, MLP of", c.intermediate_size)

# %% [markdown]
# ## 1 · Split a model
#
# **Objective:** divide the work of one layer between two ranks.
#
# A large model does not fit into one GPU. *Tensor parallelism* gives each **rank** a share of every large matrix of a
# layer. A rank is a process, usually with a GPU of its own. In attention, it has some of the heads, with their K and V.
# In the MLP, it has some of the *inner features*, the I numbers between the matrices. Both end with a matrix
# product, which is a sum over the heads or features. So each rank computes a **partial sum**. Adding up the
# partial sums, so that all ranks have the whole sum, is called an **all-reduce**.

# %% [markdown]
# (Ours keeps the embedding and the LM head whole on each rank. vLLM and SGLang cut these too, along the vocabulary.
# This costs one more all-reduce, and one gather of the logits.)
#
# Here is an MLP that is small enough to be read: four inner features, two on each rank.

# %% tags=["figure-split"]
from tutorial_engine.viz import mlp_split

x = torch.tensor([1.0, 2.0, 1.0])  # one token
gate = torch.tensor([[1.0, 0, 0], [0, 1, 0], [-1, 1, 0], [1, 1, -1]])
up = torch.tensor([[1.0, 1, 0], [2, 0, 1], [0, 1, 0], [-1, 1, 0]])
down = torch.tensor([[1.0, -1, 1, 2], [2, 0, -1, 1], [0, 1, 1, 0]])
mlp_split(x, gate, up, down)

# %% [markdown]
# A line of the picture is one inner feature: a row of `gate`, a row of `up` and a column of `down`. No line needs another line. So a
# rank can have some of them, with nothing to ask before the sum at the end.

# %% [markdown]
# ### Exercise 1: one rank's share of the MLP (10 minutes)
#
# The whole MLP is `(silu(x @ gate.T) * (x @ up.T)) @ down.T`. It has I inner features. Rank 0 has the first ones,
# rank 1 the next, and so on. I can be divided by `num_ranks`.
#
# Try the small MLP first, in a cell of your own: `rank_mlp(x[None], gate, up, down, 1, 2)` should give the
# partial sum of rank 1 in the picture. (`x[None]` is one token, [1, hidden].)
#
# <details><summary>Hint</summary>In the picture, a rank has its own lines. How many features has a rank, and which
# is its first? Compute the whole formula with the numbers of these features only. <code>F.silu</code> is the SiLU.
# </details>
#
# <details><summary>Second hint</summary>A rank has <code>size = len(gate) // num_ranks</code> features, and its first is
# <code>rank * size</code>. They are rows of <code>gate</code> and <code>up</code>, but columns of <code>down</code>:
# <code>down[:, own]</code>.</details>


# %% tags=["exercise"]
def rank_mlp(x, gate, up, down, rank, num_ranks):
    """x [T, hidden], gate and up [I, hidden], down [hidden, I] -> partial sum [T, hidden]."""
    ### BEGIN SOLUTION
    size = len(gate) // num_ranks
    own = slice(rank * size, (rank + 1) * size)
    return (F.silu(x @ gate[own].T) * (x @ up[own].T)) @ down[:, own].T
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_rank_mlp

check_rank_mlp(rank_mlp)

# %% [markdown]
# In section 2 your function runs in the two processes. The package cuts the matrices once, when the model is loaded.
# (So a rank of a real engine keeps only its share in memory. Ours keeps the whole model beside it, to compare.)
# `qkv_proj` and `gate_up_proj` are cut by rows, and need no all-reduce. `o_proj` and `down_proj` are cut by columns and
# put into the class below. It computes the product with its part, and then does the all-reduce. (A bias would
# be added once, after the sum.)

# %% [markdown]
# The class is called *row* parallel, in vLLM too: in `x @ W.T` the columns of W are the
# rows of `W.T`. `tp_size` is the number of ranks; vLLM's option for it is `tensor_parallel_size`.

# %%
from tutorial_engine.parallel import RowParallelLinear
from tutorial_engine.parallel.tensor_parallel import RankGroup

show_source(RowParallelLinear)
print()
show_source(RankGroup.all_reduce)  # `dist` is torch.distributed

# %% [markdown]
# ## 2 · Run it
#
# **Objective:** count what the ranks say to each other.

# %%
predictions.ask(
    "ranks",
    "The tiny model has 4 layers. How many all-reduces does a forward of 20 tokens need?",
    ["2", "4", "8", "160"],
)

# %%
predictions.ask(
    "memory",
    "What does each of the two ranks need, compared with one process that serves the same requests?",
    [
        "half of the weights and all of the K/V cache",
        "half of both",
        "a little more than half of the weights, and half of the K/V cache",
    ],
)

# %% [markdown]
# Now three short stories run on two ranks, both on this CPU. If your `rank_mlp` is right, it computes the MLP of
# every layer in both. It is given the whole matrices, and takes its share. (The bytes below are those of a rank that
# has cut its matrices.) In the end rank 0 runs all of it once more, alone.
#
# Who starts a rank? `run_ranks` starts `torchrun`, a program of PyTorch, and this starts two Python processes. It tells
# each its number. In each process the function below runs. *gloo* is the library that carries the sums between CPU
# processes. Between GPUs it is *NCCL*, a library of NVIDIA. The world size is the number of ranks.

# %%
from tutorial_engine.parallel import run_ranks

show_source(RankGroup.__init__)

# %%
mine = rank_mlp if check_rank_mlp(rank_mlp).ok else None  # None: the package's MLP
report = run_ranks(2, mlp=mine)
if predictions.reveal("ranks", report.traffic.calls // report.num_forwards):
    print(f"{report.traffic.calls} all-reduces in {report.num_forwards} forwards")
    ran = f"was called {report.mlp_calls} times in each" if report.mlp_calls else "did not run"
    print(f"your rank_mlp {ran}")

# %% tags=["figure-ranks"]
from tutorial_engine.viz import ranks_picture

share = report.kv_bytes[0] / report.kv_bytes_alone
weights = report.weight_bytes[0] / report.weight_bytes_alone
answer = 0 if share == 1 else 1 + (weights > 0.5)
if answered := predictions.reveal("memory", answer):
    print(report.summary())
    print(f"a rank has {weights:.0%} of the weights and {share:.0%} of the K/V cache")
ranks_picture(report) if answered else None

# %%
for ids, text in zip(report.prompt_token_ids, report.texts, strict=True):
    print(f"{tokenizer.decode(ids)} |{text}")

# %% [markdown]
# **There are two reasons to do this.** A rank needs about half of the memory. (It is more than half because every rank
# has the whole embedding, LM head and norms.) And in decode each GPU reads only about half of the weights (notebook 02),
# so a token can take less time.
#
# The texts are those of one process. All ranks have the same logits, bit by bit, because an all-reduce gives all of
# them the same sum. Against one process the logits differ by rounding only: their sums have another order.

# %% [markdown]
# There are two all-reduces in each layer, after attention and after the MLP, however many tokens run. Their sums grow
# with the tokens: they have the hidden state of each. The next cells *compute* the time of a forward of Qwen3-8B on H100
# GPUs, as if a GPU did not compute while it sends.

# %% [markdown]
# - `BANDWIDTH`, the speed of a GPU's memory, was measured.
# - `PEAK`, the speed of its arithmetic, is from the data sheet (the maker's promise) of the H100 SXM, the fastest H100.
#   No program reaches it.
# - `LINKS` are from data sheets, too: PCIe, the slots of any computer, and NVLink, lines between GPUs only.
# - `START`, the time that the smallest all-reduce takes, is a guess.

# %%
from tutorial_engine.lab import BANDWIDTH, forward_flops, weight_bytes
from tutorial_engine.lab.sizing import QWEN3_06B
from tutorial_engine.model import ModelConfig
from tutorial_engine.parallel.tensor_parallel import shard_config

sizes = {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288}
sizes |= {"num_hidden_layers": 36, "num_attention_heads": 32, "tie_word_embeddings": False}
whole = ModelConfig.from_dict(QWEN3_06B | sizes)  # the shape of Qwen3-8B
half = shard_config(whole, 2)
PEAK, START = 989e12, 10e-6  # operations a second; seconds
LINKS = {"PCIe 5": 64e9, "NVLink": 450e9}  # bytes a second, one way; data sheets often add up both
num_sums, state = 2 * 36, 4096 * 2  # all-reduces; bytes of a token's hidden state

# %% [markdown]
# Each of two ranks sends about one whole sum per all-reduce: half of its numbers to be added, and half of the sums back. How much of `PEAK` is reached? Try other numbers
# for `reached`, too.

# %%
summed = 8000 * num_sums * state
print(f"A prompt of 8,000 tokens has {summed / 1e9:.1f} GB of sums.")
for reached in (1.0, 0.6):
    one, two = (1e3 * forward_flops(c, 8000) / (reached * PEAK) for c in (whole, half))
    print(f"At {reached:.0%} of PEAK one GPU computes for {one:.0f} ms.")
    for link, speed in LINKS.items():
        sums = 1e3 * summed / speed
        print(f"  Two over {link} need {two + sums:.0f} ms, {sums:.0f} ms of them for sums.")

# %% [markdown]
# Over PCIe a second GPU gains little or nothing here: about half of the time goes to the sums (at 60 %, 4 of 10 parts). Over NVLink it nearly
# halves the time. In a decode step the sums are small, and what counts is the time to start them:

# %%
alone, each = (1e3 * weight_bytes(c, itemsize=2) / BANDWIDTH for c in (whole, half))
starts = 1e3 * num_sums * START  # 8,192 bytes take less than 1 µs more
print(
    f"A decode step: one GPU reads the weights in {alone:.1f} ms. Two read theirs in {each:.1f} ms"
)
print(f"  and do {num_sums} all-reduces in {starts:.1f} ms: together {each + starts:.1f} ms.")

# %%
predictions.ask(
    "start",
    "If starting an all-reduce takes longer, two GPUs gain less. From which START on are they "
    "no faster in this decode step?",
    ["33 µs", "65 µs", "71 µs"],
)

# %%
break_even = (alone - each) / num_sums  # what the smaller weights save, for each all-reduce
if predictions.reveal("start", f"{1e3 * break_even:.0f} µs"):
    print(f"({alone:.2f} − {each:.2f}) ms / {num_sums} all-reduces")

# %% [markdown]
# Here each rank runs its own scheduler and its own block manager. All of them decide the same, because they
# get the same requests in the same order, the same logits and the same seeds. No block table has to be sent around.
# SGLang does the same. vLLM does not:

# %%
from tutorial_engine.learn import box

box("ranks")

# %% [markdown]
# **Where does it end?** 6 query heads and 2 K/V heads cannot be shared equally among 4 ranks. Other engines copy K/V
# heads to more ranks. But 6 query heads do not fit 4 ranks: only a few engines allow shares that are not equal, or add
# empty heads (SGLang on a CPU). The package refuses it before a process starts.

# %%
try:
    run_ranks(4)
except ValueError as error:
    print(error)

# %% [markdown]
# Here is one more row of the ledger (with the package's MLP, not yours). The time below it is of your run above: two
# ranks with your MLP (if it was right), and rank 0 alone with the package's. With this tiny model two ranks are slower here: there is little arithmetic to divide, and each sum is sent from one
# process to the other.

# %%
from tutorial_engine.lab import equality_ledger as ledger, ledger_table as table, our_paths
from tutorial_engine.parallel import parallel_paths

prompts = [
    tokenizer.encode(text).ids for text in ("Once upon a time Anna had a red kite.", "One day")
]
reference = {"no cache": our_paths(model)["no cache"]}
print(table(ledger(reference | parallel_paths(TINY), prompts, num_tokens=8)))

# %% tags=["nbval-ignore-output"]
print(f"measured here: one rank {report.seconds_alone:.2f} s, two {report.seconds:.2f} s")

# %% [markdown]
# ## 3 · Now read vLLM, SGLang, llama.cpp
#
# **Objective:** find your way in real engines.
#
# Each line is one thing from these notebooks, with its name here and the name to search for in the other engines. The
# number says which notebook has it. A dash says that an engine has no such thing of its own.

# %%
from tutorial_engine.learn import names_elsewhere

names_elsewhere()

# %%
print(predictions.score())
