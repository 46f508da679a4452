"""The folder of a run: its settings, the versions it ran with, its metrics, and where it can go on from."""

import errno
import importlib.util
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from align.config import ModelConfig, RunConfig, dump
from align.distributed import compute_dtype, make_accelerator
from align.errors import UserError
from align.files import read_json, write_json, write_text
from align.flops import peak_flops
from align.memory import GIB, Memory

PACKAGES = ("align-rlhf", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "numpy")
# What a checkpoint cannot do without: its weights and the reference of PPO's KL follow from these.
SAME_ON_RESUME = ("model", "chat_template", "lora_rank", "lora_alpha", "lora_targets", "optimizer", "critic")
FREE_ON_RESUME = ("resume", "output_dir", "log_to", "memory_limit", "peak_flops")
console = Console(stderr=True, soft_wrap=True)


class Run:
    """One run of a stage. Its folder is written from the first update on: a mistake before it leaves nothing behind.

    Args:
        config: the stage's settings; must hold the fields of both `ModelConfig` and `RunConfig`.
        stage: `sft`, `reward` or `ppo`.

    Raises:
        UserError: if the folder holds a finished or broken-off run and `resume` is off, or one of another model.
    """

    def __init__(self, config: RunConfig, stage: str) -> None:
        assert isinstance(config, ModelConfig)
        self.config, self.stage = config, stage
        self.folder = Path(config.output_dir)
        _require_place(self.folder)
        self.dtype = compute_dtype(config.dtype)
        self.trackers = [name for name in config.log_to if name != "none"]
        for name in self.trackers:
            if importlib.util.find_spec(name) is None:
                raise UserError(f"log_to: {name} is not installed; install it: pip install {name}")
        self.accelerator = make_accelerator(
            self.dtype, config.max_grad_norm, log_with=self.trackers or None, project_dir=str(self.folder)
        )
        self.memory = Memory(self.accelerator, config.memory_limit)
        self.is_main = self.accelerator.is_main_process
        self.metrics_file = self.folder / "metrics.jsonl"
        self.checkpoint = self._last_checkpoint() if config.resume else None
        begun = (self.folder / "model").exists() or (self.metrics_file.exists() and self.metrics_file.stat().st_size > 0)
        if begun and not config.resume:
            raise UserError(f"{self.folder} already holds a run; set resume to go on with it, or another output_dir")
        if self.checkpoint:
            self._compare_settings()
        elif begun:
            self.say(f"{self.folder} holds no checkpoint to resume from (see save_every): starting with the first update")
        self.accelerator.wait_for_everyone()  # every process has looked before one of them writes
        self.opened = False
        torch.manual_seed(config.seed)
        self.started = time.monotonic()

    def _compare_settings(self) -> None:
        """Refuse to resume what these settings cannot go on with; tell what else differs from before.

        Raises:
            UserError: if a setting of `SAME_ON_RESUME` is another one now.
        """
        path = self.folder / "config.yaml"
        try:
            before = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return  # `load_checkpoint` still compares the names of all weights
        now = yaml.safe_load(dump(self.config))
        changed = [key for key, value in now.items() if key not in FREE_ON_RESUME and before.get(key, value) != value]
        for key in changed:
            if key in SAME_ON_RESUME:
                raise UserError(
                    f"{path}: this run has {key} {before[key]!r}, not {now[key]!r}; resume it with that, or give "
                    "another output_dir"
                )
        if changed:
            told = ", ".join(f"{key} {now[key]} (was {before[key]})" for key in changed)
            self.say(f"{self.folder} goes on with other settings: {told}")

    def open(self) -> None:
        """Write what stands in the folder before any result. Called by whatever is first to write there."""
        if self.opened:
            return
        self.opened = True
        if self.is_main:
            self._write_head()
        if self.trackers:
            with self._writing(self.folder):
                self.accelerator.init_trackers(self.stage)

    def _write_head(self) -> None:
        write_text(self.folder / "config.yaml", dump(self.config))
        write_json(self.folder / "environment.json", environment())
        done = read_json(self.checkpoint / "trainer.json")["update"] if self.checkpoint else -1
        if self.metrics_file.exists():  # lines after the checkpoint will be written again
            lines = self.metrics_file.read_text(encoding="utf-8").splitlines(keepends=True)
            write_text(self.metrics_file, "".join(line for line in lines if _update_of(line) <= done))

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        """Turn a failure of the disk into a line that names `path`."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error

    def _last_checkpoint(self) -> Path | None:
        found = sorted((self.folder / "checkpoints").glob("update-*/trainer.json"))
        return found[-1].parent if found else None

    def say(self, message: str) -> None:
        """Print a line for the person who waits, once for all processes."""
        if self.is_main and message:
            console.print(message, highlight=False, markup=False)

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Write one line of metrics.jsonl and tell the trackers. docs/metrics.md defines each name."""
        self.open()
        if not self.is_main:
            return
        metrics = {**metrics, "memory/peak": self.memory.peak() / GIB}
        row = {"update": update, "seconds": round(time.monotonic() - self.started, 3)}
        row |= {name: float(f"{value:.7g}") for name, value in metrics.items()}
        with self._writing(self.metrics_file):
            append_line(self.metrics_file, json.dumps(row) + "\n")
        with self._writing(self.folder / self.stage):
            self.accelerator.log(metrics, step=update)

    def speed(self, tokens: float, flops: float, seconds: float) -> dict[str, float]:
        """Tokens a second, and the share of what all devices could do at most (MFU).

        Args:
            tokens, flops: over all processes, in `seconds`.
        """
        accelerator = self.accelerator
        peak = peak_flops(accelerator.device, self.dtype, self.config.peak_flops) * accelerator.num_processes
        return {"speed/tokens": tokens / seconds, "speed/mfu": flops / seconds / peak}

    def record(self, name: str, rows: list[dict[str, Any]], update: int) -> None:
        """Append rows (samples, for instance) to `name`.jsonl in the run folder, each with the update it belongs to."""
        self.open()
        if not self.is_main:
            return
        path = self.folder / f"{name}.jsonl"
        old = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        kept = [line for line in old if _update_of(line) < update]
        new = [json.dumps({"update": update, **row}, ensure_ascii=False) + "\n" for row in rows]
        write_text(path, "".join(kept + new))

    def updates(self, first: int, total: int) -> Iterator[int]:
        """Count updates from `first` to `total` (both included), with a progress bar and the time that is left."""
        self.open()
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
        """End the trackers. The process group stays: it belongs to the process, which may run another stage."""
        self.accelerator.wait_for_everyone()
        with self._writing(self.folder / self.stage):
            for tracker in self.accelerator.trackers if self.opened and self.trackers else ():
                tracker.finish()


