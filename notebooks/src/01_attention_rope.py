# %% [markdown]
# # 01 · Attention and RoPE
#
# Build the forward pass of a language model piece by piece, until its logits equal Hugging Face's:
# offline, on a Qwen3 model that we trained. About 60 minutes.
#
# **How to use it.** Shift+Enter, cell by cell. At **Predict** choose first. Exercises print ☐ until
# you fill them in, ✘ with a reason, or ✔.

# %% [markdown]
# You should know matrix products and a little PyTorch. Two words for now: a *checkpoint* is a folder of
# trained weights, here in the format of Hugging Face's `transformers`, for Qwen3, a family of open
# models; *logits* are the model's answer, one number per vocabulary entry, higher = likelier next.

# %%
import torch

from tutorial_engine.learn import Predictions, check_close, show_source
from tutorial_engine.model import Batch, NaiveAttention, causal_mask, load_model, load_tokenizer
from tutorial_engine.model.attention import naive_attention

torch.set_grad_enabled(False)
predictions = Predictions()
model, tokenizer = load_model(), load_tokenizer()
print(f"{model.num_parameters():,} parameters, {model.config.num_hidden_layers} layers")

# %% [markdown]
# ## 1 · Text becomes ids
#
# **Objective:** see what the model is given: whole numbers. A tokenizer cuts text into pieces of its
# vocabulary. A blank belongs to the piece after it; we draw it as `·`.

# %%
PROMPT = "Once upon a time Anna had a red kite."

from tutorial_engine.viz.tokens import token_labels

ids = tokenizer.encode(PROMPT).ids
print(ids)
print(token_labels(tokenizer, ids))

# %%
predictions.ask(
    "emoji",
    "This vocabulary has no emoji in it. How many tokens is 😀?",
    ["0, it is dropped", "1", "4"],
)

# %%
emoji = tokenizer.encode("😀").ids
predictions.reveal("emoji", str(len(emoji)))
print(token_labels(tokenizer, emoji))

# %% [markdown]
# Nothing is ever out of vocabulary: the 256 bytes are in it. So any text survives the round trip,
# and text that looks like markup is just text.

# %%
for text in (PROMPT, "naïve 😀", "<script>alert('<s>')</script>"):
    print(tokenizer.decode(tokenizer.encode(text).ids) == text, repr(text))

# %% [markdown]
# ## 2 · Ids become vectors
#
# **Objective:** an embedding is a table lookup: id *i* takes row *i*. No position is in it yet.

# %%
table = model.model.embed_tokens.weight
vectors = table[torch.tensor(ids)]
print("table", list(table.shape), "-> vectors", list(vectors.shape))
print("both 'a' have the same vector:", torch.equal(vectors[2], vectors[6]))

# %% [markdown]
# ## 3 · Attention by hand, three tokens
#
# **Objective:** compute attention for one query with pencil and paper. Every token asks (query q),
# offers (key k) and carries (value v). A score is the dot product of a query with a key.

# %%
q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
k = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
v = torch.tensor([[8.0, 0.0], [0.0, 8.0], [4.0, 4.0]])
scores = q @ k.T  # row = query, column = key
print(scores.int().tolist())

# %% [markdown]
# The last query scores 1, 2, 2. Divide by √2, the root of the vectors' length (section 6 says why).
# Softmax turns scores into shares that add up to one; the output mixes the values in these shares.

# %%
from math import exp, sqrt

shares = [exp(s / sqrt(2)) for s in scores[2].tolist()]
shares = [s / sum(shares) for s in shares]
by_hand = sum(share * value for share, value in zip(shares, v, strict=True))
print("shares in %:", [round(100 * s) for s in shares])
by_package = naive_attention(q[:, None], k[:, None], v[:, None]).out[2, 0]
check_close(by_hand, by_package, 1e-6, "by hand = package")

# %% [markdown]
# ### Exercise 1: the same for all queries at once (5 minutes)
#
# <details><summary>Hint</summary>Scores are <code>q @ k.T</code>, divided by the square root of D,
# the length of a query. Forbidden scores become <code>float("-inf")</code> before the softmax over the last axis.
# </details>


