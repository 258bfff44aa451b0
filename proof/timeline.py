"""
Draws the recorded history of a nemesis run as one HTML file that needs nothing else.

One lane per client shows its claims, one per node what befell it; where two clients claim the same
lock at the same time is marked red, and said in words at the top. What counts as a claim, and
when two overlap, is `nemesis.checker`'s to say.

    PYTHONPATH=tests python -m nemesis all --minutes 1 --logs DIR

leaves ``DIR/all/timeline-ours.html``, and one for each other contender.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from nemesis import checker
from nemesis.checker import Claim, History

__all__ = ["Strike", "draw", "page", "strikes"]

#: What each contender does differently.
ABOUT = {
    "ours": "the library as a user has it",
    "unguarded": "the library with restart_guard=False: a node that lost its data votes at once",
    "careless": "the library, used by clients that never ask whether they still hold the lock",
    "pottery": "pottery's Redlock",
}
NODES = 5
#: Pixels: a second, a lane, what is above the lanes, the narrowest bar, a letter.
SECOND, LANE, TOP, NARROW, LETTER = 80.0, 30, 26, 3.0, 7.5
HINT = "Point at a bar, or go to it with Tab, to read what it is."
LEGEND = (
    "Blue and green bars are claims, a colour per lock: from the grant to the last moment at "
    "which the client could act as the holder. A dashed edge is a claim that did not end with a "
    "release. The number is the rank of the claim's fence among the fences of that lock, so it "
    "has to grow from left to right; the fence itself is in the detail. Orange bars are faults, "
    "of clients at the lower edge of their lanes. Where two claims of one lock overlap, both are "
    "red."
)

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c1e21; --quiet: #59626d; --line: #dde1e6;
  --blue: #1d5fa8; --green: #1f6b4a; --on: #fff; --orange: #c27c0e; --red: #c8102e; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181b; --ink: #e6e8eb; --quiet: #9aa4af; --line: #32373e;
    --blue: #7fb4ec; --green: #79c9a0; --on: #10141a; --orange: #e2a541; --red: #ff5a6e; } }
body { margin: 0 auto; max-width: 90rem; padding: 1rem; background: var(--page);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; line-height: 1.25; }
p, ul { max-width: 50rem; }
.good { color: var(--green); font-weight: 600; }
.bad, .bad a { color: var(--red); font-weight: 600; }
.quiet { color: var(--quiet); fill: var(--quiet); font-size: .9rem; }
.chart { display: flex; }
.chart > div { flex: 1; min-width: 0; overflow-x: auto; }
svg { display: block; flex: none; fill: var(--ink); font: 12px system-ui, sans-serif; }
svg text.quiet { font-size: 11px; }
svg line { stroke: var(--line); }
.claim rect { fill: var(--blue); }
.claim.second rect { fill: var(--green); }
.claim.lost rect { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 3 2; }
.claim text { fill: var(--on); font-weight: 600; }
.strike rect { fill: var(--orange); }
.strike text { fill: #10141a; }
.low rect { height: 8px; transform: translateY(16px); }
.overlap rect { fill: var(--red); }
g[tabindex]:focus { outline: 2px solid var(--ink); }
output { position: sticky; bottom: 0; display: block; min-height: 3em; margin-top: 1rem;
  padding: .5rem 0; background: var(--page); border-top: 1px solid var(--line); }
"""
#: Says at the bottom what the title of a bar says, for who has no pointer to let rest on it.
SCRIPT = """
const say = event => {
  const title = event.target.closest("g[tabindex]")?.querySelector("title");
  if (title) document.querySelector("output").textContent = title.textContent;
};
addEventListener("focusin", say);
addEventListener("pointerover", say);
"""


@dataclass(frozen=True)
class Strike:
    """
    What was done to one node or client, and when.

    Attributes:
        lane: Whom it befell.
        what: In words.
        at: When it began [s].
        until: When it was over [s].
    """

    lane: str
    what: str
    at: float
    until: float


def strikes(folder: Path) -> list[Strike]:
    """Return what the nemesis wrote down in the *folder* of a run."""
    lines = [json.loads(line) for line in (folder / "strikes.jsonl").read_text().splitlines()]
    return [
        Strike(lane_of(one), line["what"], line["at"], line["until"])
        for line in lines
        for one in line["whom"]
    ]


