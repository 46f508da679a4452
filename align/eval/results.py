"""Settings and results of evaluations: measurements with intervals, result files, and tables."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from accelerate import Accelerator
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from align.core.errors import UserError, without_secrets
from align.core.files import read_json, write_json
from align.core.settings import Settings, option, require_setting
from align.core.statistics import mean_interval, share_interval
from align.data.fields import check_id, field_error
from align.eval.store import Json
from align.runtime.distributed import run_on_main
from align.training.run_folder import environment

Item = TypeVar("Item")


@dataclass(kw_only=True)
class EvalConfig(Settings):
    """Models to evaluate and where to write the results."""

    models: list[str] = option(
        [], "Models to evaluate side by side: local folders, LoRA adapters, run folders, Hub ids or built-in models."
    )
    output: str = option("runs/eval", "Output folder. Existing results in it are reused.", required=True)
    table: bool = option(True, "Print the results as a table, in addition to writing them.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "models", len(set(self.models)) == len(self.models), "a list without duplicates")

    def result_settings(self, *leave_out: str) -> dict[str, Any]:
        """Return the settings that affect a single result, without `leave_out`. Stored results are valid for these."""
        no_effect = {"models", "output", "batch_tokens", "skip_bad_rows", "table", *leave_out}
        return {name: value for name, value in asdict(self).items() if name not in no_effect}


@dataclass(kw_only=True)
class EvalPromptsConfig(Settings):
    """Prompts of tasks that sample responses."""

    prompts: str = option("data/prompts_heldout.jsonl", "Prompts to answer: file, folder or Hub id.")
    limit: int = option(0, "Maximum number of prompts, evenly spaced over the file. 0 for all.", ge=0)


def subsample(items: Sequence[Item], limit: int) -> list[Item]:
    """Return `limit` evenly spaced items, starting with the first. 0 returns all."""
    if not limit or limit >= len(items):
        return list(items)
    return [items[number * len(items) // limit] for number in range(limit)]


def new_id(fields: Mapping[str, Any], number: str, seen: set[str]) -> str:
    """Return a row's id, or else its number, and add it to `seen`.

    Raises:
        UserError: if an earlier row has the same id.
    """
    name = check_id(fields.get("id")) or number
    if name in seen:
        raise field_error("id", f"is {name!r} in two rows", "use unique ids")
    seen.add(name)
    return name


Better = Literal["higher", "lower", ""]
"""Whether higher or lower values are better. Empty if neither."""


@dataclass(frozen=True)
class Measurement:
    """A value with its 95 % interval.

    Attributes:
        value: the value, or None if it cannot be computed; `note` gives the reason.
        low, high: ends of the interval, or None if there is none.
        n: number of items it is computed from.
        scorer: the scorer or judge, with its version or hash; empty if there is none.
        better: direction of improvement, used by the report to rate changes.
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    n: int
    scorer: str = ""
    note: str = ""
    better: Better = ""

    def __post_init__(self) -> None:
        for number in (self.value, self.low, self.high):
            if number is not None and not math.isfinite(number):
                raise UserError(f"'{self.name}' is {number}: the scorer returned NaN or infinity; check the scorer")

    @property
    def text(self) -> str:
        """Format the value with its interval, such as `0.312 (0.250 to 0.374)`."""
        if self.value is None:
            return "none"
        if self.low is None or self.high is None:
            return format_value(self.value)
        return f"{format_value(self.value)} ({format_value(self.low)} to {format_value(self.high)})"


def mean_measurement(
    name: str,
    values: Sequence[float],
    scorer: str = "",
    note: str = "",
    nothing: str = "nothing to average",
    groups: Sequence[int] | None = None,
    better: Better = "",
    is_share: bool = False,
) -> Measurement:
    """Return the mean over items with its bootstrap interval, or without one for equal values or a single group.

    Args:
        nothing: note if there are no values.
        groups: group of each value, such as its prompt.
        is_share: whether values are from 0 to 1, for which `share_interval` gives an interval even if all are equal.
    """
    if not len(values):
        return Measurement(name, None, None, None, 0, scorer, nothing)
    numbers, low, high = [float(value) for value in values], None, None
    if is_share:
        low, high = share_interval(numbers, groups)
    elif len(set(numbers)) > 1 and (groups is None or len(set(groups)) > 1):
        low, high = mean_interval(numbers, groups=groups)
    return Measurement(name, sum(numbers) / len(numbers), low, high, len(numbers), scorer, note, better)


