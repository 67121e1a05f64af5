# %% [markdown]
# # 02 · The KV cache
#
# Run every token once. Build the cache that makes it possible, watch it fill, prove that it changes
# no number, and measure what it saves on the machine in front of you. About 75 minutes.
#
# You should have done notebook 01 (or know queries, keys, values and the causal mask).

# %%
import torch

from tutorial_engine.engine.generate import generate
from tutorial_engine.learn import Predictions, check_close, show_source
from tutorial_engine.model import TINY, load_model, load_tokenizer
from tutorial_engine.sampling import SamplingParams
from tutorial_engine.viz.tokens import token_labels

torch.set_grad_enabled(False)
predictions = Predictions()
model, tokenizer = load_model(), load_tokenizer()
c = model.config
PROMPTS = ["Once upon a time Anna had a red kite.", "Ben had a blue ball.", "One day"]
prompts = [tokenizer.encode(text).ids for text in PROMPTS]
print([len(ids) for ids in prompts], "tokens")

# %% [markdown]
# ## 1 · What recomputing costs
#
# **Objective:** count. `generate` is the loop of notebook 01: run, take the likeliest token, append,
# again. A *hook*, a function that PyTorch calls before a module runs, counts the tokens.

# %%
counted = []
if "hook" in globals():
    hook.remove()  # this cell was run before
hook = model.model.register_forward_pre_hook(lambda _, args: counted.append(args[0].num_tokens))


def count_tokens(use_cache):
    counted.clear()
    options = SamplingParams(max_tokens=24)
    out = generate(model, prompts[:1], options, tokenizer=tokenizer, use_cache=use_cache)[0]
    return out.outputs[0], list(counted)  # a prompt may have several outputs; here it has one


slow, without = count_tokens(use_cache=False)
print(without)
print(slow.text)

# %%
predictions.ask(
    "saved",
    "10 prompt tokens; no token runs twice. How many must run to choose 24 new ones?",
    ["24", "33", "34", "516"],
)

# %%
fast, with_cache = count_tokens(use_cache=True)
predictions.reveal("saved", str(sum(with_cache)))
print(with_cache)
print("same tokens:", fast.token_ids == slow.token_ids)

# %% [markdown]
# Not 34: the last new token is chosen, but nobody needs to run it. Now in FLOPs, the multiplications
# and additions of a forward. (A product with a matrix of W numbers costs 2·W for each token.)

# %% tags=["figure-work"]
from tutorial_engine.bench.roofline import forward_flops
from tutorial_engine.viz.cache_plots import work_picture

flops_without = [forward_flops(c, n, 0) for n in without]
cached = [0, *range(len(prompts[0]), len(prompts[0]) + 23)]  # tokens that were there already
flops_with = [forward_flops(c, n, old) for n, old in zip(with_cache, cached, strict=True)]
print(f"{sum(flops_without) / sum(flops_with):.1f} times the arithmetic")
work_picture(without, with_cache, flops_without, flops_with)

# %% [markdown]
# ## 2 · What becomes of old keys
#
# **Objective:** see why keeping them is allowed. A *catcher* sits where the attention asks for keys
# and values, and remembers the keys of every layer.

# %%
from tutorial_engine.model import Batch, SdpaAttention
from tutorial_engine.model.attention import NoCache


class Catcher(NoCache):
    def __init__(self):
        self.keys = {}

    def update(self, layer, k, v, batch):
        self.keys[layer] = k
        return super().update(layer, k, v, batch)


def keys_of(sequence, layer=3):
    catcher = Catcher()
    model(Batch.from_sequences([sequence]), SdpaAttention(catcher))
    return catcher.keys[layer]


print("keys of layer 3 [tokens, K/V heads, head_dim]:", list(keys_of(prompts[0]).shape))

# %%
predictions.ask(
    "keys",
    "Append a token. The keys of the 10 tokens before it, in the LAST layer ...",
    ["change: that layer has seen everything", "stay as they are"],
)

# %%
changes, stays = predictions.questions["keys"].options
longer = keys_of([*prompts[0], 65])
same = torch.allclose(longer[:10], keys_of(prompts[0]), atol=1e-4)
predictions.reveal("keys", stays if same else changes)
check_close(longer[:10], keys_of(prompts[0]), 1e-4, "10 old keys, with and without a new token")

# %% [markdown]
# The causal rule again: a token sees only what came before, in every layer. So whatever is appended,
# its hidden state, key and value stay. Put the token in *front*, and everything moves:

# %%
moved = keys_of([65, *prompts[0]])[1:]
print("same keys after a token in front:", torch.allclose(moved, keys_of(prompts[0]), atol=1e-4))

