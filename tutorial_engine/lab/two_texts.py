"""Where a model passes on what two texts differ in: one cache, edited with the other's numbers.

The first text runs as far as the last token that differs. Some of what its cache holds of these
tokens is replaced by what it holds of the second text's, and the rest of the text runs. Knows
models and caches; draws nothing. The method is activation patching (Meng et al. 2022, ROME).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tutorial_engine.lab.kv_edit import KV, Exchange, memory_of, next_logits
from tutorial_engine.model.decoder import CausalLM

AT_ONCE = 180  # sequences of one forward


@dataclass(frozen=True)
class TwoTexts:
    """Two texts of as many tokens, and K and V of each as far as they differ.

    `slots` are those whose tokens are not the same; `rest` are the tokens behind them.
    """

    model: CausalLM
    ids: tuple[tuple[int, ...], tuple[int, ...]]
    slots: tuple[int, ...]
    held: KV
    donor: KV

    @classmethod
    def of(cls, model: CausalLM, tokenizer: Tokenizer, text: str, donor: str) -> "TwoTexts":
        """Run both as far as they differ. ValueError for texts that cannot be compared."""
        ids = [tuple(tokenizer.encode(one).ids) for one in (text, donor)]
        lengths = [len(one) for one in ids]
        if lengths[0] != lengths[1]:
            cut = [" | ".join(tokenizer.decode([i]) for i in one) for one in ids]
            raise ValueError(
                "both texts need the same number of tokens, and these have "
                f"{lengths[0]} ({cut[0]}) and {lengths[1]} ({cut[1]})"
            )
        slots = tuple(i for i, (a, b) in enumerate(zip(*ids, strict=True)) if a != b)
        if not slots:
            raise ValueError("the two texts are the same: change a word in one of them")
        if slots[-1] == lengths[0] - 1:
            raise ValueError("the last token must be the same: it runs afterwards")
        held, other = (memory_of(model, one[: slots[-1] + 1]) for one in ids)
        return cls(model, (ids[0], ids[1]), slots, held, other)

    @property
    def rest(self) -> tuple[int, ...]:
        """The tokens that run afterwards."""
        return self.ids[0][self.slots[-1] + 1 :]

    def replace(
        self, layers: Sequence[int], which: str = "v", heads: Sequence[int] | None = None
    ) -> Exchange:
        """The edit that takes "k", "v" or "kv" of these layers and heads from the second text."""
        return Exchange(self.donor, self.slots, layers, which, heads)

    def after(self, edits: Sequence[Callable[[KV], KV]]) -> Tensor:
        """Probabilities [edits, V] of the next token after the first text; `dict` edits nothing."""
        parts = (edits[i : i + AT_ONCE] for i in range(0, len(edits), AT_ONCE))
        logits = [next_logits(self.model, self.held, self.rest, part) for part in parts]
        return torch.cat(logits).softmax(-1)

    @cached_property
    def answers(self) -> tuple[int, int]:
        """The likeliest next token of each text as it is."""
        own, other = self.after([dict, lambda _: self.donor]).argmax(-1).tolist()
        return own, other

    def every_cell(self) -> Tensor:
        """P of the second text's answer when one cell alone is replaced: [layers, heads, 2].

        A cell is K (0) or V (1) of a layer and a K/V head, in all `slots`.
        """
        config = self.model.config
        shape = (config.num_hidden_layers, config.num_key_value_heads)
        cells = product(range(shape[0]), range(shape[1]), "kv")
        edits = [self.replace([layer], which, [head]) for layer, head, which in cells]
        return self.after(edits)[:, self.answers[1]].view(*shape, 2)
