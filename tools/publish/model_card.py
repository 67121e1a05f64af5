"""The figures of the tiny model's card, from the files that ship.

Knows the checkpoint, its training curve and the stories; writes no page.
"""

import json
import random

import torch
from safetensors import safe_open

from tutorial_engine.engine.generate import generate
from tutorial_engine.model.attention import NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.checkpoint import TINY, load_model, load_tokenizer
from tutorial_engine.sampling.params import SamplingParams
from tutorial_engine.tiny import corpus, train
from tutorial_engine.viz.tokens import escape

UNSEEN = 12345  # a seed that no training used
WORDS = {  # that stories are made of
    "names that are fixed": corpus.NAMES,
    "syllables of invented names": corpus.SYLLABLES,
    "colours and sizes": corpus.COLORS,
    "things": corpus.THINGS,
    "animals": corpus.ANIMALS,
    "places": corpus.PLACES,
    "feelings": corpus.FEELINGS,
}
FAR = 4 * train.SEQ_LEN  # tokens of a text that is longer than any row of the training


def facts() -> dict[str, str]:
    """Name of a blank in the card → what is to stand there, as Markdown."""
    model, tokenizer = load_model(), load_tokenizer()
    config = model.config
    with safe_open(TINY / "model.safetensors", "pt") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]
    parameters = sum(torch.Size(shape).numel() for shape in shapes)
    losses = token_losses()
    (astray,) = generate(
        model, "The capital of France is", SamplingParams(max_tokens=16), tokenizer=tokenizer
    )
    rows = {
        "parameters": f"{parameters:,} in {len(shapes)} tensors, bf16",
        "layers": f"{config.num_hidden_layers}, each {config.hidden_size} wide",
        "query heads, K/V heads": f"{config.num_attention_heads}, {config.num_key_value_heads}",
        "vocabulary": f"{tokenizer.get_vocab_size()} tokens (byte-level BPE)",
        "file": f"{(TINY / 'model.safetensors').stat().st_size:,} bytes",
    }
    return {
        "facts": table(rows),
        "corpus": table({name: f"{len(some)}" for name, some in WORDS.items()}),
        "story": escape(corpus.story(random.Random(UNSEEN))),
        "training": table(training()),
        "astray": escape(astray.outputs[0].text.strip()),
        "seq_len": str(train.SEQ_LEN),
        "max_positions": f"{config.max_position_embeddings:,}",
        "near": f"{losses[: train.SEQ_LEN].mean():.2f}",
        "far": f"{losses[-train.SEQ_LEN :].mean():.2f}",
        "far_from": str(FAR - train.SEQ_LEN),
    }


def training() -> dict[str, str]:
    """What a step of the training was made of, and the losses at both ends of its curve."""
    curve = json.loads((TINY.parent / "curve.json").read_text())
    first, last = curve[0], curve[-1]
    return {
        "steps": f"{last['step'] + 1:,}",
        "rows of a step": f"{train.ROWS}, {train.RANDOM_ROWS} of them repeated random tokens",
        "tokens of a row": str(train.SEQ_LEN),
        **{
            f"loss on {name}, first and last step": f"{first[key]:.2f} and {last[key]:.2f}"
            for name, key in (("text", "text_loss"), ("repeats", "repeat_loss"))
        },
        "best induction score at the end": f"{last['induction']:.2f} (1 is perfect)",
    }


def table(rows: dict[str, str]) -> str:
    """Two columns as a Markdown table."""
    return "\n".join(
        ["| what | value |", "|---|---|", *(f"| {name} | {what} |" for name, what in rows.items())]
    )


@torch.inference_mode()
def token_losses(texts: int = 8) -> torch.Tensor:
    """Mean loss at each of FAR positions, over texts of new stories end to end [FAR]."""
    model, tokenizer = load_model(), load_tokenizer()
    stories, losses = corpus.stories(UNSEEN), []
    for _ in range(texts):
        ids: list[int] = []
        while len(ids) <= FAR:
            ids += [0, *tokenizer.encode(next(stories)).ids]
        logits = model.compute_logits(model(Batch.from_sequences([ids[:FAR]]), NaiveAttention()))
        targets = torch.tensor(ids[1 : FAR + 1])
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    return torch.stack(losses).mean(0)
