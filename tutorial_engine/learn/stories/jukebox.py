"""The jukebox: the model with one part broken, each in turn, and the story that it tells then."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.learn.parts import model as own
from tutorial_engine.learn.parts.engine import OwnEngine
from tutorial_engine.model.attention import causal_mask
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.drawing.scene import Frame
from tutorial_engine.viz.views.jukebox_frames import LETTERS, Take, jukebox_frames


def no_turn(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE that turns nothing."""
    return x


def exchanged(*case: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A projection that hands out the values as keys and the keys as values."""
    q, k, v = own.project(*case)
    return q, v, k


def only_itself(q_len: int, kv_len: int, window: int) -> Tensor:
    """A mask that leaves each token itself."""
    return causal_mask(q_len, kv_len, window=1)


def no_mask(q_len: int, kv_len: int, window: int) -> Tensor:
    """A mask that forbids nothing."""
    return torch.ones(q_len, kv_len, dtype=torch.bool)


def uniform(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention that gives all allowed keys the same share."""
    return mask.float() @ v / mask.sum(-1, keepdim=True)


def not_scaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention without √D."""
    return (q @ k.T).masked_fill(~mask, -math.inf).softmax(-1) @ v


# what is broken → the part of the engine, and what runs in its place
BROKEN: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "a token sees only itself": ("window_mask", only_itself),
    "scores not divided by √D": ("attention", not_scaled),
    "no mask": ("window_mask", no_mask),
    "no RoPE": ("rope", no_turn),
    "K and V exchanged": ("project", exchanged),
    "all shares equal": ("attention", uniform),
}


@torch.inference_mode()
def play(engine: OwnEngine, prompt: str) -> list[Take]:
    """Break each part in turn: the story after the prompt, and how far its logits are off.

    The other parts are the engine's as they are. PartFailed when one of the learner's raises.
    """
    batch = Batch.from_sequences([engine.tokenizer.encode(prompt).ids])
    right = engine.package.compute_logits(engine.package(batch))
    takes = []
    for what, (name, function) in BROKEN.items():
        with engine.trying({name: function}):
            off = (engine.model.compute_logits(engine.model(batch)) - right).abs().amax(-1)
            takes.append(Take(what, engine.story(prompt), float(off.max()), float(off[-1])))
    return takes


def jukebox_table(takes: Sequence[Take], parts: Sequence[str] = (), guess: object = "") -> str:
    """What was broken, and how far the prompt's logits are off: anywhere, and at its last token.

    `guess` is a learner's: for each story the digit of one of `parts`, counted from 1, or a dot
    for no guess; anything between them is left out. The guesses are marked.
    """
    wide = max(len(take.part) for take in takes)
    lines = [f"story {'broken':{wide}}  max |Δ|, any token   last token"]
    for letter, take in zip(LETTERS, takes, strict=False):
        lines.append(f"{letter}     {take.part:{wide}} {take.anywhere:19.1f} {take.last:12.1f}")
    digits = re.sub(r"[^0-9.]", "", str(guess))
    named = dict(zip("123456789", parts, strict=False))
    fits = len(digits) == len(takes) and set(digits) <= {".", *named}
    if str(guess).strip(". ") and not fits:
        lines.append(
            f"Your guess is {str(guess)!r:.40}; it needs {len(takes)} digits from 1 to "
            f"{len(parts)}, one for each story, in their order. A dot is no guess."
        )
        return "\n".join(lines)
    guesses = [named.get(digit, "") for digit in digits]
    for i, said in enumerate(guesses):
        if said:
            lines[i + 1] += "   ✔" if said == takes[i].part else f"   ✘ you: {said}"
    if any(guesses):
        right = sum(said == take.part for said, take in zip(guesses, takes, strict=False))
        lines.append(f"{right} of {len(takes)} guesses are right")
    return "\n".join(lines)


def jukebox_film(model: CausalLM, tokenizer: Tokenizer, prompt: str) -> list[Frame]:
    """The frames of the player: the package's parts, and each of them broken."""
    engine = OwnEngine(model, tokenizer)
    return jukebox_frames(prompt, engine.story(prompt), play(engine, prompt))
