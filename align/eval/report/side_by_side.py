"""Several runs on one page: their figures, curves and answers side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from align.eval.core.evaluated_models import short_names
from align.eval.core.results import Evaluation, notes
from align.eval.report.comparisons import pair_samples
from align.eval.report.drawing import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    VIOLET,
    Plot,
    describe_series,
    draw_line,
    draw_plot,
    label_update_axes,
)
from align.eval.report.findings import summarize_run
from align.eval.report.reproduction import rerun_commands
from align.eval.report.runs import STAGES, RunData, Sample, Series
from align.eval.report.summary import Summary, table_row
from align.eval.report.template import MAX_SAMPLES, evaluation_tables, fill_template
from align.eval.report.text import visible_text

COLORS = (BLUE, ORANGE, GREEN, VIOLET, INK)
LINE_STYLES = ("-", "--", ":", "-.")
CURVES = (
    ("ppo", "validation/reward", "Reward on held-out prompts", "reward"),
    ("ppo", "validation/kl", "KL to the start", "nats per response"),
    ("ppo", "validation/length", "Response length", "tokens"),
    ("reward", "validation/accuracy", "Reward model: accuracy on held-out pairs", "share"),
    ("dpo", "validation/accuracy", "DPO: accuracy on held-out pairs", "share"),
    ("sft", "validation/loss", "SFT: loss on held-out demonstrations", "nats per token"),
)
"""Stage, metric, title and unit of the plots that show a curve of each run."""


@dataclass(frozen=True)
class NamedRun:
    """A run with its short name and its summary."""

    name: str
    run: RunData
    summary: Summary


@dataclass(frozen=True)
class PromptAnswers:
    """A prompt with the answer of each run that has one; `change` is the last run's reward minus the first one's."""

    prompt: tuple[tuple[str, str], ...]
    answers: list[Sample | None]
    change: float


def render_side_by_side(loaded: Sequence[RunData]) -> str:
    """The whole page as HTML text."""
    names = short_names([str(run.folder.resolve()) for run in loaded])
    runs = [NamedRun(visible_text(name), run, summarize_run(run)) for name, run in zip(names, loaded, strict=True)]
    evaluations = labeled_evaluations(runs)
    heads, rows = figures_table(runs)
    plots = [plot for plot in (overlay_plot(runs, *curve) for curve in CURVES) if plot] + frontier_plots(runs)
    prompts = common_prompts(runs)
    links = [("summary", "Summary")]
    links += [("evaluation", "Evaluation")] if evaluations else []
    links += [("curves", "Curves")] if plots else []
    links += [("samples", "Samples")] if prompts else []
    return fill_template(
        "side_by_side.html",
        title=f"{len(runs)} runs side by side",
        subtitle=" · ".join(each.name for each in runs),
        links=[*links, ("settings", "Settings")],
        runs=runs,
        figures=[(heads, rows)] if rows else [],
        evaluations=evaluation_tables(evaluations),
        evaluation_notes=[visible_text(note) for note in notes(evaluations)],
        plots=plots,
        prompts=prompts[:MAX_SAMPLES],
        settings=differing_settings(runs),
        commands=[(each.name, [visible_text(command) for command in rerun_commands(each.run)]) for each in runs],
    )


def figures_table(runs: Sequence[NamedRun]) -> tuple[list[str], list[list[str]]]:
    """A row for each measure of any run, a column for each run: the value after training with its interval."""
    cells: dict[str, dict[str, str]] = {}
    for each in runs:
        for row in [*each.summary.rows, *(table_row(row) for row in each.run.summary)]:
            interval = f" ({row.interval})" if row.interval else ""
            cells.setdefault(row.name, {})[each.name] = f"{row.after}{interval}"
    names = [each.name for each in runs]
    return ["measure", *names], [[measure, *(by_run.get(name, "") for name in names)] for measure, by_run in cells.items()]


def labeled_evaluations(runs: Sequence[NamedRun]) -> list[Evaluation]:
    """The evaluations of all runs; models carry their run's name, and one that several runs evaluated is listed once."""
    listed: dict[tuple[object, ...], Evaluation] = {}
    for each in runs:
        for evaluation in each.run.evaluations:
            listed.setdefault(
                (evaluation.task, evaluation.model, tuple(evaluation.figures)),
                replace(evaluation, model=f"{each.name}: {evaluation.model}"),
            )
    return list(listed.values())


