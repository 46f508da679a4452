"""The peak memory of the largest micro-batch, measured before the first update."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from align.training.engine import TrainEngine
from align.training.memory import GIB


def should_measure_memory(engine: TrainEngine) -> bool:
    """Return whether the model is so large that a micro-batch may not fit, and one can run without an optimizer step.

    DeepSpeed expects a step after a backward pass.
    """
    return engine.accelerator.state.deepspeed_plugin is None and bool(engine.run.memory.estimate)


@contextmanager
def measure_peak_memory(engine: TrainEngine, rows: int, tokens: int) -> Iterator[None]:
    """Measure and print the peak memory of a micro-batch. Pass its loss to `engine.backward` inside the context.

    All gradients are allocated inside the context and freed on exit. torch's random state is restored.

    Args:
        rows: number of rows of the micro-batch.
        tokens: number of tokens, with padding.

    Raises:
        UserError: if a process runs out of memory (on all processes).
    """
    run, device = engine.run, engine.accelerator.device
    size = f"{tokens} tokens in {rows} rows"
    run.print(f"running the largest micro-batch: {size}")
    with run.memory.measuring(size, bool(engine.optimizer.state)):
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for master in engine.masters.values():  # like the gradients of earlier micro-batches
                master.grad = torch.zeros_like(master)
            yield
        engine.drop_gradients()
    peak, free = run.memory.expected_bytes / GIB, run.memory.free() / GIB
    run.print(
        f"memory, GiB per process: at least {peak:.2f} at the peak of the largest micro-batch ({size}), {free:.2f} free"
    )
