"""Checkpoints to resume from: float32 master weights, the optimizer's state and the state of a stage's other parts.

A checkpoint is the folder `checkpoints/update-NNNNNN` of a run:

    state.safetensors        masters and optimizer state, or state-RANK-of-COUNT.safetensors: each process's shards
    trainer.json             update, numbers of the optimizer's state, and the parts' states as JSON
    <part>.safetensors       tensors in the state of a part, if it has any
    checksums.json           size and SHA-256 of each file

`files` has checksums and retention, `state` the engine's tensors on disk, `consolidation` the conversion to a model folder.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from align.core.errors import UserError, reason
from align.core.files import new_folder, read_json, write_json
from align.models.checkpoint import require_equal_file
from align.runtime.distributed import run_on_all
from align.training.checkpoint.files import checksum, drop_page_cache, rotate_checkpoints, write_checksums
from align.training.checkpoint.state import STATE_FILE, FlatTensorSlice, StoredState, shard_file, tensors_of_shards
from align.training.engine import TrainEngine
from align.training.run import Run

Item = TypeVar("Item")
MODELS = "models"
"""Name of the digests of loaded models, which older checkpoints lack."""
NOT_REQUIRED = ("callbacks", MODELS)
"""Optional objects on resuming: their states do not affect weights."""
Files = dict[str, tuple[Mapping[str, Tensor], dict[str, str] | None]]
"""The files that one process writes, by name: tensors, and the metadata in their header."""


class Stateful(Protocol):
    """A part of a stage whose state a checkpoint must hold in addition to the engine's."""

    def state_dict(self) -> Any:
        """Return JSON values, or a dict whose values are JSON values and tensors that are the same on every process.

        Tensors must be at the top level of the dict. Before the first optimizer step of an update they must be replaced,
        not changed in place, because a stop may save the state from the beginning of the update.
        """

    def load_state_dict(self, state: Any) -> None:
        """Restore the state returned by `state_dict`. Every process calls this."""


