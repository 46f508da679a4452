"""Log-probs and entropies of tokens from hidden states, without all logits at once.

Over a vocabulary of 128,000 the logits of 16,000 tokens take 4 GB in bfloat16, and their gradient as much: more than all
activations of a small model. Where they would be large, they are computed a part at a time, and again in the backward
pass: a third more work for the vocabulary's matrix alone.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from align.core.tensor_ops import entropy_of, log_probs_of
from align.models.backbone import Backbone

WHOLE_BYTES = 2**30
"""Bytes: logits up to this size are computed at once and kept, larger ones in parts of at most this size."""


def predict_tokens(
    backbone: Backbone, states: Tensor, tokens: Tensor, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [n] of tokens, and with `with_entropy` the entropies [n] in nats of the predictions; float32.

    Args:
        backbone: whose vocabulary matrix is taken, with the adapter that is active.
        states: [n, H] of the places before the tokens.
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
