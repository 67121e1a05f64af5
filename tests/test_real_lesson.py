"""Notebook 06: the learner's parts in another model, exchanged cells, lost slots, a chat."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_random
from conftest import need_real
from tokenizers import Tokenizer

from tutorial_engine.cache.paged import PagedKVCache
from tutorial_engine.engine.chat import ChatTemplate
from tutorial_engine.engine.config import EngineConfig
from tutorial_engine.engine.engine import LLMEngine
from tutorial_engine.engine.generate import generate
from tutorial_engine.lab import real
from tutorial_engine.lab.conversation import Conversation
from tutorial_engine.lab.sink import first_slot, loss_without
from tutorial_engine.lab.two_texts import TwoTexts
from tutorial_engine.learn.exercises.lesson_06 import (
    check_find_layer,
    check_keep,
    check_replace_head,
)
from tutorial_engine.learn.parts.cache import EDITS, find_layer, keep, replace_head
from tutorial_engine.learn.parts.earlier import bring
from tutorial_engine.learn.parts.engine import OwnEngine
from tutorial_engine.learn.parts.holder import Parts
from tutorial_engine.learn.parts.model import OwnModel
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import load_model
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.viz.explorers.chat_box import ChatBox
from tutorial_engine.viz.views.first_slot_picture import first_slot_picture
from tutorial_engine.viz.views.first_tokens_picture import first_tokens_picture
from tutorial_engine.viz.views.losses_picture import losses_picture

SOLVED = Path(__file__).resolve().parents[1] / "notebooks" / "solutions"
NAMO = "Namo had an old coat. Tima was a friend of N"
NEDO = "Nedo had an old coat. Tima was a friend of N"
TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)


# -- the learner's parts in another architecture -------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CausalLM]:
    """Random weights of a Llama with another ε, and the tiny model's vocabulary."""
    folder = tmp_path_factory.mktemp("llama")
    save_random(folder, model_type="llama", vocab_size=512, rms_norm_eps=1e-2)
    yield load_model(folder)


def test_the_layer_of_notebook_01_runs_a_llama(llama: CausalLM, tokenizer: Tokenizer) -> None:
    """It normalises q and k, and its ε is in the notebook: both are the package's business."""
    mine = OwnEngine(llama, tokenizer, cached=True)
    brought = bring(mine, str(SOLVED / "01_attention_rope.ipynb"))
    assert all(verdict.ok for verdict in brought.values()) and "layer" in mine.parts.own
    ids = tokenizer.encode(NAMO).ids
    batch = Batch.from_sequences([ids])
    want = llama.compute_logits(llama(batch))
    for parts in (mine.parts, Parts(mine.parts.package)):
        model = OwnModel(llama, parts)
        got = model.compute_logits(model(batch))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    tokens = list(mine.generate(NAMO, params).output_token_ids)
    assert tokens == generate(llama, NAMO, params, tokenizer=tokenizer)[0].outputs[0].token_ids


def test_a_model_with_biases_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, model_type="qwen2")
    with pytest.raises(ValueError, match="layer of notebook 01 adds no bias"):
        OwnModel(load_model(tmp_path), Parts({}))


# -- exchanged cells ------------------------------------------------------------------------------


def test_cells_are_exchanged_alone(model: CausalLM, tokenizer: Tokenizer) -> None:
    """Each against a run with every cell's numbers put in by hand."""
    two = TwoTexts.of(model, tokenizer, NAMO, NEDO)
    am, ed = (tokenizer.encode(text).ids[1] for text in (NAMO, NEDO))
    assert two.slots == (1,) and two.answers == (am, ed)
    cells = two.every_cell()
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    assert cells.shape == (layers, heads, 2)
    mine = OwnEngine(model, tokenizer, cached=True)
    for layer in range(layers):
        for head in range(heads):
            memory, donor = (mine.memory(text, 2) for text in (NAMO, NEDO))
            changed = mine.next_token(replace_head(memory, donor, layer, [1], head), NAMO)
            assert float(changed[ed]) == pytest.approx(float(cells[layer, head, 1]), abs=1e-4)
    all_heads = two.after([two.replace([3]), two.replace([3], "v", [0, 1]), dict])
    torch.testing.assert_close(all_heads[0], all_heads[1])
    assert int(all_heads[0].argmax()) == ed and int(all_heads[2].argmax()) == am
    by_layer = two.after([two.replace([layer]) for layer in range(layers)])
    torch.testing.assert_close(by_layer[3], all_heads[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (("One day", "One day Anna"), "same number of tokens"),
        (("One day", "One day"), "the same"),
        (("Namo had", "Namo has"), "same number of tokens|the last token"),
    ],
)
def test_texts_that_cannot_be_compared(
    model: CausalLM, tokenizer: Tokenizer, texts: tuple[str, str], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        TwoTexts.of(model, tokenizer, *texts)


# -- lost slots -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stay",
    [
        lambda slots: slots,
        lambda slots: keep(slots, 2, 5),
        lambda slots: [s for s in slots if s != 0],
        lambda slots: [],
    ],
)
def test_the_learners_cache_loses_what_the_mask_hides(
    model: CausalLM, tokenizer: Tokenizer, stay: Callable[[list[int]], list[int]]
) -> None:
    mine = OwnEngine(model, tokenizer, cached=True)
    ids = tokenizer.encode(NAMO).ids
    want = loss_without(model, ids, 6, stay)
    assert mine.loss(NAMO, 6, stay) == pytest.approx(want, abs=1e-4)


