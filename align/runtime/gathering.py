"""Weights that ZeRO-3 has sharded, gathered to be read: all at once, or layer by layer."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from align.runtime.distributed import zero_stage
from align.runtime.sharding import Sharder, is_sharded, loading_accelerator


@contextmanager
def gathered_parameters(weights: Iterable[Tensor], changed: bool = False) -> Iterator[None]:
    """Gather sharded weights on every process inside; all must ask for the same. If `changed`, the first process's count."""
    sharded: list[Any] = [weight for weight in weights if is_sharded(weight)]
    if not sharded:
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(sharded, modifier_rank=0 if changed else None):
        yield


NOTHING = 2**31
"""The request of a process that needs no more layers: a number above that of every layer."""


class LayerGathering:
    """Gathers a model's weights layer by layer, for processes that read different rows and numbers of tokens.

    Before each layer the processes agree on the earliest one that any of them waits for, and all help to gather it. One that
    waits for another layer, or has ended, drops it again: none hangs. DeepSpeed's own hooks expect the same passes in the
    same order on every process. A layer is a module in a `ModuleList`, or a leaf module outside of such lists.
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
        """Gather the parts that the processes request, in order, up to the part that this process wants, which is kept."""
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
    """Sharded copies of sharded weights, made one at a time inside `sharded_loading`."""
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
    """Gather all weights of an engine's module that ZeRO-3 has sharded, once for as long as they are needed."""
    with without_engine_hooks(module, accelerator), gathered_parameters(module.parameters()):
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
