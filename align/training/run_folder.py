"""The folder of a run: its files, its lock, and the runs that may continue there.

The lock is a kernel lock on a file, which ends with its process. A record lock (`lockf`) works over NFS, and child processes
do not inherit it.
"""

import errno
import hashlib
import importlib.util
import json
import math
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from accelerate import Accelerator

from align.core.errors import UserError
from align.core.files import PARTIAL, clear_leftovers, read_json, read_lines, write_json, write_text
from align.runtime.distributed import run_on_main
from align.training.checkpoint.files import checkpoint_to_resume, checkpoints_in, quarantine_later, rotate_checkpoints

try:
    import fcntl
except ImportError:  # Windows: two runs in one folder are not detected
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
TAKEN = (errno.EACCES, errno.EAGAIN)
_held: dict[Path, int] = {}
"""Descriptors by folder. The lock belongs to the process: closing any other descriptor of the file would release it."""


def refuse_other_run(folder: Path) -> None:
    """Raise a UserError if another process writes to the folder. Write nothing."""
    if fcntl is None or folder.resolve() in _held or not (folder / NAME).exists():
        return
    try:
        with open(folder / NAME, "rb+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in TAKEN:
            raise _taken(folder) from error


def take_lock(folder: Path) -> None:
    """Lock a folder until `release_lock` or the end of the process. Raise a UserError if another process holds it."""
    if fcntl is None or folder.resolve() in _held:
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in TAKEN:
            raise _taken(folder) from error
        return  # a file system without locks
    holder = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(holder).encode())
    _held[folder.resolve()] = descriptor


def release_lock(folder: Path) -> None:
    """Release a folder. The file is not deleted: another process may already hold its lock."""
    descriptor = _held.pop(folder.resolve(), None)
    if descriptor is not None:
        os.ftruncate(descriptor, 0)
        os.close(descriptor)


def _taken(folder: Path) -> UserError:
    try:
        holder = json.loads((folder / NAME).read_text(encoding="utf-8"))
        who = f"process {holder['process']} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return UserError(f"{folder}: {who} is writing a run there; wait for it to finish, or choose another output_dir")