# %% [markdown]
# ## 3 · A cache in twelve lines
#
# **Objective:** build it. The attention hands over the new keys and values of a layer and wants *all*
# there are, old and new. (Queries are never asked again: no need to keep them.)
#
# ### Exercise 1: keep them (10 minutes)
#
# <details><summary>Hint</summary><code>torch.cat((old_k, k))</code> joins along the first axis, the
# tokens. The first time a layer comes, there is nothing old.</details>


# %% tags=["exercise"]
class MyCache:
    """Keys and values of one sequence, by layer."""

    def __init__(self):
        self.kv = {}  # layer -> (k, v)

    def update(self, layer, k, v, batch):
        """New k, v [T, H_kv, D] -> [(all k, all v)], a list with one pair: one sequence."""
        ### BEGIN SOLUTION
        if layer in self.kv:
            old_k, old_v = self.kv[layer]
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        self.kv[layer] = (k, v)
        return [(k, v)]
        ### END SOLUTION


# %%
from tutorial_engine.learn.checks_02 import check_cache

check_cache(MyCache)

# %% [markdown]
# The package has this one too, as the naive twin of the real cache. Its flaw: every step copies all
# that is there into a new tensor. Bytes copied grow with the *square* of the length. A `Request` has its
# tokens, `token_ids`, and counts those whose K and V are in the cache, `num_computed_tokens`.

# %%
from tutorial_engine.cache import GrowingKVCache
from tutorial_engine.engine import Request, decode, prefill

growing, request = GrowingKVCache(), Request("A", prompts[0])
prefill(model, growing, [request])
for steps in (50, 100, 200):
    while request.num_computed_tokens < steps:
        request.token_ids.append(65)
        decode(model, growing, [request])
    print(f"{steps:3} tokens: {growing.bytes_copied // 2**10:6,} KiB copied so far")

# %% [markdown]
# ## 4 · Prefill and decode
#
# **Objective:** know the two kinds of forward by their shapes. *Prefill* runs the whole prompt and fills
# the cache. *Decode* runs one token and reads the cache. In our engine both are the same function:

# %%
from tutorial_engine.engine.runner import forward

show_source(forward)

# %% [markdown]
# The cache says where the new tokens go. The model runs. Then the request counts them as computed, and
# `cache.commit` tells the cache. Only the request knows its length. It advances once per forward, and not
# once per layer: we read it before each layer, over a prefill and two decodes.

# %%
from tutorial_engine.cache import CacheConfig, StaticKVCache

cache, request = StaticKVCache.from_config(c, CacheConfig(max_len=40)), Request("A", prompts[0])
before = []  # num_computed_tokens, before each layer of a forward
watch = [
    layer.register_forward_pre_hook(lambda *_: before.append(request.num_computed_tokens))
    for layer in model.model.layers
]
logits = prefill(model, cache, [request])
print("prefill: before each layer", before, "and then", request.num_computed_tokens)
print("logits", list(logits.shape))
for _ in range(2):
    before.clear()
    request.token_ids.append(int(logits.argmax()))
    logits = decode(model, cache, [request])
    label = token_labels(tokenizer, request.token_ids[-1:])
    print("decode", label, "before each layer", before, "and then", request.num_computed_tokens)
for hook_of_layer in watch:
    hook_of_layer.remove()

# %%
predictions.ask(
    "mask",
    "7 tokens are cached and one more runs (decode). How many entries has its causal mask, and how "
    "many are forbidden?",
    ["64, of which 28", "8, of which 7", "8, of which none"],
)

# %% tags=["figure-phases"]
from tutorial_engine.model import causal_mask
from tutorial_engine.viz.attention_plots import mask_picture

masks = {
    "prefill: 7 queries": causal_mask(7, 7),
    "decode: 1 query": causal_mask(1, 8),
    "chunk: 3 queries after 4": causal_mask(3, 7),
}
row = masks["decode: 1 query"]
none = int((~row).sum()) == 0
predictions.reveal("mask", f"{row.numel()}, of which {'none' if none else int((~row).sum())}")
mask_picture(masks)

# %% [markdown]
# The newest token may see everything: decode needs no mask. But its *position* must be right, for RoPE.
# Position = number of computed tokens, nothing else.
#
# ## 5 · One storage and a map
#
# **Objective:** find any key in memory. A real cache allocates once and never copies.

# %% [markdown]
# It is two things. The **KV storage**: per layer one K and one V tensor, addressed by *slot*. And a
# **map**: which slot holds position p of a sequence, kept once for all layers. In the static cache
# a sequence owns a row: slot = row · max_len + p. `allocate` asks the map where the next tokens go.


