"""Reading models whose weights ZeRO-3 has sharded: gathered whole, or layer by layer where no process could hold them.

DeepSpeed's engine gathers too, by hooks that expect the same passes in the same order on every process. Here each process
samples from prompts of its own, for as many tokens as they take.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from align.runtime.distributed import zero_stage
from align.runtime.sharding import Sharder, is_sharded, loading_accelerator, whole_bytes, whole_count, whole_shape


@contextmanager
def whole_weights(weights: Iterable[Tensor], changed: bool = False) -> Iterator[None]:
    """Gather sharded weights on every process meanwhile; all processes must ask for the same.

    Args:
        changed: whether they are changed inside; the values of the first process are then kept.
    """
    sharded: list[Any] = [weight for weight in weights if is_sharded(weight)]
    if not sharded:
        yield
        return
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    if changed:
        with GatheredParameters(sharded, modifier_rank=0):
            yield
        return
    unavailable = [weight for weight in dict.fromkeys(sharded) if weight.ds_status is not ZeroParamStatus.AVAILABLE]
    try:
        for group in _sent_together(unavailable):
            for weight, numbers in zip(group, _whole(group), strict=True):
                weight.data, weight.ds_status = numbers, ZeroParamStatus.AVAILABLE
        yield
    finally:
        for weight in unavailable:
            weight.data, weight.ds_status = weight.data.new_empty(0), ZeroParamStatus.NOT_AVAILABLE


SMALL_BYTES = 2**20
"""Weights up to this size are sent together, which saves time and takes room for them twice."""


def _sent_together(weights: Sequence[Any]) -> Iterator[list[Any]]:
    """Each large weight by itself, small ones of a number format together."""
    small: dict[torch.dtype, list[Any]] = {}
    for weight in weights:
        if whole_bytes(weight) > SMALL_BYTES:
            yield [weight]
        else:
            small.setdefault(weight.dtype, []).append(weight)
    yield from small.values()


def _whole(weights: Sequence[Any]) -> list[Tensor]:
    """The numbers of sharded weights from all processes; those of a weight by itself arrive where they stay.

    `GatheredParameters` gathers all that it is given into one buffer and copies each weight out of it: as much memory again.
    """
    parts = [weight.ds_tensor.to(weight.device) for weight in weights]
    own = torch.cat(parts) if len(parts) > 1 else parts[0]
    processes = torch.distributed.get_world_size()
    numbers = own.new_empty(processes * own.numel())
    torch.distributed.all_gather_into_tensor(numbers, own)
    columns = numbers.view(processes, -1).split([part.numel() for part in parts], dim=1)
    flat = [column.reshape(-1)[: whole_count(weight)] for column, weight in zip(columns, weights, strict=True)]
    return [numbers.view(whole_shape(weight)) for numbers, weight in zip(flat, weights, strict=True)]


NOTHING = 2**31
"""The request of a process that needs no more layers: a number above that of every layer."""


class LayerGathering:
    """Gathers a model's weights layer by layer while it reads, for processes that read different rows.

    Before each layer the processes agree on the earliest that any of them waits for, and all of them help to gather it; one
    that waits for another layer, or has ended, drops it again. So no process hangs, however many tokens the others still
    sample, and those that are apart come together again at the layer that is furthest on.

    Args:
        model: a layer is a module in a `ModuleList`, or one outside of such lists that has no modules inside.
        accelerator: the processes.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.layers = [(layer, weights) for layer in _layers_of(model) if (weights := _sharded(layer.parameters()))]
        inside = {id(weight) for _, weights in self.layers for weight in weights}
        # Those of a module that calls layers are needed all along.
        self.kept = [weight for weight in _sharded(model.parameters()) if id(weight) not in inside]
        self._open: dict[int, Any] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, the model can be called by each process as often as it likes. All processes must come here."""
        hooks: list[RemovableHandle] = []
        for number, (layer, _) in enumerate(self.layers):
            hooks.append(layer.register_forward_pre_hook(lambda *_, number=number: self._help_until(number)))
            hooks.append(layer.register_forward_hook(lambda *_, number=number: self._release(number), always_call=True))
        with whole_weights(self.kept):
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()
                for number in list(self._open):
                    self._release(number)
                self._help_until(NOTHING)

    def _help_until(self, wanted: int) -> None:
        """Gather what the processes wait for, in order, until it is what this one wants; it is kept."""
        while True:
            turn = torch.tensor(wanted, device=self.accelerator.device)
            torch.distributed.all_reduce(turn, op=torch.distributed.ReduceOp.MIN)
            number = int(turn)
            if number != NOTHING:
                self._gather(number)
            if number == wanted:
                return
            self._release(number)

    def _gather(self, number: int) -> None:
        context = whole_weights(self.layers[number][1])
        context.__enter__()
        self._open[number] = context

    def _release(self, number: int) -> None:
        context = self._open.pop(number, None)
        if context is not None:
            context.__exit__(None, None, None)


def _layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in lists, and outside of lists those without modules inside."""
    children = list(module.children())
    if not children and not isinstance(module, (nn.ParameterDict, nn.ParameterList)):  # these are read, not called
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
    """Inside, a model can be called although its weights may be sharded and no engine is around it yet."""
    accelerator = loading_accelerator()
    if accelerator is None or not any(map(is_sharded, model.parameters())):
        yield
        return
    with LayerGathering(model, accelerator).reading():
        yield


def sharded_copies(weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Copies of sharded weights, sharded as they are; one at a time is whole for a moment.

    Must be called inside `sharded_loading`, unless there are none.
    """
    accelerator = loading_accelerator()
    if not weights:
        return []
    assert accelerator is not None
    sharder, copies = Sharder(accelerator, weights[0].dtype), list[nn.Parameter]()
    for weight in weights:
        with whole_weights([weight]):
            copies.append(sharder.shard(nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)))
    return copies


@contextmanager
def gathered_weights(module: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Gather all weights of an engine's module that ZeRO-3 has sharded, once for as long as they are needed."""
    with without_engine_hooks(module, accelerator), whole_weights(module.parameters()):
        yield


@contextmanager
def without_engine_hooks(module: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Meanwhile ZeRO-3's engine neither gathers nor releases weights by itself."""
    if zero_stage(accelerator) < 3:
        yield
        return
    from trl.models.utils import add_hooks, remove_hooks

    remove_hooks(module)
    try:
        yield
    finally:
        add_hooks(module)
