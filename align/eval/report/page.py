"""The pages of a report: one run, or several side by side. Each is one HTML file with all that it needs."""

import base64
import hashlib
import io
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from align.eval.core.answers import short_names
from align.eval.core.results import Evaluation, figure_tables, notes
from align.eval.report.comparisons import pair_samples
from align.eval.report.data import (
    STAGES,
    RunData,
    Sample,
    StageRun,
    format_number,
    read_summary_row,
    visible_text,
)
from align.eval.report.drawing import COLORS, Plot, describe_series, downsample, draw_plot, label_update_axes
from align.eval.report.findings import Summary, summarize_run
from align.eval.report.plots import evaluation_plots, stage_plots
from align.eval.report.rollouts import show_rollouts

TEMPLATES = Path(__file__).parent / "templates"
MAX_SAMPLES = 300
"""Prompts on a page; of more, those whose rewards differ most are shown."""
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
class Section:
    """A stage's part of the page: a line of facts, the plots, and name and value of each setting."""

    stage: str
    title: str
    facts: str
    plots: list[Plot]
    settings: list[tuple[str, str]]


def render_run_page(run: RunData) -> str:
    """Return the whole page as HTML text; everything that comes from a run is escaped."""
    summary, rollouts = summarize_run(run), show_rollouts(run.rollouts)
    sections = [_section(stage, run, summary) for stage in run.stages.values()]
    links = [("summary", "Summary")]
    links += [("evaluation", "Evaluation")] if run.evaluations else []
    links += [(section.stage, section.title) for section in sections]
    links += [("samples", "Samples")] if summary.pairs else []
    links += [("rollouts", "Rollouts")] if rollouts else []
    return _fill_template(
        "run_page.html",
        run.evaluations,
        title=visible_text(f"Run report: {run.folder.resolve().name}"),
        subtitle=visible_text(run.folder),
        links=[*links, ("settings", "Settings")],
        run=run,
        summary=summary,
        evaluation_plots=evaluation_plots(run.evaluations),
        sections=sections,
        pairs=summary.pairs[:MAX_SAMPLES],
        rollouts=rollouts,
        versions=_versions(run.stages.values()),
        commands=[visible_text(command) for command in rerun_commands(run)],
    )


def _section(stage: StageRun, run: RunData, summary: Summary) -> Section:
    settings = [(visible_text(name), visible_text(_format_setting(value))) for name, value in stage.config.items()]
    return Section(stage.stage, STAGES[stage.stage][0], _facts(stage), stage_plots(stage, run, summary), settings)


def _facts(stage: StageRun) -> str:
    rank = stage.config.get("lora_rank")
    parts = []
    if "model" in stage.config:
        parts.append(f"starts from {visible_text(stage.config['model'])}")
        parts.append(f"LoRA of rank {rank}" if rank else "all weights trained")
    if stage.metrics:
        last = max(stage.metrics)
        parts.append(f"{last} update{'' if last == 1 else 's'}")
        seconds = stage.metrics[last].get("seconds")
        parts += [f"{seconds / 60:.1f} minutes"] if seconds else []
    device = stage.environment.get("device")
    if device:
        parts.append(f"on {visible_text(device)} ({visible_text(stage.environment.get('processors', '?'))} threads)")
    return ", ".join(parts)


