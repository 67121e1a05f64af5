# %% [markdown]
# # 01 · Attention and RoPE
#
# In this lesson you write six parts of a language model. As soon as a part is right, it runs inside a whole model. Then
# your six parts write a story, with the same tokens as `transformers`, the library of Hugging Face. A *jukebox* plays
# stories of six broken models, and you guess what is broken. Everything runs offline, on a small Qwen3 model that we
# trained for this course. In [notebook 06](06_real_model.ipynb) your parts run a real language model that answers
# questions.

# %% [markdown]
# | sitting | what it is about | time |
# |---|---|---|
# | sections 1 to 7 | queries, keys and values, attention, masks, heads | 1¾ hours |
# | sections 8 to 11 | positions, one whole layer, the whole model | 1¾ hours |
# | sections 12 to 14 | what the heads learned, your model | 1¼ hours, with the bonus 1¾ |
#
# If all this is new to you, plan 6 to 7 hours in all, without the bonus (exercise 9).

# %% [markdown]
# **How to use it.** Run cell after cell with Shift+Enter. At **Predict**, choose an answer before you run the next
# cell. An exercise says ☐ until you fill it in. Then its check says ✔, or ✘ with a reason. Read
# the exercises, what `show_source` prints, and the short cells that compute what the text above them says (like `rms_norm`). Cells that
# only draw you may just run. Are you stuck? Open the hint, then `notebooks/solutions`. You may also go on: the package's part
# runs in place of yours.

# %% [markdown]
# You should know matrix products and a little PyTorch: tensors, shapes, indexing. The model is stored as a *checkpoint*, a
# folder of trained weights, in the format of `transformers`. Its architecture is
# [Qwen3](https://arxiv.org/abs/2505.09388). *The package* is `tutorial_engine`, the Python code of this course. Its
# *engine* runs models to write text.

# %%
import torch

from tutorial_engine.learn import OwnEngine, Predictions, check_close, show_source, yours
from tutorial_engine.model import Batch, NaiveAttention, causal_mask, load_model, load_tokenizer
from tutorial_engine.model import naive_attention

torch.set_grad_enabled(False)  # we only run the model; we do not train it
predictions = Predictions("01")
model, tokenizer = load_model(), load_tokenizer()
c = model.config  # the numbers that fix every shape
print(f"{model.num_parameters():,} weights in {c.num_hidden_layers} layers")

# %% [markdown]
# ### First, what you will be able to show
#
# This story stops inside a name, after `R`. The name was Rado. Three small parts near the end of the model, the *heads* 3, 4
# and 5 of its last layer (layer 3: we count from 0), look for the name in the text. Now we run the same story with another name, keep what these three heads compute
# at the end of the text, and put it into the story of Rado. The model still reads Rado. Which name does it write?

# %% tags=["figure-other-name"]
from tutorial_engine.lab import patch_heads
from tutorial_engine.viz import patching_picture

STORY = "Once upon a time Rado had an old coat. One day R"
names = ("Rado", "Rido", "Redo")
stories = {name: STORY.replace("Rado", name) for name in names}
patches = patch_heads(model, tokenizer, STORY, stories, layer=3, heads=(3, 4, 5))
patching_picture(tokenizer, STORY, {"heads 3, 4 and 5 of layer 3": patches})

# %% [markdown]
# The model read Rado and began to write Rido. The heads brought only the piece `id`; the model wrote everything after
# it by itself. In section 12 you find these heads. First you build the model around them.

# %% [markdown]
# # First sitting: attention

# %% [markdown]
# ## 1 · Text becomes ids
#
# **Objective:** see what the model is given. A *prompt* is the text given to it. A *tokenizer* cuts text into pieces,
# the *tokens*. All tokens that it knows are its *vocabulary*; the number of a token in it is its *id*. A space usually
# belongs to the token after it, drawn as `·`.

# %%
PROMPT = "Once upon a time Anna had a red kite."

from tutorial_engine.viz import token_labels

ids = tokenizer.encode(PROMPT).ids
labels = token_labels(tokenizer, ids)
print(f"{len(ids)} tokens from a vocabulary of {c.vocab_size}:")
print(list(zip(ids, labels, strict=True)))

# %% [markdown]
# Each of the 256 possible bytes is a token, too. So every text can be written in tokens, also an emoji, and be turned
# back from them. A word that was rare when the vocabulary was made is cut into several tokens, like the name Rado.

# %%
for text in (PROMPT, "a naïve café 😀", "Once Rado had a red kite."):
    pieces = tokenizer.encode(text).ids
    print(tokenizer.decode(pieces) == text, token_labels(tokenizer, pieces))

# %% [markdown]
# ## 2 · Ids become vectors, and the map of the whole
#
# **Objective:** see where this lesson goes. The model has a table with one row of numbers for each token of the
# vocabulary. The row of a token is its *embedding*. The number of its entries (*dimensions*) is the *hidden size* of the
# model. An embedding does not say where the token stands in the text.

# %%
table = model.model.embed_tokens.weight
vectors = table[torch.tensor(ids)]
print("table", list(table.shape), "-> vectors", list(vectors.shape))
print("both '·a' have the same vector:", torch.equal(vectors[2], vectors[6]))

# %% [markdown]
# The map shows the way of these vectors through the model, from top to bottom. Each *decoder layer* adds to a vector
# twice: first what attention found in this token and those before it, then what a small network called MLP computed. In
# the end the vector becomes *logits*, one number for each token of the vocabulary. The larger the number, the likelier
# that token comes next. You need not know the words in the boxes yet; sections 3 to 10 explain them. We count from 0:
# layer 3 is the last of the four.

# %% tags=["figure-block"]
from tutorial_engine.viz import block_picture

block_picture(model)

# %% [markdown]
# A story comes out if we append the token with the largest logit, run the model again, and repeat this. `mine` is this
# model, cut into parts. Exercises 1 to 6 each replace one part by yours. `tell` writes with your parts and compares;
# `hear` tries one part; `story` returns the text.

# %%
mine = OwnEngine(model, tokenizer)
mine.tell(PROMPT)

# %% [markdown]
# ## 3 · From a vector to query, key and value
#
# **Objective:** compute q, k and v. Attention lets a token read from other tokens. For this, each token's
# vector is multiplied by three learned matrices. The *query* q says what the token looks for, the *key* k
# says which queries should find it, and the *value* v is what it passes on.
#
# The result is cut into *heads*. Each head runs its own attention. The number of dimensions that a query has in one
# head is the *head dimension* D (`head_dim` in the code).

# %%
from tutorial_engine.learn import LayerWeights

first_layer = model.model.layers[0]
w = LayerWeights.of(first_layer)  # the layer's matrices, by name
x = first_layer.input_layernorm(vectors)  # brings all vectors to a similar scale (section 9)
print("x  ", list(x.shape), f"  {len(ids)} tokens, hidden size {c.hidden_size}")
print("W_q", list(w.q.shape), f" {c.num_attention_heads} query heads of D = {c.head_dim}")
print("W_k", list(w.k.shape), f"  {c.num_key_value_heads} key heads;  W_v", list(w.v.shape))

# %% [markdown]
# PyTorch's linear layers store a matrix as [out, in], so the product is `x @ W.T`: each row of W gives one number.
# The picture shows this for one token in layer 0. (Section 6 says why there are fewer key and value heads.)

# %% tags=["figure-qkv"]
from tutorial_engine.viz import qkv_picture

qkv_picture(model, tokenizer, ids, token=labels.index("·Anna"))

