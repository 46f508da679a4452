"""Weights under ZeRO-3, loaded from a file straight into shards; `align.runtime.gathering` brings them back to be read.

Each process keeps one part of every flattened weight. A sharded weight has an empty tensor where its numbers were;
`full_shape` still returns its shape.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from align.runtime.distributed import limit_collectives, max_across_processes, zero_stage

_loading_for: list[Accelerator] = []
"""The accelerator whose processes shard the models being loaded; empty: every process loads whole models."""


def is_sharded(weight: Tensor) -> bool:
    """Whether this process has a part of a weight only."""
    return hasattr(weight, "ds_id")


def full_shape(weight: Tensor) -> torch.Size:
    """The shape of a weight, sharded or not."""
    shape: torch.Size = getattr(weight, "ds_shape", weight.shape)
    return shape


def full_numel(weight: Tensor) -> int:
    """Numbers in a weight, over all processes."""
    return math.prod(full_shape(weight))


def full_nbytes(weight: Tensor) -> int:
    """Bytes of a weight, over all processes."""
    return full_numel(weight) * weight.element_size()


def frozen_config(accelerator: Accelerator, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's config for frozen weights: the launcher's without the optimizer's values, some still "auto"."""
    launched = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    zero = {key: value for key, value in launched.items() if key != "offload_optimizer" and value != "auto"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": zero,
    }


def place_frozen_model(module: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Put a frozen model on the device; under ZeRO-3 in an own engine: `accelerator.prepare` keeps only the last model."""
    module = module.eval().requires_grad_(False)
    if zero_stage(accelerator) < 3:
        return module.to(accelerator.device)
    import deepspeed

    gather_chosen_parts_together(module)
    config = frozen_config(accelerator, next(module.parameters()).dtype)
    engine = deepspeed.initialize(model=module, config=config)[0]
    limit_collectives()
    engine.eval()
    return cast(nn.Module, engine)


def gather_chosen_parts_together(module: nn.Module) -> None:
    """Let ZeRO-3 gather lists of experts as one: processes whose tokens go to different experts would wait for ever."""
    from deepspeed.utils import set_z3_leaf_module

    for part in module.modules():
        # A list or dict of modules has no `forward` unless it chooses among them.
        if isinstance(part, nn.ModuleDict | nn.ModuleList) and type(part).forward is not nn.Module.forward:
            set_z3_leaf_module(part, True)


# -------------------------------------------------------------------------------------------------------------- loading


@contextmanager
def sharded_loading(accelerator: Accelerator) -> Iterator[None]:
    """Under ZeRO-3, shard models while they load inside. All processes must load the same models in the same order."""
    if zero_stage(accelerator) < 3:
        yield
        return
    _loading_for.append(accelerator)
    try:
        yield
    finally:
        _loading_for.pop()


def loading_accelerator() -> Accelerator | None:
    """The accelerator whose processes shard a model being loaded; None: it is loaded whole."""
    return _loading_for[-1] if _loading_for else None


class Sharder:
    """Shards the weights of one model as a loader sets them, one at a time.

    Each process copies its own part out of the file's memory map: nothing travels between processes.
    """

    def __init__(self, accelerator: Accelerator, dtype: torch.dtype) -> None:
        import deepspeed

        self.accelerator = accelerator
        self._init: Any = deepspeed.zero.Init(config_dict_or_path=frozen_config(accelerator, dtype))
        limit_collectives()
        self._loaded: list[tuple[nn.Module, str, nn.Parameter]] = []

    def shard(self, weight: nn.Parameter) -> nn.Parameter:
        """Keep this process's part of a whole weight, in place."""
        if not is_sharded(weight):
            # What DeepSpeed's `Init` does to each weight of a new module, less the broadcast: all processes read one file.
            state: Any = weight
            self._init._convert_to_deepspeed_param(weight)
            state.partition()
            weight.data = weight.data.to(self.accelerator.device)
        return weight

    @contextmanager
    def shard_on_load(self) -> Iterator[None]:
        """Inside, every weight that transformers has read from a file is sharded when it gets its place in the model."""

        def shard_if_read(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
            if weight is not None and not is_sharded(weight) and getattr(weight, "_is_hf_initialized", False):
                self._loaded.append((module, name, self.shard(weight)))

        one_at_a_time = "HF_DEACTIVATE_ASYNC_LOAD"  # otherwise transformers reads ahead, up to the whole model
        before = os.environ.get(one_at_a_time)
        hook: RemovableHandle = register_module_parameter_registration_hook(shard_if_read)
        os.environ[one_at_a_time] = "1"
        try:
            yield
        finally:
            hook.remove()
            os.environ.pop(one_at_a_time)
            if before is not None:
                os.environ[one_at_a_time] = before

    def finish(self, model: nn.Module) -> None:
        """Move unsharded tensors to the device, and undo ties of weights that differ, as transformers does.

        A config may tie two weights although a file holds both: they are tied only if they are equal. transformers has
        compared empty tensors.
        """
        model.to(self.accelerator.device)
        paths = {id(module): path for path, module in model.named_modules()}
        for module, name, weight in self._loaded:
            kept = module._parameters.get(name)
            if kept is None or kept is weight or min_while_loading(int(torch.equal(local_shard(kept), local_shard(weight)))):
                continue
            module._parameters[name] = weight
            tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
            tied.pop(f"{paths.get(id(module), '')}.{name}".removeprefix("."), None)
        self._loaded.clear()


def local_shard(weight: Tensor) -> Tensor:
    """The numbers of a weight that this process keeps, flat and without padding; all if it is not sharded."""
    if not is_sharded(weight):
        return weight.detach().flatten()
    state: Any = weight
    part: Tensor = state.ds_tensor
    begin = part.numel() * torch.distributed.get_rank()
    return part[: max(0, min(part.numel(), full_numel(weight) - begin))]


def min_while_loading(number: int) -> int:
    """The smallest of all processes' numbers while models are loaded sharded; otherwise this process's own."""
    accelerator = loading_accelerator()
    return number if accelerator is None else -max_across_processes(-number, accelerator)
