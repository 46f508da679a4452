"""Attention over short rows in bfloat16 on a processor, for training.

torch's fused CPU kernel is made for long rows. Forward and backward over 2,048 tokens of a layer of SmolLM2-135M it takes
27 ms at 64 columns, this one 9; at 256 columns 38 and 36 (benchmarks/attention.py of commit af7d9de, two cores with
avx512_bf16). As there, nothing of size T x T is kept for the backward pass: the probabilities are computed again.
"""

from typing import Any

import torch
from torch import Tensor

MAX_LENGTH = 256
"""Columns up to which it is used; from 512 on it is slower than torch's kernel."""


def short_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """softmax(scale Q K^T + bias) V, scores and probabilities in float32.

    Args:
        query: [B, Q, T, D]; each group of Q / H query heads shares a head of keys and values.
        key: [B, H, T, D].
        value: [B, H, T, V]; its heads may have another width than those of queries and keys (DeepSeek V3).
        bias: [B or 1, 1, T, T] float32, additive.

    Returns:
        [B, Q, T, V].
    """
    batch, heads, length, width = query.shape
    shared = [states.reshape(-1, length, states.shape[-1]) for states in (key, value)]
    # The heads of a group are rows of one query: nothing is repeated.
    grouped = query.reshape(len(shared[0]), -1, width)
    output: Tensor = _ShortAttention.apply(grouped, *shared, bias, scale)  # type: ignore[no-untyped-call]
    return output.view(batch, heads, length, -1)


def _probabilities(query: Tensor, key: Tensor, bias: Tensor, scale: float) -> Tensor:
    """[B H, G T, T] float32."""
    scores = torch.bmm(query.float(), key.float().transpose(1, 2)).mul_(scale)
    length = key.shape[1]
    whole = len(query) * query.shape[1] // length  # heads over the batch
    by_head = scores.view(len(bias), whole // len(bias), length, length)
    by_head.add_(bias)
    return torch.softmax(scores, -1)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = torch.bmm(_probabilities(query, key, bias, scale).to(value.dtype), value)
        ctx.save_for_backward(query, key, value, output, bias)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, bias = ctx.saved_tensors
        probabilities = _probabilities(query, key, bias, ctx.scale)
        to_value = torch.bmm(probabilities.to(value.dtype).transpose(1, 2), gradient)
        # d softmax: p (dp - sum p dp), of which the sum is dO . O (FlashAttention, Dao et al. 2022, appendix B.4).
        inner = (gradient.float() * output.float()).sum(-1, keepdim=True)
        scores = torch.bmm(gradient, value.transpose(1, 2)).float().sub_(inner).mul_(probabilities).mul_(ctx.scale)
        scores = scores.to(query.dtype)
        return torch.bmm(scores, key), torch.bmm(scores.transpose(1, 2), query), to_value, None, None
