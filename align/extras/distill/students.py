"""The student: how it is made, and the responses that it learns from."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from align.batches.micro_batches import map_rows
from align.core.errors import UserError
from align.core.seeds import Stream, generator
from align.core.tensor_ops import Padded
from align.extras.distill.config import DistillConfig
from align.models.backbone import Backbone, with_every_layer, wrap
from align.models.loading import LoadedModel, load
from align.sampling.generation import Sampling, row_uniforms, sample
from align.tokenization.encoded import EncodedDemonstration
from align.training.data_order import DataOrder


class Predictor(nn.Module):
    """A backbone that predicts each response token: logits, and the hidden states that they are computed from."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, prompt: Padded, response: Padded, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, V] and hidden states [n, H] of the n response tokens where `mask` [B, T] holds."""
        hidden = self.backbone.hidden(prompt, response)[:, :-1][mask]
        return self.backbone.logits(hidden), hidden


def make_student(config: DistillConfig, teacher: LoadedModel) -> LoadedModel:
    """The model to train: every `layer_step`-th layer of the teacher, a new model of that shape, or a named model.

    Raises:
        UserError: if it has another tokenizer, or hidden states of another width while `cosine_weight` is not 0.
    """
    model = teacher.backbone.model
    if not config.student:
        smaller = with_every_layer(model, config.layer_step)
        return replace(teacher, backbone=wrap(smaller.requires_grad_(True)))
    student = load(replace(config, model=config.student), model.dtype)
    vocabularies = [each.tokenization.tokenizer.get_vocab() for each in (teacher, student)]
    sizes = [each.backbone.model.config.vocab_size for each in (teacher, student)]
    if vocabularies[0] != vocabularies[1] or sizes[0] != sizes[1]:
        raise UserError(f"student '{config.student}' has another vocabulary than its teacher, so it cannot learn its logits")
    widths = [each.backbone.hidden_size for each in (teacher, student)]
    if config.cosine_weight and widths[0] != widths[1]:
        raise UserError(
            f"student '{config.student}': its hidden states have {widths[1]} numbers, those of the teacher {widths[0]}; set "
            "cosine_weight to 0"
        )
    return student


def parameter_count(backbone: Backbone) -> int:
    """Weights of a model; a matrix that is used twice counts once."""
    return sum(weight.numel() for weight in backbone.model.parameters())


class WrittenBatches:
    """The examples of each update, some with new responses of the student or the teacher.

    Args:
        epochs: which prompts each update has.
        examples: prompts with their responses, which are empty if all are written in training.

    Attributes:
        current: the examples of the update, by their rows.
        by_student: rows whose response the student wrote.
        written: rows whose response the student or the teacher wrote.
    """

    def __init__(
        self,
        config: DistillConfig,
        epochs: DataOrder[EncodedDemonstration],
        examples: Sequence[EncodedDemonstration],
        teacher: LoadedModel,
        student: LoadedModel,
        accelerator: Accelerator,
    ) -> None:
        self.config, self.epochs, self.examples, self.accelerator = config, epochs, examples, accelerator
        self.teacher, self.student = teacher, student
        self.updates_per_epoch = epochs.updates_per_epoch
        self.sampling = Sampling(
            config.max_response_tokens,
            batch_tokens=max(config.micro_batch_tokens, config.max_response_tokens),
        )
        self.current: dict[int, EncodedDemonstration] = {}
        self.by_student: frozenset[int] = frozenset()
        self.written: frozenset[int] = frozenset()

    def updates(self, epochs: int) -> int:
        """The number of updates in `epochs` epochs."""
        return self.epochs.updates(epochs)

    def rows(self, update: int) -> list[int]:
        """The examples of an update; their responses are written now."""
        rows, config = self.epochs.rows(update), self.config
        draws = generator(config.seed, Stream.DISTILLED_RESPONSES, update).random(len(rows))
        by_student = [row for row, draw in zip(rows, draws, strict=True) if draw < config.student_share]
        self.by_student = frozenset(by_student)
        by_teacher = [row for row in rows if row not in self.by_student] if config.responses == "teacher" else []
        self.written = frozenset([*by_student, *by_teacher])
        self.current.clear()
        self.current |= {row: self.examples[row] for row in rows}
        self.current |= self._write(self.student, by_student, update, 0)
        self.current |= self._write(self.teacher, by_teacher, update, 1)
        return rows

    def _write(self, writer: LoadedModel, rows: list[int], update: int, number: int) -> dict[int, EncodedDemonstration]:
        """A new response to each prompt; the noise depends only on the update and the place in it."""
        if not rows:
            return {}
        prompts = [self.examples[row].prompt for row in rows]
        key = (self.config.seed, Stream.DISTILLED_RESPONSES, update, number)
        uniforms = row_uniforms(len(rows), self.sampling, *key)

        def respond(part: list[int]) -> list[list[int]]:
            asked = [prompts[i] for i in part]
            return sample(writer.backbone, asked, uniforms[part], self.sampling, writer.tokenization.end_ids).ids

        costs = [len(prompt) + self.sampling.max_new_tokens for prompt in prompts]
        responses = map_rows(costs, self.sampling.batch_tokens, self.accelerator, respond)
        return {
            row: EncodedDemonstration(prompt, ids, [True] * len(ids))
            for row, prompt, ids in zip(rows, prompts, responses, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """The state of the prompts' order; the responses follow from the update and the weights."""
        return self.epochs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the prompts are those of a checkpoint. Raises: UserError."""
        self.epochs.load_state_dict(state)