def update_of(line: str) -> float:
    """Return the update of a line of metrics. Infinity for a line truncated by a kill, because it is dropped as well."""
    try:
        return int(json.loads(line)["update"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Read a run's metrics.jsonl. Raise a UserError if the file is missing or not JSON."""
    path = folder / "metrics.jsonl"
    try:
        return [json.loads(line) for line in read_lines(path)]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not the metrics of a run ({error})") from error


@contextmanager
def naming_disk_errors(path: Path) -> Iterator[None]:
    """Convert a disk error to a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error


class Results(NamedTuple):
    """Results of runs in a folder: a model, the size of metrics.jsonl, and the updates of checkpoints."""

    model: bool
    metrics_bytes: int
    checkpoints: tuple[int, ...]


@dataclass(frozen=True)
class RunFolder:
    """The files of a run, as one process sees them. `Run` decides which process calls a method."""

    path: Path

    @property
    def metrics(self) -> Path:
        """The file of metrics: a line of JSON for each logged update."""
        return self.path / "metrics.jsonl"

    def require_usable(self, trackers: Sequence[str]) -> None:
        """Reject a folder that cannot be written or trackers that are not installed, before a large model is loaded.

        Raise a UserError if a file or a broken link is in the way, a name is too long, or there is no permission to write,
        or a tracker is not installed.
        """
        for name in trackers:
            if importlib.util.find_spec(name) is None:
                raise UserError(f"report_to: {name} is not installed; install it: pip install {name}")
        folder = self.path
        try:
            nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
            # Check the longest path that a run writes, and each name: the system rejects names that are too long.
            longest = (
                folder / "checkpoints" / f".update-000000-00000000{PARTIAL}" / f"state-00000-of-00000.safetensors{PARTIAL}"
            )
            for path in (longest, *(nearest / name for name in folder.parts)):
                path.exists()
        except OSError as error:
            raise UserError(f"output_dir {folder}: {error.strerror}") from error
        if not nearest.exists():
            raise UserError(f"output_dir {folder}: {nearest} is a link to {os.readlink(nearest)}, which does not exist")
        if not nearest.is_dir():
            raise UserError(f"output_dir {folder}: {nearest} is a file, not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(f"output_dir {folder}: no permission to write in {nearest}")

    def results(self) -> Results:
        """Return the results of earlier runs. Raise a UserError if another process is writing to the folder."""
        refuse_other_run(self.path)
        metrics_bytes = self.metrics.stat().st_size if self.metrics.exists() else 0
        return Results((self.path / "model").exists(), metrics_bytes, tuple(checkpoints_in(self.path)))

    def begin(
        self,
        earlier: Results,
        settings: str,
        facts: Mapping[str, Any],
        checkpoint: Path | None,
        is_own: bool,
        save_total_limit: int,
    ) -> list[str]:
        """Lock the folder and write the files that precede all results; return lines about checkpoints that are set aside.

        The run continues `checkpoint`; `is_own` if it is in this folder. Raise a UserError if another run writes there, has
        written there since the run looked (`earlier`), or the disk does not take the files.
        """
        lines: list[str] = []
        with naming_disk_errors(self.path):
            take_lock(self.path)
            if self.results() != earlier:
                release_lock(self.path)
                raise UserError(
                    f"{self.path}: another run has written there since this one started; set resume_from_checkpoint "
                    "auto to continue it, or choose another output_dir"
                )
            clear_leftovers(self.path)
            if checkpoint and is_own:
                lines = quarantine_later(self.path, checkpoint)  # later checkpoints are damaged
                rotate_checkpoints(self.path, save_total_limit)
            write_text(self.path / "config.yaml", settings)
            write_json(self.path / "environment.json", facts)
            done = read_json(checkpoint / "trainer.json")["update"] if checkpoint else -1
            if self.metrics.exists():  # updates after the checkpoint will be logged again
                write_text(self.metrics, "".join(line for line in read_lines(self.metrics) if update_of(line) <= done))
        return lines

    def seconds(self) -> float:
        """Return the time in the last line of metrics: the total of all earlier parts of a resumed run."""
        return (
            max((row.get("seconds", 0.0) for row in read_metrics(self.path)), default=0.0) if self.metrics.exists() else 0.0
        )

    def write_rows(self, name: str, rows: Sequence[Mapping[str, Any]], update: int) -> None:
        """Append the rows of an update to `name`.jsonl, replacing the rows of this and later updates."""
        path = self.path / f"{name}.jsonl"
        kept = [line for line in (read_lines(path) if path.exists() else []) if update_of(line) < update]
        new = [json.dumps({"update": update, **row}, ensure_ascii=False) + "\n" for row in rows]
        write_text(path, "".join(kept + new))


PACKAGES = ("align-rlhf", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "numpy")


def environment() -> dict[str, Any]:
    """Return package versions and machine facts, which are stored with a run's results."""
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


# ------------------------------------------------------------------- the start of a run: a checkpoint, and its settings

# A checkpoint cannot be resumed with other values: its weights, the reference of PPO's KL and the kept model depend on them.
SAME_ON_RESUME = (
    *("model", "chat_template", "prefix_lm", "lora_r", "lora_alpha", "lora_target_modules", "lora"),
    *("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    *("optimizer", "critic", "save_best_policy"),
    # The number of an update determines its examples. With other values, some would be repeated and others skipped.
    *("seed", "batch_size", "mixing_cap", "mixing_temperature", "rollout_batch_size", "samples_per_prompt"),
)
FREE_ON_RESUME = (
    *("dry_run", "resume_from_checkpoint", "output_dir", "report_to", "save_total_limit"),
    *("collective_timeout", "push_to_hub"),
)


DIGEST_BLOCK, DIGEST_BLOCKS = 2**16, 64
"""Block size in bytes and number of blocks for the digest of a large file. Files up to 4 MiB are read completely."""
NOT_INPUTS = ("output_dir", "resume_from_checkpoint", "push_to_hub", "report_to")
_DECORATION = re.compile(r"(\[[^]]*\])?(=[^=/]*|:[^:/]*)?$")
"""Suffix of an input path: a column, a weight, or the id of a rule."""


def input_digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each file and folder of data that settings name, by `setting path`; models are left out.

    For large files, only the size and `DIGEST_BLOCKS` blocks count: other weights differ everywhere, but an edit in the
    middle of a large file may go unnoticed.
    """
    digests: dict[str, str] = {}
    for name, value in settings.items():
        if name in NOT_INPUTS:
            continue
        for text in _texts(value):
            for part in text.split(","):
                path = Path(_DECORATION.sub("", part.strip().removeprefix("model:")))
                is_model = any((path / config).exists() for config in ("config.json", "adapter_config.json"))
                if str(path) != "." and path.exists() and not is_model:
                    digests[f"{name} {path}"] = _digest(path)
    return digests


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(entry for entry in path.rglob("*") if entry.is_file())
    for file in files:
        inside = file.relative_to(path)
        if any(part.startswith(".") for part in inside.parts):
            continue
        size = file.stat().st_size
        digest.update(f"{inside} {size}\n".encode())
        step = max(DIGEST_BLOCK, size // DIGEST_BLOCKS)
        with open(file, "rb") as opened:
            for start in (*range(0, size, step), max(0, size - DIGEST_BLOCK)):
                opened.seek(start)
                digest.update(opened.read(DIGEST_BLOCK))
    return digest.hexdigest()


def compare_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a line that names the inputs whose contents have changed since the run began, or ""."""
    changed = [name for name, digest in now.items() if before.get(name, digest) != digest]
    return f"contents that have changed since this run began: {', '.join(changed)}" if changed else ""


def template_date(resumed: Path | None) -> str:
    """Return the date for a run's chat templates: the date in `environment.json` of the run in `resumed`, or today."""
    path = resumed / "environment.json" if resumed else None
    stored = read_json(path).get("template_date") if path and path.exists() else None
    return str(stored or date.today().isoformat())


def compare_settings(settings: str, folder: Path) -> str:
    """Return a line that names the settings that differ from the run in a folder, or "".

    Raise a UserError if one of `SAME_ON_RESUME` differs, or the run's settings cannot be read.
    """
    path = folder / "config.yaml"
    before = read_settings(path)
    if before is None:  # `checkpoint.load` still compares the names of all weights
        return f"warning: {path} is missing: whether this run has the same settings is not checked"
    now = yaml.safe_load(settings)
    changed = [key for key, value in now.items() if key not in FREE_ON_RESUME and before.get(key, value) != value]
    for key in changed:
        if key in SAME_ON_RESUME:
            raise UserError(
                f"{path}: this run has {key} {before[key]!r}, not {now[key]!r}; resume it with that, or give another "
                "output_dir"
            )
    changes = [f"{key} {now[key]} (was {before[key]})" for key in changed]
    changes += [f"no {key} (was {value}), which this version lacks" for key, value in before.items() if key not in now]
    return f"{folder} continues with other settings: {', '.join(changes)}" if changes else ""


def read_settings(path: Path) -> dict[str, Any] | None:
    """Read the settings of a run from its `config.yaml`. Return None if there is no such file.

    Raise a UserError if the file cannot be read or contains no settings.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not the settings of a run ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: not the settings of a run: it must contain `key: value` lines; restore or remove it")
    return found


def changed_inputs(resumed: Path, settings: str) -> str:
    """Return the line of `compare_inputs` for the run in a folder and settings as YAML."""
    path = resumed / "environment.json"
    before = read_json(path).get("inputs", {}) if path.exists() else {}
    return compare_inputs(before, input_digests(yaml.safe_load(settings)))


def find_start(
    folder: Path,
    earlier: Results,
    choice: bool | str,
    settings: str,
    accelerator: Accelerator,
    report: Callable[[str], None],
) -> tuple[Path | None, bool, str]:
    """Return the checkpoint from which a run continues, whether it is in the run's folder, and the chat template date.

    All processes call this, with the `earlier` results in the folder. Raise a UserError if the checkpoint is damaged or has
    other settings, or a run without one would overwrite results.
    """
    checkpoint, faults = checkpoint_to_resume(choice, folder, accelerator)
    for fault in faults:
        report(f"warning: {fault}: resuming from {checkpoint}")
    resumed = checkpoint.resolve().parents[1] if checkpoint else None
    is_own = resumed == folder.resolve()
    has_results = earlier.model or earlier.metrics_bytes > 0
    if has_results and not (choice is True or is_own):
        to = "continue it" if earlier.checkpoints else "repeat it, as it left no checkpoint"
        raise UserError(
            f"{folder} already holds a run; set resume_from_checkpoint auto to {to}, or choose another output_dir"
        )
    day = run_on_main(lambda: template_date(resumed), accelerator)
    if resumed:
        report(compare_settings(settings, folder if is_own else resumed))
        report(run_on_main(lambda: changed_inputs(resumed, settings), accelerator))
    elif has_results:
        report(f"{folder} holds no checkpoint to resume from (see save_steps): starting with the first update")
    return checkpoint, is_own, day
