"""What plots and pictures of the model tell is what was measured, and what the model does."""

import math
from dataclasses import replace

import pytest
import torch
from checkpoints import QWEN3_06B
from inputs import (
    K,
    Q,
    V,
    dial_point,
    kv_numbers,
    pool_picture,
    recorded_softmax,
)
from tokenizers import Tokenizer
from traces import box, items, plot_words
from transformers import AutoModelForCausalLM

from tutorial_engine.lab.layouts import ORDERS, KVLayout, layouts
from tutorial_engine.model.attention import NaiveAttention, naive_attention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.trace.pool import CELLS, ROWS
from tutorial_engine.viz import cache_plots
from tutorial_engine.viz.induction_view import recorded_two_steps, two_steps_picture
from tutorial_engine.viz.layout_plots import LAYERS, layouts_picture
from tutorial_engine.viz.model_plots import (
    far_value,
    gqa_picture,
    qkv_picture,
    recorded_projection,
    three_token_picture,
)
from tutorial_engine.viz.parts import part_of, shade
from tutorial_engine.viz.picture import Picture
from tutorial_engine.viz.request_look import look
from tutorial_engine.viz.scene import HATCHED
from tutorial_engine.viz.shapes import ShapeStep, meta_shape_walk, shape_walk
from tutorial_engine.viz.softmax_view import running_softmax_picture
from tutorial_engine.viz.style import PAPER
from tutorial_engine.viz.tokens import token_labels

# -- one layer, q, k and v, and attention ----------------------------------------------------------


PROMPT = "Once upon a time <Anna> had a red $kite$."


def text(picture: Picture, name: str) -> str:
    return items(picture)[name].text or ""


@pytest.mark.parametrize(("layer", "token"), [(0, 4), (2, -1)])
def test_recorded_q_k_and_v_are_those_of_transformers(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, layer: int, token: int
) -> None:
    ids = tokenizer.encode(PROMPT).ids
    token %= len(ids)
    theirs = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).model
    block = theirs.layers[layer]
    hidden = theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0, token]
    x = block.input_layernorm(hidden)
    found = recorded_projection(model, ids, token, layer)
    torch.testing.assert_close(found.x, x, atol=1e-4, rtol=1e-4)
    linears = (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)
    for linear, w, y in zip(linears, found.weights, found.results, strict=True):
        torch.testing.assert_close(w, linear.weight)
        torch.testing.assert_close(y, linear(x), atol=1e-4, rtol=1e-4)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("layer", [0, 3])
def test_numbers_of_the_picture_of_q_k_and_v_are_those_of_the_run(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, layer: int
) -> None:
    ids = tokenizer.encode(PROMPT).ids
    place = token_labels(tokenizer, ids).index("$")
    picture = qkv_picture(model, tokenizer, ids, place, layer=layer)
    run = recorded_projection(model, ids, place, layer)

    def cells(name: str) -> list[float]:
        shown = (text(picture, f"{name}{i}.value") for i in (0, 1, 7, 9))
        return [float(word.replace("−", "-")) for word in shown]

    for x, w, product, i in zip(*map(cells, ("x", "w", "products")), (0, 1, 7, -1), strict=True):
        assert [x, w] == pytest.approx([run.x[i].item(), run.weights[0][36, i].item()], abs=0.006)
        assert product == pytest.approx(float(run.x[i] * run.weights[0][36, i]), abs=0.006)
    number = f"{float(run.results[0][36]):.2f}".replace("-", "−")
    assert text(picture, "sum.value") == number
    assert f"give {number}, number 4 of head 1 of q" in picture.caption
    found, far = items(picture), far_value(run.results)
    assert 0.08 < float((torch.cat(run.results).abs() > far).float().mean()) < 0.12
    for name, values in zip("qkv", run.results, strict=True):
        fills = [found[f"{name}{i}"].attrib["fill"] for i in range(len(values))]
        assert fills == [shade(part_of(value, (-far, far))) for value in values.tolist()]


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (16, 8), (4, 4), (8, 1), (64, 8)])
def test_query_heads_lead_to_the_head_that_attention_gives_them(heads: int, kv_heads: int) -> None:
    config = replace(QWEN3_06B, num_attention_heads=heads, num_key_value_heads=kv_heads)
    picture = gqa_picture(config)
    # one value for each K/V head: what a query head returns says which one it read
    k, v = torch.zeros(1, kv_heads, 2), torch.arange(kv_heads).float().view(1, kv_heads, 1)
    read = naive_attention(torch.zeros(1, heads, 2), k, v).out.flatten().int().tolist()
    found = items(picture)
    for h, g in enumerate(read):
        x, _, width, _ = box(found[f"kv{g}"])
        assert float(found[f"line{h}"].attrib["x2"]) == pytest.approx(x + width / 2, abs=0.02)
    wrong = sum(h % kv_heads != g for h, g in enumerate(read))
    assert (f"{wrong} of {heads} query heads would read" in picture.caption) == bool(wrong)


