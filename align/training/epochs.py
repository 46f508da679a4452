"""Which examples each update learns from: passes over one set of examples, or over a mixture of several."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy

from align.batches.encoding import Limits
from align.batches.streams import require_same_examples
from align.core.errors import UserError
from align.core.seeds import Stream, generator
from align.core.settings import MixtureConfig, ModelConfig, RunConfig, option, require_setting


@dataclass(kw_only=True)
class EpochConfig(ModelConfig, RunConfig):
    """Settings of the stages that make passes over fixed examples."""

    epochs: int = option(1, "passes over the training data", gt=0)
    batch_size: int = option(16, "examples in one update, over all processes", gt=0)
    max_prompt_tokens: int = option(1024, "longest prompt, in tokens", gt=0)
    max_response_tokens: int = option(1024, "longest response, in tokens", gt=0)
    batch_ramp: list[str] = option(
        [],
        "smaller batches at first, each as SIZE:UPDATES, such as 8:100 16:100 before a batch_size of 32 (PaLM: 512, 1024, "
        "then 2048)",
    )
    evaluate_every: int = option(0, "updates between evaluations; 0: at the end of each epoch", ge=0)

    @property
    def limits(self) -> Limits:
        """How long prompts and responses may be."""
        return Limits(self.max_prompt_tokens, self.max_response_tokens, self.overlong)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = [size for size, _ in parse_ramp(self.batch_ramp)] + [self.batch_size]
        rising = all(small < large for small, large in pairwise(sizes))
        require_setting(self, "batch_ramp", rising, "sizes that rise and stay below batch_size")


def parse_ramp(words: Sequence[str]) -> list[tuple[int, int]]:
    """Sizes of batches with the number of updates that each lasts.

    Raises:
        UserError: for a word that is not SIZE:UPDATES.
    """
    ramp = []
    for word in words:
        size, _, updates = word.partition(":")
        if not (size.isdecimal() and updates.isdecimal() and int(size) and int(updates)):
            raise UserError(f"batch_ramp: {word!r} must be SIZE:UPDATES, two whole numbers above 0, such as 8:100")
        ramp.append((int(size), int(updates)))
    return ramp


class Batches(Protocol):
    """Which examples each update learns from."""

    updates_per_epoch: int
    """Updates of an epoch at the full size of a batch."""

    def updates(self, epochs: int) -> int:
        """The number of updates in `epochs` epochs."""

    def rows(self, update: int) -> list[int]:
        """The examples of an update, which is counted from 1; called once for each update, in their order."""

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON values."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, or from {}, which earlier versions stored.

        Raises:
            UserError: if the examples are not those of the checkpoint.
        """


@dataclass(kw_only=True)
class JudgmentConfig(EpochConfig):
    """Settings of the stages that learn from judgments of single responses."""

    held_out_share: float = option(
        0.1,
        "share of the conversations that is held out, with all of their judgments, where validation_data is empty",
        ge=0,
        lt=1,
    )