def lane_of(one: int | str) -> str:
    """Return the name of the lane of a client, or of a node by its position."""
    return one if isinstance(one, str) else f"node {one + 1}"


def draw(folder: Path, about: str) -> None:
    """
    Draw each contender of a run into its folder, all on one scale of time.

    Args:
        folder: Where the clients and the nemesis left their logs.
        about: What run it was.
    """
    histories, struck = checker.read(folder), strikes(folder)
    asked = [claim.asked for history in histories.values() for claim in history.claims]
    begin = min([*asked, *(strike.at for strike in struck)], default=0.0)
    for name, history in histories.items():
        text = page(f"{name}: {ABOUT.get(name, name)}", about, history, struck, begin)
        (folder / f"timeline-{name}.html").write_text(text)


def page(
    title: str, about: str, history: History, struck: Sequence[Strike], begin: float = 0.0
) -> str:
    """
    Return the page of one contender.

    Args:
        title: Who it is.
        about: What run it was.
        history: What its clients wrote down.
        struck: What was done to nodes and clients; those of other contenders are left out.
        begin: The moment that is called 0 s.
    """
    chart = Chart(history, struck, begin)
    wrong = len(checker.disorders(history.claims))
    order = "Every fence is larger than those granted before it was asked for."
    if wrong:
        order = f"Fences not larger than one granted before they were asked for: {wrong}."
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", STYLE),
    )
    main = tag(
        "main",
        tag("h1", title),
        tag("p", about),
        verdict([chart.overlap_words(*pair) for pair in chart.overlaps]),
        tag("p", order if any(claim.fence for claim in history.claims) else "It has no fences."),
        chart.drawn(),
        tag("output", HINT),
        tag("p", LEGEND, class_="quiet"),
        tag("script", SCRIPT),
    )
    whole = tag("html", head, tag("body", main), lang="en")
    return f"<!DOCTYPE html>\n{ET.tostring(whole, encoding='unicode', method='html')}\n"


def verdict(overlaps: Sequence[str]) -> ET.Element:
    """Return in words whether two held a lock; each overlap leads to its place in the chart."""
    if not overlaps:
        return tag("p", "No two claims overlap.", class_="good")
    links = [tag("a", words, href=f"#overlap-{n}") for n, words in enumerate(overlaps)]
    found = tag("ul", *(tag("li", link) for link in links))
    return tag("div", "Two clients held a lock at the same time:", found, class_="bad")


