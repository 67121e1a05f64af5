"""Two texts cell by cell: the picture and the explorer say what the model does."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import need_real
from engines import random_model
from explorers import caption_of, message_of, seen, svg_of, turn, words
from tokenizers import Tokenizer
from torch import Tensor
from traces import check_words

from tutorial_engine.lab.two_texts import TwoTexts
from tutorial_engine.model.checkpoint import load_model, load_tokenizer
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz import FactExplorer, fact_picture
from tutorial_engine.viz.drawing.parts import Sheet
from tutorial_engine.viz.explorers.fact_explorer import MAX_TOKENS, OTHER, TEXT
from tutorial_engine.viz.views.fact_picture import Fact, Likely, likely

NAMO = "Namo had an old coat. Tima was a friend of N"
NEDO = NAMO.replace("Namo", "Nedo")
PAIRS = {
    "one slot": (NAMO, NEDO),
    "two slots": ("Anna had a red kite. Anna", "Ben had a red kite. Anna"),
    "one answer": ("Namo had a hat. Namo", "Nedo had a hat. Nedo"),
    "markup": tuple(f'N{name}o </svg>&"]]> <script>a</script> was' for name in ("am", "ed")),
    "hidden": tuple(f"One {sign} was\u202eb😀 $x$\n\t " for sign in "<&"),
    "near the end": tuple(
        f"One day Anna had a red kite and a hat. Ben was{x}." for x in (" a", " had")
    ),
    "many slots": ("Namo had an old coat and a hat.", "q w r t p s d f g g."),
}


@pytest.fixture(scope="module")
def two(model: CausalLM, tokenizer: Tokenizer) -> TwoTexts:
    return TwoTexts.of(model, tokenizer, NAMO, NEDO)


@pytest.fixture
def explorer(model: CausalLM, tokenizer: Tokenizer) -> FactExplorer:
    return FactExplorer(model, tokenizer, NAMO, NEDO)


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[CausalLM, Tokenizer]]:
    folder = need_real()
    yield load_model(folder, dtype=torch.float32), load_tokenizer(folder)


def replaced(two: TwoTexts, *cells: Any) -> Tensor:
    """Probabilities [V] after one exchange, computed anew."""
    return two.after([two.replace(*cells)])[0]


# -- the picture ----------------------------------------------------------------------------------


def test_the_picture_says_which_numbers_decide(two: TwoTexts, tokenizer: Tokenizer) -> None:
    picture, cells = fact_picture(two, tokenizer), two.every_cell()
    layer, head, part = (int(i) for i in torch.unravel_index(cells.argmax(), cells.shape))
    own, other = (tokenizer.decode([token]) for token in two.answers)
    before = two.after([dict])[0][two.answers[0]]
    held, size = two.held[layer][part], two.held[layer][part][two.slots[0], head].numel()
    total = 2 * len(two.held) * held.shape[1] * size
    said = (
        f"Of {total} numbers that the cache holds for “am”, {size} ({'KV'[part]} of layer {layer}, "
        f"head {head}) are replaced by those of “ed”: “{own}” ({before:.2f}) becomes “{other}” "
        f"({cells.max():.2f}); each of the other {cells.numel() - 1} cells alone gives “{other}” "
        "at most "
    )
    assert (layer, head, part) == (3, 1, 1) and picture.caption.startswith(said)
    second, told = cells.flatten().topk(2).values[1], float(picture.caption.split()[-1][:-1])
    assert second <= told <= second + 0.001
    assert f">{size} numbers decide: {own} or {other}<" in picture.svg
    assert " id=" not in picture.svg


def test_the_best_cell_is_framed_and_each_says_its_number(
    two: TwoTexts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheets = list[Sheet]()
    picture = Sheet.picture
    monkeypatch.setattr(Sheet, "picture", lambda s, *said: (sheets.append(s), picture(s, *said))[1])
    fact_picture(two, tokenizer)
    items, cells = sheets[0].items, two.every_cell()
    tips = {name: item.tip for name, item in items.items() if name.startswith("cell.")}
    assert len(tips) == cells.numel()
    for (layer, head, part), p in zip(
        torch.cartesian_prod(*map(torch.arange, cells.shape)).tolist(), cells.flatten(), strict=True
    ):
        where = f"{'KV'[part]} of layer {layer}, head {head}"
        assert tips[f"cell.{layer}.{head}.{part}"] == f"{where} replaced alone: “ed” {p:.3f}"
    inner, outer = items["cell.3.1.1"].attributes, items["framed.v"].attributes
    for at, size in (("x", "width"), ("y", "height")):
        assert float(outer[at]) + 3 == pytest.approx(float(inner[at]))
        assert float(outer[size]) - 6 == pytest.approx(float(inner[size]))
    assert items["framed.says"].text == "V of layer 3, head 1: 32 numbers"
    assert not [name for name in items if name.startswith("framed.k")]


@pytest.mark.parametrize("pair", PAIRS)
def test_it_can_be_read_whatever_the_texts_are(
    model: CausalLM, tokenizer: Tokenizer, pair: str
) -> None:
    picture = fact_picture(TwoTexts.of(model, tokenizer, *PAIRS[pair]), tokenizer)
    check_words(picture)
    assert "<script" not in picture.svg and min(sizes(picture.svg)) >= 12
    made = FactExplorer(model, tokenizer, *PAIRS[pair])
    for step in range(made.num_steps):
        check_words(made.scene(step))
    assert min(sizes(svg_of(made))) >= 12 and "<script" not in svg_of(made)


def sizes(svg: str) -> list[float]:
    return [float(size) for size in re.findall(r'<text [^>]*font-size="([\d.]+)"', svg)]


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 16), (40, 2)])
def test_it_can_be_read_whatever_the_model_is(
    tokenizer: Tokenizer, layers: int, heads: int
) -> None:
    shape: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": heads}
    other = random_model(vocab_size=512, num_hidden_layers=layers, **shape)
    check_words(fact_picture(TwoTexts.of(other, tokenizer, NAMO, NEDO), tokenizer))
    made = FactExplorer(other, tokenizer, NAMO, NEDO, "K and V")
    for head in ("all", heads - 1):
        for step in (0, layers // 2, layers - 1):
            check_words(turn(made, step, head=head).shown)


def test_a_sentence_is_true_of_what_it_tells(two: TwoTexts, tokenizer: Tokenizer) -> None:
    own, other = two.answers
    before, third = two.after([dict])[0], 7
    fact = Fact(two, tokenizer, two.every_cell(), likely(before))
    told = {token: fact.told(Likely((token,), (0.5,))) for token in (own, other, third)}
    assert told[own] == "the answer stays “am” (0.50)"
    assert told[other] == f"“am” ({before[own]:.2f}) becomes “ed” (0.50)"
    assert told[third].endswith("(0.50), which is neither text's answer")


# -- the explorer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["all", 0, 1])
@pytest.mark.parametrize("replace", ["V", "K", "K and V"])
def test_each_step_tells_what_the_model_says_after_its_exchange(
    explorer: FactExplorer, two: TwoTexts, tokenizer: Tokenizer, replace: str, head: Any
) -> None:
    turn(explorer, replace=replace, head=head)
    which = replace.replace(" and ", "").lower()
    heads = [0, 1] if head == "all" else [head]
    assert explorer.num_steps == 4
    for step in range(4):
        probs = replaced(two, [step], which, heads)
        top = probs.topk(3)
        turn(explorer, step)
        labels = [tokenizer.decode([token]).replace(" ", "·") for token in top.indices.tolist()]
        assert words(explorer, r"after\.\d\.token") == labels
        shown = [float(p) for p in words(explorer, r"after\.\d\.p")]
        assert shown == pytest.approx(top.values.tolist(), abs=6e-4)
        numbers = 32 * len(which) * len(heads)
        named = f"head {head}" if head != "all" else "all heads"
        begin = f"{replace} of layer {step}, {named}, {numbers} of the 512 numbers"
        assert caption_of(explorer).startswith(begin)
        assert f"“{labels[0].strip('·')}” ({top.values[0]:.2f})" in caption_of(explorer)
        frames = {name.split(".")[1] for name in explorer.shown.items if "framed" in name}
        assert frames - {"says"} == set(which)


def test_the_grid_is_every_cell_alone(explorer: FactExplorer, two: TwoTexts) -> None:
    torch.testing.assert_close(explorer.fact.cells, two.every_cell(), atol=1e-5, rtol=1e-3)


def test_only_new_texts_and_new_choices_run_the_model(
    explorer: FactExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()
    after = TwoTexts.after

    def counted(two: TwoTexts, edits: Any) -> Tensor:
        calls.append(len(edits))
        return after(two, edits)

    monkeypatch.setattr(TwoTexts, "after", counted)
    for knobs in ({"head": 1}, {"replace": "K"}, {"step": 2}, {"head": 0}, {"replace": "V"}):
        turn(explorer, **knobs)
    assert not calls, "single heads are known from the grid"
    for exchange in ("K and V", "V", "K and V"):
        turn(explorer, replace=exchange)
    assert calls == [4]
    turn(explorer, text=NAMO.replace("coat", "hat"), other=NEDO.replace("coat", "hat"))
    assert explorer.value("head") == 0 and explorer.step == 2, "the knobs stay"


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"other": NAMO}, "the two texts are the same"),
        ({"other": "Ned"}, "same number of tokens"),
        ({"text": f"{NEDO[:-1]}M"}, "the last token must be the same"),
        ({"text": ""}, "same number of tokens"),
        ({"text": "Anna was a friend. " * 20}, f"tokens; each cell runs it, and {MAX_TOKENS}"),
    ],
)
def test_texts_that_cannot_be_compared_are_told_and_the_old_picture_kept(
    explorer: FactExplorer, knobs: dict[str, Any], said: str
) -> None:
    before = seen(turn(explorer, 1))
    with pytest.raises(ValueError, match=said):
        explorer.set(**knobs)
    assert seen(explorer) == before and not message_of(explorer)
    turn(explorer, **knobs)
    assert re.search(said, message_of(explorer)) and seen(explorer)[:4] == before[:4]
    turn(explorer, head=1)  # still told, and the old picture can be stepped through
    assert message_of(explorer) and seen(explorer)[:4] == before[:4]
    assert "all heads" in caption_of(turn(explorer, 3))
    turn(explorer, text=NAMO, other=NEDO)
    assert not message_of(explorer) and "layer 3, head 1" in caption_of(explorer)


def test_texts_of_another_model_are_refused_at_once(model: CausalLM, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="same number of tokens"):
        FactExplorer(model, tokenizer, "Namo had a hat.", "Ne had a hat.")


# -- the real model -------------------------------------------------------------------------------


def test_sixty_four_numbers_of_the_real_model_turn_paris_into_rome(
    real: tuple[CausalLM, Tokenizer],
) -> None:
    model, tokenizer = real
    two = TwoTexts.of(model, tokenizer, TEXT, OTHER)
    picture = fact_picture(two, tokenizer)
    check_words(picture)
    assert ">64 numbers decide: Paris or Rome<" in picture.svg
    assert picture.caption.startswith(
        "Of 11,520 numbers that the cache holds for “France”, 64 (V of layer 23, head 1) are "
        "replaced by those of “Italy”: “Paris” (0.96) becomes “Rome” (0.73)"
    )
    made = FactExplorer(model, tokenizer)
    told = made.set(step=23, head=1).caption
    assert told.startswith("V of layer 23, head 1, 64 of the 11,520 numbers")
    assert told.endswith("“Paris” (0.96) becomes “Rome” (0.73).")
    assert "the answer stays “Paris”" in made.set(step=22).caption