share_measurement = partial(mean_measurement, is_share=True)
"""Proportion with its interval. Arguments as in `mean_measurement`."""


def format_value(value: float) -> str:
    """Format with three decimals below 100, one above."""
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


@dataclass(frozen=True)
class Evaluation:
    """Results of one task for one model, with all settings that affect them. Rows of a table share the same keys."""

    task: str
    model: str
    settings: Json
    measurements: list[Measurement]
    tables: dict[str, list[Json]] = field(default_factory=dict)


def save_evaluations(output: str | Path, evaluations: Sequence[Evaluation]) -> None:
    """Write `OUTPUT/<task>.json` for each task: `task`, `environment` (versions, machine), and `models` (evaluations)."""
    for task in dict.fromkeys(evaluation.task for evaluation in evaluations):
        models = [asdict(evaluation) for evaluation in evaluations if evaluation.task == task]
        for model in models:
            del model["task"]
            model["settings"] = json.loads(without_secrets(json.dumps(model["settings"])))
        write_json(Path(output) / f"{task}.json", {"task": task, "environment": environment(), "models": models})


def publish(config: EvalConfig, evaluations: Sequence[Evaluation], accelerator: Accelerator) -> list[Evaluation]:
    """Write the result files and print the table on the main process. Return the evaluations."""

    def write() -> None:
        save_evaluations(config.output, evaluations)
        if config.table:
            print_table(evaluations)

    run_on_main(write, accelerator)
    return list(evaluations)


def read_evaluations(path: Path) -> list[Evaluation]:
    """Read evaluations written by `save_evaluations`. Raise a `UserError` for any other file."""
    stored = read_json(path)
    try:
        return [
            Evaluation(
                stored["task"],
                **model | {"measurements": [Measurement(**measurement) for measurement in model["measurements"]]},
            )
            for model in stored["models"]
        ]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: not an evaluation result file ({error!r})") from error


def measurement_tables(evaluations: Sequence[Evaluation]) -> list[tuple[list[str], list[list[str]]]]:
    """Build tables with models side by side: headers and rows per set of models. Tasks on the same models share a table.

    If models differ in n or scorer, all are shown: `a / b`.
    """
    models_of_task: dict[str, list[str]] = {}
    by_measurement: dict[tuple[str, str], dict[str, Measurement]] = {}
    for evaluation in evaluations:
        models_of_task.setdefault(evaluation.task, []).append(evaluation.model)
        for measurement in evaluation.measurements:
            by_measurement.setdefault((evaluation.task, measurement.name), {})[evaluation.model] = measurement
    tables: dict[frozenset[str], tuple[list[str], list[list[str]]]] = {}
    for models in models_of_task.values():
        tables.setdefault(frozenset(models), (["measurement", *dict.fromkeys(models), "n", "scorer"], []))
    for (task, name), by_model in by_measurement.items():
        heads, rows = tables[frozenset(models_of_task[task])]
        cells = [by_model[model].text if model in by_model else "" for model in heads[1:-2]]
        counts = " / ".join(dict.fromkeys(str(measurement.n) for measurement in by_model.values()))
        scorers = " / ".join(dict.fromkeys(measurement.scorer for measurement in by_model.values() if measurement.scorer))
        rows.append([f"{task}: {name}", *cells, counts, scorers])
    return list(tables.values())


def print_table(evaluations: Sequence[Evaluation]) -> None:
    """Print the measurements of all models side by side, with notes."""
    out = Console(width=None if sys.stdout.isatty() else 160)
    for heads, rows in measurement_tables(evaluations):
        table = Table(*heads, caption="95 % intervals in parentheses")
        for row in rows:
            table.add_row(*map(escape, row))
        out.print(table)
    for line in notes(evaluations):
        out.print(line, markup=False, highlight=False)


def notes(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the distinct notes of all measurements."""
    measured = [(evaluation.task, measurement) for evaluation in evaluations for measurement in evaluation.measurements]
    return list(dict.fromkeys(f"{task}: {each.name}: {each.note}" for task, each in measured if each.note))


def markdown_table(evaluations: Sequence[Evaluation]) -> str:
    """Format the measurements side by side as Markdown tables, with notes."""
    tables = ""
    for heads, rows in measurement_tables(evaluations):
        lines = [heads, ["---"] * len(heads), *rows]
        tables += "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines) + "\n"
    return tables + "\n\n".join(["95 % intervals in parentheses.", *notes(evaluations)]) + "\n"