# %% tags=["exercise"]
def attention(q, k, v, mask):
    """q [q, D], k [kv, D], v [kv, D], mask [q, kv] (True = may attend) -> [q, D]."""
    ### BEGIN SOLUTION
    scores = q @ k.T / k.shape[-1] ** 0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1) @ v
    ### END SOLUTION


# %%
from tutorial_engine.learn.checks_01 import check_attention

check_attention(attention)

# %% [markdown]
# The package's version does the same for many heads at once, with clear errors. This is the installed
# code; `repeat_interleave` will make sense in section 5.

# %%
show_source(naive_attention)

# %% [markdown]
# ## 4 · The causal mask
#
# **Objective:** know who may look at whom. One rule: `key_pos <= query_pos`. It has three faces.
# *Prefill*: the whole prompt at once. *Decode*: one new token after all earlier ones. *Chunk*: a few new
# tokens after earlier ones. The queries are the *last* of the keys.

# %%
predictions.ask(
    "chunk",
    "3 new tokens (queries) after 4 old ones, so 7 keys: how many of the 21 pairs are allowed?",
    ["6", "15", "18", "21"],
)

# %% tags=["figure-masks"]
from tutorial_engine.viz.attention_plots import mask_picture

cases = {"prefill q=4, k=4": (4, 4), "decode q=1, k=5": (1, 5), "chunk q=3, k=7": (3, 7)}
masks = {title: causal_mask(*sizes) for title, sizes in cases.items()}
predictions.reveal("chunk", str(int(masks["chunk q=3, k=7"].sum())))
mask_picture(masks)

# %% [markdown]
# **A trap:** PyTorch's `is_causal=True` lines the triangle up at the upper left. For a chunk that is
# another mask: its queries do not even see themselves.

# %%
upper_left = torch.ones(3, 7, dtype=torch.bool).tril()
print("pairs, lower right (ours):", int(causal_mask(3, 7).sum()))
print("pairs, upper left (is_causal):", int(upper_left.sum()))
print("same when q = k:", torch.equal(causal_mask(4, 4), torch.ones(4, 4).bool().tril()))

# %% [markdown]
# ### Exercise 2: a sliding window (5 minutes)
#
# Some models let a token see only itself and the `window - 1` tokens before it.
#
# <details><summary>Hint</summary>Make a column of query positions, a row of key positions, and compare
# their difference. The first query stands at <code>kv_len - q_len</code>.</details>


# %% tags=["exercise"]
def window_mask(q_len, kv_len, window):
    """bool [q_len, kv_len], True = may attend."""
    ### BEGIN SOLUTION
    query_pos = torch.arange(kv_len - q_len, kv_len)[:, None]
    key_pos = torch.arange(kv_len)[None, :]
    back = query_pos - key_pos
    return (back >= 0) & (back < window)
    ### END SOLUTION


# %%
from tutorial_engine.learn.checks_01 import check_window_mask

check_window_mask(window_mask)

# %% [markdown]
# ## 5 · Many heads, fewer keys: GQA
#
# **Objective:** find the K/V head of a query head. Heads attend side by side. In grouped-query
# attention several query heads share one K/V head: head *h* reads `h // group`.