class Clock:
    """Seconds that the parts of an update took; a GPU has done its part when a lap ends."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.begun = time.monotonic()

    def lap(self, part: str) -> None:
        """End a part: the time since the last one ended is its own."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.monotonic()
        self.seconds[part], self.begun = now - self.begun, now

    def shares(self) -> dict[str, float]:
        """`time/<part>`, the share of each part, and `time/update`, the seconds of all."""
        total = sum(self.seconds.values())
        return {f"time/{part}": seconds / total for part, seconds in self.seconds.items()} | {"time/update": total}


def _require_place(folder: Path) -> None:
    """Refuse a folder that could not be written, before a large model is loaded for it.

    Raises:
        UserError: if a file is in the way, or the right to write is missing.
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise UserError(f"output_dir {folder}: {nearest} is a file, not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"output_dir {folder}: {nearest} may not be written")


def _update_of(line: str) -> float:
    """The update of a line of metrics; infinity for a line that a kill has cut short: it is dropped like later ones."""
    try:
        return int(json.loads(line)["update"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, whole or not at all.

    Raises:
        OSError: if the disk is full; the file is as it was.
    """
    data = line.encode()
    with open(path, "ab", buffering=0) as file:
        length = file.tell()
        try:
            if file.write(data) < len(data):  # what a disk says that fills up within the line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(length)
            raise


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl.

    Raises:
        UserError: if there are none.
    """
    path = folder / "metrics.jsonl"
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not the metrics of a run ({error})") from error


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
