"""Rates: at most so many starts of a name in any window."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.lease import DRIFT_FLOOR
from celery_redlock.lock.rules import in_seconds
from celery_redlock.lock.waiting.waiting import MOST_PLACES

__all__ = ["Rate", "rate_of"]

#: What Celery writes after the slash -> how long that is [s].
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
WRITTEN = re.compile(r"\s*([0-9]{1,9})\s*(?:/\s*([smh])\s*)?")
#: Most starts that a rate may have: what a text of nine digits says.
MOST_STARTS = 10**9 - 1
#: Most starts at once where the user does not say: in a window as short as can be, but a burst of
#: a second's starts, or of a few, costs no throughput.
FEW, MANY = 10, 100
#: Longest time of one start [s]: a year.
LONGEST = 366 * 24 * 3600.0
#: Share of a window, and least part of it [s], by which a start may come later than its place was
#: asked for. Places stand for so much longer.
SLACK, LEAST_SLACK = 0.05, 0.05
#: How much faster a burst has to be that does not divide the count.
WORTH_IT = 1.1
#: Share of the slack that the grant may take: the rest is for the way to the body.
GRANT_TAKES = 0.6


@dataclass(frozen=True)
class Rate:
    """
    At most *count* starts in *per* seconds; at most *burst* in each window of `window` seconds.

    Attributes:
        count: Starts [1 to 999,999,999].
        per: In how long [s, > 0, or a timedelta].
        burst: Starts that may come at once [1 to 1000, at most *count*]. None for as many as come
            in a second, but 10 at least and 100 at most, and so that no more than *count* come in
            *per*: with one that does not divide *count*, more may.
        window: In how long at most *burst* starts come, measured by the clocks of the nodes [s].
    """

    count: int
    per: float
    burst: int
    window: float = field(init=False, repr=False)

    def __init__(self, count: int, per: float | timedelta, burst: int | None = None) -> None:
        where = "Rate(count, per, burst)"
        if type(count) is not int or not 1 <= count <= MOST_STARTS:
            raise ConfigurationError(
                f"{where}: count must be a whole number from 1 to {MOST_STARTS}, got {count!r}"
            )
        seconds = in_seconds(f"{where}: per", per)
        if not 0 < seconds <= LONGEST:
            raise ConfigurationError(
                f"{where}: per must be more than 0 s and at most {LONGEST:g} s, got {per!r}"
            )
        most = min(count, MOST_PLACES)
        if burst is not None and (type(burst) is not int or not 1 <= burst <= most):
            raise ConfigurationError(
                f"{where}: burst must be a whole number from 1 to {most}, or None, got {burst!r}"
            )
        object.__setattr__(self, "count", count)  # as frozen dataclasses set their fields
        object.__setattr__(self, "per", seconds)
        usual, window = burst_of(count, seconds)
        if burst not in (None, usual):
            window = burst * seconds / count
        object.__setattr__(self, "burst", burst or usual)
        object.__setattr__(self, "window", window)

    @property
    def slack(self) -> float:
        """How soon a start has to come once its place was asked for [s]."""
        return slack_of(self.window)

    @property
    def stands_for(self) -> float:
        """For how long a start has its place [s]."""
        return self.window + self.slack + DRIFT_FLOOR

    @property
    def within(self) -> float:
        """How soon the grant has to come after the place was asked for [s]."""
        return GRANT_TAKES * self.slack

    def __str__(self) -> str:
        unit = next((name for name, length in UNITS.items() if length == self.per), None)
        return f"{self.count}/{unit or f'{self.per:g} s'}"


def slack_of(window: float) -> float:
    return max(LEAST_SLACK, SLACK * window)


def burst_of(count: int, per: float) -> tuple[int, float]:
    """
    Return a burst, and its window [s], of which no more than *count* starts come in *per*.

    The largest that divides *count*, unless its window is so short that the slack costs too much:
    101 in a second have no other than 1, and come as 100 in a second.
    """
    most = min(count, max(FEW, int(min(MANY, count / per))))
    dividing = next(burst for burst in range(most, 0, -1) if count % burst == 0)
    exact = dividing, dividing * per / count
    if dividing == most:
        return exact
    fastest = max(((b, per / (count // b)) for b in range(most, 0, -1)), key=starts_per_second)
    return exact if starts_per_second(exact) * WORTH_IT >= starts_per_second(fastest) else fastest


def starts_per_second(burst_and_window: tuple[int, float]) -> float:
    burst, window = burst_and_window
    return burst / (window + slack_of(window))


def rate_of(where: str, value: Any) -> Rate | None:
    """Return the rate that *value* is: a `Rate`, None, or one as Celery writes it: ``"100/m"``."""
    if value is None or isinstance(value, Rate):
        return value
    match = WRITTEN.fullmatch(str(value)) if type(value) in (int, str) else None
    if match is None or int(match[1]) == 0:
        raise ConfigurationError(
            f"{where} must be a rate like '100/m', '5/s' or '1000/h', Rate(count, per), or None; "
            f"got {value!r}"
        )
    return Rate(int(match[1]), UNITS[match[2] or "s"])
