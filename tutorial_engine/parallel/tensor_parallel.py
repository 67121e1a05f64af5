"""Introduced in notebook A1. Tensor parallelism: each rank has some of the heads and MLP columns.

qkv_proj and gate_up_proj are cut by rows, o_proj and down_proj by columns: what a rank computes in
between is its own, and one sum over all ranks (an all-reduce) after each of the two makes the
hidden states whole again. Embedding, head and norms are on every rank, whole. Knows the model's
weights and torch.distributed; knows no request. Source: Megatron-LM (Shoeybi et al., 2019).
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tutorial_engine.checks import at_least_one
from tutorial_engine.model.checkpoint import without_weights
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.fast import use_fast_layers
from tutorial_engine.model.layers import Linear
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM

AllReduce = Callable[[Tensor], Tensor]  # a rank's part [T, hidden] → the sum over all ranks


class ParallelError(RuntimeError):
    """The ranks cannot go on together: one died, hangs, or did something else than the others."""


class Traffic(NamedTuple):
    """All-reduces of a model so far, and the bytes handed to them by ONE rank.

    What goes over the wire depends on the algorithm: a ring of n ranks sends 2 (n − 1) / n of it.
    """

    calls: int = 0
    bytes: int = 0


def check_divides(config: ModelConfig, tp_size: int) -> None:
    """ValueError, with the numbers and what would fit, unless tp_size ranks get equal shares."""
    at_least_one("tp_size", tp_size)
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
    }
    wrong = [f"{name} {size}" for name, size in sizes.items() if size % tp_size]
    if wrong:
        most = min(sizes.values())
        fits = [n for n in range(1, most + 1) if not any(size % n for size in sizes.values())]
        raise ValueError(
            f"tp_size {tp_size} does not divide {' and '.join(wrong)}: this model can be shared "
            f"among {', '.join(map(str, fits))} rank{'s' * (fits != [1])}"
        )


def shard_config(config: ModelConfig, tp_size: int) -> ModelConfig:
    """The sizes of one rank's model. A cache made from it needs no tp_size: it is divided here."""
    check_divides(config, tp_size)
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // tp_size,
        num_key_value_heads=config.num_key_value_heads // tp_size,
        intermediate_size=config.intermediate_size // tp_size,
    )


class RowParallelLinear(nn.Module):
    """A Linear whose input features lie on different ranks: its own part, then one all-reduce.

    The bias is added to the sum, once, not by every rank.
    """

    def __init__(self, linear: Linear, all_reduce: AllReduce) -> None:
        super().__init__()
        self.linear, self.bias, self.all_reduce = linear, linear.bias, all_reduce
        linear.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in / tp_size], this rank's → [T, out], the same on all ranks."""
        total = self.all_reduce(self.linear(x))
        return total if self.bias is None else total + self.bias


def shard(
    model: Qwen3ForCausalLM,
    rank: int,
    tp_size: int,
    all_reduce: AllReduce,
    prepack: bool = True,
) -> Qwen3ForCausalLM:
    """One rank's model: the same class with fewer heads and MLP columns, and two sums a layer.

    `model` may be prepacked and stays as it is; embedding and norms are shared with it. The result
    is prepacked unless told otherwise. ValueError where tp_size does not divide.
    """
    own = shard_config(model.config, tp_size)
    if not 0 <= rank < tp_size:
        raise ValueError(f"rank {rank} is none of 0 .. {tp_size - 1}")
    part = without_weights(own)
    whole = model.state_dict()
    state = {
        name: nn.Parameter(_part_of(name, whole[name], model.config, rank, tp_size), False)
        for name, _ in part.named_parameters()
    }
    part.load_state_dict(state, strict=False, assign=True)
    part.tie_weights()
    for layer in part.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.o_proj = RowParallelLinear(attention.o_proj, all_reduce)  # type: ignore
        mlp.down_proj = RowParallelLinear(mlp.down_proj, all_reduce)  # type: ignore
    part.to(model.device).requires_grad_(False).eval()
    if prepack:
        use_fast_layers(part)
    return part


