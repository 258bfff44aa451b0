"""
Two clients ask three nodes for a fence, without any clock.

A key may have lapsed whenever somebody looks at it, and a message may take for ever; so none
of what is true here depends on time (PROTOCOL 3.1). The law: fences are unique, and grow for
whoever asks after a grant.

What is left out because something that is looked at covers it:

- An answer comes at once or never: a later one only delays who waits for it.
- A key lapses, a node restarts, and a third client comes by, just before somebody asks the
  node: nobody sees it earlier.
- A client begins when its first question is executed, which is the latest that it can be.
- A lost message, a refusal that gets lost, and a release are a message that takes for ever, one
  that is not waited for, and a key that lapses.
- A confirmation is not executed once its round is over; there it could only raise a fence under
  a key of its own client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product
from typing import Any

from exploration.decisions import Move, acquired, confirmed
from exploration.nodes import LOST, NOBODY, NOTHING, WAITING, Off, acquire, is_positive, renew

__all__ = ["Fencing", "configurations"]

X, Y = 0, 1
#: Where a client is: its round, of which those from 2 on confirm.
IDLE, ASKED, HOLDS, IS_OVER = 0, 1, 98, 99

# A node: owner, fence, is quarantined, and of each client whether its question is still under
# way, and what it was answered in its present round.
Node = tuple[int, ...]
UNDER_WAY = (3, 5)
ANSWER = (4, 6)
# Round, fence, and whether the other one held the lock when this one asked.
Client = tuple[int, int, bool]
#: Three nodes, two clients, and how many restarts and third clients may yet come.
State = tuple[Any, ...]
#: Client, what, node, what happened to the node before, the node's answer, whether it came.
Step = tuple[Any, ...]


@dataclass(frozen=True)
class Fencing:
    """
    One configuration.

    Attributes:
        fences: What the nodes store in the beginning.
        proposals: Of the two clients.
        rounds: How many confirming rounds a client makes at most.
        restarts: How often a node loses its memory.
        bumps: How often a third client is granted one node, and loses it again.
        off: Guards that are switched off.
    """

    fences: tuple[int, ...]
    proposals: tuple[int, ...]
    rounds: int = 2
    restarts: int = 0
    bumps: int = 0
    off: Off = NOTHING
    _known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def start(self) -> State:
        """Return nodes that are free, and clients that have not asked yet."""
        a, b, c = ((NOBODY, fence, 0, 1, WAITING, 1, WAITING) for fence in self.fences)
        idle = (IDLE, 0, False)
        return (a, b, c, idle, idle, self.restarts, self.bumps)

    @staticmethod
    def canonical(state: State) -> State:
        """Return the state with its nodes in order: they are all alike."""
        a, b, c, *rest = state
        if a <= b <= c:
            return state
        return (*sorted((a, b, c)), *rest)

    def moves(self, state: State) -> Iterator[tuple[Step, State, str]]:
        rounds = (state[3][0], state[4][0])
        if min(rounds) >= HOLDS or IS_OVER in rounds:  # no two grants any more
            return
        for who in (X, Y):
            number = rounds[who]
            if number == HOLDS:
                continue
            for position in range(3):
                for way in self._ways(state[position], who, state[3 + who], state[5], state[6]):
                    yield self._after(state, who, position, way)
            if number >= ASKED:
                yield from self._timed_out(state, who)

    # -- a node ----------------------------------------------------------------------

    def _ways(self, node: Node, who: int, client: Client, *left: int) -> list[Any]:
        """Return what can become of the client's next question at this node, if that is a yes."""
        key = (node, who, *client[:2], *left)
        found: list[Any] | None = self._known.get(key)
        if found is None:
            asks = self._acquires if client[0] <= ASKED else self._confirms
            found = self._known[key] = list(asks(node, who, client[1], *left))
        return found

    def _acquires(self, node: Node, who: int, _: int, *left: int) -> Iterator[Any]:
        for before, became, still_left in self._meanwhile(node, *left):
            if not became[UNDER_WAY[who]]:
                continue
            new, answer = self._acquire(became, who)
            if is_positive(answer):
                new[ANSWER[who]] = answer
                yield (*before, ("ACQUIRE", who, answer, True)), tuple(new), still_left

    def _confirms(self, node: Node, who: int, least: int, *left: int) -> Iterator[Any]:
        if node[ANSWER[who]] != WAITING:
            return
        repair = "confirm-sets-nothing" in self.off
        for before, became, still_left in self._meanwhile(node, *left):
            owner, fence, held_back = became[:3]
            *stored, answer = renew(owner, fence, bool(held_back), who + 1, least, repair, self.off)
            for came in (True, False) if is_positive(answer) else ():
                new = [*stored, *became[2:]]
                new[ANSWER[who]] = answer if came else LOST
                yield (*before, ("CONFIRM", who, answer, came)), tuple(new), still_left

    def _acquire(self, node: Node, who: int) -> tuple[list[int], int]:
        owner, fence, held_back = node[:3]
        proposed = self.proposals[who]
        *stored, answer = acquire(owner, fence, bool(held_back), who + 1, proposed, self.off)
        new = [*stored, *node[2:]]
        new[UNDER_WAY[who]] = 0
        return new, answer

    def _meanwhile(self, node: Node, *left: int) -> Iterator[Any]:
        """Yield all that the node may have become since somebody was answered."""
        seen = {(node, left)}
        ahead: list[Any] = [((), node, left)]
        for before, became, still_left in ahead:  # grows
            yield before, became, still_left
            for what, new, new_left in self._unheard(became, *still_left):
                if (new, new_left) not in seen:
                    seen.add((new, new_left))
                    ahead.append(((*before, what), new, new_left))

    def _unheard(self, node: Node, restarts: int, bumps: int) -> Iterator[Any]:
        """Yield what can happen at a node without that anybody hears of it."""
        _, fence, held_back, *asked = node
        if node[0] != NOBODY:
            yield ("the key lapses",), (NOBODY, *node[1:]), (restarts, bumps)
        for who in (X, Y):
            new, answer = self._acquire(node, who)
            if node[UNDER_WAY[who]] and is_positive(answer):
                yield ("ACQUIRE", who, answer, False), tuple(new), (restarts, bumps)
        if bumps and not held_back and node[0] == NOBODY:
            new = [NOBODY, fence + 1, held_back, *asked]
            yield ("a third client is granted it",), tuple(new), (restarts, bumps - 1)
        if restarts:
            guarded = int("restart-guard" not in self.off)
            yield ("restarts without memory",), (NOBODY, 0, guarded, *asked), (restarts - 1, bumps)

    # -- a client ----------------------------------------------------------------------

    def _after(self, state: State, who: int, position: int, way: Any) -> tuple[Step, State, str]:
        """Return the state in which the node has executed, and the client has heard of it."""
        happened, node, left = way
        step = (position, happened)
        nodes = [*state[:3]]
        nodes[position] = node
        clients = [*state[3:5]]
        for one in (X, Y):  # both may have begun
            if clients[one][0] == IDLE and (one == who or not node[UNDER_WAY[one]]):
                clients[one] = (ASKED, 0, clients[1 - one][0] == HOLDS)
        if not happened[-1][-1]:  # unheard
            return step, (*nodes, *clients, *left), ""
        slot = ANSWER[who]
        answers = (nodes[0][slot], nodes[1][slot], nodes[2][slot])
        number, fence, _ = clients[who]
        if number == ASKED:
            move = acquired(answers, off=self.off)
        else:
            move = confirmed(answers, fence, number - ASKED, False, off=self.off)
        return self._moved(step, nodes, clients, left, who, move)

    def _timed_out(self, state: State, who: int) -> Iterator[tuple[Step, State, str]]:
        nodes, clients, slot = [*state[:3]], [*state[3:5]], ANSWER[who]
        answers = (nodes[0][slot], nodes[1][slot], nodes[2][slot])
        number, fence, _ = clients[who]
        if number == ASKED:
            move = acquired(answers, True, off=self.off)
        else:
            move = confirmed(answers, fence, number - ASKED, True, off=self.off)
        if move.kind != "over":  # or it may as well wait for ever
            yield self._moved((who, "waits no longer"), nodes, clients, state[5:], who, move)

    def _moved(
        self, step: Step, nodes: list[Node], clients: list[Client], left: Any, who: int, move: Move
    ) -> tuple[Step, State, str]:
        broken = ""
        if move.kind != "wait":
            slot, (number, _, after) = ANSWER[who], clients[who]
            nodes = [(*node[:slot], WAITING, *node[slot + 1 :]) for node in nodes]
            clients[who] = (IS_OVER, 0, False)
            if move.kind == "hold":
                broken = broken_law(move.fence, clients[1 - who], after=after)
                clients[who] = (HOLDS, move.fence, False)
            elif move.kind == "confirm" and number - ASKED < self.rounds:
                clients[who] = (number + 1, move.fence, after)
        return step, (*nodes, *clients, *left), broken

    # -- in words ------------------------------------------------------------------------

    @staticmethod
    def told(step: Step) -> str:
        if step[1] == "waits no longer":
            return f"{'xy'[step[0]]} {step[1]}"
        position, happened = step
        return f"{'ABC'[position]}: " + ", ".join(event_in_words(*event) for event in happened)


