"""Checks of sizes and texts that every room needs, with one wording."""

from collections.abc import Sequence


def at_least_one(name: str, value: object) -> None:
    """ValueError, naming the value, unless it is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_not_here(name: str, value: object, neutral: Sequence[object] = ()) -> None:
    """ValueError for what vLLM has and this engine has not, unless the value asks for nothing."""
    if value is not None and value not in neutral:
        raise ValueError(
            f"{name}={value!r}: vLLM has this, and the engine of this course has not. Leave it "
            "out, or run the same script with `from vllm import LLM`"
        )


def check_time(name: str, value: object) -> None:
    """ValueError, naming the value, unless it is a finite number of seconds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < 2**53:  # type: ignore[arg-type]  # a float counts so far
        raise ValueError(f"{name} must be a time in seconds, got {value!r}")


def check_text(name: str, value: object) -> None:
    """ValueError, naming the place, for a text with half of a character (a lone surrogate)."""
    if not isinstance(value, str):
        return
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} holds {value[error.start]!r} at character {error.start}, which is half of a "
            "character and no text: read the file with the encoding that it was written in"
        ) from None