# %%
def next_batch(cache, requests):
    """All tokens that are not computed yet, and their slots; without a commit, so it can be repeated."""
    new = [r.token_ids[r.num_computed_tokens :] for r in requests]
    rooms = [
        cache.allocate(r.request_id, r.token_ids, r.num_computed_tokens, r.num_new_tokens)
        for r in requests
    ]
    return Batch.from_allocations(new, rooms, [r.request_id for r in requests])


cache = StaticKVCache.from_config(c, CacheConfig(max_seqs=3, max_len=16))
requests = [Request(name, ids) for name, ids in zip("ABC", prompts, strict=True)]
batch = next_batch(cache, requests)
print("slots to write:", batch.slot_mapping.tolist())
print("slots to read: ", [(s.start, s.stop) for s in batch.context_slots])
print("K of a layer [K/V heads, slots, head_dim]:", list(cache.storage.k[0].shape))

# %% [markdown]
# ### Exercise 2: which slots? (5 minutes)
#
# <details><summary>Hint</summary>Row r begins at <code>r * max_len</code>, and its first free slot is
# <code>cached[r]</code> further on.</details>


# %% tags=["exercise"]
def slots_to_write(cached, new, max_len):
    """cached[r] tokens are in row r, new[r] more come: their slots, row after row, as a list."""
    ### BEGIN SOLUTION
    slots = []
    for r, (old, n) in enumerate(zip(cached, new, strict=True)):
        slots += range(r * max_len + old, r * max_len + old + n)
    return slots
    ### END SOLUTION


# %%
from tutorial_engine.learn.checks_02 import check_slots

check_slots(slots_to_write)

# %% [markdown]
# The textbook shape of a static cache has five axes. It is a *view* of the same memory: nothing is
# copied. Slots that nobody wrote hold rubbish and must never be read. We fill all with NaN to prove it:
# one NaN read would spoil every logit.

# %%
cache.storage.k.fill_(float("nan"))
cache.storage.v.fill_(float("nan"))
logits = prefill(model, cache, requests)
keys, values = cache.by_rows()
print("[layers, rows, K/V heads, max_len, head_dim]:", list(keys.shape))
print("same memory:", keys.data_ptr() == cache.storage.k.data_ptr())
print("any NaN in the logits:", bool(logits.isnan().any()))
print("slots still NaN in layer 0, row 2:", int(keys[0, 2, 0, :, 0].isnan().sum()), "of 16")

# %% [markdown]
# Too much for a row is refused before anything is written:

# %%
try:
    prefill(model, cache, [Request("D", [65] * 20)])
except ValueError as error:
    print(error)
print("computed:", [r.num_computed_tokens for r in requests])

# %% tags=["figure-rows"]
from tutorial_engine.viz.cache_plots import fill_picture

used = [r.num_computed_tokens for r in requests]
fill_picture([(text, n, 16) for text, n in zip(PROMPTS, used, strict=True)])

# %% [markdown]
# Hatched slots are reserved and unused: other requests cannot have them. Notebook 04 shares them out in
# pages and cells: the same storage, another map.
#
# ## 6 · One position late
#
# **Objective:** meet the classic cache bug. Plausible code counts decode steps from 1 and starts at
# `prompt_len + step`. Position 10 is skipped.

# %%
predictions.ask(
    "late",
    "Every decoded token gets a position one too high. Three prompts, 24 new tokens each. The first new "
    "token ...",
    [
        "is wrong in all three",
        "is right in all three, and some texts go wrong later",
        "is right in all three, and nothing ever goes wrong: only distances count",
    ],
)

# %%
from tutorial_engine.learn.bugs import planted
from tutorial_engine.learn.bugs_02 import BUGS_02

greedy = SamplingParams(max_tokens=24)
right = [out.outputs[0].token_ids for out in generate(model, prompts, greedy)]
with planted("decode starts one position late", BUGS_02):
    late = [out.outputs[0].token_ids for out in generate(model, prompts, greedy)]
all_three, some, never = predictions.questions["late"].options
first_right = all(a[0] == b[0] for a, b in zip(right, late, strict=True))
predictions.reveal("late", (never if right == late else some) if first_right else all_three)
for a, b in zip(right, late, strict=True):
    pairs = enumerate(zip(a, b, strict=True))
    print("first wrong new token:", next((i for i, (x, y) in pairs if x != y), "none"))

# %% tags=["figure-late"]
from tutorial_engine.viz.cache_plots import positions_picture

start = len(prompts[1])
labels = [token_labels(tokenizer, list(ids[1][:18])) for ids in (right, late)]
positions_picture(range(start, start + 18), range(start + 1, start + 19), *labels)

