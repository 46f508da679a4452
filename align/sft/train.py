"""Supervised fine-tuning on the assistant's turns of demonstrations, or on raw text.

Launch it with `accelerate launch align/sft/train.py --config configs/sft/x.yaml`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from peft import PeftConfig
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from align.batches.encoding import Data, encode_demonstrations
from align.batches.micro_batches import micro_batches
from align.batches.mixtures import TrainingData, encode_split
from align.core.errors import UserError, counted
from align.core.launch import run_stage
from align.core.tensor_ops import BatchLoss, Padded
from align.models.backbone import flops_profile
from align.models.checkpoint import save_model, weights_of
from align.models.heads import LanguageModel
from align.models.loading import LoadedModel
from align.runtime.distributed import run_on_main, sum_across_processes
from align.runtime.flops import FlopsProfile, training_flops
from align.sft.config import SFTConfig
from align.sft.loss import demonstration_loss
from align.sft.raw_text import RawText, RawTextOrder
from align.tokenization.encoded import EncodedDemonstration
from align.training.data_order import DataOrder, measured_on
from align.training.engine import TrainEngine
from align.training.epoch_loop import EpochLoop
from align.training.layerwise import layer_groups
from align.training.model_source import Model, ModelSource
from align.training.monitor import Monitor, examples_as_text
from align.training.process_state import making_trainer
from align.training.run import Run
from align.training.setup import build_engine, with_data_names


def train(
    config: SFTConfig,
    loaded: LoadedModel,
    engine: TrainEngine,
    order: DataOrder[EncodedDemonstration],
    held_out: list[EncodedDemonstration],
) -> Path:
    """Fine-tune a model from the last checkpoint. Return the folder of the best model on `held_out`, or of the last."""
    run, budget, prompt_weight = engine.run, config.micro_batch_tokens, config.prompt_loss_weight
    profile = flops_profile(loaded.backbone, loaded.adapter)
    loss_of = partial(batch_loss, engine.module, prompt_weight=prompt_weight, device=run.accelerator.device)
    loop, monitor = EpochLoop(engine, order, config.eval_steps, measured_on("validation_data", held_out)), Monitor(run)
    loop.measure_largest_micro_batch(((batch, token_counts(batch)) for batch in order.first_batches()), loss_of)
    if not loop.done:
        run.log(0, evaluate(engine, held_out, budget))

    for update in loop.updates():
        batch = order.batch(update)
        lengths = token_counts(batch)
        with monitor.update(update, partial(examples_as_text, batch, loaded.tokenization)):
            for part in micro_batches(range(len(batch)), lengths, budget, run.accelerator):
                engine.backward(loss_of([batch[row] for row in part.rows], batch), part.weight)
            monitor.add(engine.reduce_gradients())
            monitor.lap("learn")
            monitor.add(engine.step(update))
            monitor.lap("step")
        monitor.add({"tokens/read": float(sum(lengths))})
        monitor.add_speed(sum(lengths), sum(example_flops(profile, example, prompt_weight) for example in batch))
        if loop.is_due(update):
            monitor.add(evaluate_and_save(loop, loaded, held_out, config.train_data, monitor.row))
            monitor.lap("validate")
        monitor.log(update, loop.progress(monitor.row["loss"]))

    if loop.is_due_again():
        evaluate_and_save(loop, loaded, held_out, config.train_data, {})
    return run.folder / "model"


def batch_loss(
    model: nn.Module,
    examples: Sequence[EncodedDemonstration],
    batch: Sequence[EncodedDemonstration],
    prompt_weight: float,
    device: torch.device,
) -> BatchLoss:
    """Return a micro-batch's contribution to the loss, which is a mean over the tokens of the global batch.

    Args:
        examples: the micro-batch.
        batch: the global batch.
    """
    targets = compute_targets(model, examples, prompt_weight > 0, device)
    loss = demonstration_loss(
        targets.log_probs,
        targets.response_mask,
        targets.prompt_mask,
        response_count=sum(sum(example.loss_mask) for example in batch),
        prompt_count=sum(len(example.prompt) - 1 for example in batch),
        prompt_weight=prompt_weight,
    )
    return BatchLoss(loss, {"tokens/trained": targets.response_mask.sum()})


@dataclass(frozen=True)
class TargetLogProbs:
    """Log-probs of the tokens in the loss, [B, T] each."""

    log_probs: Tensor
    response_mask: Tensor
    """Tokens of the assistant."""
    prompt_mask: Tensor
    """Tokens of the prompt."""


def compute_targets(
    model: nn.Module, examples: Sequence[EncodedDemonstration], with_prompt: bool, device: torch.device
) -> TargetLogProbs:
    """Compute the log-probs of all tokens in the loss.

    With `with_prompt`, the prompt except its first token is treated as part of the response.
    """
    cuts = [1 if with_prompt else len(example.prompt) for example in examples]
    tails = [example.prompt[cut:] for example, cut in zip(examples, cuts, strict=True)]
    pairs = list(zip(examples, tails, strict=True))
    prompt = Padded.from_lists([example.prompt[:cut] for example, cut in zip(examples, cuts, strict=True)])
    response = Padded.from_lists([tail + example.response for example, tail in pairs])
    prompt_rows = [[1] * len(tail) + [0] * len(example.response) for example, tail in pairs]
    response_rows = [[0] * len(tail) + list(map(int, example.loss_mask)) for example, tail in pairs]
    prompt_mask, response_mask = (Padded.from_lists(rows).ids.to(device) > 0 for rows in (prompt_rows, response_rows))
    log_probs = model(prompt.to(device), response.to(device), response_mask | prompt_mask)
    return TargetLogProbs(log_probs, response_mask, prompt_mask)


def token_counts(examples: Sequence[EncodedDemonstration]) -> list[int]:
    """Return the number of prompt and response tokens of each example."""
    return [len(example.prompt) + len(example.response) for example in examples]


def example_flops(profile: FlopsProfile, example: EncodedDemonstration, prompt_weight: float) -> float:
    """Return the training FLOPs of an example."""
    predicted = sum(example.loss_mask) + (len(example.prompt) - 1 if prompt_weight else 0)
    return training_flops(profile, len(example.prompt), [len(example.response)], predicted)


@torch.no_grad()
def evaluate(engine: TrainEngine, held_out: list[EncodedDemonstration], budget: int) -> dict[str, float]:
    """Return the loss on held-out demonstrations, equal on every process; empty without any."""
    if not held_out:
        return {}
    accelerator = engine.accelerator
    total = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    for part in micro_batches(range(len(held_out)), token_counts(held_out), budget, accelerator):
        examples = [held_out[row] for row in part.rows]
        targets = compute_targets(engine.module, examples, False, accelerator.device)
        mask = targets.response_mask
        total += part.weight * torch.stack([-(targets.log_probs * mask).sum(), mask.sum()]).double()
    loss, count = sum_across_processes(total, accelerator).tolist()
    return {"validation/loss": loss / count, "validation/perplexity": math.exp(min(loss / count, 50.0))}


def evaluate_and_save(
    loop: EpochLoop, loaded: LoadedModel, held_out: list[EncodedDemonstration], data: str, metrics: dict[str, float]
) -> dict[str, float]:
    """Evaluate the model and save it if it is the best; return the update's `metrics` with the evaluation's."""
    metrics = metrics | evaluate(loop.engine, held_out, loop.run.optimization.micro_batch_tokens)
    if is_best := loop.is_best(metrics):
        save(loaded, loop.engine, data, metrics)
    loop.record_evaluation(metrics, is_best)
    return metrics


def save(loaded: LoadedModel, engine: TrainEngine, data: str, metrics: dict[str, float]) -> None:
    """Save the model as the run's result."""
    run = engine.run
    weights = weights_of(loaded.backbone, engine.model_state())
    card = run.card("Supervised fine-tuned model", data, metrics)
    run_on_main(lambda: save_model(run.folder / "model", loaded, weights, card), run.accelerator)