@pytest.mark.parametrize("values", [V, torch.tensor([[1.0, -2.0], [0.5, 3.0], [0.0, 0.25]])])
def test_numbers_of_the_three_tokens_are_those_of_attention(values: torch.Tensor) -> None:
    picture = three_token_picture(Q, K, values)
    found = naive_attention(Q[:, None], K[:, None], values[:, None])
    for i in range(3):
        for j in range(3):
            assert float(text(picture, f"score{i}{j}.value")) == float(Q[i] @ K[j])
        share = float(found.weights[0, -1, i])
        assert text(picture, f"percent{i}") == f"{100 * share:.0f} %"
        assert text(picture, f"mix{i}").startswith(f"{share:.3f} · (")
    x, y = found.out[-1, 0].tolist()
    assert text(picture, "out") == f"output = ({x:.1f}, {y:.1f})"
    assert picture.caption.endswith(f"give the output ({x:.1f}, {y:.1f}).")


# -- an induction head -----------------------------------------------------------------------------


COAT = "Once upon a time {} had an old coat. One day R"


FIRST, SECOND = (1, (3, 5)), (3, 3)


class NoValues(NaiveAttention):
    """At one token the heads of step 1 read values of zero; keeps what step 2 looks at."""

    def __init__(self, token: int) -> None:
        super().__init__(lambda layer, _, weights: self.seen.update({layer: weights}))
        self.seen: dict[int, torch.Tensor] = {}
        self.token = token

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        out = super().attend(layer, q, k, v, batch)
        if layer == FIRST[0]:
            for head in FIRST[1]:
                out[self.token, head] = super().attend(layer, q, k, 0 * v, batch)[self.token, head]
        return out


@pytest.mark.parametrize(("name", "piece"), [("Rado", "a"), ("Reno", "en")])
def test_numbers_of_the_two_steps_are_those_of_the_model(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, name: str, piece: str
) -> None:
    ids = tokenizer.encode(COAT.format(name)).ids
    run = recorded_two_steps(model, ids, FIRST, SECOND)
    assert (ids[run.before], ids[run.found]) == (ids[-1], tokenizer.token_to_id(piece))
    seen: dict[int, torch.Tensor] = {}
    naive = NaiveAttention(lambda layer, _, weights: seen.update({layer: weights}))
    probs = model.compute_logits(model(Batch.from_sequences([ids]), naive))[-1].softmax(-1)
    without = NoValues(run.found)
    changed = model.compute_logits(model(Batch.from_sequences([ids]), without))[-1].softmax(-1)
    firsts = [float(seen[1][head, run.found, run.before]) for head in FIRST[1]]
    assert run.first == pytest.approx(sum(firsts) / 2, abs=1e-4)
    numbers = {
        run.second: seen[3][3, -1, run.found],
        run.chance: probs[ids[run.found]],
        run.second_without: without.seen[3][3, -1, run.found],
        run.chance_without: changed[ids[run.found]],
    }
    assert [*numbers] == pytest.approx([float(one) for one in numbers.values()], abs=1e-4)
    assert run.second_without < run.second / 2 and run.chance_without < run.chance / 2
    picture = two_steps_picture(model, tokenizer, ids, FIRST, SECOND)
    said = {item.text for item in items(picture).values()}
    shown = {f"{one:.2f}" for one in numbers}
    assert shown <= said and all(one in picture.caption for one in shown)
    assert (
        f"“{piece}” after “·R”" in said
        and f"the last “·R” finds it, share {run.second:.2f}" in said
    )


# -- the running softmax ---------------------------------------------------------------------------


where = pytest.mark.parametrize(
    ("layer", "head", "block_size"), [(0, 0, 4), (0, 4, 4), (2, 5, 3), (3, 1, 8), (1, 2, 2)]
)


@where
def test_each_step_has_the_sums_of_all_scores_so_far(
    layer: int, head: int, block_size: int
) -> None:
    run, scores = recorded_softmax(layer, head, block_size), list[float]()
    old = -math.inf
    for step in run.steps:
        scores += step.scores
        assert step.m == max(scores)
        total = sum(math.exp(score - step.m) for score in scores)
        assert step.total == pytest.approx(total, rel=1e-5)
        if step.correction is not None:
            assert step.correction == pytest.approx(math.exp(old - step.m))
        old = step.m
    assert len(scores) == len(run.labels) and run.steps[0].correction is None


