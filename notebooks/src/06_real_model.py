# %% [markdown]
# # 06 · A real model: where is Paris?
#
# You have written the parts of an engine, and they ran a tiny model that tells stories. Here the same parts run a real
# language model, one that answers questions. Then you look into its KV cache, and find the few numbers that decide
# whether the capital of France is Paris or Rome.
#
# Plan about 1¾ hours. You should have done notebook 01, and 02 up to section 4. For section 4 also 03 to 05.

# %% [markdown]
# | section | what it is about | minutes |
# |---|---|---|
# | 1 | your parts run a real model | 10 to 15 |
# | 2 | where in the cache the name of a country passes | 45 to 55 |
# | 3 | the slot that nobody may throw away | 15 to 20 |
# | 4 | a conversation is a prefix cache | 15 to 20 |
#
# This notebook is optional. It needs a real model, SmolLM2-135M-Instruct: `make real` brings it once (93 MB). After that no network is
# needed. Where the model is not here, each cell shows what it showed when this notebook was made.

# %%
from tutorial_engine.learn import the_real_model

folder = the_real_model("06_real_model.ipynb")  # 93 MB, brought once

# %%
import torch

from tutorial_engine.learn import OwnEngine, OwnServer, Predictions, bring, show_source
from tutorial_engine.model import load_model, load_tokenizer
from tutorial_engine.sampling import SamplingParams
from tutorial_engine.viz import token_label, token_labels

torch.set_grad_enabled(False)
predictions = Predictions("06")
model, tokenizer = load_model(folder, dtype=torch.float32), load_tokenizer(folder)
c = model.config
print(f"{model.num_parameters():,} weights in {c.num_hidden_layers} layers")

# %% [markdown]
# ## 1 · It speaks
#
# **Objective:** let the functions that you wrote for the tiny model run a real one.
#
# The next cells read your notebooks 01 and 02 from their saved files. What is right there runs here. A line with ☐ names
# parts that are still the package's.

# %%
mine = OwnEngine(model, tokenizer, cached=True)
bring(mine, "01_attention_rope.ipynb")

# %%
bring(mine, "02_kv_cache.ipynb")

# %%
FRANCE = "The capital of France is the city of"
mine.tell(FRANCE, SamplingParams(max_tokens=20))

# %% [markdown]
# The model was trained on text from the web, most of it English, so it knows Paris. Is its text the same elsewhere? The
# next cell asks transformers, and compares with what vLLM 0.32 said; that was recorded.

# %%
from transformers import AutoModelForCausalLM, logging

from tutorial_engine.lab import vllm_said

logging.disable_progress_bar()
logging.set_verbosity_error()
theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
ids = tokenizer.encode(FRANCE).ids
yours = list(mine.generate(FRANCE, SamplingParams(max_tokens=20)).output_token_ids)
hf = theirs.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :]
print("the tokens of transformers:", yours == hf.tolist())
print("the tokens of vLLM 0.32:   ", yours == vllm_said(ids))

# %% [markdown]
# This is the tiny model beside the real one:

# %% jupyter={"source_hidden": true}
from tutorial_engine.cache import KVCacheSpec

tiny = load_model()
SIZES = {
    "vocabulary": "vocab_size",
    "layers": "num_hidden_layers",
    "hidden size": "hidden_size",
    "query heads": "num_attention_heads",
    "K/V heads": "num_key_value_heads",
    "numbers of a head": "head_dim",
    "RoPE θ": "rope_theta",
}
rows = {name: [getattr(m.config, size) for m in (tiny, model)] for name, size in SIZES.items()}
rows["weights"] = [m.num_parameters() for m in (tiny, model)]
rows["bytes of K and V a token"] = [
    KVCacheSpec.from_model(m.config, torch.float32).bytes_per_token for m in (tiny, model)
]
print(f"{'':26}{'tiny (Qwen3)':>14}{'SmolLM2 (Llama)':>18}")
for name, (small, large) in rows.items():
    print(f"{name:26}{small:14,.0f}{large:18,.0f}")

# %% [markdown]
# The tiny model has the architecture of Qwen3, and SmolLM2 that of Llama. How much differs between them? This is attention in
# the package, for both:

# %%
from tutorial_engine.model import SelfAttention

show_source(SelfAttention.forward)

