"""The results of an evaluation: figures with intervals, tables, and single items that an interrupted run keeps."""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from align.core.errors import UserError, without_secrets
from align.core.files import append_line, read_json, resolve_path, write_json
from align.core.statistics import mean_interval, share_interval
from align.data.sources import ENDINGS
from align.eval.core.settings import EvalConfig
from align.runtime.distributed import run_on_main
from align.runtime.environment import console, environment

Json = dict[str, Any]
Better = Literal["higher", "lower", ""]
"""Which direction of a measure is better; empty where neither is."""


@dataclass(frozen=True)
class Figure:
    """One number with its confidence interval.

    Attributes:
        value: None if there is nothing to compute it from; `note` gives the reason.
        low, high: ends of the 95 % interval; None if there is none.
        n: number of items it is computed from.
        scorer: the scorer or judge, with its version or hash; empty if there is none.
        better: the better direction, by which the report rates changes; empty where neither is.
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
                raise UserError(
                    f"'{self.name}' is {number}: a scorer returned a number that is not finite; check the scorer"
                )

    @property
    def text(self) -> str:
        """The value with its interval, such as `0.312 (0.250 to 0.374)`."""
        if self.value is None:
            return "none"
        if self.low is None or self.high is None:
            return format_figure(self.value)
        return f"{format_figure(self.value)} ({format_figure(self.low)} to {format_figure(self.high)})"


def mean_figure(
    name: str,
    values: Sequence[float],
    resamples: int,
    scorer: str = "",
    note: str = "",
    nothing: str = "nothing to average",
    groups: Sequence[int] | None = None,
    better: Better = "",
) -> Figure:
    """The mean of a measurement with its bootstrap interval. For shares, see `share_figure`.

    Args:
        values: one for each item. Equal values, and those of a single group, have no interval.
        nothing: the note if there are no values.
        groups: the group of each value, such as its prompt.
    """
    if not len(values):
        return Figure(name, None, None, None, 0, scorer, nothing)
    numbers = [float(value) for value in values]
    varies = len(set(numbers)) > 1 and (groups is None or len(set(groups)) > 1)
    low, high = mean_interval(numbers, resamples, groups) if varies else (None, None)
    return Figure(name, sum(numbers) / len(numbers), low, high, len(numbers), scorer, note, better)


def share_figure(
    name: str,
    values: Sequence[float],
    scorer: str = "",
    note: str = "",
    nothing: str = "nothing to average",
    groups: Sequence[int] | None = None,
    better: Better = "",
) -> Figure:
    """A share with its interval (`align.core.statistics.share_interval`), which has a width also where all values are equal.

    The arguments are those of `mean_figure`; values are from 0 to 1.
    """
    if not len(values):
        return Figure(name, None, None, None, 0, scorer, nothing)
    numbers = [float(value) for value in values]
    interval = share_interval(numbers, groups)
    return Figure(name, sum(numbers) / len(numbers), *interval, len(numbers), scorer, note, better)


def format_figure(value: float) -> str:
    """Three decimals below 100, one above."""
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


@dataclass(frozen=True)
class Evaluation:
    """The results of one task for one model.

    Attributes:
        settings: everything that affects the figures: sampling, scorers with their hashes, data.
        tables: by title, rows as dicts with the same keys.
    """

    task: str
    model: str
    settings: Json
    figures: list[Figure]
    tables: dict[str, list[Json]] = field(default_factory=dict)


def save_evaluations(output: str | Path, evaluations: Sequence[Evaluation]) -> list[Path]:
    """Write `OUTPUT/<task>.json` for each task among the evaluations, each completely or not at all; returns the files.

    A file holds `task`, `environment` (versions, machine) and `models`, each with `model`, `settings`, `figures`, `tables`.
    """
    written = []
    for task in dict.fromkeys(evaluation.task for evaluation in evaluations):
        models = [asdict(evaluation) for evaluation in evaluations if evaluation.task == task]
        for model in models:
            del model["task"]
            model["settings"] = json.loads(without_secrets(json.dumps(model["settings"])))
        path = Path(output) / f"{task}.json"
        write_json(path, {"task": task, "environment": environment(), "models": models})
        written.append(path)
    return written


def publish(config: EvalConfig, evaluations: Sequence[Evaluation], accelerator: Accelerator) -> list[Evaluation]:
    """Write the files and print the table, on the main process; every task ends with this. Returns the evaluations."""

    def write() -> None:
        save_evaluations(config.output, evaluations)
        if config.table:
            print_table(evaluations, config.data_lines())

    run_on_main(write, accelerator)
    return list(evaluations)


def read_evaluations(path: Path) -> list[Evaluation]:
    """The evaluations of a file that `save_evaluations` wrote.

    Raises:
        UserError: if it is missing or not such a file.
    """
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


def figure_table(evaluations: Sequence[Evaluation]) -> tuple[list[str], list[list[str]]]:
    """Models side by side: the column heads, and a row for each figure of each task.

    Columns: figure, each model, n, scorer. If models differ in n or scorer, all are shown: `a / b`.
    """
    models = list(dict.fromkeys(evaluation.model for evaluation in evaluations))
    by_figure: dict[tuple[str, str], dict[str, Figure]] = {}
    for evaluation in evaluations:
        for figure in evaluation.figures:
            by_figure.setdefault((evaluation.task, figure.name), {})[evaluation.model] = figure
    rows = []
    for (task, name), by_model in by_figure.items():
        cells = [by_model[model].text if model in by_model else "" for model in models]
        counts = " / ".join(dict.fromkeys(str(figure.n) for figure in by_model.values()))
        scorers = " / ".join(dict.fromkeys(figure.scorer for figure in by_model.values() if figure.scorer))
        rows.append([f"{task}: {name}", *cells, counts, scorers])
    return ["figure", *models, "n", "scorer"], rows


def figure_tables(evaluations: Sequence[Evaluation]) -> list[tuple[list[str], list[list[str]]]]:
    """A table for each set of models: tasks that evaluate the same models share one."""
    models_of_task: dict[str, set[str]] = {}
    for evaluation in evaluations:
        models_of_task.setdefault(evaluation.task, set()).add(evaluation.model)
    model_sets = dict.fromkeys(frozenset(models) for models in models_of_task.values())
    return [
        figure_table([evaluation for evaluation in evaluations if models_of_task[evaluation.task] == models])
        for models in model_sets
    ]


def print_table(evaluations: Sequence[Evaluation], data: Sequence[str] = ()) -> None:
    """Print lines on the data, the figures side by side, and their notes."""
    out = Console(width=None if sys.stdout.isatty() else 160)
    for line in data:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    for heads, rows in figure_tables(evaluations):
        table = Table(*heads, caption="in brackets: 95 % interval")
        for row in rows:
            table.add_row(*map(escape, row))
        out.print(table)
    for line in notes(evaluations):
        out.print(line, markup=False, highlight=False)


def notes(evaluations: Sequence[Evaluation]) -> list[str]:
    """The notes of all figures, each once."""
    return list(
        dict.fromkeys(
            f"{evaluation.task}: {figure.name}: {figure.note}"
            for evaluation in evaluations
            for figure in evaluation.figures
            if figure.note
        )
    )


def markdown_table(evaluations: Sequence[Evaluation], data: Sequence[str] = ()) -> str:
    """Lines on the data, the figures side by side as Markdown tables, and their notes."""
    tables = "".join(f"{line}\n\n" for line in data)
    for heads, rows in figure_tables(evaluations):
        lines = [heads, ["---"] * len(heads), *rows]
        tables += "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines) + "\n"
    return tables + "\n\n".join(["In brackets: 95 % interval.", *notes(evaluations)]) + "\n"


CHUNK = 64
"""Items computed between two writes to the file."""


class ResultStore:
    """Per-item results in an append-only JSON Lines file: nothing is computed twice.

    The first line holds the settings that decide an item's result. Each further line is `{"item": id, ...}`, with
    a hash in `"content"` if the caller gives the item's content; of two lines with the same id the later one counts. A
    last line that was cut short when the program was killed is dropped.

    `settings` are all that affects an item's result. Every process holds the results; the main process writes them.

    Raises:
        UserError: if the file holds results of other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], accelerator: Accelerator) -> None:
        self.path, self.accelerator = path, accelerator
        self.settings = json.loads(json.dumps(dict(settings)))
        # What is missing must be the same on every process, so one of them looks at the disk.
        self.results: dict[str, Json] = run_on_main(self._open, accelerator)

    def _open(self) -> dict[str, Json]:
        results = self._read()
        if results is None:
            self._append({"settings": self.settings})
        return results or {}

    def _read(self) -> dict[str, Json] | None:
        """The file's results; None if it holds no line."""
        if not self.path.exists():
            return None
        lines = self.path.read_bytes().splitlines(keepends=True)
        rows = []
        for number, line in enumerate(lines):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                if number + 1 < len(lines):
                    raise UserError(
                        f"{self.path}:{number + 1}: not JSON ({error}); delete the file to start from scratch"
                    ) from error
                os.truncate(self.path, sum(map(len, lines[:-1])))  # the program was killed in the middle of the last line
        if not rows:
            return None
        stored = rows[0].get("settings", {})
        changed = [key for key in {**stored, **self.settings} if stored.get(key) != self.settings.get(key)]
        if changed:
            difference = f"{changed[0]} {stored.get(changed[0])!r}, not {self.settings.get(changed[0])!r}"
            raise UserError(f"{self.path} holds results with {difference}; choose another output folder, or delete the file")
        return {row.pop("item"): row for row in rows[1:]}

    def fill(
        self,
        items: Mapping[str, Any],
        compute: Callable[[list[Any]], Sequence[Json]],
        chunk: int = CHUNK,
        label: str = "",
        content: Callable[[Any], object] | None = None,
    ) -> list[Json]:
        """Compute the missing results, `chunk` items at a time, and return all of them in the order of the items.

        Args:
            compute: from a chunk of items, the same on every process, to one row of JSON values for each.
            content: what an item's result depends on, as JSON values; a result stored under the same id for different
                content is recomputed. None: the id identifies the content.

        Raises:
            UserError: if the file cannot be written, or a result is not finite.
        """
        hashes = {name: content_hash(content(item)) for name, item in items.items()} if content else {}
        missing = [
            name
            for name in items
            if name not in self.results or (content and self.results[name].get("content") != hashes[name])
        ]
        with Progress(console=console, transient=True, disable=not self.accelerator.is_main_process) as progress:
            task = progress.add_task(label or self.path.stem, total=len(items), completed=len(items) - len(missing))
            for start in range(0, len(missing), chunk):
                names = missing[start : start + chunk]
                for name, row in zip(names, compute([items[name] for name in names]), strict=True):
                    self.add(name, {"content": hashes[name], **row} if content else row)
                progress.advance(task, len(names))
        return [self.results[name] for name in items]

    def add(self, name: str, row: Json) -> None:
        """Store one result. Call it on all processes with the same row."""
        if self.accelerator.is_main_process:
            self._append({"item": name, **row})
        self.results[name] = json.loads(json.dumps(row))

    def _append(self, row: Json) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.path, json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        except ValueError as error:
            raise UserError(
                f"{self.path.stem}: a result is not a finite number; results completed so far are saved"
            ) from error
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror or error})") from error


