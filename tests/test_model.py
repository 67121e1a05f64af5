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

from tutorial_engine.model import attention
from tutorial_engine.model import qwen3 as model
from tutorial_engine.model.attention import AttentionBackend, NaiveAttention, SdpaAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.layers import RMSNorm, SiluAndMul, can_prepack
from tutorial_engine.model.qwen3 import Qwen3Attention, Qwen3ForCausalLM
from tutorial_engine.model.rope import apply_rope

LENGTHS = [1, 40, 7, 13]
BACKENDS = {"naive": NaiveAttention(), "sdpa": SdpaAttention()}


class Case(NamedTuple):
    """A saved checkpoint, prompts of unequal length, and transformers' logits for them."""

    folder: Path
    sequences: list[list[int]]
    logits: Tensor


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
        return Case(folder, sequences, reference_logits(reference, sequences))


@pytest.mark.parametrize("prepack", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_equal_transformers(case: Case, backend: str, prepack: bool) -> None:
    ours = load_model(case.folder, prepack=prepack)
    assert ours.lm_head.is_packed == (prepack and can_prepack(ours.device, ours.dtype))
    logits = our_logits(ours, case.sequences, BACKENDS[backend])
    assert largest_difference(logits, case.logits) <= fp32_tolerance(case.logits)


def test_reference_is_worth_comparing_with(case: Case) -> None:
    # logits of many sizes and many winners: a model that says one thing always proves nothing
    assert case.logits.std() > 0.5
    assert case.logits.argmax(-1).unique().numel() > 10


def test_shipped_model_equals_transformers() -> None:
    text = "Once upon a time Anna had a red kite."
    ids = load_tokenizer(TINY).encode(text).ids
    theirs = reference_logits(load_reference(TINY), [ids])
    ours = our_logits(load_model(TINY), [ids])
    assert largest_difference(ours, theirs) <= fp32_tolerance(theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batched_equals_alone(default_case: Case, backend: str) -> None:
    ours = load_model(default_case.folder)
    alone = [our_logits(ours, [ids], BACKENDS[backend]) for ids in default_case.sequences]
    together = our_logits(ours, default_case.sequences, BACKENDS[backend])
    assert largest_difference(together, torch.cat(alone)) <= fp32_tolerance(together)


def test_attention_weights_equal_transformers(default_case: Case) -> None:
    ids = default_case.sequences[1]
    seen: dict[int, Tensor] = {}
    observer = NaiveAttention(observe=lambda layer, _, weights: seen.update({layer: weights}))
    our_logits(load_model(default_case.folder), [ids], observer)
    theirs = load_reference(default_case.folder)(torch.tensor([ids]), output_attentions=True)
    assert sorted(seen) == list(range(len(theirs.attentions)))
    for layer, weights in enumerate(theirs.attentions):
        torch.testing.assert_close(seen[layer], weights[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("prepack", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_is_as_near_to_the_truth_as_transformers(
    default_case: Case, backend: str, prepack: bool
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
    ours = our_logits(
        load_model(default_case.folder, dtype=torch.bfloat16, prepack=prepack),
        sequences,
        BACKENDS[backend],
    )
    assert ours.dtype == torch.float32
    our_error, their_error = rms(ours - truth), rms(theirs - truth)
    assert our_error <= 1.25 * their_error
    assert our_error <= 0.02 * rms(truth)
    assert rms(ours - theirs) <= 0.03 * rms(truth)


def interleaved_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Wrong for these checkpoints: pairs (0, 1), (2, 3), ... instead of (i, i + D / 2)."""
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


class NormAfterRope:
    """A stand-in for apply_rope and both norms that does them in the wrong order."""

    def __init__(self) -> None:
        self.pending: list[RMSNorm] = []

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        self.pending.append(norm)
        return x

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return RMSNorm.forward(self.pending.pop(0), apply_rope(x, cos, sin))


def plant(bug: str, patch: pytest.MonkeyPatch, ours: Qwen3ForCausalLM) -> None:
    """Build one well-known mistake into the engine."""
    right = attention.naive_attention
    heads = [m for m in ours.modules() if isinstance(m, Qwen3Attention)]
    if bug == "interleaved RoPE":
        patch.setattr(model, "apply_rope", interleaved_rope)
    elif bug == "norm after RoPE":
        wrong = NormAfterRope()
        patch.setattr(model, "apply_rope", wrong.rope)
        for norm in (norm for m in heads for norm in (m.q_norm, m.k_norm)):
            patch.setattr(norm, "forward", lambda x, norm=norm: wrong.norm(norm, x))
    elif bug == "no q_norm and k_norm":
        for norm in (norm for m in heads for norm in (m.q_norm, m.k_norm)):
            patch.setattr(norm, "forward", lambda x: x)
    elif bug == "modulo head mapping":
        patch.setattr(
            attention,
            "naive_attention",
            lambda q, k, v, mask: right(
                q, *(x.repeat(1, q.shape[1] // x.shape[1], 1) for x in (k, v)), mask
            ),
        )
    elif bug == "no scale":
        patch.setattr(
            attention, "naive_attention", lambda q, k, v, mask: right(q, k, v, mask, scale=1.0)
        )
    elif bug == "gate and up swapped":
        swapped = SiluAndMul.forward
        patch.setattr(
            SiluAndMul, "forward", lambda self, x: swapped(self, x.roll(x.shape[-1] // 2, -1))
        )
    else:
        assert bug == "nothing", bug


@pytest.mark.parametrize(
    "bug",
    [
        "interleaved RoPE",
        "norm after RoPE",
        "no q_norm and k_norm",
        "modulo head mapping",
        "no scale",
        "gate and up swapped",
    ],
)
def test_planted_bug_is_caught(
    default_case: Case, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    ours = load_model(default_case.folder)
    plant(bug, monkeypatch, ours)
    logits = our_logits(ours, default_case.sequences, BACKENDS["naive"])
    tolerance = fp32_tolerance(default_case.logits)
    assert largest_difference(logits, default_case.logits) > 100 * tolerance


def test_nothing_planted_is_not_caught(default_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = load_model(default_case.folder)
    plant("nothing", monkeypatch, ours)
    logits = our_logits(ours, default_case.sequences, BACKENDS["naive"])
    assert largest_difference(logits, default_case.logits) <= fp32_tolerance(default_case.logits)


@pytest.mark.parametrize("backend", BACKENDS.values())
def test_one_sequence_never_touches_another(default_case: Case, backend: AttentionBackend) -> None:
    ours = load_model(default_case.folder)
    first, second, third = random_sequences([9, 9, 9], 300)
    before = our_logits(ours, [first, second, third], backend)
    after = our_logits(ours, [first, second[::-1], third], backend)
    torch.testing.assert_close(after[:9], before[:9], atol=1e-5, rtol=0)
    torch.testing.assert_close(after[18:], before[18:], atol=1e-5, rtol=0)
    assert largest_difference(after[9:18], before[9:18]) > 1


def test_later_tokens_change_nothing_before_them(default_case: Case) -> None:
    ours = load_model(default_case.folder)
    ids = default_case.sequences[1]
    short, whole = our_logits(ours, [ids[:11]]), our_logits(ours, [ids])
    assert largest_difference(short, whole[:11]) <= fp32_tolerance(whole)


def test_only_distances_matter(default_case: Case) -> None:
    ours = load_model(default_case.folder)
    here, there = (
        ours.compute_logits(ours(Batch.from_sequences([default_case.sequences[1]], [start])))
        for start in (0, 100)
    )
    assert largest_difference(here, there) <= fp32_tolerance(here)


def test_logits_of_chosen_rows_are_those_rows(default_case: Case) -> None:
    ours = load_model(default_case.folder)
    batch = Batch.from_sequences(default_case.sequences)
    hidden = ours(batch)
    last = list(batch.last_token_indices)
    chosen, every = ours.compute_logits(hidden[last]), ours.compute_logits(hidden)
    assert largest_difference(chosen, every[last]) <= fp32_tolerance(every)


@pytest.mark.parametrize("ids", [[5, 300], [5, 10**6], [5, -1, 7]])
def test_id_outside_the_vocabulary_is_named(checkpoint: Path, ids: list[int]) -> None:
    ours = load_model(checkpoint)
    before = our_logits(ours, [[5, 7]])
    batch = Batch(torch.tensor(ids), torch.arange(len(ids)), (0, len(ids)))
    with pytest.raises(ValueError, match=rf"token id {ids[1]} is outside.*0\s+to 299"):
        ours(batch)
    assert torch.equal(our_logits(ours, [[5, 7]]), before)


@pytest.mark.parametrize(("sequence", "named"), [([], "empty"), ([-4], "-4")])
def test_model_works_after_a_refused_prompt(
    checkpoint: Path, sequence: list[int], named: str
) -> None:
    ours = load_model(checkpoint)
    with pytest.raises(ValueError, match=named):
        our_logits(ours, [sequence])
    assert our_logits(ours, [[4]]).isfinite().all()


def test_parameters_are_counted_as_transformers_counts_them(case: Case) -> None:
    theirs = load_reference(case.folder).num_parameters()
    for prepack in (True, False):
        assert load_model(case.folder, prepack=prepack).num_parameters() == theirs


def test_qwen3_06b_has_596_million_parameters() -> None:
    with torch.device("meta"):
        shape = Qwen3ForCausalLM(QWEN3_06B)
    assert shape.num_parameters() == 596_049_920


def test_fresh_model_computes_without_a_checkpoint(checkpoint: Path) -> None:
    fresh = Qwen3ForCausalLM(ModelConfig.from_pretrained(checkpoint)).draw_weights()
    logits = our_logits(fresh, [[1, 2, 3]])
    assert logits.shape == (3, 300) and logits.isfinite().all()
    assert fresh.prepack() == can_prepack(fresh.device, fresh.dtype)
    torch.testing.assert_close(our_logits(fresh, [[1, 2, 3]]), logits, atol=1e-5, rtol=0)
