"""Weights under ZeRO-3: load a file directly into shards, and gather weights all at once or layer by layer.

Each process keeps one part of every flattened weight. The data of a sharded weight is an empty tensor, but `full_shape`
still returns its shape.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from align.core.plugins import require_extra
from align.runtime.distributed import limit_collectives, max_across_processes, zero_stage

_loading_for: list[Accelerator] = []
"""Accelerator whose processes shard the models being loaded. If empty, every process loads full models."""


def is_sharded(weight: Tensor) -> bool:
    """Return whether this process holds only a shard of a weight."""
    return hasattr(weight, "ds_id")


def full_shape(weight: Tensor) -> torch.Size:
    """Return the shape of a weight before sharding and quantization."""
    packed = getattr(weight, "quant_state", None)  # bitsandbytes packs two 4-bit numbers into a byte
    shape: torch.Size = packed.shape if packed is not None else getattr(weight, "ds_shape", weight.shape)
    return shape


def full_numel(weight: Tensor) -> int:
    """Return the number of elements of a weight over all processes."""
    return math.prod(full_shape(weight))


def full_nbytes(weight: Tensor) -> int:
    """Return the number of bytes of a weight over all processes, including quantization scales."""
    count = full_numel(weight)
    kind = type(weight).__name__
    if kind == "Params4bit":
        blocks = -(-count // int(weight.blocksize))  # type: ignore[attr-defined]
        # A 4-byte scale per block, or a 1-byte scale per block and 4 bytes per 256 scales.
        scales = blocks + 4 * -(-blocks // 256) if weight.compress_statistics else 4 * blocks  # type: ignore[attr-defined]
        return -(-count // 2) + scales
    if kind == "Int8Params":
        return count + 4 * full_shape(weight)[0]
    return count * weight.element_size()


def frozen_config(accelerator: Accelerator, dtype: torch.dtype) -> dict[str, Any]:
    """Return DeepSpeed's config for frozen weights: the launcher's, without optimizer offload and "auto" values."""
    launched = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    zero = {key: value for key, value in launched.items() if key != "offload_optimizer" and value != "auto"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": zero,
    }


def place_frozen_model(module: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Move a frozen model to the device, or under ZeRO-3 into a separate engine.

    `accelerator.prepare` is not used, because it keeps only the last model.
    """
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
    """Make ZeRO-3 gather lists of experts as one module. Otherwise processes that use different experts would deadlock."""
    from deepspeed.utils import set_z3_leaf_module

    for part in module.modules():
        # A list or dict of modules has no `forward` unless it selects among them.
        if isinstance(part, nn.ModuleDict | nn.ModuleList) and type(part).forward is not nn.Module.forward:
            set_z3_leaf_module(part, True)


# -------------------------------------------------------------------------------------------------------------- loading


@contextmanager
def sharded_loading(accelerator: Accelerator) -> Iterator[None]:
    """Under ZeRO-3, shard models that are loaded inside the block.

    All processes must load the same models in the same order.
    """
    if zero_stage(accelerator) < 3:
        yield
        return
    _loading_for.append(accelerator)
    try:
        yield
    finally:
        _loading_for.pop()


def loading_accelerator() -> Accelerator | None:
    """Return the accelerator whose processes shard a model being loaded, or None if full models are loaded."""
    return _loading_for[-1] if _loading_for else None