def require_prompt_in_row(loaded: LoadedModel, prompt_weight: float) -> None:
    """Raise a UserError if the loss includes the prompt but the model does not predict prompt tokens."""
    if prompt_weight and not loaded.backbone.causal:
        raise UserError(
            "prompt_loss_weight: this model does not predict prompt tokens, because of its encoder or prefix_lm; set it to 0"
        )


class SFTTrainer:
    """Supervised fine-tuning of a model on demonstrations.

        config = SFTConfig(output_dir="runs/sft")
        trainer = SFTTrainer("smollm2-135m", [{"prompt": "Hi", "completion": "Hello!"}], config)
        folder = trainer.train()

    Args:
        model: a name or folder, a transformers model or a `PeftModel` with its `tokenizer`, or a `LoadedModel`.
        train_data: a file, folder or hub name, or records in memory (`align.batches.encoding.Data`); for several,
            a `Mixture` or names separated by commas.
        config: all other settings. Its `model` and data settings are ignored.
        validation_data: held-out data for selecting the best model.
        tokenizer: tokenizer of a transformers model.
        peft_config: settings of a new LoRA adapter, instead of `config.lora_r` and related settings.

    Raises:
        UserError: if the settings or the data are invalid.
    """

    @making_trainer()
    def __init__(
        self,
        model: Model,
        train_data: TrainingData,
        config: SFTConfig,
        validation_data: Data = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
    ) -> None:
        self.config = config = with_data_names(config, train_data=train_data, validation_data=validation_data)
        source = ModelSource(model, tokenizer, peft_config, config.prefix_lm)
        self.run = run = Run(source.settings(config), "sft")
        self.loaded = loaded = source.load(run)
        require_prompt_in_row(loaded, config.prompt_loss_weight)
        data, split = (train_data, validation_data), (config.task_prefixes, config.validation_split)
        mixing = (config.batch_size, config.mixing_cap, config.mixing_temperature)
        self.order: DataOrder[EncodedDemonstration]
        if config.objective == "demonstrations":
            encode = partial(encode_demonstrations, limits=config.limits, skip_bad_rows=config.skip_bad_rows, loaded=loaded)
            mixed, self.held_out = encode_split(*data, encode, *split)
            self.order = DataOrder(mixed, config.seed, *mixing)
        else:
            texts = RawText(config.objective, loaded, config.text_tokens, config.seed, config.skip_bad_rows)
            mixed, pieces = encode_split(*data, texts.read, *split)
            self.order, self.held_out = RawTextOrder(texts, mixed, *mixing), texts.examples(pieces, 0)
        number = counted(len(mixed.examples), "example")
        run.print(f"sft: {number} to learn from, {len(self.held_out)} held out; model {run.model_config.model}")
        module = LanguageModel(loaded.backbone, loaded.adapter)
        run.print(run.memory.check(module))
        updates = self.order.updates(config.num_train_epochs)
        groups = layer_groups(config, config.learning_rate, loaded.backbone, module, updates)
        self.engine = build_engine(run, module, updates, groups)

    def train(self) -> Path:
        """Train from the last checkpoint. Return the folder of the best model."""
        with self.run:
            if self.config.dry_run:
                measure = measured_on("validation_data", self.held_out)
                return EpochLoop(self.engine, self.order, self.config.eval_steps, measure).end_dry_run()
            return train(self.config, self.loaded, self.engine, self.order, self.held_out)


def run_sft(config: SFTConfig) -> Path:
    """Fine-tune `config.model` on `config.train_data`; return the folder of the best model."""
    return SFTTrainer(config.model, config.train_data, config, config.validation_data).train()


if __name__ == "__main__":
    run_stage(SFTConfig, run_sft)
