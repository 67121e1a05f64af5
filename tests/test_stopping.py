"""When a request ends, and its text: nothing of a stop string is shown, nothing else is lost."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tutorial_engine.sampling.sampler import SamplingParams
from tutorial_engine.sampling.stopping import Detokenizer, Finish, StopChecker

EOS = 0  # of the tiny tokenizer, where it is <|endoftext|>


def feed(checker: StopChecker, ids: Sequence[int]) -> tuple[int, Finish | None]:
    """Give ids until the finish; how many were taken, and the finish."""
    for n, token_id in enumerate(ids, 1):
        finish = checker.update(token_id)
        assert checker.finish == finish
        if finish is not None:
            return n, finish
    return len(ids), None


def spell(tokenizer: Tokenizer, data: bytes, rng: random.Random | None = None) -> list[int]:
    """Ids for these bytes: one a byte, or, with rng, cut at random into tokens there are."""
    letter = dict(enumerate(byte_letters()))
    ids, at = [], 0
    while at < len(data):
        longest = rng.randint(1, 6) if rng else 1
        for size in range(min(longest, len(data) - at), 0, -1):
            token_id = tokenizer.token_to_id("".join(letter[b] for b in data[at : at + size]))
            if token_id is not None:
                break
        assert token_id is not None
        ids.append(token_id)
        at += size
    return ids


def byte_letters() -> Iterator[str]:
    """The letter by which a byte-level vocabulary writes each of the 256 bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = 256
    for byte in range(256):
        if byte in printable:
            yield chr(byte)
        else:
            yield chr(spare)
            spare += 1


# -- tokens and lengths -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "ids", "taken", "finish"),
    [
        ({}, [1, 2, 9, 3], 3, Finish("stop", None)),
        ({"stop_token_ids": [5, 6]}, [1, 6, 5], 2, Finish("stop", 6)),
        ({"stop_token_ids": [9]}, [9], 1, Finish("stop", None)),  # the EOS comes before
        ({"ignore_eos": True, "max_tokens": 3}, [9] * 4, 3, Finish("length", None)),
        ({"ignore_eos": True, "stop_token_ids": [9]}, [9], 1, Finish("stop", 9)),
    ],
)
def test_eos_and_stop_ids_end_it(
    params: dict[str, Any], ids: list[int], taken: int, finish: Finish
) -> None:
    assert feed(StopChecker(SamplingParams(**params), [8, 9]), ids) == (taken, finish)


@pytest.mark.parametrize(
    ("max_tokens", "max_new_tokens", "end"),
    [(1, None, 1), (4, None, 4), (4, 2, 2), (2, 4, 2), (3, 3, 3), (4, 1, 1)],
)
def test_length_is_the_smaller_limit(max_tokens: int, max_new_tokens: int | None, end: int) -> None:
    checker = StopChecker(SamplingParams(max_tokens=max_tokens), [9], None, max_new_tokens)
    assert feed(checker, [1] * 9) == (end, Finish("length", None))
    assert checker.num_tokens == end


def test_stop_wins_over_length_on_the_last_token(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=2, stop_token_ids=[5], stop=["ba"])
    b, a = tokenizer.token_to_id("b"), tokenizer.token_to_id("a")
    for last, finish in (
        (EOS, Finish("stop")),
        (5, Finish("stop", 5)),
        (a, Finish("stop", "ba")),
        (b, Finish("length")),
    ):
        assert feed(StopChecker(params, [EOS], tokenizer), [b, last]) == (2, finish)
        assert last in (a, b) or StopChecker(params, [EOS], tokenizer).update(last) == finish


@pytest.mark.parametrize("least", [1, 2, 3])
def test_nothing_but_the_length_ends_it_before_min_tokens(least: int, tokenizer: Tokenizer) -> None:
    params = SamplingParams(min_tokens=least, stop_token_ids=[5], stop=["a"])
    a = tokenizer.token_to_id("a")
    for token_id, reason in ((EOS, None), (5, 5), (a, "a")):
        checker = StopChecker(params, [EOS], tokenizer)
        assert feed(checker, [token_id] * 4) == (least, Finish("stop", reason))
    checker = StopChecker(params, [EOS], tokenizer)
    feed(checker, [a] * 3)
    assert checker.text == "a" * (least - 1)
    short = StopChecker(params, [EOS], tokenizer, max_new_tokens=1)
    assert feed(short, [tokenizer.token_to_id("b")]) == (1, Finish("length"))


