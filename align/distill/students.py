"""Making a student, and what it and its teacher predict."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.distill.config import DistillConfig
from align.models.backbone import Backbone, model_class, with_every_layer, wrap
from align.models.loading import LoadedModel, load


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
        if config.student_start == "random":
            settings = smaller.config
            kernel = {"attn_implementation": settings._attn_implementation}
            smaller = model_class(settings).from_config(settings, dtype=model.dtype, **kernel)
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


@torch.no_grad()
def predictions_of(teacher: Predictor, prompt: Padded, response: Padded, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The predictions of a teacher, without a gradient; see `Predictor.forward`."""
    logits, hidden = teacher(prompt, response, mask)
    return logits, hidden
