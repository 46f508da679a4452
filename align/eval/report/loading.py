"""Reads the files of a run. An interrupted or incomplete run is read as far as possible."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from align.errors import UserError
from align.eval.core.results import Evaluation, read_evaluations
from align.eval.report.rollouts import load_rollouts
from align.eval.report.runs import OPTIONAL_STAGES, STAGES, RunData, Sample, StageRun, SummaryRow
from align.eval.report.text import visible_text
from align.reward.metrics import ScoredRanking

STAGE_OF_SETTING = {
    "prompt_loss_weight": "sft",
    "centering_weight": "reward",
    "label_smoothing": "dpo",
    "rollout_size": "ppo",
    "layer_step": "distill",
}
"""A setting that only this stage has: it identifies the stage of a run folder that is not named after it."""
EVALUATIONS_FOLDER = "eval"
"""The subfolder in which a run keeps the results of `align eval`."""

Parsed = TypeVar("Parsed")


def load_run(folder: Path) -> RunData:
    """Read `folder` with its subfolders sft, reward, dpo, ppo and distill, or the folder of a single stage.

    Raises:
        UserError: if the folder does not exist or holds no run.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder that contains sft, reward or ppo")
    run = RunData(folder)
    folders = _stage_folders(folder)
    if not folders:
        raise UserError(f"{folder}: no run in it; looked for config.yaml or metrics.jsonl in sft, reward and ppo")
    for stage in STAGES:
        if stage in folders:
            run.stages[stage] = _load_stage(stage, folders[stage], run.problems)
        elif stage not in OPTIONAL_STAGES:
            run.problems.append(f"{stage}: no run of this stage; its part is left out.")
    run.rankings = _load_rankings(folders.get("reward"), run.problems)
    run.dpo_rankings = _load_rankings(folders.get("dpo"), run.problems)
    if "ppo" in folders:
        path = folders["ppo"] / "samples.jsonl"
        for update, sample in _parse_rows(path, _read_json_lines(path, run.problems), _parse_sample, run.problems):
            run.samples.setdefault(update, []).append(sample)
        run.rollouts = load_rollouts(folders["ppo"], run.problems)
    path = folder / "summary.json"
    if path.exists():
        run.summary = _parse_rows(path, _read_json_list(path, run.problems), read_summary_row, run.problems)
    run.evaluations = load_evaluations(folder / EVALUATIONS_FOLDER, run.problems)
    return run


def _load_rankings(folder: Path | None, problems: list[str]) -> list[ScoredRanking]:
    """The held-out rankings that a stage scored at its last evaluation; none if there is no such stage."""
    if folder is None:
        return []
    path = folder / "validation.json"
    return _parse_rows(path, _read_json_list(path, problems), _parse_ranking, problems)


def load_evaluations(folder: Path, problems: list[str]) -> list[Evaluation]:
    """The evaluations in the files `folder/*.json`; for each file that cannot be read, a sentence goes to `problems`."""
    evaluations: list[Evaluation] = []
    for path in sorted(folder.glob("*.json")):
        try:
            evaluations += read_evaluations(path)
        except UserError as error:
            problems.append(f"{error}.")
    return evaluations


def _stage_folders(folder: Path) -> dict[str, Path]:
    def holds_run(candidate: Path) -> bool:
        return (candidate / "config.yaml").is_file() or (candidate / "metrics.jsonl").is_file()

    folders = {stage: folder / stage for stage in STAGES if holds_run(folder / stage)}
    if not folders and holds_run(folder):
        config = _read_mapping(folder / "config.yaml", [])
        folders = {stage: folder for setting, stage in STAGE_OF_SETTING.items() if setting in config}
    return folders


