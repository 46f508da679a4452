"""Training of the generative form: the generator's loss on responses and the discriminator's on ratings, in one model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from align.attributes.config import AttributeConfig
from align.attributes.generative import (
    GenerativeModel,
    Questions,
    RatedText,
    TextPart,
    encode_texts,
    text_sizes,
)
from align.attributes.judgments import RatedResponse
from align.attributes.model import Head, save_generative_model
from align.attributes.tasks import AttributeTask
from align.batches.encoding import Limits
from align.batches.micro_batches import map_rows
from align.core.tensor_ops import Padded
from align.models.loading import LoadedModel
from align.reward.scoring import group_flops, pack_rankings
from align.training.memory_dry_run import BatchShape
from align.training.optimization import Sums


class TextOutputs(NamedTuple):
    """What the model computes for some texts.

    Attributes:
        answers: log-probs [Q, A] of the tokens that rate, after each question.
        losses: of each question [Q].
        attributes: of each question [Q].
        generator: the losses [R] of the tokens that the generator learns, summed over each text, questions included.
    """

    answers: Tensor
    losses: Tensor
    attributes: Tensor
    generator: Tensor


class GenerativeTask(AttributeTask[RatedText]):
    """A language model learns to write responses that pass a filter, and the ratings of all."""

    adapter: ClassVar[str] = "policy"
    writes: ClassVar[bool] = True

    @staticmethod
    def build(config: AttributeConfig, loaded: LoadedModel, heads: list[Head]) -> GenerativeModel:
        return GenerativeModel(loaded.backbone, Questions(heads, loaded.tokenization), loaded.adapter)

    @staticmethod
    def encode(
        config: AttributeConfig, rated: Sequence[RatedResponse], module: Any, loaded: LoadedModel, limits: Limits
    ) -> list[RatedText]:
        learned_if = config.generator_filter if config.generator_weight else None
        return encode_texts(rated, module.questions, loaded, limits, learned_if)

    @staticmethod
    def sizes(loaded: LoadedModel, examples: Sequence[RatedText]) -> list[int]:
        return text_sizes(loaded.backbone, examples)

    @staticmethod
    def batch_shape(batch: Sequence[RatedText]) -> BatchShape:
        parts = [part for item in batch for part in item.parts]
        predicted = sum(sum(_predicted(part)) for part in parts)
        return BatchShape.from_lengths([(len(part.prompt), list(map(len, part.responses))) for part in parts], predicted)

    def _compute(self, parts: Sequence[TextPart]) -> TextOutputs:
        device = self.run.accelerator.device
        prompt, response, prompt_index = pack_rankings(parts, device)
        mask = Padded.from_lists([list(map(int, row)) for part in parts for row in part.generated]).ids.to(device) > 0
        answers, log_probs = self.optimization.module(prompt, response, prompt_index, mask)
        is_question = torch.tensor([bool(part.attributes) for part in parts for _ in part.responses], device=device)
        answers = answers[is_question]
        shares = answers.new_tensor([row for part in parts for row in part.shares]).reshape(answers.shape)
        numbers = torch.tensor([number for part in parts for number in part.attributes], dtype=torch.long, device=device)
        return TextOutputs(answers, -(shares * answers).sum(-1), numbers, -log_probs.sum(-1))

    def loss(self, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        batch = [self.examples[row] for row in rows]
        counts = torch.zeros(len(self.heads))  # as in the head form, every head has the same weight
        for item in batch:
            for number in item.rated_part.attributes:
                counts[number] += 1
        tokens = max(1, sum(_learned(item) for item in batch))

        def loss_of_rows(part: list[int]) -> tuple[Tensor, Sums]:
            examples = [self.examples[row] for row in part]
            texts = [text for item in examples for text in item.parts]
            outputs = self._compute(texts)
            losses = outputs.losses.new_zeros(len(self.heads)).index_add(0, outputs.attributes, outputs.losses)
            means = losses / counts.to(losses.device).clamp(min=1)
            generator = outputs.generator.sum() / tokens
            flops = sum(group_flops(self.loaded.backbone, self.shape, text, predicted=_predicted(text)) for text in texts)
            return means.sum() + self.config.generator_weight * generator, {
                **{f"head/{head.name}": mean for head, mean in zip(self.heads, means, strict=True)},
                "generator": generator,
                "read": torch.full_like(generator, sum(self.sizes(self.loaded, examples))),
                "flops": torch.tensor(flops, dtype=torch.float64, device=generator.device),
            }

        return loss_of_rows

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        heads = {f"head/{head.name}": sums[f"head/{head.name}"] for head in self.heads}
        return {"loss": sums["loss"], **heads, "loss/generator": sums["generator"], "tokens/read": sums["read"]}

    def judge(self, examples: Sequence[RatedText]) -> tuple[Tensor, Tensor, dict[str, float]]:
        questions = Questions(self.heads, self.loaded.tokenization)

        def read_rows(rows: list[int]) -> list[tuple[list[float], list[float], float]]:
            items = [examples[row] for row in rows]
            outputs = self._compute([part for item in items for part in item.parts])
            ratings = iter(questions.ratings(outputs.answers, outputs.attributes.tolist()))
            losses, generator = iter(outputs.losses.tolist()), iter(outputs.generator.tolist())
            found = []
            for item in items:
                item_ratings, item_losses = [torch.nan] * len(self.heads), [0.0] * len(self.heads)
                for number in item.rated_part.attributes:
                    item_ratings[number], item_losses[number] = next(ratings), next(losses)
                generator_loss = sum(next(generator) for part in item.parts for _ in part.responses)
                found.append((item_ratings, item_losses, generator_loss))
            return found

        sizes = self.sizes(self.loaded, examples)
        rows = map_rows(sizes, self.config.micro_batch_tokens, self.run.accelerator, read_rows)
        predicted, losses, generator = zip(*rows, strict=True)
        tokens = sum(map(_learned, examples))
        extra_losses = {"loss/generator": self.config.generator_weight * sum(generator) / tokens} if tokens else {}
        return torch.tensor(predicted), torch.tensor(losses).sum(0), extra_losses

    def write_model(self, folder: Path, weights: dict[str, Tensor], state: Any, card: dict[str, Any]) -> None:
        save_generative_model(folder, self.loaded, weights, self.heads, card)

    def describe(self, rows: list[int]) -> list[dict[str, object]]:
        text = self.loaded.tokenization.text
        return [
            {"read": text(item.rated_part.prompt), "attributes": dict(item.attributes), "learned": len(item.parts) > 1}
            for item in (self.examples[row] for row in rows)
        ]


def _learned(item: RatedText) -> int:
    """Tokens that the generator learns."""
    return sum(sum(row) for part in item.parts for row in part.generated)


def _predicted(part: TextPart) -> list[int]:
    """Tokens of each text that need the vocabulary: what the generator learns, and what follows the last one."""
    return [sum(row) + 1 for row in part.generated]
