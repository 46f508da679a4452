"""FlexAttention for rows that several responses share: blocks of a mask that no token sees are skipped.

Imported where `block_attention` is set. It has not run on a GPU; docs/howto/gpu.md lists such code.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.integrations.flex_attention import flex_attention_forward

BLOCK = 128
"""Columns of a block of a mask."""


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


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None, **settings: Any
) -> tuple[Tensor, None]:
    """Compute attention with a mask of blocks, as transformers' attention functions return it."""
    return flex_attention_forward(module, query, key, value, mask, scaling, **settings)[0], None