class Sharder:
    """Shards the weights of a model one at a time while they are loaded.

    Each process copies its part from the memory-mapped file, without communication between processes.
    """

    def __init__(self, accelerator: Accelerator, dtype: torch.dtype) -> None:
        import deepspeed

        self.accelerator = accelerator
        self._init: Any = deepspeed.zero.Init(config_dict_or_path=frozen_config(accelerator, dtype))
        limit_collectives()
        self._loaded: list[tuple[nn.Module, str, nn.Parameter]] = []

    def shard(self, weight: nn.Parameter) -> nn.Parameter:
        """Reduce a full weight to this process's shard, in place."""
        if not is_sharded(weight):
            # Like DeepSpeed's `Init` for a new module, but without the broadcast, because all processes read the same file.
            state: Any = weight
            self._init._convert_to_deepspeed_param(weight)
            state.partition()
            weight.data = weight.data.to(self.accelerator.device)
        return weight

    @contextmanager
    def shard_on_load(self) -> Iterator[None]:
        """Inside the block, shard each weight that transformers reads from a file when it is assigned to the model."""

        def shard_if_read(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
            if weight is not None and not is_sharded(weight) and getattr(weight, "_is_hf_initialized", False):
                self._loaded.append((module, name, self.shard(weight)))

        one_at_a_time = "HF_DEACTIVATE_ASYNC_LOAD"  # otherwise transformers reads ahead, up to the full model
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
        """Move unsharded tensors to the device, and undo ties of weights that differ.

        A config may tie two weights although a file contains both. transformers ties them only if they are equal, but under
        ZeRO-3 it compares empty tensors.
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
    """Return this process's part of a weight, flattened and without padding. If not sharded, return the full weight."""
    if not is_sharded(weight):
        return weight.detach().flatten()
    state: Any = weight
    part: Tensor = state.ds_tensor
    begin = part.numel() * torch.distributed.get_rank()
    return part[: max(0, min(part.numel(), full_numel(weight) - begin))]


def min_while_loading(number: int) -> int:
    """Return the minimum over all processes during sharded loading, or else the number itself."""
    accelerator = loading_accelerator()
    return number if accelerator is None else -max_across_processes(-number, accelerator)


# --------------------------------------------------------------------------------------------------------------- gathering


@contextmanager
def gathered_parameters(weights: Iterable[Tensor], changed: bool = False) -> Iterator[None]:
    """Gather sharded weights on every process inside the block. All processes must request the same weights.

    If `changed`, the values on the first process are kept at the end.
    """
    sharded: list[Any] = [weight for weight in weights if is_sharded(weight)]
    if not sharded:
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(sharded, modifier_rank=0 if changed else None):
        yield


NOTHING = 2**31
"""Request of a process that needs no more layers. Greater than every layer number."""


class LayerGathering:
    """Gathers a model's weights layer by layer, for processes with different rows and numbers of tokens.

    Before each layer, the processes agree on the earliest layer that any of them needs, and all take part in gathering it.
    Processes that do not need this layer release it again, so no process waits forever. DeepSpeed's own hooks would require
    the same passes in the same order on every process. A layer is a module in a `ModuleList`, or a leaf module outside of
    such lists.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.layers = [(layer, weights) for layer in _layers_of(model) if (weights := _sharded(layer.parameters()))]
        inside = {id(weight) for _, weights in self.layers for weight in weights}
        # Weights of a module that calls layers are needed throughout.
        self.kept = [weight for weight in _sharded(model.parameters()) if id(weight) not in inside]
        self._open: dict[int, Any] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside the block, each process can call the model any number of times. All processes must enter the block."""
        hooks: list[RemovableHandle] = []
        for number, (layer, _) in enumerate(self.layers):
            hooks.append(layer.register_forward_pre_hook(lambda *_, number=number: self._help_until(number)))
            hooks.append(layer.register_forward_hook(lambda *_, number=number: self._release(number), always_call=True))
        with gathered_parameters(self.kept):
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()
                for number in list(self._open):
                    self._release(number)
                self._help_until(NOTHING)

    def _help_until(self, wanted: int) -> None:
        """Take part in gathering the requested layers, in order, up to and including `wanted`. Only `wanted` is kept."""
        while True:
            turn = torch.tensor(wanted, device=self.accelerator.device)
            torch.distributed.all_reduce(turn, op=torch.distributed.ReduceOp.MIN)
            number = int(turn)
            if number != NOTHING:
                context = gathered_parameters(self.layers[number][1])
                context.__enter__()
                self._open[number] = context
            if number == wanted:
                return
            self._release(number)

    def _release(self, number: int) -> None:
        context = self._open.pop(number, None)
        if context is not None:
            context.__exit__(None, None, None)


def _layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in lists, and the leaf modules outside of lists."""
    children = list(module.children())
    if not children and not isinstance(module, (nn.ParameterDict, nn.ParameterList)):  # accessed directly, not called
        yield module
    for child in children:
        if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _layers_of(child)


def _sharded(weights: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [weight for weight in weights if is_sharded(weight)]


@contextmanager
def readable(model: nn.Module) -> Iterator[None]:
    """Make a model callable inside the block, even if its weights are sharded and it has no engine yet."""
    accelerator = loading_accelerator()
    if accelerator is None or not any(map(is_sharded, model.parameters())):
        yield
        return
    with LayerGathering(model, accelerator).reading():
        yield


def sharded_copies(weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Copy sharded weights, one at a time inside `sharded_loading`."""
    accelerator = loading_accelerator()
    if not weights:
        return []
    assert accelerator is not None
    sharder, copies = Sharder(accelerator, weights[0].dtype), list[nn.Parameter]()
    for weight in weights:
        with gathered_parameters([weight]):
            copies.append(sharder.shard(nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)))
    return copies


@contextmanager
def gathered_weights(module: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Gather all sharded weights of an engine's module for the duration of the block."""
    with without_engine_hooks(module, accelerator), gathered_parameters(module.parameters()):
        yield


@contextmanager
def without_engine_hooks(module: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Disable ZeRO-3's automatic gathering and releasing of weights inside the block."""
    if zero_stage(accelerator) < 3:
        yield
        return
    with require_extra("deepspeed"):
        from trl.models.utils import add_hooks, remove_hooks

    remove_hooks(module)
    try:
        yield
    finally:
        add_hooks(module)
