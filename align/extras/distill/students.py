"""The student: how it is made, and the responses that it learns from."""

from dataclasses import replace
from typing import Literal, NamedTuple

from accelerate import Accelerator
from torch import Tensor, nn

from align.batches.micro_batches import map_rows
from align.core.errors import UserError
from align.core.seeds import RngStream, generator
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.models.backbone import Backbone, with_every_layer, wrap
from align.models.loading import LoadedModel, load
from align.sampling.generation import SamplingParams, row_uniforms, sample
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


def make_student(
    teacher: LoadedModel, name: str, keep_every_nth_layer: int, equal_width: bool, settings: ModelConfig
) -> LoadedModel:
    """Return the model to train: every `keep_every_nth_layer`-th layer of the teacher, or a named model.

    Args:
        equal_width: whether hidden states must be as wide as the teacher's.
        settings: how a named model is loaded.

    Raises:
        UserError: if it has another tokenizer, or hidden states of another width.
    """
    model = teacher.backbone.model
    if not name:
        smaller = with_every_layer(model, keep_every_nth_layer)
        return replace(teacher, backbone=wrap(smaller.requires_grad_(True)))
    student = load(replace(settings, model=name), model.dtype)
    vocabularies = [each.tokenization.tokenizer.get_vocab() for each in (teacher, student)]
    sizes = [each.backbone.model.config.vocab_size for each in (teacher, student)]
    if vocabularies[0] != vocabularies[1] or sizes[0] != sizes[1]:
        raise UserError(f"student '{name}' has another vocabulary than its teacher, so it cannot learn its logits")
    widths = [each.backbone.hidden_size for each in (teacher, student)]
    if equal_width and widths[0] != widths[1]:
        raise UserError(
            f"student '{name}': its hidden states have {widths[1]} numbers, those of the teacher {widths[0]}; set "
            "cosine_weight to 0"
        )
    return student


def parameter_count(backbone: Backbone) -> int:
    """Weights of a model; a matrix that is used twice counts once."""
    return sum(weight.numel() for weight in backbone.model.parameters())


Writer = Literal["data", "student", "teacher"]


class WrittenExample(NamedTuple):
    """A prompt with a response, and who wrote it."""

    example: EncodedDemonstration
    writer: Writer


class WrittenBatches:
    """The examples of each update, some with new responses of the student or the teacher.

    Args:
        order: the examples of each update; responses are empty if all are written in training.
        on_policy_fraction: share of examples whose response the student writes.
        teacher_writes: whether the teacher writes the others.
    """

    def __init__(
        self,
        order: DataOrder[EncodedDemonstration],
        teacher: LoadedModel,
        student: LoadedModel,
        on_policy_fraction: float,
        teacher_writes: bool,
        sampling: SamplingParams,
        accelerator: Accelerator,
    ) -> None:
        self.order, self.teacher, self.student = order, teacher, student
        self.on_policy_fraction, self.teacher_writes = on_policy_fraction, teacher_writes
        self.sampling, self.accelerator = sampling, accelerator

    def batch(self, update: int) -> list[WrittenExample]:
        """Return the examples of an update; their responses are written now."""
        batch = self.order.batch(update)
        draws = generator(self.order.seed, RngStream.DISTILLED_RESPONSES, update).random(len(batch))
        others: Writer = "teacher" if self.teacher_writes else "data"
        writers: list[Writer] = ["student" if draw < self.on_policy_fraction else others for draw in draws]
        written = dict(enumerate(batch))
        for number, (writer, model) in enumerate((("student", self.student), ("teacher", self.teacher))):
            written |= self._write(model, batch, [row for row in written if writers[row] == writer], (update, number))
        return [WrittenExample(written[row], writer) for row, writer in enumerate(writers)]

    def _write(
        self, model: LoadedModel, batch: list[EncodedDemonstration], rows: list[int], key: tuple[int, int]
    ) -> dict[int, EncodedDemonstration]:
        """Return new responses to some prompts; the noise depends only on the update and the place in it."""
        prompts = [batch[row].prompt for row in rows]
        uniforms = row_uniforms(len(rows), self.sampling, self.order.seed, RngStream.DISTILLED_RESPONSES, *key)

        def respond(part: list[int]) -> list[list[int]]:
            asked = [prompts[i] for i in part]
            return sample(model.backbone, asked, uniforms[part], self.sampling, model.tokenization.end_ids).ids

        costs = [len(prompt) + self.sampling.max_new_tokens for prompt in prompts]
        responses = map_rows(costs, self.sampling.batch_tokens, self.accelerator, respond) if rows else []
        pairs = zip(prompts, responses, strict=True)
        return dict(zip(rows, [EncodedDemonstration(prompt, ids, [True] * len(ids)) for prompt, ids in pairs], strict=True))
