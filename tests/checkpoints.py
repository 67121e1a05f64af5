"""Random checkpoints, written and run by transformers: the reference of the core tests."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tutorial_engine.model.attention import AttentionBackend
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM

# The released Qwen3-0.6B, read from its config.json.
QWEN3_06B = ModelConfig(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    rope_theta=1_000_000.0,
    tie_word_embeddings=True,
    eos_token_ids=(151_645,),
)

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

# RoPE as Llama 3 scales it, such that in 97 positions some pairs are kept, mixed and slowed down.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# The other kinds of the family, as BASE but for these.
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "head_dim": 20},
    "llama 3, tied": {"model_type": "llama", "rope": LLAMA3, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 1, "head_dim": 12},
    "mistral": {"model_type": "mistral", "sliding_window": None, "num_hidden_layers": 2},
}
# What each differs in from BASE; max_shard_size is for save_pretrained.
VARIANTS: dict[str, dict[str, Any]] = FAMILY | {
    "qwen2, sharded, tied": {
        "model_type": "qwen2",
        "head_dim": 12,
        "max_shard_size": "20KB",
        "tie_word_embeddings": True,
    },
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "one K/V head for all": {"num_key_value_heads": 1, "num_attention_heads": 6},
    "as many K/V heads as heads": {"num_key_value_heads": 4},
    "one layer": {"num_hidden_layers": 1},
    "head_dim 20": {"head_dim": 20, "num_attention_heads": 6, "num_key_value_heads": 3},
    "smallest head_dim": {"head_dim": 2},
    "large rope_theta and eps": {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-2},
    "sharded, tied": {"max_shard_size": "20KB", "tie_word_embeddings": True},
}


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights that hide nothing: norms away from one, biases away from zero, diverse logits.

    transformers' own fresh weights have unit norms and zero biases: a forgotten one would not show.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("bias"):
            parameter.data.normal_(std=0.5, generator=generator)
        else:
            std = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
            parameter.data.normal_(std=std, generator=generator)


def hf_config(sizes: dict[str, Any]) -> PreTrainedConfig:
    """transformers' config of these sizes, which are named as theirs; "rope" is a scaling."""
    left = {"model_type": "qwen3", **sizes}
    rope = {"rope_type": "default", "rope_theta": left.pop("rope_theta"), **left.pop("rope", {})}
    return AutoConfig.for_model(**left, rope_parameters=rope)


def config_of(**changes: Any) -> ModelConfig:
    """Ours of shape BASE with `changes`, by way of transformers' config; without an EOS."""
    raw = hf_config({**BASE, **changes}).to_dict()
    return ModelConfig.from_dict({**raw, "architectures": None, "eos_token_id": None})


def save_random(folder: Path, seed: int = 0, max_shard_size: str = "5GB", **changes: Any) -> Path:
    """Save a random checkpoint of shape BASE with `changes`, in fp32, by save_pretrained."""
    model = AutoModelForCausalLM.from_config(hf_config({**BASE, **changes}))
    randomise(model, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer.json without merges: ids 0..255, one a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint in transformers, with its textbook ("eager") attention."""
    options = {"dtype": dtype, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def reference_logits(reference: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """transformers' logits, each sequence ALONE, laid end to end: [T, V] fp32."""
    return torch.cat([reference(torch.tensor([ids])).logits[0].float() for ids in sequences])


def our_logits(
    model: CausalLM,
    sequences: Sequence[Sequence[int]],
    attention: AttentionBackend | None = None,
) -> Tensor:
    """The engine's logits of one ragged batch, at all positions: [T, V] fp32."""
    return model.compute_logits(model(Batch.from_sequences(sequences), attention))


def random_sequences(lengths: Sequence[int], vocab_size: int, seed: int = 1) -> list[list[int]]:
    """Random token ids, one list per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def largest_difference(a: Tensor, b: Tensor) -> float:
    """max |a - b|; the shapes must agree, or broadcasting would compare nonsense."""
    assert a.shape == b.shape, f"{a.shape} against {b.shape}"
    return (a - b).abs().max().item()


def fp32_tolerance(logits: Tensor) -> float:
    """What two correct fp32 forwards may differ by: 1e-4 of the largest logit, at least 1e-4."""
    return 1e-4 * max(1.0, logits.abs().max().item())


def edit_config(folder: Path, remove: Sequence[str] = (), **changes: Any) -> Path:
    """Change and remove keys of config.json in place."""
    file = folder / "config.json"
    raw = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in raw.items() if k not in remove}))
    return folder


def edit_json(folder: Path, name: str, **changes: Any) -> Path:
    """Change keys of a JSON file in place; begin it where there is none."""
    file = folder / name
    raw = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**raw, **changes}))
    return folder


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    """Load model.safetensors, let `edit` change the dict, write it back."""
    file = folder / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


LLAMA2_7B = ModelConfig(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=4096,
)