# %% [markdown]
# Only three things differ:
#
# 1. `q_norm` is an RMSNorm in a Qwen3, and `nn.Identity`, which changes nothing, in a Llama.
# 2. The same holds for `k_norm`.
# 3. In a Llama `head_dim` is hidden size / heads. In a Qwen3 it may be another number.
#
# <details><summary>How can your layer run a Llama?</summary>Your <code>layer</code> of notebook 01 normalises q and k, as Qwen3
# does. Here the package gives it norms whose weights are 1. Before attention, it multiplies each q and k by the length that it had.
# RoPE turns vectors and does not change their lengths, so the result is that of a Llama.</details>

# %% [markdown]
# ## 2 · Where is Paris?
#
# **Objective:** find the numbers in the cache that decide which country the model speaks of.
#
# Here are two texts that differ in one token.

# %%
ITALY = "The capital of Italy is the city of"
for text in (FRANCE, ITALY):
    print(token_labels(tokenizer, tokenizer.encode(text).ids))

PARIS, ROME = (tokenizer.encode(word).ids[0] for word in (" Paris", " Rome"))

# %% [markdown]
# The country is in slot 3. `mine.memory(text, 4)` runs the first four tokens, and returns copies of what your cache then
# holds: layer → (k, v), each [tokens, K/V heads, head_dim]. So the last four tokens, " is the city of", have not run yet.
# `mine.next_token(memory, text)` runs them over such a memory, and returns the probabilities of what comes next.

# %%
italy = mine.memory(ITALY, 4)
print("K and V of a layer:", [list(x.shape) for x in italy[0]])
print(
    f"numbers in slot 3, in all layers: {sum(x[3].numel() for kv in italy.values() for x in kv):,}"
)


def chances(memory):
    """How likely Paris and Rome are after the text of France, over this memory."""
    probs = mine.next_token(memory, FRANCE)
    return f"Paris {float(probs[PARIS]):.2f}, Rome {float(probs[ROME]):.2f}"


print("nothing replaced:", chances(mine.memory(FRANCE, 4)))

# %% [markdown]
# Now we change what slot 3 holds, as in notebook 02. The text on the screen says France, and some numbers in slot 3
# are *replaced by* those of Italy. Italy's own memory does not change. `mine.transplant` is your function of
# notebook 02.

# %%
predictions.ask(
    "which",
    "In slot 3 we replace either all K or all V, in all thirty layers. Which of the two makes the model say Rome?",
    ["K", "V", "each of them alone", "neither: it takes both"],
)


# %%
def replaced(layers, which):
    """The memory of France's text, with K or V of Italy in slot 3 of these layers."""
    memory = mine.memory(FRANCE, 4)
    for layer in layers:
        memory = mine.transplant(memory, italy, layer, [3], which)
    return memory


def says_rome(layers, which):
    """Is Rome the likeliest next token then?"""
    return int(mine.next_token(replaced(layers, which), FRANCE).argmax()) == ROME


all_layers = list(range(c.num_hidden_layers))
by_k, by_v = says_rome(all_layers, "K"), says_rome(all_layers, "V")
if predictions.reveal("which", int(by_v) if by_k != by_v else 2 if by_k else 3):
    for which in ("K", "V"):
        print(f"{which} of all layers replaced:", chances(replaced(all_layers, which)))

# %% [markdown]
# A key only helps a query to find the slot. France and Italy are found equally well here, so the other K changes nothing.
# The value is what the slot passes on.
#
# These are the V of thirty layers. In this model *one* layer of them is enough. Which one?

# %%
predictions.ask(
    "where",
    "Layer 0 is next to the tokens, and layer 29 next to the answer. Where is the layer whose V makes the model say Rome?",
    ["among 0 to 9", "among 10 to 19", "among 20 to 29"],
)

# %% [markdown]
# We could try each layer alone, in thirty runs. There is a faster way. Replace V in one half of the layers. If the
# answer flips to Rome, the layer is in this half, and else it is in the other one. Then halve again.

# %% [markdown]
# ### Exercise 1: find the layer by halves (10 minutes)
#
# `flips(layers)` gets a list of layers, runs the model with V of these replaced, and returns True if the answer flips: if it
# is Rome then. Return the layer that does it alone. For thirty layers, use at most five runs. (The check tries other numbers of
# layers, too.)
#
# <details><summary>Hint</summary>Keep two borders, <code>low</code> and <code>high</code>: the layer is one of
# <code>range(low, high)</code>. Each question moves one of them to the middle. When is only one layer left?</details>


# %% tags=["exercise"]
def find_layer(flips, num_layers):
    """The one layer for which flips([layer]) is True. flips takes a list of layers."""
    ### BEGIN SOLUTION
    low, high = 0, num_layers
    while high - low > 1:
        middle = (low + high) // 2
        if flips(list(range(low, middle))):
            high = middle
        else:
            low = middle
    return low
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_find_layer

