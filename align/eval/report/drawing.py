"""From a matplotlib figure to SVG that lives in a page: no outside references, theme colours, a text alternative."""

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from cycler import cycler
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from align.eval.report.runs import Series, StageRun

INK, GRID, BLUE, ORANGE, GREEN, VIOLET = "#1a2129", "#c9d1d9", "#1d5fa8", "#b4500f", "#1c7a45", "#7a3fb3"
THEME = {INK: "--ink", GRID: "--line", BLUE: "--blue", ORANGE: "--orange", GREEN: "--green", VIOLET: "--violet"}
"""Colours that the page swaps for its own, so that a plot follows the reader's light or dark theme."""

WIDTH = 4.2
"""Inches. Small on purpose: at a phone's width the 9-point labels then appear at about their own size."""

MOST_POINTS = 300
"""Of a line; a longer one is averaged, or the page grows with the run."""
Curve = tuple[str, str, str, str]
"""A metric's name, its label, colour and line style."""
STYLE: Any = {  # Any: matplotlib types each of its 300 keys
    "svg.fonttype": "none",
    "text.parse_math": False,  # a category may hold a dollar sign
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": GRID,
    "axes.prop_cycle": cycler(color=[BLUE]),
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "font.size": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}


@dataclass(frozen=True)
class Plot:
    """A plot as the page shows it.

    Attributes:
        name: identifier, unique on the page.
        svg: inline SVG with the text alternative in `aria-label`.
        caption: how to read it and what it shows, plain text.
        head, rows: the same figures as a table, where they are few.
    """

    name: str
    title: str
    svg: Markup
    caption: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def draw(name: str, title: str, caption: str, alt: str, paint: Callable[[Figure], None], height: float = 2.6) -> Plot:
    """Let `paint` fill a figure of `WIDTH` by `height` inches; `alt` says in words what can be seen."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that the measuring font lacks; the reader's browser has its own fonts
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        paint(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(name, title, inline(buffer.getvalue(), name, alt), caption)


def inline(svg: str, name: str, alt: str) -> Markup:
    """An SVG file's text as an element of a page: names of its own, colours from the page, nothing from elsewhere."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style type=.*?</style>", "", body, flags=re.S)
    box = re.search(r'viewBox="[^"]*"', body)
    assert box is not None
    opening = f'<svg {box.group()} role="img" aria-label="{escape(alt)}">'
    body = re.sub(r"<svg.*?>", lambda _: opening, body, count=1, flags=re.S)
    body = body.replace("xlink:href", "href").replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    body = re.sub(r'(<[a-zA-Z]+ [^<>]*?)\bid="', rf'\1id="{name}-', body)
    body = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", body)
    for colour, variable in THEME.items():
        body = body.replace(colour, f"var({variable})")
    return Markup(body)


def thin(series: Series, most: int = MOST_POINTS) -> Series:
    """At most `most` points: means of runs of neighbours, each at its last update."""
    size = -(-len(series.updates) // most)
    if size <= 1:
        return series
    starts = range(0, len(series.updates), size)
    updates = tuple(series.updates[start : start + size][-1] for start in starts)
    parts = [series.values[start : start + size] for start in starts]
    return Series(updates, tuple(sum(part) / len(part) for part in parts))


def percent_axis(axis: Axis) -> None:
    """Show shares as percentages."""
    axis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=" %"))


def line(axes: Axes, series: Series, label: str, colour: str, style: str = "-", marker: str = "") -> None:
    """A metric over updates; a single point is shown by a marker."""
    if series:
        shown = thin(series)
        marker = marker or ("o" if len(shown.updates) == 1 else "")
        axes.plot(shown.updates, shown.values, label=label, color=colour, linestyle=style, marker=marker)


def over_updates(axes: Axes, unit: str, legend: bool = True) -> None:
    """Label the axes of a plot over updates, with the legend above it."""
    axes.set_xlabel("update")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.grid(axis="x", visible=False)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, borderaxespad=0.2, handlelength=1.6, columnspacing=1.2
        )


def course(series: Series, what: str) -> str:
    """A metric's course in words, for the text alternative of a plot."""
    if not series:
        return ""
    first, last = series.values[0], series.values[-1]
    text = f"{what} goes from {first:.3g} at update {series.updates[0]} to {last:.3g} at update {series.updates[-1]}"
    return text + f" (lowest {min(series.values):.3g}, highest {max(series.values):.3g})."


def curves_plot(
    run: StageRun, name: str, title: str, unit: str, curves: Sequence[Curve], caption: str, percent: bool = False
) -> Plot | None:
    """Several metrics over updates in one plot."""
    found = [(run.series(metric), label, colour, style) for metric, label, colour, style in curves]
    found = [curve for curve in found if curve[0]]
    if not found:
        return None

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for series, label, colour, style in found:
            line(axes, series, label, colour, style, "o" if style == "--" and "held" in label else "")
        if percent:
            percent_axis(axes.yaxis)
        over_updates(axes, unit, legend=len(found) > 1)
        if len(found) == 4:
            axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, borderaxespad=0.2)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))

    words = " ".join(course(series, label.capitalize()) for series, label, _, _ in found)
    return draw(name, title, caption, f"{title} over updates. {words}", paint)


def panels_plot(run: StageRun, name: str, title: str, panels: Mapping[str, str], caption: str) -> Plot | None:
    """Metrics below each other, each on a scale of its own; `panels` gives each metric its label."""
    found = [(run.series(metric), label) for metric, label in panels.items() if run.series(metric)]
    if not found:
        return None

    def paint(figure: Figure) -> None:
        rows = figure.subplots(len(found), 1, squeeze=False, sharex=True)
        for (axes,), (series, label), colour in zip(rows, found, (BLUE, ORANGE, GREEN), strict=False):
            line(axes, series, label, colour)
            over_updates(axes, label, legend=False)
            if axes is not rows[-1][0]:
                axes.set_xlabel("")

    words = " ".join(course(series, label.capitalize()) for series, label in found)
    return draw(name, title, caption, f"{title} over updates. {words}", paint, height=0.8 + 0.9 * len(found))
