"""The attention kernel of loaded models, and a kernel for short rows in bfloat16 on a CPU.

torch's fused CPU kernel is made for long rows. Forward and backward over 2,048 tokens of a layer of SmolLM2-135M it takes
27 ms at 64 columns, this one 9; at 256 columns 38 and 36 (benchmarks/attention.py of commit af7d9de, two cores with
avx512_bf16). No L x L tensor is kept for the backward pass: probabilities are recomputed.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SDPA = "align_sdpa"
UNSUPPORTED_ARGUMENTS = ("softcap", "position_bias", "cache", "s_aux")
"""Arguments that few models pass to attention. Such calls go to transformers' kernel."""


def best_kernel(model: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    """Return the name of transformers' attention implementation for loading a model.

    Some classes (DeBERTa, GPT-J, Bloom) have only eager attention; Falcon chooses among its implementations. T5 trains a
    bias inside its attention, for which fused kernels have no gradient. Training and scoring would use different kernels,
    and in bfloat16 the ratio at the first minibatch would not be 1.
    """
    if not model._supports_sdpa or hasattr(config, "relative_attention_num_buckets"):
        return "eager"
    return SDPA if hasattr(sys.modules[model.__module__], "ALL_ATTENTION_FUNCTIONS") else "sdpa"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' SDPA attention, with faster equivalent paths on a CPU."""
    if attention_mask is not None and not isinstance(attention_mask, Tensor):  # a block mask
        return flex_attention_forward(module, query, key, value, attention_mask, scaling, **settings)[0], None
    length = query.shape[2]
    plain = (
        query.device.type == "cpu"
        and not dropout
        and not any(settings.get(name) is not None for name in UNSUPPORTED_ARGUMENTS)
    )
    if plain and query.dtype == torch.bfloat16 and 1 < length == key.shape[2] <= MAX_LENGTH:
        causal = settings.get("is_causal")
        bias = _bias(attention_mask, query, getattr(module, "is_causal", True) if causal is None else causal)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return short_attention(query, key, value, bias, scale).transpose(1, 2).contiguous(), None
    if plain and attention_mask is None and length == 1:
        # If query heads share keys and values and there is a mask, make these heads the rows of one query. Without a
        # mask, transformers leaves the sharing to torch, whose kernel is three to four times slower at one token.
        attention_mask = query.new_zeros(1, 1, 1, key.shape[2])
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **settings)


def _bias(mask: Tensor | None, query: Tensor, causal: bool) -> Tensor:
    """Return [B or 1, 1, L, L] float32 of a mask of transformers: additive, bool (True is seen), or none."""
    lowest, length = torch.finfo(torch.float32).min, query.shape[2]
    if mask is None:
        seen = query.new_ones(1, 1, length, length, dtype=torch.bool)
        mask = seen.tril() if causal else seen
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, lowest)
    return mask.float()


AttentionInterface.register(SDPA, _attention)
AttentionMaskInterface.register(SDPA, sdpa_mask)


MAX_LENGTH = 256
"""Maximum number of columns for this kernel; from 512 on, it is slower than torch's."""


def short_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Return softmax(scale query key^T + bias) value, scores and probabilities in float32.

    Args:
        query: [B, query heads, L, width]; several query heads share a head of keys and values.
        key: [B, key heads, L, width].
        value: [B, key heads, L, width of values], which may be another width (DeepSeek V3).
        bias: [B or 1, 1, L, L] float32, additive.

    Returns:
        [B, query heads, L, width of values].
    """
    batch, heads, length, width = query.shape
    shared = [states.reshape(-1, length, states.shape[-1]) for states in (key, value)]
    # The heads of a group are rows of one query, so keys and values are not repeated.
    grouped = query.reshape(len(shared[0]), -1, width)
    output: Tensor = _ShortAttention.apply(grouped, *shared, bias, scale)  # type: ignore[no-untyped-call]
    return output.view(batch, heads, length, -1)


def _probabilities(query: Tensor, key: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Return [B x key heads, query heads of a key head x L, L] float32."""
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


# ------------------------------------------------- FlexAttention, for rows that several responses share (`block_attention`)

BLOCK = 128
"""Block size of FlexAttention's masks, in columns. Blocks that no token sees are skipped."""


def block_mask(segments: Tensor, whole_prompt: bool = False) -> BlockMask:
    """Return the mask of `align.models.backbone.decoder.packed_mask` as blocks of `BLOCK` columns."""
    count, length = segments.shape

    def allowed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own, other = segments[row, query], segments[row, key]
        seen = (key <= query) & ((own == other) | (other == 0))
        return seen | ((own == 0) & (other == 0)) if whole_prompt else seen

    mask = create_block_mask(allowed, count, 1, length, length, segments.device, BLOCK)
    mask.ndim = len(mask.shape)  # type: ignore[attr-defined]  # transformers' GPT-2 asks for it
    return mask
