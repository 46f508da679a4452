"""Plots of the results of `align eval`, models side by side."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from align.eval.core.results import Evaluation, format_figure
from align.eval.report.drawing import BLUE, GREEN, INK, ORANGE, VIOLET, Plot, draw_plot
from align.eval.report.text import visible_text
from align.eval.verdicts.questions import PANELS
from align.eval.verdicts.task import panels

COLORS = (BLUE, ORANGE, GREEN, VIOLET)


def evaluation_plots(evaluations: Sequence[Evaluation]) -> list[Plot]:
    """InstructGPT's four panels (`align.eval.verdicts.questions.PANELS`), where at least two of them were measured."""
    models = list(dict.fromkeys(evaluation.model for evaluation in evaluations))
    found = {model: {row["panel"]: row for row in panels([e for e in evaluations if e.model == model])} for model in models}
    found = {model: rows for model, rows in found.items() if rows}
    measured = [panel for panel in PANELS if any(panel in rows for rows in found.values())]
    if len(measured) < 2:
        return []

    def paint(figure: Figure) -> None:
        for axes, panel in zip(figure.subplots(1, len(measured), squeeze=False)[0], measured, strict=True):
            for position, (model, rows) in enumerate(found.items()):
                if row := rows.get(panel):
                    low, high = (row[end] if row[end] is not None else row["value"] for end in ("low", "high"))
                    errors = [[row["value"] - low], [high - row["value"]]]
                    color = COLORS[position % len(COLORS)]
                    axes.bar([position], [row["value"]], color=color, yerr=errors, ecolor=INK, label=model)
            better = next(rows[panel]["better"] for rows in found.values() if panel in rows)
            axes.set_title(f"{panel}\n({better} is better)" if better else panel, fontsize=8)
            axes.set_xticks([])
            axes.set_ylim(bottom=0)
            axes.grid(axis="x", visible=False)
        handles = {
            label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=2, fontsize=8)

    rows = [
        [panel, visible_text(model), found[model][panel]["figure"], format_figure(found[model][panel]["value"])]
        for panel in measured
        for model in found
        if panel in found[model]
    ]
    words = "; ".join(f"{panel} of {model}: {value}" for panel, model, _, value in rows)
    caption = (
        "The four panels of InstructGPT's announcement, each from this run's own evaluation; lines are 95 % intervals. "
        "Each panel has its own scale."
    )
    return [
        replace(
            draw_plot("panels", "Four panels", caption, words, paint, 2.8),
            head=["panel", "model", "figure", "value"],
            rows=rows,
        )
    ]
