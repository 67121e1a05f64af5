"""Looking into the model: the residual stream, and heads that give what they gave elsewhere."""

import pytest
import torch
from tokenizers import Tokenizer

from tutorial_engine.lab.patching import Patched, patch_heads, residual_stream
from tutorial_engine.learn.parts.engine import IN_01, OwnEngine
from tutorial_engine.learn.stories import slips
from tutorial_engine.model.attention import NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.model.decoder import CausalLM

STORY = "Once upon a time Rado had an old coat. One day R"
NAMES = {"Rado": "a", "Rido": "id", "Redo": "ed", "Reno": "en"}
SLIPS = {
    "project": slips.heads_crosswise,
    "attention": slips.softmax_over_queries,
    "window_mask": slips.blind_to_itself,
    "rope": slips.turn_neighbours,
    "layer": slips.without_residual,
}


@pytest.fixture(scope="module")
def tiny() -> tuple[CausalLM, Tokenizer]:
    return load_model(), load_tokenizer()


def test_the_stream_after_the_last_layer_is_what_the_logits_are_made_of(
    tiny: tuple[CausalLM, Tokenizer],
) -> None:
    model, tokenizer = tiny
    ids = tokenizer.encode(STORY).ids
    streams = dict(residual_stream(model, ids))
    layers = range(model.config.num_hidden_layers)
    assert [*streams] == ["embedding", *(f"after layer {i}" for i in layers)]
    hidden = model(Batch.from_sequences([ids]), NaiveAttention())
    last = model.model.norm(streams[f"after layer {layers[-1]}"])
    assert torch.allclose(last, hidden, atol=1e-5)


def test_the_copying_heads_bring_the_name_of_the_other_text_and_no_others_do(
    tiny: tuple[CausalLM, Tokenizer],
) -> None:
    others = {name: STORY.replace("Rado", name) for name in NAMES}
    brought = patch_heads(*tiny, STORY, others, 3, (3, 4, 5))
    assert {patch.name: patch.piece for patch in brought} == NAMES
    assert all(patch.probability > 0.9 for patch in brought)
    control = patch_heads(*tiny, STORY, others, 3, (0, 1, 2))
    assert {patch.piece for patch in control} == {"a"}
    assert brought[0] == control[0], "what heads gave in the same text changes nothing"


def test_only_these_heads_of_this_layer_at_the_last_token_are_patched(
    tiny: tuple[CausalLM, Tokenizer],
) -> None:
    batch = Batch.from_sequences([[1, 2, 3]])
    q, k, v = torch.randn(3, 6, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    plain = NaiveAttention().attend(3, q, k, v, batch)
    patched = Patched(3, [1, 4], torch.full((2, 8), 7.0))
    out = patched.attend(3, q, k, v, batch)
    assert torch.equal(patched.gave, plain[-1, [1, 4]])
    assert bool((out[-1, [1, 4]] == 7).all())
    out[-1, [1, 4]] = plain[-1, [1, 4]]
    assert torch.equal(out, plain)
    assert torch.equal(patched.attend(2, q, k, v, batch), plain)


@pytest.mark.parametrize("part", SLIPS)
def test_a_slip_fits_every_shape_and_tells_another_story(
    part: str, tiny: tuple[CausalLM, Tokenizer]
) -> None:
    engine = OwnEngine(*tiny)
    assert part in IN_01
    right = engine.story(STORY)
    with engine.trying({part: SLIPS[part]}):
        assert engine.story(STORY) != right
    assert engine.story(STORY) == right
