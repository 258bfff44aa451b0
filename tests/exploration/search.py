"""Search through all states of a model, up to a way to a broken law."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

__all__ = ["Model", "Outcome", "TooManyStates", "explore"]

State = Any
Step = Any


class Model(Protocol):
    """Something that can be explored."""

    def start(self) -> State:
        """Return the first state."""

    def moves(self, state: State) -> Iterable[tuple[Step, State, str]]:
        """Return what can happen next: the step, where it leads, and which law that breaks."""

    def canonical(self, state: State) -> State:
        """Return the one of the states like this, but for the names of nodes, that is kept."""

    def told(self, step: Step) -> str:
        """Return a step in plain words."""


class Outcome(NamedTuple):
    """
    What a search found.

    Attributes:
        states: How many different states were seen.
        broken: The law that is broken, "" if none is.
        steps: A way there, in plain words.
    """

    states: int
    broken: str
    steps: tuple[str, ...] = ()


class TooManyStates(Exception):
    """A search was cut off: it says nothing."""


def explore(model: Model, *, shortest: bool = True, most: int = 20_000_000) -> Outcome:
    """
    Return the outcome of looking at every state of *model*, or at all up to a broken law.

    Args:
        model: To be explored.
        shortest: Whether the way to a broken law is to be the shortest; another is found sooner.
        most: States to be seen.

    Raises:
        TooManyStates: There are more than *most*.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # or it looks through millions of tuples again and again
    try:
        return search(model, shortest=shortest, most=most)
    finally:
        if was_enabled:
            gc.enable()


def search(model: Model, *, shortest: bool, most: int) -> Outcome:
    start = model.canonical(model.start())
    came_from: dict[State, State | None] = {start: None}
    ahead = deque([start])
    moves, canonical, following = model.moves, model.canonical, ahead.popleft
    if not shortest:
        following = ahead.pop
    while ahead:
        state = following()
        for _, to, broken in moves(state):
            after = canonical(to)
            if broken:
                way = [after, *way_to(state, came_from)][::-1]
                return Outcome(len(came_from), broken, retold(model, way))
            if after not in came_from:
                came_from[after] = state
                ahead.append(after)
        if len(came_from) > most:
            raise TooManyStates(most)
    return Outcome(len(came_from), "")


def way_to(state: State | None, came_from: dict[State, State | None]) -> list[State]:
    """Return the states from *state* back to the first one."""
    way = []
    while state is not None:
        way.append(state)
        state = came_from[state]
    return way


def retold(model: Model, way: list[State]) -> tuple[str, ...]:
    """Return the steps of a way through canonical states, each node under one name throughout."""
    state, steps = model.start(), []
    for at, target in enumerate(way[1:], 1):
        is_last = at == len(way) - 1
        step, state, broken = next(
            (step, to, broken)
            for step, to, broken in model.moves(state)
            if model.canonical(to) == target and bool(broken) == is_last
        )
        steps.append(model.told(step))
        if broken:
            steps.append(broken)
    return tuple(steps)