WEIGHTS = (".safetensors", ".bin", ".model")
MODEL_MARKERS = ("config.json", "adapter_config.json")
MODEL_FILES = (*WEIGHTS, ".json", ".jinja")
DATA_FILES = (*ENDINGS, ".arrow", *WEIGHTS)
WEIGHT_BYTES = 1 << 20
"""Bytes that a fingerprint reads at the beginning and at the end of a weights file."""


def fingerprint(source: str) -> str:
    """12 hexadecimal digits of a SHA-256 over a model's folder, a file of data or a folder of data files.

    Data files are hashed completely; of weights, only the size and both ends: training changes all of them, and reading a
    large model would take minutes. In a model's folder only the files directly in it count; in a folder of data, every
    data file at any depth, as `align.data.sources` reads it.

    It is '' if `source` is empty or not on this machine (a hub name).
    """
    path, digest = resolve_path(source), hashlib.sha256()
    if not source or not path.exists():
        return ""
    for file in _hashed_files(path) if path.is_dir() else [path]:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path).as_posix()} {size} ".encode() if path.is_dir() else b"")
        with open(file, "rb") as stream:
            if file.suffix not in WEIGHTS:
                digest.update(stream.read())
                continue
            digest.update(stream.read(WEIGHT_BYTES))
            stream.seek(max(0, size - WEIGHT_BYTES))
            digest.update(stream.read(WEIGHT_BYTES))
    return digest.hexdigest()[:12]


def _hashed_files(folder: Path) -> list[Path]:
    is_model = any((folder / marker).is_file() for marker in MODEL_MARKERS)
    candidates = folder.iterdir() if is_model else folder.rglob("*")
    endings = MODEL_FILES if is_model else DATA_FILES
    return sorted(
        path
        for path in candidates
        if path.is_file()
        and path.name.lower().endswith(endings)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def text_hash(text: str) -> str:
    """SHA-256 of a text, which may hold unpaired surrogates: models do write them."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def content_hash(content: object) -> str:
    """16 hexadecimal digits of a SHA-256 over JSON values."""
    return text_hash(json.dumps(content))[:16]