def _load_stage(stage: str, folder: Path, problems: list[str]) -> StageRun:
    run = StageRun(
        stage, folder, _read_mapping(folder / "config.yaml", problems), _read_mapping(folder / "environment.json", problems)
    )
    path = folder / "metrics.jsonl"
    for update, figures in _parse_rows(path, _read_json_lines(path, problems), _parse_figures, problems):
        run.metrics[update] = figures  # a line that was written again after a resume replaces the older one
    if not run.metrics:
        problems.append(f"{path}: no figures yet.")
    return run


def _read_mapping(path: Path, problems: list[str]) -> dict[str, Any]:
    """A YAML or JSON mapping (JSON is YAML); empty if it is not there."""
    text = _read_text(path, problems)
    if text is None:
        return {}
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict):
        problems.append(f"{path}: cannot be read; its contents are left out.")
        return {}
    return {str(key): item for key, item in value.items()}


def _read_text(path: Path, problems: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        problems.append(f"{path}: {error.strerror or error}.")
        return None


def _read_json_lines(path: Path, problems: list[str]) -> Iterator[Any]:
    """Each JSON line's value, None for one that is broken (the last one of a killed run, most often)."""
    for line in (_read_text(path, problems) or "").split("\n"):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError:
                yield None


def _read_json_list(path: Path, problems: list[str]) -> list[Any]:
    text = _read_text(path, problems)
    if text is None:
        return []
    try:
        rows = json.loads(text)
    except ValueError:
        rows = None
    if not isinstance(rows, list):
        problems.append(f"{path}: cannot be read; its contents are left out.")
        return []
    return rows


def _parse_rows(
    path: Path, rows: "Iterator[Any] | list[Any]", parse: Callable[[Mapping[str, Any]], Parsed], problems: list[str]
) -> list[Parsed]:
    """Rows as records; malformed ones are counted and left out."""
    records, bad = [], []
    for number, row in enumerate(rows, start=1):
        try:
            if not isinstance(row, dict):
                raise TypeError("not a mapping")
            records.append(parse(row))
        except (KeyError, TypeError, ValueError, AttributeError):
            bad.append(number)
    if bad:
        what = f"row {bad[0]} is" if len(bad) == 1 else f"{len(bad)} rows (the first is number {bad[0]}) are"
        problems.append(f"{path}: {what} cut off or broken and left out.")
    return records


def _parse_figures(row: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    numbers = {str(key): float(value) for key, value in row.items() if isinstance(value, int | float)}
    return int(row["update"]), numbers


def _parse_ranking(row: Mapping[str, Any]) -> ScoredRanking:
    ranks, rewards = tuple(map(int, row["ranks"])), tuple(map(float, row["rewards"]))
    lengths = tuple(map(int, row.get("lengths") or [0] * len(ranks)))
    if not len(ranks) == len(rewards) == len(lengths) or not all(map(math.isfinite, rewards)):
        raise ValueError("ranks, rewards and lengths do not match")
    return ScoredRanking(ranks, rewards, lengths, visible_text(row["category"]) if row.get("category") else None)


def _parse_sample(row: Mapping[str, Any]) -> tuple[int, Sample]:
    turns = row["prompt"]
    turns = [{"role": "user", "content": turns}] if isinstance(turns, str) else turns
    prompt = tuple((visible_text(turn["role"]), visible_text(turn["content"])) for turn in turns)
    reward = float(row["reward"])
    if not math.isfinite(reward):
        raise ValueError("the reward is not a finite number")
    category = visible_text(row["category"]) if row.get("category") else None
    return int(row["update"]), Sample(prompt, visible_text(row["response"]), reward, bool(row["ended"]), category)


def read_summary_row(row: Mapping[str, Any]) -> SummaryRow:
    """A row of summary.json.

    Raises:
        KeyError: without `name`, `before` or `after`.
    """

    def parse_value(value: Any) -> float | str:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if number else visible_text("" if value is None else value)

    texts = [visible_text(row.get(name) or "") for name in ("interval", "note")]
    return SummaryRow(visible_text(row["name"]), parse_value(row["before"]), parse_value(row["after"]), *texts)
