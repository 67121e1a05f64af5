"""The decoder against transformers; its layers, RoPE and fast twins."""

import copy
import pickle
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import (
    VARIANTS,
    fp32_tolerance,
    largest_difference,
    load_reference,
    our_logits,
    random_sequences,
    reference_logits,
    save_random,
)
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from tutorial_engine.model import fast
from tutorial_engine.model.attention import BlockedAttention, NaiveAttention, SdpaAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import load_model
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.model.fast import (
    ColumnLinear,
    CpuRMSNorm,
    FusedRMSNorm,
    PackedLinear,
    can_prepack,
    fast_twin,
    packs_from,
    use_fast_layers,
)
from tutorial_engine.model.layers import Linear, RMSNorm
from tutorial_engine.model.rope import RotaryEmbedding, apply_rope, inverse_frequencies

LENGTHS = [1, 40, 7, 13]
LAYERS = ["textbook", "packed", "by columns"]
BACKENDS = {"naive": NaiveAttention(), "sdpa": SdpaAttention(), "in blocks": BlockedAttention()}


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
    reference = load_reference(folder)
    sequences = random_sequences(LENGTHS, reference.config.vocab_size)
    with torch.no_grad():
        logits = reference_logits(reference, sequences)
    # logits of many sizes and many winners: a model that says one thing always proves nothing
    assert logits.std() > 0.5 and logits.argmax(-1).unique().numel() > 10
    return Case(folder, sequences, logits, reference.num_parameters())


def load(folder: Path, layers: str, dtype: torch.dtype = torch.float32) -> CausalLM:
    """With the layers of layers.py, or with all twins, every matrix packed or by columns."""
    model = load_model(folder, dtype=dtype, fast=False)
    if layers != "textbook":
        use_fast_layers(model, pack_from=0 if layers == "packed" else sys.maxsize)
    return model


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_equal_transformers(case: Case, backend: str, layers: str) -> None:
    ours = load(case.folder, layers)
    assert ours.num_parameters() == case.num_parameters
    logits = our_logits(ours, case.sequences, BACKENDS[backend])
    assert largest_difference(logits, case.logits) <= fp32_tolerance(case.logits)


def test_attention_weights_equal_transformers(checkpoint: Path) -> None:
    sequences = random_sequences(LENGTHS, 300)
    seen: dict[tuple[int, int], Tensor] = {}
    observer = NaiveAttention(observe=lambda layer, s, weights: seen.update({(layer, s): weights}))
    our_logits(load_model(checkpoint), sequences, observer)
    reference = load_reference(checkpoint)
    for s, ids in enumerate(sequences):
        theirs = reference(torch.tensor([ids]), output_attentions=True).attentions
        for layer, weights in enumerate(theirs):
            torch.testing.assert_close(seen.pop((layer, s)), weights[0], atol=1e-5, rtol=0)
    assert not seen


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_is_as_near_to_the_truth_as_transformers(
    checkpoint: Path, backend: str, layers: str
) -> None:
    """Measured against the same bf16 weights computed in fp32, which is the truth here.

    One bf16 rounding is off by u = 2 ** -8 at most. About ten of them lie between two values of
    the residual stream, 30 in three layers: sqrt(30) · u ≈ 2 % of a logit if they are independent,
    and sqrt(2) · 2 % ≈ 3 % between two engines that round at different places (seen: 0.8 %, 1.0 %).
    """
    sequences = random_sequences(LENGTHS, 300)
    half = load_reference(checkpoint, torch.bfloat16)
    theirs = reference_logits(half, sequences)
    truth = reference_logits(half.float(), sequences)
    model = load(checkpoint, layers, torch.bfloat16)
    ours = our_logits(model, sequences, BACKENDS[backend])
    assert ours.dtype == torch.float32
    our_error, their_error = (ours - truth).norm(), (theirs - truth).norm()
    assert our_error <= 1.25 * their_error
    assert our_error <= 0.02 * truth.norm()
    assert (ours - theirs).norm() <= 0.03 * truth.norm()


