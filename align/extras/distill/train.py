"""Distillation: train a student on a teacher's token distributions and hidden states.

Launch it with `accelerate launch align/extras/distill/train.py --config configs/distill/x.yaml`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from align.batches.encoding import Data, encode_demonstrations
from align.batches.micro_batches import micro_batches
from align.batches.mixtures import TrainingData, encode_mixture, is_given
from align.core.errors import UserError, counted
from align.core.launch import run_stage
from align.core.settings import MixtureConfig, ModelConfig, OptimizationConfig, RunConfig, option, require_setting
from align.core.tensor_ops import BatchLoss, Padded, entropy_of, log_probs_of
from align.extras.distill.loss import LossWeights, cosine_distance, distillation_loss, soft_cross_entropy
from align.extras.rules.train import train
from align.models.backbone import Backbone, flops_profile, with_every_layer, wrap
from align.models.checkpoint import require_savable, save_model, weights_of
from align.models.loading import LoadedModel, load
from align.models.vocabulary import vocabulary_rows
from align.runtime.distributed import run_on_main, sum_across_processes
from align.runtime.flops import forward_flops, training_flops
from align.runtime.sharding import place_frozen_model
from align.sft.train import token_counts
from align.tokenization.encoded import EncodedDemonstration
from align.training.data_order import DataOrder, EpochConfig
from align.training.engine import TrainEngine
from align.training.model_source import Model, ModelSource
from align.training.process_state import making_trainer
from align.training.run import Run
from align.training.setup import build_engine, with_data_names


@dataclass(kw_only=True)
class DistillConfig(MixtureConfig, EpochConfig, ModelConfig, RunConfig, OptimizationConfig):
    """Distillation of a teacher into a smaller student. Defaults follow DistilBERT (Sanh et al. 2019)."""

    model: str = option("smollm2-135m", "Teacher: local folder, LoRA adapter, Hub id or built-in model.")
    student: str = option("", "Initial student. Must share the teacher's tokenizer. Default: layers of the teacher.")
    keep_every_nth_layer: int = option(
        2,
        "Initialize the student from the teacher's first layer and every n-th after it (DistilBERT: 2). Ignored "
        "with student.",
        ge=2,
    )
    learning_rate: float = option(1e-4, "Peak learning rate.")
    train_data: str = option(
        "data/demonstrations.jsonl",
        "Training demonstrations: file, folder or Hub id. Separate several by commas, each NAME or NAME=WEIGHT.",
    )
    validation_data: str = option("", "Held-out demonstrations, used to select the best student.")
    batch_size: int = option(32, "Examples per update, over all processes.")
    max_response_tokens: int = option(256, "Maximum response length, in tokens.")
    temperature: float = option(
        2.0, "Distillation temperature (DistilBERT: 2). Divides the logits of teacher and student.", gt=0
    )
    ce_weight: float = option(
        5.0, "Weight of the cross-entropy with the teacher, scaled by temperature squared (DistilBERT: 5).", ge=0
    )
    lm_weight: float = option(2.0, "Weight of the language-model loss (DistilBERT: 2).", ge=0)
    cosine_weight: float = option(
        1.0, "Weight of the cosine loss between the last hidden states of student and teacher (DistilBERT: 1).", ge=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "lora_r", self.lora_r == 0, "0, because distillation trains all weights of the student")
        weights = ("ce_weight", "lm_weight", "cosine_weight")
        require_setting(
            self, "ce_weight", any(getattr(self, name) for name in weights), "above 0, unless another loss weight is"
        )


class Predictor(nn.Module):
    """A backbone with output layer: logits and hidden states of response tokens."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, prompt: Padded, response: Padded, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [n, V] and hidden states [n, H] of the n response tokens where `mask` [B, T] is true."""
        hidden = self.backbone.hidden(prompt, response)[:, :-1][mask]
        return self.backbone.logits(hidden), hidden


