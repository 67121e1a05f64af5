"""The whole decoder against transformers, and the mistakes that this comparison must catch."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from checkpoints import (
    QWEN3_06B,
    VARIANTS,
    fp32_tolerance,
    largest_difference,
    load_reference,
    our_logits,
    random_sequences,
    reference_logits,
    save_random,
)
from torch import Tensor

from tutorial_engine.learn.bugs import BUGS_01, Zoo, edited, planted
from tutorial_engine.model import attention
from tutorial_engine.model.attention import AttentionBackend, NaiveAttention, SdpaAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import load_model
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.fast import use_fast_layers
from tutorial_engine.model.qwen3 import Qwen3Attention, Qwen3ForCausalLM

LENGTHS = [1, 40, 7, 13]
BACKENDS = {"naive": NaiveAttention(), "sdpa": SdpaAttention()}


class Case(NamedTuple):
    """A saved checkpoint, prompts of unequal length, and what transformers says of them."""

    folder: Path
    sequences: list[list[int]]
    logits: Tensor
    num_parameters: int


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Every configuration in turn, each prompt run alone by transformers."""
    folder = save_random(tmp_path_factory.mktemp("case"), **VARIANTS[request.param])
    return make_case(folder)


@pytest.fixture
def default_case(checkpoint: Path) -> Case:
    """The shared checkpoint, with an uneven number of heads and layers."""
    return make_case(checkpoint)


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def make_case(folder: Path) -> Case:
    reference = load_reference(folder)
    sequences = random_sequences(LENGTHS, reference.config.vocab_size)
    with torch.no_grad():
        logits = reference_logits(reference, sequences)
    # logits of many sizes and many winners: a model that says one thing always proves nothing
    assert logits.std() > 0.5 and logits.argmax(-1).unique().numel() > 10
    return Case(folder, sequences, logits, reference.num_parameters())


def load(folder: Path, fast: bool, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """With the layers of layers.py, or every twin that there is, however small the matrices are."""
    model = load_model(folder, dtype=dtype, fast=False)
    if fast:
        use_fast_layers(model, pack_from=0)
    return model


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_equal_transformers(case: Case, backend: str, fast: bool) -> None:
    ours = load(case.folder, fast)
    assert ours.num_parameters() == case.num_parameters
    logits = our_logits(ours, case.sequences, BACKENDS[backend])
    assert largest_difference(logits, case.logits) <= fp32_tolerance(case.logits)


def test_attention_weights_equal_transformers(default_case: Case) -> None:
    ids = default_case.sequences[1]
    seen: dict[int, Tensor] = {}
    observer = NaiveAttention(observe=lambda layer, _, weights: seen.update({layer: weights}))
    our_logits(load_model(default_case.folder), [ids], observer)
    theirs = load_reference(default_case.folder)(torch.tensor([ids]), output_attentions=True)
    assert sorted(seen) == list(range(len(theirs.attentions)))
    for layer, weights in enumerate(theirs.attentions):
        torch.testing.assert_close(seen[layer], weights[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_is_as_near_to_the_truth_as_transformers(
    default_case: Case, backend: str, fast: bool
) -> None:
    """Measured against the same bf16 weights computed in fp32, which is the truth here.

    One bf16 rounding is off by u = 2 ** -8 at most. About ten of them lie between two values of
    the residual stream, 30 in three layers: sqrt(30) · u ≈ 2 % of a logit if they are independent,
    and sqrt(2) · 2 % ≈ 3 % between two engines that round at different places (seen: 0.8 %, 1.0 %).
    """
    sequences = default_case.sequences
    half = load_reference(default_case.folder, torch.bfloat16)
    theirs = reference_logits(half, sequences)
    truth = reference_logits(half.float(), sequences)
    model = load(default_case.folder, fast, torch.bfloat16)
    ours = our_logits(model, sequences, BACKENDS[backend])
    assert ours.dtype == torch.float32
    our_error, their_error = rms(ours - truth), rms(theirs - truth)
    assert our_error <= 1.25 * their_error
    assert our_error <= 0.02 * rms(truth)
    assert rms(ours - theirs) <= 0.03 * rms(truth)


right_attention = attention.naive_attention
BUGS: Zoo = {
    **BUGS_01,
    "no q_norm and k_norm": edited(
        Qwen3Attention, "forward", ("self.q_norm(q)", "q"), ("self.k_norm(k)", "k")
    ),
    "no scale": (
        attention,
        "naive_attention",
        lambda q, k, v, mask: right_attention(q, k, v, mask, scale=1.0),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_caught_and_without_it_nothing_is(default_case: Case, bug: str) -> None:
    ours, tolerance = load_model(default_case.folder), fp32_tolerance(default_case.logits)
    with planted(bug, BUGS):
        wrong = our_logits(ours, default_case.sequences, BACKENDS["naive"])
    assert largest_difference(wrong, default_case.logits) > 100 * tolerance
    right = our_logits(ours, default_case.sequences, BACKENDS["naive"])
    assert largest_difference(right, default_case.logits) <= tolerance


@pytest.mark.parametrize("backend", BACKENDS.values())
def test_one_sequence_never_touches_another(default_case: Case, backend: AttentionBackend) -> None:
    ours = load_model(default_case.folder)
    first, second, third = random_sequences([9, 9, 9], 300)
    before = our_logits(ours, [first, second, third], backend)
    after = our_logits(ours, [first, second[::-1], third], backend)
    torch.testing.assert_close(after[:9], before[:9], atol=1e-5, rtol=0)
    torch.testing.assert_close(after[18:], before[18:], atol=1e-5, rtol=0)
    assert largest_difference(after[9:18], before[9:18]) > 1


def test_later_tokens_places_and_other_rows_change_nothing(default_case: Case) -> None:
    ours, ids = load_model(default_case.folder), default_case.sequences[1]
    whole = our_logits(ours, [ids])
    hidden = ours(Batch.from_sequences([ids], [100]))
    for same, rows in (
        (our_logits(ours, [ids[:11]]), slice(0, 11)),  # no token sees a later one
        (ours.compute_logits(hidden), slice(None)),  # only distances matter
        (ours.compute_logits(hidden[[3, 7]]), [3, 7]),
    ):
        assert largest_difference(same, whole[rows]) <= fp32_tolerance(whole)


@pytest.mark.parametrize("ids", [[5, 300], [5, 10**6], [5, -1, 7]])
def test_id_outside_the_vocabulary_is_named(checkpoint: Path, ids: list[int]) -> None:
    ours = load_model(checkpoint)
    before = our_logits(ours, [[5, 7]])
    batch = Batch(torch.tensor(ids), torch.arange(len(ids)), (0, len(ids)))
    with pytest.raises(ValueError, match=rf"token id {ids[1]} is outside.*0\s+to 299"):
        ours(batch)
    assert torch.equal(our_logits(ours, [[5, 7]]), before)


def test_qwen3_06b_has_596_million_parameters() -> None:
    with torch.device("meta"):
        shape = Qwen3ForCausalLM(QWEN3_06B)
    assert shape.num_parameters() == 596_049_920


def test_fresh_model_computes_without_a_checkpoint(checkpoint: Path) -> None:
    fresh = Qwen3ForCausalLM(ModelConfig.from_pretrained(checkpoint)).draw_weights()
    logits = our_logits(fresh, [[1, 2, 3]])
    assert logits.shape == (3, 300) and logits.isfinite().all()
