"""Load the files of a run for a report. Incomplete runs are loaded as far as possible."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from align.core.errors import UserError
from align.eval.results import Evaluation, read_evaluations
from align.models.checkpoint import update_in_card
from align.reward.rankings import ScoredRanking

STAGES = {
    "sft": ("Supervised fine-tuning", "prompt_loss_weight"),
    "reward": ("Reward model", "centering_weight"),
    "dpo": ("DPO", "label_smoothing"),
    "ppo": ("PPO", "rollout_batch_size"),
}
"""Title of each stage, and a setting unique to it, which identifies run folders that are not named after their stage."""
EVALUATIONS_FOLDER = "eval"
"""Subfolder of a run with the results of `align eval`."""
Parsed = TypeVar("Parsed")


@dataclass
class StageRun:
    """Run folder of one stage. Fields that could not be read are empty.

    Attributes:
        metrics: metrics by update.
        saved_update: update of the saved model according to its card; 0 if unknown.
    """

    stage: str
    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    saved_update: int = 0

    def series(self, name: str) -> dict[int, float]:
        """Return the finite values of a metric by update, in ascending order. Empty if it was never logged."""
        rows = sorted(self.metrics.items())
        return {update: row[name] for update, row in rows if math.isfinite(row.get(name, math.nan))}


@dataclass(frozen=True)
class Sample:
    """A response to a validation prompt at one evaluation. The prompt is a tuple of (role, content)."""

    prompt: tuple[tuple[str, str], ...]
    response: str
    reward: float
    ended: bool
    category: str | None = None


@dataclass(frozen=True)
class TableRow:
    """A table row with values before and after, as text. `rating` is good, bad or empty."""

    name: str
    before: str
    after: str
    change: str = ""
    interval: str = ""
    note: str = ""
    rating: str = ""


@dataclass
class RunData:
    """Data of a report.

    Attributes:
        rankings: held-out rankings by stage, with the reward model's rewards or DPO's implicit rewards.
        samples: responses of each evaluation, by update.
        problems: missing or unreadable files, one sentence each.
    """

    folder: Path
    stages: dict[str, StageRun] = field(default_factory=dict)
    rankings: dict[str, list[ScoredRanking]] = field(default_factory=dict)
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    summary: list[TableRow] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


REPORTABLE = "pass a run folder, or a folder whose subfolders are the runs of the stages"


def load_run(folder: Path) -> RunData:
    """Load the runs in the subfolders of `folder`, or the run of a single stage.

    If a stage has several runs, the latest policy and the models named in its config are shown.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; {REPORTABLE}")
    run = RunData(folder)
    folders, others = stage_folders(folder)
    if not folders:
        raise UserError(f"{folder}: not a run folder (no config.yaml or metrics.jsonl); {REPORTABLE}")
    for stage in STAGES:
        if stage in folders:
            run.stages[stage] = _load_stage(stage, folders[stage], run.problems)
        elif stage != "dpo":  # optional
            run.problems.append(f"{stage}: no run of this stage.")
    for stage, path in others:
        run.problems.append(f"{path}: another {stage} run, not shown. To report it, run: align report {path}")
    for stage in ("reward", "dpo"):
        if stage in folders:
            run.rankings[stage] = _read_rows(folders[stage] / "validation.json", _parse_ranking, run.problems)
    if "ppo" in folders:
        for update, sample in _read_rows(folders["ppo"] / "samples.jsonl", _parse_sample, run.problems):
            run.samples.setdefault(update, []).append(sample)
    if (folder / "summary.json").exists():
        run.summary = _read_rows(folder / "summary.json", read_summary_row, run.problems)
    run.evaluations = load_evaluations(folder / EVALUATIONS_FOLDER, run.problems)
    for path in sorted((folder / EVALUATIONS_FOLDER).glob("*/*.json")):
        run.problems.append(f"{path}: not shown. Only files directly in {EVALUATIONS_FOLDER}/ are included.")
    return run


def load_evaluations(folder: Path, problems: list[str]) -> list[Evaluation]:
    """Read the evaluations in `folder/*.json`. Unreadable files are added to `problems`."""
    evaluations: list[Evaluation] = []
    for path in sorted(folder.glob("*.json")):
        try:
            evaluations += read_evaluations(path)
        except UserError as error:
            problems.append(f"{error}.")
    return evaluations


def stage_folders(folder: Path) -> tuple[dict[str, Path], list[tuple[str, Path]]]:
    """Return the run to show for each stage, and the remaining runs in the same folder with their stages."""
    runs: dict[str, list[Path]] = {}
    for path in (folder, *sorted(child for child in folder.iterdir() if child.is_dir())):
        if stage := _stage_of(path):
            runs.setdefault(stage, []).append(path)
    for paths in runs.values():
        paths.sort(key=_modified, reverse=True)
    chosen: dict[str, Path] = {}
    for stage, setting in (("ppo", ""), ("dpo", ""), ("reward", "reward_model"), ("sft", "model")):
        named = [path for other in chosen.values() for path in _named_runs(other, setting)] if setting else []
        matching = [path for path in runs.get(stage, []) if any(_is_same_run(path, other) for other in named)]
        if candidates := matching or runs.get(stage, []):
            chosen[stage] = candidates[0]
    others = [(stage, path) for stage, paths in runs.items() for path in paths if path != chosen.get(stage)]
    return {stage: chosen[stage] for stage in STAGES if stage in chosen}, others