# %% [markdown]
# The first new token comes from the prefill, which is right. Later ones have a gap before them: their
# distance to the whole prompt is off by one (the picture shows the second prompt). Nothing crashes, it still reads like a story, and one of
# three texts did not change at all. Looking at text proves nothing; compare *logits*.


# %%
def logits_of(sequence, new, chunk_size=None):
    cache = StaticKVCache.from_config(c, CacheConfig(max_len=40))
    cache.storage.k.zero_()  # what memory that was never written may well hold
    cache.storage.v.zero_()
    request = Request("A", sequence)
    rows = [prefill(model, cache, [request], chunk_size=chunk_size)]
    for token in new:
        request.token_ids.append(token)
        rows.append(decode(model, cache, [request]))
    return torch.cat(rows)


story, new = prompts[0], right[0][:8]
truth = logits_of(story, new)
for bug in BUGS_02:
    with planted(bug, BUGS_02):
        wrong = logits_of(story, new, chunk_size=4 if "chunk" in bug else None)
    found = "not noticed" if check_close(wrong, truth, 1e-3, bug).ok else "caught"
    first = torch.allclose(wrong[0], truth[0], atol=1e-3)
    print(f"{bug:36}{found}; first new token right: {first}")

# %% [markdown]
# ## 7 · Chunks and batches
#
# **Objective:** see that it does not matter *how* the tokens come. A long prompt may be prefilled in
# chunks, so that others need not wait; any chunking gives the same logits.

# %%
for chunk in (1, 3, 4, 7):
    print(
        check_close(logits_of(story, new, chunk), truth, 1e-3, f"chunks of {chunk} = all at once")
    )

# %% [markdown]
# Three prompts of unequal length in one batch: no padding, a row each. Every row stops by itself, and
# from then on costs nothing. The hook from section 1 still counts.

# %%
counted.clear()
three = [SamplingParams(max_tokens=n) for n in (3, 8, 5)]
together = generate(model, prompts, three, tokenizer=tokenizer)
print("tokens per forward:", counted)
alone = [
    generate(model, [ids], own, tokenizer=tokenizer)[0]
    for ids, own in zip(prompts, three, strict=True)
]
for a, b in zip(together, alone, strict=True):
    a, b = a.outputs[0], b.outputs[0]
    print(a.token_ids == b.token_ids, repr(a.text), a.finish_reason)

# %% [markdown]
# ## 8 · Watch it fill
#
# **Objective:** step through it. One step = one forward. Each cell is a slot of one layer and head,
# coloured by the length of its key or value; hover for details. Try chunks of 4, other heads, your own
# prompt.

# %% tags=["figure-cache-explorer"]
from tutorial_engine.viz.cache_explorer import CacheExplorer

explorer = CacheExplorer(model, tokenizer, PROMPTS[0], new_tokens=8, layer=3)
explorer.set(step=5)
explorer

# %% [markdown]
# ## 9 · What it costs in bytes
#
# **Objective:** compute the price of a token for real models. K and V, in every layer, for every *K/V*
# head. Grouped-query attention (GQA) was invented to have fewer of these than query heads; with as
# many, it is called multi-head attention (MHA).

# %%
from tutorial_engine.cache import KVCacheSpec


def spec(layers, kv_heads, dim):
    sizes = {"num_kv_heads": kv_heads, "k_head_dim": dim, "v_head_dim": dim}
    return KVCacheSpec(num_layers=layers, dtype=torch.bfloat16, **sizes)


# name: (layers, query heads, K/V heads, head_dim), from the released config.json files
models = {
    "GPT-2 124M": (12, 12, 12, 64),
    "Llama-2-7B": (32, 32, 32, 128),
    "Qwen3-0.6B": (28, 16, 8, 128),
    "Qwen3-4B": (36, 32, 8, 128),
}
for name, (layers, _, kv_heads, dim) in models.items():
    print(f"{name:12} {spec(layers, kv_heads, dim).bytes_per_token:9,} bytes a token in 16 bits")

# %% tags=["figure-bytes"]
from tutorial_engine.viz.cache_plots import bytes_picture

rows = [
    (
        name,
        spec(n, kv, dim).bytes_per_token,
        spec(n, heads, dim).bytes_per_token if kv < heads else None,
    )
    for name, (n, heads, kv, dim) in models.items()
]
bytes_picture(rows)

# %% [markdown]
# Large models are split over GPUs by heads (*tensor parallel*, tp). Each GPU (*rank*) keeps its own heads' K
# and V: Llama-2-7B at tp 4 has 8 of 32 heads on each. PyTorch's meta device shows the shapes of such a cache
# without its memory:

# %%
from tutorial_engine.cache import KVStorage

