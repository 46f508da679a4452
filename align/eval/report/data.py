"""The files of a run and the records that a report makes of them. An incomplete run is read as far as possible."""

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
"""Title of each stage, and a setting that only it has, which identifies a run folder that is not named after its stage."""
EVALUATIONS_FOLDER = "eval"
"""The subfolder in which a run keeps the results of `align eval`."""
Parsed = TypeVar("Parsed")


@dataclass
class StageRun:
    """One stage's folder; what could not be read is empty.

    Attributes:
        metrics: numbers by update.
        saved_update: the update of the saved model, as its card states it; 0: it states none, or there is no model.
    """

    stage: str
    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    saved_update: int = 0

    def series(self, name: str) -> dict[int, float]:
        """Return a metric by update, in ascending order and only finite values; empty if it was never written."""
        rows = sorted(self.metrics.items())
        return {update: row[name] for update, row in rows if math.isfinite(row.get(name, math.nan))}


@dataclass(frozen=True)
class Sample:
    """A response to a fixed prompt, (role, content) of each turn, at one evaluation."""

    prompt: tuple[tuple[str, str], ...]
    response: str
    reward: float
    ended: bool
    category: str | None = None


@dataclass(frozen=True)
class TableRow:
    """A row of a table of values before and after, as text; `rating` is good, bad or empty."""

    name: str
    before: str
    after: str
    change: str = ""
    interval: str = ""
    note: str = ""
    rating: str = ""


@dataclass
class RunData:
    """All that a report is made from.

    Attributes:
        rankings: by stage, held-out rankings with the rewards of a reward model or the implicit rewards of DPO.
        samples: from an update to the responses of that evaluation.
        problems: missing or unreadable files, one sentence each.
    """

    folder: Path
    stages: dict[str, StageRun] = field(default_factory=dict)
    rankings: dict[str, list[ScoredRanking]] = field(default_factory=dict)
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    summary: list[TableRow] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


REPORTABLE = "give the folder of one run, or one with the runs of the stages in subfolders"


