"""The largest micro-batch of a run, which is tried before the first update: a run that lacks memory ends at once."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from align.batches.micro_batches import micro_batches
from align.core.settings import ModelConfig
from align.runtime.sequence import sequence_size
from align.training.data_order import DataOrder
from align.training.engine import TrainEngine
from align.training.memory import GIB

Example = TypeVar("Example")

PLANNED_UPDATES = 200
"""The largest micro-batch is that of at most this many updates."""


def can_try(engine: TrainEngine) -> bool:
    """Whether a micro-batch can be tried, and the model is so large that it should be.

    Processes that share rows exchange within a pass: one that lacks memory would leave the others waiting.
    """
    return bool(engine.run.memory.estimate) and engine.can_try and sequence_size(engine.accelerator) == 1


def largest_micro_batch(
    engine: TrainEngine, batches: Iterable[tuple[list[Example], Sequence[int]]]
) -> tuple[list[Example], list[int], int]:
    """Find the micro-batch of this process with the most padded tokens.

    Args:
        batches: global batches, each with the tokens of its examples.

    Returns:
        The global batch that it is a part of, its rows there, and its padded tokens.
    """
    found: tuple[list[Example], list[int], int] = ([], [], 0)
    for batch, lengths in batches:
        for part in micro_batches(range(len(batch)), lengths, engine.run.config.micro_batch_tokens, engine.accelerator):
            tokens = len(part.rows) * max(lengths[row] for row in part.rows)
            if tokens > found[2]:
                found = batch, part.rows, tokens
    return found


def first_batches(order: DataOrder[Example]) -> Iterator[list[Example]]:
    """Yield the batches of the first epoch's updates, at most `PLANNED_UPDATES`."""
    for update in range(1, min(PLANNED_UPDATES, order.updates_per_epoch) + 1):
        yield order.batch(update)


@contextmanager
def memory_trial(engine: TrainEngine, rows: list[int], tokens: int) -> Iterator[None]:
    """Try a micro-batch, whose loss is passed to `engine.backward` inside, and report the peak of memory.

    Args:
        rows: of the micro-batch.
        tokens: its padded tokens.

    Raises:
        UserError: on all processes, if one lacks memory.
    """
    run = engine.run
    assert isinstance(run.config, ModelConfig)
    size = f"{tokens} tokens in {len(rows)} rows"
    run.say(f"trying the largest micro-batch: {size}")
    with run.memory.measuring(run.config, size, engine.has_state), engine.trial(rows):
        yield
    peak, free = run.memory.expected_bytes / GIB, run.memory.free() / GIB
    run.say(f"memory, GiB per process: {peak:.2f} at the peak of the largest micro-batch ({size}), {free:.2f} free")
