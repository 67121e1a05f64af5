"""What the page "Where is Paris?" is made of: `python -m tools.publish.facts`.

Asks the real model for each pair of texts, K or V, each head and each range of layers: 18,600 edits
of a cache, some minutes. What it says is a file of the site, since its build has no model. With a
folder's name it asks nothing, and writes the page of that file there.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement, islice, product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from tools.publish.build import NOTEBOOKS
from tutorial_engine.lab.kv_edit import next_logits
from tutorial_engine.lab.real import NAME, real_model
from tutorial_engine.lab.two_texts import TwoTexts
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.explorers.fact_page import LIKELIEST, fact_page
from tutorial_engine.viz.tokens import SPACE, token_label

FILE = NOTEBOOKS.parent / "docs" / "site" / "facts.json"
PAIRS = (
    ("The capital of France is the city of", "The capital of Italy is the city of"),
    ("The capital of Japan is the city of", "The capital of Egypt is the city of"),
    ("Anna lives in Berlin, in the country of", "Anna lives in Madrid, in the country of"),
    ("The Eiffel Tower is in the city of", "The Colosseum is in the city of"),
    ("The opposite of hot is", "The opposite of big is"),
)


def ranges(num_layers: int) -> list[range]:
    """All ranges of layers, by their first one, and then by their last one."""
    return [range(a, b + 1) for a, b in combinations_with_replacement(range(num_layers), 2)]


def edits(texts: TwoTexts) -> Iterator[tuple[str, int | None, range]]:
    """What a visitor can choose: K or V, all heads or one, and layers; the last turns fastest."""
    config = texts.model.config
    heads = (None, *range(config.num_key_value_heads))
    yield from product("kv", heads, ranges(config.num_hidden_layers))


def after(texts: TwoTexts, chosen: Iterator[tuple[str, int | None, range]]) -> Tensor:
    """Probabilities [chosen, V] of the next token after each of these edits."""
    return texts.after(
        [
            texts.replace(layers, which, None if head is None else [head])
            for which, head, layers in chosen
        ]
    )


class Table:
    """Numbers things in the order in which they come."""

    def __init__(self) -> None:
        self.places: dict[Any, int] = {}

    def place(self, one: Any) -> int:
        """The number of a thing: a new one for what is new."""
        return self.places.setdefault(one, len(self.places))


def likeliest(probabilities: Tensor, tokens: Table) -> Iterator[tuple[int, ...]]:
    """Of each row the likeliest tokens: place in the table and per cent, one after the other."""
    top = probabilities.topk(LIKELIEST)
    for values, ids in zip(top.values.tolist(), top.indices.tolist(), strict=True):
        pairs = zip(map(tokens.place, ids), values, strict=True)
        yield tuple(x for place, p in pairs for x in (place, round(100 * p)))


def parts(tokenizer: Tokenizer, ids: Sequence[int], slots: Sequence[int]) -> list[str]:
    """What stands before these slots, what stands there, and the rest of a text."""
    text = tokenizer.decode(list(ids))
    begin, end = (len(tokenizer.decode(list(ids[:n]))) for n in (slots[0], slots[-1] + 1))
    begin += text[begin] == " "
    return [text[:begin], text[begin:end], text[end:]]


def measured(texts: TwoTexts, tokenizer: Tokenizer, tokens: Table) -> dict[str, Any]:
    """All that the page says of a pair: texts, answers, and which answer each edit has."""
    answers, found, every = Table(), list[int](), edits(texts)
    with tqdm(unit="edit", desc=tokenizer.decode(list(texts.ids[0]))) as bar:
        while some := [*islice(every, 180)]:
            rows = likeliest(after(texts, iter(some)), tokens)
            found += map(answers.place, rows)
            bar.update(len(some))
    own, other = (
        next_logits(texts.model, kv, texts.rest, [dict]) for kv in (texts.held, texts.donor)
    )
    return {
        "parts": [parts(tokenizer, ids, texts.slots) for ids in texts.ids],
        "tokens": len(texts.slots),
        "own": next(likeliest(own.softmax(-1), tokens)),
        "other": next(likeliest(other.softmax(-1), tokens)),
        "answers": [*answers.places],
        "edits": found,
    }


def measure(model: CausalLM, tokenizer: Tokenizer) -> dict[str, Any]:
    """All pairs, ready for JSON."""
    tokens, config = Table(), model.config
    pairs = [measured(TwoTexts.of(model, tokenizer, *two), tokenizer, tokens) for two in PAIRS]
    labels = {token: token_label(tokenizer, token) for token in tokens.places}
    return {
        "model": NAME,
        "layers": config.num_hidden_layers,
        "heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "tokens": [[token, label.removeprefix(SPACE) or label] for token, label in labels.items()],
        "pairs": pairs,
    }


def known() -> dict[str, Any]:
    """What the file says."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def write_page(path: Path, links: Mapping[str, str] | None = None) -> Path:
    """Write the page from what the file says → where it is. `links`: words -> address."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fact_page(known(), links=links), encoding="utf-8")
    return path


def main() -> None:
    """Ask the real model, and write the file; with a folder's name, write the page there."""
    if sys.argv[1:]:
        print(f"wrote {write_page(Path(sys.argv[1]) / 'facts.html')}")
        return
    torch.set_num_threads(1)
    folder = real_model()
    said = measure(load_model(folder, dtype=torch.float32), load_tokenizer(folder))
    FILE.write_text(json.dumps(said, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"wrote {FILE}, {FILE.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