def test_stop_string_begun_before_min_tokens_counts(tokenizer: Tokenizer) -> None:
    params = SamplingParams(min_tokens=3, stop=["bc", "ca"])
    checker = StopChecker(params, [], tokenizer)
    assert feed(checker, spell(tokenizer, b"bcabc")) == (3, Finish("stop", "ca"))
    assert checker.text == "b"  # the "bc" that was complete after two tokens did not count


# -- stop strings, by hand ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stops", "included", "stop", "left"),
    [
        ("one two three", ["two"], False, "two", "one "),
        ("one two three", ["two"], True, "two", "one two"),
        ("one two three", ["w t"], False, None, "one two three"),
        ("one two three", ["three"], False, "three", "one two "),
        ("one two three", ["one"], False, "one", ""),
        ("one two three", ["two", "ne"], False, "ne", "o"),
        ("one two three", ["e", "ne t"], False, "e", "on"),  # the one that is complete first
        ("abcd", ["abcd", "bc"], False, "bc", "a"),  # contained, complete first
        ("abcd", ["bcd", "cd", "abcd"], False, "abcd", ""),  # all complete at once: the longest
        ("abcd", ["cd", "abcd"], True, "abcd", "abcd"),
        ("aaab", ["aab"], False, "aab", "a"),
        ("abab!", ["abab!", "b!"], False, "abab!", ""),
        ("\n\nQ: x", ["\nQ:"], False, "\nQ:", "\n"),
        ("wait 👩‍👩‍👧 no", ["👧"], False, "👧", "wait 👩‍👩‍"),
        ("wait 👩 no", ["👧"], False, None, "wait 👩 no"),
        ("né€", ["é€", "x"], False, "é€", "n"),
    ],
)
@pytest.mark.parametrize("cut", ["as encoded", "bytes", "all at once", 1, 2, 3])
def test_stop_string_is_found_wherever_tokens_end(
    text: str,
    stops: list[str],
    included: bool,
    stop: str | None,
    left: str,
    cut: str | int,
    tokenizer: Tokenizer,
) -> None:
    if cut == "all at once":
        tokenizer = one_token_tokenizer(text)
        ids = [0]
    elif cut == "as encoded":
        ids = tokenizer.encode(text).ids
    else:
        rng = random.Random(cut) if isinstance(cut, int) else None
        ids = spell(tokenizer, text.encode(), rng)
    params = SamplingParams(stop=stops, include_stop_str_in_output=included, max_tokens=len(ids))
    checker = StopChecker(params, [], tokenizer)
    n, finish = feed(checker, ids)
    assert finish == (Finish("length") if stop is None else Finish("stop", stop))
    assert checker.text == left
    if stop is not None:  # and at the earliest token
        assert stop in tokenizer.decode(ids[:n]) and stop not in tokenizer.decode(ids[: n - 1])


def one_token_tokenizer(text: str) -> Tokenizer:
    made = Tokenizer(models.WordLevel({text: 0, "?": 1}, unk_token="?"))
    made.decoder = decoders.Fuse()
    return made


def test_stop_string_is_found_before_an_open_character_behind_it() -> None:
    first_byte = "€".encode()[0]
    made = Tokenizer(models.WordLevel({"a" + list(byte_letters())[first_byte]: 0, "?": 1}, "?"))
    made.decoder = decoders.ByteLevel()
    assert made.decode([0]) == "a\ufffd"
    checker = StopChecker(SamplingParams(stop="a"), [], made)
    assert checker.update(0) == Finish("stop", "a") and checker.text == ""


