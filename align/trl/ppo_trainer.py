"""Helpers of TRL's module of the same name, for scripts that import them. The trainer does not use them."""

import sys
from types import ModuleType
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from align.core.errors import UserError
from align.core.tensor_ops import log_probs_of
from align.runtime.progress import console
from align.trl.config import PPOConfig
from align.trl.hooks import OnlineTrainerState
from align.trl.trainer import PPOTrainer
from align.trl.value_head import PolicyAndValueModel

PolicyAndValueWrapper = PolicyAndValueModel

INVALID_LOGPROB = 1.0
"""Log-probability of padding in TRL."""

__all__ = [
    "INVALID_LOGPROB",
    "OnlineTrainerState",
    "PPOConfig",
    "PPOTrainer",
    "PolicyAndValueWrapper",
    "batch_generation",
    "exact_div",
    "first_true_indices",
    "forward",
    "generate",
    "get_reward",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "print_rich_table",
    "selective_log_softmax",
    "truncate_response",
]


def exact_div(dividend: int, divisor: int, message: str = "") -> int:
    """Divide exactly.

    Raises:
        ValueError: If there is a remainder.
    """
    quotient, remainder = divmod(dividend, divisor)
    if remainder:
        raise ValueError(f"{message}, inexact division: {dividend} / {divisor}")
    return quotient


def truncate_response(stop_token_id: int, pad_token_id: int, responses: Tensor) -> Tensor:
    """Replace all tokens after the first stop token of each response [B, T] with padding."""
    stops = responses == stop_token_id
    return responses.masked_fill(stops.cumsum(1) - stops.long() > 0, pad_token_id)


def forward(model: nn.Module, query_responses: Tensor, pad_token_id: int) -> ModelOutput:
    """Call a model on token ids [B, L], padded on either side. The output includes the hidden states of all layers."""
    mask = query_responses != pad_token_id
    output: ModelOutput = model(
        input_ids=query_responses.masked_fill(~mask, 0),  # the embeddings may lack a row for the padding token
        attention_mask=mask,
        position_ids=mask.cumsum(1) - mask.long(),
        return_dict=True,
        output_hidden_states=True,
    )
    return output


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the mean of values where the mask is 1, over all elements or along an axis."""
    if axis is None:
        return (values * mask).sum() / mask.sum()
    return (values * mask).sum(axis) / mask.sum(axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of values where the mask is 1.

    Raises:
        ValueError: If the mask is 0 everywhere.
    """
    count = mask.sum()
    if not count:
        raise ValueError("masked_var: the mask leaves no value; use larger minibatches")
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale values to unit variance where the mask is 1. Shift the mean to 0, or keep it without `shift_mean`."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def generate(
    lm_backbone: nn.Module, queries: Tensor, pad_token_id: int, generation_config: GenerationConfig
) -> tuple[Tensor, Tensor]:
    """Generate responses to queries [B, L] padded on the left, see `batch_generation`."""
    mask = queries != pad_token_id
    output = lm_backbone.generate(  # type: ignore[operator]
        input_ids=queries.masked_fill(~mask, 0),  # the embeddings may lack a row for the padding token
        attention_mask=mask,
        generation_config=generation_config,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return torch.cat([queries, output.sequences[:, queries.shape[1] :]], 1), torch.stack(output.scores, 1)


@torch.no_grad()
def batch_generation(
    model: nn.Module,
    queries: Tensor,
    local_rollout_forward_batch_size: int,
    pad_token_id: int,
    generation_config: GenerationConfig,
) -> tuple[Tensor, Tensor]:
    """Generate responses in batches. Return the token ids [B, L + T] of queries with responses, and logits [B, T, V].

    Args:
        model: language model.
        queries: token ids [B, L], padded on the left.
        local_rollout_forward_batch_size: number of rows per call of `generate`.
        pad_token_id: padding token.
        generation_config: settings of `generate`.
    """
    ids: list[Tensor] = []
    logits: list[Tensor] = []
    for batch in queries.split(local_rollout_forward_batch_size):
        written, of_tokens = generate(model, batch, pad_token_id, generation_config)
        ids += [*written]
        logits += [*of_tokens]
    return pad_sequence(ids, True, float(pad_token_id)), pad_sequence(logits, True)


def first_true_indices(bools: Tensor, dtype: torch.dtype = torch.long) -> Tensor:
    """Return the index [B] of the first True in each row [B, L], or L if there is none."""
    places = torch.arange(bools.shape[-1], device=bools.device).expand_as(bools)
    return places.masked_fill(~bools, bools.shape[-1]).amin(-1).to(dtype)


def get_reward(
    model: nn.Module, query_responses: Tensor, pad_token_id: int, context_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the scores of a model with `base_model_prefix` and `score`.

    Args:
        model: reward or value model.
        query_responses: token ids [B, L] of queries with responses.
        pad_token_id: padding token.
        context_length: number of query columns.

    Returns:
        Scores [B, L, 1] of all tokens, and the scores [B] and indices [B] of the last tokens before padding.
    """
    body: Any = getattr(model, str(model.base_model_prefix))
    output = forward(body, query_responses, pad_token_id)
    scores: Tensor = model.score(output["hidden_states"][-1])  # type: ignore[operator]
    last = first_true_indices(query_responses[:, context_length:] == pad_token_id) - 1 + context_length
    return scores, scores[torch.arange(len(scores), device=scores.device), last].squeeze(-1), last


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Return the log-probs [..] of tokens [..] under logits [.., V]."""
    return log_probs_of(logits, index)


def print_rich_table(table: Any) -> None:
    """Print a pandas data frame."""
    shown = Table(*map(str, table.columns), show_lines=True)
    for row in table.astype(str).itertuples(index=False):
        shown.add_row(*(Text(cell) for cell in row))  # `Text` prevents parsing as markup
    console.print(shown)


ADVICE = "give the trainer a reward function as reward_model (docs/howto/own-reward.md), or callbacks"


class _HelperModule(ModuleType):
    """Module type that rejects monkeypatching. In TRL, the trainer would call the replacement."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise UserError, except for attributes set by Python."""
        if not (name.startswith("__") and name.endswith("__")):
            raise UserError(f"{self.__name__}.{name}: the trainer does not call it, so setting it has no effect; {ADVICE}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}; {ADVICE}")


sys.modules[__name__].__class__ = _HelperModule
