"""FlexAttention for rows that several responses share: blocks of a mask that no token sees are skipped.

Imported where `block_attention` is set. It has not run on a GPU; docs/howto/gpu.md lists such code.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.integrations.flex_attention import flex_attention_forward

from align.models.backbone.layout import BLOCK, attention_allowed


def block_mask(segments: Tensor, whole_prompt: bool = False) -> BlockMask:
    """[P, 1, L, L]: `align.models.backbone.layout.packed_mask` as blocks of `BLOCK` columns."""
    count, length = segments.shape
    mask = create_block_mask(attention_allowed(segments, whole_prompt), count, 1, length, length, segments.device, BLOCK)
    mask.ndim = len(mask.shape)  # type: ignore[attr-defined]  # transformers' GPT-2 asks for it
    return mask


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None, **settings: Any
) -> tuple[Tensor, None]:
    """Attention with a mask of blocks, as transformers' attention functions return it."""
    return flex_attention_forward(module, query, key, value, mask, scaling, **settings)[0], None
