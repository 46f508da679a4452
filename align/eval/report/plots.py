"""The plots of each stage and of the results of `align eval`: the charts in charts.yaml, and drawings of other data."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from align.core.statistics import pair_calibration
from align.eval import results
from align.eval.report.data import RunData, StageRun, visible_text
from align.eval.report.drawing import (
    BLUE,
    COLORS,
    INK,
    ORANGE,
    PERCENT,
    Chart,
    Plot,
    add_legend,
    draw_chart,
    draw_plot,
)
from align.eval.report.findings import Summary, max_kl
from align.eval.results import Evaluation, format_value
from align.reward.rankings import ScoredRanking, pairs_and_differences

MAX_UPDATE_LABELS = 14
"""Labels of updates on the plot of reward against KL: a label for each of many points would cover them."""
PANELS = {
    "toxicity": ("toxicity", ("basic: expected maximum toxicity",)),
    "truthfulness": ("truthfulness", ("true and informative", "mc1")),
    "hallucination": ("verdicts", ("hallucination, closed domain",)),
    "appropriate": ("verdicts", ("appropriate for an assistant",)),
}
"""InstructGPT's panels: the task, and the figures that each shows, of which the first that was measured counts."""
CHARTS: dict[str, list[dict[str, Any]]] = yaml.safe_load(Path(__file__).with_name("charts.yaml").read_text(encoding="utf-8"))


def stage_plots(stage: StageRun, run: RunData, summary: Summary) -> list[Plot]:
    """Draw all plots of a stage; those with nothing to show are left out."""
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
    """The chart of KL with the limit, which is drawn where the policy came near it."""
    limit = max_kl(stage)
    if not math.isfinite(limit):
        return chart
    highest = max([0.0, *stage.series("kl/k1").values(), *stage.series("validation/kl").values()])
    caption = f"{chart.caption} A policy with a KL above {limit:g} is never kept."
    return replace(chart, caption=caption, reference=(limit, "limit") if highest > 0.5 * limit else None)


def calibration_plot(rankings: Sequence[ScoredRanking]) -> Plot | None:
    """Draw the reliability diagram (stated against actual probability), and how many pairs each bin holds."""
    _, differences = pairs_and_differences(rankings)
    if not len(differences):
        return None
    table = pair_calibration(differences)
    stated, actual, counts = zip(*table, strict=True)

    def paint(figure: Figure) -> None:
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        axes.plot([0.5, 1], [0.5, 1], color=INK, linewidth=1, linestyle=":", label="perfect")
        axes.plot(stated, actual, color=BLUE, marker="o", label="reward model")
        axes.set_ylabel("actually right")
        axes.yaxis.set_major_formatter(PERCENT)
        axes.set_ylim(min(0.4, *actual) - 0.05, 1.05)
        add_legend(axes)
        below.bar([0.5 + 0.05 * (min(9, int((p - 0.5) * 20)) + 0.5) for p in stated], counts, width=0.044, color=BLUE)
        below.set_ylabel("pairs")
        below.set_xlabel("probability that the model states for its choice")
        below.set_xlim(0.49, 1.01)
        below.xaxis.set_major_formatter(PERCENT)

    caption = "On the dotted line the stated probability is what comes true; below it the model is overconfident."
    words = "; ".join(f"stated {p:.0%}, right {a:.0%}, {n} pairs" for p, a, n in table)
    alt = f"Reliability diagram of the reward model: {words}."
    return draw_plot("reward-calibration", "Calibration", caption, alt, paint, 3.3)


def frontier_plot(stage: StageRun, kept: int | None) -> Plot | None:
    """Draw held-out reward against KL: one point for each evaluation, labeled by its update."""
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
    caption = "What reward costs in distance; labels are updates. Up and to the left is better."
    caption += " The ring marks the policy that was kept." if kept is not None else ""
    return draw_plot("ppo-frontier", "Reward against KL", caption, f"Held-out reward against KL. {words}.", paint)


def evaluation_plots(evaluations: Sequence[Evaluation]) -> list[Plot]:
    """Draw InstructGPT's four panels (`PANELS`) if at least two of them were measured."""
    found: dict[str, dict[str, results.Measurement]] = {}
    for panel, (task, names) in PANELS.items():
        for evaluation in evaluations:
            by_name = {figure.name: figure for figure in evaluation.measurements if figure.value is not None}
            figure = next((by_name[name] for name in names if name in by_name), None)
            if evaluation.task == task and figure is not None:
                found.setdefault(panel, {})[evaluation.model] = figure
    if len(found) < 2:
        return []
    models = list(dict.fromkeys(evaluation.model for evaluation in evaluations))

    def paint(figure: Figure) -> None:
        for axes, (panel, by_model) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
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
        for panel, by_model in found.items()
        for model, measured in by_model.items()
    )
    caption = (
        "The four panels of InstructGPT's announcement, each from this run's own evaluation; lines are 95 % intervals. "
        "Each panel has its own scale."
    )
    return [draw_plot("panels", "Four panels", caption, words, paint, 2.8)]