# %% [markdown]
# ### Exercise 1: project to queries, keys and values (8 minutes)
#
# Multiply all tokens at once, then cut the last axis into heads. Their number follows from the shape of the matrix and
# `head_dim`. In shapes, T, H and H_kv are the numbers of tokens, query heads and K/V heads (key and value heads).
#
# If the check finds your function right, it becomes a part of the model. If not, it says what is wrong. It knows some usual
# mistakes, and tells you when one gives the same answers as yours. From your second wrong function on, it may show a piece of a
# right one, after *code:*. To read the story of a wrong function, run `mine.hear(PROMPT, project=project)`.
#
# <details><summary>Hint</summary>A matrix is stored as [out, in]: what has to be done with it before <code>@</code>?
# The method <code>unflatten(axis, sizes)</code> cuts one axis into several; one of the sizes may be −1, and is
# found by itself. Return the three as a tuple.</details>


# %% tags=["exercise"]
def project(x, w_q, w_k, w_v, head_dim):
    """x [T, hidden], w_q [H·D, hidden], w_k and w_v [H_kv·D, hidden]
    -> q [T, H, D], k [T, H_kv, D], v [T, H_kv, D]."""
    ### BEGIN SOLUTION
    q = (x @ w_q.T).unflatten(-1, (-1, head_dim))
    k = (x @ w_k.T).unflatten(-1, (-1, head_dim))
    v = (x @ w_v.T).unflatten(-1, (-1, head_dim))
    return q, k, v
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_project

mine.use(project, check_project)

# %% [markdown]
# After exercises 1 to 6 you read two stories. In the first this part has a usual mistake, in the second it is yours. Here
# the first `project` cuts the right axis, but deals its numbers out to the heads one by one, as cards: head 0 of q gets the numbers 0,
# 6, 12, … A head must be 32 numbers that lie side by side. All shapes are right, so no error is raised.

# %%
from tutorial_engine.learn import heads_crosswise

mine.hear(PROMPT, project=heads_crosswise)
mine.tell(PROMPT)

# %% [markdown]
# ## 4 · Attention by hand, three tokens
#
# **Objective:** compute attention for one query with pencil and paper, for three tokens with D = 2. A *score* is the dot
# product of a query with a key: how well the key fits what the query looks for.

# %%
q = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
k = torch.tensor([[1.0, -1.0], [0.0, 1.0], [1.0, 0.0]])
v = torch.tensor([[8.0, 0.0], [0.0, 8.0], [4.0, 4.0]])
scores = q @ k.T  # row = query, column = key
print("scores of the last query:", scores[2].int().tolist())

# %% [markdown]
# Three steps follow. Divide the scores by √D (section 7 says why). The *softmax* then turns them into *attention
# weights*: exp(score), divided by the sum of this over all keys. So they add up to one. The output is the sum of the
# values, each times its attention weight.
#
# We also say *share* for an attention weight, because the *weights* of a model are the learned numbers in its matrices.
# (At the end of the model a softmax turns the logits into *probabilities*.)

# %%
predictions.ask(
    "share",
    "The last query's scores are 0, 1 and 1 (and D = 2). Which attention weight (share) does the first key get?",
    ["0, because its score is 0", "about 20 %", "about 33 %"],
)

# %% tags=["figure-three-tokens"]
from math import exp, sqrt

from tutorial_engine.viz import three_token_picture

shares = [exp(score / sqrt(2)) for score in scores[2].tolist()]
shares = [share / sum(shares) for share in shares]
answered = predictions.reveal("share", f"about {100 * shares[0]:.0f} %")
three_token_picture(q, k, v) if answered else None

# %% [markdown]
# Now the whole sum, and the same from the package. max |Δ| is the largest difference. It must stay within the
# *tolerance*: computers round, so the last digits may differ.

# %%
by_hand = sum(share * value for share, value in zip(shares, v, strict=True))
result = naive_attention(q[:, None], k[:, None], v[:, None])  # None adds an axis: one head
by_package = result.out[2, 0]  # of the last query
check_close(by_hand, by_package, 1e-6, "by hand = package")

# %% [markdown]
# ### Exercise 2: attention for all queries at once (15 minutes)
#
# Not every query may see every key. A *mask* says which pairs are allowed (True). Section 5 builds it;
# here it is given. A forbidden key must get the attention weight 0, and the others must still add up to one.
#
# <details><summary>Hint</summary>The three steps are those of section 4, with a row of scores for each query. exp(−∞)
# is 0; in Python −∞ is <code>float("-inf")</code>. <code>masked_fill(m, number)</code> writes a number where m is True,
# and <code>~mask</code> turns True and False around. (<code>masked_fill</code> does not change its tensor: use what it
# returns.) A tensor has <code>.softmax(dim)</code>. Over which axis must the attention weights add up to one?</details>


# %% tags=["exercise"]
def attention(q, k, v, mask):
    """One head: q [q_len, D], k and v [kv_len, D], mask [q_len, kv_len] (True = may attend)
    -> [q_len, D]."""
    ### BEGIN SOLUTION
    scores = q @ k.T / k.shape[-1] ** 0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1) @ v
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_attention

mine.use(attention, check_attention)

# %%
from tutorial_engine.learn import softmax_over_queries

mine.hear(PROMPT + " Ben had a blue ball.", attention=softmax_over_queries)  # the wrong axis
mine.tell(PROMPT + " Ben had a blue ball.")

# %% [markdown]
# The package's version computes all heads in one call. It is called *naive*: the plain formula. `einsum` names the axes: `"qhd,khd->hqk"` means "for each head h, query q and key k, multiply along
# d and add". (`repeat_interleave` gives each query head its own copy of K and V: section 6.)

# %%
show_source(naive_attention)

# %% [markdown]
# **Why fast engines do not store all scores** (optional). This function stores a score for each pair of tokens, [T, T]
# in each head. [FlashAttention](https://arxiv.org/abs/2205.14135) (Dao et al., 2022) goes through the keys in blocks.
# So the T×T scores are never in memory all at once. The result differs by rounding only. In notebook 04 you write such an attention.
#
# <details><summary>What is kept from block to block?</summary>For each query three things: the largest score so far,
# the sum of the exponentials, and the sum of the values so far (each value weighted by its exponential). When a new
# block has a larger score, the two sums are rescaled.</details>

# %% tags=["figure-scores"]
from tutorial_engine.viz import scores_picture

scores_picture((1024, 2048, 4096, 8192), head_dim=128, itemsize=4)

# %% [markdown]
# ## 5 · The causal mask
#
# **Objective:** know who may look at whom. Here are the attention weights (shares) of the trained model. On the left, a
# row is a query and a column is a key; bright means a large weight. On the right are those of one query, and the tokens
# that the model predicts to come next. Step through the queries, and choose other heads: where do they look?

# %% tags=["figure-attention-explorer"]
from tutorial_engine.viz import AttentionExplorer

AttentionExplorer(model, tokenizer, STORY, layer=1, head=3)

# %% [markdown]
# No query sees a later token: the mask hides it. The reason is the training: at every token the model learns to predict
# the next one. Without the mask it could read the answer. This is the *causal* rule: `key_pos <= query_pos`.
#
# In the next notebook only the newest tokens run: the keys and values of the earlier ones are kept. Then there are fewer
# queries than keys. The queries are the *last* positions, and the rule stays the same.

# %%
predictions.ask(
    "pairs",
    "3 new tokens (queries) after 4 earlier ones, so 7 keys: how many of the 21 pairs are allowed?",
    ["6", "15", "18", "21"],
)

# %% tags=["figure-masks"]
from tutorial_engine.viz import mask_picture