# %%
c = model.config
print(
    c.num_attention_heads, "query heads,", c.num_key_value_heads, "K/V heads, group", c.group_size
)
print([h // c.group_size for h in range(c.num_attention_heads)])

# %% [markdown]
# Taking `h % kv_heads` instead fits every shape and gives other numbers: a bug that no shape check
# will ever find.

# %%
draw = torch.Generator().manual_seed(0)
q6, k2, v2 = (torch.randn(5, heads, 8, generator=draw) for heads in (6, 2, 2))
mask = causal_mask(5, 5)
grouped = naive_attention(q6, k2, v2, mask).out
modulo = naive_attention(q6, k2.repeat(1, 3, 1), v2.repeat(1, 3, 1), mask).out
same = [bool(torch.allclose(grouped[:, h], modulo[:, h])) for h in range(6)]
print("heads that are right with h % 2:", same)

# %% [markdown]
# ## 6 · Why divide by √d?
#
# **Objective:** measure it. Take random queries and keys with variance 1 and look at the variance of
# their scores. Large scores make the softmax pick one key and ignore the rest.

# %%
predictions.ask(
    "variance",
    "head_dim grows 16 times. The variance of q · k grows ...",
    ["4 times", "16 times", "256 times"],
)

# %% tags=["figure-variance"]
from tutorial_engine.viz.attention_plots import variance_picture

head_dims, raw, scaled = [4, 16, 64, 256], [], []
for d in head_dims:
    a, b = torch.randn(2, 20_000, d, generator=torch.Generator().manual_seed(d))
    dots = (a * b).sum(-1)
    raw.append(float(dots.var()))
    scaled.append(float((dots / d**0.5).var()))
predictions.reveal("variance", f"{round(raw[3] / raw[1])} times")
variance_picture(head_dims, raw, scaled)

# %% [markdown]
# ## 7 · RoPE: position as rotation
#
# **Objective:** see pairs of numbers as clock hands. Attention itself knows no order. RoPE turns pair
# *i* of a query or key by `position · ω_i`. The first pairs turn fast, the last hardly at all.

# %% tags=["figure-rope-clocks"]
from tutorial_engine.model.rope import RotaryEmbedding, apply_rope, inverse_frequencies
from tutorial_engine.viz.attention_plots import clocks_picture

omega = inverse_frequencies(c.head_dim, c.rope_theta)
print(len(omega), "pairs; radians a position:", [round(float(w), 4) for w in omega[::4]])
clocks_picture(omega, (0, 1, 2, 4, 10, 100, 1000))

# %% [markdown]
# Which two numbers are a pair? Qwen3 checkpoints join *i* with *i + D/2* (half-split). Others join
# neighbours. Same idea, other weights: mixing them up ruins the model.

# %%
marks = torch.arange(8.0).view(1, 1, 8)  # a head of 8 numbers at position 0: not turned
first, second = marks.chunk(2, dim=-1)
print(
    "half-split pairs ", [(int(a), int(b)) for a, b in zip(first[0, 0], second[0, 0], strict=True)]
)
print("interleaved pairs", [(int(a), int(b)) for a, b in marks.view(4, 2)])

# %% [markdown]
# ### Exercise 3: turn the pairs (10 minutes)
#
# A pair (a, b) turned by φ becomes (a cos φ − b sin φ, b cos φ + a sin φ).
#
# <details><summary>Hint</summary><code>x.chunk(2, dim=-1)</code> gives all a and all b. The angles need
# an axis for the heads: <code>angles[:, None, :]</code>.</details>


# %% tags=["exercise"]
def rope(x, angles):
    """x [T, heads, D], angles [T, D / 2] in radians -> x turned, half-split pairs."""
    ### BEGIN SOLUTION
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    ### END SOLUTION


# %%
from tutorial_engine.learn.checks_01 import check_rope

check_rope(rope)

# %% [markdown]
# ### Only the distance counts
#
# Turning q by *m* and k by *n* changes their score exactly as turning one of them by *m − n* would.
# Put the same two vectors at three places and compare.

# %% tags=["figure-rope-distance"]
from tutorial_engine.viz.attention_plots import distance_picture

rotary = RotaryEmbedding(c.head_dim, c.rope_theta)
qk = torch.randn(2, c.head_dim, generator=torch.Generator().manual_seed(7))


def score(m, n):
    turned = apply_rope(qk[:, None, :], *rotary(torch.tensor([m, n])))
    return float((turned[0] * turned[1]).sum())


distances = list(range(0, 65))
curves = {f"key at n = {n}": [score(n + d, n) for d in distances] for n in (0, 50, 500)}
distance_picture(distances, curves)

# %%
predictions.ask(
    "shift",
    "Add 100 to EVERY position of the prompt and run the whole model. The logits ...",
    ["change everywhere", "stay the same", "change for the first token only"],
)


# %%
def logits_of(batch, attention=None):
    return model.compute_logits(model(batch, attention))


here = logits_of(Batch.from_sequences([ids]))
there = logits_of(Batch.from_sequences([ids], first_positions=[100]))
equal = torch.allclose(here, there, atol=1e-3)
predictions.reveal("shift", "stay the same" if equal else "change everywhere")
check_close(here, there, 1e-3, "positions 0.. = positions 100..")

# %% [markdown]
# ### A trap for long contexts
#
# The angle is position · ω. Store ω in 16 bits (float16 or bfloat16) instead of 32, and its rounding
# error is multiplied by the position. Here are the frequencies of the real Qwen3-0.6B. Our package
# keeps them in float32, whatever the model's dtype.

# %% tags=["figure-rope-dtype"]
from tutorial_engine.viz.attention_plots import dtype_picture

positions = list(range(81, 4002, 80))
real = inverse_frequencies(head_dim=128, theta=1_000_000)
true = torch.tensor(positions, dtype=torch.float64)[:, None] * real.double()
errors = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    angle = torch.tensor(positions).float()[:, None] * real.to(dtype).float()
    errors[str(dtype).removeprefix("torch.")] = (
        (angle - true).abs().amax(-1).clamp(min=1e-7).tolist()
    )
dtype_picture(positions, errors)

# %% [markdown]
# ### Explore it
#
# Query and key are both all ones here, so their score is a sum of cosines, one per pair. Move them,
# choose a pair, then press Play: both move on together. What stays the same?

# %% tags=["figure-rope-explorer"]
from tutorial_engine.viz.rope_explorer import RopeExplorer

RopeExplorer(c.head_dim, c.rope_theta)

# %% [markdown]
# ## 8 · The small layers
#
# **Objective:** write them by hand. *RMSNorm* divides a vector by its root mean square, then weighs each
# number. *SwiGLU* multiplies one projection by the SiLU (x · sigmoid(x)) of another. Qwen3 also
# normalises each head's q and k (`q_norm`, `k_norm`) *before* RoPE.

# %%
layer = model.model.layers[0]
x = vectors * 3.0
weight = layer.input_layernorm.weight
rms = x / (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * weight
check_close(rms, layer.input_layernorm(x), 1e-5, "RMSNorm in one line = package")

# %%
gate, up = (rms @ layer.mlp.gate_up_proj.plain_weight().T).chunk(
    2, dim=-1
)  # one matmul, two halves
swiglu = (gate * torch.sigmoid(gate) * up) @ layer.mlp.down_proj.plain_weight().T
check_close(swiglu, layer.mlp(rms), 1e-4, "SwiGLU in two lines = package")

# %% [markdown]
# Norm before or after RoPE? A rotation keeps the length of a head but mixes the two numbers of a
# pair, and `q_norm` has a weight per number. So the order matters:

# %%
heads = torch.randn(
    4, c.num_attention_heads, c.head_dim, generator=torch.Generator().manual_seed(3)
)
angles = rotary(torch.arange(4))
q_norm = layer.self_attn.q_norm
before = apply_rope(q_norm(heads), *angles)
after = q_norm(apply_rope(heads, *angles))
print("same at position 0:", torch.allclose(before[0], after[0], atol=1e-5))
print("same at position 3:", torch.allclose(before[3], after[3], atol=1e-5))

# %% [markdown]
# ## 9 · The whole forward, shape by shape
#
# **Objective:** follow 10 tokens from ids to logits. Tokens lie flat, `[T, ...]`: no batch axis and
# no padding, now and in all later notebooks. Indented: the first layer, which stands for all.
# `qkv_proj` makes q, k and v in one product, `gate_up_proj` gate and up; `o_proj` mixes the heads.

# %%
from tutorial_engine.viz.shapes import meta_shape_walk, shape_walk, walk_table

print(walk_table(shape_walk(model, Batch.from_sequences([ids]))))

# %% [markdown]
# One layer is attention and MLP, each added to a running sum, the residual. The `+` hides in the norm:
# called with a residual, RMSNorm adds first and returns (normed, sum). The installed code:

# %%
from tutorial_engine.model.qwen3 import Qwen3DecoderLayer

show_source(Qwen3DecoderLayer.forward)

# %% [markdown]
# Now the real **Qwen3-0.6B**, from the numbers in its `config.json`. PyTorch's meta device runs
# shapes without memory, so nothing is downloaded.

# %%
from tutorial_engine.model import ModelConfig

qwen3_06b = ModelConfig.from_dict(
    {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
    }
)
print(walk_table(meta_shape_walk(qwen3_06b, num_tokens=10)))

# %%
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

with torch.device("meta"):
    big = Qwen3ForCausalLM(qwen3_06b)
print(f"{big.num_parameters():,} parameters")
print("heads x head_dim =", 16 * 128, "but hidden =", qwen3_06b.hidden_size)

# %% [markdown]
# ## 10 · The same logits as transformers
#
# **Objective:** prove that nothing above is a toy. Both load the same checkpoint; we compare every
# logit at every position.

# %%
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tutorial_engine.model import TINY

logging.disable_progress_bar()
theirs = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
reference = theirs(torch.tensor([ids])).logits[0]
check_close(logits_of(Batch.from_sequences([ids])), reference, 1e-4, "ours = transformers")

# %%
check_close(
    logits_of(Batch.from_sequences([ids]), NaiveAttention()),
    reference,
    1e-4,
    "naive attention = transformers",
)

# %% [markdown]
# Two sequences of unequal length in one flat batch do not see each other:

# %%
short = tokenizer.encode("Ben had a blue ball.").ids
both = logits_of(Batch.from_sequences([ids, short]))
check_close(both[: len(ids)], reference, 1e-4, "with a neighbour = alone")

# %% [markdown]
# Would this test notice a bug? Plant four well-known ones, one at a time, and run with the naive
# attention, where one of them sits. Each runs without an error.

# %%
from tutorial_engine.learn.bugs import BUGS_01, planted

for name in BUGS_01:
    with planted(name):
        wrong = logits_of(Batch.from_sequences([ids]), NaiveAttention())
    verdict = check_close(wrong, reference, 1e-4, name)
    print(f"{name:34}", "not noticed" if verdict.ok else "caught")

# %% [markdown]
# ## 11 · What the heads learned
#
# **Objective:** find an *induction head*: on each token it looks at what came *after* that token last
# time. Say random tokens twice; such a head can predict the second round. Its score: the mean attention
# that it gives, in the second round, to the right place.

# %%
predictions.ask(
    "induction",
    "Random tokens, said twice. In the second round the model predicts the next token ...",
    ["hardly ever: it is random", "about half of the time", "nearly always"],
)

# %%
import random

from tutorial_engine.tiny.induction import induction_scores, repeated_random_ids

period = 16
noise = repeated_random_ids(random.Random(5), c.vocab_size, period, 2 * period)
guesses = logits_of(Batch.from_sequences([noise])).argmax(-1)
hits = int((guesses[period - 1 : -1] == torch.tensor(noise[period:])).sum())
rarely, half, nearly = predictions.questions["induction"].options
predictions.reveal("induction", nearly if hits > 12 else half if hits > 4 else rarely)
print(f"{hits} of {period} right")

# %% tags=["figure-heads"]
from tutorial_engine.viz.attention_explorer import AttentionExplorer, attention_weights
from tutorial_engine.viz.attention_plots import attention_picture, heads_picture

weights = attention_weights(model, noise)
induction = induction_scores(model)
heads_picture(weights, induction, token_labels(tokenizer, noise))

# %% [markdown]
# The score is printed above each map; the bright diagonal in the lower half is the pattern. An induction
# head needs help from below: somebody must note, on each token, what came before it. Which heads look
# exactly one token back?

# %%
one_back = weights.diagonal(offset=-1, dim1=-2, dim2=-1).mean(-1)  # [layers, heads]
print("look one token back:", [f"L{i} H{j}" for i, j in (one_back > 0.8).nonzero().tolist()])
print("induction heads:    ", [f"L{i} H{j}" for i, j in (induction > 0.4).nonzero().tolist()])

# %% [markdown]
# So layer 1 writes down each token's predecessor, and layer 3 searches for it. Now a story, where names
# come back: which induction head looks from the last `·Anna` at what followed the first? (Trained heads
# do more than one job: before a name this one looks at names.)

# %% tags=["figure-induction-head"]
story = "Once upon a time Anna had a red kite. Ben had a blue ball. One day Anna"
story_ids = tokenizer.encode(story).ids
labels = token_labels(tokenizer, story_ids)
story_weights = attention_weights(model, story_ids)
to_what_followed = story_weights[:, :, -1, labels.index("·Anna") + 1] * (induction > 0.4)
layer_i, head_i = divmod(int(to_what_followed.argmax()), c.num_attention_heads)
print("last token looks at", labels[int(story_weights[layer_i, head_i, -1].argmax())])
attention_picture(story_weights[layer_i, head_i], labels, f"layer {layer_i}, head {head_i}")

# %% [markdown]
# Is it the head's work? Silence all strong heads and ask again.


# %%
class Silenced(NaiveAttention):
    """Attention in which some heads say nothing."""

    def attend(self, layer, q, k, v, batch):
        out = super().attend(layer, q, k, v, batch)
        return out * (induction[layer] <= 0.4)[None, :, None]


guesses = logits_of(Batch.from_sequences([noise]), Silenced()).argmax(-1)
silent = int((guesses[period - 1 : -1] == torch.tensor(noise[period:])).sum())
print(f"right with all heads: {hits} of {period}; without the induction heads: {silent}")

# %% [markdown]
# These heads were not there from the start. For hundreds of training steps nothing happens; then they
# form within about a hundred:

# %% tags=["figure-training"]
import json

from tutorial_engine.viz.attention_plots import training_picture

training_picture(json.loads((TINY.parent / "curve.json").read_text()))

# %% [markdown]
# ### Explore it
#
# Type your own prompt (up to 56 tokens), choose layer and head, step through the queries, hover over a
# cell. A name at the very start has no blank before it and is cut differently.

# %% tags=["figure-attention-explorer"]
AttentionExplorer(model, tokenizer, story, layer_i, head_i)

# %% [markdown]
# ## 12 · Text, the slow way
#
# **Objective:** generate text, and count what it costs. The last token's logits choose the next
# token; append it and run everything again. (Greedy: always the largest logit.)

# %%
tokens_run = []


def next_token(sequence):
    tokens_run.append(len(sequence))
    hidden = model(Batch.from_sequences([sequence]))
    return int(model.compute_logits(hidden[-1:]).argmax())


sequence = tokenizer.encode(PROMPT).ids
for _ in range(24):
    sequence.append(next_token(sequence))
print(tokenizer.decode(sequence))

# %%
expected = theirs.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=0)
print("same tokens as transformers' generate:", expected[0].tolist() == sequence)

# %%
predictions.ask(
    "cost",
    "10 prompt tokens, 24 new ones. How many tokens went through the model?",
    ["34", "240", "516"],
)

# %% tags=["figure-cost"]
from tutorial_engine.viz.attention_plots import cost_picture

predictions.reveal("cost", str(sum(tokens_run)))
cost_picture(tokens_run, prompt_tokens=len(ids))

# %% [markdown]
# Almost all of it repeats work. Keys and values of earlier tokens never change: could we keep them?
#
# ### Exercise 4: what would keeping them cost? (3 minutes)
#
# <details><summary>Hint</summary>K and V, every layer, every <em>K/V</em> head, head_dim numbers of
# <code>itemsize</code> bytes.</details>


# %% tags=["exercise"]
def kv_bytes(config, itemsize):
    """Bytes of keys and values that one token leaves in all layers."""
    ### BEGIN SOLUTION
    per_layer = 2 * config.num_key_value_heads * config.head_dim * itemsize
    return config.num_hidden_layers * per_layer
    ### END SOLUTION


# %%
from tutorial_engine.learn.checks_01 import check_kv_bytes

check_kv_bytes(kv_bytes, qwen3_06b)

# %% [markdown]
# In bf16, 16 bits a number, 10,000 tokens of Qwen3-0.6B leave about as many bytes as its weights have.
# Keeping them is the subject of the next notebook.

# %%
print(
    10_000 * 2 * 28 * 8 * 128 * 2 // 10**6,
    "MB of K and V;",
    big.num_parameters() * 2 // 10**6,
    "MB of weights",
)

# %% [markdown]
# ## On a GPU
#
# The same code runs there: device and dtype are parameters.

# %% tags=["nbval-ignore-output"]
if torch.cuda.is_available():
    on_gpu = load_model(device="cuda", dtype=torch.bfloat16)
    on_gpu_logits = on_gpu.compute_logits(on_gpu(Batch.from_sequences([ids], device="cuda")))
    print("next token on", torch.cuda.get_device_name(), int(on_gpu_logits[-1].argmax()))
else:
    print(
        "No GPU here. With one, this cell would load the model there in bf16 and predict the same way."
    )

# %% [markdown]
# ## What you can do now
#
# Say what a query, a key and a mask are; where position enters; why one head copies; and what a token
# costs without a cache. Next, `02_kv_cache`: run each token once.

# %%
print(predictions.score())
