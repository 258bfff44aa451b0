"""Pages for users say the glossary's word and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: For who changes the package, or made by runs.
OTHERS = {"architecture.md", "comparison.md", "decisions.md", "proofs.md"}
OTHERS |= {"performance.md", "scale.md", "compatibility.md", "changelog.md"}
PAGES = [ROOT / "README.md", *(p for p in sorted(DOCS.rglob("*.md")) if p.name not in OTHERS)]
#: What not to say -> what to say.
WORDS = {
    r"comes? again": "is rescheduled, or is delivered again",
    r"puts? off|putting off": "reschedule",
    r"in its stead": "in place of",
    r"comes? along": "are bundled",
    r"was faster": "holds the lock",
    r"spoilt|spoiled": "broken",
    r"told apart": "distinguished",
    r"makes no sense|no sense": "impossible, malformed",
}


def wrong_in(text):
    """Return what a text says that the glossary has another word for."""
    prose = re.sub(r"^```.*?^```$|`[^`]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return [word for word in WORDS if re.search(rf"\b(?:{word})\b", prose, re.IGNORECASE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_the_glossarys_word(page):
    """One word for one thing."""
    assert {word: WORDS[word] for word in wrong_in(page.read_text())} == {}


def test_another_word_is_noticed():
    """The twin; code is left alone."""
    assert wrong_in("It comes again later.") == [r"comes? again"]
    assert wrong_in("```text\ncomes again\n```\n`put off`") == []
