"""Training examples from raw text: next token, span corruption (T5), text infilling (BART) and prefix LM.

objective = TextObjective("span_corruption", loaded, "objective")
pieces = cut_into_pieces(objective.documents("corpus.jsonl"), 512)
prompt, response = objective.example(pieces[0], random)  # spans depend on the generator
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy

from align.batches.mixtures import Data, data_name, split_prefix
from align.core.errors import UserError
from align.data.readers import Text, read_texts
from align.models.loading import LoadedModel
from align.tokenization import ConversationError
from align.tokenization.encoded import PromptResponse, PromptResponses

Ids = Sequence[int]
Span = tuple[int, int]
"""Start and end (exclusive) of a span."""
TextObjectiveName = Literal["lm", "span_corruption", "infilling", "prefix"]
CORRUPTED, INFILLED, MEAN_SPAN = 0.15, 0.3, 3.0
"""Fraction of tokens that is masked in T5 (Raffel et al. 2020, section 3.3.4) and in BART (Lewis et al. 2020, section 5.1),
and the mean length of a span in both."""


class TextObjective:
    """Creates input and target token ids from text.

    Args:
        setting: name of the setting that chooses the objective, for messages.

    Raises:
        UserError: if the tokenizer lacks the tokens that the objective needs.
    """

    def __init__(self, name: TextObjectiveName, loaded: LoadedModel, setting: str) -> None:
        self.name, self.tokenization = name, loaded.tokenization
        tokenizer = loaded.tokenization.tokenizer
        self.end: int = tokenizer.eos_token_id
        self.begin: int = self.end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.sentinels = sentinel_ids(loaded)
        self.mask: int | None = tokenizer.mask_token_id
        if self.mask is None and self.sentinels:
            self.mask = self.sentinels[0]
        instead = f"set {setting} to lm or prefix"
        if name == "span_corruption" and len(self.sentinels) < 2:
            lacks = "the tokenizer lacks T5's sentinel tokens <extra_id_0>, <extra_id_1>, ..."
            raise UserError(f"{setting} span_corruption: {lacks}; {instead}")
        if name == "infilling" and self.mask is None:
            raise UserError(f"{setting} infilling: the tokenizer has neither a mask token nor <extra_id_0>; {instead}")

    def documents(self, data: Data, skip_bad_rows: bool = False) -> Iterator[tuple[Text, list[int]]]:
        """Yield the documents of a source with their token ids. Errors as in `read_texts`."""
        source, prefix = split_prefix(data)
        if prefix:
            raise UserError("task_prefixes must be empty for raw text, which has no prompts")
        for number, text in enumerate(read_texts(source, skip_bad_rows), start=1):  # type: ignore[arg-type]
            try:
                ids = self.tokenization.text_ids(text.text)
            except ConversationError as error:
                raise UserError(f"{data_name(data)}: text {text.id or number}: {error}") from error
            yield text, [*ids, self.end] if self.name == "lm" else ids

    def example(self, ids: Ids, random: numpy.random.Generator) -> PromptResponse:
        """Create input and target from a block of text. As in T5, both end with EOS."""
        if self.name == "lm":
            return PromptResponse([self.begin], list(ids))
        if self.name == "prefix":
            prompt, response = prefix(ids, random)
        elif self.name == "infilling":
            assert self.mask is not None
            prompt, response = infilling(ids, self.mask, random)
        else:
            prompt, response = span_corruption(ids, self.sentinels, random)
        return PromptResponse(self.tokenization.as_whole_text(prompt), [*response, self.end])


def sentinel_ids(loaded: LoadedModel) -> list[int]:
    """Return T5's sentinel tokens in order, empty if the tokenizer has none."""
    known = loaded.tokenization.tokenizer.get_vocab()
    names = [f"<extra_id_{number}>" for number in range(100)]
    return [known[name] for name in names if name in known]


def pack(documents: Iterable[Ids], begin: int, length: int) -> list[PromptResponses]:
    """Pack documents into blocks of exactly `length` tokens, except for the last one. Documents may be split across blocks.

    The documents of a row, which must not attend to each other, are responses to a prompt of one token: positions restart.

    Args:
        documents: token ids of each document, with the end token.
        begin: token from which the first token of a document, or of a part of one, is predicted.
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
    """Split documents into blocks of at most `length` tokens. Blocks of one token are dropped."""
    cut = (list(ids[start : start + length]) for ids in documents for start in range(0, len(ids), length))
    return [piece for piece in cut if len(piece) > 1]


def replace_spans(ids: Ids, spans: Sequence[Span], sentinels: Sequence[int]) -> PromptResponse:
    """Return T5's input, with each span replaced by a sentinel, and target, each sentinel followed by its span.

    Args:
        spans: spans in order, not adjacent to each other.
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
    """T5's objective: mask 15 % of the tokens in spans of mean length 3, like T5's `random_spans_noise_mask`.

    There are at most as many spans as sentinels, less the one that ends the target.
    """
    taken = min(max(round(CORRUPTED * len(ids)), 1), len(ids) - 1)
    count = min(max(round(taken / MEAN_SPAN), 1), taken, len(ids) - taken, len(sentinels) - 1)
    lengths, gaps = _segments(taken, count, random), _segments(len(ids) - taken, count, random)
    spans, position = [], 0
    for gap, length in zip(gaps, lengths, strict=True):  # a gap precedes each span, so spans never touch
        spans.append((position + gap, position + gap + length))
        position += gap + length
    return replace_spans(ids, spans, sentinels)


def mask_spans(ids: Ids, spans: Sequence[Span], mask: int) -> PromptResponse:
    """Return BART's input, with each span replaced by one mask token (inserted for empty spans), and the text as target.

    Args:
        spans: spans in order, not overlapping.
    """
    kept: list[int] = []
    end = 0
    for start, stop in spans:
        kept += [*ids[end:start], mask]
        end = stop
    return PromptResponse([*kept, *ids[end:]], list(ids))


def infilling(ids: Ids, mask: int, random: numpy.random.Generator) -> PromptResponse:
    """BART's text infilling: mask 30 % of the tokens in spans of Poisson-distributed length with mean 3.

    Spans of length 0 insert a mask token. The last span is cut to the tokens that remain to be masked.
    """
    remaining = min(max(round(INFILLED * len(ids)), 1), len(ids) - 1)
    kept, lengths = len(ids) - remaining, list[int]()
    while remaining:
        lengths.append(min(int(random.poisson(MEAN_SPAN)), remaining))
        remaining -= lengths[-1]
    # Place the spans among the kept tokens uniformly at random.
    places = numpy.sort(random.choice(kept + len(lengths), len(lengths), replace=False)).tolist()
    spans, masked = [], 0
    for number, (place, length) in enumerate(zip(places, lengths, strict=True)):
        start = place - number + masked
        spans.append((start, start + length))
        masked += length
    return mask_spans(ids, spans, mask)


def prefix(ids: Ids, random: numpy.random.Generator) -> PromptResponse:
    """Prefix LM (T5, section 3.3.1): split a text at a random position and predict the rest."""
    cut = int(random.integers(1, len(ids)))
    return PromptResponse(list(ids[:cut]), list(ids[cut:]))


def _segments(total: int, count: int, random: numpy.random.Generator) -> list[int]:
    """Partition `total` into `count` positive parts uniformly at random."""
    cuts = numpy.sort(random.choice(total - 1, count - 1, replace=False) + 1)
    return numpy.diff([0, *cuts.tolist(), total]).tolist()  # type: ignore[no-any-return]
