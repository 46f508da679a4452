"""InstructGPT's ptx: a language-model loss on demonstrations or raw text, added to PPO's loss against forgetting."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy

from align.batches.encoding import Limits, encode_demonstrations
from align.batches.micro_batches import micro_batches
from align.core.errors import UserError
from align.core.seeds import RngStream, generator
from align.core.settings import Settings, option
from align.core.tensor_ops import Padded
from align.data.readers import read_texts
from align.models.backbone import flops_profile
from align.models.loading import LoadedModel
from align.models.roles import Roles
from align.ppo.extensions import Extension, TrainingContext
from align.reward.rankings import group_flops, group_sizes, pack_rankings
from align.sft.loss import demonstration_loss
from align.tokenization import ConversationError
from align.tokenization.encoded import PromptResponse
from align.training.engine import TrainEngine

FITTED_EXAMPLES = 16
"""Examples checked at the start for whether they fit the model."""
Ids = Sequence[int]
Span = tuple[int, int]
"""The first index of a span, and the index after its last."""
CORRUPTED, MEAN_SPAN = 0.15, 3.0
"""T5 (Raffel et al. 2020, sections 3.3.3 and 3.3.4): the share of tokens that is masked, and the mean length of a span."""


@dataclass(kw_only=True)
class PtxSettings(Settings):
    """A language-model loss on demonstrations or raw text."""

    data: str = option("", "demonstrations or raw texts: file, folder or hub name", required=True)
    coef: float = option(27.8, "weight of the loss (InstructGPT: 27.8)", gt=0)
    objective: Literal["demonstrations", "lm", "span_corruption", "prefix"] = option(
        "demonstrations",
        "training target: the answers of demonstrations; or of raw texts the next token (lm), T5's masked spans "
        "(span_corruption), or the continuation of a random prefix (prefix)",
    )
    tokens: int = option(512, "length in tokens to which raw texts are packed (lm) or cut", gt=1)
    per_response: int = option(1, "examples for each response (InstructGPT: 8)", gt=0)


@dataclass(frozen=True)
class PtxExample:
    """One row: a prompt, responses to it that do not see each other, and masks of the tokens in the loss."""

    prompt: list[int]
    responses: list[list[int]]
    masks: list[list[bool]]

    @classmethod
    def from_ids(cls, prompt: list[int], *responses: list[int]) -> "PtxExample":
        """Make an example with all response tokens in the loss."""
        return cls(prompt, list(responses), [[True] * len(ids) for ids in responses])

    @property
    def predicted(self) -> int:
        """Number of tokens in the loss."""
        return sum(map(sum, self.masks))


class PtxExamples:
    """Demonstrations or raw texts that training examples are drawn from at random.

    Args:
        max_tokens: longest prompt, and longest response, of a demonstration.
        seed: decides the draws.

    Raises:
        UserError: for data or settings that do not fit the model.
    """

    def __init__(
        self, settings: PtxSettings, policy: LoadedModel, max_tokens: int, seed: int, skip_bad_rows: bool = False
    ) -> None:
        self.settings, self.backbone, self.tokenization, self.seed = settings, policy.backbone, policy.tokenization, seed
        self.end: int = policy.tokenization.tokenizer.eos_token_id
        self.sentinels = _sentinels(policy) if settings.objective == "span_corruption" else []
        self.items = self._read(policy, max_tokens, skip_bad_rows)
        self.profile = flops_profile(policy.backbone, policy.adapter)
        self.draw(FITTED_EXAMPLES, (0,))

    def _read(self, policy: LoadedModel, max_tokens: int, skip_bad_rows: bool) -> Sequence[PtxExample | list[int]]:
        """Read the data: finished examples, or pieces of text whose target is drawn each time."""
        settings = self.settings
        if settings.objective == "demonstrations":
            limits = Limits(max_tokens, max_tokens, "truncate", ("max_prompt_tokens", "max_prompt_tokens"))
            found = encode_demonstrations(settings.data, policy, limits, skip_bad_rows)
            return [PtxExample(item.prompt, [item.response], [item.loss_mask]) for item in found]
        documents = _documents(settings.data, policy, skip_bad_rows)
        if settings.objective == "lm":
            begin = self.tokenization.tokenizer.bos_token_id
            begin = self.end if begin is None else begin
            return pack(([*ids, self.end] for ids in documents), begin, settings.tokens)
        pieces = cut_into_pieces(documents, settings.tokens)
        if not pieces:
            raise UserError(f"{settings.data}: no text has two tokens, so nothing can be masked; give longer texts")
        return pieces

    def _example(self, item: PtxExample | list[int], random: numpy.random.Generator) -> PtxExample:
        if isinstance(item, PtxExample):
            return item
        if self.settings.objective == "prefix":
            found = prefix(item, random)
        else:
            found = span_corruption(item, self.sentinels, random)
        # As in T5's own data, input and target each end with the token that ends a text.
        return PtxExample.from_ids(self.tokenization.as_whole_text(found.prompt), [*found.response, self.end])

    def draw(self, count: int, key: tuple[int, ...]) -> list[PtxExample]:
        """Draw random examples: the same with the same noise for the same key."""
        random = generator(self.seed, RngStream.PTX_ROWS, *key)
        items = [self.items[row] for row in random.integers(len(self.items), size=count).tolist()]
        examples = [self._example(item, random) for item in items]
        for example in examples:
            longest = max(map(len, example.responses))
            self.backbone.require_fit(len(example.prompt), longest, f"{self.settings.data}: an example")
        return examples

    def flops(self, example: PtxExample) -> float:
        """FLOPs of training on an example."""
        return group_flops(self.backbone, self.profile, example, predicted=list(map(len, example.responses)))


class PtxLoss(Extension):
    """Adds the gradient of `coef` times the mean loss of random examples to each optimizer step."""

    def __init__(self, settings: PtxSettings) -> None:
        self.settings, self.flops_since_update = settings, 0.0

    def load(self, context: TrainingContext) -> None:
        config, self.budget = context.run.config, context.run.optimization.micro_batch_tokens
        limits = (context.max_prompt_tokens, config.seed, config.skip_bad_rows)
        self.examples = PtxExamples(self.settings, context.policy, *limits)

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        self.engine, self.roles = engine, roles

    def extra_loss(self, step_key: tuple[int, int, int], count: int) -> dict[str, float]:
        engine, backbone, coef = self.engine, self.examples.backbone, self.settings.coef
        examples = self.examples.draw(count * self.settings.per_response, step_key)
        tokens = sum(example.predicted for example in examples)
        lengths = group_sizes(backbone, examples)
        for rows in engine.micro_batches(micro_batches(range(len(examples)), lengths, self.budget, engine.accelerator)):
            chosen = [examples[row] for row in rows]
            prompt, response, prompt_of_response = pack_rankings(chosen, engine.accelerator.device)
            masks = [list(map(int, mask)) for example in chosen for mask in example.masks]
            mask = Padded.from_lists(masks).ids.to(engine.accelerator.device) > 0
            read = (prompt, response, prompt_of_response)
            engine.backward(coef * demonstration_loss(self.roles.language_model(*read), mask, ~mask, tokens, 0, 0.0))
        self.flops_since_update += sum(map(self.examples.flops, examples))
        return {"loss/ptx": engine.sums["loss"] / coef}

    def flops(self, lengths: Sequence[tuple[int, Sequence[int]]]) -> float:
        flops, self.flops_since_update = self.flops_since_update, 0.0
        return flops


def _documents(data: str, policy: LoadedModel, skip_bad_rows: bool) -> Iterator[list[int]]:
    for number, text in enumerate(read_texts(data, skip_bad_rows), start=1):
        try:
            yield policy.tokenization.text_ids(text.text)
        except ConversationError as error:
            raise UserError(f"{data}: text {text.id or number}: {error}") from error


def _sentinels(policy: LoadedModel) -> list[int]:
    """T5's sentinel tokens in order.

    Raises:
        UserError: if the tokenizer has fewer than two.
    """
    known = policy.tokenization.tokenizer.get_vocab()
    names = [f"<extra_id_{number}>" for number in range(100)]
    sentinels = [known[name] for name in names if name in known]
    if len(sentinels) < 2:
        raise UserError(
            "ptx.objective span_corruption: the tokenizer lacks T5's sentinels <extra_id_0>, <extra_id_1>, ...; set "
            "ptx.objective to lm or prefix"
        )
    return sentinels


# ----------------------------------------------------------------------------------------------------- raw text as examples


def pack(documents: Iterable[Ids], begin: int, length: int) -> list[PtxExample]:
    """Rows of exactly `length` tokens except the last; a document is split where a row is full.

    The documents of a row, which must not attend to each other, are responses to a prompt of one token: positions restart.

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
    return [PtxExample.from_ids([begin], *parts) for parts in rows if parts]


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