mine.use(find_layer, check_find_layer)

# %% [markdown]
# Now it searches in the real model:


# %%
def flips(layers):
    """Does the model say Rome when V of these layers is replaced?"""
    flipped = says_rome(layers, "V")
    print(f"V of layers {layers[0]} to {layers[-1]} replaced: {'Rome' if flipped else 'not Rome'}")
    return flipped


layer = mine.parts("find_layer", flips, c.num_hidden_layers)
print(f"found: layer {layer}")

# %%
if predictions.reveal("where", layer // 10):
    for one in (layer - 1, layer, layer + 1):
        print(f"V of layer {one} alone:", chances(replaced([one], "V")))

# %% [markdown]
# One layer of thirty decides. With V of layer 22 or of layer 24 replaced, the answer is Paris as before.
#
# In this layer, slot 3 has three K/V heads of 64 numbers each. Three query heads share each of them (this is GQA, notebook 01).

# %% [markdown]
# ### Exercise 2: replace one head (5 minutes)
#
# Copy V of one K/V head of some slots of one layer from `donor` to `memory`, and return `memory`. `memory[layer]` is a pair
# (k, v), and v is [tokens, K/V heads, head_dim]. `slots` is a list, `head` a number. K, the other heads and the donor stay as they are.
#
# <details><summary>Hint</summary>Two indices side by side choose a slot and a head: <code>v[slots, head]</code>.</details>


# %% tags=["exercise"]
def replace_head(memory, donor, layer, slots, head):
    """Copy V of this K/V head of these slots of one layer from donor to memory -> memory."""
    ### BEGIN SOLUTION
    memory[layer][1][slots, head] = donor[layer][1][slots, head]
    return memory
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_replace_head

mine.use(replace_head, check_replace_head)

# %%
for head in range(c.num_key_value_heads):
    memory = mine.parts("replace_head", mine.memory(FRANCE, 4), italy, layer, [3], head)
    print(f"V of layer {layer}, K/V head {head}:", chances(memory))

# %% [markdown]
# These are **64 numbers** of the 11,520 that the cache holds for this token. The next cell
# tries all 180 pieces of 64 numbers, one by one: thirty layers, three heads, K and V.

# %% tags=["figure-fact"]
from tutorial_engine.lab import TwoTexts
from tutorial_engine.viz import fact_picture

two = TwoTexts.of(model, tokenizer, FRANCE, ITALY)
fact_picture(two, tokenizer)

# %% [markdown]
# These numbers do not *store* the fact. They *carry* something from "France" to the words after it. What?
#
# **What do the 64 numbers say?** They need not come from Italy. Here are other texts of four tokens. We take the 64
# numbers of their last token, and put them into slot 3 in place of those of France.

# %%
predictions.ask(
    "pizza",
    "“We all love pizza” names no country and no city. After “The capital of France is the city of”, with 64 numbers of "
    "“pizza” in place of those of “France”, the model says ...",
    ["Paris, as before", "Rome", "a food", "nothing that makes sense"],
)

# %%
DONORS = [
    "We all love pizza",
    "I like eating sushi",
    "Her name is Giovanni",
    "The museum in Berlin",
    "It is the same",
]


def with_numbers_of(text):
    """What follows the text of France, with the 64 numbers of this text's fourth token in slot 3."""
    memory, donor = mine.memory(FRANCE, 4), mine.memory(text, 4)
    return mine.next_token(mine.parts("replace_head", memory, donor, layer, [3], 1), FRANCE)


pizza = token_label(tokenizer, int(with_numbers_of(DONORS[0]).argmax()))
truth = {"·Paris": 0, "·Rome": 1}.get(pizza, 3)
for text in DONORS if predictions.reveal("pizza", truth) else ():
    probs = with_numbers_of(text)
    print(f"{text:22} {token_label(tokenizer, int(probs.argmax()))} {float(probs.max()):.2f}")

# %% [markdown]
# With the numbers of pizza, the capital of France is Rome. The last text has nothing to do with a country, and with its numbers the
# model is unsure. (Other such texts leave Paris.) So it is not enough that they are other numbers. Do those of pizza say "Rome"? We put them into another sentence, one that asks
# for a language:

# %%
LANGUAGE = "The people of France speak the language called"


def best(memory, text):
    """The likeliest next token, and its probability."""
    probs = mine.next_token(memory, text)
    return f"{token_label(tokenizer, int(probs.argmax()))} {float(probs.max()):.2f}"


memory, donor = mine.memory(LANGUAGE, 4), mine.memory(DONORS[0], 4)
print("as it is:             ", best(memory, LANGUAGE))
memory = mine.parts("replace_head", memory, donor, layer, [3], 1)
print("with numbers of pizza:", best(memory, LANGUAGE))

# %% [markdown]
# In this sentence they make the answer a language, and not a city. So they seem to say something like *Italian*, and
# the layers after this one make of it what the text asks for. Can we see this in the numbers themselves?

# %% [markdown]
# **Who reads them?** Below is *query* head 4 of this layer, for the last token, "·of". It is one of the three that read K/V head 1,
# and gives most of its attention to "·France". (The other two look more at "The" than at "France"; section 3 comes to that.)
# The tokens "is", "the" and "city" look at France, too: they read the same numbers, and pass on some of it.

# %% tags=["figure-reads"]
from tutorial_engine.viz import AttentionExplorer

AttentionExplorer(model, tokenizer, FRANCE, layer=layer, head=4)

# %% [markdown]
# **What does this head make of them?** It multiplies the 64 numbers by its own 64 columns of `o_proj`, and the result is added to
# the hidden state, 576 numbers. Every token of the vocabulary has an embedding of 576 numbers, too. In this model the last layer
# compares the hidden state with them to choose the next token. So we can ask: which embeddings fit best to what this head adds?

# %%
columns = slice(4 * c.head_dim, 5 * c.head_dim)  # of query head 4
o_proj = model.model.layers[layer].self_attn.o_proj.weight[:, columns]  # [576, 64]
embeddings = model.model.embed_tokens.weight  # [49152, 576]
for text in ["The capital of France", "The capital of Italy", *DONORS]:
    v = mine.memory(text, 4)[layer][1][3, 1]  # the 64 numbers
    nearest = (embeddings @ (o_proj @ v)).topk(3).indices
    print(f"{text:22}", *(token_label(tokenizer, int(i)) for i in nearest))

# %% [markdown]
# The numbers of "pizza" say *Italian*, those of "sushi" say *Japanese*, and those of "same" give nonsense. Nobody told the
# model to write this into its cache: it has learned it. (The method is called *logit lens*. It is a rough one: it leaves out the last
# norm and all that later layers do. Head 3 of this layer reads the same numbers, and gives nonsense for all of these texts.)

# %% [markdown]
# **Is it only France and Italy?** One pair proves little. The next cells take 60 random pairs of 37 countries. In each they
# replace V, and count two things: how often the answer becomes the one that the model gives for the other country, and how
# often it stays. (The model's own answer is not always the capital: for Spain it says Barcelona.)

# %% jupyter={"source_hidden": true}
import random
from collections import Counter

COUNTRIES = (
    "France Italy Japan Egypt Germany Spain Greece Russia China India Canada Mexico Brazil Peru "
    "Chile Cuba Iran Iraq Israel Turkey Poland Austria Sweden Norway Finland Denmark Portugal "
    "Ireland Hungary Ukraine Thailand Vietnam Kenya Argentina Colombia Switzerland Belgium"
).split()
draw = random.Random(6)
pairs = [draw.sample(COUNTRIES, 2) for _ in range(60)]
others = [one for one in all_layers if one != layer]


# %% jupyter={"source_hidden": true}
def count_flips():
    """What is replaced → how many answers become the other country's, and how many stay."""
    flipped, kept = Counter(), Counter()
    for a, b in pairs:
        both = [f"The capital of {country} is the city of" for country in (a, b)]
        of_pair = TwoTexts.of(model, tokenizer, *both)
        edits = {
            f"layer {layer}": of_pair.replace([layer]),
            f"layer {layer}, head 1 alone": of_pair.replace([layer], heads=[1]),
            f"layer {layer - 1}": of_pair.replace([layer - 1]),
            f"layer {layer + 1}": of_pair.replace([layer + 1]),
            f"all layers but {layer}": of_pair.replace(others),
        }
        old, new = of_pair.answers
        for name, answer in zip(edits, of_pair.after([*edits.values()]).argmax(-1), strict=True):
            flipped[name] += int(answer) == new
            kept[name] += int(answer) == old
    return flipped, kept


# %%
predictions.ask(
    "control",
    f"V of layer {layer} alone, 60 pairs of countries. How often does the answer become that of the other country?",
    ["about 5 times", "about 30 times", "more than 50 times"],
)

# %%
flipped, kept = count_flips()
truth = next(i for i, most in enumerate((15, 45, 60)) if flipped[f"layer {layer}"] <= most)
for name in flipped if predictions.reveal("control", truth) else ():
    print(f"V of {name:24} flips {flipped[name]:2} of 60, {kept[name]:2} stay")

# %% [markdown]
# So this was not luck. In sentences of this kind, what tells one country from another passes, from its slot, through V of layer 23.
# (Where an answer neither flips nor stays, it is a third one.) And it is not only capitals:

# %% jupyter={"source_hidden": true}
OTHERS = [
    ("Anna lives in Berlin, in the country of", "Anna lives in Madrid, in the country of"),
    ("The Eiffel Tower is in the city of", "The Colosseum is in the city of"),
]
for first, second in OTHERS:
    other = TwoTexts.of(model, tokenizer, first, second)
    as_it_is = dict  # copies the memory, and changes nothing
    before, after = other.after([as_it_is, other.replace([layer])])
    old, new = (token_label(tokenizer, int(probs.argmax())) for probs in (before, after))
    number = len(other.slots) * c.num_key_value_heads * c.head_dim
    print(
        f"{first} …  {old} {float(before.max()):.2f} becomes {new} {float(after.max()):.2f}", end=""
    )
    print(f" ({number} numbers)")

# %% [markdown]
# **Replace, do not erase.** A simpler experiment would set V of this slot and layer to zero. What is left then?

# %%
for heads, name in ((slice(None), "all three heads, 192 numbers"), (1, "head 1 alone, 64 numbers")):
    erased = mine.memory(FRANCE, 4)
    erased[layer][1][3, heads] = 0
    likely = mine.next_token(erased, FRANCE).topk(3)
    words = [token_label(tokenizer, int(i)) for i in likely.indices]
    print(f"{name}, set to zero:")
    print(
        "   ", ", ".join(f"{w} {float(p):.2f}" for w, p in zip(words, likely.values, strict=True))
    )

# %% [markdown]
# Without the 192 numbers the model still knows that a city must come, but not which one. Without the 64 of head 1, Paris is still the
# likeliest. So the 64 numbers are *enough* to change the answer, but other numbers carry France, too. In training no V was
# ever zero, so what a model does with zeros says less about it. Erasing shows that something is missing. Replacing shows what passes
# there.

# %% [markdown]
# **Your own sentence.** Write two texts that have the same number of tokens and end in the same word. Choose what is
# replaced, and move the slider from layer to layer. (A new text takes a few seconds.)

# %% [markdown]
# For example, try "The baby of a cat is called a", and "cow" in place of "cat" in the other text. Then "The sky is blue and the grass
# is", with "snow" for "grass". Then "The opposite of hot is", with "big" for "hot". Is it always layer 23?
#
# <details><summary>Answer</summary>With the first two it is layer 23. With the opposites no single layer is enough. So this layer is
# a place where some things pass, and not all.</details>

# %% tags=["figure-own-sentence"]
from tutorial_engine.viz import FactExplorer

explorer = FactExplorer(
    model,
    tokenizer,
    "The theory of relativity was developed by",
    "The theory of evolution was developed by",
)
explorer.set(step=layer)
explorer

# %% [markdown]
# **In a chat.** SmolLM2 answers questions. A *chat template* writes the roles around a question, and the model goes on as
# the assistant.

# %%
from tutorial_engine.engine import load_chat_template

template = load_chat_template(folder)


def question(country):
    """The text of a chat that asks for a capital."""
    return template.render([{"role": "user", "content": f"What is the capital of {country}?"}])


chat = question("France")
print(chat)
both = zip(*(tokenizer.encode(question(one)).ids for one in ("France", "Italy")), strict=True)
slot = next(i for i, (a, b) in enumerate(both) if a != b)
print(f"the country is in slot {slot}")


# %%
def answer(country=None, head=None):
    """What it says of France, with V of another country in this slot and layer."""
    memory = mine.memory(chat, slot + 1)
    if country:
        donor = mine.memory(question(country), slot + 1)
        if head is None:
            memory = mine.transplant(memory, donor, layer, [slot], "V")
        else:
            memory = mine.parts("replace_head", memory, donor, layer, [slot], head)
    return mine.go_on(memory, chat)[len(chat) :]


print("as it is:           ", answer())
print("of Germany:         ", answer("Germany"))
print("of Egypt:           ", answer("Egypt"))
print("of Italy:           ", answer("Italy"))
print("of Italy, head 1:   ", answer("Italy", head=1))
print("asked of Italy itself:", mine.generate(question("Italy")).checker.text)

# %% [markdown]
# The question on the screen is the same each time. With the 192 numbers of Italy it answers in Italian, or in what a small model
# takes for Italian. The 64 numbers of head 1 alone are not enough here. The last line is a control: asked for
# the capital of Italy, the model falls into Italian as well.

# %% [markdown]
# **What this shows, and what not.**
#
# - **Where the 64 numbers come from:** layers 0 to 22 and the V projection of layer 23 computed them when the word was read,
#   from this token and those before it.
# - **What they say:** something like "Italian". They *carry* it to the tokens that come later. The fact is *not stored* in them.
# - **Who makes a city of it:** the layers that come after. The knowledge is in the weights, before this place and behind it.
# - **How far this goes:** it is one small model, and sentences of a few kinds. In a third of the 60 pairs, and in the chat, the 64 numbers alone
#   were not enough.

# %% [markdown]
# The method is called *activation patching*.
#
# - [Meng et al. 2022](https://arxiv.org/abs/2202.05262) traced facts in a similar way in GPT-2 XL and GPT-J. (Their method to change a
#   fact in the weights is called ROME.) MLPs of the middle layers add what is known about a subject, at the last token of its name.
# - [Geva et al. 2023](https://arxiv.org/abs/2304.14767) found attention heads of later layers that take the answer from there to the
#   last token. Our head is related. It brings rather the country than the answer.
# - [Heimersheim and Nanda 2024](https://arxiv.org/abs/2404.15255) tell how such experiments are read, and how they are understood wrongly.

# %% [markdown]
# ## 3 · The slot that nobody may throw away
#
# **Objective:** find out which slots a full cache may lose.
#
# A cache gets full. Then an engine may throw slots away. Here is a text, and the model's *loss* on its last
# 40 tokens: the mean of −log of the probability that the model gave to the token that came. Less is better. Before each of these 40
# runs, a rule chooses which earlier slots it may see.

# %% jupyter={"source_hidden": true}
from tutorial_engine.lab import loss_without

WATER = (
    "The water cycle describes how water moves on our planet. The sun warms the sea, and some of "
    "the water becomes vapour. The vapour rises with the warm air. High above the ground the air is "
    "cold, so the vapour turns into small drops, and many drops together are a cloud. When the "
    "drops grow heavy, they fall as rain or snow. Part of the rain flows in rivers back to the sea. "
    "The rest sinks into the ground, where plants drink it with their roots, or it comes to light "
    "again in a spring. Then the"
)
water_ids = tokenizer.encode(WATER).ids
LAST = 40


def loss(stay):
    """The loss of the last 40 tokens. `stay` gets the list of slots, and returns those that stay."""
    return loss_without(model, water_ids, LAST, stay)


print(f"{len(water_ids)} tokens; with all slots the loss is {loss(lambda slots: slots):.2f}")

# %%
predictions.ask(
    "sink",
    "Some slots are taken away. In which case is the loss largest?",
    [
        "slot 0, the first word, “The”",
        "slots 1 to 20",
        "everything except slot 0 and the last 32 slots",
    ],
)

# %% tags=["figure-losses"]
from tutorial_engine.viz import losses_picture

TRIED = {
    "all slots": lambda slots: slots,
    "without slot 0": lambda slots: [s for s in slots if s != 0],
    "without slots 1 to 20": lambda slots: [s for s in slots if not 1 <= s <= 20],
    "only slot 0 and the last 32": lambda slots: slots[:1] + slots[1:][-32:],
    "only the last 33": lambda slots: slots[-33:],
}
losses = {name: loss(stay) for name, stay in TRIED.items()}
harm = [losses[name] for name in [*TRIED][1:4]]
chosen = predictions.reveal("sink", harm.index(max(harm)))
losses_picture(losses, LAST) if chosen else None

# %% [markdown]
# In this text slot 0 alone is worth more than twenty others, and more than half of the text. Yet it holds the word "The". Why?

# %% tags=["figure-first-slot"]
from tutorial_engine.lab import first_slot
from tutorial_engine.viz import first_slot_picture

first_slot_picture(*first_slot(model, water_ids))

# %% [markdown]
# The shares of a softmax always sum to 1. A head that finds nothing must still put its attention somewhere. It has learned to put
# it on slot 0, which every token sees, and whose V is short, so that it adds little. If slot 0 is gone, this attention
# falls on slots with long values, which probably disturbs all layers.
# [Xiao et al. 2023](https://arxiv.org/abs/2309.17453) call it an *attention sink*. (Layers 0 to 2, 10 and 11 are exceptions: hardly any
# attention goes to slot 0 there, and its V is not short.)

# %% [markdown]
# So a cache that drops old tokens keeps the first ones: llama.cpp has `--keep` for its context shift (notebook 04: the oldest
# tokens go when the cells are full), and StreamingLLM keeps four. Both also give the tokens that stay new positions; here they keep
# theirs. OpenAI's gpt-oss adds one learned term for each head to the sum in the denominator of the softmax. It takes the
# attention that is left over, so no slot has to.

# %% [markdown]
# ### Exercise 3: what stays? (5 minutes)
#
# Write the policy: of a list of slots, the first `first` and the last `last` stay, in their order, each once. There may be fewer
# slots than that.
#
# <details><summary>Hint</summary>What does <code>slots[-last:]</code> give when <code>last</code> is 0?</details>


# %% tags=["exercise"]
def keep(slots, first, last):
    """Which of these slots stay: the first few and the last few. -> list"""
    ### BEGIN SOLUTION
    count = len(slots)
    return [slot for i, slot in enumerate(slots) if i < first or i >= count - last]
    ### END SOLUTION


# %%
from tutorial_engine.learn import check_keep

mine.use(keep, check_keep)

# %% [markdown]
# Now your own cache works with it. The two numbers below are a bad choice. Find better ones: at most 33 slots stay, and the loss is at most
# 0.2 above that of the full cache. (It runs 40 tokens one by one: some seconds.)
#
# <details><summary>One answer</summary><code>first, last = 1, 32</code>. For this text, 1 and 20 are enough, too.</details>

# %%
first, last = 0, 33


def stay(slots):
    return mine.parts("keep", slots, first, last)


more = mine.loss(WATER, LAST, stay) - losses["all slots"]
print(f"{first} first and {last} last slots: the loss is {more:.2f} above that of all slots")
good = first + last <= 33 and more <= 0.2
print("✔ for this text, a third of the slots is nearly enough" if good else "Try two others.")

# %% [markdown]
# ## 4 · A conversation is a prefix cache
#
# **Objective:** see what your prefix cache, scheduler and block tables do for one person who talks to a model.
#
# A model remembers nothing between two questions. Each turn sends the whole conversation again. So the prompt of
# a turn begins with all that was said before. The next cell makes an engine with pages and brings your parts of all
# notebooks into it.

# %%
server = OwnServer(model, tokenizer, memory="pages", num_blocks=8, block_size=16)
print(bring(server, "01_attention_rope.ipynb"))
print(bring(server, "02_kv_cache.ipynb"))
print(bring(server, "03_scheduler.ipynb"))
print(bring(server, "04_paged_cells.ipynb"))
print(bring(server, "05_sharing.ipynb"))

# %%
from tutorial_engine.lab import Conversation

QUESTIONS = ["What is the capital of France?", "And of Italy?", "Which of the two is older?"]
options = {"max_num_seqs": 1, "max_model_len": 128}


def talk(**more):
    """Three turns with an engine of your parts."""
    conversation = Conversation(server.engine(**options, **more), template)
    for question in QUESTIONS:
        conversation.say(question)
    return conversation


talked = talk()
for turn in talked.turns:
    number = len(turn.prompt_token_ids)
    print(f"you:   {turn.question}\nmodel: {turn.answer}")
    print(f"       [{number} prompt tokens, {len(turn.token_ids)} of the answer]")

# %%
predictions.ask(
    "turns",
    "Blocks have 16 tokens. Of the 84 prompt tokens of the third turn, how many does your `find` find in the cache?",
    ["0", "37", "64", "80"],
)

# %%
found = [turn.num_found for turn in talked.turns]
if predictions.reveal("turns", found[-1]):
    for turn in talked.turns:
        total = len(turn.prompt_token_ids)
        print(f"{total} prompt tokens: {turn.num_found} found, {total - turn.num_found} run")

# %% [markdown]
# (The last answer does not answer the question: it is a very small model.)
#
# When the second turn had ended, K and V of its prompt and of its answer were in the cache: four full blocks, and a
# fifth one that was not full. Below is the step in which the third turn (T3) starts. It takes the four blocks from
# the turns before it, by their hashes. Look at blocks 0 to 3: *found again*.

# %% tags=["figure-conversation"]
from tutorial_engine.viz import block_view

trace = talked.engine.trace.trace()
used = sorted({i for turn in talked.turns for i in (*turn.prompt_token_ids, *turn.token_ids)})
labels = {i: token_label(tokenizer, i) for i in used}
third = sum(len(turn.token_ids) for turn in talked.turns[:2])  # each step brought one token
block_view(trace, step=third, labels=labels)

# %% [markdown]
# The user notices this: only the tokens that were not found must run before the first new one can be chosen.
# The next cell talks once more without a prefix cache, and measures the time to the first token (TTFT) of each turn. (Turn 1
# does the same work in both. The difference there is noise.)

# %% tags=["figure-first-tokens", "nbval-ignore-output"]
from tutorial_engine.viz import first_tokens_picture

without = talk(prefix_caching=False)
waits = {
    name: [(len(turn.prompt_token_ids), turn.num_found, turn.ttft) for turn in one.turns]
    for name, one in {"with the prefix cache": talked, "without": without}.items()
}
first_tokens_picture(waits)

# %% [markdown]
# **Eight users.** A service tells its model first what it is to be: the *system prompt*. It is the same for all users. Eight
# users ask one question each. (Here the package's parts run: they are faster, and speed is what we look at.)

# %% jupyter={"source_hidden": true}
SYSTEM = (
    "You are a guide in a museum of science. Answer in one short sentence, with simple words that a "
    "child understands. Speak of science and of its history, and of nothing else. If you do not know "
    "an answer, say so, and name the room of the museum where the visitor can find out more."
)
ASKED = [
    *("What is a magnet?", "Why is the sky blue?", "Who was Marie Curie?", "What is a star?"),
    *("How do birds fly?", "What is DNA?", "Why does ice float?", "What is a fossil?"),
]


def asked(text):
    """The prompt of one of them: what the service says, and the question."""
    roles = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return template.prompt(tokenizer, roles)


# %% jupyter={"source_hidden": true}
from time import perf_counter

from tutorial_engine.cache import PagedKVCache
from tutorial_engine.engine import EngineConfig, LLMEngine

limits = EngineConfig(max_num_seqs=8, max_model_len=256)


def eight(together, prefix_caching=True):
    """Serve the eight; their outputs, the blocks in use at most, and seconds."""
    pool = PagedKVCache.from_config(c, num_blocks=96, block_size=16, prefix_caching=prefix_caching)
    engine = LLMEngine(model, tokenizer, limits, memory=pool)
    waiting, outputs, most, began = list(ASKED), {}, 0, perf_counter()
    while waiting or engine.has_unfinished_requests():
        while waiting and (together or not engine.has_unfinished_requests()):
            text = waiting.pop(0)
            engine.add_request(text, asked(text), SamplingParams(max_tokens=16))
        outputs |= {output.request_id: output for output in engine.step()}
        most = max(most, pool.blocks.num_blocks - pool.blocks.num_free)
    return [outputs[text] for text in ASKED], most, perf_counter() - began


# %%
shared, blocks_shared, seconds = eight(together=True)
alone, _, seconds_alone = eight(together=False)
apart, blocks_apart, _ = eight(together=True, prefix_caching=False)
print("prompt tokens:         ", [len(output.prompt_token_ids) for output in shared])
print("found in the cache:    ", [output.num_cached_tokens for output in shared])
print(f"blocks in use at most:  {blocks_shared}, without sharing {blocks_apart}")
same = [output.outputs[0].token_ids for output in shared] == [
    output.outputs[0].token_ids for output in apart
]
print("the same tokens:       ", same)

# %% tags=["nbval-ignore-output"]
tokens = sum(len(output.outputs[0].token_ids) for output in shared)
print(
    f"one after the other: {tokens / seconds_alone:.0f} tokens/s; together: {tokens / seconds:.0f}"
)

# %% [markdown]
# All eight are admitted in one step. The first one runs the system prompt, and the other seven find its blocks in
# the same step, as in notebook 05. Sharing saves blocks and the prompts' work. That eight together are faster than one after the other
# comes mostly from batching (notebook 03): one pass over the weights serves all.
#
# **Talk to it.** Write a line and press Enter. Your parts answer, five to ten tokens a second. Below each answer you see what
# was found. (*Interrupt the kernel* ends an answer.) It is a very small model: it knows many things, and believes others that are
# not so.

# %%
from tutorial_engine.viz import ChatBox

large = server.engine(max_num_seqs=1, max_model_len=1024, num_blocks=64)
box = ChatBox(Conversation(large, template, SamplingParams(max_tokens=80)))
box

# %% [markdown]
# In a terminal, `make chat` does the same with the package's parts. It is as fast as the engine can be on this machine.
#
# ## What you can do now
#
# You have run a real language model with functions that you wrote, token for token like transformers and vLLM. You can find out
# which numbers of a cache carry a piece of information, and you know what such an experiment does not prove. You know which slot
# a cache must keep, and why a conversation gets faster with a prefix cache. This is the end of the series. Where to go
# on: [Reading on](../docs/reading-on.md).

# %%
print(predictions.score())
