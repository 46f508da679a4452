"""Checkpoints to resume from: float32 master weights, the optimizer's state and a stage's own progress."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from align.core.errors import UserError, reason
from align.core.files import new_folder, read_json, write_json
from align.models.checkpoint import require_equal_file
from align.runtime.distributed import run_on_all
from align.training.checkpoint_files import checksum, forget_cached, keep_newest, write_checksums
from align.training.optimization import Optimization
from align.training.run import Run
from align.training.stored_state import WHOLE, Part, StoredState, part_file, save_parts

Item = TypeVar("Item")


class _Contents(NamedTuple):
    """The tensors that this process writes into a checkpoint."""

    parts: Mapping[str, Part] | None
    """Its parts of a state that is sharded; None: the state is not."""
    files: Mapping[str, Mapping[str, Tensor]]
    """Whole tensors by the names of their files: the first process's."""
    trainer: Mapping[str, Any]

    def copied(self) -> "_Contents":
        """The same values in main memory, which no training changes."""
        parts = self.parts and {name: part._replace(values=_copy(part.values)) for name, part in self.parts.items()}
        files = {name: {key: _copy(value) for key, value in tensors.items()} for name, tensors in self.files.items()}
        return _Contents(parts, files, copy.deepcopy(self.trainer))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def save_checkpoint(
    run: Run,
    optimization: Optimization,
    update: int,
    progress: Mapping[str, Any],
    files: Mapping[str, dict[str, Tensor]] | None = None,
) -> None:
    """Write a checkpoint to resume from, completely or not at all; of a state that is sharded, each process writes its part.

    All is read back from the disk and compared, and only then are checkpoints beyond `keep_checkpoints` removed. With
    `checkpoint_in_background` this returns when the state is copied, and `run.background` has the rest.

    Args:
        progress: what the stage needs to go on (the KL coefficient, the best evaluation); JSON values.
        files: further files of tensors by name, the same on every process; no tensor's name is in two files.
    """
    run.background.finish()  # before there is a second copy
    target = run.folder / "checkpoints" / f"update-{update:06d}"
    in_background, contents = run.config.checkpoint_in_background, list[_Contents]()

    def collect() -> None:
        state, numbers = optimization.state()
        parts = {name: value for name, value in state.items() if isinstance(value, Part)}
        whole = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        found = _Contents(
            parts if optimization.keeps_parts else None,
            {WHOLE: whole, **(files or {})} if run.is_main else {},
            {"update": update, "numbers": numbers, "progress": dict(progress)},
        )
        contents.append(found.copied() if in_background else found)

    _on_all(collect, run, target, None)
    if in_background:
        group = run.background.group()
        run.background.start(lambda: _write(run, target, contents[0], group))
    else:
        _write(run, target, contents[0])


def _write(run: Run, target: Path, contents: _Contents, group: ProcessGroup | None = None) -> None:
    """Write a checkpoint with all processes, in steps of which none begins before the one before it has ended everywhere.

    Args:
        group: as the processes reach each other; None: as the run does.

    Raises:
        UserError: on every process, if one of them cannot write.
    """

    def together(step: Callable[[], Item]) -> list[Item]:
        return _on_all(step, run, target, group)

    with ExitStack() as unnamed:
        made = together(lambda: str(unnamed.enter_context(new_folder(target)).absolute()) if run.is_main else "")
        folder = Path(made[0])
        written = together(lambda: _write_own(run, folder, contents))

        def name_it() -> None:
            if run.is_main:
                write_json(folder / "trainer.json", contents.trainer)
                write_checksums(folder, {name: sums for files in written for name, sums in files.items()})
                unnamed.close()
                keep_newest(run.folder, run.config.keep_checkpoints)

        together(name_it)


def _on_all(step: Callable[[], Item], run: Run, target: Path, group: ProcessGroup | None) -> list[Item]:
    """Do a step on every process; returns the results of all of them, or raises a UserError that names `target` on each."""

    def named() -> Item:
        try:
            return step()
        except UserError:
            raise
        except Exception as error:
            what = getattr(error, "strerror", None) or reason(error)
            raise UserError(f"{target}: cannot be written ({what}); nothing was changed there") from error

    return run_on_all(named, run.accelerator, group)


def _write_own(run: Run, folder: Path, contents: _Contents) -> dict[str, dict[str, Any]]:
    """Write this process's files, read them back and compare; returns their checksums by name."""
    names = list(contents.files)
    if contents.parts is not None:
        names.append(part_file(run.accelerator.process_index, run.accelerator.num_processes))
        save_parts(folder / names[-1], contents.parts)
    for name, tensors in contents.files.items():
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
        forget_cached(folder / name)
        require_equal_file(folder / name, tensors)
    return {name: checksum(folder / name) for name in names}


def load_checkpoint(run: Run, optimization: Optimization) -> tuple[int, dict[str, Any]]:
    """Restore the last complete checkpoint.

    Returns:
        The update after which it was written (0: there is none), and the stage's progress.

    Raises:
        UserError: on every process, if one of them cannot load it, or it belongs to another model.
    """
    checkpoint = run.checkpoint
    if checkpoint is None:
        return 0, {}

    def load() -> tuple[int, dict[str, Any]]:
        with restoring(run):
            stored = read_json(checkpoint / "trainer.json")
            optimization.load_state(StoredState(checkpoint), stored["numbers"])
            return stored["update"], stored["progress"]

    update, progress = run_on_all(load, run.accelerator)[0]
    optimization.compute_with_masters()
    run.say(f"resumed from {checkpoint}")
    return update, progress


@contextmanager
def restoring(run: Run) -> Iterator[None]:
    """Turn the errors of restoring state from the run's checkpoint into a UserError that names it.

    Its checksums were right when the run began: no message advises removing it.
    """
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
