# %% [markdown]
# # A1 · Two ranks, and names in other engines
#
# This appendix belongs to notebook 04 and takes about half an hour. In it one model runs on two processes at
# once. The last section tells you what to search for when you read the source of vLLM, SGLang or llama.cpp.

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
# A large model does not fit into one GPU. *Tensor parallelism* gives each process, called a **rank**, a part
# of every weight matrix. In attention, each rank has some of the heads, with their K and V. In the MLP, each
# rank has some of the inner features. Both parts end with a matrix product. The product of the whole is the
# *sum* of the products of the parts. Adding up over all ranks is called an **all-reduce**.

# %% [markdown]
# ### Exercise 1: one rank's part of the MLP (10 minutes)
#
# The whole MLP is `(silu(x @ gate.T) * (x @ up.T)) @ down.T`. Each of the I inner features is one row of
# `gate`, one row of `up` and one column of `down`. Rank 0 has the first features, rank 1 the next, and so on;
# `num_ranks` divides I.
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
# The package cuts the matrices once, when the model is loaded. The two matrices that end a part, `o_proj` and
# `down_proj`, become this class. `linear` has the rank's columns.

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
from tutorial_engine.parallel import run_ranks

report = run_ranks(2)  # two processes on this machine
if predictions.reveal("ranks", report.traffic.calls // report.num_forwards):
    print(report.summary())

# %% tags=["figure-ranks"]
from tutorial_engine.viz import ranks_picture

ranks_picture(report)

# %% [markdown]
# There are two all-reduces in each layer, one after attention and one after the MLP, however many tokens run.
# What grows with the tokens is the size of the sum: the hidden state of every token.
#
# Here each rank runs its own scheduler and its own block manager. All of them decide the same, because all of
# them see the same logits, bit for bit. No block table has to be sent around. Real engines do this in another way:

# %%
from tutorial_engine.learn import box

box("ranks")

# %% [markdown]
# **How much smaller is the cache of a rank?** It holds the K/V heads of this rank only, so two ranks have room
# for twice as many tokens each. This ends when there are more ranks than K/V heads. The package refuses that
# before a process starts. Other engines give several ranks a copy of the same head.

# %%
try:
    run_ranks(4)
except ValueError as error:
    print(error)

# %%
predictions.ask(
    "memory",
    "Each of the two ranks has 1 of the 2 K/V heads. How much of the K/V memory of one process does a rank need "
    "for the same requests?",
    ["a quarter", "half", "all of it"],
)

# %%
share = report.kv_bytes[0] / report.kv_bytes_alone
if predictions.reveal("memory", {0.25: "a quarter", 0.5: "half"}.get(share, "all of it")):
    print(f"{report.kv_bytes[0]:,} bytes on a rank, {report.kv_bytes_alone:,} alone")

# %% [markdown]
# Here is one more row of the ledger of notebook 04, and the time of both ways. On one machine with few cores
# two ranks are not faster: the processes share the cores, and each sum is sent from one to the other.

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