quarter = KVStorage(spec(32, 8, 128), num_slots=4 * 4096, device="meta")
k_view, _ = quarter.by_rows(num_rows=4)
print(
    "one rank of four, 4 rows of 4096:", list(k_view.shape), f"{quarter.num_bytes / 2**30:.0f} GiB"
)

# %% [markdown]
# ### Exercise 3: how many rows fit? (5 minutes)
#
# <details><summary>Hint</summary>Bytes of one row first: 2 (K and V) · layers · K/V heads · head_dim ·
# max_len · 2 bytes. Whole rows only.</details>


# %% tags=["exercise"]
def rows_that_fit(config, budget_bytes, max_len):
    """Whole rows of max_len tokens in bf16 that fit into the budget."""
    ### BEGIN SOLUTION
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    return budget_bytes // (per_token * max_len)
    ### END SOLUTION


# %%
from tutorial_engine.learn.checks_02 import check_fit
from tutorial_engine.model import ModelConfig

qwen3_06b = ModelConfig(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rope_theta=1e6,
    tie_word_embeddings=True,
)
check_fit(rows_that_fit, qwen3_06b)

# %% [markdown]
# ## 10 · What it saves in time
#
# **Objective:** measure it here: time per token with and without the cache, as the text grows.

# %%
predictions.ask(
    "short",
    "This tiny model, a context of 8 tokens. Compared with running all 8 again, decoding one with the "
    "cache takes ...",
    ["about an eighth of the time", "about the same time"],
)

# %%
import time
from statistics import median


def now():
    if model.device.type == "cuda":
        torch.cuda.synchronize()  # a GPU works on while Python goes ahead: wait for it
    return time.perf_counter()


@torch.inference_mode()
def median_seconds(run, repeat=9):
    times = []
    for _ in range(repeat + 2):  # the first two warm up
        began = now()
        run()
        times.append(now() - began)
    return median(times[2:])


# %%
def both_ways(n):
    """Seconds for the n-th token: decoded with the cache, and by running all n."""
    cache, request = StaticKVCache.from_config(c, CacheConfig(max_len=n)), Request("A", [65] * n)
    forward(model, cache, [request], num_tokens=n - 1)
    last, whole = next_batch(cache, [request]), Batch.from_sequences([[65] * n])
    backend = SdpaAttention(cache.storage)
    return (median_seconds(lambda: model(last, backend)), median_seconds(lambda: model(whole)))


# %% tags=["nbval-ignore-output", "figure-latency"]
from tutorial_engine.viz.cache_plots import latency_picture

lengths = [2, 4, 8, 16, 32, 64, 128, 256, 512]
seconds = {n: both_ways(n) for n in lengths}
measured = {
    "with cache": [(n, 1000 * seconds[n][0]) for n in lengths],
    "no cache": [(n, 1000 * seconds[n][1]) for n in lengths],
}
virtual = {"with cache": [(n, 1) for n in lengths], "no cache": [(n, n) for n in lengths]}
less, same = predictions.questions["short"].options
predictions.reveal("short", same if seconds[8][0] > 0.4 * seconds[8][1] else less)
latency_picture(measured, virtual)

# %% [markdown]
# On the left, a clock that counts one unit per token run. On the right, this machine: for a few tokens a
# forward of this tiny model is nearly all overhead, so eight cost hardly more than one; the cache wins
# later. Section 11 says why a few rows more cost so little.

# %% [markdown]
# Users feel two times. **TTFT**, time to first token: the prefill. **TPOT**, time per output token: the
# decodes. `stream` yields each token as it comes, so we can take them apart:

# %% tags=["nbval-ignore-output"]
from tutorial_engine.engine.generate import stream


def ttft_and_tpot(prompt, **options):
    began, stamps = time.perf_counter(), []
    for _ in stream(model, [prompt], SamplingParams(max_tokens=24, ignore_eos=True), **options):
        stamps.append(1000 * (time.perf_counter() - began))
    return stamps[0], (stamps[-1] - stamps[0]) / 23


ttft_and_tpot(prompts[0])  # warm up
for n in (10, 100, 900):
    for use_cache in (True, False):
        ttft, tpot = ttft_and_tpot(([*prompts[0]] * 90)[:n], use_cache=use_cache)
        cached = "cache   " if use_cache else "no cache"
        print(f"prompt {n:3}, {cached}: TTFT {ttft:6.1f} ms, TPOT {tpot:6.1f} ms")

# %% [markdown]
# TTFT is a little longer with the cache, which has to be written; without it, every later token costs
# another TTFT.

# %% [markdown]
# ## 11 · Why decode is slow: the roofline
#
# **Objective:** say what bounds each phase. A forward must do its arithmetic (FLOPs) *and* read its
# weights and cache from memory (bytes). The slower of the two is the least time it can take.

