"""What contenders did in a run, what must never have happened, and whether the run counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from nemesis import checker
from nemesis.faults import Fault

__all__ = [
    "GUARDED",
    "Run",
    "Score",
    "breaks",
    "broken_so_far",
    "missing",
    "score",
    "verdict",
    "violations",
]

#: Those whose locks are the library's own, with its guards on.
GUARDED = ("ours", "careless")


@dataclass
class Score:
    """
    What one contender did.

    Attributes:
        grants: How many locks it was granted.
        renewals: How often their leases were renewed.
        lost: How often a holder was told that its lock is lost.
        unavailable: How often no quorum could decide.
        taken: How often somebody else held the lock.
        cut_short: Holds whose client was killed.
        overlaps: Holds that met.
        overlap: The first two of them.
        longest_overlap: The longest of them [s].
        disorders: Fences that were not above those before them.
        lost_updates: Of the fenced register.
        lost_plain_updates: Of the register without a fence.
        node_news: What happened to nodes, as the clients saw it.
    """

    grants: int
    renewals: int
    lost: int
    unavailable: int
    taken: int
    cut_short: int
    overlaps: int
    overlap: list[str]
    longest_overlap: float
    disorders: int
    lost_updates: int
    lost_plain_updates: int
    node_news: dict[str, int]


@dataclass
class Run:
    """
    What came of a run.

    Attributes:
        fault: Its name.
        seconds: For how long strikes came [s].
        seed: Of the strikes.
        injections: How many there were.
        hits: What they hit -> how often.
        served: How long after the last strike the last of our clients had a lock [s]; None if
            one had none in time.
        keys_seen: How many lock keys were looked at for their expiry.
        contenders: Name -> what it did.
        violations: What must never happen, in words.
        counts: Whether every contender that had to break did.
        why: If not, what is missing; else what the run rests on.
    """

    fault: str
    seconds: float
    seed: int
    injections: int
    hits: dict[str, int]
    served: float | None
    keys_seen: int
    contenders: dict[str, Score]
    violations: list[str] = field(default_factory=list)
    counts: bool = False
    why: str = ""

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def breaks(scores: dict[str, Score]) -> set[str]:
    overlapping = {name for name, score in scores.items() if score.overlaps}
    losing = {f"{name} register" for name, score in scores.items() if score.lost_plain_updates}
    return overlapping | losing


def broken_so_far(folder: Path) -> set[str]:
    """Return who has broken in a run, however the holds end that are under way."""
    histories = checker.read(folder)
    for history in histories.values():
        history.end_as_seen()
    return breaks({name: score(folder, name, it) for name, it in histories.items()})


def missing(fault: Fault, found: set[str]) -> list[str]:
    return [name for name in fault.breaks if name not in found]


def verdict(fault: Fault, result: Run) -> tuple[bool, str]:
    whole = missing(fault, breaks(result.contenders))
    if whole:
        return False, f"did not break: {', '.join(whole)}"
    if fault.breaks:
        return True, f"broke: {', '.join(fault.breaks)}"
    felt = result.hits.get(fault.shows, 0)
    return felt >= result.injections / 2, f"control: none possible; felt: {felt} {fault.shows}"


def score(folder: Path, name: str, history: checker.History) -> Score:
    claims = history.claims
    meetings = checker.overlaps(claims)
    lengths = [min(a.end, b.end) - b.granted for a, b in meetings]
    register = folder / f"{name}.sqlite"
    return Score(
        grants=len(claims),
        renewals=sum(claim.renewals for claim in claims),
        lost=sum(claim.lost is not None for claim in claims),
        unavailable=history.refused["unavailable"],
        taken=history.refused["taken"],
        cut_short=history.cut_short,
        overlaps=len(meetings),
        overlap=[str(claim) for claim in meetings[0]] if meetings else [],
        longest_overlap=round(max(lengths, default=0.0), 3),
        disorders=len(checker.disorders(claims)),
        lost_updates=checker.lost_updates(register, "fenced"),
        lost_plain_updates=checker.lost_updates(register, "plain"),
        node_news=dict(history.news),
    )


def violations(scores: dict[str, Score]) -> list[str]:
    ours = scores["ours"]
    found = {
        f"ours: {ours.overlaps} overlaps, up to {ours.longest_overlap:g} s": ours.overlaps,
        "ours: no grant at all": not ours.grants,
    }
    for name in GUARDED:  # whoever is careless is saved by the fence
        result = scores[name]
        found[f"{name}: {result.disorders} fences out of order"] = result.disorders
        found[f"{name}: {result.lost_updates} updates lost under the fence"] = result.lost_updates
    return [what for what, happened in found.items() if happened]
