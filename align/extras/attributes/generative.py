"""Generative attribute models (LaMDA, Thoppilan et al. 2022, section 6.1): a language model writes and rates responses.

Its input is `<context> RESPONSE <response> SENSIBLE 1`, with the chat template's beginning of the assistant's turn instead
of RESPONSE. A rating is the probability of the token after an attribute's name.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from align.batches.encoding import Limits
from align.batches.micro_batches import map_rows
from align.core.errors import UserError
from align.core.tensor_ops import BatchLoss, Padded
from align.extras.attributes.expressions import Condition
from align.extras.attributes.heads import AttributeForm, encoded_ratings
from align.extras.attributes.model import SCALE, Head
from align.extras.rules.judgments import JudgedResponse
from align.models.backbone import Backbone
from align.models.heads import LanguageModel, response_log_probs
from align.models.loading import LoadedModel
from align.reward.rankings import group_flops, group_sizes, pack_rankings
from align.tokenization import Tokenization
from align.tokenization.encoded import TokenIds
from align.training.engine import TrainEngine

RATING_VALUES = {"binary": (0, 1), "scale": tuple(range(int(SCALE[0]), int(SCALE[1]) + 1))}
"""Possible ratings after an attribute's name, by kind. Each must be a single token."""


@dataclass(frozen=True)
class AttributeText:
    """Tokens of the question about an attribute, and each possible rating with its token."""

    question: TokenIds
    ratings: tuple[int, ...]
    answers: tuple[int, ...]

    @classmethod
    def from_head(cls, head: Head, tokenization: Tokenization) -> "AttributeText":
        """Tokenize the question of a head. Raise a UserError if its ratings are not single tokens."""
        if head.kind == "ranking":
            raise UserError("form generative does not support rankings; use form heads")
        texts = [tokenization.text_ids(f"\n{head.name.upper()} {rating}") for rating in RATING_VALUES[head.kind]]
        if len({tuple(ids[:-1]) for ids in texts}) > 1 or len({ids[-1] for ids in texts}) < len(texts):
            raise UserError(
                f"form: the tokenizer does not encode the ratings of '{head.name}' as single tokens; use form heads"
            )
        return cls(texts[0][:-1], RATING_VALUES[head.kind], tuple(ids[-1] for ids in texts))


@dataclass(frozen=True)
class TextPart:
    """A shared prefix with several continuations: a context with a response, or both with the questions about it.

    Attributes:
        responses: the response, on which the generator is trained, or the questions.
        attributes: attribute index of each question; empty for a generator's response.
        shares: target weight of each of the model's answers, for each question.
    """

    prompt: TokenIds
    responses: list[TokenIds]
    attributes: tuple[int, ...] = ()
    shares: tuple[tuple[float, ...], ...] = ()

    @property
    def learned(self) -> list[int]:
        """Number of tokens of each of `responses` that the generator is trained on: all or none."""
        return [0 if self.attributes else len(ids) for ids in self.responses]


@dataclass(frozen=True)
class RatedText:
    """A rated response. If the generator is trained on it, the first entry of `parts` is the response without questions."""

    parts: tuple[TextPart, ...]
    attributes: Mapping[str, float]

    @property
    def rated_part(self) -> TextPart:
        """The response with the questions about it."""
        return self.parts[-1]

    @property
    def prompt(self) -> TokenIds:
        """The context and the response."""
        return self.rated_part.prompt

    @property
    def responses(self) -> list[TokenIds]:
        """The questions."""
        return self.rated_part.responses


class Questions:
    """Questions of all attributes. `answers` are all rating tokens."""

    def __init__(self, heads: Sequence[Head], tokenization: Tokenization) -> None:
        self.texts = [AttributeText.from_head(head, tokenization) for head in heads]
        self.answers = sorted({token for text in self.texts for token in text.answers})

    def shares(self, number: int, value: float) -> tuple[float, ...]:
        """Target weight of each of `answers`. A mean over labelers is split between the two adjacent ratings."""
        text = self.texts[number]
        weights = {t: max(0.0, 1.0 - abs(value - rating)) for t, rating in zip(text.answers, text.ratings, strict=True)}
        return tuple(weights.get(token, 0.0) for token in self.answers)

    def ratings(self, answers: Tensor, numbers: Sequence[int]) -> list[float]:
        """Expected ratings [Q] from log-probs or logits [Q, A] and the attribute index of each question.

        For a yes/no attribute, it is P(1) from the logits of its two tokens.
        """
        ratings = []
        for row, number in zip(answers.detach().double().cpu(), numbers, strict=True):
            text = self.texts[number]
            probabilities = torch.softmax(row[[self.answers.index(token) for token in text.answers]], -1)
            ratings.append(float(probabilities @ torch.tensor(text.ratings, dtype=torch.float64)))
        return ratings


