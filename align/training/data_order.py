"""The examples of each update: passes over one set of examples, or over a mixture of several."""

import copy
import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy

from align.batches.encoding import Limits
from align.batches.mixtures import MixedExamples
from align.core.errors import UserError
from align.core.seeds import RngStream, generator
from align.core.settings import Overlong, Settings, option

Example = TypeVar("Example")
Other = TypeVar("Other")

LABELS = "labels"
"""The digest of the labels in the state of a `DataOrder`."""
LABEL_FIELDS = ("ranks", "margin", "preferences", "rules", "targets", "attributes")
"""The labels of all kinds of examples, besides `loss_mask`."""
PLANNED_UPDATES = 200
"""Maximum number of updates that are searched for the largest micro-batch."""


@dataclass(kw_only=True)
class EpochConfig(Settings):
    """Settings of stages that train for epochs on a fixed data set."""

    help_title = "epochs and limits"

    num_train_epochs: int = option(1, "Number of training epochs.", gt=0)
    batch_size: int = option(16, "Examples per update, over all processes.", gt=0)
    max_prompt_tokens: int = option(1024, "Maximum prompt length, in tokens.", gt=0)
    max_response_tokens: int = option(1024, "Maximum response length, in tokens.", gt=0)
    overlong: Overlong = option(
        "error", "How to handle longer examples: raise an error, drop the record, or truncate the text."
    )
    eval_steps: int = option(0, "Number of updates between evaluations. 0 evaluates after each epoch.", ge=0)

    @property
    def limits(self) -> Limits:
        """Length limits of prompts and responses."""
        return Limits(self.max_prompt_tokens, self.max_response_tokens, self.overlong)