@where
def test_the_last_answer_is_what_the_model_computed(layer: int, head: int, block_size: int) -> None:
    run = recorded_softmax(layer, head, block_size)
    for other in (run.whole, run.steps[-1].answer):
        torch.testing.assert_close(torch.tensor(run.returned), torch.tensor(other))
    assert run.distance(0) > 0.1 > 1e-4 > run.distance(-1)


@where
def test_the_picture_writes_the_numbers_of_each_block(
    layer: int, head: int, block_size: int
) -> None:
    run = recorded_softmax(layer, head, block_size)
    picture = running_softmax_picture(run)
    seen = items(picture)
    for i, step in enumerate(run.steps):
        assert seen[f"block.{i}.pool"].text == f"in block {step.block}"
        assert seen[f"m.{i}"].text == f"{step.m:.2f}".replace("-", "−")
        assert seen[f"l.{i}"].text == f"{step.total:.2f}"
        for offset, score in enumerate(step.scores):
            at = i * block_size + offset
            assert seen[f"score.{at}"].text == f"{score:.2f}".replace("-", "−")
            part = float(seen[f"bar.{at}"].attrib["width"])
            whole = float(seen[f"bar.{at}.track"].attrib["width"])
            assert part == pytest.approx(max(whole * math.exp(score - step.m), 0.5), abs=0.01)
    risen = [s for s in run.steps if s.correction is not None and s.correction < 1]
    for step in risen:
        assert f"multiplied by {step.correction:.3g}" in picture.caption
    assert ("nothing is corrected" in picture.caption) == (not risen)
    assert seen["distance.0"].text == f"{run.distance(0):.2g}"
    assert seen[f"distance.{len(run.steps) - 1}"].text == "< 0.0001 ✔"


def test_an_answer_that_is_wrong_is_not_called_right() -> None:
    run = recorded_softmax()
    bad = run._replace(returned=tuple(number + 1 for number in run.returned))
    assert "differs by 1" in (items(running_softmax_picture(bad))["whole.below"].text or "")
    uncorrected = run.steps[-1]._replace(acc=tuple(2 * number for number in run.steps[-1].acc))
    bad = run._replace(steps=(*run.steps[:-1], uncorrected))
    assert "✔" not in running_softmax_picture(bad).caption


# -- shapes ----------------------------------------------------------------------------------------


