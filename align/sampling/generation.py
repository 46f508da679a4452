"""Batched sampling with the model.

The random numbers of each row are drawn before sampling starts. In float32 a row's text therefore does not depend on its
batch or the number of processes. In bfloat16 the logits of a row round differently in another batch, so text may change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from align.core.seeds import RngStream, generator
from align.core.tensor_ops import Padded, cut_by_tokens
from align.models.backbone import Backbone
from align.models.backbone.contract import DecodingState

BLOCK = 128
"""Number of vocabulary entries per partial sum in `draw`."""
STEPS_BETWEEN_CHECKS = {"cpu": 1, "cuda": 16}
"""Steps between checks for finished rows, which leave the batch. A check makes the CPU wait for the GPU, so
several steps are queued first; tokens past a row's end are dropped."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters.

    Attributes:
        max_new_tokens: maximum response length, including the end token.
        temperature: sampling temperature. 0 for greedy decoding.
        top_k, top_p: 0 and 1 do not truncate the distribution, as PPO requires. Other values are for evaluation.
        batch_tokens: maximum number of prompt and response tokens in the cache.
        stop_ids: stop token ids. If empty, responses have the full length. Default: the model's end tokens.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    batch_tokens: int = 16384
    stop_ids: frozenset[int] | None = None

    def stops(self, end_ids: frozenset[int]) -> frozenset[int]:
        """Return the stop token ids, given the model's end tokens `end_ids`."""
        return end_ids if self.stop_ids is None else self.stop_ids


@dataclass(frozen=True)
class Responses:
    """Sampled responses. `ended[i]` is False if response i was truncated."""

    ids: list[list[int]]
    ended: list[bool]
    log_probs: list[list[float]] | None = None
    """Log-prob of each token under a sampling engine other than the training model, else None."""


def row_uniforms(rows: int, sampling: SamplingParams, seed: int, stream: RngStream, *key: int) -> Tensor:
    """Uniform random numbers [rows, max_new_tokens] in float64, one per token."""
    return torch.from_numpy(generator(seed, stream, *key).random((rows, sampling.max_new_tokens)))


def sample(
    backbone: Backbone,
    prompts: list[list[int]],
    uniforms: Tensor,
    sampling: SamplingParams,
    end_ids: frozenset[int],
    on_rows: Callable[[int], None] | None = None,
) -> Responses:
    """Sample a response to each prompt with the active adapter.

    Args:
        prompts: token ids; none may be empty.
        uniforms: [rows, max_new_tokens] from `row_uniforms`.
        end_ids: ids that end a response; the end token is part of the response.
        on_rows: called with the number of finished rows, for a progress bar.
    """
    ids: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    ends = torch.tensor(sorted(end_ids), dtype=torch.long, device=backbone.device)
    warpers = warpers_of(sampling)
    was_training = backbone.model.training
    backbone.model.eval()  # gradient checkpointing disables the cache in training mode
    for rows in cut_by_tokens([len(prompt) + sampling.max_new_tokens for prompt in prompts], sampling.batch_tokens):
        batch_prompts = [prompts[row] for row in rows]
        tokens, lengths, closed = _sample_batch(backbone, batch_prompts, uniforms[rows], sampling, ends, warpers)
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
    sampling: SamplingParams,
    ends: Tensor,
    warpers: LogitsProcessorList,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return response ids [B, max_new_tokens], lengths [B] and whether each response ended [B]."""
    count, device = len(prompts), backbone.device
    every = STEPS_BETWEEN_CHECKS.get(device.type, 1)
    tokens = torch.zeros(count, sampling.max_new_tokens, dtype=torch.long, device=device)
    lengths = torch.zeros(count, dtype=torch.long, device=device)
    rows = torch.arange(count, device=device)  # rows still in the batch
    open_rows = torch.ones(count, dtype=torch.bool, device=device)  # those that have not ended
    ended = torch.zeros(count, dtype=torch.bool, device=device)
    uniforms = uniforms.to(device)
    state, hidden = _start_decoding(backbone, prompts)
    state = backbone.reserve(state, sampling.max_new_tokens - 1)
    for step in range(sampling.max_new_tokens):
        logits = backbone.logits(hidden).float()
        if sampling.temperature == 0:
            chosen = logits.argmax(-1)
        else:
            seen = cast(torch.LongTensor, tokens[rows, :step])
            chosen = draw(warpers(seen, logits / sampling.temperature), uniforms[rows, step])
        tokens[rows, step] = chosen
        lengths[rows] += open_rows
        open_rows &= ~torch.isin(chosen, ends)
        ended[rows] = ~open_rows
        last = step + 1 == sampling.max_new_tokens
        if (step + 1) % every == 0 and not last:
            left = int(open_rows.sum())
            if not left:
                break
            if state.is_worth_selecting(left):  # remove finished rows from the batch
                keep = torch.nonzero(open_rows)[:, 0]
                state.select(keep)
                rows, chosen, open_rows = rows[keep], chosen[keep], open_rows[keep]
        if not last:
            hidden = backbone.decode_step(state, chosen)
    return tokens, lengths, ended


def _start_decoding(backbone: Backbone, prompts: list[list[int]]) -> tuple[DecodingState, Tensor]:
    """Call `Backbone.prefill`, encoding repeated prompts once."""
    numbers: dict[tuple[int, ...], int] = {}
    prompt_of_response = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
    state, hidden = backbone.prefill(Padded.from_lists([list(prompt) for prompt in numbers]).to(backbone.device))
    if len(numbers) < len(prompts):
        copies = torch.tensor(prompt_of_response, device=backbone.device)
        state.select(copies)
        hidden = hidden[copies]
    return state, hidden


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token per row from softmax(logits) by inverse transform sampling.

    Exact except for float32's rounding of a block's sum. It takes one uniform number per row instead of one per vocabulary
    entry, so it costs a fraction of softmax with `torch.multinomial` over a large vocabulary.

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
    # Select the block, then the token in it. Only these few sums are in float64, so that small probabilities are not lost.
    before = sums.double().cumsum(-1)
    threshold = uniforms.double()[:, None] * before[:, -1:]
    block = torch.searchsorted(before, threshold, right=True).clamp(max=sums.shape[1] - 1)
    threshold -= before.gather(1, block) - sums.double().gather(1, block)
    columns = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    inside = weights.gather(1, columns.clamp(max=vocabulary - 1)).double().masked_fill(columns >= vocabulary, 0.0)
    # If rounding puts the threshold above the block's sum, take the last token with nonzero probability.
    last = (inside > 0).long().cumsum(-1).argmax(-1)
    index = torch.searchsorted(inside.cumsum(-1), threshold, right=True)[:, 0].minimum(last)
    return columns.gather(1, index[:, None])[:, 0]


def warpers_of(sampling: SamplingParams) -> LogitsProcessorList:
    """Return transformers' logits processors for top-k and top-p, applied after the temperature."""
    warpers = LogitsProcessorList()
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers
