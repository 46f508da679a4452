"""Raw text as examples for a language model: packed to a fixed length, or with masked parts to reconstruct.

Documents that share a row must not attend to each other, just like responses to one prompt. So a row is a prompt of one
token, which begins a document, with the documents as its responses: each attends to that token and itself, and its positions
restart.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy

from align.tokenization.encoded import PromptResponse, PromptResponses

Ids = Sequence[int]
Span = tuple[int, int]
"""The first index of a span, and the index after its last."""

CORRUPTED, MEAN_SPAN = 0.15, 3.0
"""T5 (Raffel et al. 2020, sections 3.3.3 and 3.3.4): the share of tokens that is masked, and the mean length of a span."""
INFILLED, POISSON_SPAN = 0.3, 3.0
"""BART (Lewis et al. 2020, sections 5.1 and 2.2): the share of tokens, and the lambda of the spans' lengths."""
MASKED = 0.5
"""MASS (Song et al. 2019): the share of tokens in the one span."""


class Denoising(NamedTuple):
    """The tokens that replace masked spans.

    Attributes:
        sentinels: T5's, one for each span; the first unused one ends the target.
        mask: the mask token of BART and MASS.
    """

    sentinels: Sequence[int]
    mask: int


def pack(documents: Iterable[Ids], begin: int, length: int) -> list[PromptResponses]:
    """Rows of exactly `length` tokens except the last; a document is split where a row is full.

    Args:
        documents: token ids, each with the token that ends a document.
        begin: the token from which a document's first token, and that of a part of it, is predicted.
    """
    rows: list[list[list[int]]] = [[]]
    room = length
    for document in documents:
        rest = list(document)
        while rest:
            if not room:
                rows.append([])
                room = length
            rows[-1].append(rest[:room])
            rest = rest[room:]
            room -= len(rows[-1][-1])
    return [PromptResponses([begin], parts) for parts in rows if parts]


def cut_into_pieces(documents: Iterable[Ids], length: int) -> list[list[int]]:
    """Documents cut into pieces of at most `length` tokens; pieces of one token are dropped."""
    cut = (list(ids[start : start + length]) for ids in documents for start in range(0, len(ids), length))
    return [piece for piece in cut if len(piece) > 1]


def replace_spans(ids: Ids, spans: Sequence[Span], sentinels: Sequence[int]) -> PromptResponse:
    """T5's input and target: each span is replaced by a sentinel, and the target is each sentinel with its span.

    Args:
        spans: in order, not touching each other.
        sentinels: one more than spans: the last one ends the target.
    """
    kept: list[int] = []
    target: list[int] = []
    end = 0
    for (start, stop), sentinel in zip(spans, sentinels, strict=False):
        kept += [*ids[end:start], sentinel]
        target += [sentinel, *ids[start:stop]]
        end = stop
    return PromptResponse([*kept, *ids[end:]], [*target, sentinels[len(spans)]])


def span_corruption(ids: Ids, denoising: Denoising, random: numpy.random.Generator) -> PromptResponse:
    """T5's objective: 15 % of the tokens in spans of 3 on average, as in its code (`random_spans_noise_mask`).

    There are at most as many spans as sentinels, less the one that ends the target.
    """
    taken = min(max(round(CORRUPTED * len(ids)), 1), len(ids) - 1)
    count = min(max(round(taken / MEAN_SPAN), 1), taken, len(ids) - taken, len(denoising.sentinels) - 1)
    lengths, gaps = _segments(taken, count, random), _segments(len(ids) - taken, count, random)
    spans, position = [], 0
    for gap, length in zip(gaps, lengths, strict=True):  # text comes first, so that no two spans touch
        spans.append((position + gap, position + gap + length))
        position += gap + length
    return replace_spans(ids, spans, denoising.sentinels)


def infilling(ids: Ids, denoising: Denoising, random: numpy.random.Generator, ends: Sequence[int] = ()) -> PromptResponse:
    """BART's objective: spans of Poisson length become one mask each, sentences are shuffled; the target is the text.

    A span of length 0 inserts a mask.

    Args:
        ends: indices after the last token of each sentence, without the text's own end.
    """
    left = round(INFILLED * len(ids))
    lengths: list[int] = []
    while left > 0:
        lengths.append(min(int(random.poisson(POISSON_SPAN)), left))
        left -= lengths[-1]
    free = len(ids) - sum(lengths)
    # Starts of spans, counted in unmasked tokens; spans of length 0 may be anywhere, too.
    starts = numpy.sort(random.integers(free + 1, size=len(lengths)))
    random.shuffle(lengths)
    noisy: list[list[int]] = [[]]
    boundaries, position, kept_before = set(ends), 0, 0

    def copy_tokens(until: int) -> None:
        nonlocal position
        while position < until:
            noisy[-1].append(ids[position])
            position += 1
            if position in boundaries:
                noisy.append([])

    for start, length in zip(starts.tolist(), lengths, strict=True):
        copy_tokens(position + start - kept_before)
        kept_before = start
        noisy[-1].append(denoising.mask)
        crossed = any(position < boundary <= position + length for boundary in boundaries)
        position += length
        if crossed:  # the sentence's end is inside the span: the mask belongs to what came before
            noisy.append([])
    copy_tokens(len(ids))
    order = random.permutation(len(noisy)).tolist()
    return PromptResponse([token for number in order for token in noisy[number]], list(ids))


def mass(ids: Ids, denoising: Denoising, random: numpy.random.Generator) -> PromptResponse:
    """MASS: one span of half of the tokens, each replaced by a mask; the target is the span."""
    length = max(1, round(MASKED * len(ids)))
    start = int(random.integers(len(ids) - length + 1))
    masked = [*ids[:start], *[denoising.mask] * length, *ids[start + length :]]
    return PromptResponse(masked, list(ids[start : start + length]))


def prefix(ids: Ids, denoising: Denoising, random: numpy.random.Generator) -> PromptResponse:
    """A prefix language model (T5, section 3.3.1): the text is cut at a random place, and what follows is the target."""
    cut = int(random.integers(1, len(ids)))
    return PromptResponse(list(ids[:cut]), list(ids[cut:]))


def _segments(total: int, count: int, random: numpy.random.Generator) -> list[int]:
    """Lengths of `count` parts of `total`, each at least 1, all divisions equally likely."""
    cuts = numpy.sort(random.choice(total - 1, count - 1, replace=False) + 1)
    return numpy.diff([0, *cuts.tolist(), total]).tolist()  # type: ignore[no-any-return]
