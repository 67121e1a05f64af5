"""The small layers against transformers', and the prepacked Linear against the plain one."""

import copy
import platform
import sys

import pytest
import torch
import torch.nn.functional as F
from checkpoints import BASE, randomise
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP as HfMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tutorial_engine.model import layers
from tutorial_engine.model.checkpoint import load_model
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.layers import Linear, Module, QKNorm, RMSNorm, can_prepack
from tutorial_engine.model.qwen3 import Qwen3MLP

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")


def random_linear(in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> Linear:
    linear = Linear(in_features, out_features, bias).to(dtype)
    linear.weight.data.normal_(std=0.02)
    if linear.bias is not None:
        linear.bias.data.normal_()
    return linear


def random_norm(size: int, eps: float) -> RMSNorm:
    norm = RMSNorm(size, eps)
    norm.weight.data.uniform_(0.5, 1.5)
    return norm


class Twice(Module):
    """Calls its part on what the part gave."""

    def __init__(self) -> None:
        super().__init__()
        self.part = RMSNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.part(x))


@pytest.mark.parametrize("grad", [True, False])
def test_a_module_calls_its_hooks_and_the_part_that_it_has_now(grad: bool) -> None:
    module, calls, x = Twice(), [], torch.randn(2, 4, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        plain = module(x)
        for one in (module, module.part):
            one.register_forward_pre_hook(lambda *_: calls.append("before"))
            one.register_forward_hook(lambda *_: calls.append("after"))
        module.register_full_backward_pre_hook(lambda *_: calls.append("backward"))
        again = module(x=x)
        assert torch.equal(again, plain)
        assert calls == ["before", *2 * ["before", "after"], "after"]
        if grad:
            again.sum().backward()
            assert calls[-1] == "backward"
        other = copy.deepcopy(module)
        other.part.weight.data.zero_()
        assert torch.equal(other(x), 0 * x) and torch.equal(module(x), plain)
        module.part = nn.Identity()
        assert torch.equal(module(x), x) and [*module.children()] == [module.part]
        module.part = None
        assert module.part is None and not [*module.children()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_equals_transformers(dtype: torch.dtype, eps: float) -> None:
    ours = random_norm(40, eps).to(dtype)
    theirs = Qwen3RMSNorm(40, eps).to(dtype)
    theirs.weight.copy_(ours.weight)
    x = (3 * torch.randn(7, 4, 40)).to(dtype)
    # in bf16 theirs is rounded once more, before the weight
    rtol = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(ours(x), theirs(x), atol=0, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_with_residual_returns_normed_and_sum(dtype: torch.dtype) -> None:
    norm = random_norm(40, 1e-6).to(dtype)
    x, residual = torch.randn(2, 7, 40).to(dtype)
    before = x.clone(), residual.clone()
    normed, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_q_and_k_are_normed_together_as_alone(dtype: torch.dtype) -> None:
    joined, q_norm, k_norm = QKNorm(6, 2, 40, 1e-6), random_norm(40, 1e-6), random_norm(40, 1e-6)
    joined.weight.data.copy_(torch.cat((q_norm.weight, k_norm.weight)))
    joined, q_norm, k_norm = [one.to(dtype) for one in (joined, q_norm, k_norm)]
    heads = (3 * torch.randn(7, 8, 40)).to(dtype)
    alone = torch.cat((q_norm(heads[:, :6]), k_norm(heads[:, 6:])), dim=1)
    torch.testing.assert_close(joined(heads), alone, atol=0, rtol=1e-6)
    assert [*joined.state_dict()] == ["weight"] and joined.weight.numel() == 80


@pytest.mark.parametrize("prepack", [False, True])
def test_mlp_equals_transformers(prepack: bool) -> None:
    theirs = HfMLP(Qwen3Config(**{k: v for k, v in BASE.items() if k != "rope_theta"}))
    randomise(theirs)
    ours = Qwen3MLP(ModelConfig(**BASE))
    ours.gate_up_proj.weight.copy_(torch.cat((theirs.gate_proj.weight, theirs.up_proj.weight)))
    ours.down_proj.weight.copy_(theirs.down_proj.weight)
    if prepack:
        possible = can_prepack(CPU, torch.float32)
        assert ours.gate_up_proj.prepack() == ours.down_proj.prepack() == possible
    x = torch.randn(9, BASE["hidden_size"])
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_what_can_be_prepacked(monkeypatch: pytest.MonkeyPatch) -> None:
    # elsewhere the plain path is taken, and the tests below then compare it with itself
    x86_linux = sys.platform == "linux" and platform.machine() == "x86_64"
    assert can_prepack(CPU, torch.float32) or not x86_linux
    assert not can_prepack(CPU, torch.float16)
    for device in ("cuda", "meta"):
        assert not can_prepack(torch.device(device), torch.float32)

    class Missing:
        def __getattr__(self, name: str) -> object:
            raise AttributeError(f"'_OpNamespace' 'mkldnn' object has no attribute '{name}'")

    monkeypatch.setattr(torch.ops, "mkldnn", Missing())
    assert not can_prepack(CPU, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_prepacked_equals_plain(dtype: torch.dtype, bias: bool, rows: int) -> None:
    plain = random_linear(96, 200, bias, dtype)
    packed = copy.deepcopy(plain)
    assert packed.prepack() == packed.is_packed == can_prepack(CPU, dtype)
    assert not plain.is_packed
    x = torch.randn(rows, 96).to(dtype)
    ours, expected = packed(x), plain(x)
    assert ours.dtype == dtype and ours.shape == (rows, 200)
    # fp32: another order of 96 additions. bf16: both add in fp32 and round once, so they may land
    # on neighbours, 2 ** -7 apart, or twice that where the bias is added after a first rounding
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps}[dtype]
    torch.testing.assert_close(ours, expected, atol=tolerance / 4, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96, 200), (17, 33), (1, 1)])
def test_packed_weight_comes_back_exactly(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    linear, x = random_linear(*shape, bias=False, dtype=dtype), torch.randn(3, shape[0]).to(dtype)
    weight = linear.plain_weight().clone()
    packed = linear.prepack()
    assert (linear.weight is None) == packed  # both at once would double the memory
    assert torch.equal(linear.plain_weight(), weight)
    assert linear.plain_weight().dtype == dtype
    once = linear(x)
    assert linear.prepack() == packed and torch.equal(linear(x), once), "packed twice"


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_columns_is_the_same_matrix_in_another_order(dtype: torch.dtype) -> None:
    plain = random_linear(96, 200, True, dtype)
    columns = copy.deepcopy(plain)
    columns.by_columns()
    assert columns.weight.t().is_contiguous() and torch.equal(columns.weight, plain.weight)
    x = torch.randn(3, 96).to(dtype)
    torch.testing.assert_close(columns(x), plain(x))
    for saved in (columns.plain_weight(), columns.state_dict()["weight"]):
        assert saved.is_contiguous() and torch.equal(saved, plain.weight)
    assert columns.prepack() == can_prepack(CPU, dtype)
    assert torch.equal(columns.plain_weight(), plain.weight)


def test_a_model_packs_what_is_faster_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which layout wins is the machine's affair; that the model follows the verdict is ours."""
    for shape in ((64, 48), (300, 200)):
        assert layers.packed_is_faster(*shape, torch.float32) in (True, False)
    assert layers.packed_is_faster(4096, 1024, torch.float32), "large weights are not probed"
    wide = lambda out, size, dtype: out > size  # noqa: E731
    monkeypatch.setattr("tutorial_engine.model.qwen3.packed_is_faster", wide)
    model = load_model()
    linears = [m for m in model.modules() if isinstance(m, Linear)]
    assert {m.out_features > m.in_features for m in linears} == {True, False}
    possible = can_prepack(CPU, torch.float32)
    for m in linears:
        assert m.is_packed == (possible and m.out_features > m.in_features)
        if not m.is_packed:  # the shipped model's head is wide, so none of these is its embedding
            assert m.weight.t().is_contiguous() == possible


def test_tied_embedding_survives_prepacking() -> None:
    embedding, head = nn.Embedding(50, 32), Linear(32, 50)
    head.weight = embedding.weight
    table = embedding.weight.clone()
    head.prepack()
    assert torch.equal(embedding(torch.arange(50)), table)
    assert torch.equal(head.plain_weight(), table)


@pytest.mark.parametrize("bias", [False, True])
def test_without_the_onednn_op_the_plain_path_is_taken(
    monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    linear = random_linear(32, 48, bias, torch.float32)
    x = torch.randn(3, 32)
    monkeypatch.setattr(layers, "can_prepack", lambda device, dtype: False)
    assert not linear.prepack() and not linear.is_packed
    torch.testing.assert_close(linear(x), F.linear(x, linear.plain_weight(), linear.bias))


def test_print_says_what_is_packed() -> None:
    linear = Linear(3, 5)
    assert "prepacked" not in repr(linear)
    packed = linear.prepack()
    assert "3 → 5" in repr(linear) and ("prepacked" in repr(linear)) == packed
    assert "40, eps=0.001" in repr(RMSNorm(40, 1e-3))
