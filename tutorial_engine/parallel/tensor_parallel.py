"""Tensor parallelism: each rank has some of the heads and of the MLP's inner features.

qkv_proj and gate_up_proj are cut by rows, o_proj and down_proj by columns: what a rank computes in
between is its own, and one sum over all ranks (an all-reduce) after each of the two makes the
hidden states whole again. Embedding, head and norms are on every rank, whole. Knows the model's
weights and torch.distributed; knows no request. Source: Megatron-LM (Shoeybi et al., 2019).
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tutorial_engine.checks import at_least_one
from tutorial_engine.model.checkpoint import without_weights
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM

AllReduce = Callable[[Tensor], Tensor]  # a rank's part [T, hidden] → the sum over all ranks


def shard_config(config: ModelConfig, tp_size: int) -> ModelConfig:
    """The sizes of one rank's model; a cache made from it has this rank's K/V heads.

    ValueError, with the numbers and what would fit, unless tp_size ranks get equal shares.
    """
    at_least_one("tp_size", tp_size)
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes = {name: getattr(config, name) for name in names}
    if wrong := [f"{name} {size}" for name, size in sizes.items() if size % tp_size]:
        candidates = range(1, min(sizes.values()) + 1)
        fits = [n for n in candidates if not any(size % n for size in sizes.values())]
        raise ValueError(
            f"tp_size {tp_size} does not divide {' and '.join(wrong)}: this model can be shared "
            f"among {', '.join(map(str, fits))} rank{'s' * (fits != [1])}"
        )
    return replace(config, **{name: size // tp_size for name, size in sizes.items()})


class RowParallelLinear(nn.Module):
    """A Linear whose input features lie on different ranks: its own part, then one all-reduce.

    The bias is added to the sum, once, not by every rank.
    """

    bias: Tensor | None

    def __init__(self, linear: Any, all_reduce: AllReduce) -> None:
        super().__init__()
        self.linear, self.all_reduce, self.bias = linear, all_reduce, linear.bias
        linear.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in / tp_size], this rank's → [T, out], the same on all ranks."""
        total = self.all_reduce(self.linear(x))
        return total if self.bias is None else total + self.bias


def shard(model: CausalLM, rank: int, tp_size: int, all_reduce: AllReduce) -> CausalLM:
    """One rank's model: the same class with fewer heads and inner features, and two sums a layer.

    `model` has plain weights (loaded with fast=False) and stays as it is; embedding and norms
    are shared with it. ValueError where tp_size does not divide.
    """
    part = without_weights(shard_config(model.config, tp_size))
    state = {
        name: nn.Parameter(_part_of(name, whole, model.config, rank, tp_size), requires_grad=False)
        for name, whole in model.named_parameters(remove_duplicate=False)  # a tied head is two
    }
    part.load_state_dict(state, strict=True, assign=True)
    part.tie_weights()
    for layer in part.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.o_proj = RowParallelLinear(attention.o_proj, all_reduce)  # type: ignore
        mlp.down_proj = RowParallelLinear(mlp.down_proj, all_reduce)  # type: ignore
    return part.to(model.device).requires_grad_(False).eval()


class RankMLP(nn.Module):
    """An MLP whose part is computed by a function of a learner's, then one all-reduce.

    The function gets the whole matrices, and takes this rank's part of them: (x [T, hidden], gate
    and up [I, hidden], down [hidden, I], rank, num_ranks) → its part of the sum [T, hidden].
    """

    def __init__(self, whole: Any, function: Callable[..., Tensor], group: "RankGroup") -> None:
        super().__init__()
        gate, up = whole.gate_up_proj.weight.chunk(2)
        self.matrices = gate, up, whole.down_proj.weight
        self.function, self.group, self.calls = function, group, 0

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] → [T, hidden], the same on all ranks."""
        self.calls += 1
        part = self.function(x, *self.matrices, self.group.rank, self.group.size)
        return self.group.all_reduce(part.to(x.dtype).contiguous())


def with_mlp(
    model: CausalLM,
    whole: CausalLM,
    function: Callable[..., Tensor],
    group: "RankGroup",
) -> list[RankMLP]:
    """Let the function compute every MLP of a rank's model, in place → what took their places."""
    found = []
    for layer, of_all in zip(model.model.layers, whole.model.layers, strict=True):
        found.append(RankMLP(of_all.mlp, function, group))
        layer.mlp = found[-1]
    return found


def _part_of(name: str, whole: Tensor, config: ModelConfig, rank: int, tp_size: int) -> Tensor:
    """What a rank has of a parameter: rows of each merged part, columns, or all of it."""
    *_, module, kind = name.split(".")
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    merged = {"qkv_proj": (q, kv, kv), "gate_up_proj": 2 * (config.intermediate_size,)}
    if module in merged:  # weight and bias: q, k and v each give their own rows
        return torch.cat([part.chunk(tp_size)[rank] for part in whole.split(merged[module])])
    if module in ("o_proj", "down_proj") and kind == "weight":
        return whole.chunk(tp_size, dim=1)[rank].clone()
    return whole


def replicated_parameters(model: CausalLM) -> int:
    """Weights that every rank has whole: embedding, an untied head, norms, o_proj's bias."""
    cut = ("qkv_proj", "gate_up_proj", "o_proj.weight", "down_proj.weight")
    named = model.named_parameters()
    return sum(weight.numel() for name, weight in named if not any(part in name for part in cut))


class Traffic(NamedTuple):
    """All-reduces of a model so far, and the bytes handed to them by ONE rank.

    What goes over the wire depends on the algorithm: a ring of n ranks sends 2 (n − 1) / n of it.
    """

    calls: int = 0
    bytes: int = 0


class RankGroup:
    """This process as one of those that torchrun started: who it is, and what they do together.

    gloo for CPU tensors, nccl for those of GPUs (one for each rank). An all-reduce gives every rank
    the same bits.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.backend = "nccl" if device.startswith("cuda") else "gloo"
        self.device, self.traffic = torch.device("cpu"), Traffic()
        if self.backend == "nccl":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group(self.backend)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, in place; counted in `traffic`."""
        calls, num_bytes = self.traffic
        self.traffic = Traffic(calls + 1, num_bytes + x.numel() * x.element_size())
        dist.all_reduce(x)
        return x

    def gather(self, value: object) -> list[Any]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values
