"""Checkpoints to resume from: float32 master weights, the optimizer's state and a stage's own progress."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from align.errors import UserError, first_line
from align.files import new_folder, read_json, write_json
from align.models.checkpoint import require_equal_file
from align.runtime.distributed import gather_rows, run_on_main
from align.training.checkpoint_files import checksum, forget_cached, keep_newest, write_checksums
from align.training.optimization import Optimization
from align.training.run import Run
from align.training.stored_state import WHOLE, Part, StoredState, part_file, save_parts


def save_checkpoint(
    run: Run,
    optimization: Optimization,
    update: int,
    progress: Mapping[str, Any],
    files: Mapping[str, dict[str, Tensor]] | None = None,
) -> None:
    """Write a checkpoint to resume from, completely or not at all; of a state that is sharded, each process writes its part.

    All is read back from the disk and compared, and only then are checkpoints beyond `keep_checkpoints` removed.

    Args:
        progress: what the stage needs to go on (the KL coefficient, the best evaluation); JSON values.
        files: further files of tensors by name, the same on every process; no tensor's name is in two files.
    """
    state, numbers = optimization.state()
    parts = {name: value for name, value in state.items() if isinstance(value, Part)}
    whole = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if run.is_main:
        target = run.folder / "checkpoints" / f"update-{update:06d}"
        with new_folder(target) as folder:
            known = _write_parts(run, parts, folder) if optimization.keeps_parts else {}
            for name, tensors in {WHOLE: whole, **(files or {})}.items():
                save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
                forget_cached(folder / name)
                require_equal_file(folder / name, tensors)
            write_json(folder / "trainer.json", {"update": update, "numbers": numbers, "progress": dict(progress)})
            write_checksums(folder, known)
        keep_newest(run.folder, run.config.keep_checkpoints)
    elif optimization.keeps_parts:
        _write_parts(run, parts)
    run.accelerator.wait_for_everyone()


def _write_parts(run: Run, parts: Mapping[str, Part], folder: Path = Path()) -> dict[str, dict[str, Any]]:
    """Write this process's part of a state; returns the checksums of the files of all processes, by name.

    Args:
        folder: as the first process has made it; the others hear of it.

    Raises:
        UserError: on every process, if one of them cannot write.
    """
    folder = Path(run_on_main(lambda: str(folder.absolute()), run.accelerator))
    name = part_file(run.accelerator.process_index, run.accelerator.num_processes)
    fault, written = "", dict[str, Any]()
    try:
        save_parts(folder / name, parts)
        written = checksum(folder / name)
    except (UserError, OSError, SafetensorError) as error:
        fault = f"{folder.parent}: {name} cannot be written ({first_line(error)})"
    everywhere = gather_rows([(name, written, fault)], run.accelerator)
    for _, _, found in everywhere:
        if found:
            raise UserError(found)
    return {name: sums for name, sums, _ in everywhere}


def load_checkpoint(run: Run, optimization: Optimization) -> tuple[int, dict[str, Any]]:
    """Restore the last complete checkpoint.

    Returns:
        The update after which it was written (0: there is none), and the stage's progress.

    Raises:
        UserError: if it is broken or belongs to another model.
    """
    if run.checkpoint is None:
        return 0, {}
    stored = read_json(run.checkpoint / "trainer.json")
    try:
        optimization.load_state(StoredState(run.checkpoint), stored["numbers"])
        update, progress = stored["update"], stored["progress"]
    except UserError as error:
        raise UserError(f"{run.checkpoint}: {error}") from error
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise UserError(f"{run.checkpoint}: broken ({type(error).__name__}: {error}); remove it to start anew") from error
    run.say(f"resumed from {run.checkpoint}")
    return update, progress
