"""
What the pages have from the code: a directive that prints it, and links that lead somewhere.

    ```{from-code} metrics
    ```

prints what `of_code` makes of that word. Nothing that is generated is kept as a file.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from from_code import of_code, sources

__all__ = ["setup"]


class FromCode(SphinxDirective):
    """Prints what the function of `of_code` with that name returns, which is Markdown."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return it as nodes of the page."""
        word = self.arguments[0]
        for file in of_code.READ:  # to be made anew when one of them has changed
            self.env.note_dependency(str(file))
        return self.parse_text_to_nodes(getattr(of_code, word.replace("-", "_"))())


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx of it."""
    app.add_directive("from-code", FromCode)
    app.connect("source-read", sources.on_source_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