def _format_setting(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "–"
    return "–" if value is None or value == "" else str(value)


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
    """Return the whole page as HTML text."""
    names = short_names([str(run.folder.resolve()) for run in loaded])
    runs = [NamedRun(visible_text(name), run, summarize_run(run)) for name, run in zip(names, loaded, strict=True)]
    evaluations = _labeled_evaluations(runs)
    heads, rows = _figures_table(runs)
    plots = [plot for plot in [*(_overlay_plot(runs, *curve) for curve in CURVES), _frontier_plot(runs)] if plot]
    prompts = _common_prompts(runs)
    links = [("summary", "Summary")]
    links += [("evaluation", "Evaluation")] if evaluations else []
    links += [("curves", "Curves")] if plots else []
    links += [("samples", "Samples")] if prompts else []
    return _fill_template(
        "side_by_side.html",
        evaluations,
        title=f"{len(runs)} runs side by side",
        subtitle=" · ".join(each.name for each in runs),
        links=[*links, ("settings", "Settings")],
        runs=runs,
        figures=[(heads, rows)] if rows else [],
        plots=plots,
        prompts=prompts[:MAX_SAMPLES],
        settings=_differing_settings(runs),
        commands=[(each.name, [visible_text(command) for command in rerun_commands(each.run)]) for each in runs],
    )


def _figures_table(runs: Sequence[NamedRun]) -> tuple[list[str], list[list[str]]]:
    """Return a row for each measure and a column for each run: the value after training with its interval."""
    cells: dict[str, dict[str, str]] = {}
    for each in runs:
        for row in [*each.summary.rows, *each.run.summary]:
            interval = f" ({row.interval})" if row.interval else ""
            cells.setdefault(row.name, {})[each.name] = f"{row.after}{interval}"
    names = [each.name for each in runs]
    return ["measure", *names], [[measure, *(by_run.get(name, "") for name in names)] for measure, by_run in cells.items()]


def _labeled_evaluations(runs: Sequence[NamedRun]) -> list[Evaluation]:
    """Return the evaluations of all runs, models with their run's name; equal ones of several runs are listed once."""
    listed: dict[tuple[object, ...], Evaluation] = {}
    for each in runs:
        for evaluation in each.run.evaluations:
            listed.setdefault(
                (evaluation.task, evaluation.model, tuple(evaluation.figures)),
                replace(evaluation, model=f"{each.name}: {evaluation.model}"),
            )
    return list(listed.values())


def _overlay_plot(runs: Sequence[NamedRun], stage: str, metric: str, title: str, unit: str) -> Plot | None:
    """Draw one metric of all runs over updates; None if no run has it."""
    found = [(each.name, each.run.stages[stage].series(metric)) for each in runs if stage in each.run.stages]
    found = [(name, series) for name, series in found if series]
    lines = [(name, shown.updates, shown.values) for name, shown in ((name, downsample(series)) for name, series in found)]
    words = " ".join(describe_series(series, name) for name, series in found)
    return _lines_plot(f"{stage}-{metric.replace('/', '-')}", title, words, f"{title}. {words}", ("update", unit), lines)


def _frontier_plot(runs: Sequence[NamedRun]) -> Plot | None:
    """Draw held-out reward against KL: a run above the others has more reward at the same distance from its start."""
    lines = []
    for each in runs:
        if "ppo" in each.run.stages:
            kl, reward = (each.run.stages["ppo"].series(f"validation/{name}") for name in ("kl", "reward"))
            updates = [update for update in kl.updates if reward.at(update) is not None]
            lines.append((each.name, [kl.at(update) for update in updates], [reward.at(update) for update in updates]))
    lines = [line for line in lines if line[1]]
    caption = "Above the others: more reward at the same KL. Rewards compare only where the same reward model gave them."
    alt = f"Held-out reward against KL of {', '.join(name for name, _, _ in lines)}."
    return _lines_plot("frontier", "Reward against KL", caption, alt, ("KL, nats per response", "reward"), lines)


def _lines_plot(
    name: str, title: str, caption: str, alt: str, units: tuple[str, str], lines: Sequence[tuple[str, Any, Any]]
) -> Plot | None:
    """Draw a line for each run, given its name and its coordinates; None without a line."""
    if not lines:
        return None

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for number, (run, x, y) in enumerate(lines):
            color, style = COLORS[number % len(COLORS)], LINE_STYLES[number % len(LINE_STYLES)]
            axes.plot(x, y, label=run, color=color, linestyle=style, marker="o")
        label_update_axes(axes, units[1])
        axes.set_xlabel(units[0])

    return draw_plot(f"several-{name}", title, caption, alt, paint)


def _common_prompts(runs: Sequence[NamedRun]) -> list[PromptAnswers]:
    """Return prompts that all runs with samples answered, with the answers of the policies that were kept."""
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


def _differing_settings(runs: Sequence[NamedRun]) -> list[tuple[str, list[str]]]:
    """Return settings that are not the same in all runs, as `stage.name` with a value for each run."""
    rows = []
    for stage in STAGES:
        configs = [each.run.stages[stage].config if stage in each.run.stages else {} for each in runs]
        for name in dict.fromkeys(name for config in configs for name in config):
            values = [visible_text(config.get(name, "–")) for config in configs]
            if len(set(values)) > 1:
                rows.append((f"{stage}.{name}", values))
    return rows


def rerun_commands(run: RunData) -> list[str]:
    """Return commands that repeat the run in a folder next to it; each stage starts from the new run's models."""
    new_folder = run.folder.with_name(run.folder.resolve().name + "-again")
    moved = {str(stage.config.get("output_dir", stage.folder)): str(new_folder / name) for name, stage in run.stages.items()}
    commands = []
    for name, stage in run.stages.items():
        words = ["align", name, "--config", str(stage.folder / "config.yaml"), "--output_dir", str(new_folder / name)]
        for setting, value in stage.config.items():
            values = value if isinstance(value, list) else [value]
            renamed = [_moved(item, moved) for item in values]
            if setting != "output_dir" and renamed != values:
                words += [f"--{setting}", *renamed]
        words += ["--resume", "false"] if stage.config.get("resume") else []
        if stage.config:
            commands.append(shlex.join(words))
    return [*commands, shlex.join(["align", "report", str(new_folder)])] if commands else []


def _moved(value: Any, moved: Mapping[str, str]) -> Any:
    """Return a path inside one of the moved folders, at its new location; any other value unchanged."""
    for old, new in moved.items():
        if isinstance(value, str) and value.startswith(old.rstrip("/") + "/"):
            return new + value[len(old.rstrip("/")) :]
    return value


def _versions(stages: Iterable[StageRun]) -> list[tuple[str, str]]:
    """Return name and version of all that a run was made with; where stages differ, their versions in order."""
    by_name: dict[str, dict[str, None]] = {}
    for stage in stages:
        packages = stage.environment.get("packages")
        flat = {name: value for name, value in stage.environment.items() if name != "packages"}
        flat |= packages if isinstance(packages, dict) else {}
        for name, value in flat.items():
            by_name.setdefault(visible_text(name), {})[visible_text(value)] = None
    return [(name, ", then ".join(values)) for name, values in by_name.items()]


def _fill_template(template: str, evaluations: Sequence[Evaluation], **values: Any) -> str:
    """Return a page made from a template, with its styles and its script in it; all values are escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = format_number
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    tables = [
        (list(map(visible_text, heads)), [list(map(visible_text, row)) for row in rows])
        for heads, rows in (figure_tables(evaluations) if evaluations else [])
    ]
    return environment.get_template(template).render(
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        # Only this script may run: text that a model wrote cannot, even if escaping failed.
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'",
        evaluations=tables,
        evaluation_notes=[visible_text(note) for note in notes(evaluations)],
        **values,
    )


def summary_table(rows: Iterable[Mapping[str, Any]], width: int | None = None) -> str:
    """Return results before and after as a table for the terminal.

    Args:
        rows: rows of summary.json: `name`, `before`, `after` (numbers or text), and optional `interval` and `note`.
        width: columns of the terminal; None: as wide as it is.

    Raises:
        KeyError: if a row lacks a name, a before or an after.
    """
    shown = [read_summary_row(row) for row in rows]
    titles = {"name": "measure", "before": "before", "after": "after", "change": "change"}
    titles |= {"interval": "95 % interval", "note": "note"}
    columns = {title: [getattr(row, name) for row in shown] for name, title in titles.items()}
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    table = Table(show_lines=False, header_style="bold")
    for title in columns:
        is_number = title in ("before", "after", "change")
        table.add_column(title, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, cells))  # Text: a name in [brackets] is not rich's markup
    out = io.StringIO()
    Console(file=out, width=width or shutil.get_terminal_size((100, 24)).columns, color_system=None).print(table)
    return out.getvalue().rstrip("\n")