def by_hand(
    tokens: int, hidden: int, mlp: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> list[ShapeStep]:
    """The stops of any dense Qwen3, written down from the architecture; a layer is indented."""
    flat, out = f"[{tokens}, {hidden}]", heads * head_dim
    q, kv = f"[{tokens}, {heads}, {head_dim}]", f"[{tokens}, {kv_heads}, {head_dim}]"
    qkv = out + 2 * kv_heads * head_dim
    both, half = f"[{tokens}, {2 * mlp}]", f"[{tokens}, {mlp}]"
    return [
        ShapeStep("embed_tokens", f"[{tokens}]", flat, vocab * hidden),
        ShapeStep("  input_layernorm", flat, flat, hidden),
        ShapeStep("  qkv_proj", flat, f"[{tokens}, {qkv}]", hidden * qkv),
        ShapeStep("  q_norm", q, q, head_dim),
        ShapeStep("  k_norm", kv, kv, head_dim),
        ShapeStep("  attention: q", q, q, 0),
        ShapeStep("  attention: k and v", kv, "", 0),
        ShapeStep("  o_proj", f"[{tokens}, {out}]", flat, out * hidden),
        ShapeStep("  post_attention_layernorm", flat, flat, hidden),
        ShapeStep("  gate_up_proj", flat, both, 2 * hidden * mlp),
        ShapeStep("  act_fn", both, half, 0),
        ShapeStep("  down_proj", half, flat, mlp * hidden),
        ShapeStep("norm", flat, flat, hidden),
        ShapeStep("lm_head, last rows (= embed)", f"[1, {hidden}]", f"[1, {vocab}]", 0),
    ]


def total(steps: list[ShapeStep], layers: int) -> int:
    """Weights of the whole model, the first layer counted once for each."""
    return sum(s.num_parameters * (layers if s.name.startswith(" ") else 1) for s in steps)


def test_walk_of_the_tiny_model_is_as_by_hand(model: Qwen3ForCausalLM) -> None:
    steps = shape_walk(model, Batch.from_sequences([list(range(1, 11))]))
    assert steps == by_hand(10, hidden=192, mlp=512, heads=6, kv_heads=2, head_dim=32, vocab=512)
    assert total(steps, layers=4) == model.num_parameters()


def test_walk_of_qwen3_06b_needs_only_its_config() -> None:
    steps = meta_shape_walk(QWEN3_06B, num_tokens=10)
    assert steps == by_hand(
        10, hidden=1024, mlp=3072, heads=16, kv_heads=8, head_dim=128, vocab=151_936
    )
    assert total(steps, layers=28) == 596_049_920


# -- the cache in memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_every_number_stands_where_the_memory_has_it(order: str) -> None:
    """The memory itself, byte after byte, against colour and tip of each box."""
    kv = kv_numbers()
    picture = layouts_picture(layouts(kv), layer=1, token=2)
    layout, found = KVLayout(order, kv), items(picture)
    memory = torch.frombuffer(bytearray(layout.kv.untyped_storage().tolist()), dtype=torch.float32)
    for i, value in enumerate(memory.tolist()):
        layer, which, token, head, dim = (int(x) for x in (kv == value).nonzero()[0])
        fill = LAYERS[layer].light if which else LAYERS[layer].dark
        assert found[f"{order}.{i}"].attrib["fill"] == fill
        tip = f"byte {4 * i}: layer {layer}, {'KV'[which]} of token {token}, head {head}, number"
        assert f"{tip} {dim}" in picture.svg
    boxes = [box(found[f"{order}.{i}"]) for i in range(len(memory))]
    assert boxes == sorted(boxes, key=lambda b: (b[1], b[0])) and len(set(boxes)) == len(boxes)


# -- pools -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 6, 11])
@pytest.mark.parametrize("position", [CELLS, 1, 4, 16, ROWS])
def test_each_slot_looks_like_what_is_in_it_and_thick_frames_are_around_the_new(
    position: object, step: int
) -> None:
    point = dial_point(position)
    now, picture = point.snapshots[step], pool_picture(point, step)
    found = items(picture)
    frames = [box(e) for name, e in found.items() if name.startswith("it.new")]
    for slot in range(128):
        who = list(now.tokens.get(slot, ()))
        looks = [look(point.names.index(name)) for name in who]
        want = PAPER if slot not in now.owners else looks[0].dark if who else HATCHED
        assert found[f"it.slot{slot}"].attrib["fill"] == want
        shared = [e.attrib["fill"] for n, e in found.items() if n.startswith(f"it.slot{slot}.sh")]
        assert set(shared) - {"none"} == {one.dark for one in looks[:2] if len(who) > 1}
        x, y, wide, high = box(found[f"it.slot{slot}"])
        middle = (x + wide / 2, y + high / 2)
        framed = any(a < middle[0] < a + c and b < middle[1] < b + d for a, b, c, d in frames)
        assert framed == (slot in now.new)


# -- plots of the cache ----------------------------------------------------------------------------


LINE = [(8, 2.0), (16, 2.0), (32, 2.0), (64, 2.0)]


CROSSINGS = {  # the other line -> where it crosses LINE for the last time
    "between": ([(8, 1.0), (32, 4.0)], 16),
    "never": ([(8, 3.0), (32, 4.0)], None),
    "equal all along": ([(8, 2.0), (32, 2.0)], None),
    "in the noise": ([(8, 1.95), (16, 2.05), (32, 9.0)], None),
    "after the noise": ([(8, 1.0), (16, 2.05), (32, 4.0)], 16),
    "twice": ([(8, 1.0), (16, 3.0), (32, 1.0), (64, 4.0)], 32 * 2**0.5),
    "where it was measured equal": ([(8, 1.0), (16, 2.0), (32, 9.0)], 16),
    "no length in common": ([(128, 3.0), (256, 0.5)], None),
}


@pytest.mark.parametrize("what", CROSSINGS)
def test_crossing_is_where_the_lines_meet_last(what: str) -> None:
    line, where = CROSSINGS[what]
    lines = {"a": LINE, "b": line}
    found = [(length, time) for *_, length, time in cache_plots.crossings(lines)]
    assert found == ([] if where is None else [pytest.approx((where, 2.0))])
    marks = [w for w in plot_words(cache_plots.latency_picture(lines)) if "equal at" in w]
    assert [m for m in marks if m.startswith("equal")] == [f"equal at {n:.0f}" for n, _ in found]