def test_with_all_slots_it_is_the_loss(model: CausalLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(NAMO).ids
    logits = model.compute_logits(model(Batch.from_sequences([ids])))
    loss = torch.nn.functional.cross_entropy(logits[-7:-1], torch.tensor(ids[-6:]))
    assert loss_without(model, ids, 6, lambda slots: slots) == pytest.approx(float(loss), abs=1e-5)
    shares, lengths = first_slot(model, ids)
    assert len(shares) == len(lengths) == model.config.num_hidden_layers
    assert all(0 <= share <= 1 for share in shares)


def test_the_pictures_say_their_numbers() -> None:
    said = losses_picture({"all slots": 2.0, "without slot 0": 3.25}, 40).caption
    assert said == (
        "With all slots the mean loss is 2.00. The largest of the others is 3.25: without slot 0."
    )
    assert "In 1 layer of 2" in first_slot_picture([0.1, 0.5], [1.0, 0.25]).caption
    waits = {"with it": [(10, 0, 1.0), (20, 16, 0.5)], "without": [(10, 0, 1.0), (20, 0, 2.0)]}
    assert "In turn 2 the first token comes 4.0 times faster" in first_tokens_picture(waits).caption


# -- conversations --------------------------------------------------------------------------------


@pytest.fixture
def talk(model: CausalLM, tokenizer: Tokenizer) -> Conversation:
    pool = PagedKVCache.from_config(model.config, num_blocks=64, block_size=4)
    config = EngineConfig(max_num_seqs=1, max_model_len=256)
    engine = LLMEngine(model, tokenizer, config, memory=pool)
    return Conversation(engine, TEMPLATE, SamplingParams(max_tokens=6, ignore_eos=True))


def test_a_turn_begins_with_all_that_was_said(talk: Conversation) -> None:
    shown: list[str] = []
    first = talk.say("Anna had a red kite.", shown.append)
    second = talk.say("And Ben?")
    assert shown[-1] == first.answer and len(first.token_ids) == 6 and first.num_found == 0
    assert talk.turns == [first, second] and 0 < first.ttft <= first.seconds
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 2
    assert second.num_found > 0, "the first turn is in the prefix cache"
    assert f"{len(second.prompt_token_ids)} tokens in the prompt, {second.num_found} of them" in (
        repr(second)
    )


def test_ctrl_c_ends_an_answer_and_not_the_conversation(talk: Conversation) -> None:
    def stop(text: str) -> None:
        raise KeyboardInterrupt

    turn = talk.say("Anna had a red kite.", stop)
    assert len(turn.token_ids) == 1 and not talk.engine.has_unfinished_requests()
    assert len(talk.say("Go on.").token_ids) == 6


def test_a_chat_box_sends_and_keeps_what_has_no_room(talk: Conversation) -> None:
    box = ChatBox(talk)
    box.line.value = "Anna <b> had a red kite."
    box.send.click()
    assert "Anna &lt;b&gt; had" in box.log.value and "first token after" in box.log.value
    assert box.line.value == "" and not box.line.disabled and len(box.turns) == 1
    box.line.value = "And Ben? " * 200
    box._heard(None, {"event": "submit"}, None)
    assert 'role="alert"' in box.log.value and box.line.value and len(box.turns) == 1
    assert repr(box).startswith("you:   Anna")
    assert {"text/plain"} <= box._repr_mimebundle_().keys()


@pytest.mark.parametrize("where", ["a step", "a request"])
def test_an_answer_that_ends_with_an_error_says_so(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Of the whole step, or of one request: no silent empty answer, and the talk goes on."""

    def fails(*_: object) -> None:
        raise ZeroDivisionError("as a learner's part may")

    with monkeypatch.context() as broken:
        if where == "a step":
            broken.setattr(talk.engine.runner, "run", fails)
        else:
            broken.setattr("tutorial_engine.engine.engine.next_token", fails)
        box = ChatBox(talk)
        box.line.value = "Anna had a red kite."
        box.send.click()
    assert "as a learner&#x27;s part may" in box.log.value and not box.line.disabled
    assert not talk.turns and not talk.messages
    assert len(talk.say("Anna had a red kite.").token_ids) == 6


# -- the exercises --------------------------------------------------------------------------------


def one_by_one(flips: Callable[[list[int]], bool], n: int) -> int | None:
    return next((i for i in range(n) if flips([i])), None)


def to_the_last(flips: Callable[[range], bool], n: int) -> int:
    low, high = 0, n - 1
    while low < high:
        middle = (low + high) // 2
        if flips(range(low, middle)):
            high = middle
        else:
            low = middle + 1
    return low


def never_ends(flips: Callable[[range], bool], n: int) -> int:
    low, high = 0, n
    while low < high:
        low = (low + high) // 2 if not flips(range(low, (low + high) // 2)) else low
    return low


def by_lists(flips: Callable[[list[int]], bool], n: int) -> int:
    left = list(range(n))
    while len(left) > 1:
        half = left[len(left) // 2 :]
        left = half if flips(half) else left[: len(left) // 2]
    return left[0]


def whole_slot(memory: Any, donor: Any, layer: int, slots: list[int], head: int) -> Any:
    memory[layer][1][slots] = donor[layer][1][slots]
    return memory


def into_the_donor(memory: Any, donor: Any, layer: int, slots: list[int], head: int) -> Any:
    donor[layer][1][slots, head] = memory[layer][1][slots, head]
    return memory


def a_new_tensor(memory: Any, donor: Any, layer: int, slots: list[int], head: int) -> Any:
    k, v = memory[layer]
    v = v.clone()
    v[slots, head] = donor[layer][1][slots, head]
    return {**memory, layer: [k, v]}


@pytest.mark.parametrize(
    ("check", "answer", "said"),
    [
        (check_find_layer, find_layer, None),
        (check_find_layer, by_lists, None),
        (check_find_layer, one_by_one, "halving needs at most 1"),
        (check_find_layer, to_the_last, "it returned 1, and the number 0 is expected. It asked: "),
        (check_find_layer, never_ends, "goes on asking"),
        (check_find_layer, lambda flips, n: flips([n]), "about layer 2; there are 0 to 1"),
        (check_find_layer, lambda flips, n: flips(0), "takes a list of layers, and got 0"),
        (check_replace_head, replace_head, None),
        (check_replace_head, a_new_tensor, None),
        (check_replace_head, whole_slot, "wanted: only V of layer 1, slot 3, head 1"),
        (check_replace_head, into_the_donor, "the donor has changed"),
        (
            check_replace_head,
            lambda memory, *_: memory,
            "it changed nothing; wanted: only V of layer 1",
        ),
        (check_replace_head, lambda memory, *_: memory[0], "return the whole memory"),
        (check_keep, keep, None),
        (check_keep, lambda s, f, w: sorted({*s[:f], *s[max(0, len(s) - w) :]}), None),
        (
            check_keep,
            lambda s, f, w: sorted({*s[:f], *s[-w:]}),
            "[0], first 0, last 0; expected []",
        ),
        (check_keep, lambda s, f, w: s[:f] + s[len(s) - w :], "gives [0, 0] for slots [0]"),
        (check_keep, lambda s, f, w: [s.pop() for _ in range(1)], "which it only reads"),
    ],
)
def test_a_check_shows_what_went_wrong(
    check: Callable[[Any], Any], answer: Any, said: str | None
) -> None:
    verdict = check(answer)
    assert verdict.ok is (said is None), verdict
    assert said is None or said in verdict.message


def test_the_edits_are_parts(model: CausalLM, tokenizer: Tokenizer) -> None:
    mine = OwnEngine(model, tokenizer, cached=True)
    plugged = mine.use(by_lists_as_part(), check_find_layer)
    assert "runs in the cells below" in repr(plugged) and "find_layer" in mine.parts.own
    assert mine.parts("find_layer", lambda layers: 5 in layers, 9) == 5
    assert {*EDITS} <= {*mine.parts.package}


def by_lists_as_part() -> Callable[..., int]:
    def find_layer(flips: Callable[[list[int]], bool], num_layers: int) -> int:
        return by_lists(flips, num_layers)

    return find_layer


# -- the model itself -----------------------------------------------------------------------------


def test_what_vllm_said_is_what_is_said_here() -> None:
    recorded = json.loads(real.VLLM_SAID.read_text(encoding="utf-8"))
    prompt = recorded["prompt_token_ids"]
    with pytest.raises(ValueError, match="The capital of France"):
        real.vllm_said(prompt[:-1])
    model = load_model(need_real(), dtype=torch.float32)
    wanted = real.vllm_said(prompt)
    params = SamplingParams(temperature=0, max_tokens=len(wanted))
    assert generate(model, [prompt], params)[0].outputs[0].token_ids == wanted
