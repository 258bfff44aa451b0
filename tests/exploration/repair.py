"""
One client holds the lock and renews it, another one wants it; time passes in ticks.

Clocks are right. Messages take as long as they like, answers may be lost, and one node may
lose its memory once. The law (PROTOCOL 3.6): nobody trusts the lock while another does. The
holder x trusts it up to the end of its lease, and where the lease goes on, also in between.

What is left out because something that is looked at covers it:

- An answer comes at once or never, a no never, and a round begins with the first of its
  questions that is executed: all that only gives clients more, and longer, leases.
- A client gives up waiting when it begins its next round.
- What y has under way once it holds the lock could only stand in the way of x.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from exploration.decisions import Move, acquired, confirmed, renewed, withdrawn
from exploration.nodes import (
    LOST,
    NOBODY,
    NOTHING,
    WAITING,
    Off,
    acquire,
    granted,
    is_positive,
    renew,
    repaired,
)

__all__ = ["Repair", "configurations"]

X, Y = 1, 2
#: Of the lease that x has in the beginning.
FENCE = 1
#: Rounds of y; those from 2 on confirm.
IDLE, ASKED, HOLDS = 0, 1, 99
#: Elapsed ticks of a round of which nothing was executed yet.
UNBEGUN = -1


class Node(NamedTuple):
    """
    What a node stores, and what is under way to it.

    Attributes:
        owner: Whose key it has.
        left: Of the key [ticks].
        fence: Its fence.
        quarantine: What is left of it [ticks].
        late: Whether the ACQUIRE of x is still under way.
        old: How many renewals of earlier rounds are under way.
        to_x: What it answered in the present round of x.
        asked: Whether the ACQUIRE of y is still under way.
        to_y: What it answered in the present round of y.
    """

    owner: int
    left: int
    fence: int
    quarantine: int
    late: int
    old: int
    to_x: int
    asked: int
    to_y: int


class Holder(NamedTuple):
    """
    What x has and does.

    Attributes:
        left: Of its lease [ticks].
        elapsed: Since its present round began [ticks], or `UNBEGUN`.
        rounds: How many more it may begin.
    """

    left: int
    elapsed: int
    rounds: int


class Contender(NamedTuple):
    """
    What y does.

    Attributes:
        round: Which one.
        fence: That it confirms.
        elapsed: Since the round began [ticks], or `UNBEGUN`.
    """

    round: int
    fence: int
    elapsed: int


#: Three nodes, a holder, a contender, and how many restarts may yet come.
State = tuple[Any, ...]
Step = tuple[Any, ...]
Moved = tuple[Step, State, str]


@dataclass(frozen=True)
class Repair:
    """
    One configuration.

    Attributes:
        third: What the third node has of x: its key (``"held"``), nothing (``"free"``), or the
            request that is still under way (``"late"``).
        proposal: Of y.
        learns: Whether a client hears at once that a connection has died, or never.
        ttl: Of all leases [ticks].
        rounds: How often x begins to renew at most.
        confirmations: How many confirming rounds y makes at most.
        restarts: How often a node loses its memory.
        off: Guards that are switched off.
    """

    third: str = "held"
    proposal: int = 2
    learns: bool = True
    ttl: int = 3
    rounds: int = 2
    confirmations: int = 1
    restarts: int = 1
    off: Off = NOTHING
    _known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def start(self) -> State:
        """Return the moment in which x was granted two nodes, and perhaps the third."""
        held = Node(X, self.ttl, FENCE, 0, 0, 0, LOST, 1, WAITING)
        free = Node(NOBODY, 0, FENCE - 1, 0, int(self.third == "late"), 0, LOST, 1, WAITING)
        third = held if self.third == "held" else free
        x, y = Holder(self.ttl, UNBEGUN, self.rounds), Contender(IDLE, 0, UNBEGUN)
        return (held, held, third, x, y, self.restarts)

    @staticmethod
    def canonical(state: State) -> State:
        """Return the state with its nodes in order: they are all alike."""
        a, b, c, *rest = state
        if a <= b <= c:
            return state
        return (*sorted((a, b, c)), *rest)

    def moves(self, state: State) -> Iterator[Moved]:
        x, y, restarts = state[3:]
        if x.left == 0 and not self._may_go_on():
            return  # nothing makes it trust the lock again
        if y.round == ASKED and y.elapsed >= self.ttl:
            return  # too late for a grant
        yield self._tick(state)
        for position in range(3):
            node: Node = state[position]
            yield from self._heard_by_x(state, position, node)
            yield from self._unheard_by_x(state, position, node)
            if y.round != HOLDS:
                yield from self._heard_by_y(state, position, node)
            elif node.owner == Y:
                gone = node._replace(owner=NOBODY, left=0)
                yield ("RELEASE of y", position), at(state, position, gone), ""
            if restarts:
                step = ("restarts without memory", position)
                restarted = self._restarted(node, y_has_sent=y.elapsed != UNBEGUN)
                yield step, (*at(state, position, restarted)[:5], restarts - 1), ""

    def _may_go_on(self) -> bool:
        """Return whether x would take over a lease after the end of the old one."""
        all_extended = (granted(0),) * 3
        revived = renewed(all_extended, True, 0, 0, self.ttl, self.off).kind == "hold"
        return revived and "own-clock" in self.off

    # -- time, and nodes ---------------------------------------------------------------

    def _tick(self, state: State) -> Moved:
        nodes = (self._later(node) for node in state[:3])
        x, y = state[3:5]
        x = x._replace(left=max(0, x.left - 1), elapsed=self._one_more(x.elapsed))
        y = y._replace(elapsed=self._one_more(y.elapsed))
        return ("a tick",), (*nodes, x, y, state[5]), ""

    def _one_more(self, elapsed: int) -> int:
        return elapsed if elapsed == UNBEGUN else min(elapsed + 1, self.ttl)

    def _later(self, node: Node) -> Node:
        found: Node | None = self._known.get(node)
        if found is None:
            owner = node.owner if node.left > 1 else NOBODY
            left, quarantine = max(0, node.left - 1), max(0, node.quarantine - 1)
            found = node._replace(owner=owner, left=left, quarantine=quarantine)
            self._known[node] = found
        return found

    def _restarted(self, node: Node, *, y_has_sent: bool) -> Node:
        """Return a node that has lost its memory, and what was under way to it."""
        is_guarded = "restart-guard" not in self.off
        to_x = LOST if node.to_x == WAITING else node.to_x
        to_y = LOST if node.to_y == WAITING and y_has_sent else node.to_y
        asked = 0 if y_has_sent else node.asked
        if self.learns and "dead-yes" not in self.off:
            to_x, to_y = withdrawn(to_x), withdrawn(to_y)
        return Node(NOBODY, 0, 0, self.ttl if is_guarded else 0, 0, 0, to_x, asked, to_y)

    def _acquired(self, node: Node, who: int, proposed: int) -> tuple[Node, int]:
        """Return the node after an ACQUIRE, and its answer."""
        in_quarantine = node.quarantine > 0
        *done, answer = acquire(node.owner, node.fence, in_quarantine, who, proposed, self.off)
        owner, fence = done
        return node._replace(owner=owner, left=self.ttl, fence=fence), answer

    def _renewed(self, node: Node, who: int, least: int, *, repair: bool) -> tuple[Node, int]:
        """Return the node after a RENEW, and its answer; without a yes it is not to be used."""
        in_quarantine = node.quarantine > 0
        *done, answer = renew(node.owner, node.fence, in_quarantine, who, least, repair, self.off)
        owner, fence = done
        return node._replace(owner=owner, left=self.ttl, fence=fence), answer

    # -- the holder ---------------------------------------------------------------------

    def _heard_by_x(self, state: State, position: int, node: Node) -> Iterator[Moved]:
        """Yield a renewal of the present round, and of the next, that x has the answer of."""
        for begun, note in self._rounds_of_x(state):
            at_node: Node = begun[position]
            if at_node.to_x != WAITING:
                continue
            new, answer = self._renewed(at_node, X, FENCE, repair=True)
            if new.owner != X:
                continue
            kind = answer
            if is_positive(answer):
                kind = repaired(0) if answer % 2 else granted(0)  # fences are not looked at
            elif node.quarantine == 0:
                continue
            after = at(begun, position, new._replace(to_x=kind))
            yield from self._x_decides((f"RENEW of x{note}", position, answer), after)

    def _rounds_of_x(self, state: State) -> Iterator[tuple[State, str]]:
        """Yield the state as it is, and as it is once x has begun another round."""
        x = state[3]
        if x.elapsed != UNBEGUN:
            yield state, ""
        if x.rounds and self._move_of_x(state, timed_out=True).kind == "again":
            nodes = (
                node._replace(old=node.old + (node.to_x == WAITING), to_x=WAITING)
                for node in state[:3]
            )
            begun = x._replace(elapsed=0, rounds=x.rounds - 1)
            yield (*nodes, begun, *state[4:]), ", a new round"

    def _move_of_x(self, state: State, *, timed_out: bool) -> Move:
        x = state[3]
        answers = (state[0].to_x, state[1].to_x, state[2].to_x)
        elapsed = max(0, x.elapsed)
        return renewed(answers, timed_out, elapsed, x.left, self.ttl, self.off)

    def _x_decides(self, step: Step, state: State) -> Iterator[Moved]:
        x, y = state[3:5]
        move = self._move_of_x(state, timed_out=False)
        if move.kind == "over":
            return  # x is told
        if move.kind != "hold":
            yield step, state, ""
            return
        broken = ""
        if y.round == HOLDS and move.left:
            broken = "overlap: x goes on, and y has held the lock since the lease of x ended"
        nodes = (
            node._replace(old=node.old + (node.to_x == WAITING), to_x=LOST) for node in state[:3]
        )
        goes_on = Holder(move.left, UNBEGUN, x.rounds)
        yield step, (*nodes, goes_on, *state[4:]), broken

    def _unheard_by_x(self, state: State, position: int, node: Node) -> Iterator[Moved]:
        """Yield what x has under way and has no answer of."""
        if node.late:
            new, answer = self._acquired(node, X, FENCE)
            if is_positive(answer):
                step = ("ACQUIRE of x, late", position, answer)
                yield step, at(state, position, new._replace(late=0)), ""
        if node.old or node.to_x == WAITING:
            new, answer = self._renewed(node, X, FENCE, repair=True)
            if new.owner == X:
                left = {"old": node.old - 1} if node.old else {"to_x": LOST}
                step = ("RENEW of x, unheard", position, answer)
                yield step, at(state, position, new._replace(**left)), ""

    # -- the contender ----------------------------------------------------------------------

    def _heard_by_y(self, state: State, position: int, node: Node) -> Iterator[Moved]:
        """Yield what y has under way, with its answer and without."""
        y = state[4]
        if node.asked:
            new, answer = self._acquired(node, Y, self.proposal)
            if is_positive(answer):
                asked = Contender(ASKED, 0, 0) if y.round == IDLE else y
                new = new._replace(asked=0)
                began = (*at(state, position, new)[:4], asked, state[5])
                to_y = LOST if asked.round == ASKED else node.to_y
                unheard = at(began, position, new._replace(to_y=to_y))
                yield ("ACQUIRE of y, unheard", position, answer), unheard, ""
                if asked.round == ASKED:
                    heard = at(began, position, new._replace(to_y=answer))
                    yield self._y_decides(("ACQUIRE of y", position, answer), heard)
        for begun, note in self._confirmations_of_y(state):
            at_node: Node = begun[position]
            if at_node.to_y != WAITING:
                continue
            new, answer = self._renewed(at_node, Y, begun[4].fence, repair=False)
            if is_positive(answer):
                heard = at(begun, position, new._replace(to_y=answer))
                yield self._y_decides((f"CONFIRM of y{note}", position, answer), heard)
                unheard = at(begun, position, new._replace(to_y=LOST))
                yield (f"CONFIRM of y{note}, unheard", position, answer), unheard, ""

    def _confirmations_of_y(self, state: State) -> Iterator[tuple[State, str]]:
        """Yield the state once the present confirming round has begun, and once the next has."""
        y = state[4]
        if y.round <= ASKED:
            return
        begun = y._replace(elapsed=max(0, y.elapsed))
        yield (*state[:4], begun, state[5]), ""
        if y.elapsed == UNBEGUN:
            return
        move = self._move_of_y(state, timed_out=True)
        if move.kind == "confirm" and y.round - ASKED < self.confirmations:
            nodes = (node._replace(to_y=WAITING) for node in state[:3])
            following = Contender(y.round + 1, move.fence, 0)
            yield (*nodes, state[3], following, state[5]), ", a new round"

    def _move_of_y(self, state: State, *, timed_out: bool) -> Move:
        y = state[4]
        answers = (state[0].to_y, state[1].to_y, state[2].to_y)
        if y.round == ASKED:
            return acquired(answers, timed_out, y.elapsed, self.ttl, self.off)
        number = y.round - ASKED
        return confirmed(answers, y.fence, number, timed_out, y.elapsed, self.ttl, self.off)

    def _y_decides(self, step: Step, state: State) -> Moved:
        x, y, restarts = state[3:]
        move = self._move_of_y(state, timed_out=False)
        if move.kind == "wait":
            return step, state, ""
        nodes = [node._replace(to_y=WAITING) for node in state[:3]]
        broken = ""
        after = Contender(ASKED, 0, self.ttl)  # it has given up
        if move.kind == "hold":
            after = Contender(HOLDS, move.fence, UNBEGUN)
            nodes = [node._replace(asked=0) for node in nodes]
            if x.left:
                broken = f"overlap: y is granted the lock, x trusts it for {x.left} more ticks"
        elif move.kind == "confirm" and y.round - ASKED < self.confirmations:
            after = Contender(y.round + 1, move.fence, UNBEGUN)
        return step, (*nodes, x, after, restarts), broken

    # -- in words ------------------------------------------------------------------------

    @staticmethod
    def told(step: Step) -> str:
        if len(step) == 1:
            return str(step[0])
        what, position, *answers = step
        words = f"{'ABC'[position]}: {what}"
        for answer in answers:
            words += f": {answer_in_words(answer)}"
        return words


def at(state: State, position: int, node: Node) -> State:
    """Return the state with another node at *position*."""
    return (*state[:position], node, *state[position + 1 :])


def answer_in_words(answer: int) -> str:
    if not is_positive(answer):
        return "quarantined"
    return f"{'repaired' if answer % 2 else 'yes'}, fence {answer // 2}"


def configurations() -> Iterator[dict[str, Any]]:
    """Yield what the third node has of x in the beginning, and what y proposes."""
    for third, proposal in product(("held", "free", "late"), (1, 2)):
        yield {"third": third, "proposal": proposal}