def _part_of(name: str, whole: Tensor, config: ModelConfig, rank: int, tp_size: int) -> Tensor:
    """What a rank has of a parameter: rows of each merged part, columns, or all of it."""
    *_, module, kind = name.split(".")
    q, kv = (
        heads * config.head_dim
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    merged = {"qkv_proj": (q, kv, kv), "gate_up_proj": 2 * (config.intermediate_size,)}
    if module in merged:  # weight and bias: q, k and v each give their own rows
        return torch.cat([part.chunk(tp_size)[rank] for part in whole.split(merged[module])])
    if module in ("o_proj", "down_proj") and kind == "weight":
        return whole.chunk(tp_size, dim=1)[rank].clone()
    return whole


def replicated_parameters(model: Qwen3ForCausalLM) -> int:
    """Weights that every rank has whole: embedding, an untied head, norms, o_proj's bias."""
    config = model.config
    head = 0 if config.tie_word_embeddings else model.lm_head.weight.numel()
    small = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "norm" in name or name.endswith("o_proj.bias")
    )
    return config.vocab_size * config.hidden_size + head + small


class RankGroup:
    """This process as one of `size` ranks: who it is, and what ranks can do together.

    gloo for CPU tensors, nccl for those of GPUs (rank i on its machine's GPU LOCAL_RANK, or i);
    `init_method` says how ranks find each other, as in torch.distributed. An all-reduce gives every
    rank the same bits. Whatever fails raises a ParallelError within `timeout_s`; after that the
    group is of no use.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: str = "cpu",
        timeout_s: float = 30.0,
        init_method: str = "env://",
    ) -> None:
        self.rank, self.size = rank, size
        self.backend = "nccl" if device.startswith("cuda") else "gloo"
        self.device = torch.device("cpu")
        if self.backend == "nccl":
            local = int(os.environ.get("LOCAL_RANK", rank))
            if local >= torch.cuda.device_count():
                raise ValueError(
                    f"rank {rank} needs a GPU of its own; there are {torch.cuda.device_count()}: "
                    "use device 'cpu'"
                )
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)
            # a timeout becomes an exception here, not the end of the process in another thread
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        self.timeout_s, self.traffic = timeout_s, Traffic()
        self._failure: str | None = None
        with self._together("to find each other"):
            dist.init_process_group(
                self.backend,
                init_method=init_method,
                timeout=timedelta(seconds=timeout_s),
                world_size=size,
                rank=rank,
            )

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, in place; counted in `traffic`."""
        calls, num_bytes = self.traffic
        self.traffic = Traffic(calls + 1, num_bytes + x.numel() * x.element_size())
        with self._together(f"all-reduce {self.traffic.calls}"):
            dist.all_reduce(x)
        return x

    def gather(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's values, by rank; as many on each."""
        mine = torch.tensor(list(values), device=self.device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with self._together("comparing notes"):
            dist.all_gather(parts, mine)
        return [tuple(part.tolist()) for part in parts]

    def leave(self) -> None:
        """All is done; the others may go on without this rank."""
        dist.destroy_process_group()

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """What all ranks must do at the same time; a ParallelError if that does not happen."""
        if self._failure is not None:
            raise ParallelError(self._failure)
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            others = [i for i in range(self.size) if i != self.rank]
            who = f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {others}"
            self._failure = (
                f"rank {self.rank} of {self.size} could not finish {what} (after "
                f"{time.monotonic() - start:.1f} s, at most {self.timeout_s:g}): {who} died, "
                "hangs or does something else. Look at what it said last, then start all ranks "
                f"again. {self.backend} says: {_first_sentence(error)}"
            )
            raise ParallelError(self._failure) from error


def _first_sentence(error: Exception) -> str:
    """Without the place in the library's source that it begins with."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).split(". ")[0].splitlines()[0]
