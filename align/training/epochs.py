"""Which examples each update learns from: passes over one set of examples, or over a mixture of several."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from align.batches.encoding import Limits
from align.errors import UserError
from align.seeds import Stream, generator
from align.settings import MixtureConfig, ModelConfig, RunConfig, option, require_setting


@dataclass(kw_only=True)
class EpochConfig(ModelConfig, RunConfig):
    """Settings of the stages that make passes over fixed examples."""

    epochs: int = option(1, "passes over the training data")
    batch_size: int = option(16, "examples in one update, over all processes")
    max_prompt_tokens: int = option(1024, "longest prompt, in tokens")
    max_response_tokens: int = option(1024, "longest response, in tokens")
    evaluate_every: int = option(0, "updates between evaluations; 0: at the end of each epoch")

    @property
    def limits(self) -> Limits:
        """How long prompts and responses may be."""
        return Limits(self.max_prompt_tokens, self.max_response_tokens, self.overlong)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "batch_size", "max_prompt_tokens", "max_response_tokens"):
            require_setting(self, name, getattr(self, name) > 0, "above 0")
        require_setting(self, "evaluate_every", self.evaluate_every >= 0, "0 or more")


@dataclass(kw_only=True)
class JudgmentConfig(EpochConfig):
    """Settings of the stages that learn from judgments of single responses."""

    held_out_share: float = option(
        0.1, "share of the conversations that is held out, with all of their judgments, where validation_data is empty"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "held_out_share", 0 <= self.held_out_share < 1, "at least 0 and below 1")


class Epochs:
    """The order of training examples.

    An epoch has as many examples as the sources have together. A source's share of it is its rate, as in T5 (Raffel et
    al. 2020, section 3.5.2): weight x min(examples, cap), to the power 1 / temperature, divided by the sum over the
    sources. A source whose share is smaller or larger than itself goes on in the next epoch where it stopped in this one,
    and begins a pass in a new order when it has been through. With the rates as they are by default, an epoch is one pass
    over everything.

    Args:
        sizes: examples of each source; an example's index counts through all of them.
        weights: one for each source.

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
    ) -> None:
        self.seed, self.batch_size, self.sizes = seed, batch_size, list(sizes)
        self.examples = sum(sizes)
        self.updates_per_epoch = math.ceil(self.examples / batch_size)
        self.counts = _counts(self.sizes, weights, mixing or MixtureConfig())

    def rows(self, update: int) -> list[int]:
        """The examples of an update, which is counted from 1."""
        epoch, place = divmod(update - 1, self.updates_per_epoch)
        drawn = numpy.concatenate([self._drawn(source, epoch) for source in range(len(self.sizes))])
        order = generator(self.seed, Stream.DATA_ORDER, epoch).permutation(len(drawn))
        rows: list[int] = drawn[order[place * self.batch_size : (place + 1) * self.batch_size]].tolist()
        return rows

    def _drawn(self, source: int, epoch: int) -> numpy.ndarray:
        """What an epoch has of a source: its whole passes, and parts of passes in an order of their own."""
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
