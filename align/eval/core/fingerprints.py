"""Hashes of models, data and items, so that a stored result is never reused for different content."""

import hashlib
import json
from pathlib import Path

from align.core.files import resolve_path
from align.data.sources import ENDINGS

WEIGHTS = (".safetensors", ".bin", ".model")
MODEL_MARKERS = ("config.json", "adapter_config.json")
MODEL_FILES = (*WEIGHTS, ".json", ".jinja")
DATA_FILES = (*ENDINGS, ".arrow", *WEIGHTS)
WEIGHT_BYTES = 1 << 20
"""Bytes that a fingerprint reads at the beginning and at the end of a weights file."""


def fingerprint(source: str) -> str:
    """12 hexadecimal digits of a SHA-256 over a model's folder, a file of data or a folder of data files.

    Data files are hashed completely; of weights, only the size and both ends: training changes all of them, and reading a
    large model would take minutes. In a model's folder only the files directly in it count; in a folder of data, every
    data file at any depth, as `align.data.sources` reads it.

    Returns:
        The digits, or '' if `source` is empty or not on this machine (a hub name).
    """
    path, digest = resolve_path(source), hashlib.sha256()
    if not source or not path.exists():
        return ""
    for file in _hashed_files(path) if path.is_dir() else [path]:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path).as_posix()} {size} ".encode() if path.is_dir() else b"")
        with open(file, "rb") as stream:
            if file.suffix not in WEIGHTS:
                digest.update(stream.read())
                continue
            digest.update(stream.read(WEIGHT_BYTES))
            stream.seek(max(0, size - WEIGHT_BYTES))
            digest.update(stream.read(WEIGHT_BYTES))
    return digest.hexdigest()[:12]


def _hashed_files(folder: Path) -> list[Path]:
    is_model = any((folder / marker).is_file() for marker in MODEL_MARKERS)
    candidates = folder.iterdir() if is_model else folder.rglob("*")
    endings = MODEL_FILES if is_model else DATA_FILES
    return sorted(
        path
        for path in candidates
        if path.is_file()
        and path.name.lower().endswith(endings)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def text_hash(text: str) -> str:
    """SHA-256 of a text, which may hold unpaired surrogates: models do write them."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def content_hash(content: object) -> str:
    """16 hexadecimal digits of a SHA-256 over JSON values."""
    return text_hash(json.dumps(content))[:16]