# %% [markdown]
# ### Exercise 4: the least time (5 minutes)
#
# <details><summary>Hint</summary>Arithmetic takes flops / peak seconds, memory bytes / bandwidth. Both
# go on at once.</details>


# %% tags=["exercise"]
def least_seconds(flops, num_bytes, peak, bandwidth):
    """Peak in FLOP/s, bandwidth in bytes/s -> the time below which no machine can get."""
    ### BEGIN SOLUTION
    return max(flops / peak, num_bytes / bandwidth)
    ### END SOLUTION


# %%
from tutorial_engine.learn.checks_02 import check_floor

check_floor(least_seconds)

# %% [markdown]
# FLOPs per byte is the *arithmetic intensity*. The tiny model fits into the processor's own caches, so
# we take four of the 28 layers of Qwen3-0.6B, with random weights: 252 MB that must come from memory.

# %%
from dataclasses import replace

from tutorial_engine.bench.roofline import forward_bytes, weight_bytes

four_layers = replace(qwen3_06b, num_hidden_layers=4, vocab_size=512)
weights = weight_bytes(four_layers, 4)


def flops_and_bytes(rows, new, old):
    """Of one forward: `rows` sequences, `new` tokens each, after `old` cached ones."""
    own_bytes = forward_bytes(four_layers, new, old, 4) - weights
    return rows * forward_flops(four_layers, new, old), weights + rows * own_bytes


# %%
cases = {
    "decode, 1 sequence": (1, 1, 64),
    "decode, 8 sequences": (8, 1, 64),
    "prefill, 32 tokens": (1, 32, 0),
    "prefill, 256 tokens": (1, 256, 0),
}
for name, case in cases.items():
    flops, moved = flops_and_bytes(*case)
    print(
        f"{name:20} {flops / 1e6:9,.0f} MFLOP, {moved / 1e6:4.0f} MB: {flops / moved:6.1f} per byte"
    )

# %% [markdown]
# Drawn over FLOPs per byte, the limit is a *roof*: the slope is the memory's bandwidth, the flat part the
# peak of the arithmetic, and they meet at the *ridge*.

# %%
predictions.ask(
    "batch",
    "Decode for 8 sequences at once, one new token each. Compared with one sequence, the time ...",
    ["is 8 times as long", "grows much less"],
)

# %%
from tutorial_engine.model.attention import fast_attention
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

large = Qwen3ForCausalLM(four_layers).draw_weights().requires_grad_(False).eval()
large.prepack()


def seconds_for(rows, new, old):
    cache = StaticKVCache.from_config(four_layers, CacheConfig(max_seqs=rows, max_len=512))
    requests = [Request(str(row), [65] * (old + new)) for row in range(rows)]
    if old:
        forward(large, cache, requests, num_tokens=old)
    batch, backend = next_batch(cache, requests), fast_attention(large.device, cache.storage)
    last = list(batch.last_token_indices)
    return median_seconds(lambda: large.compute_logits(large(batch, backend)[last]), repeat=7)


# %% tags=["nbval-ignore-output", "figure-roofline"]
from tutorial_engine.bench.roofline import measure_bandwidth, measure_peak_flops
from tutorial_engine.viz.cache_plots import roofline_picture

bandwidth, peak = measure_bandwidth(), measure_peak_flops(torch.float32)
points, took = [], {}
for name, case in cases.items():
    took[name] = seconds_for(*case)
    flops, moved = flops_and_bytes(*case)
    points.append((name, flops / moved, flops / took[name]))
factor = took["decode, 8 sequences"] / took["decode, 1 sequence"]
times, little = predictions.questions["batch"].options
predictions.reveal("batch", little if factor < 6 else times)
print(f"8 sequences take {factor:.1f} times as long as one")
roofline_picture(bandwidth, peak, points)

# %% [markdown]
# Prefill is *compute-bound*: many tokens share each weight that is read. Decode of one sequence is
# *memory-bound*: every weight is read for two FLOPs. Hence the idea behind every server: decode many
# sequences at once. Notebook 03 does.
#
# ## 12 · Choosing a token
#
# **Objective:** know what each knob keeps.

# %% [markdown]
# Logits become probabilities by a softmax. Dividing the logits by a *temperature* first makes the
# distribution sharper (below 1) or flatter (above). Temperature 0 means greedy.

# %% tags=["figure-temperature"]
from tutorial_engine.sampling.sampler import apply_temperature
from tutorial_engine.viz.sampling_plots import temperature_picture

