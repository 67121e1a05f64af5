# %% [markdown]
# # A1 · Two ranks, and names in other engines
#
# This appendix takes about 40 minutes. In it one model runs on two processes at once, and your own function
# computes the MLP in both. You should have done notebooks 01 to 03. The last section tells you what to search for
# when you read the source of vLLM, SGLang or llama.cpp.

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
# **Objective:** divide the work of one layer, so that two machines can do it.
#
# A large model does not fit into one GPU. *Tensor parallelism* gives each process, called a **rank**, a part of every
# large matrix of a layer. In attention, each rank has some of the heads, with their K and V. In the MLP, each rank has
# some of the *inner features*, the I numbers between its matrices. Both parts end with a matrix product, and this
# product is a sum over the heads or features. So each rank computes its part of the sum. Adding up these parts, so
# that all ranks have the whole sum, is called an **all-reduce**.

# %% [markdown]
# (Ours keeps the embedding and the head whole on each rank. vLLM and SGLang cut these too, along the vocabulary. This
# costs one more all-reduce, and one gather of the logits.)
#
# Here is an MLP that is small enough to be read: four inner features, two on each rank.

# %% tags=["figure-split"]
from tutorial_engine.viz import mlp_split

x = torch.tensor([1.0, 2.0])  # one token
gate = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0], [1.0, 1.0]])
up = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 1.0], [-1.0, 1.0]])
down = torch.tensor([[1.0, 0.0, 2.0, 1.0], [0.0, 1.0, -1.0, 2.0]])
mlp_split(x, gate, up, down)

# %% [markdown]
# A line is one inner feature: a row of `gate`, a row of `up` and a column of `down`. No line needs another line. So a
# rank can have some of them, with nothing to ask before the sum at the end.

# %% [markdown]
# ### Exercise 1: one rank's part of the MLP (10 minutes)
#
# The whole MLP is `(silu(x @ gate.T) * (x @ up.T)) @ down.T`. It has I inner features. Rank 0 has the first ones,
# rank 1 the next, and so on; `num_ranks` divides I.
#
# <details><summary>Hint</summary><code>size = len(gate) // num_ranks</code>, and this rank's features are
# <code>slice(rank * size, (rank + 1) * size)</code>. For the columns write <code>down[:, own]</code>.
# <code>F.silu</code> is the SiLU.</details>


# %% tags=["exercise"]
def rank_mlp(x, gate, up, down, rank, num_ranks):
    """x [T, hidden], gate and up [I, hidden], down [hidden, I] -> this rank's summand [T, hidden]."""
    ### BEGIN SOLUTION
    size = len(gate) // num_ranks
    own = slice(rank * size, (rank + 1) * size)
    return (F.silu(x @ gate[own].T) * (x @ up[own].T)) @ down[:, own].T
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_rank_mlp

check_rank_mlp(rank_mlp)

# %% [markdown]
# In section 2 your function runs in the two processes. The package cuts the matrices once, when the model is loaded:
# so a rank keeps only its part in memory. The two matrices that end a part, `o_proj` and `down_proj`, become this
# class. `linear` has the rank's columns. (vLLM uses this name, too. It means rows of A in x @ A. PyTorch stores A
# transposed, so these rows are columns of `linear`.)

# %%
from tutorial_engine.parallel import RowParallelLinear

show_source(RowParallelLinear)

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
# Now three short stories run on two processes of this machine. If your `rank_mlp` is right, it computes the MLP of
# every layer in both. It is given the whole matrices, and takes its part. (The bytes below are those of a rank that
# has cut its matrices.) In the end rank 0 runs all of it once more, alone.

# %%
from tutorial_engine.parallel import run_ranks

