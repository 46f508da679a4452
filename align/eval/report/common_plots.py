"""Plots that several stages share. Each returns None where there is nothing to show."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from align.eval.report.drawing import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    Plot,
    describe_series,
    draw_line,
    draw_plot,
    format_as_percent,
    label_update_axes,
)
from align.eval.report.runs import Series, StageRun

MAX_TABLE_ROWS = 60
"""Most rows in the table below a plot; a longer table is omitted."""
MAX_LABELS = 24
"""Most labels on an axis; further rows appear only in the table."""


class Curve(NamedTuple):
    """A metric's name, its label, color and line style."""

    metric: str
    label: str
    color: str
    style: str


def curves_plot(
    stage: StageRun, name: str, title: str, unit: str, curves: Sequence[Curve], caption: str, percent: bool = False
) -> Plot | None:
    """Several metrics over updates in one plot."""
    lines = [(stage.series(curve.metric), curve) for curve in curves]
    lines = [(series, curve) for series, curve in lines if series]
    if not lines:
        return None

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for series, curve in lines:
            marker = "o" if curve.style == "--" and "held" in curve.label else ""
            draw_line(axes, series, curve.label, curve.color, curve.style, marker)
        if percent:
            format_as_percent(axes.yaxis)
        label_update_axes(axes, unit, legend=len(lines) > 1)
        if len(lines) == 4:
            axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, borderaxespad=0.2)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))

    words = " ".join(describe_series(series, curve.label.capitalize()) for series, curve in lines)
    return draw_plot(name, title, caption, f"{title} over updates. {words}", paint)


def panels_plot(stage: StageRun, name: str, title: str, panels: Mapping[str, str], caption: str) -> Plot | None:
    """Metrics in stacked panels, each on its own scale.

    Args:
        panels: from a metric to its label.
    """
    shown = [(stage.series(metric), label) for metric, label in panels.items() if stage.series(metric)]
    if not shown:
        return None

    def paint(figure: Figure) -> None:
        rows = figure.subplots(len(shown), 1, squeeze=False, sharex=True)
        for (axes,), (series, label), color in zip(rows, shown, (BLUE, ORANGE, GREEN), strict=False):
            draw_line(axes, series, label, color)
            label_update_axes(axes, label, legend=False)
            if axes is not rows[-1][0]:
                axes.set_xlabel("")

    words = " ".join(describe_series(series, label.capitalize()) for series, label in shown)
    return draw_plot(name, title, caption, f"{title} over updates. {words}", paint, height=0.8 + 0.9 * len(shown))


def draw_training_and_validation(figure: Figure, train: Series, held_out: Series) -> Axes:
    """Training and validation as two lines; returns the axes."""
    axes = figure.subplots()
    draw_line(axes, train, "training", BLUE)
    draw_line(axes, held_out, "validation", ORANGE, "--", "o")
    return axes


def loss_plot(stage: StageRun, name: str, metric: str, title: str, unit: str, chance: float | None) -> Plot | None:
    """Training and validation loss over updates, with the loss of a coin toss if `chance` is given."""
    train, held_out = stage.series(metric), stage.series("validation/loss")
    if not train and not held_out:
        return None

    def paint(figure: Figure) -> None:
        axes = draw_training_and_validation(figure, train, held_out)
        if chance is not None:
            axes.axhline(chance, color=INK, linewidth=1, linestyle=":", label="coin toss")
        label_update_axes(axes, unit)

    alt = " ".join([describe_series(train, "Training loss"), describe_series(held_out, "Validation loss")]).strip()
    caption = (
        "Lower is better. A validation loss that rises while training falls is overfitting; the model with the lowest "
        "validation loss is kept."
    )
    plot = draw_plot(name, title, caption, f"{title} over updates. {alt}", paint)
    rows = [[str(update), f"{value:.4f}"] for update, value in zip(held_out.updates, held_out.values, strict=True)]
    return replace(plot, head=["update", "validation loss"], rows=rows) if len(rows) <= MAX_TABLE_ROWS else plot


def steps_plot(stage: StageRun, name: str) -> Plot | None:
    """Learning rate and gradient norm."""
    panels = {"learning_rate": "learning rate", "gradient_norm": "gradient norm"}
    caption = (
        "The schedule, and how large gradients are before clipping. Spikes point to bad batches or too high a learning rate."
    )
    return panels_plot(stage, name, "Optimizer steps", panels, caption)


def dumbbell_plot(
    name: str, title: str, caption: str, ends: tuple[str, str], rows: Sequence[tuple[str, float, float]]
) -> Plot:
    """Two mean rewards for each label, joined by a line; `ends` names the two values."""
    shown = list(rows)[:MAX_LABELS]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        positions = range(len(shown))
        axes.hlines(positions, [row[1] for row in shown], [row[2] for row in shown], color=INK, linewidth=1)
        axes.plot([row[1] for row in shown], positions, "s", color=ORANGE, markersize=6, label=ends[0])
        axes.plot([row[2] for row in shown], positions, "o", color=GREEN, markersize=6.5, label=ends[1])
        axes.set_yticks(positions, [shorten_label(row[0]) for row in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlabel("mean reward")
        axes.grid(axis="y", visible=False)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, borderaxespad=0.2)

    words = "; ".join(f"{label}: {ends[0]} {left:.3g}, {ends[1]} {right:.3g}" for label, left, right in shown)
    plot = draw_plot(name, title, caption, f"{title}: {words}.", paint, height=1.1 + 0.27 * len(shown))
    table = [[label, f"{left:.3f}", f"{right:.3f}", f"{right - left:+.3f}"] for label, left, right in rows]
    return replace(plot, head=["category", *ends, "difference"], rows=table)


def shorten_label(label: str, length: int = 18) -> str:
    """A label for an axis, cut to `length` characters."""
    return label if len(label) <= length else label[: length - 1] + "…"
