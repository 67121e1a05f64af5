"""The two steps of an induction head: what the picture says is what the model does."""

import pytest
import torch
from tokenizers import Tokenizer
from traces import check_words, items

from tutorial_engine.model.attention import NaiveAttention
from tutorial_engine.model.batch import Batch
from tutorial_engine.model.qwen3 import Qwen3ForCausalLM
from tutorial_engine.viz.induction_view import recorded_two_steps, two_steps_picture

STORY = "Once upon a time {} had an old coat. One day R"
FIRST, SECOND = (1, (3, 5)), (3, 3)


class NoValues(NaiveAttention):
    """At one token the heads of step 1 read values of zero; keeps what step 2 looks at."""

    def __init__(self, token: int) -> None:
        super().__init__(lambda layer, _, weights: self.seen.update({layer: weights}))
        self.seen: dict[int, torch.Tensor] = {}
        self.token = token

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        out = super().attend(layer, q, k, v, batch)
        if layer == FIRST[0]:
            for head in FIRST[1]:
                out[self.token, head] = super().attend(layer, q, k, 0 * v, batch)[self.token, head]
        return out


@pytest.mark.parametrize(("name", "piece"), [("Rado", "a"), ("Reno", "en")])
def test_numbers_of_the_two_steps_are_those_of_the_model(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, name: str, piece: str
) -> None:
    ids = tokenizer.encode(STORY.format(name)).ids
    run = recorded_two_steps(model, ids, FIRST, SECOND)
    assert (ids[run.before], ids[run.found]) == (ids[-1], tokenizer.token_to_id(piece))
    seen: dict[int, torch.Tensor] = {}
    naive = NaiveAttention(lambda layer, _, weights: seen.update({layer: weights}))
    probs = model.compute_logits(model(Batch.from_sequences([ids]), naive))[-1].softmax(-1)
    without = NoValues(run.found)
    changed = model.compute_logits(model(Batch.from_sequences([ids]), without))[-1].softmax(-1)
    firsts = [float(seen[1][head, run.found, run.before]) for head in FIRST[1]]
    assert run.first == pytest.approx(sum(firsts) / 2, abs=1e-4)
    numbers = {
        run.second: seen[3][3, -1, run.found],
        run.chance: probs[ids[run.found]],
        run.second_without: without.seen[3][3, -1, run.found],
        run.chance_without: changed[ids[run.found]],
    }
    assert [*numbers] == pytest.approx([float(one) for one in numbers.values()], abs=1e-4)
    assert run.second_without < run.second / 2 and run.chance_without < run.chance / 2
    picture = two_steps_picture(model, tokenizer, ids, FIRST, SECOND)
    check_words(picture)
    said = {item.text for item in items(picture).values()}
    shown = {f"{one:.2f}" for one in numbers}
    assert shown <= said and all(one in picture.caption for one in shown)
    assert (
        f"“{piece}” after “·R”" in said
        and f"the last “·R” finds it, share {run.second:.2f}" in said
    )


def test_heads_that_take_no_such_steps_are_refused(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    for name, first, second in (("Mimo", FIRST, SECOND), ("Rado", (1, (4,)), SECOND)):
        ids = tokenizer.encode(STORY.format(name)).ids
        with pytest.raises(ValueError, match="these heads do not take the two steps"):
            two_steps_picture(model, tokenizer, ids, first, second)