sizes = {"4 tokens at once": (4, 4), "1 new after 4": (1, 5), "3 new after 4": (3, 7)}
masks = {title: causal_mask(q_len, kv_len) for title, (q_len, kv_len) in sizes.items()}
answered = predictions.reveal("pairs", int(masks["3 new after 4"].sum()))
mask_picture(masks) if answered else None

# %% [markdown]
# **A trap:** PyTorch's own attention function has an option `is_causal=True`. Its allowed pairs form a triangle from
# the upper left corner. With as many queries as keys that is right. With fewer queries than keys, the new tokens do not
# even see themselves.

# %%
from torch.nn.functional import scaled_dot_product_attention

draw = torch.Generator().manual_seed(0)
q3, k7, v7 = (torch.randn(n, 1, 8, generator=draw) for n in (3, 7, 7))  # one head
heads_first = [x.transpose(0, 1) for x in (q3, k7, v7)]
fused = scaled_dot_product_attention(*heads_first, is_causal=True).transpose(0, 1)
corners = {"lower right (ours)": causal_mask(3, 7), "upper left": torch.ones(3, 7).bool().tril()}
for corner, mask in corners.items():
    same = torch.allclose(naive_attention(q3, k7, v7, mask).out, fused, atol=1e-5)
    print(f"{corner:18} is_causal=True gives the same: {same}")

# %% [markdown]
# ### Exercise 3: a mask with a sliding window (12 minutes)
#
# In some layers of some models a token sees only itself and the `window - 1` tokens before it. If
# the window is as large as the text, this is the plain causal mask.
#
# <details><summary>Hint</summary><code>torch.arange(...)[:, None]</code> is a column, and <code>[None, :]</code> makes
# a row. A column minus a row has a number for each pair. At which position does the first query stand, if the
# last one stands at the end? Join two conditions with <code>&</code>, each in its own brackets.</details>


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
from tutorial_engine.learn import check_window_mask

mine.use(window_mask, check_window_mask)

# %%
from tutorial_engine.learn import blind_to_itself

TWO = "Once upon a time Rado had an old coat. Mimo had a new drum."
mine.hear(TWO, window_mask=blind_to_itself)  # `<`, not `<=`: no token but the first sees itself
mine.tell(TWO)

# %% [markdown]
# Up to now the engine has called your mask with a window as large as the text. Now we set the window to 8: in each layer a
# token sees only itself and the 7 tokens before it. (Through four layers, something can still come from up to 28 tokens back.)

# %%
predictions.ask(
    "window",
    "Same prompt, window 8. The story goes on ...",
    ["with Rado and Mimo", "in good sentences, but with other names", "as noise"],
)

# %% tags=["figure-window"]
from tutorial_engine.viz import reach_picture

told = mine.story(TWO, window=8)
pieces = token_labels(tokenizer, tokenizer.encode(TWO + told).ids)
day, last = pieces.index("·day"), pieces.index("·and")
looks = [(day, pieces.index("·R")), (last, pieces.index("·Mi"))]
answered = predictions.reveal("window", 0 if "Rado" in told or "Mimo" in told else 1)
if answered:
    print(TWO + told)
reach_picture(pieces[: last + 1], looks, window=8) if answered else None

# %% [markdown]
# The sentences of this story are still well formed. But the names are lost. Look at the picture: `·day` stands just before
# the first name of the new sentence. To write the R of Rado there, `·day` must see the first `·R` *directly*, and that
# takes a window of 20. For Mimo, `·and` must see `·Mi`: a window of 15. With a smaller window the name could come in
# several steps, from layer to layer, but in this model it does not come that way. (Raba and Ralo begin with R by chance: they
# come with other names in the prompt, too.) Try it:

# %%
for window in (8, 14, 15, 19, 20):
    print(f"window {window:2}: {mine.story(TWO, window=window)}")

# %% [markdown]
# ## 6 · Many heads, fewer keys: GQA
#
# **Objective:** find the K/V head of a query head. In *grouped-query attention* (GQA) neighbouring query heads form a
# *group*. A group shares one *K/V head*: one key and one value for each token. That saves memory, because keys and
# values are kept for later tokens. Here query heads 0, 1 and 2 read K/V head 0, the others K/V head 1.
#
# The results of all heads are concatenated. A fourth learned matrix, W_o, mixes these H·D numbers, and gives a vector
# of the hidden size.

# %% [markdown]
# ### Exercise 4: which K/V head? (3 minutes)
#
# Write it for any model. All groups are equally large.
#
# <details><summary>Hint</summary>First compute how many query heads are in a group. The operator
# <code>//</code> divides and rounds down: <code>5 // 3</code> is 1.</details>


# %% tags=["exercise"]
def kv_head(h, num_heads, num_kv_heads):
    """The number of the K/V head that query head h reads."""
    ### BEGIN SOLUTION
    group = num_heads // num_kv_heads
    return h // group
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_kv_head

mine.use(kv_head, check_kv_head)

# %% [markdown]
# A usual mistake is `h % num_kv_heads`, the remainder. It gives a valid number for every head, so no error is raised.


# %%
def kv_head_by_remainder(h, num_heads, num_kv_heads):
    return h % num_kv_heads


GROUPS = "Once upon a time Ben had a blue ball. Anna had a red kite. One day"
mine.hear(GROUPS, kv_head=kv_head_by_remainder)
mine.tell(GROUPS)

# %% tags=["figure-gqa"]
from tutorial_engine.viz import gqa_picture

gqa_picture(c)

# %% [markdown]
# Inside `mine`, this function runs attention for one text in one layer, with your parts. `self.parts("attention", ...)` calls your `attention`
# if it was right, and the package's otherwise.

# %%
from tutorial_engine.learn import OwnAttention

show_source(OwnAttention.one_sequence)

# %% [markdown]
# ## 7 · Why divide by √D?
#
# **Objective:** measure it. Take random queries and keys whose numbers have variance 1, and look at the variance of
# their scores. (*Variance*: the mean of the squared distances from the mean. *Standard deviation*: its square root.)

# %%
predictions.ask(
    "variance",
    "The head dimension D grows 16 times. The variance of q · k grows ...",
    ["4 times", "16 times", "256 times"],
)

# %%
head_dims, variances = [4, 16, 64, 256], {}
for d in head_dims:
    a, b = torch.randn(2, 20_000, d, generator=torch.Generator().manual_seed(d))
    dots = (a * b).sum(-1)
    variances[d] = float(dots.var()), float((dots / d**0.5).var())
if predictions.reveal("variance", f"{round(variances[256][0] / variances[16][0])} times"):
    for d, (raw, scaled) in variances.items():
        print(f"D = {d:3}: variance of the scores {raw:5.1f}; divided by √D {scaled:.2f}")

# %% [markdown]
# Each number of q and of k has mean 0 and variance 1, and all are independent. Then the product of two of them has
# variance 1, too. A score is the sum of D such products, and variances of independent numbers add up. So its variance is
# D, its standard deviation √D, and a division by √D makes it 1.

# %% [markdown]
# Why does it matter? The softmax of large scores gives nearly everything to one key. When training begins, this is an
# arbitrary key, because all weights are random. Training cannot easily correct it: where one attention weight is near
# 1, almost no gradient (by which training changes the model) reaches the scores. Here are 1,000 queries with 8 keys each:

# %%
for d in head_dims:
    vectors_d = torch.randn(1000, 9, d, generator=torch.Generator().manual_seed(d))
    dots = (vectors_d[:, :1] * vectors_d[:, 1:]).sum(-1)  # the first is the query
    of_raw, of_scaled = (s.softmax(-1).amax(-1).mean() for s in (dots, dots / d**0.5))
    print(f"D = {d:3}: the largest share is {of_raw:.2f} on average; divided by √D {of_scaled:.2f}")

