"""Trains the tiny model: `python -m tutorial_engine.tiny.train`.

The model that is trained is the engine's own; only the optimiser is added. Writes a checkpoint in
Hugging Face format (config.json, model.safetensors, tokenizer.json) and the training curve.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm

from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY, split_merged
from tutorial_engine.model.config import ModelConfig
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.tiny.corpus import stories
from tutorial_engine.tiny.induction import induction_scores, repeated_random_ids

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 512
SEQ_LEN = 128  # tokens of a training row
ROWS, RANDOM_SHARE = 32, 0.2  # rows of a step, and which part of them are repeated random ids
IGNORE = -100  # target that costs nothing


def tiny_config() -> ModelConfig:
    """The shape of the shipped model: 1.7 M parameters, three query heads to a K/V head."""
    return ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        eos_token_ids=(0,),
    )


def train_tokenizer(seed: int, num_stories: int = 4000) -> Tokenizer:
    """Byte-level BPE over the corpus: any text, emoji too, becomes ids and comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = stories(seed)
    tokenizer.train_from_iterator((next(texts) for _ in range(num_stories)), trainer)
    return tokenizer


def text_rows(tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """Stories end to end, END_OF_TEXT between, cut into rows that begin anywhere in a sentence."""
    texts = stories(seed)
    ids: list[int] = []
    while True:
        while len(ids) < SEQ_LEN + 1:
            ids += [0, *tokenizer.encode(next(texts)).ids]
        yield ids[: SEQ_LEN + 1]
        ids = ids[SEQ_LEN:]


def random_row(rng: random.Random) -> tuple[list[int], list[int]]:
    """A random stretch of ids said again and again, and targets for the repeats only."""
    period = rng.randint(8, SEQ_LEN // 2)
    ids = repeated_random_ids(rng, VOCAB_SIZE, period, SEQ_LEN + 1)
    targets = [IGNORE] * (period - 1) + ids[period:]
    return ids[:-1], targets


def num_random_rows(rows: int, random_share: float) -> int:
    """How many rows of a step are repeated random ids."""
    return round(rows * random_share)


RANDOM_ROWS = num_random_rows(ROWS, RANDOM_SHARE)  # of the shipped model


class Rows(NamedTuple):
    """One training step's input ids and targets, [rows, SEQ_LEN] each; the first n are text."""

    ids: Tensor
    targets: Tensor
    num_text: int


def batches(tokenizer: Tokenizer, seed: int, rows: int, random_share: float) -> Iterator[Rows]:
    """Steps without end: text rows first, then repeated random ones."""
    texts, rng = text_rows(tokenizer, seed), random.Random(seed)
    num_random = num_random_rows(rows, random_share)
    while True:
        text = [next(texts) for _ in range(rows - num_random)]
        pairs = [(row[:-1], row[1:]) for row in text]
        pairs += [random_row(rng) for _ in range(num_random)]
        ids, targets = (torch.tensor(x) for x in zip(*pairs, strict=True))
        yield Rows(ids, targets, rows - num_random)


def as_batch(ids: Tensor) -> Batch:
    """[rows, length] ids → the flat batch of `rows` sequences."""
    rows, length = ids.shape
    return Batch(
        ids.flatten(),
        torch.arange(length).repeat(rows),
        tuple(range(0, rows * length + 1, length)),
    )


class RowsOfOneLength:
    """An AttentionBackend for training: one call of SDPA for all rows, and no cache."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        # [rows · length, heads, D] -> [rows, heads, length, D], views only
        q, k, v = (x.unflatten(0, (batch.num_seqs, -1)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


def learning_rate(step: int, steps: int, peak: float, warmup: int, decay: int) -> float:
    """Linear warm-up, constant, and a cosine fall to a tenth over the last `decay` steps."""
    if step < warmup:
        return peak * (step + 1) / warmup
    left = steps - step
    if left < decay:
        return peak * (0.1 + 0.45 * (1 - math.cos(math.pi * left / decay)))
    return peak


def make_optimizer(model: CausalLM) -> torch.optim.AdamW:
    """AdamW that decays matrices only, not norms."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def token_losses(model: CausalLM, rows: Rows, bf16: bool) -> Tensor:
    """Cross-entropy of every target, [rows, SEQ_LEN]; 0 where a target costs nothing."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model.compute_logits(model(as_batch(rows.ids), RowsOfOneLength()))
    flat = F.cross_entropy(logits, rows.targets.flatten(), ignore_index=IGNORE, reduction="none")
    return flat.view(rows.targets.shape)


def curve_point(
    model: CausalLM, step: int, losses: Tensor, rows: Rows, seed: int
) -> dict[str, float]:
    """Where the training stands: both losses of this step, and the best induction score."""
    repeats = losses[rows.num_text :].sum() / (rows.targets[rows.num_text :] != IGNORE).sum()
    return {
        "step": step,
        "text_loss": round(losses[: rows.num_text].mean().item(), 4),
        "repeat_loss": round(repeats.item(), 4),
        "induction": round(induction_scores(model, seed).max().item(), 4),
    }


def train(args: argparse.Namespace) -> None:
    """Train, watch the loss and the induction score, and write the checkpoint and the curve."""
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(args.seed)
    model = CausalLM(tiny_config()).draw_weights()
    optimizer = make_optimizer(model)
    data = batches(tokenizer, args.seed + 1, args.rows, args.random_share)
    curve = []
    began = time.perf_counter()
    with tqdm(range(args.steps), desc="training", unit="step", disable=args.quiet) as progress:
        for step in progress:
            rate = learning_rate(step, args.steps, args.peak_rate, 100, args.steps // 5)
            for group in optimizer.param_groups:
                group["lr"] = rate
            rows = next(data)
            losses = token_losses(model, rows, args.bf16)
            (losses.sum() / (rows.targets != IGNORE).sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % args.every == 0 or step == args.steps - 1:
                curve.append(curve_point(model, step, losses, rows, args.seed))
                progress.set_postfix(curve[-1])
                if args.quiet:
                    print(curve[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
    write_checkpoint(model, tokenizer, args.out)
    (args.out.parent / "curve.json").write_text(json.dumps(curve, indent=0) + "\n")
    minutes = (time.perf_counter() - began) / 60
    print(f"{args.steps} steps in {minutes:.1f} min, written to {args.out}")


def hugging_face_tensors(model: CausalLM, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The weights in this dtype under transformers' names: what we merged is apart again."""
    return {
        part: rows.detach().to(dtype).contiguous()
        for name, parameter in model.named_parameters()
        for part, rows in split_merged(model.config, name, parameter).items()
    }


def hugging_face_config(config: ModelConfig) -> dict[str, object]:
    """What transformers' config.json says of such a Qwen3."""
    same = asdict(config)
    theta, (eos,) = same.pop("rope_theta"), same.pop("eos_token_ids")
    for name in ("rope_scaling", "qk_norm", "qkv_bias", "o_bias"):  # of Qwen3, without biases
        del same[name]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,  # where transformers 4 looks
        "eos_token_id": eos,
        **same,
        "attention_bias": False,
    }


def write_checkpoint(model: CausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Save in Hugging Face format, readable by us and by transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    save_file(hugging_face_tensors(model), weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = model.config
    files = {
        "config.json": hugging_face_config(config),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "model_max_length": config.max_position_embeddings,
        },
        "generation_config.json": {"eos_token_id": config.eos_token_ids[0]},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="train the tiny model that ships with the package")
    parser.add_argument("--out", type=Path, default=TINY, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"rows of {SEQ_LEN} tokens per step")
    parser.add_argument("--random-share", type=float, default=RANDOM_SHARE)
    parser.add_argument("--peak-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=torch.cpu._is_avx512_bf16_supported(),
        help="matmuls in bf16: twice as fast on processors that have it",
    )
    parser.add_argument("--every", type=int, default=25, help="steps between points of the curve")
    parser.add_argument("--quiet", action="store_true", help="lines instead of a progress bar")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