cache = StaticKVCache.from_config(c, CacheConfig(max_len=40))
logits = prefill(model, cache, [Request("A", tokenizer.encode("Anna was").ids)])[0]
best = logits.argsort(descending=True)[:12].tolist()
labels = token_labels(tokenizer, best)
heat = {t: apply_temperature(logits, t).softmax(-1)[best].tolist() for t in (0.5, 1.0, 2.0)}
temperature_picture(labels, heat)

# %% [markdown]
# Filters then cut the tail. `top_k` keeps the k likeliest. `top_p` keeps the fewest that together reach
# p. `min_p` keeps those at least that fraction as likely as the best.

# %%
predictions.ask(
    "top_p",
    "Probabilities .5 .3 .1 .05 .05 and top_p = 0.8. How many tokens are kept?",
    ["1", "2", "3"],
)

# %%
from tutorial_engine.sampling.sampler import min_p, top_k, top_p

example = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.05]).log()
predictions.reveal("top_p", str(int(top_p(example, 0.8).isfinite().sum())))
print("top_k 3:  ", top_k(example, 3).isfinite().tolist())
print("top_p 0.8:", top_p(example, 0.8).isfinite().tolist())
print("min_p 0.2:", min_p(example, 0.2).isfinite().tolist())

# %% [markdown]
# ### Exercise 5: top-p (10 minutes)
#
# Keep a token unless the tokens *strictly before it*, from the likeliest down, already reach p.
#
# <details><summary>Hint</summary><code>sorted, order = probs.sort(descending=True)</code>; the mass before
# a token is <code>sorted.cumsum(-1) - sorted</code>; write the answer back with
# <code>keep[order] = ...</code>.</details>


# %% tags=["exercise"]
def keep_top_p(probs, p):
    """probs [V] -> bool [V], True = kept."""
    ### BEGIN SOLUTION
    values, order = probs.sort(descending=True)
    before = values.cumsum(-1) - values
    keep = torch.zeros_like(probs, dtype=torch.bool)
    keep[order] = before < p
    return keep
    ### END SOLUTION


# %%
from tutorial_engine.learn.checks_02 import check_top_p

check_top_p(keep_top_p)

# %% tags=["figure-filters"]
from tutorial_engine.sampling.sampler import filter_logits
from tutorial_engine.viz.sampling_plots import filters_picture

combined = SamplingParams(temperature=1.0, top_k=4, top_p=0.9, min_p=0.05)
kept = {
    "top_k = 4": top_k(logits, 4),
    "top_p = 0.9": top_p(logits, 0.9),
    "min_p = 0.05": min_p(logits, 0.05),
    "all three": filter_logits(logits, combined),
}
kept = {name: cut.isfinite().tolist() for name, cut in kept.items()}
vocabulary = token_labels(tokenizer, list(range(c.vocab_size)))
filters_picture(vocabulary, logits.softmax(-1).tolist(), kept)

# %% [markdown]
# **The seed mistake.** Each request has one generator, seeded *once*. Seeding it again before every draw
# looks reproducible, and draws the same number for ever.

# %% tags=["figure-draws"]
from tutorial_engine.sampling import Sampler
from tutorial_engine.viz.sampling_plots import draws_picture

warm = SamplingParams(temperature=1.5, seed=7, max_tokens=12)
once = Sampler(warm)
good = [once.sample(logits).token_id for _ in range(12)]
bad = [Sampler(warm).sample(logits).token_id for _ in range(12)]  # seeded for every draw
print("different tokens, seeded once:", len(set(good)), "seeded every time:", len(set(bad)))
draws_picture(token_labels(tokenizer, good), token_labels(tokenizer, bad))

# %% [markdown]
# A request's draws depend on its own seed alone, not on who shares the batch:

# %%
own = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
other = SamplingParams(temperature=1.0, seed=4, max_tokens=12)
alone = generate(model, prompts[:1], own, tokenizer=tokenizer)[0].outputs[0]
shared = generate(model, prompts[:2], [own, other], tokenizer=tokenizer)[0].outputs[0]
print(repr(alone.text))
print("same in company:", alone.token_ids == shared.token_ids)

# %% [markdown]
# `logprobs` tells what the model itself thought of each token: raw log-probabilities, before
# temperature and filters, with the token's rank.

# %%
told = SamplingParams(temperature=1.5, seed=7, max_tokens=5, logprobs=3)
for token in generate(model, prompts[:1], told)[0].outputs[0].tokens:
    others = token_labels(tokenizer, [i for i, _ in token.top_logprobs])
    chosen = token_labels(tokenizer, [token.token_id])[0]
    print(f"{chosen:6} logprob {token.logprob:5.1f}, rank {token.rank:2}; best: {' '.join(others)}")

