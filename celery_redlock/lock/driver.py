"""Carry out the effects of an algorithm: ask all nodes, send to all nodes, or sleep."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from celery_redlock.lock import held as holding
from celery_redlock.lock.algorithm.effects import Ask, Send, Sleep
from celery_redlock.lock.held import ensure_not_forked
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.scripts.requests import Request
from celery_redlock.lock.scripts.votes import Ballot

if TYPE_CHECKING:  # it imports redis, and some only publish
    from celery_redlock.lock.nodes.fanout import Fanout

__all__ = ["Driver"]

T = TypeVar("T")


class Driver:
    """Drives algorithms over the connections of one process. Safe from any thread."""

    def __init__(self, fanout: Fanout, sleep: Callable[[float], None]) -> None:
        self._fanout = fanout
        self._sleep = sleep
        #: One label per node, in their order.
        self.labels = fanout.labels
        self._nodes = len(fanout.labels)

    def drive(  # noqa: C901  one kind of step after the other
        self, steps: Generator[Ask | Send | Sleep, Any, T], ends: float | None = None
    ) -> T:
        """
        Do what *steps* say; wait for no answer beyond *ends* [s, our clock].

        In a forked child they say nothing more: they are of the parent, who goes on with them. The
        child would release what the parent is granted.
        """
        began_in = holding.process
        answer: Ballot | bool | None = None
        problem: BaseException | None = None
        while True:
            try:
                while True:
                    if holding.process is not began_in:  # no call, on every task's path
                        ensure_not_forked(began_in)
                    step = steps.send(answer) if problem is None else steps.throw(problem)
                    answer = problem = None
                    if isinstance(step, Ask):
                        answer = self.ask(step, ends)
                    elif isinstance(step, Send):
                        self.tell(step.request, step.skip)
                    elif step.waiting is not None:
                        answer = step.waiting.wait(step.seconds)
                    else:
                        self._sleep(step.seconds)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            except BaseException as error:
                if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:  # its own last word
                    raise
                if holding.process is not began_in:
                    steps.close()
                    raise
                problem = error

    def tell(self, request: Request, skip: frozenset[int] = frozenset()) -> None:
        """Send *request* to the nodes, even if interrupted; sending it twice is harmless."""
        try:
            self._fanout.tell(Round(request, self._nodes, None), skip)
        except BaseException:
            self._fanout.tell(Round(request, self._nodes, None), skip)
            raise

    def ask(self, step: Ask, ends: float | None = None) -> Ballot:
        a_round = Round(step.request, self._nodes, step.decided)
        self._fanout.ask((a_round,), ends)
        return a_round.ballot

    def ask_all(self, steps: Sequence[Ask], ends: float | None = None) -> list[Ballot]:
        rounds = [Round(step.request, self._nodes, step.decided) for step in steps]
        self._fanout.ask(rounds, ends)
        return [a_round.ballot for a_round in rounds]