def make_student(
    teacher: LoadedModel, name: str, keep_every_nth_layer: int, equal_width: bool, settings: ModelConfig
) -> LoadedModel:
    """Return the model to train: every `keep_every_nth_layer`-th layer of the teacher, or a named model.

    Args:
        equal_width: whether hidden states must have the teacher's width.
        settings: settings for loading a named model.

    Raises:
        UserError: if the student has another tokenizer, or hidden states of another width.
    """
    model = teacher.backbone.model
    if not name:
        smaller = with_every_layer(model, keep_every_nth_layer)
        return replace(teacher, backbone=wrap(smaller.requires_grad_(True)))
    student = load(replace(settings, model=name), model.dtype)
    vocabularies = [each.tokenization.tokenizer.get_vocab() for each in (teacher, student)]
    if vocabularies[0] != vocabularies[1] or max(vocabularies[0].values()) >= common_rows(teacher, student):
        raise UserError(f"student '{name}' and its teacher have different vocabularies")
    widths = [each.backbone.hidden_size for each in (teacher, student)]
    if equal_width and widths[0] != widths[1]:
        raise UserError(
            f"student '{name}' has hidden size {widths[1]}, but the teacher has {widths[0]}; set cosine_weight to 0"
        )
    return student


def common_rows(teacher: LoadedModel, student: LoadedModel) -> int:
    """Return the number of tokens that both models predict. The larger matrix has more padding rows."""
    return min(vocabulary_rows(model.backbone.model) for model in (teacher, student))


class DistillForm:
    """Distillation objective; see `RuleForm`."""

    evaluates_start = True

    def __init__(self, teacher: LoadedModel, student: LoadedModel, weights: LossWeights) -> None:
        self.teacher, self.loaded, self.weights = teacher, student, weights
        self.measure = {"model": teacher.base, "weights of the losses": list(weights)}
        self.predictor, self.rows = Predictor(teacher.backbone), common_rows(teacher, student)
        self.profiles = flops_profile(student.backbone, None), flops_profile(teacher.backbone, None)

    def sizes(self, examples: Sequence[EncodedDemonstration]) -> list[int]:
        """Return the number of tokens in memory per example."""
        return token_counts(examples)

    def flops(self, example: EncodedDemonstration) -> float:
        """Return the FLOPs of the teacher's pass over an example and of the student's update."""
        lengths = len(example.prompt), [len(example.response)], sum(example.loss_mask)
        return training_flops(self.profiles[0], *lengths) + forward_flops(self.profiles[1], *lengths)

    def batch_loss(
        self,
        model: nn.Module,
        device: torch.device,
        examples: Sequence[EncodedDemonstration],
        batch: Sequence[EncodedDemonstration],
    ) -> BatchLoss:
        """Return a micro-batch's part of the loss, a mean over the tokens of the global batch, and sums over its tokens."""
        prompt = Padded.from_lists([example.prompt for example in examples]).to(device)
        response = Padded.from_lists([example.response for example in examples]).to(device)
        mask = Padded.from_lists([list(map(int, example.loss_mask)) for example in examples]).ids.to(device) > 0
        with torch.no_grad():
            teacher_logits, teacher_states = self.predictor(prompt, response, mask)
            teacher_logits = teacher_logits[:, : self.rows]
        logits, states = model(prompt, response, mask)
        ce = soft_cross_entropy(logits[:, : self.rows], teacher_logits, self.weights.temperature)
        nll = -log_probs_of(logits, response.ids[mask])
        distances = cosine_distance(states, teacher_states) if self.weights.cosine else ce.new_zeros(0)
        tokens = sum(sum(example.loss_mask) for example in batch)
        sums = {
            "ce": ce.detach().sum(),
            "entropy": entropy_of(teacher_logits, self.weights.temperature).sum(),
            "lm": nll.detach().sum(),
            "cosine": distances.detach().sum(),
            "tokens": mask.sum(),
        }
        return BatchLoss(distillation_loss(ce, nll, distances, tokens, self.weights), sums)

    def training_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an update from the sums over its micro-batches."""
        return loss_parts(sums) | {"loss": sums["loss"], "tokens/trained": sums["tokens"]}

    @torch.no_grad()
    def evaluate(self, engine: TrainEngine, held_out: list[EncodedDemonstration], budget: int) -> dict[str, float]:
        """Return the losses on held-out demonstrations, equal on every process; empty without any."""
        if not held_out:
            return {}
        accelerator, names = engine.accelerator, list[str]()
        total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        for part in micro_batches(range(len(held_out)), token_counts(held_out), budget, accelerator):
            examples = [held_out[row] for row in part.rows]
            sums = self.batch_loss(engine.module, accelerator.device, examples, examples).sums
            names, values = list(sums), [torch.as_tensor(value) for value in sums.values()]
            total = total + part.weight * torch.stack(values).double()
        parts = loss_parts(dict(zip(names, sum_across_processes(total, accelerator).tolist(), strict=True)))
        loss = self.weights.ce * self.weights.temperature**2 * parts["loss/ce"] + self.weights.lm * parts["loss/lm"]
        parts["loss"] = loss + self.weights.cosine * parts["loss/cosine"]
        return {f"validation/{name}": value for name, value in parts.items()}

    def save(self, engine: TrainEngine, data: str, metrics: dict[str, float]) -> None:
        """Save the student as the run's result."""
        run, student = engine.run, self.loaded
        state = weights_of(student.backbone, engine.model_state())
        sizes = [model.backbone.model.num_parameters() for model in (student, self.teacher)]
        made = {"teacher": run.model_config.model, "parameters": f"{sizes[0]:,} of {sizes[1]:,}"}
        card = run.card("Distilled model", data, metrics, **made)
        run_on_main(lambda: save_model(run.folder / "model", student, state, card), run.accelerator)


