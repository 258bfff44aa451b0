"""The timeline of a nemesis run shows what its logs say, and says in words where two overlap."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that an installed celery_redlock stays what is tested

from proof import timeline  # noqa: E402

RECORDED = sorted((ROOT / "docs" / "guarantees").glob("*.html"))
VOID = {"meta"}


class Page(HTMLParser):
    """
    What a page has; fails where tags do not match.

    `texts` are by tag, `kinds` are the titles of all bars by their class, `links` whatever leads or
    loads from somewhere.
    """

    def __init__(self, text):
        super().__init__()
        self.texts, self.kinds, self.anchors, self.links = {}, {}, set(), []
        self._open, self._bar = [], ""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        told = dict(attrs)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "g":
            assert (told["tabindex"], told["role"]) == ("0", "img")  # the keyboard comes to each
            self._bar = told["class"]
        self.anchors |= {told["id"]} if "id" in told else set()
        self.links += [told[name] for name in ("href", "src", "srcset", "data") if name in told]

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        tag = self._open[-1] if self._open else ""
        self.texts.setdefault(tag, []).append(data)
        if tag == "title" and "g" in self._open:
            self.kinds.setdefault(self._bar, []).append(data)


def log(folder, contender, client, *lines):
    born = {"kind": "born", "at": 0.0, "contender": contender, "client": client}
    text = "".join(json.dumps(line) + "\n" for line in [born, *lines])
    (folder / f"client-{client}-1.jsonl").write_text(text)


def hold(asked, granted, end, fence, *, name="a", lost=None, killed=False):
    first = {"name": name, "fence": fence, "asked": asked, "until": end}
    last = {"kind": "lost", "at": end, "why": lost} if lost else {"kind": "ended", "at": end}
    return [{"kind": "granted", "at": granted, **first}, *([] if killed else [last])]


def drawn(folder, contender):
    timeline.draw(folder, "A run.")
    return Page((folder / f"timeline-{contender}.html").read_text())


@pytest.fixture
def logs(tmp_path):
    ours_0 = [
        *hold(100.0, 100.5, 102.5, 7_001),
        *hold(104.0, 104.25, 106.0, 7_003, lost="deadline"),
    ]
    log(tmp_path, "ours", "ours-0", *ours_0)
    log(tmp_path, "ours", "ours-1", *hold(101.0, 102.75, 104.0, 7_002, killed=True))
    strikes = [
        {"what": "clock set +2.00 s", "at": 101.0, "until": 103.0, "whom": [2]},
        {"what": "killed (SIGKILL)", "at": 103.0, "until": 103.5, "whom": ["ours-1", "else-0"]},
    ]
    lines = [json.dumps({"kind": "strike", **strike}) + "\n" for strike in strikes]
    (tmp_path / "strikes.jsonl").write_text("".join(lines))
    return tmp_path


def test_claims_and_faults_are_in_their_lanes(logs):
    page = drawn(logs, "ours")
    (released,) = page.kinds["claim"]
    assert "ours-0 claims lock 'a' from 0.500 s to 2.500 s, then released" in released
    assert "fence 7001 (number 1), asked for at 0.000 s" in released
    killed, lost = sorted(page.kinds["claim lost"], key=lambda title: "ours-0" in title)
    assert "from 2.750 s to 4.000 s, then killed" in killed
    assert "then lost (deadline); fence 7003 (number 3)" in lost
    assert page.kinds["strike"] == ["node 3 clock set +2.00 s from 1.000 s to 3.000 s"]
    assert page.kinds["strike low"] == ["ours-1 killed (SIGKILL) from 3.000 s to 3.500 s"]
    assert {"1", "2", "3", "ours-0", "node 5", "6 s", "clock set +2.00 s"} <= set(
        page.texts["text"]
    )


def test_a_run_without_an_overlap_says_so(logs):
    page = drawn(logs, "ours")
    assert "No two claims overlap." in page.texts["p"]
    assert "Every fence is larger than those granted before it was asked for." in page.texts["p"]
    assert "overlap" not in page.kinds


def test_an_overlap_is_red_in_both_lanes_and_said_at_the_top(logs):
    """The twin; claims of another lock overlap nothing, nor does one that follows at once."""
    first, beside = hold(100.0, 100.5, 103.0, 5), hold(103.0, 103.25, 104.0, 4)
    log(logs, "unguarded", "unguarded-0", *first, *beside)
    log(logs, "unguarded", "unguarded-1", *hold(102.0, 102.25, 103.1, 6))
    log(logs, "unguarded", "unguarded-2", *hold(102.0, 102.5, 103.1, 1, name="b"))
    page = drawn(logs, "unguarded")
    (words,) = page.texts["a"]
    assert words == (
        "Lock 'a': the claims of unguarded-0 (fence number 2) and unguarded-1 (fence number 3) "
        "overlap from 2.250 s to 3.000 s"
    )
    assert page.kinds["overlap"] == [words, words]
    assert page.links == ["#overlap-0"]
    assert page.anchors == {"overlap-0"}
    assert not [text for text in page.texts["p"] if text.startswith("No two claims")]
    assert page.texts["p"][1].endswith("before they were asked for: 1.")
    assert "No two claims overlap." in drawn(logs, "ours").texts["p"]


def test_what_a_log_says_cannot_become_markup(tmp_path):
    log(tmp_path, "ours", "<b>", *hold(0.0, 0.5, 2.0, None, name='"><script>'))
    (tmp_path / "strikes.jsonl").write_text("")
    page = drawn(tmp_path, "ours")
    assert "<b> claims lock '\"><script>'" in page.kinds["claim"][0]
    assert "no fence" in page.kinds["claim"][0]


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_recorded_runs_are_whole_and_load_nothing(file):
    text = file.read_text()
    page = Page(text)
    assert len(text) < 300_000
    assert set(page.links) <= {f"#{anchor}" for anchor in page.anchors}
    for loads in ("url(", "@import", "fetch(", "import(", "http:", "https:"):
        assert loads not in text, loads
    assert len(page.kinds["claim"]) > 20
    assert len(page.kinds["strike"]) > 10


def test_a_healthy_run_and_a_broken_one_are_recorded():
    pages = {file.stem.rpartition("-")[2]: Page(file.read_text()) for file in RECORDED}
    assert set(pages) == {"ours", "unguarded"}
    assert "overlap" not in pages["ours"].kinds
    assert len(pages["unguarded"].kinds["overlap"]) >= 2
    assert pages["ours"].kinds["strike"] == pages["unguarded"].kinds["strike"]
    about = {next(text for text in page.texts["p"] if "seed" in text) for page in pages.values()}
    assert len(about) == 1


def test_the_style_is_for_light_and_dark():
    assert "prefers-color-scheme: dark" in timeline.STYLE
    assert set(re.findall(r"var\((--\w+)\)", timeline.STYLE)) <= set(
        re.findall(r"(--\w+):", timeline.STYLE.partition("@media")[0])
    )