# %% [markdown]
# ---
#
# **The first sitting ends here.** Two things about the attention of this model are missing: how it sees the order of the
# tokens (section 8), and a norm of queries and keys (section 9).
#
# ---

# %% [markdown]
# # Second sitting: positions, and the whole model
#
# If you begin here after a restart of the notebook, run all cells above first (menu Run, "Run All Above
# Selected Cell"): it takes less than a minute. Your exercises run in the model again, and your predictions are kept.

# %% [markdown]
# ## 8 · RoPE: position as rotation
#
# **Objective:** give attention a sense of order. Without positions, a query that sees all keys cannot know their order:
# shuffle the keys together with their values, and it gets the same output. (This is one layer. In a deep model, the causal mask alone
# tells later layers something about the order.)

# %%
shuffle = torch.tensor([3, 0, 4, 1, 2])
q6, k2, v2 = (torch.randn(5, heads, 8, generator=draw) for heads in (6, 2, 2))
in_order = naive_attention(q6[-1:], k2, v2).out  # [-1:]: the last query only
shuffled = naive_attention(q6[-1:], k2[shuffle], v2[shuffle]).out
check_close(shuffled, in_order, 1e-6, "keys and values shuffled = in order")

# %% [markdown]
# *Rotary position embedding* (RoPE) takes the D numbers of a query or key as D/2 pairs. A pair is a point in the
# plane, like the hand of a clock. RoPE turns pair *i* by the angle `position · ω_i` (ω is omega), where
#
# **ω_i = θ^(−2i/D)**, in radians per position (a full turn is 2π radians).
#
# θ (theta) is a number from the model's configuration. Pair 0 turns by one radian per position, and each
# next pair turns more slowly.

# %%
from tutorial_engine.model import RotaryEmbedding, apply_rope, inverse_frequencies