# %% [markdown]
# ## 13 · Stopping
#
# **Objective:** stop at a text, not at a token. Generation ends at an end-of-text token, a stop id, a
# stop string, or the length. A stop string may begin in one token and end in another, so the text is
# searched, and its last characters, the length of a stop string less one, are held back.

# %%
until = SamplingParams(max_tokens=24, stop="coat.")
for event in stream(model, prompts[:1], until, tokenizer=tokenizer):
    piece = token_labels(tokenizer, [event.token.token_id])[0]
    print(f"token {piece:6} shown now: {event.text!r}", event.finish or "")

# %% [markdown]
# Nothing of the stop string was ever shown, and nothing else was lost. Why a request ended is always
# told:

# %%
for own in (
    SamplingParams(max_tokens=24, stop=("coat.", "old")),
    SamplingParams(max_tokens=24, stop_token_ids=[tokenizer.encode(" day").ids[-1]]),
    SamplingParams(max_tokens=6),
):
    out = generate(model, prompts[:1], own, tokenizer=tokenizer)[0].outputs[0]
    print(f"{out.finish_reason:6} {out.stop_reason!s:6} {out.text!r}")

# %% [markdown]
# ## 14 · The equality ledger
#
# **Objective:** prove that every way gives the same. One path (no cache) chooses the tokens; every
# other is fed with them (*teacher forcing*), and all its logits are compared, step by step. Three of
# the paths involve Hugging Face's `transformers`.

# %%
from transformers import AutoModelForCausalLM, logging

from tutorial_engine.lab.hf import OurCache, TransformersRunner
from tutorial_engine.lab.ledger import ledger, our_paths, runner_path, table

logging.disable_progress_bar()
theirs = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def our_cache():
    return OurCache(StaticKVCache.from_config(c, CacheConfig(max_len=64)))


paths = our_paths(model) | {
    "transformers, no cache": runner_path(lambda n: TransformersRunner(theirs, use_cache=False)),
    "transformers, driven by our loop": runner_path(lambda n: TransformersRunner(theirs)),
    "transformers, over our cache": runner_path(lambda n: TransformersRunner(theirs, our_cache)),
}
print(table(ledger(paths, prompts, num_tokens=12)))

# %% [markdown]
# Read it: the third column counts the steps at which the likeliest token is the reference's. Logits of
# two correct programs still differ in the last digits, for sums are rounded in another order; the
# tolerance says how much we allow.

# %%
expected = theirs.generate(
    torch.tensor(prompts[:1]), max_new_tokens=24, do_sample=False, pad_token_id=0
)
print("our generate = theirs:", expected[0, 10:].tolist() == list(fast.token_ids))

# %% [markdown]
# **bf16 is another matter.** It keeps 8 significant bits of each number instead of 24. Feed it the same
# tokens: its logits are off by far more than the tolerance, so where two tokens are close it may pick
# the other one.
# Compare speed in bf16, tokens in fp32.

# %%
from tutorial_engine.engine.runner import make_runner

in_bf16 = load_model(dtype=torch.bfloat16)
bf16_paths = {
    "no cache": paths["no cache"],
    "static cache, bf16": runner_path(lambda n: make_runner(in_bf16, max_len=64)),
}
row = ledger(bf16_paths, prompts, num_tokens=16)[1]
print("beyond the fp32 tolerance:", row.difference > row.tolerance)
print("more than 20 times beyond:", row.difference > 20 * row.tolerance)

# %% [markdown]
# ## 15 · A real model
#
# All of this runs with any dense Qwen3, downloaded once, in its own chat format:
#
# ```python
# name = "Qwen/Qwen3-0.6B"
# model, tokenizer = load_model(name, dtype=torch.bfloat16), load_tokenizer(name)
# chat = load_chat_template(name)  # from tutorial_engine.lab.chat
# prompt = chat.render([{"role": "user", "content": "What is a KV cache?"}])
# (out,) = generate(model, prompt, SamplingParams(max_tokens=200), tokenizer=tokenizer)
# print(out.outputs[0].text)
# ```

# %% tags=["nbval-ignore-output"]
if torch.cuda.is_available():
    on_gpu = load_model(device="cuda", dtype=torch.bfloat16)
    print(generate(on_gpu, PROMPTS[0], greedy, tokenizer=tokenizer)[0].outputs[0].text)
else:
    print(
        "No GPU here. With one, this cell would put model and cache there and generate the same way."
    )

# %% [markdown]
# ## What you can do now
#
# Say what prefill and decode run, read and write; find any key's slot; price a context in bytes; tell
# a compute-bound from a memory-bound phase; choose sampling knobs knowingly. Next, `03_scheduler`: many
# requests at once.

# %%
print(predictions.score())