def event_in_words(what: str, who: int = 0, answer: int = 0, *came: bool) -> str:
    if what not in {"ACQUIRE", "CONFIRM"}:
        return what
    words = f"{what} of {'xy'[who]} {'repaired' if answer % 2 else 'granted'}, fence {answer // 2}"
    return words if all(came) else f"{words}, unheard"


def broken_law(fence: int, other: Client, *, after: bool) -> str:
    """Return which law a grant of *fence* breaks, given the *other* client."""
    if other[0] != HOLDS:
        return ""
    if fence == other[1]:
        return f"duplicate: both hold fence {fence}"
    if after and fence < other[1]:
        return f"regression: fence {fence} asked for after a grant of {other[1]}"
    return ""


def configurations(
    largest_fence: int = 2, largest_proposal: int = 3, *, merge: bool = True
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """
    Yield fences, proposals, and how many configurations are like that one.

    Nodes are alike, and so are clients: what differs only by their names comes once. With
    *merge*, so does what becomes the same with the first question of anybody.
    """
    fences = combinations_with_replacement(range(largest_fence + 1), 3)
    proposals = combinations_with_replacement(range(1, largest_proposal + 1), 2)
    alike: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for stored, proposed in product(fences, proposals):
        is_twofold = proposed[0] != proposed[1]  # x and y may change places
        alike[simplest(stored, proposed) if merge else (stored, proposed)] += 1 + is_twofold
    for (simple, wanted), times in alike.items():
        yield simple, wanted, times


def simplest(
    stored: tuple[int, ...], proposed: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """
    Return the smallest numbers that come to the same.

    A fence below all proposals is overtaken by any, and a proposal below all fences raises
    none by more than one; only the order and the distance of the rest matter. Not where a
    node may restart or a third client may come.
    """
    fences = [max(fence, min(proposed) - 1) for fence in stored]
    floor = min(fences)
    proposals = [max(proposal, floor + 1) - floor for proposal in proposed]
    return tuple(sorted(fence - floor for fence in fences)), tuple(sorted(proposals))
