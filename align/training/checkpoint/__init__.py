"""Checkpoints to resume from: float32 master weights, the optimizer's state and a stage's own progress.

`save` and `load` are called by every process. `files` has checksums and retention, `state` the tensors on disk,
`consolidation` the way from a checkpoint to a model folder.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from align.core.errors import UserError, reason
from align.core.files import new_folder, read_json, write_json
from align.models.checkpoint import require_equal_file
from align.runtime.distributed import largest, run_on_all
from align.training.checkpoint.files import checksum, forget_cached, keep_newest, write_checksums
from align.training.checkpoint.state import WHOLE, Part, StoredState, part_file, tensors_of_parts

if TYPE_CHECKING:
    from align.training.optimization import Optimization
    from align.training.run import Run

Item = TypeVar("Item")


class _Contents(NamedTuple):
    """What this process writes into a checkpoint."""

    parts: Mapping[str, Part] | None
    """Its parts of a sharded state; None if the state is not sharded."""
    files: Mapping[str, Mapping[str, Tensor]]
    """Whole tensors by file name; only on the first process."""
    trainer: Mapping[str, Any]

    def copied(self) -> "_Contents":
        """A copy in main memory, which training does not change."""
        parts = self.parts and {name: part._replace(values=_copy(part.values)) for name, part in self.parts.items()}
        files = {name: {key: _copy(value) for key, value in tensors.items()} for name, tensors in self.files.items()}
        return _Contents(parts, files, copy.deepcopy(self.trainer))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def save(
    run: "Run",
    optimization: "Optimization",
    update: int,
    progress: Mapping[str, Any],
    files: Mapping[str, dict[str, Tensor]] | None = None,
) -> None:
    """Write a checkpoint under a temporary name and rename it. Each process writes its part of a sharded state.

    All files are read back from the disk and compared. Only then are checkpoints beyond `keep_checkpoints` removed. With
    `checkpoint_in_background` this returns as soon as the state is copied.

    Args:
        progress: the stage's own state (KL coefficient, best evaluation) as JSON values.
        files: further tensors by file name, the same on every process; no tensor name occurs in two files.
    """
    run.background.finish()  # before there is a second copy
    target = run.folder / "checkpoints" / f"update-{update:06d}"
    in_background = run.config.checkpoint_in_background

    def collect() -> _Contents:
        state, numbers = optimization.state()
        parts = {name: value for name, value in state.items() if isinstance(value, Part)}
        whole = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        found = _Contents(
            parts if optimization.keeps_parts else None,
            {WHOLE: whole, **(files or {})} if run.is_main else {},
            {"update": update, "numbers": numbers, "progress": dict(progress)},
        )
        return found.copied() if in_background else found

    collected: list[_Contents] = []
    _on_all(lambda: collected.append(collect()), run, target, None)
    if in_background:
        group = run.background.group()
        run.background.start(lambda: _write(run, target, collected[0], group))
    else:
        _write(run, target, collected[0], None)


def _write(run: "Run", target: Path, contents: _Contents, group: ProcessGroup | None) -> None:
    """Write a checkpoint with all processes; no step begins before the previous one has ended on every process."""
    with ExitStack() as unnamed:

        def make() -> str:
            return str(unnamed.enter_context(new_folder(target)).absolute()) if run.is_main else ""

        folder = Path(_on_all(make, run, target, group)[0])
        written = _on_all(lambda: _write_own(run, folder, contents), run, target, group)

        def finish() -> None:
            if run.is_main:
                write_json(folder / "trainer.json", contents.trainer)
                write_checksums(folder, {name: sums for files in written for name, sums in files.items()})
                unnamed.close()
                keep_newest(run.folder, run.config.keep_checkpoints)

        _on_all(finish, run, target, group)


def _on_all(step: Callable[[], Item], run: "Run", target: Path, group: ProcessGroup | None) -> list[Item]:
    """Run a step on every process; an error of one becomes a UserError that names `target` on all."""

    def named() -> Item:
        try:
            return step()
        except UserError:
            raise
        except Exception as error:
            what = getattr(error, "strerror", None) or reason(error)
            raise UserError(f"{target}: cannot be written ({what}); nothing was changed there") from error

    return run_on_all(named, run.accelerator, group)


def _write_own(run: "Run", folder: Path, contents: _Contents) -> dict[str, dict[str, Any]]:
    """Write this process's files, read them back and compare; return their checksums by name."""
    files: dict[str, tuple[Mapping[str, Tensor], dict[str, str] | None]] = {
        name: (tensors, None) for name, tensors in contents.files.items()
    }
    if contents.parts is not None:
        name = part_file(run.accelerator.process_index, run.accelerator.num_processes)
        files[name] = tensors_of_parts(contents.parts)
    for name, (tensors, metadata) in files.items():
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name, metadata=metadata)
        forget_cached(folder / name)
        require_equal_file(folder / name, tensors)
    return {name: checksum(folder / name) for name in files}