def test_an_id_outside_the_vocabulary_is_named(checkpoint: Path) -> None:
    ours = load_model(checkpoint)
    for ids in ([5, 300], [5, -1, 7]):
        batch = Batch(torch.tensor(ids), torch.arange(len(ids)), (0, len(ids)))
        with pytest.raises(ValueError, match=rf"token id {ids[1]} is outside"):
            ours(batch)


DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(
    not can_prepack(CPU, torch.float32), reason="this build of PyTorch has no oneDNN linear"
)


# -- the layers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [lambda norm: norm, CpuRMSNorm, FusedRMSNorm],
    ids=["textbook", "CpuRMSNorm", "FusedRMSNorm"],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_equals_transformers(
    kind: Callable[[RMSNorm], RMSNorm], dtype: torch.dtype, eps: float
) -> None:
    theirs = Qwen3RMSNorm(40, eps)
    theirs.weight.uniform_(0.5, 1.5)
    textbook = RMSNorm(40, eps)
    textbook.weight.copy_(theirs.weight)
    ours, theirs = kind(textbook).to(dtype), theirs.to(dtype)
    x, residual = (3 * torch.randn(2, 7, 4, 40)).to(dtype)
    # in bf16 theirs is rounded once more, before the weight
    rtol = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(ours(x), theirs(x), atol=0, rtol=rtol)
    want = x + residual
    normed, total = ours(x, residual)
    assert torch.equal(total, want) and torch.equal(normed, ours(want))
    assert torch.equal(x + residual, want), "x and the residual stay as they were"


@pytest.mark.parametrize(
    ("pack_from", "linear"),
    [(17, ColumnLinear), pytest.param(16, PackedLinear, marks=needs_onednn)],
)
def test_a_twin_keeps_the_hooks_of_its_layer(pack_from: int, linear: type[nn.Module]) -> None:
    parent, called = nn.Sequential(Linear(4, 4), RMSNorm(4)).requires_grad_(False), []
    handles = [m.register_forward_hook(lambda m, *_: called.append(type(m))) for m in parent]
    use_fast_layers(parent, pack_from)
    parent(torch.zeros(1, 4))
    handles[1].remove()
    parent(torch.zeros(1, 4))
    assert called == [linear, CpuRMSNorm, linear]


# -- the twins ------------------------------------------------------------------------------------