class DataOrder(Generic[Example]):
    """The order of training examples, which checkpoints store.

    An epoch has as many examples as all sources together. The rate of a source is its fraction of the epoch, as in T5
    (Raffel et al. 2020, section 3.5.2). It is weight x min(examples, cap), to the power 1 / temperature, divided by the sum
    over all sources. A source that an epoch does not cover exactly once continues in the next epoch where it stopped, and
    starts again in a new order after its last example. With the default rates, an epoch is one pass over all examples.

    Args:
        mixed: the examples of all sources.
        batch_size: number of examples per update.
        cap: maximum size that counts for the rate of a source, in examples. 0 for no limit.
        temperature: temperature of the rates. 1 makes them proportional to source size.

    Attributes:
        counts: number of examples of each source per epoch.

    Raises:
        UserError: if a rate is so low that a source has no examples in an epoch.
    """

    def __init__(
        self, mixed: MixedExamples[Example], seed: int, batch_size: int, cap: int = 0, temperature: float = 1.0
    ) -> None:
        self.examples, self.sizes, weights = mixed
        self.seed, self.batch_size = seed, batch_size
        self.updates_per_epoch = math.ceil(len(self.examples) / batch_size)
        self.counts = _counts(self.sizes, weights, cap, temperature)
        self.digest, self.labels = examples_digest(self.examples), labels_digest(self.examples)

    def updates(self, epochs: int) -> int:
        """Return the number of updates in `epochs` epochs."""
        return epochs * self.updates_per_epoch

    def batch(self, update: int) -> list[Example]:
        """Return the examples of an update, counted from 1."""
        return [self.examples[row] for row in self.rows(update)]

    def over(self, examples: list[Other]) -> "DataOrder[Other]":
        """Return this order over other examples that correspond to these one by one."""
        order = cast(DataOrder[Other], copy.copy(self))
        order.examples = examples
        return order

    def first_batches(self) -> Iterator[list[Example]]:
        """Yield the batches of the first epoch, at most `PLANNED_UPDATES`."""
        for update in range(1, min(PLANNED_UPDATES, self.updates_per_epoch) + 1):
            yield self.batch(update)

    def rows(self, update: int) -> list[int]:
        """Return the indices of the examples of an update, counted from 1."""
        epoch, place = divmod(update - 1, self.updates_per_epoch)
        drawn = numpy.concatenate([self._drawn(source, epoch) for source in range(len(self.sizes))])
        order = generator(self.seed, RngStream.DATA_ORDER, epoch).permutation(len(drawn))
        rows: list[int] = drawn[order[place * self.batch_size :][: self.batch_size]].tolist()
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the identity of the examples. The update number determines the examples of an update."""
        identity = {"examples": len(self.examples), "digest": self.digest, LABELS: self.labels}
        return identity | {"sizes": self.sizes, "counts": self.counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise a UserError if the examples differ from a checkpoint's. Older checkpoints have no digest of the labels."""
        require_same_examples("the training examples", {LABELS: self.labels, **state}, self.state_dict())

    def _drawn(self, source: int, epoch: int) -> numpy.ndarray:
        """Return a source's part of an epoch: full passes, and partial passes in a separate order."""
        size, count = self.sizes[source], self.counts[source]
        start, stop = epoch * count, (epoch + 1) * count
        parts = []
        for number in range(start // size, math.ceil(stop / size)):
            first, last = max(start - number * size, 0), min(stop - number * size, size)
            is_complete = last - first == size
            one_pass = (
                numpy.arange(size)
                if is_complete  # the order within an epoch is drawn at its end
                else generator(self.seed, RngStream.MIXTURE_ORDER, source, number).permutation(size)
            )
            parts.append(one_pass[first:last])
        return numpy.concatenate(parts) + sum(self.sizes[:source])


def _counts(sizes: list[int], weights: Sequence[float], cap: int, temperature: float) -> list[int]:
    """Return the number of examples of each source per epoch, by the largest remainder method."""
    if len(set(weights)) == 1 and not cap and temperature == 1:
        return sizes
    capped = [min(size, cap or size) for size in sizes]
    rates = [(w * size) ** (1 / temperature) for w, size in zip(weights, capped, strict=True)]
    exact = [sum(sizes) * rate / sum(rates) for rate in rates]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: sum(sizes) - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        raise UserError(
            f"source {counts.index(0) + 1} of the training data would have none of an epoch's {sum(sizes)} examples: "
            "raise its weight, or mixing_temperature"
        )
    return counts


def examples_digest(examples: Iterable[Any]) -> str:
    """Return a digest of examples in their order: token ids of prompts and responses, and other values as text."""
    digest = hashlib.sha256()
    for example in examples:
        lists = list(_contents(example))
        digest.update(array("q", [len(lists), *map(len, lists)]).tobytes())
        for values in lists:
            digest.update(array("q", values).tobytes())
    return digest.hexdigest()


def labels_digest(examples: Iterable[Any]) -> str:
    """Return a digest of the labels of examples, in order: ranks and other values that are not token ids."""
    digest = hashlib.sha256()
    for example in examples:
        for part in getattr(example, "parts", (example,)):
            digest.update(repr([getattr(part, name, None) for name in LABEL_FIELDS]).encode())
            digest.update(bytes(getattr(part, "loss_mask", b"")))
    return digest.hexdigest()


def measured_on(data: str, examples: Sequence[Any], **settings: Any) -> dict[str, Any]:
    """Return the data and settings that affect a model's scores, as JSON values by name: a digest, and settings.

    Args:
        data: name of the data setting.
    """
    return {data: f"{examples_digest(examples)} {labels_digest(examples)}", **settings}


def changed_measure(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a line if earlier scores are not comparable because data or settings have changed; else ""."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not names:
        return ""
    return f"{', '.join(names)} changed since the last evaluation: the choice of the best model starts again"


def _contents(example: Any) -> Iterator[Sequence[int]]:
    for part in getattr(example, "parts", (example,)):
        if hasattr(part, "prompt"):
            yield part.prompt
            yield from part.responses if hasattr(part, "responses") else [part.response]
        else:
            yield list(repr(part).encode())


def require_same_examples(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a UserError that begins with `what` if the examples differ from the checkpoint's."""
    if dict(before) == dict(now):
        return
    counts = [values.get("examples", "unknown") for values in (before, now)]
    difference = f"then {counts[0]}, now {counts[1]}" if counts[0] != counts[1] else "others, other labels, or another order"
    raise UserError(
        f"{what} are not those that this run began with ({difference}); resume it with the same data, limits and weights of "
        "sources, or give another output_dir"
    )
