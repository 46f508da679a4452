"""Processes and devices: one laptop, several GPUs, or DeepSpeed, all through accelerate's launcher."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object
from torch import Tensor, nn
from transformers.integrations import unset_hf_deepspeed_config

from align.errors import UserError
from align.heap import keep_freed_memory

Item = TypeVar("Item")

# A collective that takes longer has a dead partner; torch then names the rank instead of hanging for ever.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@cache
def bfloat16_is_fast() -> bool:
    """Whether this machine multiplies bfloat16 in hardware."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = file.read()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def compute_dtype(name: str) -> torch.dtype:
    """The torch dtype of a config's `dtype`."""
    if name == "auto":
        return torch.bfloat16 if bfloat16_is_fast() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def make_accelerator(dtype: torch.dtype, max_grad_norm: float, **kwargs: Any) -> Accelerator:
    """The accelerator of a run: devices, processes, and DeepSpeed if the launcher asked for it.

    Raises:
        UserError: if DeepSpeed was asked for and is not installed.
    """
    keep_freed_memory()
    # A second run in one process gets settings of its own; the process group stays.
    AcceleratorState._reset_state()
    process_group = InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if deepspeed and not torch.cuda.is_available():
        # Without a named backend DeepSpeed on CPUs lets every process believe that it is rank 0 of 1.
        process_group = InitProcessGroupKwargs(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        accelerator = Accelerator(
            mixed_precision="bf16" if deepspeed and dtype == torch.bfloat16 else "no",
            kwargs_handlers=[process_group],
            **kwargs,
        )
    except ImportError as error:
        raise UserError("DeepSpeed is not installed; install the extra: pip install 'align-rlhf[deepspeed]'") from error
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        # transformers would load models already sharded; here each is loaded whole, checked, and sharded by its engine.
        unset_hf_deepspeed_config()
        # Batches are cut by tokens and losses divided by global counts here, so the engine must divide by nothing.
        plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": max_grad_norm,
            "steps_per_print": 10**9,
        }
    return accelerator


def zero_stage(accelerator: Accelerator) -> int:
    """The ZeRO stage in use; 0 without DeepSpeed."""
    plugin = accelerator.state.deepspeed_plugin
    return plugin.zero_stage if plugin is not None else 0


def place_frozen(module: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Put a model that is not trained on the device; under ZeRO-3 its weights are sharded like the trained ones.

    It gets an engine of its own: `accelerator.prepare` keeps only the last of several models.
    """
    module = module.eval().requires_grad_(False)
    if zero_stage(accelerator) < 3:
        return module.to(accelerator.device)
    import deepspeed

    # Before the trained module's engine is made, the launcher's own config still holds "auto" where only an optimiser
    # decides; a model that is only read needs none of that.
    theirs = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    zero = {key: value for key, value in theirs.items() if key != "offload_optimizer" and value != "auto"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": next(module.parameters()).dtype == torch.bfloat16},
        "zero_optimization": zero,
    }
    engine = deepspeed.initialize(model=module, config=config)[0]
    engine.eval()
    return engine


@contextmanager
def whole_weights(module: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Gather weights that ZeRO-3 has sharded, once for a whole rollout instead of once a token.

    The engine's gather-and-release hooks are off meanwhile: they would release what the next token needs.
    """
    if zero_stage(accelerator) < 3:
        yield
        return
    import deepspeed
    from trl.models.utils import add_hooks, remove_hooks

    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        remove_hooks(module)
        try:
            yield
        finally:
            add_hooks(module)


def gather_rows(rows: Sequence[Item], accelerator: Accelerator) -> list[Item]:
    """The rows of all processes, in the order of ranks, on every process. Rows are plain Python objects."""
    return list(gather_object(list(rows))) if accelerator.num_processes > 1 else list(rows)


def share(items: Sequence[Item], accelerator: Accelerator) -> list[Item]:
    """The part of `items` that this process works on: every n-th, so that sorted work is spread evenly."""
    return list(items[accelerator.process_index :: accelerator.num_processes])


def map_shared(items: Sequence[Item], work: Callable[[list[Item]], list[Any]], accelerator: Accelerator) -> list[Any]:
    """Do `work` on each process's share; the results of all items, in their order, on every process."""
    results: list[Any] = [None] * len(items)
    numbers = share(range(len(items)), accelerator)
    mine = work([items[number] for number in numbers]) if numbers or accelerator.num_processes > 1 else []
    for number, result in gather_rows(list(zip(numbers, mine, strict=True)), accelerator):
        results[number] = result
    return results


def on_main(work: Callable[[], Item], accelerator: Accelerator) -> Item:
    """Do `work` on the first process; its result, or its UserError, on every process. Results are plain Python objects."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = work()
        except UserError as error:
            outcome[1] = str(error)
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise UserError(outcome[1])
    return outcome[0]


def all_sum(values: Tensor, accelerator: Accelerator) -> Tensor:
    """Sum of a tensor over all processes."""
    return accelerator.reduce(values, reduction="sum") if accelerator.num_processes > 1 else values
