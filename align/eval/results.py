"""What an evaluation found: figures with their intervals, tables, and the results of single items that outlive a crash."""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from align.errors import UserError
from align.eval.settings import EvalConfig
from align.files import write_json
from align.run import append_line, console, environment

Json = dict[str, Any]
CHUNK = 64
"""Items that are computed before their results are written."""


@dataclass(frozen=True)
class Figure:
    """One number.

    Attributes:
        value: None where there is nothing to take it from; `note` says why.
        low, high: the 95 % interval; None where none makes sense.
        n: how many items it is taken from.
        scorer: who judged, where somebody did: a name with its version or hash.
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    n: int
    scorer: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        for number in (self.value, self.low, self.high):
            if number is not None and not math.isfinite(number):
                raise UserError(f"'{self.name}' came out as {number}: a scorer gave no usable number")

    @property
    def text(self) -> str:
        """`0.312 (0.250 to 0.374)`."""
        if self.value is None:
            return "none"
        if self.low is None or self.high is None:
            return short(self.value)
        return f"{short(self.value)} ({short(self.low)} to {short(self.high)})"


def short(value: float) -> str:
    """Three decimals below 100, one above."""
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


@dataclass(frozen=True)
class Evaluation:
    """What one task says of one model.

    Attributes:
        settings: all that decides the figures: sampling, scorers with their hashes, data.
        tables: by title, rows as dicts with the same keys.
    """

    task: str
    model: str
    settings: Json
    figures: list[Figure]
    tables: dict[str, list[Json]] = field(default_factory=dict)


def save(output: str | Path, evaluations: Sequence[Evaluation]) -> list[Path]:
    """Write `OUTPUT/<task>.json` for each task among the evaluations, each whole or not at all; gives the files.

    A file holds `task`, `environment` (versions, machine) and `models`, each with `model`, `settings`, `figures`, `tables`.
    """
    written = []
    for task in dict.fromkeys(each.task for each in evaluations):
        models = [asdict(each) for each in evaluations if each.task == task]
        for model in models:
            del model["task"]
        path = Path(output) / f"{task}.json"
        write_json(path, {"task": task, "environment": environment(), "models": models})
        written.append(path)
    return written


def publish(config: EvalConfig, evaluations: Sequence[Evaluation], accelerator: Accelerator) -> list[Evaluation]:
    """What every task ends with: the main process writes the files and prints the table; gives the evaluations."""
    if accelerator.is_main_process:
        save(config.output, evaluations)
        if config.table:
            print_table(evaluations)
    accelerator.wait_for_everyone()
    return list(evaluations)


def read(path: Path) -> list[Evaluation]:
    """The evaluations of a file that `save` wrote.

    Raises:
        UserError: if it is missing or something else.
    """
    from align.files import read_json

    stored = read_json(path)
    try:
        return [
            Evaluation(
                stored["task"],
                model["model"],
                model["settings"],
                [Figure(**figure) for figure in model["figures"]],
                model["tables"],
            )
            for model in stored["models"]
        ]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: not the results of an evaluation ({error!r})") from error


def grid(evaluations: Sequence[Evaluation]) -> tuple[list[str], list[list[str]]]:
    """Side by side: the heads of the columns and the rows, one for each figure of each task.

    Columns: figure, each model, n, scorer. What differs between models stands as `a / b`.
    """
    models = list(dict.fromkeys(each.model for each in evaluations))
    found: dict[tuple[str, str], dict[str, Figure]] = {}
    for each in evaluations:
        for figure in each.figures:
            found.setdefault((each.task, figure.name), {})[each.model] = figure
    rows = []
    for (task, name), by_model in found.items():
        cells = [by_model[model].text if model in by_model else "" for model in models]
        counts = " / ".join(dict.fromkeys(str(figure.n) for figure in by_model.values()))
        scorers = " / ".join(dict.fromkeys(figure.scorer for figure in by_model.values() if figure.scorer))
        rows.append([f"{task}: {name}", *cells, counts, scorers])
    return ["figure", *models, "n", "scorer"], rows


def grids(evaluations: Sequence[Evaluation]) -> list[tuple[list[str], list[list[str]]]]:
    """A grid for each set of models: tasks that evaluate the same ones share it, and no column stays empty."""
    of_task: dict[str, set[str]] = {}
    for each in evaluations:
        of_task.setdefault(each.task, set()).add(each.model)
    kinds = dict.fromkeys(frozenset(models) for models in of_task.values())
    return [grid([each for each in evaluations if of_task[each.task] == models]) for models in kinds]


def print_table(evaluations: Sequence[Evaluation]) -> None:
    """Print the figures side by side, and under them what they are noted with."""
    out = Console(width=None if sys.stdout.isatty() else 160)
    for heads, rows in grids(evaluations):
        table = Table(*heads, caption="in brackets: 95 % bootstrap interval")
        for row in rows:
            table.add_row(*map(escape, row))
        out.print(table)
    for line in notes(evaluations):
        out.print(line, markup=False, highlight=False)


def notes(evaluations: Sequence[Evaluation]) -> list[str]:
    """What is noted at figures, each once."""
    found = (f"{each.task}: {figure.name}: {figure.note}" for each in evaluations for figure in each.figures if figure.note)
    return list(dict.fromkeys(found))


def markdown_table(evaluations: Sequence[Evaluation]) -> str:
    """The same as Markdown tables."""
    text = ""
    for heads, rows in grids(evaluations):
        lines = [heads, ["---"] * len(heads), *rows]
        text += "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines) + "\n"
    return (
        text
        + "".join(f"{line}\n\n" for line in ("In brackets: 95 % bootstrap interval.", *notes(evaluations))).rstrip("\n")
        + "\n"
    )


class Rows:
    """Results of single items in an append-only JSON Lines file: what was computed is never computed again.

    The first line holds the settings that decide an item's result. Each further line is `{"item": id, ...}`. A line that
    a kill has cut short is dropped.

    Args:
        path: `OUTPUT/<task>-<name>.jsonl`.
        settings: all that decides an item's result: `EvalConfig.deciding()`, the model's and the scorer's fingerprints.
        accelerator: all processes know the rows, the main one writes.

    Raises:
        UserError: if the file holds results of other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], accelerator: Accelerator) -> None:
        self.path, self.accelerator = path, accelerator
        self.settings = json.loads(json.dumps(dict(settings)))
        self.done: dict[str, Json] = {}
        begun = self._read()
        accelerator.wait_for_everyone()  # every process has looked before one of them writes
        if not begun and accelerator.is_main_process:
            self._append({"settings": self.settings})

    def _read(self) -> bool:
        if not self.path.exists():
            return False
        lines = self.path.read_bytes().splitlines(keepends=True)
        rows = []
        for number, line in enumerate(lines):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                if number + 1 < len(lines):
                    raise UserError(f"{self.path}:{number + 1}: broken ({error}); remove the file to start anew") from error
                if self.accelerator.is_main_process:  # a kill came in the middle of the last line
                    os.truncate(self.path, sum(map(len, lines[:-1])))
        if not rows:
            return False
        before = rows[0].get("settings", {})
        changed = [key for key in {**before, **self.settings} if before.get(key) != self.settings.get(key)]
        if changed:
            was, now = before.get(changed[0]), self.settings.get(changed[0])
            raise UserError(
                f"{self.path} holds results with {changed[0]} {was!r}, not {now!r}; give another output, or remove the file"
            )
        self.done = {row.pop("item"): row for row in rows[1:]}
        return True

    def fill(
        self, items: Mapping[str, Any], work: Callable[[list[Any]], Sequence[Json]], chunk: int = CHUNK, label: str = ""
    ) -> list[Json]:
        """The results of all items, in their order; `work` computes those that are not there, `chunk` by `chunk`.

        Args:
            items: by their ids.
            work: takes some of the items, on every process the same ones, and gives as many rows of JSON values.
        """
        missing = [name for name in items if name not in self.done]
        with Progress(console=console, transient=True, disable=not self.accelerator.is_main_process) as progress:
            task = progress.add_task(label or self.path.stem, total=len(items), completed=len(items) - len(missing))
            for start in range(0, len(missing), chunk):
                names = missing[start : start + chunk]
                for name, row in zip(names, work([items[name] for name in names]), strict=True):
                    self.add(name, row)
                progress.advance(task, len(names))
        return [self.done[name] for name in items]

    def add(self, name: str, row: Json) -> None:
        """Keep one result. Call it on all processes with the same row."""
        if self.accelerator.is_main_process:
            self._append({"item": name, **row})
        self.done[name] = json.loads(json.dumps(row))

    def _append(self, row: Json) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.path, json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        except ValueError as error:
            raise UserError(
                f"{self.path.stem}: a result is not a finite number; what was computed before is kept"
            ) from error
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror or error})") from error