def load(run: "Run", optimization: "Optimization") -> tuple[int, dict[str, Any]]:
    """Restore the run's last complete checkpoint.

    Returns:
        The update after which it was written (0 if there is none), and the stage's progress.

    Raises:
        UserError: on every process, if one of them cannot load it, or it belongs to another model.
    """
    folder = run.checkpoint
    if folder is None:
        return 0, {}

    def read() -> tuple[int, dict[str, Any]]:
        with restoring(run):
            stored = read_json(folder / "trainer.json")
            optimization.load_state(StoredState(folder), stored["numbers"])
            return stored["update"], stored["progress"]

    update, progress = run_on_all(read, run.accelerator)[0]
    optimization.compute_with_masters()
    run.say(f"resumed from {folder}")
    return update, progress


@contextmanager
def restoring(run: "Run") -> Iterator[None]:
    """Turn errors of restoring state into a UserError that names the checkpoint, whose checksums were right before."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{run.checkpoint}: {error}") from error
    except OSError as error:
        what = error.strerror or reason(error)
        raise UserError(f"{run.checkpoint}: cannot be read ({what}), and was whole before; check the disk") from error
    except SafetensorError as error:
        raise UserError(
            f"{run.checkpoint}: cannot be loaded ({reason(error)}), although its files are as they were written; keep it, "
            "and resume with the version of align that wrote it (environment.json)"
        ) from error
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{run.checkpoint}: it lacks state that this version needs ({type(error).__name__}: {error}); resume it with "
            "the settings and the version of align that wrote it (config.yaml, environment.json)"
        ) from error


class BackgroundWork:
    """One piece of work at a time in a thread of each process; all processes start it and wait for it together.

    The thread is no daemon: it finishes even if the run ends by an error.

    Args:
        timeout: seconds that a thread waits for the other processes' threads in one exchange.
    """

    def __init__(self, accelerator: Accelerator, timeout: float) -> None:
        self.accelerator, self.timeout = accelerator, timeout
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._group: ProcessGroup | None = None

    def group(self) -> ProcessGroup | None:
        """The threads' own process group, separate from the training's exchanges; None for a single process."""
        if self._group is None and self.accelerator.num_processes > 1:
            self._group = torch.distributed.new_group(timeout=timedelta(seconds=self.timeout), backend="gloo")
        return self._group

    def start(self, work: Callable[[], None]) -> None:
        """Start some work, after the previous one has ended."""
        self.finish()
        self._thread = threading.Thread(target=self._do, args=(work,), name="background work")
        self._thread.start()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # raised by `check` or `finish`
            self._error = error

    def check(self) -> None:
        """Raise the work's error if the work has ended on all processes; do not wait for it."""
        if self._thread and not largest(int(self._thread.is_alive()), self.accelerator):
            self.finish()

    def finish(self) -> None:
        """Wait for the work, and raise its error."""
        thread, self._thread = self._thread, None
        if thread:
            thread.join()
        error, self._error = self._error, None
        if error:
            raise error
