"""The models that are evaluated: opened one after the other, frozen, each with a short name of its own."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor

from align.config import ModelConfig
from align.distributed import compute_dtype, make_accelerator, map_shared
from align.errors import UserError
from align.eval.settings import EvalConfig
from align.generation import Responses, Sampling, sample
from align.models.loading import Loaded, load
from align.models.zoo import resolve_model

WEIGHTS = (".safetensors", ".bin", ".model")
ENDS = 1 << 20
"""Bytes at either end of a file of weights that a fingerprint reads."""


@dataclass(frozen=True)
class Subject:
    """A model under evaluation.

    Attributes:
        name: short and unique among the models of the evaluation; also good as a part of a file's name.
        fingerprint: tells this model from another one in the same place.
    """

    name: str
    loaded: Loaded
    source: str = ""
    fingerprint: str = ""


def open_accelerator(config: EvalConfig) -> Accelerator:
    """The processes that share an evaluation."""
    return make_accelerator(compute_dtype(config.dtype), max_grad_norm=0.0)


def subjects(config: EvalConfig, accelerator: Accelerator) -> Iterator[Subject]:
    """Open the models one at a time: frozen, in evaluation mode, on the accelerator's device.

    Raises:
        UserError: if there are none, or one cannot be loaded; names are checked before the first is opened.
    """
    if not config.models:
        raise UserError("models is empty: name at least one model to evaluate")
    sources = [str(resolve_model(model)) for model in config.models]
    for name, model, source in zip(short_names(config.models), config.models, sources, strict=True):
        settings = ModelConfig(model=model, chat_template=config.chat_template, dtype=config.dtype)
        loaded = load(settings, compute_dtype(config.dtype))
        loaded.backbone.to(accelerator.device).eval().requires_grad_(False)
        commit = getattr(loaded.backbone.model.config, "_commit_hash", None)
        yield Subject(name, loaded, model, fingerprint(source) or str(commit))
        del loaded  # before the next one is opened


def short_names(models: Sequence[str]) -> list[str]:
    """The shortest ends of the models' paths that tell them apart, with '-' for '/': runs/a/ppo/model is 'ppo'."""
    parts = []
    for model in models:
        words = [word for word in Path(model).parts if word not in ("/", ".", "..")]
        parts.append(words[:-1] if len(words) > 1 and words[-1] == "model" else words)
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["-".join(words[-length:]) for words in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number}-{name}" for number, name in enumerate(names, 1)]


def fingerprint(source: str) -> str:
    """12 hexadecimal digits of a SHA-256 over a model's folder or a file of data; '' for what is neither.

    It reads files of data whole. Of weights it reads the size and both ends: training changes them all, and a
    fingerprint of a large model takes no minutes.
    """
    place, digest = Path(source), hashlib.sha256()
    if not place.exists():
        return ""
    found = [place] if place.is_file() else [path for path in place.iterdir() if path.suffix in (*WEIGHTS, ".json")]
    for path in sorted(found):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode() if place.is_dir() else b"")
        with open(path, "rb") as file:
            if path.suffix not in WEIGHTS:
                digest.update(file.read())
                continue
            digest.update(file.read(ENDS))
            file.seek(max(0, size - ENDS))
            digest.update(file.read(ENDS))
    return digest.hexdigest()[:12]


def respond(
    subject: Subject, prompts: Sequence[list[int]], uniforms: Tensor, sampling: Sampling, accelerator: Accelerator
) -> Responses:
    """Sample a response to each prompt; the same on every process, however many share the work.

    Args:
        prompts: token ids of each prompt; repeat a prompt for several samples.
        uniforms: [rows, max_new_tokens] from `align.generation.noise`. A row's noise should come from what the row is,
            not from its place in this call, so that an evaluation that was broken off goes on with the same texts.
    """
    backbone, ends = subject.loaded.backbone, subject.loaded.tokenization.end_ids

    def work(rows: list[int]) -> list[tuple[list[int], bool]]:
        if not rows:
            return []
        found = sample(backbone, [prompts[row] for row in rows], uniforms[rows], sampling, ends)
        return list(zip(found.ids, found.ended, strict=True))

    results = map_shared(range(len(prompts)), work, accelerator)
    return Responses([ids for ids, _ in results], [ended for _, ended in results])
