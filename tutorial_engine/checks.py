"""Introduced in notebook 01. A check of sizes that every room needs, with one wording."""


def at_least_one(name: str, value: object) -> None:
    """ValueError, naming the value, unless it is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