def _stage_of(path: Path) -> str:
    """Return the stage of a run folder, from its config or else the folder name. "" if it is not a run folder."""
    if not ((path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file()):
        return ""
    config = _read(path / "config.yaml", yaml.safe_load, dict, [])
    by_settings = next((stage for stage, (_, setting) in STAGES.items() if setting in config), "")
    return by_settings or (path.name if path.name in STAGES else "")


def _modified(path: Path) -> float:
    files = [path / name for name in ("metrics.jsonl", "config.yaml")]
    return max(file.stat().st_mtime for file in files if file.is_file())


def _named_runs(run: Path, setting: str) -> list[Path]:
    """Return the runs whose models are named by a setting of `run`."""
    value = _read(run / "config.yaml", yaml.safe_load, dict, []).get(setting) or []
    return [Path(str(name)).parent for name in (value if isinstance(value, list) else [value])]


def _is_same_run(path: Path, named: Path) -> bool:
    """Return whether `named` refers to `path`. Relative paths may be stale, and folders may have been moved."""
    return path.resolve() == named.resolve() or (not named.exists() and path.resolve().name == named.name)


def _load_stage(stage: str, folder: Path, problems: list[str]) -> StageRun:
    files = [folder / name for name in ("config.yaml", "environment.json")]
    config, environment = (_read(path, yaml.safe_load, dict, problems) for path in files)  # JSON is YAML
    path = folder / "metrics.jsonl"
    metrics = dict(_read_rows(path, _parse_metrics, problems))  # the last line of an update wins
    if not metrics:
        problems.append(f"{path}: no metrics yet.")
    return StageRun(stage, folder, config, environment, metrics, update_in_card(folder / "model"))


# ---------------------------------------------------------------------------------------------------------------- files


def _read(path: Path, parse: Callable[[str], Any], expected: type[Parsed], problems: list[str]) -> Parsed:
    """Parse a file. Return `expected()` if it is empty or invalid, and add a problem if it is invalid."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        problems.append(f"{path}: {error.strerror or error}.")
        return expected()
    try:
        value = parse(text) if text else expected()
    except (ValueError, yaml.YAMLError):
        value = None
    if isinstance(value, expected):
        return value
    problems.append(f"{path}: cannot be parsed, so it is not shown.")
    return expected()


def _read_rows(path: Path, parse: Callable[[Mapping[str, Any]], Parsed], problems: list[str]) -> list[Parsed]:
    """Parse the rows of a JSON list or JSON Lines file. A killed run often leaves a truncated last line."""

    def split_lines(text: str) -> list[Any]:
        return [line for line in text.split("\n") if line.strip()]

    is_lines = path.suffix == ".jsonl"
    rows = _read(path, split_lines if is_lines else json.loads, list, problems)
    records, bad = [], []
    for number, row in enumerate(rows, start=1):
        try:
            records.append(parse(json.loads(row) if is_lines else row))
        except (KeyError, TypeError, ValueError, AttributeError):
            bad.append(number)
    if bad:
        what = f"row {bad[0]}" if len(bad) == 1 else f"{len(bad)} rows (the first is row {bad[0]})"
        problems.append(f"{path}: skipped {what}, truncated or invalid.")
    return records


def _parse_metrics(row: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    return int(row["update"]), {key: float(value) for key, value in row.items() if isinstance(value, int | float)}


def _parse_ranking(row: Mapping[str, Any]) -> ScoredRanking:
    ranks, rewards = tuple(map(int, row["ranks"])), tuple(map(float, row["rewards"]))
    lengths = tuple(map(int, row.get("lengths") or [0] * len(ranks)))
    if not len(ranks) == len(rewards) == len(lengths) or not all(map(math.isfinite, rewards)):
        raise ValueError("ranks, rewards and lengths do not match")
    return ScoredRanking(ranks, rewards, lengths, visible_text(row["category"]) if row.get("category") else None)


def _parse_sample(row: Mapping[str, Any]) -> tuple[int, Sample]:
    turns = row["prompt"]
    turns = [{"role": "user", "content": turns}] if isinstance(turns, str) else turns
    reward = float(row["reward"])
    if not math.isfinite(reward):
        raise ValueError("the reward is not a finite number")
    category = str(row["category"]) if row.get("category") else None
    prompt = tuple((str(turn["role"]), str(turn["content"])) for turn in turns)
    return int(row["update"]), Sample(prompt, str(row["response"]), reward, bool(row["ended"]), category)


def read_summary_row(row: Mapping[str, Any]) -> TableRow:
    """Parse a row of summary.json with `name`, `before` and `after`. The change is empty unless both are numbers."""
    before, after = (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value or "")
        for value in (row["before"], row["after"])
    )
    change = "" if isinstance(before, str) or isinstance(after, str) else format_number(after - before, sign=True)
    texts = [str(row.get(name) or "") for name in ("interval", "note")]
    return TableRow(str(row["name"]), format_number(before), format_number(after), change, *texts)


# ----------------------------------------------------------------------------------------------------- text and numbers


def visible_text(value: Any) -> str:
    """Replace control characters by their symbols, and bidi overrides and lone surrogates by U+FFFD."""
    table = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
    table |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)], 0xFFFD)
    return str(value).replace("\r\n", "\n").translate(table)


def format_number(value: float | str | None, sign: bool = False) -> str:
    """Format a number with three significant digits and grouped thousands. Strings are unchanged, None becomes a dash."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if not abs(value) < float("inf"):
        return "not a number"
    text = f"{value:{'+' if sign else ''},.0f}" if abs(value) >= 1000 else f"{value:{'+' if sign else ''}.3g}"
    return text if "e" in text else text.replace("-", "−")


def format_percent(value: float | None, sign: bool = False) -> str:
    """Format a fraction as a percentage with one digit, or with `sign` as a difference in percentage points."""
    if value is None:
        return "–"
    return (f"{100 * value:+.1f} points" if sign else f"{100 * value:.1f} %").replace("-", "−")