class Chart:
    """
    The lanes of one contender.

    Args:
        history: What its clients wrote down.
        struck: What was done to nodes and clients.
        begin: The moment that is called 0 s.

    Attributes:
        overlaps: Every two claims of one lock that overlap.
    """

    def __init__(self, history: History, struck: Sequence[Strike], begin: float) -> None:
        self.overlaps = checker.overlaps(history.claims)
        self._begin = begin
        # Who was stopped before it saw its grant, until its lease was over, claims nothing.
        self._claims = [claim for claim in history.claims if claim.end > claim.granted]
        self._clients = sorted(history.clients)
        lanes = [*self._clients, *map(lane_of, range(NODES))]
        self._tops = {lane: TOP + LANE * n for n, lane in enumerate(lanes)}
        self._strikes = [strike for strike in struck if strike.lane in self._tops]
        self._locks = sorted({claim.name for claim in history.claims})
        self._fences = {
            lock: sorted({c.fence for c in history.claims if c.name == lock and c.fence})
            for lock in self._locks
        }

    def drawn(self) -> ET.Element:
        """Return the lanes, with their names beside them."""
        ends = [claim.end for claim in self._claims] + [strike.until for strike in self._strikes]
        seconds = int(max(ends, default=self._begin) - self._begin) + 2
        bars = [*map(self._claim, self._claims), *map(self._strike, self._strikes)]
        bars += [bar for n, pair in enumerate(self.overlaps) for bar in self._overlap(n, *pair)]
        height = TOP + LANE * len(self._tops)
        names = [tag("text", lane, x=0, y=top + 19) for lane, top in self._tops.items()]
        beside = tag("svg", *names, width=92, height=height)
        lanes = tag("svg", *ticks(seconds, height), *bars, width=seconds * SECOND, height=height)
        label = "Claims and faults, scrolls sideways"
        scrolls = tag("div", lanes, tabindex=0, role="region", aria_label=label)
        return tag("div", beside, scrolls, class_="chart")

    def _strike(self, strike: Strike) -> ET.Element:
        says = f"{strike.lane} {strike.what} {self._span(strike.at, strike.until)}"
        if strike.lane in self._clients:  # it leaves room for a claim
            return self._bar("strike low", strike.lane, strike.at, strike.until, says)
        short = re.split(r": | \(", strike.what)[0]
        return self._bar("strike", strike.lane, strike.at, strike.until, says, short)

    def _claim(self, claim: Claim) -> ET.Element:
        kind = "claim second" if self._locks.index(claim.name) % 2 else "claim"
        kind += " lost" if claim.ended is None else ""
        says, rank = self._claim_words(claim), self._rank(claim)
        return self._bar(kind, claim.client, claim.granted, claim.end, says, rank)

    def _overlap(self, n: int, earlier: Claim, later: Claim) -> Iterator[ET.Element]:
        since, until = later.granted, min(earlier.end, later.end)
        says = self.overlap_words(earlier, later)
        first = self._bar("overlap", earlier.client, since, until, says)
        first.set("id", f"overlap-{n}")
        yield first
        yield self._bar("overlap", later.client, since, until, says)

    def _bar(
        self, kind: str, lane: str, since: float, until: float, says: str, within: str = ""
    ) -> ET.Element:
        x, top = round((since - self._begin) * SECOND, 1), self._tops[lane] + 3
        wide = round(max(NARROW, (until - since) * SECOND), 1)
        bar = tag("rect", x=x, y=top, width=wide, height=LANE - 6, rx=2)
        made = tag("g", tag("title", says), bar, class_=kind, tabindex=0, role="img")
        if within and wide > LETTER * len(within) + 6:
            made.append(tag("text", within, x=x + 4, y=top + 16))
        return made

    def _span(self, since: float, until: float) -> str:
        return f"from {since - self._begin:.3f} s to {until - self._begin:.3f} s"

    def _rank(self, claim: Claim) -> str:
        return str(self._fences[claim.name].index(claim.fence) + 1) if claim.fence else ""

    def _claim_words(self, claim: Claim) -> str:
        ended = "released" if claim.ended is not None else claim.lost and f"lost ({claim.lost})"
        fence = f"fence {claim.fence} (number {self._rank(claim)})" if claim.fence else "no fence"
        return (
            f"{claim.client} claims lock {claim.name!r} {self._span(claim.granted, claim.end)}, "
            f"then {ended or 'killed, up to the end of its lease'}; {fence}, asked for at "
            f"{claim.asked - self._begin:.3f} s, renewals: {claim.renewals}"
        )

    def overlap_words(self, earlier: Claim, later: Claim) -> str:
        """Return which two claims overlap, and when."""
        first, second = (
            f"{claim.client} ({f'fence number {self._rank(claim)}' if claim.fence else 'no fence'})"
            for claim in (earlier, later)
        )
        when = self._span(later.granted, min(earlier.end, later.end))
        return f"Lock {earlier.name!r}: the claims of {first} and {second} overlap {when}"


def ticks(seconds: int, height: int) -> Iterator[ET.Element]:
    """Yield a line and a figure for each second."""
    for second in range(seconds):
        x = second * SECOND
        yield tag("line", x1=x, x2=x, y1=TOP - 6, y2=height)
        yield tag("text", f"{second} s", x=x + 2, y=TOP - 9, class_="quiet")


def tag(name: str, /, *inside: ET.Element | str, **attributes: object) -> ET.Element:
    """Return an element; a text that is inside it comes first."""
    named = {key.rstrip("_").replace("_", "-"): str(value) for key, value in attributes.items()}
    made = ET.Element(name, named)
    for one in inside:
        if isinstance(one, str):
            made.text = one
        else:
            made.append(one)
    return made