def overlay_plot(runs: Sequence[NamedRun], stage: str, metric: str, title: str, unit: str) -> Plot | None:
    """One metric of all runs over updates; None if no run has it."""
    curves = [(each.name, each.run.stages[stage].series(metric)) for each in runs if stage in each.run.stages]
    curves = [(name, series) for name, series in curves if series]
    if not curves:
        return None

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for number, (name, series) in enumerate(curves):
            draw_line(axes, series, name, COLORS[number % len(COLORS)], LINE_STYLES[number % len(LINE_STYLES)], "o")
        label_update_axes(axes, unit)

    words = " ".join(describe_series(series, name) for name, series in curves)
    return draw_plot(f"several-{stage}-{metric.replace('/', '-')}", title, words, f"{title}. {words}", paint)


def frontier_plots(runs: Sequence[NamedRun]) -> list[Plot]:
    """Held-out reward against KL: a run above the others has more reward at the same distance from its start."""
    curves: list[tuple[str, Series, Series]] = []
    for each in runs:
        ppo = each.run.stages.get("ppo")
        if ppo is not None and ppo.series("validation/kl"):
            curves.append((each.name, ppo.series("validation/kl"), ppo.series("validation/reward")))
    if not curves:
        return []

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for number, (name, kl, reward) in enumerate(curves):
            points = [(kl.at(update), reward.at(update)) for update in kl.updates if reward.at(update) is not None]
            style: Any = {"color": COLORS[number % len(COLORS)], "linestyle": LINE_STYLES[number % len(LINE_STYLES)]}
            axes.plot(*zip(*points, strict=True), label=name, marker="o", **style)
        label_update_axes(axes, "reward")
        axes.set_xlabel("KL, nats per response")

    caption = "Above the others: more reward at the same KL. Rewards compare only where the same reward model gave them."
    names = ", ".join(name for name, _, _ in curves)
    return [draw_plot("several-frontier", "Reward against KL", caption, f"Held-out reward against KL of {names}.", paint)]


def common_prompts(runs: Sequence[NamedRun]) -> list[PromptAnswers]:
    """Prompts that all runs with samples answered, with the answers of the policies that were kept."""
    kept = [each.run.samples.get(each.summary.kept or max(each.run.samples, default=0), []) for each in runs]
    first = next((samples for samples in kept if samples), [])
    # For each run its answer to the prompt of each of the first run's samples.
    columns = [{id(pair.after): pair.before for pair in pair_samples(samples, first)} if samples else {} for samples in kept]
    rows = []
    for sample in first:
        answers = [column.get(id(sample)) for column in columns]
        if all(answer or not samples for answer, samples in zip(answers, kept, strict=True)):
            rewards = [answer.reward for answer in answers if answer]
            rows.append(PromptAnswers(sample.prompt, answers, rewards[-1] - rewards[0]))
    return sorted(rows, key=lambda row: -abs(row.change))


def differing_settings(runs: Sequence[NamedRun]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs, as `stage.name` with a value for each run."""
    rows = []
    for stage in STAGES:
        configs = [each.run.stages[stage].config if stage in each.run.stages else {} for each in runs]
        for name in dict.fromkeys(name for config in configs for name in config):
            values = [visible_text(config.get(name, "–")) for config in configs]
            if len(set(values)) > 1:
                rows.append((f"{stage}.{name}", values))
    return rows
