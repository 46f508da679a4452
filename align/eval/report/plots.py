"""Draw the plots of a report as inline SVG: the charts in charts.yaml, and plots of other data.

Plots are self-contained, follow the page's color theme and have a text alternative.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator, PercentFormatter

from align.core.statistics import pair_calibration
from align.eval.report.data import RunData, StageRun, visible_text
from align.eval.report.findings import Summary, max_kl
from align.eval.results import Evaluation, Measurement, format_value
from align.reward.rankings import ScoredRanking, pairs_and_differences

INK, GRID, BLUE, ORANGE, GREEN, VIOLET = "#1a2129", "#c9d1d9", "#1d5fa8", "#b4500f", "#1c7a45", "#7a3fb3"
THEME = {INK: "--ink", GRID: "--line", BLUE: "--blue", ORANGE: "--orange", GREEN: "--green", VIOLET: "--violet"}
"""CSS variables that replace these colors, so that plots follow the light or dark theme."""
COLORS = (BLUE, ORANGE, GREEN, VIOLET, INK)
"""Line colors, in order."""
WIDTH = 4.2
"""Width in inches. Small, so that 9-point labels keep about their size on a phone."""
PERCENT = PercentFormatter(1.0, decimals=None, symbol=" %")
"""Formats fractions as percentages."""
STYLE: Any = {  # Any: matplotlib types each of its 300 keys
    "svg.fonttype": "none",
    "text.parse_math": False,  # categories may contain a dollar sign
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
MAX_UPDATE_LABELS = 14
"""Maximum number of update labels in the plot of reward against KL, to keep the points visible."""
PANELS = {
    "toxicity": ("toxicity", ("basic: expected maximum toxicity",)),
    "truthfulness": ("truthfulness", ("true and informative", "mc1")),
    "hallucination": ("verdicts", ("hallucination, closed domain",)),
    "appropriate": ("verdicts", ("appropriate for an assistant",)),
}
"""InstructGPT's panels: the task and its measurements, of which the first available one is shown."""
CHARTS: dict[str, list[dict[str, Any]]] = yaml.safe_load(Path(__file__).with_name("charts.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Plot:
    """A plot of a page. The name is unique on the page, the SVG has a text alternative."""

    name: str
    title: str
    svg: Markup
    caption: str


def draw_plot(name: str, title: str, caption: str, alt: str, paint: Callable[[Figure], None], height: float = 2.6) -> Plot:
    """Draw a figure of `WIDTH` by `height` inches with `paint`. `alt` is its text alternative."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing glyphs: browsers use other fonts
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        paint(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(name, title, inline_svg(buffer.getvalue(), name, alt), caption)


def inline_svg(svg: str, name: str, alt: str) -> Markup:
    """Convert an SVG file to an inline element with ids prefixed by `name`, theme colors and no external references."""
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
    """A line plot of metrics over updates.

    Validation metrics are dashed, with a marker at each evaluation. Whiskers show the standard error (`METRIC_error`) or the
    interval (`METRIC/low` and `METRIC/high`) if it was logged.

    Attributes:
        metrics: labels by metric name.
        percent: whether to format values as percentages.
        from_zero: whether the vertical axis includes 0.
        reference: value and legend label of a dotted horizontal line.
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
    """Draw the metrics that the stage logged. Return None if there are none."""
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


def downsample(series: Mapping[int, float], max_points: int = 300) -> Mapping[int, float]:
    """Average a series over windows to at most `max_points` points, each placed at the last update of its window."""
    points, size = list(series.items()), -(-len(series) // max_points)
    if size <= 1:
        return series
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return {part[-1][0]: sum(value for _, value in part) / len(part) for part in parts}


def describe_series(series: Mapping[int, float], metric: str) -> str:
    """Describe a metric over updates in words, for the text alternative of a plot."""
    points = list(series.items())
    (start, first), (end, last) = points[0], points[-1]
    text = f"{metric} goes from {first:.3g} at update {start} to {last:.3g} at update {end}"
    return text + f" (lowest {min(series.values()):.3g}, highest {max(series.values()):.3g})."


def _draw_whiskers(axes: Axes, stage: StageRun, metric: str, color: str) -> None:
    series, error = stage.series(metric), stage.series(f"{metric}_error")
    low, high = stage.series(f"{metric}/low"), stage.series(f"{metric}/high")
    lengths: Any = [error.get(update, 0.0) for update in series]  # symmetric, unless replaced below
    if low.keys() == high.keys() == series.keys():
        lengths = [[series[update] - low[update] for update in low], [high[update] - series[update] for update in low]]
    if error or low:
        updates, values = list(series), list(series.values())
        axes.errorbar(updates, values, yerr=lengths, fmt="none", ecolor=color, capsize=3, elinewidth=1.2)


def add_legend(axes: Axes) -> None:
    """Place the legend above the axes: up to three entries in a row, four in two rows."""
    entries = len(axes.get_legend_handles_labels()[0])
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=2 if entries == 4 else 3,
        borderaxespad=0.2,
        handlelength=1.6,
        columnspacing=1.2,
    )


# -------------------------------------------------------------------------------------------------- the plots of a run


def stage_plots(stage: StageRun, run: RunData, summary: Summary) -> list[Plot]:
    """Draw all plots of a stage for which there is data."""
    plots: list[Plot | None] = []
    for fields in CHARTS["ipo" if stage.config.get("loss") == "ipo" else stage.stage]:
        chart = Chart(**fields | {"name": f"{stage.stage}-{fields['name']}"})
        if chart.name == "ppo-kl":
            plots += [draw_chart(stage, _with_limit(chart, stage)), frontier_plot(stage, summary.kept)]
        else:
            plots.append(draw_chart(stage, chart))
    if stage.stage == "reward":
        plots.append(calibration_plot(run.rankings["reward"]))
    return [plot for plot in plots if plot]


def _with_limit(chart: Chart, stage: StageRun) -> Chart:
    limit = max_kl(stage)
    if not math.isfinite(limit):
        return chart
    highest = max([0.0, *stage.series("kl/k1").values(), *stage.series("validation/kl").values()])
    caption = f"{chart.caption} Policies with a KL above {limit:g} are never saved."
    return replace(chart, caption=caption, reference=(limit, "limit") if highest > 0.5 * limit else None)


def calibration_plot(rankings: Sequence[ScoredRanking]) -> Plot | None:
    """Draw a reliability diagram (predicted probability against accuracy) and the number of pairs per bin."""
    _, differences = pairs_and_differences(rankings)
    if not len(differences):
        return None
    table = pair_calibration(differences)
    predicted, accuracy, counts = zip(*table, strict=True)

    def paint(figure: Figure) -> None:
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        axes.plot([0.5, 1], [0.5, 1], color=INK, linewidth=1, linestyle=":", label="perfect")
        axes.plot(predicted, accuracy, color=BLUE, marker="o", label="reward model")
        axes.set_ylabel("accuracy")
        axes.yaxis.set_major_formatter(PERCENT)
        axes.set_ylim(min(0.4, *accuracy) - 0.05, 1.05)
        add_legend(axes)
        below.bar([0.5 + 0.05 * (min(9, int((p - 0.5) * 20)) + 0.5) for p in predicted], counts, width=0.044, color=BLUE)
        below.set_ylabel("pairs")
        below.set_xlabel("confidence of the model")
        below.set_xlim(0.49, 1.01)
        below.xaxis.set_major_formatter(PERCENT)

    caption = "On the dotted line, confidence equals accuracy. Below it, the model is overconfident."
    words = "; ".join(f"confidence {p:.0%}, accuracy {a:.0%}, {n} pairs" for p, a, n in table)
    alt = f"Reliability diagram of the reward model: {words}."
    return draw_plot("reward-calibration", "Calibration", caption, alt, paint, 3.3)


def frontier_plot(stage: StageRun, kept: int | None) -> Plot | None:
    """Draw held-out reward against KL: one point per evaluation, labeled by update."""
    rewards, kl = stage.series("validation/reward"), stage.series("validation/kl")
    points = [(kl[update], reward, update) for update, reward in rewards.items() if update in kl]
    if not points:
        return None
    step = -(-len(points) // MAX_UPDATE_LABELS)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot([p[0] for p in points], [p[1] for p in points], color=BLUE, marker="o", linewidth=1.2)
        for number, (x, y, update) in enumerate(points):
            if update == kept:
                axes.plot([x], [y], "o", markersize=11, markerfacecolor="none", markeredgecolor=ORANGE, markeredgewidth=2)
            if number % step == 0 or update == kept:
                label_offset = (6, -13) if update == kept else (-3, 7)
                axes.annotate(str(update), (x, y), xytext=label_offset, textcoords="offset points")
        axes.margins(0.13)
        axes.set_xlabel("KL to the initial policy, nats per response")
        axes.set_ylabel("held-out reward")

    words = "; ".join(f"update {update}: KL {x:.3g}, reward {y:.3g}" for x, y, update in points[::step])
    caption = "Reward against distance from the initial policy, labeled by update. Up and to the left is better."
    caption += " The ring marks the saved policy." if kept is not None else ""
    return draw_plot("ppo-frontier", "Reward against KL", caption, f"Held-out reward against KL. {words}.", paint)


def evaluation_plots(evaluations: Sequence[Evaluation]) -> list[Plot]:
    """Draw InstructGPT's four panels (`PANELS`) if at least two of them have measurements."""
    panels: dict[str, dict[str, Measurement]] = {}
    for panel, (task, names) in PANELS.items():
        for evaluation in evaluations:
            by_name = {figure.name: figure for figure in evaluation.measurements if figure.value is not None}
            figure = next((by_name[name] for name in names if name in by_name), None)
            if evaluation.task == task and figure is not None:
                panels.setdefault(panel, {})[evaluation.model] = figure
    if len(panels) < 2:
        return []
    models = list(dict.fromkeys(evaluation.model for evaluation in evaluations))

    def paint(figure: Figure) -> None:
        for axes, (panel, by_model) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            for position, model in enumerate(models):
                if measured := by_model.get(model):
                    value = measured.value or 0.0
                    low, high = (value if end is None else end for end in (measured.low, measured.high))
                    color, errors = COLORS[position % len(COLORS)], [[value - low], [high - value]]
                    axes.bar([position], [value], color=color, yerr=errors, ecolor=INK, label=model)
            better = next(iter(by_model.values())).better
            axes.set_title(f"{panel}\n({better} is better)" if better else panel, fontsize=8)
            axes.set_xticks([])
            axes.set_ylim(bottom=0)
            axes.grid(axis="x", visible=False)
        entries = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
        handles = {label: handle for labels in entries for handle, label in labels}
        figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=2, fontsize=8)

    words = "; ".join(
        f"{panel} of {visible_text(model)}: {format_value(measured.value or 0.0)}"
        for panel, by_model in panels.items()
        for model, measured in by_model.items()
    )
    caption = (
        "The four panels of InstructGPT's announcement, measured by this run's evaluations. Lines are 95 % intervals. "
        "Scales differ between panels."
    )
    return [draw_plot("panels", "Four panels", caption, words, paint, 2.8)]
