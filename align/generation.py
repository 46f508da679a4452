"""Sampling engines behind one function: `sample`.

The noise of each row is drawn before sampling starts, so a row's text does not depend on which rows share its batch, on
how many processes share the work, or on which rows ended before it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy
import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from align.models.backbone import Backbone
from align.models.backbone.decoding import DecodingState
from align.tensor_ops import Padded, cut_by_tokens

BLOCK = 128
"""Tokens of the vocabulary that `draw` sums up at once."""


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    Attributes:
        max_new_tokens: longest response, its end token included.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k, top_p: 0 and 1 leave the distribution whole, as PPO needs it; other values are for evaluation.
        batch_tokens: prompt and response tokens that are held in the cache at once.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    batch_tokens: int = 16384


@dataclass(frozen=True)
class Responses:
    """Sampled responses. `ended[i]` says whether response i closed with an end token or was cut at the limit."""

    ids: list[list[int]]
    ended: list[bool]
    log_probs: list[list[float]] | None = None
    """Of each token, as an engine that is not the trained model saw them; None where it is."""


def noise(rows: int, sampling: Sampling, *seed: int) -> Tensor:
    """Uniform numbers [rows, max_new_tokens], float64, that decide every token, from a seed of several parts."""
    return torch.from_numpy(generator(*seed).random((rows, sampling.max_new_tokens)))


def row_seeds(rows: int, *seed: int) -> list[int]:
    """A seed for each row, for an engine that draws its random numbers itself; see `noise`."""
    return generator(*seed).integers(2**62, size=rows).tolist()


def generator(seed: int, *purpose: int) -> numpy.random.Generator:
    """A generator for one purpose, from numbers such as (run seed, purpose, update): nothing to save on a resume.

    NumPy's, whose seed sequences keep such streams apart; torch's generator on a CPU uses 32 bits of its seed.
    """
    return numpy.random.Generator(numpy.random.Philox(numpy.random.SeedSequence(seed, spawn_key=purpose)))


def sample(
    backbone: Backbone,
    prompts: list[list[int]],
    uniforms: Tensor,
    sampling: Sampling,
    end_ids: frozenset[int],
    on_rows: Callable[[int], None] | None = None,
) -> Responses:
    """Sample a response to each prompt.

    Args:
        backbone: computes with whatever adapter is active.
        prompts: token ids of each prompt; none may be empty.
        uniforms: [rows, max_new_tokens] from `noise`.
        end_ids: ids that end a response; the end token is part of the response.
        on_rows: called with the number of rows that were finished, for a progress bar.
    """
    ids: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    ends = torch.tensor(sorted(end_ids), device=backbone.device)
    warpers = _warpers(sampling)
    was_training = backbone.model.training
    backbone.model.eval()  # in training mode, gradient checkpointing throws the cache away
    for rows in cut_by_tokens([len(prompt) + sampling.max_new_tokens for prompt in prompts], sampling.batch_tokens):
        asked = [prompts[row] for row in rows]
        tokens, lengths, closed = _sample_batch(backbone, asked, uniforms[rows], sampling, ends, warpers)
        for row, response, length, end in zip(rows, tokens.tolist(), lengths.tolist(), closed.tolist(), strict=True):
            ids[row], ended[row] = response[:length], end
        if on_rows is not None:
            on_rows(len(rows))
    backbone.model.train(was_training)
    return Responses(ids, ended)


@torch.no_grad()
def _sample_batch(
    backbone: Backbone,
    prompts: list[list[int]],
    uniforms: Tensor,
    sampling: Sampling,
    ends: Tensor,
    warpers: LogitsProcessorList,
) -> tuple[Tensor, Tensor, Tensor]:
    """Response ids [B, max_new], lengths [B] and whether each ended [B]."""
    count, device = len(prompts), backbone.device
    tokens = torch.zeros(count, sampling.max_new_tokens, dtype=torch.long, device=device)
    lengths = torch.zeros(count, dtype=torch.long, device=device)
    ended = torch.zeros(count, dtype=torch.bool, device=device)
    alive = torch.arange(count, device=device)
    uniforms = uniforms.to(device)
    state, hidden = _read(backbone, prompts)
    for step in range(sampling.max_new_tokens):
        logits = backbone.logits(hidden).float()
        if sampling.temperature == 0:
            chosen = logits.argmax(-1)
        else:
            seen = cast(torch.LongTensor, tokens[alive, :step])
            chosen = draw(warpers(seen, logits / sampling.temperature), uniforms[alive, step])
        tokens[alive, step] = chosen
        lengths[alive] += 1
        over = torch.isin(chosen, ends)
        ended[alive[over]] = True
        if bool(over.all()):
            break
        if bool(over.any()):  # a row that ended leaves the batch: nothing is computed on it any more
            keep = torch.nonzero(~over)[:, 0]
            state.select(keep)
            alive, chosen = alive[keep], chosen[keep]
        if step + 1 < sampling.max_new_tokens:
            hidden = backbone.step(state, chosen)
    return tokens, lengths, ended


def _read(backbone: Backbone, prompts: list[list[int]]) -> tuple[DecodingState, Tensor]:
    """Read prompts as `Backbone.start` does; one that is asked for several responses is read once."""
    numbers: dict[tuple[int, ...], int] = {}
    owner = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
    state, hidden = backbone.start(Padded.from_lists([list(prompt) for prompt in numbers]).to(backbone.device))
    if len(numbers) < len(prompts):
        copies = torch.tensor(owner, device=backbone.device)
        state.select(copies)
        hidden = hidden[copies]
    return state, hidden


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token a row from softmax(logits) by inverting its cumulative distribution.

    Exact but for float32's rounding of a block's sum, and one uniform number a row instead of one a vocabulary entry: a
    fraction of the cost of softmax with `torch.multinomial` over a large vocabulary.

    Args:
        logits: [B, V] float32.
        uniforms: [B] float64 in [0, 1).

    Returns:
        [B] token ids.
    """
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    rows, vocabulary = weights.shape
    blocks, rest = divmod(vocabulary, BLOCK)
    sums = weights[:, : blocks * BLOCK].view(rows, blocks, BLOCK).sum(-1)
    if rest:
        sums = torch.cat([sums, weights[:, blocks * BLOCK :].sum(-1, keepdim=True)], dim=1)
    # Which block, then which token in it: only these few sums are float64, in which a long sum loses no small probability.
    before = sums.double().cumsum(-1)
    threshold = uniforms.double()[:, None] * before[:, -1:]
    block = torch.searchsorted(before, threshold, right=True).clamp(max=sums.shape[1] - 1)
    threshold -= before.gather(1, block) - sums.double().gather(1, block)
    columns = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    inside = weights.gather(1, columns.clamp(max=vocabulary - 1)).double().masked_fill(columns >= vocabulary, 0.0)
    # The last token that can be drawn at all, should rounding bring the threshold beyond the block's sum.
    last = (inside > 0).long().cumsum(-1).argmax(-1)
    place = torch.searchsorted(inside.cumsum(-1), threshold, right=True)[:, 0].minimum(last)
    return columns.gather(1, place[:, None])[:, 0]


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """Truncation of the distribution by transformers' own processors, on logits that the temperature has divided."""
    warpers = LogitsProcessorList()
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers
