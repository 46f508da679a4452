"""The finished steps of a loop, in one file written after each step, so that a killed loop resumes after the last one."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from align.commands.loop.config import CHANGEABLE_SETTINGS, LoopConfig
from align.core.errors import UserError
from align.core.files import write_json
from align.runtime.environment import console


class LoopState:
    """The file `loop.json` in the loop's folder: the settings, and the finished steps with their results.

    Raises:
        UserError: if the folder holds a loop of other settings, or its file cannot be read.
    """

    def __init__(self, config: LoopConfig) -> None:
        self.path = Path(config.output_dir) / "loop.json"
        self.steps: dict[str, dict[str, Any]] = {}
        self.settings = {name: value for name, value in asdict(config).items() if name not in CHANGEABLE_SETTINGS}
        if self.path.exists():
            self._read()

    def run_once(self, name: str, step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run a step unless it is finished; returns its results.

        Args:
            name: unique among the steps.
            step: does the work; it must be safe to run again after a kill at any point.
        """
        if name not in self.steps:
            started = time.monotonic()
            results = step()
            self.steps[name] = {**results, "seconds": round(time.monotonic() - started, 1)}
            write_json(self.path, {"settings": self.settings, "steps": self.steps})
            facts = ", ".join(f"{key} {value}" for key, value in self.steps[name].items())
            console.print(f"{name}: {facts}", highlight=False, markup=False, soft_wrap=True)
        return self.steps[name]

    def _read(self) -> None:
        try:
            read = json.loads(self.path.read_text(encoding="utf-8"))
            settings, self.steps = dict(read["settings"]), dict(read["steps"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path}: cannot be read; give another output_dir, or remove that folder") from error
        changed = [name for name, value in self.settings.items() if settings.get(name) != value]
        if changed:
            old = settings.get(changed[0])
            raise UserError(
                f"{self.path}: this loop began with {changed[0]} {old!r}, not {self.settings[changed[0]]!r}; "
                "give another output_dir, or the same settings"
            )
