"""The page of a report, one HTML file with all that it needs, and the table of results for the terminal."""

import base64
import hashlib
import io
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from align.eval.core.results import Evaluation, figure_tables, notes
from align.eval.report.data import (
    STAGES,
    RunData,
    StageRun,
    format_number,
    read_summary_row,
    visible_text,
    visible_turns,
)
from align.eval.report.drawing import Plot
from align.eval.report.findings import Summary, summarize_run
from align.eval.report.plots import evaluation_plots, stage_plots
from align.ppo.extensions.rollout_files import RolloutRow

TEMPLATES = Path(__file__).parent / "templates"
MAX_SAMPLES = 300
"""Prompts on a page; of more, those whose rewards differ most are shown."""


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


def rerun_commands(run: RunData) -> list[str]:
    """Return commands that repeat each stage, with the same inputs, in a folder next to the run."""
    new_folder = run.folder.with_name(run.folder.resolve().name + "-again")
    commands = []
    for name, stage in run.stages.items():
        if stage.config:
            words = ["align", name, "--config", str(stage.folder / "config.yaml"), "--output_dir", str(new_folder / name)]
            commands.append(shlex.join([*words, "--resume", "false"] if stage.config.get("resume") else words))
    return commands


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


def _fill_template(evaluations: Sequence[Evaluation], **values: Any) -> str:
    """Return the page made from its template, with its styles and its script in it; all values are escaped."""
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
    return environment.get_template("run_page.html").render(
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
    """Return rows of summary.json as a table for the terminal: `name`, `before`, `after`, optional `interval` and `note`.

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


MAX_TOKENS = 9_000
"""Response tokens on a page, over all updates: about a megabyte of it."""
LEVELS = 4
"""Shades of a color for positive values, and for negative ones."""


@dataclass(frozen=True)
class ShownToken:
    """A token, its two shades from -LEVELS to LEVELS, and its figures in words."""

    text: str
    kl: int
    advantage: int
    figures: str


@dataclass(frozen=True)
class ShownRollout:
    """A response and its figures; all text is fit for a page."""

    update: int
    row: int
    prompt: tuple[tuple[str, str], ...]
    category: str
    ended: bool
    reward: float
    kl: float
    length: int
    parts: list[tuple[str, float]]
    tokens: list[ShownToken]


@dataclass(frozen=True)
class RolloutsView:
    """What a page shows of a run's rollouts.

    Attributes:
        kl_scale, advantage_scale: absolute value from which a token has the darkest shade.
        written: responses in the files of the shown updates.
    """

    rollouts: list[ShownRollout]
    kl_scale: float
    advantage_scale: float
    written: int


def show_rollouts(updates: Sequence[Sequence[RolloutRow]]) -> RolloutsView | None:
    """Choose the responses that fit the page, the most informative of each update first; None if there are none."""
    chosen = [row for rows in updates for row in _most_informative(rows, MAX_TOKENS // len(updates))]
    if not chosen:
        return None
    kl_scale, advantage_scale = _scale([row.kl for row in chosen]), _scale([row.advantages for row in chosen])
    shown = [_show(row, kl_scale, advantage_scale) for row in chosen]
    return RolloutsView(shown, kl_scale, advantage_scale, sum(map(len, updates)))


def _most_informative(rows: Sequence[RolloutRow], budget: int) -> list[RolloutRow]:
    """Rows of at most `budget` tokens, but at least one: extremes of reward, KL and length, then in sampling order."""
    by_reward, by_kl = sorted(rows, key=lambda row: row.reward), sorted(rows, key=lambda row: sum(row.kl))
    by_length = sorted(rows, key=lambda row: len(row.ids))
    extremes = [by_reward[-1], by_reward[0], by_kl[-1], by_kl[0], by_length[-1], by_length[0]]
    chosen: dict[int, RolloutRow] = {}
    for row in (*extremes, *rows):
        if row.row not in chosen and (not chosen or len(row.ids) <= budget):
            chosen[row.row] = row
            budget -= len(row.ids)
    return [chosen[number] for number in sorted(chosen)]


def _scale(values: Sequence[Sequence[float]]) -> float:
    """The 95th percentile of the absolute values; 1 if all are 0."""
    sizes = sorted(abs(value) for row in values for value in row)
    return (sizes[int(0.95 * (len(sizes) - 1))] or sizes[-1] or 1.0) if sizes else 1.0


def _show(row: RolloutRow, kl_scale: float, advantage_scale: float) -> ShownRollout:
    def shade(value: float, scale: float) -> int:
        return max(-LEVELS, min(LEVELS, round(LEVELS * value / scale)))

    tokens = []
    for text, log_prob, kl, value, advantage in zip(
        row.tokens, row.log_probs, row.kl, row.values, row.advantages, strict=True
    ):
        numbers = {"log-prob": log_prob, "KL": kl, "advantage": advantage, "value": value}
        figures = ", ".join(f"{name} {format_number(number)}" for name, number in numbers.items())
        tokens.append(ShownToken(visible_text(text), shade(kl, kl_scale), shade(advantage, advantage_scale), figures))
    return ShownRollout(
        update=row.update,
        row=row.row,
        prompt=visible_turns(row.prompt),
        category=visible_text(row.category or ""),
        ended=row.ended,
        reward=row.reward,
        kl=sum(row.kl),
        length=len(row.ids),
        parts=[(visible_text(name), value) for name, value in row.parts.items()],
        tokens=tokens,
    )
