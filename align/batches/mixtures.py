"""Weighted sources of training data and their task prefixes."""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from align.core.errors import UserError, counted
from align.data.records import Record
from align.data.sources import split_sources

logger = logging.getLogger(__name__)
Encoded = TypeVar("Encoded")
Records = str | Sequence[Record | Mapping[str, Any] | str]


@dataclass(frozen=True)
class Prefixed:
    """A source whose prompts get a task prefix, as in T5 (Raffel et al. 2020, section 2.4)."""

    source: Records | Path
    prefix: str


Data = Records | Path | Prefixed
"""Source of records: file, folder or Hub id; or records in memory, as `align.data` records or as rows (dicts) in any
supported layout. A string in a list is a prompt. May be wrapped in `Prefixed`.
"""


@dataclass(frozen=True)
class Mixture:
    """Several sources of training data with their relative sampling weights."""

    sources: Sequence[Data]
    weights: Sequence[float]


TrainingData = Data | Mixture


def split_prefix(data: Data) -> tuple[Records, str]:
    """Return a source, as a string if it is a path, and its prefix ("" if none)."""
    source, prefix = (data.source, data.prefix) if isinstance(data, Prefixed) else (data, "")
    return (str(source) if isinstance(source, Path) else source), prefix


def data_name(data: TrainingData) -> str:
    """Return the name of training data for settings and model cards."""
    if isinstance(data, Mixture):
        return ", ".join(f"{data_name(part)}={weight:g}" for part, weight in zip(data.sources, data.weights, strict=True))
    records, _ = split_prefix(data)
    if isinstance(records, str | Path):
        return str(records)
    return f"{counted(len(records), 'record')} in memory" if is_given(data) else ""


def is_given(data: TrainingData) -> bool:
    """Return whether data is set. Arrays and tensors have a length, but no truth value."""
    return len(data) > 0 if hasattr(data, "__len__") else bool(data)


class MixedExamples(NamedTuple, Generic[Encoded]):
    """Training examples of several sources, concatenated."""

    examples: list[Encoded]
    sizes: list[int]
    """Number of examples per source."""
    weights: list[float]
    """Weight per source, see `Mixture`."""


class HasOpening(Protocol):
    """An encoded example or prompt, see `align.tokenization.encoded.opening_digest`."""

    @property
    def opening(self) -> int:
        """64 bits that depend only on the first user turn."""


Opened = TypeVar("Opened", bound=HasOpening)


def split_by_opening(examples: Sequence[Opened], share: float) -> tuple[list[Opened], list[Opened]]:
    """Split into training and held-out examples by prompt. At least one prompt is held out unless the fraction is 0.

    The digest of a conversation's first user turn decides. A prompt is on the same side in every stage and run, even
    after rows are added, and conversations with the same beginning stay together.
    """
    if not share or not examples:
        return list(examples), []
    limit = max(share * 2**64, min(example.opening for example in examples) + 1)
    training = [example for example in examples if example.opening >= limit]
    if not training:
        every = f"{len(examples)} of {counted(len(examples), 'example')}"
        raise UserError(f"validation_split {share:g} holds out {every}; lower it or add prompts")
    return training, [example for example in examples if example.opening < limit]


def hold_out(mixed: MixedExamples[Opened], share: float) -> tuple[MixedExamples[Opened], list[Opened]]:
    """Return a mixture without the held-out examples of `split_by_opening`, and the held-out examples of all sources."""
    training, validation = split_by_opening(mixed.examples, share)
    held_out = {example.opening for example in validation}
    sizes = []
    for start, size in zip(accumulate(mixed.sizes, initial=0), mixed.sizes, strict=False):
        sizes.append(sum(example.opening not in held_out for example in mixed.examples[start : start + size]))
        if size and not sizes[-1]:
            every = f"{size} of {counted(size, 'example')} of a source"
            raise UserError(f"validation_split {share:g} holds out {every}; lower it")
    return MixedExamples(training, sizes, mixed.weights), validation


def encode_mixture(
    data: TrainingData, encode: Callable[[Data], list[Encoded]], prefixes: Sequence[str] = ()
) -> MixedExamples[Encoded]:
    """Encode one or several sources and concatenate them. Arguments as in `mixture_of`."""
    data = mixture_of(data, prefixes)
    encoded = [encode(source) for source in data.sources]
    examples = [example for part in encoded for example in part]
    return MixedExamples(examples, list(map(len, encoded)), list(data.weights))


def encode_split(
    train_data: TrainingData,
    validation_data: Data,
    encode: Callable[[Data], list[Opened]],
    prefixes: Sequence[str],
    share: float,
) -> tuple[MixedExamples[Opened], list[Opened]]:
    """Return training and validation examples. Without validation data, hold out a fraction of the training data."""
    mixed, held_out = hold_out(encode_mixture(train_data, encode, prefixes), share)
    if is_given(validation_data):
        held_out = encode(validation_data)
        if os.environ.get("RANK", "0") == "0" and (warning := seen_warning(mixed.examples, held_out)):
            logger.warning("%s: %s", data_name(validation_data), warning)
    return mixed, held_out


def seen_warning(training: Sequence[Any], held_out: Sequence[Any]) -> str:
    """Return a warning with the number of held-out examples that also occur in the training data, or ""."""

    def content(example: Any) -> int:
        responses = example.responses if hasattr(example, "responses") else [example.response]
        return hash((example.opening, frozenset(map(tuple, responses))))

    known = set(map(content, training))
    seen = sum(content(example) in known for example in held_out)
    if not seen:
        return ""
    share = f"{seen} of {counted(len(held_out), 'validation example')}"
    return f"the training data contains {share}, so validation/loss does not measure generalization"


def mixture_of(data: TrainingData, prefixes: Sequence[str] = ()) -> Mixture:
    """Convert training data to weighted sources.

    Args:
        data: one source, several, or the names of several (`split_sources`), each as NAME or NAME=WEIGHT.
        prefixes: prompt prefix of each source, "" for none. If empty, no source has a prefix.
    """
    if isinstance(data, str | Path):
        data = Mixture(*zip(*map(_weighted, split_sources(str(data))), strict=True))
    elif not isinstance(data, Mixture):
        data = Mixture([data], [1.0])
    if not prefixes:
        return data
    if len(prefixes) != len(data.sources):
        counts = f"{len(prefixes)} for {len(data.sources)} of train_data"
        raise UserError(f"task_prefixes must contain one prefix per source ('' for none), but has {counts}")
    pairs = zip(data.sources, prefixes, strict=True)
    return Mixture([Prefixed(split_prefix(source)[0], text) if text else source for source, text in pairs], data.weights)


def _weighted(name: str) -> tuple[str, float]:
    source, equals, weight = name.rpartition("=")
    if not equals:
        return name, 1.0
    try:
        value = float(weight)
    except ValueError:
        return name, 1.0  # an equals sign in the name
    if not (0 < value < math.inf):
        raise UserError(f"{name}: source weights must be numbers above 0")
    return source, value
