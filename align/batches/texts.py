"""Raw text as examples for a language model: packed to a fixed length, or with masked parts to reconstruct.

Documents that share a row must not attend to each other. A row is a prompt of one token, which begins a document, with the
documents as its responses: positions restart for each.
"""

from collections.abc import Iterable, Sequence

import numpy

from align.tokenization.encoded import PromptResponse, PromptResponses

Ids = Sequence[int]
Span = tuple[int, int]
"""The first index of a span, and the index after its last."""

CORRUPTED, MEAN_SPAN = 0.15, 3.0
"""T5 (Raffel et al. 2020, sections 3.3.3 and 3.3.4): the share of tokens that is masked, and the mean length of a span."""


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


def span_corruption(ids: Ids, sentinels: Sequence[int], random: numpy.random.Generator) -> PromptResponse:
    """T5's objective: 15 % of the tokens in spans of 3 on average, as in its code (`random_spans_noise_mask`).

    There are at most as many spans as sentinels, less the one that ends the target.
    """
    taken = min(max(round(CORRUPTED * len(ids)), 1), len(ids) - 1)
    count = min(max(round(taken / MEAN_SPAN), 1), taken, len(ids) - taken, len(sentinels) - 1)
    lengths, gaps = _segments(taken, count, random), _segments(len(ids) - taken, count, random)
    spans, position = [], 0
    for gap, length in zip(gaps, lengths, strict=True):  # text comes first, so that no two spans touch
        spans.append((position + gap, position + gap + length))
        position += gap + length
    return replace_spans(ids, spans, sentinels)


def prefix(ids: Ids, random: numpy.random.Generator) -> PromptResponse:
    """A prefix language model (T5, section 3.3.1): the text is cut at a random place, and what follows is the target."""
    cut = int(random.integers(1, len(ids)))
    return PromptResponse(list(ids[:cut]), list(ids[cut:]))


def _segments(total: int, count: int, random: numpy.random.Generator) -> list[int]:
    """Lengths of `count` parts of `total`, each at least 1, all divisions equally likely."""
    cuts = numpy.sort(random.choice(total - 1, count - 1, replace=False) + 1)
    return numpy.diff([0, *cuts.tolist(), total]).tolist()  # type: ignore[no-any-return]
