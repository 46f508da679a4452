"""Mixtures of experts: routers in float32, where each token went, and the loss that keeps experts evenly used."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from transformers import PreTrainedModel

from align.runtime.sequence import SequenceGroup


class Router(NamedTuple):
    """A module that sends tokens to experts."""

    name: str
    module: nn.Module
    output: int
    """Which of its outputs are the logits."""


def routers_of(model: PreTrainedModel) -> list[Router]:
    """The routers of a model, as transformers itself finds them; none if it has no experts."""
    recorders = [
        getattr(type(part), "_can_record_outputs", None) for part in model.modules() if isinstance(part, PreTrainedModel)
    ]
    known = {
        recorder.target_class: recorder.index
        for outputs in recorders
        for name, recorder in (outputs or {}).items()
        if name == "router_logits" and hasattr(recorder, "target_class")
    }
    found = ((name, module) for name, module in model.named_modules() if type(module) in known)
    return [Router(name, module, known[type(module)]) for name, module in found]


def compute_routers_in_float32(model: PreTrainedModel) -> None:
    """Let the routers of a model in bfloat16 multiply in float32 (Switch Transformers, arXiv 2101.03961, section 2.4).

    A product that is rounded to 8 bits would send a token to another expert in another batch. Switch's own does so already.
    """
    for router in routers_of(model):
        module = router.module
        if isinstance(getattr(module, "weight", None), nn.Parameter) and "forward" not in vars(module):
            module.forward = partial(_in_float32, router, module.forward)


def _in_float32(router: Router, forward: Any, states: Tensor, *more: Any) -> Any:
    """The outputs of a router for `states`, computed in float32; its logits stay in float32."""
    weights = {name: weight.float() for name, weight in router.module.named_parameters(recurse=False)}
    with _reparametrize_module(router.module, weights):
        outputs = forward(states.float(), *more)
    if isinstance(outputs, Tensor):
        return outputs
    return tuple(
        part.to(states.dtype) if number != router.output and part.is_floating_point() else part
        for number, part in enumerate(outputs)
    )


class RoutedTokens(NamedTuple):
    """The tokens of B responses that a stack of layers read, with their prompts where these are in the stack's rows."""

    rows: int
    """Of the stack."""
    row: Tensor
    """[B, 1] the row of each response."""
    column: Tensor
    """[B, S] the columns of its tokens."""
    real: Tensor
    """[B, S] bool."""
    prompt: Tensor
    """[B] the prompt of each response."""


class Routing:
    """Collects where the tokens of training passes go.

    The balance N sum_i f_i P_i is computed over the tokens of each prompt with its response. Here f_i is the share of
    choices and P_i the mean probability of expert i; the balance is 1 if all N experts are used equally. Switch
    Transformers compute it over a whole batch, where the result would depend on the split into micro-batches. Computed by
    sequence, it does not (DeepSeek-V2, arXiv 2405.04434, section 2.1.3).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self.top_k = int(getattr(config, "num_experts_per_tok", 1))
        self.routers = routers_of(model)
        self._logits: list[tuple[str, Tensor]] = []
        self._reading = False
        self.balance: list[tuple[Tensor, Tensor]] = []
        """Of each pass: the balance [B] of its responses, mean over layers; the prompt of each [B]."""
        self.counts: Tensor | None = None
        """[N] float64: how often each expert was chosen, over all layers."""
        for router in self.routers:
            router.module.register_forward_hook(partial(self._record, router))

    def _record(self, router: Router, module: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> None:
        if self._reading:  # not where a block is computed again for its gradient
            self._logits.append((router.name, outputs[router.output]))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While this lasts, what routers say is collected; nothing without gradients."""
        self._reading = torch.is_grad_enabled()
        try:
            yield
        finally:
            self._reading = False

    def close(self, tokens: Mapping[str, RoutedTokens], sequence: SequenceGroup | None = None) -> None:
        """End a pass.

        Args:
            tokens: keyed by a part of the names of a stack's layers.
            sequence: the processes of which each has read a part of the rows.
        """
        logits, self._logits = self._logits, []
        if not logits:
            return
        if sequence:
            rows = next(iter(tokens.values())).rows
            logits = [(name, sequence.all_tokens(part.reshape(rows, -1, part.shape[-1]))) for name, part in logits]
        layers = [
            _layer_balance(found, next(t for key, t in tokens.items() if key in name), self.top_k) for name, found in logits
        ]
        self.balance.append((torch.stack([layer[0] for layer in layers]).mean(0), next(iter(tokens.values())).prompt))
        counts = torch.stack([layer[1] for layer in layers]).sum(0)
        self.counts = counts if self.counts is None else self.counts + counts

    def take(self, rows: int) -> tuple[Tensor, Tensor] | None:
        """The balance summed over `rows` rows of a micro-batch, mean over passes, and counts [N]; None if nothing was read.

        Args:
            rows: examples of the micro-batch. Where each is a prompt with all of its responses, these count as one.
        """
        balance, counts = self.balance, self.counts
        self.balance, self.counts = [], None
        if not balance or counts is None:
            return None
        total = torch.stack([_sum_over_rows(values, prompt, rows) for values, prompt in balance]).mean()
        return total, counts


def _layer_balance(logits: Tensor, tokens: RoutedTokens, top_k: int) -> tuple[Tensor, Tensor]:
    """Of one layer: N sum_i f_i P_i [B], and how often each expert was chosen [N]."""
    by_row = logits.reshape(tokens.rows, -1, logits.shape[-1])
    probabilities = torch.softmax(by_row[tokens.row, tokens.column].float(), -1)
    chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k, -1).indices, 1.0)
    return balance_loss(chosen / top_k, probabilities, tokens.real), (chosen * tokens.real[..., None]).double().sum((0, 1))


def balance_loss(chosen: Tensor, probabilities: Tensor, real: Tensor) -> Tensor:
    """N sum_i f_i P_i of each sequence [B] (Switch Transformers, equations 4 to 6); only P has a gradient.

    Args:
        chosen: [B, S, N] the share of a token's choices that went to an expert.
        probabilities: [B, S, N] of the router.
        real: [B, S] bool.
    """
    weights = real[..., None] / real.sum(1)[:, None, None]
    fraction, probability = (chosen.detach() * weights).sum(1), (probabilities * weights).sum(1)
    return chosen.shape[-1] * (fraction * probability).sum(-1)


def _sum_over_rows(values: Tensor, prompt: Tensor, rows: int) -> Tensor:
    if len(values) != rows:
        values = values / torch.bincount(prompt, minlength=1)[prompt]
    return values.sum()
