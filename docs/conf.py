# ruff: noqa: INP001
"""How Sphinx builds the pages: `make docs`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import celery_redlock

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "celery-redlock"
author = "celery-redlock contributors"
copyright = author  # noqa: A001  Sphinx's name for it
version = release = celery_redlock.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "from_code",
]
exclude_patterns = ["_ext", "_build"]

# Pages are Markdown as a code host shows it; their headings have the anchors that it makes.
myst_heading_anchors = 4
myst_enable_extensions: list[str] = []

# Docstrings: in the Google style, with names of code in single backticks.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes are told of once, where the class is
napoleon_custom_sections = [("Source", "notes_style")]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"

# Output samples and excerpts of configuration need not be complete.
suppress_warnings = ["misc.highlighting_failure"]
pygments_style = "friendly"
# What is copied is what one types: no prompt, no output.
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_line_continuation_character = "\\"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_title = "celery-redlock"
html_show_copyright = False
html_show_sourcelink = False


def setup(app: Sphinx) -> None:
    """Have recorded runs, and pages as they are written, beside the pages that are built."""
    app.connect("build-finished", copy_recorded_runs)
    app.connect("build-finished", copy_for_programs)


def copy_recorded_runs(app: Sphinx, error: Exception | None) -> None:
    """Copy them, where the pages are built."""
    if error is None:
        shutil.copytree(HERE / "guarantees", app.outdir / "guarantees", dirs_exist_ok=True)


def copy_for_programs(app: Sphinx, error: Exception | None) -> None:
    """Copy ``llms.txt`` and the Markdown that it names; a test's site may have none."""
    for file in () if error else (*HERE.glob("llms.txt"), *HERE.rglob("*.md")):
        there = Path(app.outdir) / file.relative_to(HERE)
        if there.parent.exists():
            shutil.copy(file, there)
