"""Append-only store of results per item. A resumed evaluation computes only missing ones."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from align.core.errors import UserError
from align.core.files import append_line, resolve_path
from align.runtime.distributed import run_on_main
from align.runtime.progress import ProgressDisplay

Json = dict[str, Any]
CHUNK = 64
"""Number of items computed between writes."""


def compute_once(
    path: Path,
    settings: Mapping[str, Any],
    items: Mapping[str, Any],
    compute: Callable[[list[Any]], Sequence[Json]],
    accelerator: Accelerator,
    chunk: int = CHUNK,
    content: Callable[[Any], object] | None = None,
) -> list[Json]:
    """Compute the results that are missing in a file, append them, and return all results in order.

    The first line of the file holds the settings that affect results. Each further line is `{"item": id, ...}`; the later
    of two lines with the same id counts. A last line that was truncated by a kill is dropped. Every process returns the
    results; the main process writes them.

    Args:
        items: items by id.
        compute: maps `chunk` items, the same on every process, to one row of JSON values for each.
        content: returns the inputs of an item's result as JSON values. Their hash is stored; results of other content
            are recomputed. If None, the id identifies the content.

    Raises:
        UserError: if the file has results of other settings or cannot be written, or a result is not finite.
    """
    valid_for: Json = json.loads(json.dumps(dict(settings)))
    # Only one process reads the disk, so that all agree on the missing items.
    results: dict[str, Json] = run_on_main(lambda: _open(path, valid_for), accelerator)
    hashes = {name: content_hash(content(item)) for name, item in items.items()} if content else {}
    missing = [name for name in items if name not in results or results[name].get("content") != hashes.get(name)]
    stored, is_main = len(items) - len(missing), accelerator.is_main_process
    with ProgressDisplay(path.stem, len(items), stored, enabled=is_main, transient=True) as progress:
        for start in range(0, len(missing), chunk):
            names = missing[start : start + chunk]
            for name, row in zip(names, compute([items[name] for name in names]), strict=True):
                row = {"content": hashes[name], **row} if content else row
                if accelerator.is_main_process:
                    _append(path, {"item": name, **row})
                results[name] = json.loads(json.dumps(row))
            progress.advance(len(names))
    return [results[name] for name in items]


def _open(path: Path, settings: Json) -> dict[str, Json]:
    """Read the results in a file by item. An empty file gets a settings line."""
    rows = _read_lines(path) if path.exists() else []
    if not rows:
        _append(path, {"settings": settings})
        return {}
    stored = rows[0].get("settings", {})
    changed = [key for key in {**stored, **settings} if stored.get(key) != settings.get(key)]
    if changed:
        difference = f"{changed[0]} {stored.get(changed[0])!r}, not {settings.get(changed[0])!r}"
        raise UserError(f"{path} contains results with {difference}; choose another output folder or delete the file")
    return {row.pop("item"): row for row in rows[1:]}


def _read_lines(path: Path) -> list[Json]:
    lines = path.read_bytes().splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number + 1 < len(lines):
                raise UserError(f"{path}:{number + 1}: not JSON ({error}); delete the file to start from scratch") from error
            os.truncate(path, sum(map(len, lines[:-1])))  # killed in the middle of the last line
    return rows


def _append(path: Path, row: Json) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    except ValueError as error:
        raise UserError(f"{path.stem}: a result is NaN or infinite; completed results are saved") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error


WEIGHTS = (".safetensors", ".bin", ".model", ".pt", ".pth", ".h5", ".msgpack", ".ot", ".onnx", ".gguf")


@lru_cache
def _weights_digest(path: Path, size: int, changed: int) -> bytes:
    """Return the SHA-256 of a weights file, cached by size and modification time."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def fingerprint(source: str) -> str:
    """Return 12 hex digits of the SHA-256 of a file or folder, '' if `source` is empty or not local.

    Hidden files, the model card and subfolders of a model's folder are ignored.
    """
    path, digest = resolve_path(source), hashlib.sha256()
    if not source or not path.exists():
        return ""
    is_model = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    for file in sorted(path.glob("*") if is_model else path.rglob("*")) if path.is_dir() else [path]:
        name = file.relative_to(path) if path.is_dir() else Path()
        if not file.is_file() or file.suffix == ".md" or any(part.startswith(".") for part in name.parts):
            continue
        stat = file.stat()
        digest.update(f"{name.as_posix()} {stat.st_size} ".encode())
        if file.suffix in WEIGHTS:
            digest.update(_weights_digest(file.resolve(), stat.st_size, stat.st_mtime_ns))
        else:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def content_hash(content: object) -> str:
    """Return 16 hex digits of the SHA-256 of JSON values. Strings may contain lone surrogates, which models can generate."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
