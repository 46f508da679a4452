"""The largest micro-batch of a run, which is tried before the first update: a run that lacks memory ends at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from align.core.settings import ModelConfig
from align.runtime.sequence import sequence_size
from align.training.engine import TrainEngine
from align.training.memory import GIB

Example = TypeVar("Example")


def can_try(engine: TrainEngine) -> bool:
    """Whether a micro-batch can be tried, and the model is so large that it should be.

    Processes that share rows exchange within a pass: one that lacks memory would leave the others waiting.
    """
    return bool(engine.run.memory.estimate) and engine.can_try and sequence_size(engine.accelerator) == 1


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
    run.print(f"trying the largest micro-batch: {size}")
    with run.memory.measuring(run.config, size, engine.has_state), engine.trial(rows):
        yield
    peak, free = run.memory.expected_bytes / GIB, run.memory.free() / GIB
    run.print(f"memory, GiB per process: {peak:.2f} at the peak of the largest micro-batch ({size}), {free:.2f} free")
