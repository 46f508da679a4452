"""Log-probabilities of response tokens and entropies of their predictions, computed where they are needed."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from align.core.tensor_ops import Padded, entropy_of, log_probs_of
from align.models.backbone import Backbone

WHOLE_BYTES = 2**30
"""Larger logits are computed in parts of at most this many bytes, and again in the backward pass."""


def predict_tokens(
    backbone: Backbone, states: Tensor, tokens: Tensor, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs [n] of tokens and, with `with_entropy`, entropies [n] in nats of the predictions; float32.

    Large logits are computed in parts and again in the backward pass: over a vocabulary of 128,000 the logits of 16,000
    tokens take 4 GB in bfloat16, and their gradient as much.

    Args:
        backbone: predicts with the active adapter.
        states: [n, H] before the tokens.
        tokens: [n] ids.
        temperature: divides the logits.
    """

    def of_part(states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        logits = backbone.logits(states)
        chosen = log_probs_of(logits, tokens, temperature)
        return (chosen, entropy_of(logits, temperature)) if with_entropy else (chosen,)

    count, sequence = len(tokens), backbone.sequence
    if sequence:  # each process predicts a part of them
        missing = -count % sequence.size
        states, tokens = pad(states, (0, 0, 0, missing)), pad(tokens, (0, missing))
        states, tokens = sequence.own_tokens(states[None])[0], sequence.own_tokens(tokens[None])[0]
    parts = math.ceil(len(tokens) * int(backbone.model.config.vocab_size) * states.element_size() / WHOLE_BYTES)
    if parts <= 1:
        found = [of_part(states, tokens)]
    else:
        found = [
            # The backward pass comes when the adapter's context has ended: it is entered again.
            checkpoint(of_part, *pair, use_reentrant=False, preserve_rng_state=False, context_fn=backbone.recompute_contexts)
            for pair in zip(states.chunk(parts), tokens.chunk(parts), strict=True)
        ]
    columns = (torch.cat(column) for column in zip(*found, strict=True))
    if sequence:
        columns = (sequence.all_tokens(column[None])[0, :count] for column in columns)
    log_probs, *entropy = columns
    return log_probs, entropy[0] if with_entropy else None


def response_log_probs(
    backbone: Backbone,
    hidden: Tensor,
    response: Padded,
    mask: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probs [B, T] of response tokens and entropies [B, T] of their predictions (0 unless `with_entropy`).

    The vocabulary product is taken only where `mask` holds; elsewhere both are 0.

    Args:
        hidden: [B, T+1, H] from `Backbone.hidden`.
        mask: [B, T] bool.
        temperature: divides the logits.
    """
    chosen, entropy = predict_tokens(backbone, hidden[:, :-1][mask], response.ids[mask], temperature, with_entropy)
    nothing = torch.zeros(mask.shape, device=hidden.device)
    return nothing.masked_scatter(mask, chosen), nothing if entropy is None else nothing.masked_scatter(mask, entropy)
