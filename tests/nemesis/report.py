"""What came of the runs, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from nemesis.verdict import Run

__all__ = ["status_of", "table"]

COLUMNS = (
    ("contender", 18),
    ("grants", 7),
    ("renewals", 9),
    ("told lost", 10),
    ("unavailable", 12),
    ("cut short", 10),
    ("overlaps", 16),
    ("disorders", 10),
    ("lost updates", 13),
    ("unfenced", 9),
)


def table(result: Run) -> str:
    hits = ", ".join(f"{times} {what}" for what, times in result.hits.items())
    lines = [
        f"{result.fault}: {result.injections} strikes, {result.seconds:.0f} s, seed {result.seed}",
        f"  {hits or 'nothing counted'}",
        "".join(name.rjust(width) for name, width in COLUMNS),
    ]
    for name, score in result.contenders.items():
        longest = f" ({score.longest_overlap:.2f} s)" if score.overlaps else ""
        cells = (
            name,
            score.grants,
            score.renewals,
            score.lost,
            score.unavailable,
            score.cut_short,
            f"{score.overlaps}{longest}",
            score.disorders,
            score.lost_updates,
            score.lost_plain_updates,
        )
        lines.append(
            "".join(str(cell).rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True))
        )
    served = "not all" if result.served is None else f"all within {result.served:g} s"
    lines += [
        f"  after the end {served} of our clients had a lock; {result.keys_seen} keys looked at",
        *(f"  VIOLATION: {what}" for what in result.violations),
        f"  {'counts' if result.counts else 'DOES NOT COUNT'}: {result.why}",
    ]
    return "\n".join(lines)


def status_of(results: Sequence[Run]) -> int:
    """Return the exit status: 1 after a violation, 2 if a run shows nothing, else 0."""
    if any(result.violations for result in results):
        return 1
    return 0 if all(result.counts for result in results) else 2
