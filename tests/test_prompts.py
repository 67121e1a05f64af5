"""What may be handed in as prompts, and what is said about the rest."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from tutorial_engine.engine.prompts import check_token_ids, prompt_token_ids


def test_a_text_is_one_prompt(tokenizer: Tokenizer) -> None:
    assert prompt_token_ids("One day", tokenizer) == [tokenizer.encode("One day").ids]


def test_texts_and_ids_may_be_mixed_and_keep_their_order(tokenizer: Tokenizer) -> None:
    got = prompt_token_ids(["One day", (3, 4), [5], range(2)], tokenizer)
    assert got == [tokenizer.encode("One day").ids, [3, 4], [5], [0, 1]]


def test_ids_need_no_tokenizer() -> None:
    assert prompt_token_ids([[1, 2], [3]], None) == [[1, 2], [3]]


def test_the_ids_are_a_copy() -> None:
    mine = [1, 2]
    (got,) = prompt_token_ids([mine], None)
    got.append(3)
    assert mine == [1, 2]


@pytest.mark.parametrize("nothing", [[], (), None])
def test_no_prompt_at_all_is_refused(nothing: Any) -> None:
    with pytest.raises(ValueError, match="no prompt given"):
        prompt_token_ids(nothing, None)


@pytest.mark.parametrize("empty", ["", [], ()])
def test_an_empty_prompt_is_refused_by_its_number(empty: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        prompt_token_ids([[1], empty], tokenizer)


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt 1 is text: pass tokenizer"):
        prompt_token_ids([[1], "One day"], None)


def test_a_flat_list_of_ids_is_refused_and_the_fix_named() -> None:
    with pytest.raises(ValueError, match=r"prompt 0 is the number 7: pass a list of token id"):
        prompt_token_ids([7, 8], None)  # type: ignore[list-item]


@pytest.mark.parametrize("bad", [-1, 10, 10**9, 1.0, True, None, "3"])
def test_an_id_that_is_none_of_the_vocabulary_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError) as error:
        check_token_ids("the prompt of request r7", [0, 9, bad, -5], vocab_size=10)
    assert str(error.value).startswith(f"the prompt of request r7 holds {bad!r};")
    assert "from 0 to 9" in str(error.value)


def test_the_ends_of_the_vocabulary_are_welcome() -> None:
    check_token_ids("it", [0, 9], vocab_size=10)