def test_stop_token_is_no_part_of_the_text(tokenizer: Tokenizer) -> None:
    ids = spell(tokenizer, b"ab\ncd")
    newline = ids[2]
    checker = StopChecker(SamplingParams(stop_token_ids=[newline]), [EOS], tokenizer)
    assert feed(checker, ids) == (3, Finish("stop", newline))
    assert checker.text == "ab"


def test_eos_after_an_open_character_shows_that_it_is_broken(tokenizer: Tokenizer) -> None:
    ids = spell(tokenizer, b"ab\xe2\x82")
    checker = StopChecker(SamplingParams(), [EOS], tokenizer)
    feed(checker, ids)
    assert checker.text == "ab"
    assert checker.update(EOS) == Finish("stop")
    assert checker.text == "ab\ufffd" == tokenizer.decode(ids)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'end',\) need a tokenizer"):
        StopChecker(SamplingParams(stop="end"))
    for limit in (0, -3):
        with pytest.raises(ValueError, match=f"max_new_tokens must be at least 1, got {limit}"):
            StopChecker(SamplingParams(), max_new_tokens=limit)
    checker = StopChecker(SamplingParams(max_tokens=2))
    for token_id in (1.0, "1", None):
        with pytest.raises(ValueError, match="a token id is an int, got"):
            checker.update(token_id)  # type: ignore[arg-type]
    assert feed(checker, [1, 2]) == (2, Finish("length"))
    assert checker.text == "", "without a tokenizer there is no text"
    with pytest.raises(ValueError, match=r"token 7 comes after the end, .*length"):
        checker.update(7)
    assert checker.num_tokens == 2


# -- the same by definition: everything decoded and searched again after every token --------------


def by_definition(
    tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams
) -> tuple[int, Finish, str]:
    """(tokens, finish, text), slow and plain; ids may hold the EOS."""
    before = ""
    for n, token_id in enumerate(ids, 1):
        if token_id == EOS and n >= params.min_tokens:
            return n, Finish("stop"), tokenizer.decode(ids[: n - 1])
        text = tokenizer.decode(ids[:n])
        settled = text.rstrip("\ufffd")
        for end in range(len(before) + 1, len(settled) + 1):
            hits = [stop for stop in params.stop if settled[:end].endswith(stop)]
            if hits and n >= params.min_tokens:
                stop = max(hits, key=len)
                cut = end if params.include_stop_str_in_output else end - len(stop)
                return n, Finish("stop", stop), text[:cut]
        if n == params.max_tokens:
            return n, Finish("length"), text
        before = settled
    raise AssertionError("the ids do not reach max_tokens")


