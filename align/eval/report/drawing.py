"""From metrics to SVG inside a page: no outside references, theme colors, a text alternative."""

import io
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib
from cycler import cycler
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from align.eval.report.data import StageRun

INK, GRID, BLUE, ORANGE, GREEN, VIOLET = "#1a2129", "#c9d1d9", "#1d5fa8", "#b4500f", "#1c7a45", "#7a3fb3"
THEME = {INK: "--ink", GRID: "--line", BLUE: "--blue", ORANGE: "--orange", GREEN: "--green", VIOLET: "--violet"}
"""Colors that the page replaces by variables: a plot follows the reader's light or dark theme."""
COLORS = (BLUE, ORANGE, GREEN, VIOLET, INK)
"""Colors of the lines of a plot, in their order."""
WIDTH = 4.2
"""Inches. Small on purpose: at a phone's width the 9-point labels then appear at about their own size."""
MAX_POINTS = 300
"""Points of a line; a longer one is averaged."""
PERCENT = PercentFormatter(1.0, decimals=None, symbol=" %")
"""Shows shares as percentages."""
STYLE: Any = {  # Any: matplotlib types each of its 300 keys
    "svg.fonttype": "none",
    "text.parse_math": False,  # a category may hold a dollar sign
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), GRID),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    **dict.fromkeys(("font.size", "legend.fontsize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize"), 9),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "axes.prop_cycle": cycler(color=[BLUE]),
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}


@dataclass(frozen=True)
class Plot:
    """A plot as the page shows it.

    Attributes:
        name: identifier, unique on the page.
        svg: inline SVG with the text alternative in `aria-label`.
        caption: how to read it and its content, plain text.
    """

    name: str
    title: str
    svg: Markup
    caption: str


def draw_plot(name: str, title: str, caption: str, alt: str, paint: Callable[[Figure], None], height: float = 2.6) -> Plot:
    """Let `paint` fill a figure of `WIDTH` by `height` inches; `alt` describes its content in words."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that the measuring font lacks; the reader's browser has its own fonts
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        paint(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(name, title, inline_svg(buffer.getvalue(), name, alt), caption)


def inline_svg(svg: str, name: str, alt: str) -> Markup:
    """Return an SVG file's text as an element of a page: ids that begin with `name`, colors of the page, no references."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style type=.*?</style>", "", body, flags=re.S)
    box = re.search(r'viewBox="[^"]*"', body)
    assert box is not None
    opening = f'<svg {box.group()} role="img" aria-label="{escape(alt)}">'
    body = re.sub(r"<svg.*?>", lambda _: opening, body, count=1, flags=re.S)
    body = body.replace("xlink:href", "href").replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    body = re.sub(r'(<[a-zA-Z]+ [^<>]*?)\bid="', rf'\1id="{name}-', body)
    body = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", body)
    for color, variable in THEME.items():
        body = body.replace(color, f"var({variable})")
    return Markup(body)


@dataclass(frozen=True)
class Chart:
    """Metrics of a stage over updates in one plot.

    Validation metrics are dashed, with a marker at each evaluation. Whiskers show the standard error of a metric that has
    one (named `METRIC_error`), or the interval of a metric that has one (named `METRIC/low` and `METRIC/high`).

    Attributes:
        metrics: from a metric to its label.
        percent: whether the values are shares.
        from_zero: whether the vertical axis includes 0.
        reference: a value marked by a dotted line, with its label in the legend.
    """

    name: str
    title: str
    metrics: Mapping[str, str]
    caption: str
    unit: str = ""
    percent: bool = False
    from_zero: bool = True
    reference: tuple[float, str] | None = None


def draw_chart(stage: StageRun, chart: Chart) -> Plot | None:
    """Draw the metrics that the stage has; None if it has none."""
    listed = zip(chart.metrics.items(), COLORS, strict=False)
    shown = [(metric, label, color) for (metric, label), color in listed if stage.series(metric)]
    if not shown:
        return None

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for metric, label, color in shown:
            line, held_out = downsample(stage.series(metric)), metric.startswith("validation/")
            marker, style = "o" if held_out or len(line) == 1 else "", "--" if held_out else "-"
            axes.plot(list(line), list(line.values()), label=label, color=color, linestyle=style, marker=marker)
            _draw_whiskers(axes, stage, metric, color)
        if chart.reference:
            axes.axhline(chart.reference[0], color=INK, linewidth=1, linestyle=":", label=chart.reference[1])
        if chart.percent:
            axes.yaxis.set_major_formatter(PERCENT)
        if chart.from_zero:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.set_xlabel("update")
        axes.set_ylabel(chart.unit)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        axes.grid(axis="x", visible=False)
        if len(chart.metrics) > 1:
            add_legend(axes)

    words = " ".join(describe_series(stage.series(metric), label.capitalize()) for metric, label, _ in shown)
    return draw_plot(chart.name, chart.title, chart.caption, f"{chart.title} over updates. {words}", paint)


def downsample(series: Mapping[int, float], max_points: int = MAX_POINTS) -> Mapping[int, float]:
    """Average a series to at most `max_points` points, each at the last update of its neighbors."""
    points, size = list(series.items()), -(-len(series) // max_points)
    if size <= 1:
        return series
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return {part[-1][0]: sum(value for _, value in part) / len(part) for part in parts}


def describe_series(series: Mapping[int, float], metric: str) -> str:
    """Describe how a metric changes over updates, for the text alternative of a plot."""
    points = list(series.items())
    (start, first), (end, last) = points[0], points[-1]
    text = f"{metric} goes from {first:.3g} at update {start} to {last:.3g} at update {end}"
    return text + f" (lowest {min(series.values()):.3g}, highest {max(series.values()):.3g})."


def _draw_whiskers(axes: Axes, stage: StageRun, metric: str, color: str) -> None:
    series, error = stage.series(metric), stage.series(f"{metric}_error")
    low, high = stage.series(f"{metric}/low"), stage.series(f"{metric}/high")
    lengths: Any = [error.get(update, 0.0) for update in series]  # below and above, or one for both
    if low.keys() == high.keys() == series.keys():
        lengths = [[series[update] - low[update] for update in low], [high[update] - series[update] for update in low]]
    if error or low:
        updates, values = list(series), list(series.values())
        axes.errorbar(updates, values, yerr=lengths, fmt="none", ecolor=color, capsize=3, elinewidth=1.2)


def add_legend(axes: Axes) -> None:
    """Put the legend above the axes: up to three entries side by side, four as two by two."""
    entries = len(axes.get_legend_handles_labels()[0])
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=2 if entries == 4 else 3,
        borderaxespad=0.2,
        handlelength=1.6,
        columnspacing=1.2,
    )
