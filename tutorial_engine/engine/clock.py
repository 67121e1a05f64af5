"""Where the engine reads the time: the machine's clock, or a made one.

Knows seconds, and how many tokens a forward ran; knows no request and no model.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time in seconds from some start; only differences mean anything."""

    def now(self) -> float:
        """Seconds."""
        ...

    def forward_done(self, num_tokens: int) -> None:
        """The engine has just run num_tokens in one forward."""
        ...

    def wait_until(self, when: float) -> None:
        """Nothing is to be done before then."""
        ...


class WallClock:
    """The time that really passes."""

    now = staticmethod(time.perf_counter)

    def forward_done(self, num_tokens: int) -> None:
        """As Clock.forward_done: the time has passed by itself."""

    def wait_until(self, when: float) -> None:
        """As Clock.wait_until, asleep."""
        time.sleep(max(0.0, when - self.now()))


class VirtualClock:
    """A stated price per forward and per token of it: the same times on every machine.

    That is the shape of real costs: a forward reads all weights whatever it runs, and computes for
    each token. Defaults in seconds; bookkeeping is free. ValueError for a negative price.
    """

    def __init__(self, per_forward: float = 0.010, per_token: float = 0.001) -> None:
        if not (per_forward >= 0 and per_token >= 0 and per_forward + per_token > 0):
            raise ValueError(
                "the prices must not be negative and not both 0, got "
                f"per_forward={per_forward}, per_token={per_token}"
            )
        self.per_forward, self.per_token = per_forward, per_token
        self._now = 0.0

    @property
    def prices(self) -> dict[str, float]:
        """What it asks, for captions."""
        return {"seconds_per_forward": self.per_forward, "seconds_per_token": self.per_token}

    def now(self) -> float:
        """As Clock.now."""
        return self._now

    def forward_done(self, num_tokens: int) -> None:
        """As Clock.forward_done: the forward's price passes."""
        self._now += self.per_forward + num_tokens * self.per_token

    def wait_until(self, when: float) -> None:
        """As Clock.wait_until, at once."""
        self._now = max(self._now, when)
