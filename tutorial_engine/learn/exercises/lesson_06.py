"""The checks of notebook 06: halve the layers, replace a head, keep a few slots.

What is wrong is shown: the input, the answer, the right one. No cause is guessed.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tutorial_engine.learn.exercises.facts import shown
from tutorial_engine.learn.exercises.judge import judge
from tutorial_engine.learn.exercises.lesson_02 import two_memories
from tutorial_engine.learn.exercises.verdict import CannotBe, Verdict, guarded, must_answer
from tutorial_engine.learn.parts.cache import EDITS
from tutorial_engine.learn.parts.holder import listed, whole, whole_numbers

Function = Callable[..., Any]
LAYERS = [*((n, layer) for n in range(2, 10) for layer in range(n)), *((30, i) for i in range(30))]
KEEPS = [(n, f, w) for n in (9, 5, 1, 0) for f, w in itertools.product((1, 4, 0), (3, 6, 1, 0))]
SIZES = (3, 5, 3)  # of a memory: layers, slots, K/V heads
SHOWN = 7  # questions of a search that are shown


def check_find_layer(function: Function) -> Verdict:
    """Check find_layer(flips, num_layers) → layer: each layer of some numbers of them."""
    name = "find_layer"

    def run() -> Verdict:
        for num_layers, layer in LAYERS:
            _search(function, num_layers, layer)
        return Verdict(True, f"{name}: {len(LAYERS)} searches; at most 5 runs for 30 layers")

    return guarded(name, run, function)


def _search(function: Function, num_layers: int, layer: int) -> None:
    """One search. CannotBe for a wrong answer, and for more questions than halving needs."""
    asked: list[str] = []
    enough = math.ceil(math.log2(num_layers))

    def failed(why: str) -> CannotBe:
        more = "..." if len(asked) > SHOWN else ""
        questions = "; ".join(asked[:SHOWN]) or "nothing"
        return CannotBe(
            f"a test with {num_layers} layers, of which layer {layer} flips the answer: {why}. "
            f"It asked: {questions}{more}"
        )

    def flips(layers: Any) -> bool:
        numbers = whole_numbers(layers)
        if numbers is None:
            raise CannotBe(f"flips takes a list of layers, and got {layers!r:.60}")
        if outside := [n for n in numbers if not 0 <= n < num_layers]:
            raise failed(
                f"flips was asked about layer {outside[0]}; there are 0 to {num_layers - 1}"
            )
        answer = layer in numbers
        asked.append(f"{_range(numbers)} {'yes' if answer else 'no'}")
        if len(asked) > 2 * num_layers + 8:
            raise failed(f"it has asked {len(asked)} times, and goes on asking")
        return answer

    answer = function(flips, num_layers)
    must_answer("find_layer", answer, function)
    if whole(answer) != layer:
        raise failed(f"it returned {answer!r:.40}, and the number {layer} is expected")
    if len(asked) > enough:
        raise failed(
            f"the right layer, but by {len(asked)} questions; halving needs at most {enough}"
        )


def _range(numbers: list[int]) -> str:
    """Layers in few characters: 0–14."""
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}–{numbers[-1]}"
    return str(numbers[0] if len(numbers) == 1 else numbers)


def check_replace_head(function: Function) -> Verdict:
    """Check replace_head(memory, donor, layer, slots, head) → the changed memory."""
    name = "replace_head"

    def run() -> Verdict:
        cases = [(1, [3], 1), (0, [0], 0), (2, [1, 4], 2), (1, [4], 0)]
        for layer, slots, head in cases:
            (memory, donor), (right, _) = two_memories(*SIZES), two_memories(*SIZES)
            answer = function(memory, donor, layer, list(slots), head)
            must_answer(name, answer, function)
            asked = f"layer {layer}, slots {slots}, head {head}"
            if not isinstance(answer, dict) or sorted(answer) != sorted(right):
                raise CannotBe(f"{asked}: return the whole memory, a dict with the layers 0 to 2")
            if _parts(donor, two_memories(*SIZES)[1]):
                raise CannotBe(f"{asked}: the donor has changed, and must stay as it is")
            want = _parts(EDITS[name](right, donor, layer, slots, head), two_memories(*SIZES)[0])
            if (got := _parts(answer, two_memories(*SIZES)[0])) != want:
                raise CannotBe(f"{asked}: it changed {_list(got)}; wanted: only {_list(want)}")
            if any(
                not torch.equal(a, b)
                for i in right
                for a, b in zip(answer[i], right[i], strict=True)
            ):
                raise CannotBe(
                    f"{asked}: the right place has changed, but not to the donor's numbers"
                )
        return Verdict(True, f"{name}: V of one head alone, in one slot and in two")

    return guarded(name, run, function)


def _parts(memory: Mapping[int, Any], before: Mapping[int, Any]) -> list[str]:
    """What of a memory is not as before: K or V, layer, slot, head."""
    found = []
    for layer, pair in before.items():
        now = listed(memory[layer]) or []
        if len(now) != 2:
            raise CannotBe(f"memory[{layer}] must be a pair (k, v), got {shown(memory[layer]):.60}")
        for letter, old, new in zip("KV", pair, now, strict=True):
            if not isinstance(new, torch.Tensor) or new.shape != old.shape:
                raise CannotBe(f"{letter} of layer {layer} must be a tensor {list(old.shape)}")
            for slot, head in (old != new).any(-1).nonzero().tolist():
                found.append(f"{letter} of layer {layer}, slot {slot}, head {head}")
    return found


def _list(parts: list[str]) -> str:
    return ("; ".join(parts[:3]) or "nothing") + (
        f" and {len(parts) - 3} more" if parts[3:] else ""
    )


def check_keep(function: Function) -> Verdict:
    """Check keep(slots, first, last) → those that stay, in order, each once."""
    cases = [
        (slots, first, last)
        for count, first, last in KEEPS
        for slots in (list(range(count)), [2 * i + i // 3 for i in range(count)])
    ]

    def read(answer: Any) -> Any:
        return answer if (numbers := whole_numbers(answer)) is None else numbers

    return judge(
        *("keep", function, EDITS["keep"], cases, {}),
        f"keep: {len(cases)} cases, also where there are fewer slots",
        read=read,
        keeps={0: "it changed `slots`, which it only reads"},
    )
