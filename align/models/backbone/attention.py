"""The attention kernel that models are loaded with."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SDPA = "align_sdpa"


def attention_kernel(config: PreTrainedConfig) -> str:
    """Which of transformers' attention implementations to load a model with.

    T5 trains a bias inside its attention. The fused CPU and GPU kernels have no gradient for it, so training would leave
    them for another path than scoring takes, and in bfloat16 the ratio at the first minibatch would not be 1.
    """
    return "eager" if hasattr(config, "relative_attention_num_buckets") else SDPA


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """transformers' SDPA attention, with a faster path to it for the next token on a processor.

    Where several query heads share keys and values and there is a mask, transformers makes these heads the rows of one
    query; without a mask it leaves the sharing to torch, whose CPU kernel is three to four times slower at one token. A
    mask that hides nothing takes the faster way.
    """
    if attention_mask is None and query.shape[2] == 1 and query.device.type == "cpu":
        attention_mask = query.new_zeros(1, 1, 1, key.shape[2])
    return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)


AttentionInterface.register(SDPA, _attention)
AttentionMaskInterface.register(SDPA, sdpa_mask)