class Checkpoint:
    """Saves and restores the engine and the other stateful objects of a run, by name. Every process calls all methods."""

    def __init__(self, run: Run, engine: TrainEngine, stateful: Mapping[str, Stateful]) -> None:
        self.run, self.engine, self.stateful = run, engine, {**stateful, MODELS: run.models}
        if run.callbacks:
            self.stateful["callbacks"] = run.callbacks

    def states(self) -> dict[str, Any]:
        """Return the objects' current states. JSON values are copied; tensors are not, because only a step changes them."""
        states = {name: part.state_dict() for name, part in self.stateful.items()}
        kept = {id(tensor): tensor for state in states.values() for tensor in _tensors_in(state).values()}
        return copy.deepcopy(states, kept)

    def save(self, update: int, states: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint under a temporary name and rename it. Each process writes its part of a sharded state.

        All files are read back from the disk and compared. Only then are checkpoints beyond `save_total_limit` removed.
        `states` of the parts are given if they are not the current ones.
        """
        run, target = self.run, self.run.folder / "checkpoints" / f"update-{update:06d}"
        files: Files = {}
        trainer: dict[str, Any] = {}

        def collect() -> None:
            contents = self._contents(update, self.states() if states is None else states)
            files.update(contents[0])
            trainer.update(contents[1])

        def make() -> str:
            return str(unnamed.enter_context(new_folder(target)).absolute()) if run.is_main else ""

        def finish() -> None:
            if run.is_main:
                write_json(folder / "trainer.json", trainer)
                write_checksums(folder, {name: sums for part in written for name, sums in part.items()})
                unnamed.close()
                rotate_checkpoints(run.folder, run.config.save_total_limit)

        with ExitStack() as unnamed:  # each step starts only after all processes finish the previous one
            _on_all(collect, run, target)
            folder = Path(_on_all(make, run, target)[0])
            written = _on_all(lambda: _write_own(folder, files), run, target)
            _on_all(finish, run, target)

    def _contents(self, update: int, states: Mapping[str, Any]) -> tuple[Files, dict[str, Any]]:
        state, numbers = self.engine.state()
        complete = {STATE_FILE: {name: value for name, value in state.items() if isinstance(value, Tensor)}}
        json_states = dict(states)
        for name, values in states.items():
            if tensors := _tensors_in(values):
                complete[f"{name}.safetensors"] = tensors
                json_states[name] = {key: value for key, value in values.items() if key not in tensors}
        files: Files = {name: (tensors, None) for name, tensors in complete.items()} if self.run.is_main else {}
        if self.engine.keeps_shards:
            accelerator = self.run.accelerator
            shards = {name: value for name, value in state.items() if isinstance(value, FlatTensorSlice)}
            files[shard_file(accelerator.process_index, accelerator.num_processes)] = tensors_of_shards(shards)
        with_tensors = sorted(complete.keys() - {STATE_FILE})
        return files, {"update": update, "numbers": numbers, "states": json_states, "with_tensors": with_tensors}

    def load(self) -> int:
        """Restore the run's last complete checkpoint; return the update after which it was written, 0 if there is none.

        Raise a UserError, on every process, if one of them cannot load it, it belongs to another model or other data, or
        this run has already trained. It would start at update 1 with trained weights.
        """
        run, folder = self.run, self.run.checkpoint
        if run.update:
            raise UserError(
                "this trainer has trained; make a new one, with resume_from_checkpoint to continue the run, or with another "
                "output_dir to train the model further"
            )
        if folder is None:
            return 0
        tensors: dict[str, dict[str, Tensor]] = {}

        def read() -> dict[str, Any]:
            with restoring(run):
                stored: dict[str, Any] = read_json(folder / "trainer.json")
                self.engine.load_state(StoredState(folder), stored["numbers"])
                tensors.update({file: load_file(folder / file) for file in stored["with_tensors"]})
            return stored

        stored = run_on_all(read, run.accelerator)[0]
        self.engine.copy_masters_to_weights()  # under ZeRO, processes exchange them
        with restoring(run):
            for name, state in stored["states"].items():
                if name not in self.stateful:
                    if name in NOT_REQUIRED:
                        continue
                    raise UserError(
                        f"it holds the state of '{name}', which these settings do not use; resume with those of the run"
                    )
                extra = tensors.get(f"{name}.safetensors")
                self.stateful[name].load_state_dict({**state, **extra} if extra else state)
        for name in self.stateful.keys() - stored["states"].keys() - {MODELS}:
            run.print(f"{folder} has no state of '{name}', which starts from its initial state")
        run.print(f"resumed from {folder}")
        return int(stored["update"])


def _tensors_in(state: Any) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)} if isinstance(state, dict) else {}


def _on_all(step: Callable[[], Item], run: Run, target: Path) -> list[Item]:
    """Run a step on every process; an error of one becomes a UserError that names `target` on all."""

    def named() -> Item:
        try:
            return step()
        except UserError:
            raise
        except Exception as error:
            what = getattr(error, "strerror", None) or reason(error)
            raise UserError(f"{target}: cannot be written ({what}); the old contents are unchanged") from error

    return run_on_all(named, run.accelerator)


def _write_own(folder: Path, files: Files) -> dict[str, dict[str, Any]]:
    """Write this process's files, read them back and compare; return their checksums by name."""
    for name, (tensors, metadata) in files.items():
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name, metadata=metadata)
        drop_page_cache(folder / name)
        require_equal_file(folder / name, tensors)
    return {name: checksum(folder / name) for name in files}


@contextmanager
def restoring(run: Run) -> Iterator[None]:
    """Convert errors while restoring state to a UserError that names the checkpoint, whose checksums were valid."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{run.checkpoint}: {error}") from error
    except OSError as error:
        what = error.strerror or reason(error)
        raise UserError(
            f"{run.checkpoint}: cannot be read ({what}), but its checksums matched before; check the disk"
        ) from error
    except SafetensorError as error:
        raise UserError(
            f"{run.checkpoint}: checksums match but parsing failed ({reason(error)}); it was probably written by another "
            "version of align: resume with that version (environment.json)"
        ) from error
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{run.checkpoint}: missing state that this version needs ({type(error).__name__}: {error}); resume it with "
            "the settings and the version of align that wrote it (config.yaml, environment.json)"
        ) from error
