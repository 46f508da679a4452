"""The folder of a run: its settings, the versions it ran with, its metrics, and where it can go on from."""

import json
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from align.config import ModelConfig, RunConfig, dump
from align.distributed import compute_dtype, make_accelerator
from align.errors import UserError
from align.files import read_json, write_json, write_text

PACKAGES = ("align-rlhf", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "numpy")
console = Console(stderr=True, soft_wrap=True)


class Run:
    """One run of a stage.

    Args:
        config: the stage's settings; must hold the fields of both `ModelConfig` and `RunConfig`.
        stage: `sft`, `reward` or `ppo`.

    Raises:
        UserError: if the folder holds a finished or broken-off run and `resume` is off.
    """

    def __init__(self, config: RunConfig, stage: str) -> None:
        assert isinstance(config, ModelConfig)
        self.config, self.stage = config, stage
        self.folder = Path(config.output_dir)
        self.dtype = compute_dtype(config.dtype)
        trackers = [name for name in config.log_to if name != "none"]
        self.accelerator = make_accelerator(
            self.dtype, config.max_grad_norm, log_with=trackers or None, project_dir=str(self.folder)
        )
        self.is_main = self.accelerator.is_main_process
        self.metrics_file = self.folder / "metrics.jsonl"
        self.checkpoint = self._last_checkpoint() if config.resume else None
        if self.metrics_file.exists() and not config.resume:
            raise UserError(f"{self.folder} already holds a run; set resume to go on with it, or another output_dir")
        self.accelerator.wait_for_everyone()  # every process has looked before one of them writes
        if self.is_main:
            self._open()
        if trackers:
            self.accelerator.init_trackers(stage)
        torch.manual_seed(config.seed)
        self.started = time.monotonic()

    def _open(self) -> None:
        write_text(self.folder / "config.yaml", dump(self.config))
        write_json(self.folder / "environment.json", environment())
        done = read_json(self.checkpoint / "trainer.json")["update"] if self.checkpoint else 0
        if self.metrics_file.exists():  # lines after the checkpoint will be written again
            lines = self.metrics_file.read_text(encoding="utf-8").splitlines(keepends=True)
            write_text(self.metrics_file, "".join(line for line in lines if _update_of(line) <= done))
        self.metrics_file.touch()

    def _last_checkpoint(self) -> Path | None:
        found = sorted((self.folder / "checkpoints").glob("update-*/trainer.json"))
        return found[-1].parent if found else None

    def say(self, message: str) -> None:
        """Print a line for the person who waits, once for all processes."""
        if self.is_main:
            console.print(message, highlight=False, markup=False)

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Write one line of metrics.jsonl and tell the trackers. docs/metrics.md defines each name."""
        if not self.is_main:
            return
        row = {"update": update, "seconds": round(time.monotonic() - self.started, 3)}
        row |= {name: float(f"{value:.7g}") for name, value in metrics.items()}
        try:
            with open(self.metrics_file, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise UserError(f"{self.metrics_file}: cannot be written ({error.strerror})") from error
        self.accelerator.log(dict(metrics), step=update)

    def record(self, name: str, rows: list[dict[str, Any]], update: int) -> None:
        """Append rows (samples, for instance) to `name`.jsonl in the run folder, each with the update it belongs to."""
        if not self.is_main:
            return
        path = self.folder / f"{name}.jsonl"
        old = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        kept = [line for line in old if _update_of(line) < update]
        new = [json.dumps({"update": update, **row}, ensure_ascii=False) + "\n" for row in rows]
        write_text(path, "".join(kept + new))

    def updates(self, first: int, total: int) -> Iterator[int]:
        """Count updates from `first` to `total` (both included), with a progress bar and the time that is left."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console, disable=not self.is_main) as self.progress:
            self.task = self.progress.add_task(f"{self.stage:>6}", total=total, completed=first - 1, note="")
            for update in range(first, total + 1):
                yield update
                self.progress.update(self.task, completed=update)

    def note(self, text: str) -> None:
        """Show a few figures behind the progress bar."""
        self.progress.update(self.task, note=text)

    def keep_only(self, checkpoint: Path) -> None:
        """Remove older checkpoints once a newer one is safely on disk."""
        for folder in checkpoint.parent.glob("update-*"):
            if folder != checkpoint:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """End the trackers, and the process group cleanly: a group that is left open can abort at exit."""
        if any(name != "none" for name in self.config.log_to):
            self.accelerator.end_training()
        self.accelerator.wait_for_everyone()


def _update_of(line: str) -> int:
    return int(json.loads(line)["update"])


def environment() -> dict[str, Any]:
    """Versions and machine, as they are written beside a run's results."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "packages": versions,
        "system": platform.platform(),
        "device": device,
        "processors": torch.get_num_threads(),
    }
