"""Puts a report together: one HTML file that needs nothing but itself."""

import base64
import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from align.eval.report.drawing import Plot
from align.eval.report.findings import digest
from align.eval.report.plots import reward_plots, sft_plots
from align.eval.report.ppo_plots import ppo_plots
from align.eval.report.runs import Runs, StageRun, visible
from align.eval.report.summary import Digest, line_of, number
from align.eval.results import Evaluation, grids, notes

HERE = Path(__file__).parent
MOST_SAMPLES = 300
"""Prompts on the page; of more, the largest gains and losses are shown."""
NAMES = {"sft": "Supervised fine-tuning", "reward": "Reward model", "ppo": "PPO"}


@dataclass
class Section:
    """A stage's part of the page.

    Attributes:
        facts: a line on the model, the number of updates and the time.
        settings: name and value of each setting.
    """

    stage: str
    title: str
    facts: str
    plots: list[Plot]
    settings: list[tuple[str, str]] = field(default_factory=list)


def render(runs: Runs) -> str:
    """The whole page as HTML text; everything that comes from a run is escaped."""
    found = digest(runs)
    return fill(
        "page.html",
        title=visible(f"Run report: {runs.folder.resolve().name}"),
        folder=visible(runs.folder),
        runs=runs,
        found=found,
        good=found.texts("good"),
        bad=found.texts("bad"),
        notes=found.texts("note"),
        grids=shown_grids(runs.evaluations),
        notes_of_figures=[visible(note) for note in notes(runs.evaluations)],
        measured=[line_of(row) for row in runs.summary],
        sections=[_section(run, runs, found) for run in runs.stages.values()],
        pairs=found.pairs[:MOST_SAMPLES],
        versions=versions(list(runs.stages.values())),
        commands=[visible(command) for command in commands(runs)],
    )


def fill(template: str, **values: Any) -> str:
    """A page from a template, with its styles and its script in it."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    script = (HERE / "page.js").read_text(encoding="utf-8")
    digest_of_script = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        # Only this very script may run: what a model wrote never can, even if escaping failed.
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest_of_script}'",
        **values,
    )


def shown_grids(evaluations: Sequence[Evaluation]) -> list[tuple[list[str], list[list[str]]]]:
    """Figures side by side as text that a page can show."""
    found = grids(evaluations) if evaluations else []
    return [(list(map(visible, heads)), [list(map(visible, row)) for row in rows]) for heads, rows in found]


def _section(run: StageRun, runs: Runs, found: Digest) -> Section:
    if run.stage == "sft":
        plots = sft_plots(run)
    elif run.stage == "reward":
        plots = reward_plots(run, runs.rankings)
    else:
        plots = ppo_plots(run, found.pairs, found.kept)
    settings = [(visible(name), visible(_setting(value))) for name, value in run.config.items()]
    return Section(run.stage, NAMES[run.stage], _facts(run), plots, settings)


def _facts(run: StageRun) -> str:
    rank = run.config.get("lora_rank")
    parts = []
    if "model" in run.config:
        parts.append(f"starts from {visible(run.config['model'])}")
        parts.append(f"LoRA of rank {rank}" if rank else "all weights trained")
    if run.metrics:
        last = max(run.metrics)
        parts.append(f"{last} update{'' if last == 1 else 's'}")
        seconds = run.metrics[last].get("seconds")
        parts += [f"{seconds / 60:.1f} minutes"] if seconds else []
    device = run.environment.get("device")
    parts += [f"on {visible(device)} ({visible(run.environment.get('processors', '?'))} threads)"] if device else []
    return ", ".join(parts)


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "–"
    return "–" if value is None or value == "" else str(value)


def versions(stages: Sequence[StageRun]) -> list[tuple[str, list[str]]]:
    """Name and version of everything a run was made with, a version a stage; one where all stages agree."""
    names: dict[str, list[str]] = {}
    for run in stages:
        for name, value in _flat(run.environment).items():
            names.setdefault(visible(name), [])
            if visible(value) not in names[visible(name)]:
                names[visible(name)].append(visible(value))
    return list(names.items())


def _flat(environment: dict[str, Any]) -> dict[str, Any]:
    packages = environment.get("packages")
    rest = {name: value for name, value in environment.items() if name != "packages"}
    return rest | (packages if isinstance(packages, dict) else {})


def commands(runs: Runs) -> list[str]:
    """Commands that make the run again in a folder beside it; each stage starts from the new one's models."""
    again = runs.folder.with_name(runs.folder.resolve().name + "-again")
    moved = {str(run.config.get("output_dir", run.folder)): str(again / stage) for stage, run in runs.stages.items()}
    lines = []
    for stage, run in runs.stages.items():
        words = ["align", stage, "--config", str(run.folder / "config.yaml"), "--output_dir", str(again / stage)]
        for name in ("model", "reward_model"):
            value = str(run.config.get(name) or "")
            for old, new in moved.items():
                if value.startswith(old.rstrip("/") + "/"):
                    words += [f"--{name}", new + value[len(old.rstrip("/")) :]]
        words += ["--resume", "false"] if run.config.get("resume") else []
        if run.config:
            lines.append(shlex.join(words))
    return [*lines, shlex.join(["align", "report", str(again)])] if lines else []
