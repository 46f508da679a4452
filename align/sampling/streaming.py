"""Sampling of one response, token by token, for a reader who watches it being written."""

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from align.core.tensor_ops import Padded
from align.models.backbone import Backbone
from align.sampling.generation import SamplingParams, draw, warpers_of
from align.tokenization import Tokenization

UNFINISHED = "\ufffd"
"""The character that a decoder writes for a part of a character."""


@torch.no_grad()
def stream_tokens(
    backbone: Backbone, prompt: Sequence[int], uniforms: Tensor, sampling: SamplingParams, end_ids: frozenset[int]
) -> Iterator[int]:
    """Yield the tokens of a response, the same ones as `sample` returns; closing the iterator stops sampling.

    Args:
        prompt: token ids; not empty.
        uniforms: [1, max_new_tokens] from `row_uniforms`.
        end_ids: ids that end a response; the end token is yielded too.
    """
    backbone.model.eval()
    warpers, uniforms = warpers_of(sampling), uniforms.to(backbone.device)
    state, hidden = backbone.prefill(Padded.from_lists([prompt]).to(backbone.device))
    tokens = torch.zeros(1, sampling.max_new_tokens, dtype=torch.long, device=backbone.device)
    for step in range(sampling.max_new_tokens):
        logits = backbone.logits(hidden).float()
        if sampling.temperature == 0:
            chosen = logits.argmax(-1)
        else:
            seen = cast(torch.LongTensor, tokens[:, :step])
            chosen = draw(warpers(seen, logits / sampling.temperature), uniforms[:, step])
        tokens[:, step] = chosen
        token = int(chosen)
        yield token
        if token in end_ids or step + 1 == sampling.max_new_tokens:
            return
        hidden = backbone.decode_step(state, chosen)


def stream_text(tokenization: Tokenization, tokens: Iterable[int]) -> Iterator[tuple[list[int], str]]:
    """Yield the token ids so far and their text; before the last one, without a character at the end that is incomplete."""
    ids: list[int] = []
    for token in tokens:
        ids.append(token)
        yield list(ids), tokenization.text(ids).rstrip(UNFINISHED)
    yield ids, tokenization.text(ids)