class GenerativeModel(LanguageModel):
    """A language model that rates with the token after an attribute's name."""

    def __init__(self, backbone: Backbone, questions: Questions, adapter: str | None = None) -> None:
        super().__init__(backbone, adapter)
        self.questions = questions

    def forward(  # type: ignore[override]
        self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return log-probs [B, A] of the rating tokens at the end of B sequences.

        With `mask` [B, T] bool, also return the log-probs [B, T] of the sequences' tokens where it is true.
        """
        with self.backbone.adapter(self.adapter_name):
            hidden = self.backbone.hidden(prompt, response, prompt_of_response)
            rows = torch.arange(len(response.lengths), device=hidden.device)
            logits = self.backbone.logits(hidden[rows, response.lengths]).float()
            answers = torch.log_softmax(logits, -1)[:, self.questions.answers]
            return answers if mask is None else (answers, response_log_probs(self.backbone, hidden, response, mask)[0])


class GenerativeForm(AttributeForm):
    """Train a language model to write the responses that pass `generator_filter`, and to rate all responses.

    The filter compares attributes. A response without a judgment of such an attribute fails. Without a filter, all pass.
    """

    form = "generative"

    def __init__(self, loaded: LoadedModel, heads: list[Head], generator_filter: str) -> None:
        super().__init__(loaded, heads)
        self.measure["generator_filter"] = generator_filter
        self.questions, self.names = Questions(heads, loaded.tokenization), [head.name for head in heads]
        self.condition = Condition(generator_filter, self.names, "generator_filter") if generator_filter else None

    def build_module(self) -> nn.Module:
        """Return the module to train."""
        return GenerativeModel(self.loaded.backbone, self.questions, self.loaded.adapter)

    def encode(self, rated: Sequence[JudgedResponse], limits: Limits) -> list[RatedText]:
        """Encode rated responses. Raise a UserError if one exceeds the limits or the context length."""
        longest = max(len(text.question) for text in self.questions.texts)
        found = []
        for where, encoded, item in encoded_ratings(rated, self.heads, self.loaded, limits):
            read, known = [*encoded.prompt, *encoded.response], item.targets
            self.loaded.backbone.require_fit(len(read), longest + 1, where)
            numbers = tuple(number for number, name in enumerate(self.names) if name in known)
            question_ids = [self.questions.texts[number].question for number in numbers]
            shares = tuple(self.questions.shares(number, known[self.names[number]]) for number in numbers)
            parts = [TextPart(read, question_ids, numbers, shares)]
            if self.condition is None or self.condition.holds(dict.fromkeys(self.names, math.nan) | dict(known)):
                parts.insert(0, TextPart(encoded.prompt, [encoded.response]))
            found.append(RatedText(tuple(parts), known))
        return found

    def sizes(self, examples: Sequence[RatedText]) -> list[int]:
        """Return the number of tokens in memory per example."""
        return [sum(group_sizes(self.loaded.backbone, item.parts)) for item in examples]

    def flops(self, example: RatedText) -> float:
        """Return the training FLOPs of an example."""
        # The vocabulary is computed for the training targets, and for the token after the last one.
        backbone, profile = self.loaded.backbone, self.profile
        return sum(
            group_flops(backbone, profile, part, predicted=[tokens + 1 for tokens in part.learned]) for part in example.parts
        )

    def batch_loss(
        self, model: nn.Module, device: torch.device, examples: Sequence[RatedText], batch: Sequence[RatedText]
    ) -> BatchLoss:
        """Return a micro-batch's contribution to the loss: in total, per head and of the generator."""
        counts = torch.zeros(len(self.heads))  # equal weight per head, as in the head form
        for item in batch:
            for number in item.rated_part.attributes:
                counts[number] += 1
        tokens = max(1, sum(_learned(item) for item in batch))
        _, numbers, losses, of_texts = compute_texts(model, examples, device)
        means = losses.new_zeros(len(self.heads)).index_add(0, numbers, losses) / counts.to(device).clamp(min=1)
        generator = of_texts.sum() / tokens
        sums = {f"head/{head.name}": mean for head, mean in zip(self.heads, means, strict=True)}
        return BatchLoss(means.sum() + generator, sums | {"loss/generator": generator})

    def judge(self, engine: TrainEngine, examples: list[RatedText], budget: int) -> tuple[Tensor, Tensor, dict[str, float]]:
        def read_rows(rows: list[int]) -> list[tuple[list[float], list[float], float]]:
            items = [examples[row] for row in rows]
            answers, numbers, of_questions, of_texts = compute_texts(engine.module, items, engine.accelerator.device)
            ratings = iter(self.questions.ratings(answers, numbers.tolist()))
            losses, generator = iter(of_questions.tolist()), iter(of_texts.tolist())
            results = []
            for item in items:
                item_ratings, item_losses = [torch.nan] * len(self.heads), [0.0] * len(self.heads)
                for number in item.rated_part.attributes:
                    item_ratings[number], item_losses[number] = next(ratings), next(losses)
                generator_loss = sum(next(generator) for part in item.parts for _ in part.responses)
                results.append((item_ratings, item_losses, generator_loss))
            return results

        predicted, losses, generator = zip(
            *map_rows(self.sizes(examples), budget, engine.accelerator, read_rows), strict=True
        )
        tokens = sum(map(_learned, examples))
        extra_losses = {"loss/generator": sum(generator) / tokens} if tokens else {}
        return torch.tensor(predicted), torch.tensor(losses).sum(0), extra_losses


def compute_texts(
    model: nn.Module, examples: Sequence[RatedText], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the Q questions in B sequences.

    Args:
        model: a `GenerativeModel`, or the engine around it.

    Returns:
        Log-probs [Q, A] of the rating tokens, the attribute index of each question [Q], and the losses of the questions [Q].
        The last tensor has the losses of the generator's tokens, summed over each sequence [B].
    """
    parts = [part for item in examples for part in item.parts]
    inputs = pack_rankings(parts, device)
    learned = torch.tensor([tokens > 0 for part in parts for tokens in part.learned], device=device)
    mask = inputs.response.mask() & learned[:, None]
    answers, log_probs = model(inputs.prompt, inputs.response, inputs.prompt_of_response, mask)
    answers = answers[torch.tensor([bool(part.attributes) for part in parts for _ in part.responses], device=device)]
    shares = answers.new_tensor([row for part in parts for row in part.shares]).reshape(answers.shape)
    numbers = torch.tensor([number for part in parts for number in part.attributes], dtype=torch.long, device=device)
    return answers, numbers, -(shares * answers).sum(-1), -log_probs.sum(-1)


def _learned(item: RatedText) -> int:
    return sum(sum(part.learned) for part in item.parts)