class Epochs:
    """The order of training examples.

    An epoch has as many examples as the sources have together. A source's share of it is its rate, as in T5 (Raffel et
    al. 2020, section 3.5.2): weight x min(examples, cap), to the power 1 / temperature, divided by the sum over the
    sources. A source whose share is smaller or larger than itself continues in the next epoch where it stopped in this one,
    and after its last example starts again in a new order. With the default rates, an epoch is one pass over everything.

    Args:
        sizes: examples of each source; an example's index counts through all of them.
        weights: one for each source.
        ramp: sizes of the first batches, with the updates that each lasts (`parse_ramp`).
        digest: of the examples (`examples_digest`), by which a resumed run recognizes them.

    Raises:
        UserError: if a rate is so low that a source would have no example in an epoch.
    """

    def __init__(
        self,
        seed: int,
        batch_size: int,
        sizes: Sequence[int],
        weights: Sequence[float] = (1.0,),
        mixing: MixtureConfig | None = None,
        ramp: Sequence[tuple[int, int]] = (),
        digest: str = "",
    ) -> None:
        self.seed, self.batch_size, self.sizes = seed, batch_size, list(sizes)
        self.examples = sum(sizes)
        self.ramp = list(self._cut_ramp(ramp))
        self.updates_per_epoch = math.ceil(self.examples / batch_size)
        self.counts = _counts(self.sizes, weights, mixing or MixtureConfig())
        self.digest = digest

    def _cut_ramp(self, ramp: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Epoch, first and last place of each batch of the ramp; as always, an epoch's last one may be smaller."""
        epoch = start = 0
        for size, updates in ramp:
            for _ in range(updates):
                stop = min(start + size, self.examples)
                yield epoch, start, stop
                epoch, start = (epoch, stop) if stop < self.examples else (epoch + 1, 0)

    def _place(self, update: int) -> tuple[int, int, int]:
        """Epoch, first and last place of an update's batch."""
        if update <= len(self.ramp):
            return self.ramp[update - 1]
        epoch, _, start = self.ramp[-1] if self.ramp else (0, 0, 0)
        left = math.ceil((self.examples - start) / self.batch_size)  # of the epoch in which the ramp ends
        number = update - len(self.ramp) - 1
        if number >= left:
            more, place = divmod(number - left, self.updates_per_epoch)
            epoch, start, number = epoch + 1 + more, 0, place
        start += number * self.batch_size
        return epoch, start, min(start + self.batch_size, self.examples)

    def updates(self, epochs: int) -> int:
        """The number of updates in `epochs` epochs."""
        ends = [number for number, (epoch, _, _) in enumerate(self.ramp) if epoch == epochs]
        if ends:  # the ramp is longer than the run
            return ends[0]
        epoch, _, start = self.ramp[-1] if self.ramp else (0, 0, 0)
        left = math.ceil((self.examples - start) / self.batch_size)
        return len(self.ramp) + left + (epochs - epoch - 1) * self.updates_per_epoch

    def rows(self, update: int) -> list[int]:
        """The examples of an update, which is counted from 1."""
        epoch, start, stop = self._place(update)
        drawn = numpy.concatenate([self._drawn(source, epoch) for source in range(len(self.sizes))])
        order = generator(self.seed, Stream.DATA_ORDER, epoch).permutation(len(drawn))
        rows: list[int] = drawn[order[start:stop]].tolist()
        return rows

    def state(self) -> dict[str, Any]:
        """What identifies the examples. An update's number decides which of them it reads."""
        return {"examples": self.examples, "sizes": self.sizes, "counts": self.counts, "digest": self.digest}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Check that the examples are those of a checkpoint.

        Raises:
            UserError: if they are others.
        """
        require_same_examples("the training examples", state, self.state())

    def _drawn(self, source: int, epoch: int) -> numpy.ndarray:
        """A source's part of an epoch: its whole passes, and parts of passes in an order of their own."""
        size, count = self.sizes[source], self.counts[source]
        start, stop = epoch * count, (epoch + 1) * count
        parts = []
        for number in range(start // size, math.ceil(stop / size)):
            first, last = max(start - number * size, 0), min(stop - number * size, size)
            whole = last - first == size
            one_pass = (
                numpy.arange(size)
                if whole  # the order within an epoch is drawn at its end
                else generator(self.seed, Stream.MIXTURE_ORDER, source, number).permutation(size)
            )
            parts.append(one_pass[first:last])
        return numpy.concatenate(parts) + sum(self.sizes[:source])


def _counts(sizes: list[int], weights: Sequence[float], mixing: MixtureConfig) -> list[int]:
    """Examples of each source in an epoch, by the method of largest remainders."""
    if len(set(weights)) == 1 and not mixing.mixing_cap and mixing.mixing_temperature == 1:
        return sizes
    capped = [min(size, mixing.mixing_cap or size) for size in sizes]
    rates = [(w * size) ** (1 / mixing.mixing_temperature) for w, size in zip(weights, capped, strict=True)]
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
