"""Writes the little stories that the tiny model learns from.

Every story has two heroes whose names come back, and each owns a thing that comes back. Most
names are made up on the spot, so they cannot be learned by heart: whoever wants to predict them
has to look back in the text and copy. That is what makes induction heads form.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

NAMES = (
    "Anna Ben Mia Tom Lily Sam Nora Max Ella Finn Ruby Leo Zoe Hugo Ida Otto Clara Paul Rosa Emil"
).split()
SYLLABLES = "ba be bo da de di do fa fi ga go ka ki ko la le li lo ma me mi mo na ne ni".split()
SYLLABLES += "no pa pe po ra re ri ro sa se so ta te ti to va ve vi zu zo".split()
COLORS = "red blue green yellow old new big small".split()
THINGS = "kite ball hat drum boat book cup lamp box bell coat cake egg apple".split()
ANIMALS = "dog cat bird fox duck owl frog horse".split()
PLACES = "park house garden forest river school hill barn".split()
FEELINGS = "happy sad tired glad proud afraid".split()
WEATHER = "sunny cold rainy windy".split()


@dataclass(frozen=True)
class Cast:
    """Who and what one story is about; `a` owns `thing_a`, `b` owns `thing_b`."""

    a: str
    b: str
    thing_a: str  # colour and noun, "red kite"
    thing_b: str
    place: str
    place_2: str
    animal: str


def with_article(words: str) -> str:
    """'a red kite', 'an old hat'."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def name(rng: random.Random) -> str:
    """A common name or, more often, two or three syllables that nobody has heard before."""
    if rng.random() < 0.4:
        return rng.choice(NAMES)
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()


def cast(rng: random.Random) -> Cast:
    """Draw two different names, two things that share neither colour nor noun, and the rest."""
    a, b = name(rng), name(rng)
    while b == a:
        b = name(rng)
    colors, things = rng.sample(COLORS, 2), rng.sample(THINGS, 2)
    places = rng.sample(PLACES, 2)
    return Cast(
        a,
        b,
        f"{colors[0]} {things[0]}",
        f"{colors[1]} {things[1]}",
        places[0],
        places[1],
        rng.choice(ANIMALS),
    )


def _opening(c: Cast, rng: random.Random) -> str:
    had_a, had_b = with_article(c.thing_a), with_article(c.thing_b)
    return rng.choice(
        (
            f"Once upon a time {c.a} had {had_a}. {c.b} had {had_b}.",
            f"Once upon a time {c.a} had {had_a}, and {c.b} had {had_b}.",
            f"Once upon a time {c.a} and {c.b} lived in {with_article(c.place)}. {c.a} had {had_a}."
            f" {c.b} had {had_b}.",
            f"{c.a} had {had_a}. {c.b} was a friend of {c.a} and had {had_b}.",
            f"One day {c.a} found {had_a} near the {c.place}. {c.b} found {had_b}.",
            f"{c.a} and {c.b} were friends. {c.a} liked the {c.thing_a}. "
            f"{c.b} liked the {c.thing_b}.",
        )
    )


def _scene(c: Cast, rng: random.Random) -> str:
    weather = rng.choice(WEATHER)
    return rng.choice(
        (
            f"One day {c.a} and {c.b} went to the {c.place}.",
            f"It was a {weather} day. {c.a} met {c.b} at the {c.place}.",
            f"One {weather} day {c.b} came to the {c.place} to play with {c.a}.",
            f"{c.a} took the {c.thing_a} to the {c.place}. {c.b} took the {c.thing_b}.",
            f'"Let us go to the {c.place}," said {c.a}. "Yes," said {c.b}.',
        )
    )


def _trouble(c: Cast, rng: random.Random) -> str:
    """Something happens to the thing of a. The text says whose it was."""
    return rng.choice(
        (
            f"But {c.a} lost the {c.thing_a} on the way.",
            f"Then {with_article(c.animal)} ran away with the {c.thing_a}. {c.a} was sad.",
            f"The {c.thing_a} fell into the water. {c.a} was sad, and {c.b} was sad too.",
            f'{c.a} looked for the {c.thing_a}. "Where is the {c.thing_a}?" said {c.a}.',
            f"{c.b} wanted to play with the {c.thing_a}, but {c.a} said no.",
            f"{with_article(c.animal).capitalize()} was asleep on the {c.thing_a}, and {c.a} was "
            "afraid.",
        )
    )


def _help(c: Cast, rng: random.Random) -> str:
    """One or two different ways in which b helps."""
    return " ".join(
        rng.sample(
            (
                f'"I can help you, {c.a}," said {c.b}. They looked in the {c.place_2}.',
                f'{c.b} said to {c.a}, "You can have the {c.thing_b}."',
                f"{c.b} gave the {c.thing_b} to {c.a}, and {c.a} was happy again.",
                f"{c.b} put down the {c.thing_b} and ran to the {c.place_2} with {c.a}.",
                f"{with_article(c.animal).capitalize()} saw {c.a} and {c.b} and came to help.",
                f'{c.a} said to {c.b}, "Please help me." So {c.b} went to the {c.place_2}.',
            ),
            k=rng.choice((1, 2)),
        )
    )


def _turn(c: Cast, rng: random.Random) -> str:
    return rng.choice(
        (
            f"There {c.b} found the {c.thing_a} and gave it back to {c.a}.",
            f"At last {c.a} saw the {c.thing_a} near the {c.place_2}.",
            f'"Look, {c.a}! Here is the {c.thing_a}!" said {c.b}.',
            f"{c.a} found the {c.thing_a}, and {c.b} still had the {c.thing_b}.",
            f'The {c.animal} came back with the {c.thing_a}. "Thank you," said {c.a}.',
            f"So {c.a} played with the {c.thing_b}, and {c.b} played with the {c.thing_a}.",
        )
    )


def _ending(c: Cast, rng: random.Random) -> str:
    feeling = rng.choice(FEELINGS)
    return rng.choice(
        (
            f'{c.a} was happy. "Thank you, {c.b}," said {c.a}.',
            f"{c.a} and {c.b} went home and were happy.",
            f"Then {c.a} went home with the {c.thing_a}, and {c.b} went home with the {c.thing_b}.",
            f"{c.a} and {c.b} were {feeling}, and they played all day.",
            f'"You are a good friend, {c.b}," said {c.a}. The end.',
            f"From that day on {c.a} and {c.b} were the best friends. The end.",
        )
    )


def story(rng: random.Random) -> str:
    """One story of five to seven parts, about 100 tokens."""
    c = cast(rng)
    parts = [_opening(c, rng), _scene(c, rng), _trouble(c, rng), _help(c, rng)]
    parts += [_turn(c, rng), _ending(c, rng)]
    return " ".join(parts)


def stories(seed: int) -> Iterator[str]:
    """Stories without end, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        yield story(rng)
