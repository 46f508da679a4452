"""A forward pass on tensors without data, to count the memory that it would hold; see `align.training.memory`."""

from collections.abc import Sequence
from functools import singledispatch

import torch
from torch import Tensor

from align.models.backbone.contract import Backbone
from align.models.backbone.decoder import DecoderBackbone
from align.models.backbone.encoder import EncoderBackbone
from align.models.backbone.encoder_decoder import EncoderDecoderBackbone
from align.models.backbone.layout import packed_mask


@singledispatch
def dry_run_states(backbone: Backbone, count: int, prompt: int, responses: Sequence[int]) -> Tensor:
    """States [n, H] that predict all response tokens of a batch whose tokens are all 0.

    `Backbone.hidden` looks at the values of lengths, which tensors without data do not have.

    Args:
        count: prompts.
        prompt: tokens of each prompt.
        responses: tokens of each of a prompt's responses.
    """
    raise TypeError(f"no dry run is known for a {type(backbone).__name__}")


@dry_run_states.register
def _(backbone: DecoderBackbone, count: int, prompt: int, responses: Sequence[int]) -> Tensor:
    packed = len(responses) > 1 and backbone.can_pack(prompt + max(responses))
    rows, width = (count, sum(responses)) if packed else (count * len(responses), max(responses))
    ids = torch.zeros(rows, prompt + width, dtype=torch.long, device=backbone.device)
    masked = packed or not backbone.causal
    extra = {"position_ids": ids, "attention_mask": packed_mask(ids, backbone.model.dtype)} if masked else {}
    states: Tensor = backbone.model.base_model(input_ids=ids, use_cache=False, **extra).last_hidden_state
    return states[:, prompt - 1 : -1].reshape(rows * width, -1)


@dry_run_states.register
def _(backbone: EncoderBackbone, count: int, prompt: int, responses: Sequence[int]) -> Tensor:
    """Summary states: an encoder predicts nothing."""
    ids = torch.zeros(count * len(responses), prompt + max(responses), dtype=torch.long, device=backbone.device)
    states: Tensor = backbone.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return states


@dry_run_states.register
def _(backbone: EncoderDecoderBackbone, count: int, prompt: int, responses: Sequence[int]) -> Tensor:
    ids = torch.zeros(count, prompt, dtype=torch.long, device=backbone.device)
    mask = torch.ones_like(ids)
    encoded: Tensor = backbone.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    rows, width = count * len(responses), max(responses)
    states = backbone.decode(
        torch.zeros(rows, width, dtype=torch.long, device=backbone.device),
        encoded.repeat_interleave(len(responses), 0),
        mask.repeat_interleave(len(responses), 0),
    )
    return states[:, :-1].reshape(rows * width, -1)
