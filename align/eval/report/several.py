"""Several runs on one page: their figures, their curves and their answers beside each other."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from align.eval.report.compare import pair_samples
from align.eval.report.drawing import BLUE, GREEN, INK, ORANGE, VIOLET, Plot, course, draw, line, over_updates
from align.eval.report.findings import digest
from align.eval.report.page import MOST_SAMPLES, commands, fill, shown_grids
from align.eval.report.runs import STAGES, Runs, Sample, Series, visible
from align.eval.report.summary import Digest, line_of
from align.eval.results import Evaluation, notes
from align.eval.subjects import short_names

COLOURS = (BLUE, ORANGE, GREEN, VIOLET, INK)
STYLES = ("-", "--", ":", "-.")
CURVES = (
    ("ppo", "validation/reward", "Reward on held-out prompts", "reward"),
    ("ppo", "validation/kl", "KL to the start", "nats a response"),
    ("ppo", "validation/length", "Response length", "tokens"),
    ("reward", "validation/accuracy", "Reward model: accuracy on held-out pairs", "share"),
    ("sft", "validation/loss", "SFT: loss on held-out demonstrations", "nats a token"),
)
"""Stage, metric, title and unit of the curves that are laid over each other."""


@dataclass(frozen=True)
class Named:
    """A run with its short name and what was found in it."""

    name: str
    runs: Runs
    found: Digest


@dataclass(frozen=True)
class Row:
    """A prompt with the answer of each run that has one; `change` is the last run's reward less the first one's."""

    prompt: tuple[tuple[str, str], ...]
    answers: list[Sample | None]
    change: float


def render_several(loaded: Sequence[Runs]) -> str:
    """The whole page as HTML text."""
    names = short_names([str(runs.folder.resolve()) for runs in loaded])
    found = [Named(visible(name), runs, digest(runs)) for name, runs in zip(names, loaded, strict=True)]
    evaluations = side_by_side(found)
    heads, rows = figures_of(found)
    return fill(
        "several.html",
        title=f"{len(found)} runs side by side",
        named=found,
        grids=[(heads, rows)] if rows else [],
        evaluations=shown_grids(evaluations),
        notes=[visible(note) for note in notes(evaluations)],
        plots=[plot for plot in (overlay(found, *curve) for curve in CURVES) if plot] + frontier(found),
        answers=answers(found)[:MOST_SAMPLES],
        settings=differences(found),
        commands=[(each.name, [visible(command) for command in commands(each.runs)]) for each in found],
    )


def figures_of(found: Sequence[Named]) -> tuple[list[str], list[list[str]]]:
    """A row for each measure of any run, a column for each run: the value after training with its interval."""
    cells: dict[str, dict[str, str]] = {}
    for each in found:
        for entry in [*each.found.lines, *(line_of(row) for row in each.runs.summary)]:
            interval = f" ({entry.interval})" if entry.interval else ""
            cells.setdefault(entry.name, {})[each.name] = f"{entry.after}{interval}"
    names = [each.name for each in found]
    return ["measure", *names], [[measure, *(of.get(name, "") for name in names)] for measure, of in cells.items()]


def side_by_side(found: Sequence[Named]) -> list[Evaluation]:
    """The evaluations of all runs; models carry their run's name, and one that several runs evaluated stands once."""
    listed: dict[tuple[object, ...], Evaluation] = {}
    for each in found:
        for evaluation in each.runs.evaluations:
            listed.setdefault(
                (evaluation.task, evaluation.model, tuple(evaluation.figures)),
                replace(evaluation, model=f"{each.name}: {evaluation.model}"),
            )
    return list(listed.values())


def overlay(found: Sequence[Named], stage: str, metric: str, title: str, unit: str) -> Plot | None:
    """One metric of all runs over updates."""
    curves = [(each.name, each.runs.stages[stage].series(metric)) for each in found if stage in each.runs.stages]
    curves = [(name, series) for name, series in curves if series]
    if not curves:
        return None

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for number, (name, series) in enumerate(curves):
            line(axes, series, name, COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)], "o")
        over_updates(axes, unit)

    words = " ".join(course(series, name) for name, series in curves)
    return draw(f"several-{stage}-{metric.replace('/', '-')}", title, words, f"{title}. {words}", paint)


def frontier(found: Sequence[Named]) -> list[Plot]:
    """Held-out reward against KL: the run above the others has more reward at the same distance from its start."""
    curves: list[tuple[str, Series, Series]] = []
    for each in found:
        run = each.runs.stages.get("ppo")
        if run is not None and run.series("validation/kl"):
            curves.append((each.name, run.series("validation/kl"), run.series("validation/reward")))
    if not curves:
        return []

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for number, (name, kl, reward) in enumerate(curves):
            points = [(kl.at(update), reward.at(update)) for update in kl.updates if reward.at(update) is not None]
            style: Any = {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number % len(STYLES)], "marker": "o"}
            axes.plot(*zip(*points, strict=True), label=name, **style)
        over_updates(axes, "reward")
        axes.set_xlabel("KL, nats a response")

    caption = "Above the others: more reward at the same KL. Rewards compare only where the same reward model gave them."
    names = ", ".join(name for name, _, _ in curves)
    return [draw("several-frontier", "Reward against KL", caption, f"Held-out reward against KL of {names}.", paint)]


def answers(found: Sequence[Named]) -> list[Row]:
    """Prompts that all runs with samples answered, with the answers of the policies that were kept."""
    kept = [each.runs.samples.get(each.found.kept or max(each.runs.samples, default=0), []) for each in found]
    first = next((samples for samples in kept if samples), [])
    columns = [{id(pair.after): pair.before for pair in pair_samples(samples, first)} if samples else {} for samples in kept]
    rows = []
    for sample in first:
        beside = [column.get(id(sample)) for column in columns]
        if all(answer or not samples for answer, samples in zip(beside, kept, strict=True)):
            rewards = [answer.reward for answer in beside if answer]
            rows.append(Row(sample.prompt, beside, rewards[-1] - rewards[0]))
    return sorted(rows, key=lambda row: -abs(row.change))


def differences(found: Sequence[Named]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs, as `stage.name` with a value for each run."""
    rows = []
    for stage in STAGES:
        configs = [each.runs.stages[stage].config if stage in each.runs.stages else {} for each in found]
        for name in dict.fromkeys(name for config in configs for name in config):
            values = [visible(config.get(name, "–")) for config in configs]
            if len(set(values)) > 1:
                rows.append((f"{stage}.{name}", values))
    return rows