D, theta = c.head_dim, c.rope_theta
omega = torch.tensor([theta ** (-2 * i / D) for i in range(D // 2)])
print(f"D = {D}, theta = {theta:g}:", len(omega), "pairs; of every fourth pair ω_i =")
print([round(float(one), 5) for one in omega[::4]])
check_close(omega, inverse_frequencies(D, theta), 1e-6, "the formula = package")

# %% [markdown]
# The query stands at position *m*, the key at position *n*. Here they are the same vector, and each of its pairs is a
# hand of length 1. So each pair adds a cosine to the score: that of the angle between its two hands, (m − n) · ω_i. Move
# the positions, then press Play: query and key move on together. What changes, and what stays the same?

# %% tags=["figure-rope-explorer"]
from tutorial_engine.viz import RopeExplorer

RopeExplorer(D, theta)

# %% [markdown]
# Both hands turn; the angle between them and the score stay. Why so many speeds? A fast pair tells neighbours apart,
# but soon it shows nearly the same again. A slow pair hardly moves between neighbours, but it tells far positions
# apart.

# %% tags=["figure-rope-clocks"]
from tutorial_engine.viz import clocks_picture

clocks_picture(omega, (0, 1, 2, 4, 10, 100, 1000))

# %% [markdown]
# **Texts longer than in training** (optional, with the two cells below). The slow pairs do not complete a turn in
# a training text. In a longer text they come to angles that the model has not seen. Llama 3.1 slows these pairs down (*RoPE
# scaling*), and was trained further on [long texts](https://arxiv.org/abs/2407.21783). Its context, the
# longest text that it can read, grew 16 times, from 8,192 tokens to 131,072.
#
# <details><summary>How are they slowed down?</summary>Four numbers in its <code>config.json</code> say how:
# <code>factor</code> 8, <code>low_freq_factor</code> 1, <code>high_freq_factor</code> 4 and
# <code>original_max_position_embeddings</code> 8192. A pair that turns at least 4 times in 8,192 positions stays as it
# is, so neighbours are still told apart. A pair that turns at most once turns 8 times slower. Between them the speeds
# are mixed. (8 is less than 16: at the end of the longer context a slow pair still comes to twice the angle that it knew. The
# further training must do the rest.)</details>

# %%
from tutorial_engine.model import RopeScaling, scaled_frequencies

show_source(scaled_frequencies)

# %% tags=["figure-rope-scaling"]
from tutorial_engine.viz import rope_scaling_picture

llama_31 = RopeScaling(8.0, 1.0, 4.0, 8192)  # the four numbers, in this order
plain = inverse_frequencies(128, 500_000.0)  # head dimension and theta of Llama 3.1 8B
rope_scaling_picture(plain, scaled_frequencies(plain, llama_31), llama_31)

# %% [markdown]
# Which two numbers are a pair? In Qwen3 checkpoints number *i* is joined with number *i + D/2* (*half-split*; vLLM says
# `is_neox_style`, llama.cpp NEOX). Other checkpoints, such as those of GPT-J, join neighbours (*interleaved*). The weights
# were trained for one of them. For a head with D = 8:

# %%
numbers = torch.arange(8)
first, second = numbers.chunk(2)
print("half-split pairs ", list(zip(first.tolist(), second.tolist(), strict=True)))
print("interleaved pairs", [tuple(pair) for pair in numbers.view(4, 2).tolist()])

# %% [markdown]
# ### Exercise 5: turn the pairs (15 minutes)
#
# A pair (a, b) that is turned by the angle φ (phi) becomes (a cos φ − b sin φ, b cos φ + a sin φ). For example, (1, 0)
# turned by 1 radian is (0.54, 0.84). Use half-split
# pairs.
#
# <details><summary>Hint</summary><code>chunk</code> cuts an axis into equal parts (all a, all b), and
# <code>torch.cat</code> joins them again; both take <code>dim=-1</code> for the last axis. x has an axis for the
# heads, and the angles have none: <code>None</code> in an index adds one. A tensor has <code>.cos()</code> and
# <code>.sin()</code>.</details>


# %% tags=["exercise"]
def rope(x, angles):
    """x [T, heads, D], angles [T, D / 2] in radians -> x turned, half-split pairs."""
    ### BEGIN SOLUTION
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_rope

mine.use(rope, check_rope)

# %%
from tutorial_engine.learn import turn_neighbours

FOUND = "One day Anna found a red kite near the river. Ben found"
mine.hear(FOUND, rope=turn_neighbours)  # interleaved pairs: good sentences, but Anna is lost
mine.tell(FOUND)

# %% [markdown]
# This is the package's version. It gets the cosines and sines, because all layers share them. `addcmul(a, b, c, value=-1)`
# is `a - b * c`.

# %%
show_source(apply_rope)

# %% [markdown]
# ### Only the distance counts
#
# For the same q and k, only the difference m − n of the two positions counts in a score. Here is the proof for one
# pair. R_m is the matrix that turns the pair by the angle of position *m*. In a dot product a matrix can move to the other
# vector if it is transposed. The transpose R_mᵀ turns back by the same angle. So R_mᵀ R_n is one turn, by the angle of n
# − m:
#
# (R_m q) · (R_n k) = q · (R_mᵀ R_n k) = q · (R_(n−m) k)

# %% [markdown]
# The same holds for the whole model. A `Batch` holds the tokens that run together, and their positions. We add 100 to
# every position.


# %%
def logits_of(batch, attention=None):
    return model.compute_logits(model(batch, attention))


here = logits_of(Batch.from_sequences([ids]))
there = logits_of(Batch.from_sequences([ids], first_positions=[100]))
check_close(here, there, 1e-3, "positions from 0 = positions from 100")

# %% [markdown]
# Layer 1, head 3 of section 5 mostly looks one token back. Here is its map at the positions of the text, at positions
# that are 400 larger (in training it never saw one above 127), and with all tokens at position 0. There RoPE turns nothing, in any layer: it is off.

# %%
predictions.ask(
    "rope-off",
    "RoPE is off. Then this head looks ...",
    ["one token back, as before", "at the token itself", "at many tokens"],
)

# %% tags=["figure-rope-maps"]
from tutorial_engine.viz import attention_weights, rope_maps_picture

story_ids = tokenizer.encode(STORY).ids
story_labels = token_labels(tokenizer, story_ids)
n = len(story_ids)
places = {"positions 0, 1, 2 …": range(n), "positions 400, 401 …": range(400, 400 + n)}
places["RoPE off"] = [0] * n
maps = {title: attention_weights(model, story_ids, at)[1, 3] for title, at in places.items()}
back, itself = (float(maps["RoPE off"].diagonal(-i).mean()) for i in (1, 0))
answered = predictions.reveal("rope-off", 0 if back > 0.5 else 1 if itself > 0.5 else 2)
rope_maps_picture(maps, story_labels, "Layer 1, head 3") if answered else None

# %% [markdown]
# With larger positions the map is the same, because all distances are. Without RoPE this head cannot find the token
# before: that token gets 0.15 on average, as much as if every query gave all its keys the same
# attention weight.

# %% [markdown]
# ## 9 · One whole layer by hand
#
# **Objective:** put the pieces together. Each token has one vector that goes through all layers. A layer reads a
# normalised copy of it, computes something, and *adds* the result to the vector. This running sum is called the
# *residual stream*: the green line in the map of section 2.

# %% [markdown]
# **RMSNorm** makes the normalised copy. It divides a vector by the root of the mean of its squares, and
# multiplies each dimension by a learned weight. A tiny ε keeps it from dividing by zero.


# %%
def rms_norm(x, weight, eps=c.rms_norm_eps):
    """x / sqrt(mean(x²) + eps) · weight, over the last axis."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


normed = rms_norm(vectors, w.input_norm)  # w and first_layer: section 3
check_close(normed, first_layer.input_layernorm(vectors), 1e-5, "RMSNorm in one line = package")

# %% [markdown]
# ### Norm first, then RoPE
#
# Qwen3 also puts each query and key through an RMSNorm before RoPE turns them. Before the norm multiplies by its
# weights, the mean square of each query is 1. (Section 7 assumed this.) `q_norm` has a different weight for each
# dimension, and RoPE mixes two dimensions. So the order matters.

# %%
rotary = RotaryEmbedding(D, theta)
random_heads = torch.randn(4, c.num_attention_heads, D, generator=draw)
cos_sin = rotary(torch.arange(4))  # of the angles of positions 0 to 3
norm_first = apply_rope(rms_norm(random_heads, w.q_norm), *cos_sin)
norm_last = rms_norm(apply_rope(random_heads, *cos_sin), w.q_norm)
for position in (0, 3):
    equal = torch.allclose(norm_first[position], norm_last[position], atol=1e-5)
    print(f"position {position}: norm before RoPE = norm after RoPE?", equal)

# %% [markdown]
# ### The MLP
#
# **SwiGLU** is the MLP of a layer, the part that works on each token alone. Two matrices each widen the vector. One
# result, the *gate*, goes through SiLU, x · sigmoid(x), and is multiplied number by number with the other, *up*.
# (sigmoid(x) = 1 / (1 + exp(−x)).) A third matrix, *down*, brings it back to the hidden size.

# %%
from torch.nn.functional import silu

swiglu = (silu(normed @ w.gate.T) * (normed @ w.up.T)) @ w.down.T
print(list(normed.shape), "->", [len(normed), len(w.gate)], "->", list(swiglu.shape))
check_close(swiglu, first_layer.mlp(normed), 1e-4, "SwiGLU in one line = package")

# %% [markdown]
# ### Exercise 6: one decoder layer (30 minutes)
#
# `w` holds the layer's own matrices: `input_norm`, `q`, `k`, `v`, `q_norm`, `k_norm`, `o`, `mlp_norm`, `gate`, `up`,
# `down`. Call `rms_norm` and your own `project` and `rope`. `attend(q, k, v)` is given: it runs your `attention` for all
# heads, with your `kv_head` and the mask. The map of section 2 shows these steps:
#
# 1. Normalise `x` with `input_norm`, and project it to q, k, v.
# 2. Normalise q and k (`q_norm`, `k_norm`), and turn them.
# 3. Attend, join the heads, multiply by `o`, and **add** to `x`.
# 4. Normalise the new `x` with `mlp_norm`, compute SwiGLU, and **add**.
#
# <details><summary>Hint</summary>The head dimension is <code>len(w.q_norm)</code>. The result of <code>attend(q, k,
# v)</code> is [T, H, D]; <code>.flatten(1)</code> joins the heads. SwiGLU is one line of section 9; <code>silu</code>
# is imported there.</details>


# %% tags=["exercise"]
def layer(x, w, angles, attend):
    """x [T, hidden], w LayerWeights, angles [T, D / 2], attend(q, k, v) -> [T, H, D]; -> [T, hidden]."""
    ### BEGIN SOLUTION
    q, k, v = project(rms_norm(x, w.input_norm), w.q, w.k, w.v, len(w.q_norm))
    q = rope(rms_norm(q, w.q_norm), angles)
    k = rope(rms_norm(k, w.k_norm), angles)
    x = x + attend(q, k, v).flatten(1) @ w.o.T
    h = rms_norm(x, w.mlp_norm)
    return x + (silu(h @ w.gate.T) * (h @ w.up.T)) @ w.down.T
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_layer

mine.use(layer, check_layer)

# %%
from tutorial_engine.learn import without_residual

FRIEND = "Anna had a red kite. Ben was a friend of Anna and"
mine.hear(FRIEND, layer=without_residual)  # a layer that replaces x and does not add to it
mine.tell(FRIEND)

# %% [markdown]
# ### The stream after each layer
#
# The residual stream can be read after any layer: turn the last token's vector into logits, as if the model ended there.
# This is called a *logit lens*. The story ends with the first piece of a name, and the model must find the next piece.

# %%
from tutorial_engine.lab import residual_stream


def read_out(when, stream):
    logits = model.compute_logits(model.model.norm(stream[-1:]))[0]
    best = logits.softmax(-1).topk(3)
    pieces = zip(token_labels(tokenizer, best.indices.tolist()), best.values, strict=True)
    print(f"{when:14}", "   ".join(f"“{piece}” {float(p):.2f}" for piece, p in pieces))


print("What comes after", story_labels[-3:], "?")
for when, stream in residual_stream(model, story_ids):
    read_out(when, stream)

# %% [markdown]
# At the start the vector says only which token it is: the logits come from the embedding table itself in this model, and
# the vector of `·R` fits `·R` best. Then the model has vague guesses. The last layer adds the answer.
#
# *A good place for a pause.*

# %% [markdown]
# ## 10 · The whole forward pass, shape by shape
#
# **Objective:** follow 10 tokens from ids to logits, in the real **Qwen3-0.6B**. Its `config.json` has the sizes.
# On PyTorch's *meta* device tensors have shapes but no numbers, so nothing is downloaded. The tokens lie one after
# the other, `[T, ...]`. There is no axis for a batch of texts.

# %%
from tutorial_engine.model import ModelConfig

QWEN3_06B = {
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
qwen3_06b = ModelConfig.from_dict(QWEN3_06B)

# %%
predictions.ask(
    "most",
    "Which part of Qwen3-0.6B has more weights: its embedding table, or one whole layer?",
    ["the embedding table", "one layer", "they are about equal"],
)

# %%
from tutorial_engine.viz import meta_shape_walk, walk_table

walk = meta_shape_walk(qwen3_06b, num_tokens=10)
held = {step.name: step.num_parameters for step in walk}
one_layer = sum(count for name, count in held.items() if name.startswith(" "))
ratio = held["embed_tokens"] / one_layer
if predictions.reveal("most", 0 if ratio > 1.2 else 1 if ratio < 0.8 else 2):
    print(walk_table(walk))
    print(f"The table has as many weights as {ratio:.1f} layers.")

# %% [markdown]
# The indented lines are the first layer; the others have the same shapes. `qkv_proj` is W_q, W_k and W_v in one matrix
# (2048 + 1024 + 1024 = 4096 rows), `gate_up_proj` is gate and up in one, as in vLLM. (The checkpoint and `transformers` keep them
# apart.) `post_attention_layernorm` is your `mlp_norm`.
# `lm_head`, the embedding table again, gives the logits. It gets one row: only the last token's logits choose the next.

# %%
from tutorial_engine.model import CausalLM

with torch.device("meta"):
    big = CausalLM(qwen3_06b)
w_o = big.model.layers[0].self_attn.o_proj.weight
print(f"{big.num_parameters():,} weights; all heads together: {w_o.shape[1]} numbers;")
print(f"so H·D need not equal the hidden size: W_o is {w_o.shape[0]} x {w_o.shape[1]} here")

# %% [markdown]
# ## 11 · The same logits as transformers
#
# **Objective:** test that our model computes the same logits as `transformers`. Both read the same checkpoint; each has code of
# its own. We compare every logit at every position: first with PyTorch's own attention function, which the package normally uses,
# then with the naive attention of section 4.

# %%
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tutorial_engine.model import TINY

logging.disable_progress_bar()
theirs = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
reference = theirs(torch.tensor([ids])).logits[0]
check_close(
    logits_of(Batch.from_sequences([ids])), reference, 1e-4, "PyTorch's attention = transformers"
)

# %%
naive = logits_of(Batch.from_sequences([ids]), NaiveAttention())
check_close(naive, reference, 1e-4, "naive attention = transformers")

# %% [markdown]
# ### The jukebox
#
# Why is it not enough to read a story? The first story is unbroken. In each of the stories A to F
# one part is broken, by one line of code. Which part is it?

# %%
from tutorial_engine.learn import jukebox_table, play

takes = play(mine, PROMPT)
print(f"unbroken …{mine.story(PROMPT)}")
for letter, take in zip("ABCDEF", takes, strict=True):
    print(f"{letter}        …{take.story}")

# %% [markdown]
# Run the next cell to see the six parts. Then write your guess and run it again.

# %%
parts = ["no RoPE", "K and V exchanged", "a token sees only itself", "all shares equal"]
parts += ["scores not divided by √D", "no mask"]
guess = "......"  # your guess: one digit for each story from A to F, such as "123456"
print("\n".join(f"{number} {part}" for number, part in enumerate(parts, start=1)))

# %%
predictions.ask("jukebox", "One story reads well. Which part is broken in it?", parts)

# %%
if predictions.reveal("jukebox", min(takes, key=lambda take: take.last).part):
    print(jukebox_table(takes, parts, guess))

# %% [markdown]
# With this prompt, five stories show that something is wrong. In A the model sees only the last token. B's softmax is too
# sharp. D mixes up the pieces of a name. E mixes keys where values belong. In F a token reads the mean of all values up to
# its own.

# %% [markdown]
# But C, without the mask, reads well. The table compares the logits of the prompt. The last token has no later token,
# so the mask hides nothing from it. Only the changed vectors of the other tokens reach it: with this prompt, its logits
# change by 0.1. The logits of the earlier tokens are far off, because these tokens read later ones, from layer 0 on. So a
# good story does not show that there is no bug, and another prompt may hide another bug.

# %% [markdown]
# If you compare C with the unbroken story, you see that something is wrong. The logits tell you more: at which tokens, and by
# how much. They also show a bug that is too small to change a token.

# %% [markdown]
# ---
#
# **The second sitting ends here.** You know the whole model, and its logits are those of `transformers`.
#
# ---

# %% [markdown]
# # Third sitting: what the heads learned
#
# After a restart of the notebook, run all cells above first (menu Run, "Run All Above Selected Cell").

# %% [markdown]
# ## 12 · What the heads learned
#
# **Objective:** find the heads that decide a prediction, and test what they carry. After `·R` the last layer adds the
# answer, `a`. Where do its heads look from this last token?

# %%
story_shares = attention_weights(model, story_ids)  # [layer, head, query, key]
for head, row in enumerate(story_shares[3, :, -1]):
    at, shared = int(row.argmax()), head // c.group_size
    print(
        f"head {head} (K/V head {shared}): gives {float(row[at]):.2f} to {at} “{story_labels[at]}”"
    )

# %% [markdown]
# Heads 3, 4 and 5 look at the token after the earlier `·R`. Such a head is called an *induction head*: it finds an
# earlier place of the same token, and suggests the token that came next there. The three share one K/V head. (`a` is a
# piece of a name; `·a` is the word "a".)

# %% [markdown]
# A map shows where a head looks, not that this decides anything. For that we take the head away: an *ablation* sets its
# output to zero. To compare, we also need a story without an earlier name that begins with R: there Mimo has the coat.


# %%
class Silenced(NaiveAttention):
    """Attention in which some heads add nothing: {layer: heads}."""

    def __init__(self, heads):
        super().__init__()
        self.heads = heads

    def attend(self, layer, q, k, v, batch):
        out = super().attend(layer, q, k, v, batch)
        out[:, list(self.heads.get(layer, []))] = 0
        return out


def chance(text, piece, heads):
    """The probability that `piece` follows the text, with some heads silenced."""
    logits = logits_of(Batch.from_sequences([tokenizer.encode(text).ids]), Silenced(heads))
    return float(logits[-1].softmax(-1)[tokenizer.token_to_id(piece)])


# %%
MIMO = "Once upon a time Mimo had an old coat. One day R"  # no earlier name with R
bars = [("all heads", chance(STORY, "a", {}))]
bars += [("all heads, but Mimo for Rado", chance(MIMO, "a", {}))]
print("“a” after the last “·R”:", ", ".join(f"{value:.0%} ({name})" for name, value in bars))

# %%
from tutorial_engine.viz import ablation_picture, percent

full, usual = (percent(value) for _, value in bars)
predictions.ask(
    "ablation",
    "Heads 3, 4 and 5 of layer 3 are silenced, in the story with Rado. The probability of “a” is then ...",
    [f"{full}, as before", f"near {usual}, as with Mimo", percent(0)],
)

# %% tags=["figure-ablation"]
COPIERS = {3: (3, 4, 5)}
silenced = chance(STORY, "a", COPIERS)
nearest = min((0, 1), key=lambda i: abs(bars[i][1] - silenced)) if silenced > 0.02 else 2
answered = predictions.reveal("ablation", nearest)
control = chance(STORY, "a", {3: (0, 1, 2)})
rows = [("L3 H3, H4, H5 silenced", silenced), ("L3 H0, H1, H2 silenced", control)]
one_each = [percent(chance(STORY, "a", {3: (head,)})) for head in (3, 4, 5)]
print("only one of H3, H4, H5 silenced:", ", ".join(one_each)) if answered else None
title = "probability of “a” after the last “·R”"
ablation_picture(title, [bars[0], *rows, bars[1]]) if answered else None

# %% [markdown]
# (L3 H3 is layer 3, head 3.) Without heads 3, 4 and 5 the probability of `a` falls to 24 %, nearly that of the story without Rado.
# It is not 0, because `a` is a common piece. With only one of the three silenced it is still 82 % or more. Without heads 0, 1
# and 2, the *control*, it hardly changes. So the model needs this group of heads. Do they also carry the name? If they do, their output from
# *another* story must bring another name. This is *activation patching*, the first picture of the lesson. Here is the
# code, then four names, and heads 0, 1 and 2 as the control.

# %%
from tutorial_engine.lab import Patched

show_source(Patched)

# %% tags=["figure-patching"]
names = ("Rado", "Rido", "Rodo", "Rizo")
stories = {name: STORY.replace("Rado", name) for name in names}
exchanged = {
    who: patch_heads(model, tokenizer, STORY, stories, layer=3, heads=heads)
    for who, heads in (("L3 H3, H4, H5", (3, 4, 5)), ("L3 H0, H1, H2", (0, 1, 2)))
}
patching_picture(tokenizer, STORY, exchanged)

# %% [markdown]
# With heads 3, 4 and 5 exchanged the model predicts a piece of the name on the left; with heads 0, 1 and 2 exchanged it still
# predicts `a`. So heads 3, 4 and 5 carry this piece.
#
# Four names are few. Now we take all 40 names made of R, a vowel, one of b d f k l m n z, and o. We ask two questions for each name. Does the
# model predict its piece in its own story? And do the heads, put into the story of Rado, bring what it predicts there? (In the row
# Ra, six of the eight names have the piece `a`, as Rado has. They test nothing.)


# %%
def likeliest(text):
    """The piece that the model predicts after a text."""
    logits = logits_of(Batch.from_sequences([tokenizer.encode(text).ids]))
    return tokenizer.decode([int(logits[-1].argmax())])


for vowel in "aeiou":
    names = [f"R{vowel}{letter}o" for letter in "bdfklmnz"]
    stories = {name: STORY.replace("Rado", name) for name in names}
    brought = patch_heads(model, tokenizer, STORY, stories, layer=3, heads=(3, 4, 5))
    pieces = [tokenizer.decode([tokenizer.encode(" " + name).ids[1]]) for name in names]
    there = [likeliest(stories[name]) for name in names]
    copied = sum(a == b for a, b in zip(there, pieces, strict=True))
    same = sum(patch.piece == piece for patch, piece in zip(brought, there, strict=True))
    print(f"R{vowel}…o: predicted in its own story {copied} of 8, brought from there {same} of 8")

# %% [markdown]
# With a, e, i and o the model copies the name, and the heads bring its piece. With u the model does not copy the name even in
# its own story. The made-up names of its training have no syllable `ru` (and Ruby is one token); this may be the reason. The model predicts other pieces
# there, and the heads bring them, too: “om” for Rulo, “is” for Rubo. (For the other six it is `a`, which tests nothing.)

# %% [markdown]
# ### Copying in its purest form
#
# Take 16 random tokens and say them twice. In the second round only copying can help. The *hits* are the tokens of the
# second round that the model predicts. We do not count the first
# token of the second round: nothing before it says that this round begins.

# %%
import random

from tutorial_engine.tiny import induction_scores, repeated_random_ids

period, rng = 16, random.Random(5)
noise = [repeated_random_ids(rng, c.vocab_size, period, 2 * period) for _ in range(20)]


def predicted(heads):
    """Which tokens of the second rounds are predicted, with some heads silenced."""
    logits = logits_of(Batch.from_sequences(noise), Silenced(heads)).view(20, 2 * period, -1)
    return logits[:, period - 1 : -1].argmax(-1) == torch.tensor(noise)[:, period:]


# %%
full = predicted({})[:, 1:]  # without the first token of the second round


def hits(heads):
    """How many of those that the whole model predicts are predicted without these heads."""
    return int((predicted(heads)[:, 1:] & full).sum())


right, total = hits({}), len(noise) * (period - 1)
print(f"{right} of {total} tokens in {len(noise)} such texts are predicted")

# %% [markdown]
# (Our model was also trained on such texts: about one training row in five was random tokens, said again. Models that
# were trained on ordinary text alone learn to copy, too: [Olsson et al., 2022](https://arxiv.org/abs/2209.11895).)

# %% [markdown]
# ### Exercise 7: the induction score (5 minutes)
#
# Which heads copy like this? The *induction score* of a head is the mean attention weight that the queries of the second round
# give to the right place: the token *after* the earlier place of the same token. (In x y z x y z the second x, at position 3, should
# look at position 1: the y after the first x.) `shares` holds the attention weights of
# one head for `period` tokens that are said twice; row = query, column = key. All `period` queries of the second round count, also the first one.
#
# <details><summary>Hint</summary>At which positions do the queries of the second round stand? Where did the same token
# stand, and where the token after it? With two tensors of positions, <code>shares[queries, keys]</code> picks one
# share for each query.</details>


# %% tags=["exercise"]
def induction_score(shares, period):
    """shares [2·period, 2·period] of one head -> the mean share that goes to the right place."""
    ### BEGIN SOLUTION
    queries = torch.arange(period, 2 * period)
    return shares[queries, queries - period + 1].mean()
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_induction_score

check_induction_score(induction_score)

# %% [markdown]
# Here are the scores of all heads, as means over several longer texts, and the map of the best one on one of our texts.

# %% tags=["figure-heads"]
from tutorial_engine.viz import heads_picture

noise_shares = attention_weights(model, noise[0])
heads_picture(noise_shares, induction_scores(model))

# %% [markdown]
# In our model an induction head does not work alone. After `R a d o … R` it looks for a token that has an `R` before
# it: the `a`. But the embedding of `a` does not say which token stands before. A head in an earlier layer copies this
# into the vector of `a`. It is called a *previous-token head*. Which heads look back by one token, by two, or at the
# token itself?

# %%
import itertools

from tutorial_engine.tiny import score_of_heads

# of one text; the picture has a mean over longer texts
l3_h3 = float(score_of_heads(noise_shares, period)[3, 3])
yours(induction_score, l3_h3, noise_shares[3, 3], period)
induction = induction_scores(model)
print("look at what followed:", [f"L{i} H{j}" for i, j in (induction > 0.4).nonzero().tolist()])
for back in (0, 1, 2):
    mean = noise_shares.diagonal(offset=-back, dim1=-2, dim2=-1).mean(-1)  # [layers, heads]
    found = [f"L{i} H{j} ({float(mean[i, j]):.2f})" for i, j in (mean > 0.5).nonzero().tolist()]
    print(f"look {back} back:         ", found)
least = min(hits({1: pair}) for pair in itertools.combinations((0, 1, 2, 4), 2))
alone = [hits({0: (head,)}) for head in range(6)]
print(f"hits left of {right}, without:")
print(
    f"  L1 H3 and H5: {hits({1: (3, 5)})}; the worst two of the other four heads of layer 1: {least}"
)
print(f"  L0 H4: {alone.pop(4)}; the worst one of the others in layer 0: {min(alone)}")

# %% [markdown]
# The other four heads of layer 1 are the control: without two of them most hits are left. Without H3 and H5 together
# copying stops. So copying takes two steps. The picture shows both in our story. At the bottom, the heads of step 1 are silenced
# for one token only, the `a`. Then step 2 cannot find this token.

# %% tags=["figure-two-steps"]
from tutorial_engine.viz import two_steps_picture

two_steps_picture(model, tokenizer, story_ids, first=(1, (3, 5)), second=(3, 3))

# %% [markdown]
# Ablation shows that we *need* a head, not what it carries. Without L0 H4 only 36 of 293 hits are left, too. But it
# looks only at the token itself (0.99), so it cannot carry what another token said. What
# it adds, this test cannot say.
#
# *Try:* guess how many hits are left without the attention of layer 2. Then run `hits({2: range(6)})`.
#
# <details><summary>What does it mean?</summary>287 of 293 are left. So this copying hardly needs the attention of layer
# 2. The test says nothing about the MLPs.</details>

# %% [markdown]
# ### How the induction heads came about (optional)
#
# These numbers were recorded while the model was trained. The *loss* is −log of the probability that the model gave to
# the token that came; lower is better. On the repeated part of random texts it stays high for hundreds of steps. Then
# it falls steeply, just when the best induction score rises. (The first round is not counted: nobody can guess it.)

# %% tags=["figure-training"]
import json

from tutorial_engine.viz import training_picture

training_picture(json.loads((TINY.parent / "curve.json").read_text()), vocab_size=c.vocab_size)

# %% [markdown]
# *A good place for a pause.*
#
# ## 13 · Text, the slow way
#
# **Objective:** count what a story costs. `mine.tell` takes the largest of the last token's logits (this is called
# *greedy*), appends that token, and runs *everything* again.

# %%
tokens_run = []


def next_token(sequence):
    tokens_run.append(len(sequence))
    hidden = model(Batch.from_sequences([sequence]))
    return int(model.compute_logits(hidden[-1:]).argmax())


sequence = list(ids)
for _ in range(24):
    sequence.append(next_token(sequence))
print(tokenizer.decode(sequence))

# %%
predictions.ask(
    "cost",
    "10 prompt tokens, 24 new ones. How many tokens went through the model?",
    ["34", "240", "516"],
)

# %%
repeated = sum(tokens_run) - len(sequence) + 1  # the last token was never run
if predictions.reveal("cost", sum(tokens_run)):
    print(f"{repeated} of these {sum(tokens_run)} runs of a token repeat an earlier one")

# %% [markdown]
# The first run took the 10 tokens of the prompt, the next one 11, the last one 33: together 516. Almost all of this repeats
# work. A token sees only itself and earlier tokens, so nothing that comes later can change
# what was computed for it:

# %%
longer = logits_of(Batch.from_sequences([sequence]))[: len(ids)]
check_close(longer, reference, 1e-4, "first 10 tokens, with 24 more = without them")

# %% [markdown]
# For a new token we need its own query, and the keys and values of all tokens up to it. If we keep these in memory, each
# token runs only once. That memory is called a *KV cache*.
#
# ### Exercise 8: what would it cost? (5 minutes)
#
# Count the bytes that the keys and values of one token need, in all layers together.
#
# <details><summary>Hint</summary>What has shape [T, H_kv, D] in section 3, and how often is it there? The names are those of
# <code>QWEN3_06B</code> in section 10. They are attributes of <code>config</code>, as in <code>c.head_dim</code>: write
# <code>config.head_dim</code>.</details>


# %% tags=["exercise"]
def kv_bytes(config, itemsize):
    """Bytes of keys and values that one token leaves in all layers."""
    ### BEGIN SOLUTION
    per_layer = 2 * config.num_key_value_heads * config.head_dim * itemsize
    return config.num_hidden_layers * per_layer
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_kv_bytes

check_kv_bytes(kv_bytes, qwen3_06b)

# %% [markdown]
# Here is Qwen3-0.6B with 16 bits per number (bfloat16).

# %%
from tutorial_engine.cache import KVCacheSpec

spec = KVCacheSpec.from_model(qwen3_06b, dtype=torch.bfloat16)
per_token = int(yours(kv_bytes, spec.bytes_per_token, qwen3_06b, 2))
tokens = big.num_parameters() * 2 // per_token
print(f"weights: {big.num_parameters() * 2 / 1e6:,.0f} MB")
print(f"K and V of one token: {per_token:,} bytes")
print(f"without GQA: {qwen3_06b.group_size * per_token:,} bytes")
print(f"after {tokens:,} tokens the cache is as large as the weights")

# %% [markdown]
# ## 14 · Your model
#
# **Objective:** run all your parts together, and compare logits (section 11 says why). The model ends this story by
# itself, with a token that means "end of text".

# %%
from tutorial_engine.sampling import SamplingParams

LONG = SamplingParams(max_tokens=120)  # greedy, and at most so many new tokens
mine.tell(PROMPT, LONG)

# %%
told = list(mine.generate(PROMPT, LONG).output_token_ids)
greedy = {"do_sample": False, "pad_token_id": 0}
expected = theirs.generate(torch.tensor([ids]), max_new_tokens=LONG.max_tokens, **greedy)
same = expected[0, len(ids) :].tolist() == told
print(f"all {len(told)} tokens equal those of transformers: {same}")
check_close(mine.logits(ids), reference, 1e-4, "logits of all prompt tokens = transformers")

# %% [markdown]
# ### Exercise 9: a bonus, the whole layer for all heads at once (30 minutes)
#
# Write the whole layer as one function, without a loop over heads and without `attend`. `x`, `w` and `angles` are those
# of exercise 6. You learn more if you call neither your `layer` nor `naive_attention`.
#
# <details><summary>Hint</summary><code>naive_attention</code> (section 4) shows how all heads are computed at once;
# <code>.out</code> of what it gives is the result. Nobody gives you a mask: <code>causal_mask(len(x),
# len(x))</code> makes one. Give the scores the axes [H, T, T] (<code>hqk</code>); then it fits each head.</details>


# %% tags=["exercise"]
def whole_layer(x, w, angles):
    """x [T, hidden], w LayerWeights, angles [T, D / 2] -> [T, hidden]."""
    ### BEGIN SOLUTION
    q, k, v = project(rms_norm(x, w.input_norm), w.q, w.k, w.v, len(w.q_norm))
    q, k = rope(rms_norm(q, w.q_norm), angles), rope(rms_norm(k, w.k_norm), angles)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / len(w.q_norm) ** 0.5
    shares = scores.masked_fill(~causal_mask(len(x), len(x)), float("-inf")).softmax(dim=-1)
    x = x + torch.einsum("hqk,khd->qhd", shares, v).flatten(1) @ w.o.T
    h = rms_norm(x, w.mlp_norm)
    return x + (silu(h @ w.gate.T) * (h @ w.up.T)) @ w.down.T
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_whole_layer

check_whole_layer(whole_layer)

# %% [markdown]
# ## What you can do now
#
# You have written a decoder layer that equals Hugging Face's, and shown which heads carry a piece of a name. The next
# notebook, `02_kv_cache`, runs each token once.
#
# <details><summary>To read on</summary>
#
# [Attention](https://arxiv.org/abs/1706.03762) (Vaswani et al., 2017), [GQA](https://arxiv.org/abs/2305.13245) (Ainslie
# et al., 2023), [RoPE](https://arxiv.org/abs/2104.09864) (Su et al., 2021), [RMSNorm](https://arxiv.org/abs/1910.07467)
# (Zhang and Sennrich, 2019) and [SwiGLU](https://arxiv.org/abs/2002.05202) (Shazeer, 2020).
#
# </details>

# %%
print(predictions.score())