mine = rank_mlp if check_rank_mlp(rank_mlp).ok else None  # None: the package's MLP
report = run_ranks(2, mlp=mine)
if predictions.reveal("ranks", report.traffic.calls // report.num_forwards):
    print(f"{report.traffic.calls} all-reduces in {report.num_forwards} forwards")
    print(f"your rank_mlp ran in both ranks: {report.mlp_calls or 'no'} calls in each")

# %% tags=["figure-ranks"]
from tutorial_engine.viz import ranks_picture

share = report.kv_bytes[0] / report.kv_bytes_alone
weights = report.weight_bytes[0] / report.weight_bytes_alone
answer = 0 if share == 1 else 1 + (weights > 0.5)
if answered := predictions.reveal("memory", answer):
    print(report.summary())
    print(f"a rank has {weights:.0%} of the weights and {share:.0%} of the K/V cache")
ranks_picture(report) if answered else None

# %% [markdown]
# **This is why it is done: a rank needs about half of the memory, and the text is the same.** (The little more are the
# embedding, the head and the norms.) All ranks have the same logits, bit by bit, because an all-reduce gives all of
# them the same sum. Against one process the logits differ by rounding only: their sums have another order.

# %% [markdown]
# There are two all-reduces in each layer, one after attention and one after the MLP, however many tokens run.
# What grows with the tokens is the size of the sum: the hidden state of every token. For Qwen3-8B on two GPUs:

# %%
per_token = 2 * 36 * 4096 * 2  # two sums a layer, 36 layers, hidden size 4,096, 2 bytes a number
print(
    f"{per_token / 1e3:.0f} KB a token, {8000 * per_token / 1e9:.1f} GB for a prompt of 8,000 tokens"
)
for link, speed in {"NVLink, 450 GB/s": 450e9, "PCIe 4, 32 GB/s": 32e9}.items():
    print(f"{link}: at best {8000 * per_token / speed * 1000:.0f} ms")

# %% [markdown]
# Here each rank runs its own scheduler and its own block manager. All of them decide the same, because they
# get the same requests in the same order, the same logits and the same seeds. No block table has to be sent around. SGLang does the same. vLLM does not:

# %%
from tutorial_engine.learn import box

box("ranks")

# %% [markdown]
# **Where does it end?** The cache of a rank holds the K/V heads of this rank only. Four ranks cannot share the work: 4
# divides neither the 6 query heads nor the 2 K/V heads. Copies of K/V heads, which other engines have, solve only the
# second. The package refuses that before a process starts.

# %%
try:
    run_ranks(4)
except ValueError as error:
    print(error)

# %% [markdown]
# Here is one more row of the ledger, and the time of both ways. On one machine with few cores two ranks are slower:
# the processes share the cores, and each sum is sent from one to the other. On two GPUs each has its own.

# %%
from tutorial_engine.lab import equality_ledger as ledger, ledger_table as table, our_paths
from tutorial_engine.parallel import parallel_paths

prompts = [
    tokenizer.encode(text).ids for text in ("Once upon a time Anna had a red kite.", "One day")
]
reference = {"no cache": our_paths(model)["no cache"]}
print(table(ledger(reference | parallel_paths(TINY), prompts, num_tokens=8)))

# %% tags=["nbval-ignore-output"]
import time

from tutorial_engine.engine import LLMEngine
from tutorial_engine.sampling import SamplingParams

began = time.perf_counter()
params = SamplingParams(max_tokens=len(report.token_ids[0]))
LLMEngine(model, tokenizer).generate([list(ids) for ids in report.prompt_token_ids], params)
print(f"measured here: one process {time.perf_counter() - began:.2f} s, two {report.seconds:.2f} s")

# %% [markdown]
# ## 3 · Now read vLLM, SGLang, llama.cpp
#
# **Objective:** find your way in real engines.
#
# Each line is one thing that you know from these notebooks, with the name to search for in the other engines.
# A dash says that an engine has no such thing of its own.

# %%
from tutorial_engine.learn import names_elsewhere

print(names_elsewhere())

# %%
print(predictions.score())
