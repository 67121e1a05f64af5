"""What a forward asks of a machine, and what the machine can give.

Counts FLOPs and bytes from a config, in whole numbers; measures how fast this processor reads and
multiplies. Knows no model and no weights. Source: the roofline model, Williams et al. 2009.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.fast import PackedLinear, fast_twin
from tutorial_engine.model.layers import Linear

BUFFER_BYTES = 2**28  # 256 MiB, far larger than the caches of most processors
ROW = 4096  # numbers in a row of the buffer
MATMUL = (512, 2048, 2048)  # rows, in, out: large enough to be limited by arithmetic alone
MATMUL_ON_GPU = (8192, 8192, 8192)
PATIENCE = 0.5  # seconds per probe: a slow machine gets fewer passes, not a longer wait


class Roofline(NamedTuple):
    """The two limits of a machine: bytes read per second and floating-point operations per second.

    A forward of f FLOPs and b bytes takes max(f / peak_flops, b / bandwidth) seconds at the least.
    """

    bandwidth: float
    peak_flops: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte where both limits meet: below it the memory decides, above the cores."""
        return self.peak_flops / self.bandwidth


def forward_flops(
    config: ModelConfig, num_tokens: int, context_len: int = 0, num_logits: int = 1
) -> int:
    """Multiplications and additions of one forward: num_tokens new ones, context_len cached before.

    Linears 2 · weights per token, the head for num_logits rows only; attention 4 · heads · head_dim
    per query-key pair that the causal mask allows. Norms, RoPE, softmax (under 1 %) are left out.
    """
    assert num_tokens >= 1 and context_len >= 0 and 0 <= num_logits <= num_tokens
    head = config.vocab_size * config.hidden_size
    pairs = num_tokens * context_len + num_tokens * (num_tokens + 1) // 2
    per_pair = 4 * config.num_attention_heads * config.head_dim  # q kᵀ, then weights · v
    layer = 2 * num_tokens * _linear_weights(config) + per_pair * pairs
    return config.num_hidden_layers * layer + 2 * num_logits * head


def forward_bytes(
    config: ModelConfig, num_tokens: int, context_len: int = 0, itemsize: int = 4
) -> int:
    """Bytes that one forward moves to and from memory at the least.

    Every weight once, num_tokens rows of the embedding, K and V of context_len cached tokens read,
    those of the new ones written. Activations stay in the processor's caches and are left out.
    """
    assert num_tokens >= 1 and context_len >= 0
    embedded = num_tokens * config.hidden_size
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    moved = embedded + kv * (context_len + num_tokens)
    return weight_bytes(config, itemsize) + moved * itemsize


def weight_bytes(config: ModelConfig, itemsize: int = 4) -> int:
    """Bytes of all weights that a forward reads: the head, but of the embedding only rows."""
    norms = 2 * config.hidden_size + 2 * config.head_dim * config.qk_norm
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    biases = heads * config.head_dim * config.qkv_bias + config.hidden_size * config.o_bias
    layers = config.num_hidden_layers * (_linear_weights(config) + norms + biases)
    return itemsize * (layers + config.hidden_size + config.vocab_size * config.hidden_size)


def roofline_probe(
    dtype: torch.dtype = torch.float32,
    num_bytes: int = BUFFER_BYTES,
    passes: int = 3,
    device: str = "cpu",
) -> Callable[[], Roofline]:
    """A function that measures both limits, the best of some passes each; it keeps its buffers."""
    bandwidth, flops = bandwidth_probe(num_bytes, device), flops_probe(dtype, device)
    return lambda: Roofline(_best(bandwidth, passes), _best(flops, passes))


def bandwidth_probe(num_bytes: int = BUFFER_BYTES, device: str = "cpu") -> Callable[[], float]:
    """A function that reads a buffer of fp32 numbers once per way we know → bytes/s of the fastest.

    The ways: `sum`, and a prepacked Linear at one row, which is what a decode step does. On a quiet
    machine they differ by a few percent, and which one wins differs from processor to processor.
    """
    # ones, for memory that was only ever zeroed may not be there yet
    buffer = torch.ones(max(1, num_bytes // 4 // ROW), ROW, device=device)
    ways: list[Callable[[], Tensor]] = [buffer.sum]
    linear, x = _linear(buffer), torch.ones(1, ROW, device=device)
    if isinstance(linear, PackedLinear):
        ways.append(lambda: linear(x))
    return lambda: max(buffer.nbytes / _seconds(way) for way in ways)


def flops_probe(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Callable[[], float]:
    """A function that runs one large matmul → FLOP/s."""
    rows, columns, out = MATMUL if device == "cpu" else MATMUL_ON_GPU
    linear = _linear(torch.ones(out, columns, dtype=dtype, device=device))
    x = torch.ones(rows, columns, dtype=dtype, device=device)
    return lambda: 2 * rows * columns * out / _seconds(lambda: linear(x))


def _linear_weights(config: ModelConfig) -> int:
    """Weights of one layer's linears: q, k, v, o, gate, up, down."""
    q_and_o = 2 * config.num_attention_heads * config.head_dim
    k_and_v = 2 * config.num_key_value_heads * config.head_dim
    return config.hidden_size * (q_and_o + k_and_v + 3 * config.intermediate_size)


def _linear(weight: Tensor) -> nn.Module:
    """The engine's Linear over this weight [out, in], prepacked where that is possible."""
    with torch.device("meta"):  # no random numbers are drawn
        linear = Linear(weight.shape[1], weight.shape[0])
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return fast_twin(linear, pack_from=0)


@torch.inference_mode()
def _seconds(run: Callable[[], object]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - began


def _best(probe: Callable[[], float], passes: int) -> float:
    """The largest of up to `passes` values, after one that warms up."""
    ends = time.perf_counter() + PATIENCE
    best = probe()
    for _ in range(passes):
        best = max(best, probe())
        if time.perf_counter() > ends:
            break
    return best