def check_case(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> Finish:
    n, finish, text = by_definition(tokenizer, ids, params)
    checker = StopChecker(params, [EOS], tokenizer)
    hold = max(map(len, params.stop), default=1) - 1
    for i, token_id in enumerate(ids[:n], 1):
        before = checker.text
        got = checker.update(token_id)
        shown = checker.text
        assert shown.startswith(before), "what was shown was taken back"
        assert text.startswith(shown), "a character of a stop string was shown"
        if i < n:
            assert got is None
            so_far = tokenizer.decode(ids[:i]).rstrip("\ufffd")
            assert shown == so_far[: max(0, len(so_far) - hold)], "late, or early"
            assert len(checker._tail) <= hold
    assert got == finish
    assert checker.text == text
    return finish


def draw_stops(rng: random.Random) -> list[str]:
    return [
        "".join(rng.choices("ab\n é€👩", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))
    ]


def test_text_is_the_cut_text_by_definition(tokenizer: Tokenizer) -> None:
    """Six hundred cases, always the same ones: so it can be asked that all kinds are among them."""
    finishes = []
    for seed in range(600):
        rng = random.Random(seed)
        text = "".join(rng.choices("ab\n é€👩", k=rng.randint(0, 25)))
        ids = [*spell(tokenizer, text.encode(), rng), tokenizer.token_to_id("b")]
        if rng.random() < 0.3:
            ids.insert(rng.randrange(len(ids)), EOS)
        params = SamplingParams(
            stop=draw_stops(rng),
            include_stop_str_in_output=rng.random() < 0.5,
            max_tokens=len(ids),
            min_tokens=min(rng.randint(0, 6), len(ids)) if rng.random() < 0.3 else 0,
        )
        finishes.append(check_case(tokenizer, ids, params))
    by_string = sum(isinstance(finish.stop_reason, str) for finish in finishes)
    by_length = sum(finish.reason == "length" for finish in finishes)
    assert by_string > 80 and by_length > 80 and len(finishes) - by_string - by_length > 20


def test_bytes_that_are_no_text_give_what_decode_gives(tokenizer: Tokenizer) -> None:
    broken = 0
    heads = [b"\xe2", b"\x82", b"\xac", b"\xf0", b"\x9f", b"\x91", b"\xa9", b"\xff", b"a", b"\xc3"]
    for seed in range(400):
        rng = random.Random(seed)
        ids = spell(tokenizer, b"".join(rng.choices(heads, k=rng.randint(1, 14))))
        params = SamplingParams(stop=draw_stops(rng), max_tokens=len(ids))
        check_case(tokenizer, ids, params)
        broken += "\ufffd" in tokenizer.decode(ids)
    assert broken > 120


@given(ids=st.lists(st.integers(0, 511), min_size=1, max_size=30))
def test_any_tokens_at_all_give_what_decode_gives(ids: list[int], tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=len(ids), ignore_eos=True)
    checker = StopChecker(params, [EOS], tokenizer)
    feed(checker, ids)
    assert checker.text == tokenizer.decode(ids)


# -- the detokenizer ----------------------------------------------------------------------------


class Watched:
    """A tokenizer that notes how many ids it is asked to decode at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.sizes: list[int] = []

    def decode(self, ids: list[int]) -> str:
        self.sizes.append(len(ids))
        return self.tokenizer.decode(ids)


def test_cost_of_a_token_does_not_grow_with_the_text(tokenizer: Tokenizer) -> None:
    text = "The cat, 👩‍👩‍👧 and I met. " * 60
    ids = tokenizer.encode(text).ids
    watched = Watched(tokenizer)
    detokenizer = Detokenizer(watched)  # type: ignore[arg-type]
    assert detokenizer.flush() == ""
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == text
    assert len(ids) > 1000 and max(watched.sizes) <= 8  # two characters of at most four tokens
    assert len(watched.sizes) <= 2 * len(ids) + 1


def test_spaces_survive_a_decoder_that_strips_the_first_one() -> None:
    vocab = {"▁the": 0, "▁cat": 1, "s": 2, "?": 3}
    made = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    ids = [0, 1, 2, 1, 0]
    detokenizer = Detokenizer(made)
    assert "".join(map(detokenizer.push, ids)) == made.decode(ids) == "the cats cat the"


def test_bytes_of_a_byte_fallback_vocabulary_become_a_character() -> None:
    vocab = {"A": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3, "?": 4}
    made = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = Detokenizer(made)
    said = [detokenizer.push(i) for i in [0, 1, 2, 3, 1, 2, 3, 0]]
    assert said == ["A", "", "", "€", "", "", "€", "A"]


BABBLE = [b"\xff", b"\x80", b"\xf0\x9f", b"\xe2\x82", b"A\xff", b"\xc3", "🪁".encode(), b"\xa9"]


@pytest.mark.parametrize("seed", range(40))
def test_bytes_that_are_no_character_are_told_as_they_come(tokenizer: Tokenizer, seed: int) -> None:
    """As `decode(all ids)` has them, and at a cost that does not grow with what was said."""
    rng = random.Random(seed)
    some = rng.sample(BABBLE, rng.randint(1, len(BABBLE)))
    data = b"One day" + b"".join(rng.choices(some, k=120)) + b" at last"
    ids, watched = spell(tokenizer, data, rng), Watched(tokenizer)
    detokenizer = Detokenizer(watched)  # type: ignore[arg-type]
    told = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(told) + detokenizer.flush() == tokenizer.decode(ids)
    assert max(watched.sizes) <= 24 and sum(watched.sizes) < 20 * len(ids)