def loss_parts(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the three losses as means over their tokens, and KL(teacher || student), from sums over the global batch."""
    tokens = max(1.0, sums["tokens"])
    return {
        "loss/ce": sums["ce"] / tokens,
        "loss/lm": sums["lm"] / tokens,
        "loss/cosine": sums["cosine"] / tokens,
        "kl": (sums["ce"] - sums["entropy"]) / tokens,
    }


class DistillTrainer:
    """Trainer that distills a teacher into a student.

        config = DistillConfig(output_dir="runs/student", max_response_tokens=64)
        folder = DistillTrainer("runs/ppo/model", [{"prompt": "Hi", "completion": "Hello!"}], config).train()

    For arguments, see `SFTTrainer`. The teacher has no adapter. DeepSpeed is not supported.
    """

    @making_trainer()
    def __init__(
        self,
        teacher: Model,
        train_data: TrainingData,
        config: DistillConfig,
        validation_data: Data = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.config = config = with_data_names(config, train_data=train_data, validation_data=validation_data)
        source = ModelSource(teacher, tokenizer)
        self.run = run = Run(source.settings(config), "distill")
        loaded = source.load(run, is_trained=False)
        if run.accelerator.state.deepspeed_plugin is not None:
            raise UserError("align distill does not support DeepSpeed; launch it with configs/accelerate/ddp.yaml")
        if loaded.adapter:
            raise UserError("a teacher in memory must not have an adapter; merge it or pass its folder")
        student = make_student(loaded, config.student, config.keep_every_nth_layer, config.cosine_weight > 0, config)
        run_on_main(lambda: require_savable(student), run.accelerator)
        limits, skip = config.limits, config.skip_bad_rows
        read = partial(encode_demonstrations, loaded=loaded, limits=limits, skip_bad_rows=skip)
        mixed = encode_mixture(train_data, read, config.task_prefixes)
        self.held_out = read(validation_data) if is_given(validation_data) else []
        small, large = (model.backbone.model.num_parameters() / 1e6 for model in (student, loaded))
        run.print(
            f"distill: {counted(len(mixed.examples), 'training example')}, {len(self.held_out)} held out; "
            f"teacher {run.model_config.model}\n"
            f"student has {small:.1f} million parameters, {small / large:.0%} of the teacher's {large:.1f} million"
        )
        place_frozen_model(loaded.backbone, run.accelerator)
        weights = LossWeights(config.ce_weight, config.lm_weight, config.cosine_weight, config.temperature)
        self.form, module = DistillForm(loaded, student, weights), Predictor(student.backbone)
        self.order = DataOrder(mixed, config.seed, config.batch_size, config.mixing_cap, config.mixing_temperature)
        run.print(run.memory.check(module, [loaded.backbone]))
        self.engine = build_engine(run, module, self.order.updates(config.num_train_epochs))

    def train(self) -> Path:
        """Train from the last checkpoint. Return the folder of the best student."""
        config = self.config
        with self.run:
            return train(self.form, self.engine, self.order, self.held_out, config.train_data, config.eval_steps)


def run_distill(config: DistillConfig) -> Path:
    """Distill `config.model` into a student on `config.train_data`; return the folder of the best student."""
    return DistillTrainer(config.model, config.train_data, config, config.validation_data).train()


if __name__ == "__main__":
    run_stage(DistillConfig, run_distill)
