"""RoPE: what it keeps, what it depends on, and that its angles never lose precision."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from tutorial_engine.model.rope import RotaryEmbedding, apply_rope, inverse_frequencies

HEAD_DIMS = st.integers(1, 40).map(lambda half: 2 * half)
POSITIONS = st.integers(0, 2000)
SEEDS = st.integers(0, 10**6)


def turn(x: Tensor, position: int, theta: float = 10000.0) -> Tensor:
    """One vector [D] turned as at `position`."""
    rope = RotaryEmbedding(x.numel(), theta)
    return apply_rope(x[None, None], *rope(torch.tensor([position])))[0, 0]


def two_vectors(head_dim: int, seed: int) -> tuple[Tensor, Tensor]:
    a, b = torch.randn(2, head_dim, generator=torch.Generator().manual_seed(seed))
    return a, b


def test_frequencies_fall_geometrically_from_one() -> None:
    inv_freq = inverse_frequencies(64, 10000.0)
    assert inv_freq.shape == (32,) and inv_freq.dtype == torch.float32
    torch.testing.assert_close(
        inv_freq[:3], torch.tensor([1.0, 0.74989, 0.56234]), atol=5e-6, rtol=0
    )
    torch.testing.assert_close(inv_freq[1:] / inv_freq[:-1], torch.full((31,), 10000 ** (-1 / 32)))


@settings(deadline=None, max_examples=60)
@given(HEAD_DIMS, POSITIONS, POSITIONS, st.integers(0, 2000), SEEDS)
def test_score_depends_on_distance_only(
    head_dim: int, m: int, n: int, offset: int, seed: int
) -> None:
    q, k = two_vectors(head_dim, seed)
    here = turn(q, m) @ turn(k, n)
    there = turn(q, m + offset) @ turn(k, n + offset)
    # an fp32 angle near 4000 is off by up to 2.4e-4 rad, and a score by that much of |q| |k|
    assert abs(here - there) <= 1e-3 * q.norm() * k.norm()


@settings(deadline=None, max_examples=60)
@given(HEAD_DIMS, POSITIONS, SEEDS)
def test_turning_keeps_the_length(head_dim: int, position: int, seed: int) -> None:
    x, _ = two_vectors(head_dim, seed)
    torch.testing.assert_close(turn(x, position).norm(), x.norm(), atol=1e-5, rtol=1e-5)


def test_score_depends_on_distance() -> None:
    q, k = two_vectors(64, 0)
    scores = torch.stack([turn(q, 5) @ turn(k, 5 - back) for back in range(6)])
    assert (scores[1:] - scores[0]).abs().min() > 0.1


def test_pairs_are_half_split() -> None:
    x = torch.zeros(8)
    x[1] = 1.0  # the first member of pair 1; its partner is 1 + 8 / 2
    assert torch.equal(turn(x, 0), x)
    turned = turn(x, 3)
    angle = 3 * 10000 ** (-2 / 8)
    expected = torch.zeros(8)
    expected[1], expected[5] = math.cos(angle), math.sin(angle)
    torch.testing.assert_close(turned, expected)


@pytest.mark.parametrize("head_dim", [2, 20, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_equals_transformers(head_dim: int, theta: float) -> None:
    config = Qwen3Config(
        head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    positions = torch.tensor([0, 1, 2, 77, 4001, 40959])
    q, k = torch.randn(6, 4, head_dim), torch.randn(6, 2, head_dim)
    cos, sin = Qwen3RotaryEmbedding(config)(q, positions[None])
    theirs = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    angles = RotaryEmbedding(head_dim, theta)(positions)
    torch.testing.assert_close(apply_rope(q, *angles), theirs[0][0])
    torch.testing.assert_close(apply_rope(k, *angles), theirs[1][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_frequencies_stay_fp32_on_the_cpu_whatever_the_model_is(
    dtype: torch.dtype, device: str
) -> None:
    with torch.device(device):
        model = nn.ModuleList([nn.Linear(2, 2), RotaryEmbedding(64, 1e6)]).to(dtype)
    assert model[0].weight.dtype == dtype and model[0].weight.device.type == device
    # the dtype alone proves nothing: fp32 again after a detour over half precision is as wrong
    assert model[1].inv_freq.dtype == torch.float32 and model[1].inv_freq.device.type == "cpu"
    assert torch.equal(model[1].inv_freq, inverse_frequencies(64, 1e6))
    assert list(model[1].state_dict()) == []  # no part of a checkpoint


def test_half_precision_frequencies_would_be_radians_off() -> None:
    exact = 4001 * inverse_frequencies(64, 10000.0)
    rounded = 4001 * inverse_frequencies(64, 10000.0).half().float()
    assert (exact - rounded).abs().max() > 0.5


def test_dtype_is_kept_and_computed_in_fp32() -> None:
    x = torch.randn(5, 2, 64).bfloat16()
    angles = RotaryEmbedding(64, 1e4)(torch.arange(5) * 900)
    turned = apply_rope(x, *angles)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, apply_rope(x.float(), *angles).bfloat16())


@pytest.mark.parametrize("head_dim", [0, 1, 25])
def test_head_dim_without_pairs_is_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim.*{head_dim}"):
        RotaryEmbedding(head_dim, 10000.0)
