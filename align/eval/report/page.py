"""Render the report of a run: a self-contained HTML file, a table for the terminal, and Markdown tables."""

import base64
import hashlib
import io
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from align.core.errors import UserError
from align.core.files import write_text
from align.eval.report.data import (
    EVALUATIONS_FOLDER,
    STAGES,
    RunData,
    StageRun,
    format_number,
    load_evaluations,
    load_run,
    read_summary_row,
    visible_text,
)
from align.eval.report.findings import Summary, summarize_run
from align.eval.report.plots import evaluation_plots, stage_plots
from align.eval.results import markdown_table, measurement_tables, notes

TEMPLATES = Path(__file__).parent / "templates"
MAX_SAMPLES = 300
"""Maximum number of prompts on a page. The ones with the largest changes of reward are shown."""

COST_UNITS = {
    "cost/device_hours": "device hours",
    "cost/kwh": "kWh",
    "cost/co2e_kg": "kg CO2e",
    "cost/price": "(device price)",
}


def write_report(run: Path, target: Path | None = None) -> Path:
    """Write the report of a run folder, or of a folder whose subfolders are the runs of the stages.

    The page lists missing and truncated data, and loads nothing from the network. A `summary.json` in the folder is shown
    as the results table. Return the path: `target`, or `report.html` in `run`.
    """
    path = target or Path(run) / "report.html"
    write_text(path, render_run_page(load_run(Path(run))))
    return path


def results_as_markdown(folders: Sequence[Path]) -> str:
    """Return the `align eval` results in several folders, or in their `eval` subfolders, as Markdown tables."""
    evaluations = []
    for folder in folders:
        results = load_evaluations(folder / EVALUATIONS_FOLDER, problems=[]) or load_evaluations(folder, problems=[])
        if not results:
            raise UserError(f"{folder}: no `align eval` results in this folder or its subfolder {EVALUATIONS_FOLDER}/")
        evaluations += results
    return markdown_table(evaluations)


def render_run_page(run: RunData) -> str:
    """Render the page as HTML. All text from the run is escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible_text(value) if type(value) is str else value,
    )
    environment.filters["number"] = format_number
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    summary = summarize_run(run)
    return environment.get_template("page.html").render(
        title=f"Run report: {run.folder.resolve().name}",
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        # Only this script may run, so model output cannot execute even if escaping failed.
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'",
        run=run,
        summary=summary,
        evaluations=measurement_tables(run.evaluations),
        evaluation_notes=notes(run.evaluations),
        evaluation_plots=evaluation_plots(run.evaluations),
        sections=[_section(stage, run, summary) for stage in run.stages.values()],
        pairs=summary.pairs[:MAX_SAMPLES],
        versions=_versions(run.stages.values()),
        commands=rerun_commands(run),
    )


def _section(stage: StageRun, run: RunData, summary: Summary) -> dict[str, Any]:
    settings = [
        (name, ", ".join(map(str, value)) if isinstance(value, list) else value) for name, value in stage.config.items()
    ]
    return {
        "stage": stage.stage,
        "title": STAGES[stage.stage][0],
        "summary": ", ".join(_key_numbers(stage)),
        "plots": stage_plots(stage, run, summary),
        "settings": [(name, "–" if value in (None, "") else str(value)) for name, value in settings],
    }


def _key_numbers(stage: StageRun) -> Iterator[str]:
    if "model" in stage.config:
        rank = stage.config.get("lora_r")
        yield f"starts from {stage.config['model']}"
        yield f"LoRA rank {rank}" if rank else "full fine-tuning"
    if stage.metrics:
        last = max(stage.metrics)
        yield f"{last} update{'' if last == 1 else 's'}"
        if seconds := total_seconds(stage):
            yield f"{seconds / 60:.1f} minutes"
        for name, unit in COST_UNITS.items():
            if amount := stage.metrics[last].get(name):
                yield f"{format_number(amount)} {unit}"
    if device := stage.environment.get("device"):
        yield f"on {device} ({stage.environment.get('processors', '?')} threads)"


def total_seconds(stage: StageRun) -> float:
    """Return the total time of a run including resumes. Earlier versions restarted the clock after each resume."""
    total = before = 0.0
    for seconds in stage.series("seconds").values():
        total += seconds - before if seconds >= before else seconds
        before = seconds
    return total


def rerun_commands(run: RunData) -> list[str]:
    """Return commands that repeat each stage with the same inputs, in a new folder next to the run."""
    new_folder = run.folder.with_name(run.folder.resolve().name + "-again")
    commands = []
    for name, stage in run.stages.items():
        if stage.config:
            words = ["align", name, "--config", str(stage.folder / "config.yaml"), "--output_dir", str(new_folder / name)]
            words += ["--resume_from_checkpoint", "false"] if stage.config.get("resume_from_checkpoint") else []
            commands.append(shlex.join(words))
    return commands


def _versions(stages: Iterable[StageRun]) -> list[tuple[str, str]]:
    """Return the names and versions of the environment. If stages differ, list their versions in order."""
    by_name: dict[str, dict[str, None]] = {}
    for stage in stages:
        packages = stage.environment.get("packages")
        flat = {name: value for name, value in stage.environment.items() if name != "packages"}
        for name, value in (flat | (packages if isinstance(packages, dict) else {})).items():
            by_name.setdefault(str(name), {})[str(value)] = None
    return [(name, ", then ".join(values)) for name, values in by_name.items()]


def summary_table(rows: Iterable[Mapping[str, Any]], width: int | None = None) -> str:
    """Format rows of summary.json (`name`, `before`, `after`, optional `interval` and `note`) for the terminal."""
    shown = [read_summary_row(row) for row in rows]
    titles = {"name": "metric", "interval": "95 % interval"}
    table = Table(show_lines=False, header_style="bold")
    columns = []
    for name in ("name", "before", "after", "change", "interval", "note"):
        cells = [Text(visible_text(getattr(row, name))) for row in shown]  # do not parse [brackets] as rich markup
        if any(cells):
            is_number = name in ("before", "after", "change")
            justify: Literal["right", "left"] = "right" if is_number else "left"
            table.add_column(titles.get(name, name), justify=justify, no_wrap=is_number, overflow="fold")
            columns.append(cells)
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=width or shutil.get_terminal_size((100, 24)).columns, color_system=None).print(table)
    return out.getvalue().rstrip("\n")
