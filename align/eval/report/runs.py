"""Reads a folder of runs into typed records. A run that was killed, or is half there, is read as far as it goes."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from align.errors import UserError
from align.eval.results import Evaluation, read
from align.reward.metrics import Scored

STAGES = ("sft", "reward", "ppo")
OWN_SETTING = {"prompt_loss_weight": "sft", "centring_weight": "reward", "rollout_size": "ppo"}
"""A setting that only one stage has: tells which stage a run folder of another name belongs to."""

EVALUATIONS = "eval"
"""The folder in which a run keeps what `align eval` says of it."""

Row = TypeVar("Row")


@dataclass(frozen=True)
class Series:
    """One metric over updates; only finite values, updates ascending.

    Attributes:
        updates: [N] numbers of updates.
        values: [N].
    """

    updates: tuple[int, ...]
    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.updates)

    def at(self, update: int) -> float | None:
        """The value at an update, or None."""
        return self.values[self.updates.index(update)] if update in self.updates else None


@dataclass
class StageRun:
    """One stage's run folder; what could not be read is empty.

    Attributes:
        stage: `sft`, `reward` or `ppo`.
        config: resolved settings.
        environment: versions and machine, see `align.run.environment`.
        metrics: update to its figures.
    """

    stage: str
    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)

    def series(self, name: str) -> Series:
        """A metric over updates; empty if it was never written."""
        found = [
            (update, row[name]) for update, row in sorted(self.metrics.items()) if math.isfinite(row.get(name, math.nan))
        ]
        return Series(tuple(update for update, _ in found), tuple(value for _, value in found))


@dataclass(frozen=True)
class Sample:
    """A response to a fixed prompt at one evaluation.

    Attributes:
        prompt: (role, content) of each turn.
        ended: whether the response ended by itself.
        category: what the prompt is about, if the row says so.
    """

    prompt: tuple[tuple[str, str], ...]
    response: str
    reward: float
    ended: bool
    category: str | None = None


@dataclass(frozen=True)
class SummaryRow:
    """A line of the table of results: a number before and after, as text or as a number."""

    name: str
    before: float | str
    after: float | str
    interval: str = ""
    note: str = ""


@dataclass
class Runs:
    """All that a report is made from.

    Attributes:
        stages: by name; a missing stage has no entry.
        rankings: the reward model's held-out rankings with its rewards.
        samples: update to the responses of that evaluation.
        summary: the rows of summary.json.
        evaluations: what `align eval` wrote into the folder's `eval`.
        problems: what is missing or unreadable, one sentence each.
    """

    folder: Path
    stages: dict[str, StageRun] = field(default_factory=dict)
    rankings: list[Scored] = field(default_factory=list)
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    summary: list[SummaryRow] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def load_runs(folder: Path) -> Runs:
    """Read `folder` with its subfolders sft, reward and ppo; one stage's run folder alone is taken too.

    Raises:
        UserError: if the folder does not exist or holds no run.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder that holds sft, reward or ppo")
    runs = Runs(folder)
    places = _stage_folders(folder)
    if not places:
        raise UserError(f"{folder}: no run in it; looked for config.yaml or metrics.jsonl in sft, reward and ppo")
    for stage in STAGES:
        if stage in places:
            runs.stages[stage] = _load_stage(stage, places[stage], runs.problems)
        else:
            runs.problems.append(f"{stage}: no run of this stage; its part is left out.")
    if "reward" in places:
        path = places["reward"] / "validation.json"
        runs.rankings = _records(path, _json_rows(path, runs.problems), _ranking, runs.problems)
    if "ppo" in places:
        path = places["ppo"] / "samples.jsonl"
        for update, sample in _records(path, _lines(path, runs.problems), _sample, runs.problems):
            runs.samples.setdefault(update, []).append(sample)
    path = folder / "summary.json"
    if path.exists():
        runs.summary = _records(path, _json_rows(path, runs.problems), read_summary_row, runs.problems)
    runs.evaluations = load_evaluations(folder / EVALUATIONS, runs.problems)
    return runs


def load_evaluations(folder: Path, problems: list[str]) -> list[Evaluation]:
    """The evaluations in the files `folder/*.json`; what cannot be read is a sentence in `problems`."""
    found: list[Evaluation] = []
    for path in sorted(folder.glob("*.json")):
        try:
            found += read(path)
        except UserError as error:
            problems.append(f"{error}.")
    return found


