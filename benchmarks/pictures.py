"""
Draws the plots of a record as SVG: the same file from the same figures.

A library has the same colour in every plot, from a palette that colour-blind people can tell apart
(Okabe and Ito), with markers and hatches besides; ours are shades of blue, darker with more nodes.
The background is white, so that a plot can be read on a dark page, too.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.record import Plot, Series, in_words

#: Place, figure, and the ends of its spread.
Point = tuple[Any, float, float, float]
#: Word of a label -> colour.
LIBRARIES = {
    "redis-py": "#E69F00",
    "python-redis-lock": "#CC79A7",
    "pottery": "#009E73",
    "redlock-py": "#D55E00",
    "celery-once": "#8C5A2B",
    "celery-singleton": "#AA3377",
    "celery-heimdall": "#BBAA22",
    "PING": "#777777",
    "plain": "#777777",
}
#: By the number of our nodes.
SHADES = {"5": "#0B4F9E", "3": "#4C93D9", "1": "#9CC7F0"}
#: For labels that name no library: of these colours none stands for one.
OTHERS = ("#0B4F9E", "#777777", "#4C93D9", "#222222", "#9CC7F0")
MARKERS = "osD^vPX*"
DASHES = ("-", "--", ":", "-.")
HATCHES = ("", "////", "....", "xxxx")
INK, GRID = "#222222", "#DDDDDD"
#: Width of a picture, of a line plot's height, of a bar, and of what is around it [inches].
WIDE, HIGH, BAR, AROUND = 7.6, 3.6, 0.17, 1.1
#: Characters that the title has room for, and the labels in a row of the legend.
TITLE, ROOM = 95, 100
#: Of a logarithmic axis: up to which ratio of its ends it also has ticks at 2 and 5.
FEW_DECADES = 300

STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def digest(plot: Plot) -> str:
    """Return what stands in the picture of *plot* and of no other."""
    return hashlib.sha256(json.dumps(asdict(plot)).encode()).hexdigest()[:20]


def digest_in(svg: str) -> str:
    """Return the digest of the plot that *svg* is the picture of."""
    found = re.search(r"<dc:identifier>(\w+)</dc:identifier>", svg)
    return found[1] if found else ""


def svg_of(plot: Plot) -> str:
    """Return the picture of *plot*."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": plot.name}):
        figure = Figure(layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        title = textwrap.fill(plot.title, TITLE)
        figure.suptitle(title, x=0.008, ha="left", size=10, weight="bold")
        (bars if plot.bars else lines)(figure, axes, plot)
        labels = axes.get_legend_handles_labels()[1]
        if len(labels) > 1:
            columns = max(1, ROOM // (6 + max(map(len, labels))))
            figure.legend(loc="outside lower left", ncols=min(columns, len(labels)))
        told = io.StringIO()
        about = {"Date": None, "Creator": None, "Identifier": digest(plot)}
        figure.savefig(told, format="svg", metadata=about)
    return re.sub(r" +$", "", told.getvalue(), flags=re.MULTILINE)


def looks(labels: Sequence[str]) -> list[tuple[str, int]]:
    """Return the colour of each label, and how many before it have the same."""
    others = itertools.cycle(OTHERS)
    colours = [colour(label) or next(others) for label in labels]
    return [(its, colours[:number].count(its)) for number, its in enumerate(colours)]


def colour(label: str) -> str | None:
    """Return the colour of whom *label* names; None if it names nobody."""
    for word, its in LIBRARIES.items():
        if re.search(rf"(?<!\w){re.escape(word)}", label):
            return its
    if "celery-redlock" not in label:
        return None
    nodes = re.search(r"(\d) node", label)
    return SHADES.get(nodes[1] if nodes else "5", SHADES["5"])


def lines(figure: Figure, axes: Any, plot: Plot) -> None:
    """Draw a line per series, with markers and thin bars for the spread."""
    figure.set_size_inches(WIDE, HIGH + 0.16 * len(plot.series))
    labels = [series.label for series in plot.series]
    for number, (series, (its, again)) in enumerate(zip(plot.series, looks(labels), strict=True)):
        places, figures, spread = columns_of(series.points)
        line, caps, stems = axes.errorbar(
            places,
            figures,
            spread,
            color=its,
            linestyle=DASHES[again % len(DASHES)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=4.5,
            linewidth=1.6,
            elinewidth=0.7,
            capsize=2,
        )
        line.set_label(series.label)
        for thin in (*caps, *stems):
            thin.set_alpha(0.6)
    axes.set(xlabel=plot.x, ylabel=plot.y)
    axes.grid(axis="y")
    scale(axes.xaxis, axes.set_xscale, is_log="x" in plot.log)
    scale(axes.yaxis, axes.set_yscale, is_log="y" in plot.log)
    if "y" not in plot.log:
        axes.set_ylim(bottom=0)
    measured = sorted({point[0] for one in plot.series for point in one.points})
    if len(measured) <= 8 and ("x" in plot.log or are_apart(measured)):
        axes.set_xticks(measured, [f"{place:,g}" for place in measured])


def bars(figure: Figure, axes: Any, plot: Plot) -> None:
    """
    Draw horizontal bars, so that names can be read, with their figures beside them.

    A group of bars per name; where each would have one bar, or there is one group, a plain list.
    """
    each = [(series.label, point) for series in plot.series for point in series.points]
    groups = list(dict.fromkeys(point[0] for _, point in each))
    if len(groups) in (1, len(each)):
        names, middle, step = listed(axes, each, by_label=len(groups) == 1), 0.0, 1.0
        rows = float(len(names))
    else:
        names, middle, step = groups, (len(plot.series) - 1) / 2, len(plot.series) + 0.8
        rows = step * len(names) + len(plot.series)
        grouped(axes, plot.series, {name: number * step for number, name in enumerate(names)})
    figure.set_size_inches(WIDE, AROUND + BAR * rows * (1 if middle else 1.3))
    axes.set_yticks([number * step + middle for number in range(len(names))], names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel=plot.y)
    axes.grid(axis="x")
    axes.margins(x=0.1, y=0.02)
    scale(axes.xaxis, axes.set_xscale, is_log="y" in plot.log)


def listed(axes: Any, each: Sequence[tuple[str, Point]], *, by_label: bool) -> list[str]:
    """Draw bars one under the other, in the colour of whom each names; return their names."""
    names = [label if by_label else str(point[0]) for label, point in each]
    for at, (name, (label, point)) in enumerate(zip(names, each, strict=True)):
        row(axes, [at], [point], color=colour(name) or colour(label) or OTHERS[0])
    return names


def grouped(axes: Any, everybody: Sequence[Series], begin: dict[Any, float]) -> None:
    """Draw the bars of each series, one in each group; groups have their places in *begin*."""
    labels = [one.label for one in everybody]
    for number, (series, (its, again)) in enumerate(zip(everybody, looks(labels), strict=True)):
        places = [begin[point[0]] + number for point in series.points]
        hatch = HATCHES[again % len(HATCHES)]
        row(axes, places, series.points, color=its, hatch=hatch, label=series.label)


def row(axes: Any, places: Sequence[float], points: Sequence[Point], **style: Any) -> None:
    """Draw bars of one look, with their spread and their figures."""
    _, figures, (below, above) = columns_of(points)
    thin = {"elinewidth": 0.8, "ecolor": INK, "capsize": 1.5}
    spread = (below, above) if any(below) or any(above) else None
    look = {"edgecolor": "white", "linewidth": 0, **style}
    axes.barh(places, figures, 0.85, xerr=spread, error_kw=thin, **look)
    for place, found, beyond in zip(places, figures, above, strict=True):
        beside = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(in_words(found), (max(found + beyond, 0), place), fontsize=7, **beside)


def columns_of(points: Sequence[Point]) -> tuple[list[Any], list[float], tuple[Any, Any]]:
    """Return places, figures, and the spread below and above them."""
    below = [max(0.0, y - low) for _, y, low, _ in points]
    above = [max(0.0, high - y) for _, y, _, high in points]
    return [point[0] for point in points], [point[1] for point in points], (below, above)


def scale(axis: Any, set_scale: Any, *, is_log: bool) -> None:
    """Give an axis its scale, with figures as people write them."""
    if is_log:
        set_scale("log")
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < low * FEW_DECADES else (1,)))
        axis.set_minor_locator(NullLocator())
    if is_log or not axis.have_units():
        axis.set_major_formatter(FuncFormatter(lambda figure, _: f"{figure:,g}"))


def are_apart(ordered: Sequence[Any]) -> bool:
    """Return whether these are figures with room between them for their labels."""
    if not all(isinstance(place, (int, float)) for place in ordered):
        return False
    room = (ordered[-1] - ordered[0]) / 25
    return all(after - before > room for before, after in itertools.pairwise(ordered))
