"""
Pages as a code host shows them, made ready for Sphinx.

A link to the change log, to CONTRIBUTING.md or to recorded tables leads to the page that shows it;
one to another file outside of docs/ is a download; one to a folder is plain text. The file that a
block is to be written to is shown above it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

__all__ = ["on_source_read", "with_links"]

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
#: Files outside of docs/ that are pages of the site -> the page that stands for them.
SHOWN = {
    ROOT / "CHANGELOG.md": DOCS / "changelog.md",
    ROOT / "CONTRIBUTING.md": DOCS / "contributing.md",
    ROOT / "SECURITY.md": DOCS / "security.md",
    ROOT / "compatibility" / "README.md": DOCS / "recorded" / "compatibility.md",
    ROOT / "benchmarks" / "recorded" / "tables.md": DOCS / "recorded" / "performance.md",
    ROOT / "proof" / "recorded" / "scale.md": DOCS / "recorded" / "scale.md",
    ROOT / "proof" / "README.md": DOCS / "proofs.md",
}

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
WRITTEN = re.compile(r"^<!-- file: (?P<file>.+?) -->\n```(?P<language>\w+)\n", re.MULTILINE)


def on_source_read(_app: Sphinx, name: str, source: list[str]) -> None:
    """Replace the text of the page *name* by what Sphinx is to read."""
    page, text = DOCS / f"{name}.md", source[0]
    for file, place in SHOWN.items():
        if place == page:
            page, text = file, file.read_text()
    text = with_links(text, name, page)
    source[0] = WRITTEN.sub("```{code-block} \\g<language>\n:caption: \\g<file>\n\n", text)


def with_links(text: str, name: str, page: Path) -> str:
    """
    Return *text* with links that Sphinx can follow.

    Args:
        text: Markdown.
        name: Of the page of the site that it is shown on.
        page: File that the links in it are relative to.
    """
    shown_at = DOCS / f"{name}.md"
    own = SHOWN.get(page, page)

    def followed(link: re.Match[str]) -> str:
        target, anchor, words = link["target"], link["anchor"] or "", link["text"]
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        there = (page.parent / target).resolve() if target else own
        if there.is_dir():
            return words
        there = SHOWN.get(there, there)
        if there == shown_at:
            return f"[{words}]({anchor})"
        return f"[{words}]({os.path.relpath(there, shown_at.parent)}{anchor})"

    blocks = BLOCK.findall(text)
    prose = [LINK.sub(followed, part) for part in BLOCK.split(text)]
    return "".join(part + block for part, block in zip(prose, [*blocks, ""], strict=True))