def test_which_layers_have_a_faster_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Linear):
        """A learner's own: it stays."""

    possible = can_prepack(CPU, torch.float32)
    border = packs_from(torch.float32)
    large = Linear(border // 16, 16).requires_grad_(False)
    assert (type(fast_twin(large)) is PackedLinear) == possible
    meta, half = (copy.deepcopy(large).to(to) for to in ("meta", torch.float16))
    for layer in (meta, half, Mine(border // 16, 16), nn.Identity(), RMSNorm(4).half()):
        assert fast_twin(layer) is layer
    twin = fast_twin(Linear(border // 16 - 1, 16))
    assert type(twin) is ColumnLinear and fast_twin(twin) is twin
    for dtype in DTYPES:
        twin = fast_twin(RMSNorm(4).to(dtype))
        assert type(twin) is CpuRMSNorm and fast_twin(twin) is twin
    twin = fast_twin(RMSNorm(4).to("meta", torch.bfloat16))  # where a GPU is, one kernel
    assert type(twin) is FusedRMSNorm and fast_twin(twin) is twin

    monkeypatch.setattr(fast, "Path", lambda name: Path("not there"))  # no Linux: Python knows
    for name in ("Intel64 Family 6 Model 154, GenuineIntel", "AMD64 Family 25, AuthenticAMD"):
        monkeypatch.setattr(platform, "processor", lambda name=name: name)
        assert fast.made_by_intel.__wrapped__() == ("Intel64" in name)
    for intel, least in ((True, 2**21), (False, 2**18)):
        monkeypatch.setattr(fast, "made_by_intel", lambda intel=intel: intel)
        assert (packs_from(torch.float32), packs_from(torch.bfloat16)) == (least, 2**18)

    monkeypatch.setattr(torch.ops, "mkldnn", object())  # a build without oneDNN
    assert not can_prepack(CPU, torch.float32) and fast_twin(large) is large


@pytest.mark.parametrize("kind", [ColumnLinear, pytest.param(PackedLinear, marks=needs_onednn)])
@pytest.mark.parametrize("bias", [False, True])
def test_weights_of_a_twin_come_back_bit_for_bit(kind: type[Any], bias: bool) -> None:
    """What it computes is compared above, in whole models."""
    plain = Linear(17, 33, bias).requires_grad_(False)
    plain.weight.normal_()
    twin = kind(plain)
    names = ["weight"] * (kind is ColumnLinear) + ["bias"] * bias
    assert [name for name, _ in twin.named_parameters()] == names
    assert plain.weight.is_contiguous() and twin.weight.shape == plain.weight.shape
    got, want = twin.state_dict(), plain.state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@needs_onednn
def test_a_packed_model_can_be_neither_moved_nor_copied() -> None:
    packed = nn.Sequential(PackedLinear(Linear(4, 4)))
    for change in (lambda m: m.to("cpu"), lambda m: m.bfloat16()):
        with pytest.raises(ValueError, match=r"cannot be moved or cast.*fast=False"):
            change(packed)
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(ValueError, match=r"prepacked model .*load_model\(\.\.\., fast=False\)"):
            copied(packed)


# -- modules are PyTorch's own ---------------------------------------------------------------------


class Zero(nn.Module):
    """An MLP that adds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


@pytest.fixture(params=LAYERS)
def loaded(request: pytest.FixtureRequest, checkpoint: Path) -> CausalLM:
    return load(checkpoint, request.param)


def logits(model: CausalLM) -> Tensor:
    return our_logits(model, [[1, 2, 3], [4, 5]])


def test_a_module_that_is_replaced_or_removed_does_not_run(loaded: CausalLM) -> None:
    layer, before = loaded.model.layers[1], logits(loaded)
    mlp, zero = layer.mlp, Zero()
    without = mlp.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    want = logits(loaded)
    without.remove()
    assert torch.equal(logits(loaded), before) and not torch.equal(want, before)
    for replace in (setattr, lambda parent, name, part: parent.add_module(name, part)):
        replace(layer, "mlp", zero)
        assert torch.equal(logits(loaded), want)
        layer.mlp = mlp
        assert torch.equal(logits(loaded), before)
    layer.self_attn.q_norm = nn.Identity()
    assert not torch.allclose(logits(loaded), before)
    del layer.mlp
    with pytest.raises(AttributeError, match="mlp"):
        logits(loaded)


def test_hooks_of_every_kind_are_called(loaded: CausalLM) -> None:
    names = {module: name for name, module in loaded.named_modules()}
    run = [m for m in names if not isinstance(m, nn.ModuleList)]
    for register_pre, register in (
        (register_module_forward_pre_hook, register_module_forward_hook),
        (
            lambda hook: [m.register_forward_pre_hook(hook) for m in run],
            lambda hook: [m.register_forward_hook(hook) for m in run],
        ),
    ):
        began, ended = list[str](), list[str]()
        handles: list[Any] = []
        for made in (
            register_pre(lambda module, _, began=began: began.append(names[module])),
            register(lambda module, *_, ended=ended: ended.append(names[module])),
        ):
            handles += made if isinstance(made, list) else [made]
        logits(loaded)
        for handle in handles:
            handle.remove()
        assert sorted(began) == sorted(ended) == sorted(names[m] for m in run)


# -- RoPE: its angles never lose precision --------------------------------------------------------


@pytest.mark.parametrize("head_dim", [2, 20, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_rope_equals_transformers(head_dim: int, theta: float) -> None:
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
