"""How pictures say things: sentences, counts, lists, parts, times, bytes.

Knows numbers and names; knows no picture.
"""

from collections.abc import Iterable

POLICIES = {  # name of the scheduler class -> how it is called
    "Scheduler": "one rule",
    "PrefillFirst": "prefill first",
    "StaticBatching": "static batching",
    "OneByOne": "one by one",
}


def counted(count: int, what: str) -> str:
    """`0 tokens`, `1 token`, `2 tokens`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def tokens(count: int) -> str:
    """`1 token`, `2 tokens`."""
    return counted(count, "token")


def listed(names: Iterable[str]) -> str:
    """`A`, `A and B`, `A, B and C`."""
    *first, last = list(names)
    return f"{', '.join(first)} and {last}" if first else last


def verb(names: Iterable[str], singular: str, many: str) -> str:
    """The names with their verb: `A waits`, `A and B wait`."""
    who = list(names)
    return f"{listed(who)} {singular if len(who) == 1 else many}"


def numbered(numbers: Iterable[int], what: str) -> str:
    """`cell 4`, `cells 0 and 1`, `cells 0 to 4`, `cells 1, 3 and 6`."""
    found = sorted(numbers)
    if len(found) == 1:
        return f"{what} {found[0]}"
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"{what}s {found[0]} to {found[-1]}"
    return f"{what}s {listed(map(str, found))}"


def signed(number: int) -> str:
    """+2, 0 or −2."""
    return f"+{number}" if number > 0 else str(number).replace("-", "−")


def percent(p: float) -> str:
    """A probability as whole per cents; what is nearly 0 or 1 reads the same on every machine."""
    if p < 0.005:
        return "< 1 %"
    return "> 99 %" if p >= 0.995 else f"{100 * p:.0f} %"


def share(p: float) -> str:
    """A part of a whole as `percent`; 100 % where it is all of it."""
    return "100 %" if p >= 1 - 1e-9 else percent(p)


def digits(value: float) -> str:
    """Three digits at least where there are so many: 8.5, 31.2, 1265."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def two_digits(value: float) -> str:
    """Two digits, three where they are whole: 0.53, 5.3, 53, 530."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def ms(seconds: float) -> str:
    """Seconds as milliseconds: 8.5 ms, 1265 ms."""
    return f"{digits(seconds * 1000)} ms"


def si(count: float) -> str:
    """A count in thousands, with a prefix to the unit that follows: 1.2 G."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {prefix}"
    return f"{count:.3g} "


def num_bytes(count: float) -> str:
    """Bytes as people say them: 10 GiB, 256 KiB, 300 bytes."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.4g} {unit}"
    return f"{count:.0f} bytes"
