"""The beginning that all stages share besides run and model: data names, engine, `sequence_parallel`, guards against NaN."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from align.batches.mixtures import TrainingData, data_name
from align.core.errors import UserError
from align.core.files import write_json
from align.core.settings import RunConfig
from align.core.tensor_ops import Padded
from align.models.backbone import Backbone
from align.models.backbone.attention import SDPA
from align.runtime.distributed import broadcast_trainable_weights, zero_stage
from align.runtime.sequence import sequence_size, share_rows
from align.tokenization import Tokenization
from align.training.engine import NotFiniteError, TrainEngine
from align.training.memory import GIB
from align.training.optimizer import ParamGroup
from align.training.run import Run


def warn_if_prompts_are_reread(run: Run, backbone: Backbone, responses: Iterable[int]) -> None:
    """Warn that prompts are read again for each of their responses, of which `responses` has the numbers."""
    if not backbone.shares_prompts and max(responses, default=0) > 1:
        run.print("the model cannot read several responses in one row: each is read with its prompt, which is slower")


def build_engine(
    run: Run, module: nn.Module, total_steps: int, groups: Sequence[ParamGroup] = (), average_decay: float = 0.0
) -> TrainEngine:
    """Build a run's engine: DeepSpeed's where the launcher asked for it. Arguments are those of `TrainEngine`.

    Drawn weights (adapters, heads) become those of the first process. Raises a UserError for a mean of weights under ZeRO-3.
    """
    run.print(run.optimization.without_effect_warning())
    run.print(lora_rate_hint(run))
    broadcast_trainable_weights(module, run.accelerator)
    if run.accelerator.state.deepspeed_plugin is None:
        return TrainEngine(run, module, total_steps, groups, average_decay)
    if average_decay and zero_stage(run.accelerator) == 3:
        raise UserError("a mean of the weights is not kept under ZeRO-3: set ema_decay to 0, or use ZeRO-1 or 2")
    from align.training.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(run, module, total_steps, groups, average_decay)


def lora_rate_hint(run: Run) -> str:
    """Return a line for an adapter that is trained with the default learning rate of full training, or ""."""
    default = next(item.default for item in fields(run.optimization) if item.name == "learning_rate")
    if not run.model_config.lora_r or run.optimization.learning_rate != default:
        return ""
    return f"learning_rate {default:g} is the default for training all weights; adapters usually need 10 to 100 times that"


TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""By how much states may differ, as a share of their largest: what another order of sums changes in a few layers."""
Config = TypeVar("Config", bound=RunConfig)


def with_data_names(config: Config, **data: TrainingData) -> Config:
    """Return the settings with the names of the data that a trainer was given: a file's name, or the number of records."""
    return replace(config, **{name: data_name(given) for name, given in data.items()})  # type: ignore[arg-type]


def share_sequences(run: Run, backbone: Backbone, size: int) -> None:
    """Let each `size` processes read a part of the same rows each, after checking that only rounding changes.

    Raise a UserError if the model or the number of processes does not allow it.
    """
    if size == 1:
        return
    config, processes = backbone.model.config, run.accelerator.num_processes
    heads = getattr(config, "num_attention_heads", 0)
    shared = getattr(config, "num_key_value_heads", None) or heads
    problem = ""
    if not backbone.causal:
        problem = f"only decoders share rows, and {config.model_type} is none"
    elif zero_stage(run.accelerator) == 3:
        problem = "under ZeRO-3 no process has a whole model to check it with; use ZeRO-1 or 2, or none"
    elif processes % size:
        problem = f"it must divide the number of processes, {processes}"
    elif heads % size or shared % size:
        problem = f"it must divide the model's {heads} heads of queries and {shared} of keys"
    elif config._attn_implementation != SDPA:
        problem = f"the attention of {config.model_type} is its own, and exchanges nothing"
    elif getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
        problem = f"{config.model_type} looks back over a window, which parts of a row do not know"
    if problem:
        raise UserError(f"sequence_parallel is {size}: {problem}; set it to 1")
    ids = torch.arange(2 * size + 1, device=backbone.device) % int(config.vocab_size)
    prompt, response = Padded.from_lists([ids[:2].tolist()]), Padded.from_lists([ids[2:].tolist()])
    prompt, response = prompt.to(backbone.device), response.to(backbone.device)
    with torch.no_grad():
        expected = backbone.hidden(prompt, response)
        # Each response has a row of its own: a shared one would need a mask.
        backbone.sequence, backbone.shares_prompts = share_rows(run.accelerator, size), False
        found = backbone.hidden(prompt, response)
    limit = TOLERANCE[backbone.model.dtype] * float(expected.abs().max())
    if not torch.allclose(found, expected, rtol=0, atol=limit):
        raise UserError(
            f"sequence_parallel is {size}: {config.model_type} computes something else from parts of a row; set it to 1"
        )


# ----------------- guards: the largest micro-batch is run before the first update, and the batch of a NaN is saved as text
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
    run.print(
        f"memory, GiB per process: at least {peak:.2f} at the peak of the largest micro-batch ({size}), {free:.2f} free"
    )
