"""Guards of a run: the largest micro-batch is run before the first update, and the batch of a NaN is saved as text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from align.core.errors import UserError
from align.core.files import write_json
from align.runtime.sequence import sequence_size
from align.tokenization import Tokenization
from align.training.engine import NotFiniteError, TrainEngine
from align.training.memory import GIB
from align.training.run import Run

LABELS = ("ranks", "rules", "targets", "attributes", "learned")


def stop_on_nan(run: Run, update: int, error: NotFiniteError, batch: Sequence[dict[str, object]]) -> NoReturn:
    """Save the batch that led to a NaN, as text, and end the run with a UserError."""
    path = run.folder / f"broken-batch-{update}.json"
    if run.is_main:
        write_json(path, batch)
    raise UserError(
        f"update {update}: {error}; the weights before it are unharmed, the batch is in {path}. "
        "Lower learning_rate, or look at that batch"
    ) from error


def examples_as_text(examples: Sequence[Any], tokenization: Tokenization) -> list[dict[str, object]]:
    """Return examples as texts with their labels."""
    text, found = tokenization.text, []
    for example in examples:
        several = hasattr(example, "responses")
        answer = {"responses": list(map(text, example.responses))} if several else {"response": text(example.response)}
        labels = {name: getattr(example, name) for name in LABELS if hasattr(example, name)}
        found.append({"prompt": text(example.prompt), **answer, **labels})
    return found


def should_measure_memory(engine: TrainEngine) -> bool:
    """Whether the largest micro-batch can be run before the first update, and the model is so large that it may not fit.

    DeepSpeed expects a step after a backward pass. Processes that share rows exchange within a pass: one that lacks memory
    would leave the others waiting.
    """
    accelerator = engine.accelerator
    can_run = accelerator.state.deepspeed_plugin is None and sequence_size(accelerator) == 1
    return can_run and bool(engine.run.memory.estimate)


@contextmanager
def measure_peak_memory(engine: TrainEngine, rows: list[int], tokens: int) -> Iterator[None]:
    """Measure and print the peak of memory of a micro-batch, whose loss is passed to `engine.backward` inside.

    All gradients are in memory inside and dropped afterward, and torch's random state is restored. Raise a UserError on all
    processes if one lacks memory.
    """
    run, device = engine.run, engine.accelerator.device
    size = f"{tokens} tokens in {len(rows)} rows"
    run.print(f"running the largest micro-batch: {size}")
    with run.memory.measuring(size, bool(engine.optimizer.state)):
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for master in engine.masters.values():  # as those of earlier micro-batches are
                master.grad = torch.zeros_like(master)
            yield
        engine.drop_gradients()
    peak, free = run.memory.expected_bytes / GIB, run.memory.free() / GIB
    run.print(f"memory, GiB per process: {peak:.2f} at the peak of the largest micro-batch ({size}), {free:.2f} free")
