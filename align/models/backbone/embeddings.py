"""Gradients of bfloat16 embeddings, summed in float32 on a CPU.

torch sums the gradients of equal tokens in the weight's dtype. In bfloat16, with 8 significant bits, the sum over a frequent
token stops growing.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel


def sum_embedding_gradients_in_float32(model: PreTrainedModel) -> None:
    """Let the embeddings of a bfloat16 model sum their gradients in float32 on a CPU."""
    for module in model.modules():
        if type(module) is nn.Embedding and "forward" not in vars(module) and module.max_norm is None and not module.sparse:
            module.forward = partial(_embed, module, module.forward)  # type: ignore[method-assign]


def _embed(module: nn.Embedding, forward: Any, ids: Tensor) -> Tensor:
    weight = module.weight
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.requires_grad and torch.is_grad_enabled():
        found: Tensor = _Embedding.apply(ids, weight, module.padding_idx)  # type: ignore[no-untyped-call]
        return found
    plain: Tensor = forward(ids)
    return plain


class _Embedding(torch.autograd.Function):
    """`torch.nn.functional.embedding` with a gradient that is rounded once."""

    @staticmethod
    def forward(context: Any, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        """Return rows [.., H] of ids [..]."""
        context.save_for_backward(ids)
        context.shape, context.padding_idx = weight.shape, padding_idx
        return embedding(ids, weight)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        """Return the gradient [V, H] of the weight in bfloat16."""
        (ids,), (gradient,) = context.saved_tensors, gradients
        rows = gradient.reshape(-1, gradient.shape[-1])
        total = torch.zeros(context.shape, dtype=torch.float32).index_add_(0, ids.reshape(-1), rows.float())
        if context.padding_idx is not None:
            total[context.padding_idx] = 0
        return None, total.to(gradient.dtype), None