def load_run(folder: Path) -> RunData:
    """Read the runs of the stages in the subfolders of `folder`, or the folder of a single stage.

    Of several runs of a stage, the report shows the newest policy, and the models that its settings name.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; {REPORTABLE}")
    run = RunData(folder)
    folders, others = stage_folders(folder)
    if not folders:
        raise UserError(f"{folder}: no config.yaml or metrics.jsonl of a run in it; {REPORTABLE}")
    for stage in STAGES:
        if stage in folders:
            run.stages[stage] = _load_stage(stage, folders[stage], run.problems)
        elif stage != "dpo":  # which a complete run need not have
            run.problems.append(f"{stage}: no run of this stage; its part is left out.")
    for stage, path in others:
        run.problems.append(f"{path}: another run of {stage} is left out; for its report: align report {path}")
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
        run.problems.append(f"{path}: is left out; only files directly in {EVALUATIONS_FOLDER}/ are shown.")
    return run


def load_evaluations(folder: Path, problems: list[str]) -> list[Evaluation]:
    """Read the evaluations in the files `folder/*.json`; add a sentence to `problems` for each unreadable file."""
    evaluations: list[Evaluation] = []
    for path in sorted(folder.glob("*.json")):
        try:
            evaluations += read_evaluations(path)
        except UserError as error:
            problems.append(f"{error}.")
    return evaluations


def stage_folders(folder: Path) -> tuple[dict[str, Path], list[tuple[str, Path]]]:
    """Return the run of each stage that a report shows, and the other runs in the same folder with their stages."""
    runs: dict[str, list[Path]] = {}
    for path in (folder, *sorted(each for each in folder.iterdir() if each.is_dir())):
        if stage := _stage_of(path):
            runs.setdefault(stage, []).append(path)
    for found in runs.values():
        found.sort(key=_written, reverse=True)
    chosen: dict[str, Path] = {}
    for stage, setting in (("ppo", ""), ("dpo", ""), ("reward", "reward_model"), ("sft", "model")):
        named = [path for other in chosen.values() for path in _named_runs(other, setting)] if setting else []
        matching = [path for path in runs.get(stage, []) if any(_is_same_run(path, each) for each in named)]
        if found := matching or runs.get(stage, []):
            chosen[stage] = found[0]
    others = [(stage, path) for stage, found in runs.items() for path in found if path != chosen.get(stage)]
    return {stage: chosen[stage] for stage in STAGES if stage in chosen}, others


def _stage_of(path: Path) -> str:
    """Return the stage of the run in a folder: by its settings, or the folder's name without them; "" for no run."""
    if not ((path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file()):
        return ""
    config = _read(path / "config.yaml", yaml.safe_load, dict, [])
    by_settings = next((stage for stage, (_, setting) in STAGES.items() if setting in config), "")
    return by_settings or (path.name if path.name in STAGES else "")


def _written(path: Path) -> float:
    files = [path / name for name in ("metrics.jsonl", "config.yaml")]
    return max(file.stat().st_mtime for file in files if file.is_file())


def _named_runs(run: Path, setting: str) -> list[Path]:
    """Return the runs whose models a setting of a run names."""
    value = _read(run / "config.yaml", yaml.safe_load, dict, []).get(setting) or []
    return [Path(str(name)).parent for name in (value if isinstance(value, list) else [value])]


def _is_same_run(path: Path, named: Path) -> bool:
    """Whether a setting names a run: relative paths begin where that run was started, and folders may have been moved."""
    return path.resolve() == named.resolve() or (not named.exists() and path.resolve().name == named.name)


def _load_stage(stage: str, folder: Path, problems: list[str]) -> StageRun:
    files = [folder / name for name in ("config.yaml", "environment.json")]
    config, environment = (_read(path, yaml.safe_load, dict, problems) for path in files)  # JSON is YAML
    path = folder / "metrics.jsonl"
    metrics = dict(_read_rows(path, _parse_metrics, problems))  # of two lines of an update the later counts
    if not metrics:
        problems.append(f"{path}: no metrics yet.")
    return StageRun(stage, folder, config, environment, metrics, update_in_card(folder / "model"))


# ---------------------------------------------------------------------------------------------------------------- files


def _read(path: Path, parse: Callable[[str], Any], expected: type[Parsed], problems: list[str]) -> Parsed:
    """Parse a file; return `expected()` if it is empty, and add a problem if it cannot be read as that type."""
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
    problems.append(f"{path}: cannot be read; its contents are left out.")
    return expected()


def _read_rows(path: Path, parse: Callable[[Mapping[str, Any]], Parsed], problems: list[str]) -> list[Parsed]:
    """The records of a JSON list, or of JSON Lines, of which a killed run often leaves the last one broken."""

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
        what = f"row {bad[0]} is" if len(bad) == 1 else f"{len(bad)} rows (the first is number {bad[0]}) are"
        problems.append(f"{path}: {what} cut off or broken and left out.")
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
    """Read a row of summary.json, with `name`, `before` and `after`; its change is empty unless both are numbers."""
    before, after = (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value or "")
        for value in (row["before"], row["after"])
    )
    change = "" if isinstance(before, str) or isinstance(after, str) else format_number(after - before, sign=True)
    texts = [str(row.get(name) or "") for name in ("interval", "note")]
    return TableRow(str(row["name"]), format_number(before), format_number(after), change, *texts)


# ----------------------------------------------------------------------------------------------------- text and numbers


def visible_text(value: Any) -> str:
    """Return text that a page can show: control characters as their symbols, writing-direction overrides and halves of
    surrogate pairs (which UTF-8 cannot hold) as the replacement character."""
    table = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
    table |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)], 0xFFFD)
    return str(value).replace("\r\n", "\n").translate(table)


def format_number(value: float | str | None, sign: bool = False) -> str:
    """Format with three significant digits, thousands in groups; text stays as it is, None becomes a dash."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if not abs(value) < float("inf"):
        return "not a number"
    text = f"{value:{'+' if sign else ''},.0f}" if abs(value) >= 1000 else f"{value:{'+' if sign else ''}.3g}"
    return text if "e" in text else text.replace("-", "−")


def format_percent(value: float | None, sign: bool = False) -> str:
    """Format a share as a percentage with one digit; with a sign it is a difference, in percentage points."""
    if value is None:
        return "–"
    return (f"{100 * value:+.1f} points" if sign else f"{100 * value:.1f} %").replace("-", "−")
