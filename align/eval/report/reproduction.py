"""How to reproduce a run: its commands, and the versions it was made with."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from align.eval.report.runs import RunData, StageRun
from align.eval.report.text import visible_text


def rerun_commands(run: RunData) -> list[str]:
    """Commands that make the run again in a folder next to it; each stage starts from the new run's models."""
    new_folder = run.folder.with_name(run.folder.resolve().name + "-again")
    moved = {str(stage.config.get("output_dir", stage.folder)): str(new_folder / name) for name, stage in run.stages.items()}
    commands = []
    for name, stage in run.stages.items():
        words = ["align", name, "--config", str(stage.folder / "config.yaml"), "--output_dir", str(new_folder / name)]
        for setting, value in stage.config.items():
            values = value if isinstance(value, list) else [value]
            renamed = [_moved(item, moved) for item in values]
            if setting != "output_dir" and renamed != values:
                words += [f"--{setting}", *renamed]
        words += ["--resume", "false"] if stage.config.get("resume") else []
        if stage.config:
            commands.append(shlex.join(words))
    return [*commands, shlex.join(["align", "report", str(new_folder)])] if commands else []


def _moved(value: Any, moved: Mapping[str, str]) -> Any:
    """A path inside one of the moved folders, at its new location; any other value unchanged."""
    for old, new in moved.items():
        if isinstance(value, str) and value.startswith(old.rstrip("/") + "/"):
            return new + value[len(old.rstrip("/")) :]
    return value


def versions(stages: Sequence[StageRun]) -> list[tuple[str, str]]:
    """Name and version of everything a run was made with; where stages differ, their versions in order."""
    by_name: dict[str, list[str]] = {}
    for stage in stages:
        for name, value in _flatten(stage.environment).items():
            known = by_name.setdefault(visible_text(name), [])
            if visible_text(value) not in known:
                known.append(visible_text(value))
    return [(name, ", then ".join(values)) for name, values in by_name.items()]


def _flatten(environment: dict[str, Any]) -> dict[str, Any]:
    packages = environment.get("packages")
    rest = {name: value for name, value in environment.items() if name != "packages"}
    return rest | (packages if isinstance(packages, dict) else {})