def _stage_folders(folder: Path) -> dict[str, Path]:
    def holds_run(place: Path) -> bool:
        return (place / "config.yaml").is_file() or (place / "metrics.jsonl").is_file()

    places = {stage: folder / stage for stage in STAGES if holds_run(folder / stage)}
    if not places and holds_run(folder):
        config = _mapping(folder / "config.yaml", [])
        places = {stage: folder for setting, stage in OWN_SETTING.items() if setting in config}
    return places


def _load_stage(stage: str, folder: Path, problems: list[str]) -> StageRun:
    run = StageRun(
        stage, folder, _mapping(folder / "config.yaml", problems), _mapping(folder / "environment.json", problems)
    )
    path = folder / "metrics.jsonl"
    for update, figures in _records(path, _lines(path, problems), _figures, problems):
        run.metrics[update] = figures  # a line that was written again after a resume replaces the older one
    if not run.metrics:
        problems.append(f"{path}: no figures yet.")
    return run


def _mapping(path: Path, problems: list[str]) -> dict[str, Any]:
    """A YAML or JSON mapping (JSON is YAML); empty if it is not there."""
    text = _text(path, problems)
    if text is None:
        return {}
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict):
        problems.append(f"{path}: cannot be read; what it says is left out.")
        return {}
    return {str(key): item for key, item in value.items()}


def _text(path: Path, problems: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        problems.append(f"{path}: {error.strerror or error}.")
        return None


def _lines(path: Path, problems: list[str]) -> Iterator[Any]:
    """Each JSON line's value, None for one that is broken (the last one of a killed run, most often)."""
    for line in (_text(path, problems) or "").split("\n"):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError:
                yield None


def _json_rows(path: Path, problems: list[str]) -> list[Any]:
    text = _text(path, problems)
    if text is None:
        return []
    try:
        rows = json.loads(text)
    except ValueError:
        rows = None
    if not isinstance(rows, list):
        problems.append(f"{path}: cannot be read; what it says is left out.")
        return []
    return rows


def _records(
    path: Path, rows: "Iterator[Any] | list[Any]", read: Callable[[Mapping[str, Any]], Row], problems: list[str]
) -> list[Row]:
    """Rows as records; those that are not what they should be are counted and left out."""
    found, bad = [], []
    for number, row in enumerate(rows, start=1):
        try:
            if not isinstance(row, dict):
                raise TypeError("not a mapping")
            found.append(read(row))
        except (KeyError, TypeError, ValueError, AttributeError):
            bad.append(number)
    if bad:
        what = f"row {bad[0]} is" if len(bad) == 1 else f"{len(bad)} rows (the first is number {bad[0]}) are"
        problems.append(f"{path}: {what} cut off or broken and left out.")
    return found


def _figures(row: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    numbers = {str(key): float(value) for key, value in row.items() if isinstance(value, int | float)}
    return int(row["update"]), numbers


def _ranking(row: Mapping[str, Any]) -> Scored:
    ranks, rewards = tuple(map(int, row["ranks"])), tuple(map(float, row["rewards"]))
    lengths = tuple(map(int, row.get("lengths") or [0] * len(ranks)))
    if not len(ranks) == len(rewards) == len(lengths) or not all(map(math.isfinite, rewards)):
        raise ValueError("ranks, rewards and lengths do not match")
    return Scored(ranks, rewards, lengths, visible(row["category"]) if row.get("category") else None)


def _sample(row: Mapping[str, Any]) -> tuple[int, Sample]:
    turns = row["prompt"]
    turns = [{"role": "user", "content": turns}] if isinstance(turns, str) else turns
    prompt = tuple((visible(turn["role"]), visible(turn["content"])) for turn in turns)
    reward = float(row["reward"])
    if not math.isfinite(reward):
        raise ValueError("the reward is not a finite number")
    category = visible(row["category"]) if row.get("category") else None
    return int(row["update"]), Sample(prompt, visible(row["response"]), reward, bool(row["ended"]), category)


def read_summary_row(row: Mapping[str, Any]) -> SummaryRow:
    """A row of summary.json.

    Raises:
        KeyError: without `name`, `before` or `after`.
    """

    def figure(value: Any) -> float | str:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if number else visible("" if value is None else value)

    texts = [visible(row.get(name) or "") for name in ("interval", "note")]
    return SummaryRow(visible(row["name"]), figure(row["before"]), figure(row["after"]), *texts)


def visible(value: Any) -> str:
    """Text that a page can show: control characters as their symbols, writing-direction overrides and halves of
    surrogate pairs (which UTF-8 cannot hold) as the replacement character."""
    text = str(value)
    table = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
    table |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)], 0xFFFD)
    return text.replace("\r\n", "\n").translate(table)
