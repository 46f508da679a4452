"""Direct preference optimization of a policy on rankings.

Launch it with `accelerate launch align/dpo/train.py --config configs/dpo/x.yaml`.

The reference is the policy before its first update. Its log-probs never change, so they are computed once, by the policy
itself, and no copy of the model is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftConfig
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from align.batches.encoding import Data, encode_rankings
from align.batches.micro_batches import micro_batches
from align.batches.mixtures import TrainingData, encode_split
from align.core.errors import counted
from align.core.files import write_json
from align.core.launch import run_stage
from align.core.tensor_ops import BatchLoss
from align.dpo.config import DPOConfig
from align.models.backbone import Backbone, flops_profile
from align.models.checkpoint import save_model, weights_of
from align.models.heads import LanguageModel
from align.models.loading import LoadedModel
from align.reward.loss import Pairs, dpo_losses, ipo_losses, ordered_rightly, pairs_of
from align.reward.rankings import (
    ScoredRanking,
    group_flops,
    group_sizes,
    pack_rankings,
    ranking_metrics,
    score_rankings,
    with_rewards,
)
from align.runtime.distributed import run_on_main
from align.runtime.flops import FlopsProfile, forward_flops, training_flops
from align.tokenization.encoded import EncodedRanking
from align.training.data_order import DataOrder, measured_on
from align.training.engine import TrainEngine
from align.training.epoch_loop import EpochLoop
from align.training.model_source import Model, ModelSource
from align.training.monitor import Monitor, examples_as_text
from align.training.process_state import making_trainer
from align.training.run import Run
from align.training.setup import build_engine, warn_if_prompts_are_reread, with_data_names


class PairLoss(NamedTuple):
    """The loss of a pair: its kind, `dpo` or `ipo`, and its parameters."""

    kind: str
    beta: float
    label_smoothing: float


class ReferencedRanking(NamedTuple):
    """A ranking, and the reference's log-prob of each response, summed over its tokens."""

    ranking: EncodedRanking
    log_probs: list[float]


def rankings_of(examples: Sequence[ReferencedRanking]) -> list[EncodedRanking]:
    """Return the rankings without reference log-probs."""
    return [item.ranking for item in examples]


def train(
    config: DPOConfig,
    loaded: LoadedModel,
    engine: TrainEngine,
    order: DataOrder[EncodedRanking],
    held_out: list[EncodedRanking],
) -> Path:
    """Train a policy from the last checkpoint. Return the folder of the best policy.

    The initial policy is the reference, so it is not evaluated. Rankings in `held_out` select the best policy; the list may
    be empty.
    """
    run, budget, backbone = engine.run, config.micro_batch_tokens, loaded.backbone
    profile = flops_profile(backbone, loaded.adapter)
    pair_loss = PairLoss(config.loss, config.beta, config.label_smoothing)
    loss_of = partial(batch_loss, engine.module, pair_loss=pair_loss, device=run.accelerator.device)
    # The reference is computed before a checkpoint replaces the initial weights.
    examples, referenced = compute_reference(order.examples, held_out, engine, backbone, profile, budget)
    batches = order.over(examples)
    loop, monitor = EpochLoop(engine, order, config.eval_steps, measure_of(pair_loss, held_out)), Monitor(run)
    planned = ((batch, group_sizes(backbone, rankings_of(batch))) for batch in batches.first_batches())
    loop.measure_largest_micro_batch(planned, loss_of)
    evaluate_model = partial(evaluate_and_save, loop, loaded, referenced, pair_loss, config.train_data)

    for update in loop.updates():
        batch = batches.batch(update)
        rankings = rankings_of(batch)
        sizes = group_sizes(backbone, rankings)
        with monitor.update(update, partial(examples_as_text, rankings, loaded.tokenization)):
            for part in micro_batches(range(len(batch)), sizes, budget, run.accelerator):
                engine.backward(loss_of([batch[row] for row in part.rows], batch), part.weight)
            sums = engine.reduce_gradients()
            monitor.lap("learn")
            monitor.add(sums | engine.step(update))
            monitor.lap("step")
        monitor.add({"rewards/margin": sums["rewards/chosen"] - sums["rewards/rejected"], "tokens/read": float(sum(sizes))})
        monitor.add_speed(sum(sizes), flops_of(rankings, backbone, profile, training_flops))
        if loop.is_due(update):
            monitor.add(evaluate_model(monitor.row))
            monitor.lap("validate")
        monitor.log(update, loop.progress(monitor.row["loss"]))

    if loop.is_due_again():
        evaluate_model({})
    return run.folder / "model"


def measure_of(pair_loss: PairLoss, held_out: list[EncodedRanking]) -> dict[str, Any]:
    """Return the data and settings that affect the validation loss."""
    settings = {"loss": pair_loss.kind, "beta": pair_loss.beta, "label_smoothing": pair_loss.label_smoothing}
    return measured_on("validation_data", held_out, **settings)


def batch_loss(
    model: nn.Module,
    examples: Sequence[ReferencedRanking],
    batch: Sequence[ReferencedRanking],
    pair_loss: PairLoss,
    device: torch.device,
) -> BatchLoss:
    """Return a micro-batch's contribution to the loss, which is a mean over the rankings of the global batch.

    Args:
        examples: the micro-batch.
        batch: the global batch.
    """
    rankings = rankings_of(examples)
    log_probs = sum_log_probs(model, rankings, device)
    log_ratios = log_probs - torch.tensor([value for item in examples for value in item.log_probs], device=device)
    pairs = pairs_of([item.ranks for item in rankings]).to(device)  # margins are for reward models
    rewards = pair_loss.beta * log_ratios.detach()
    chosen, rejected = rewards[pairs.better], rewards[pairs.worse]

    def mean(values: Tensor) -> Tensor:
        return (pairs.weight * values).sum() / len(batch)

    sums = {
        "accuracy": mean(ordered_rightly(chosen - rejected)),
        "rewards/chosen": mean(chosen),
        "rewards/rejected": mean(rejected),
        "logps/chosen": mean(log_probs.detach()[pairs.better]),
        "logps/rejected": mean(log_probs.detach()[pairs.worse]),
    }
    return BatchLoss(mean(losses_of_pairs(log_ratios, rankings, pairs, pair_loss)), sums)


def losses_of_pairs(log_ratios: Tensor, rankings: Sequence[EncodedRanking], pairs: Pairs, pair_loss: PairLoss) -> Tensor:
    """Return the loss of each pair [pairs], from the log-ratio of each response [B]."""
    if pair_loss.kind == "ipo":
        lengths = [len(response) for item in rankings for response in item.responses]
        log_ratios = log_ratios / torch.tensor(lengths, device=log_ratios.device)
        return ipo_losses(log_ratios[pairs.better] - log_ratios[pairs.worse], pair_loss.beta)
    difference = log_ratios[pairs.better] - log_ratios[pairs.worse]
    return dpo_losses(difference, pair_loss.beta, pair_loss.label_smoothing)


def sum_log_probs(model: nn.Module, rankings: Sequence[EncodedRanking], device: torch.device) -> Tensor:
    """Return the log-prob [B] of each response, summed over its tokens."""
    inputs = pack_rankings(rankings, device)
    log_probs: Tensor = model(inputs.prompt, inputs.response, prompt_of_response=inputs.prompt_of_response)
    return log_probs.sum(dim=1)


def log_probs_of(
    rankings: Sequence[EncodedRanking], engine: TrainEngine, backbone: Backbone, budget: int
) -> list[list[float]]:
    """Return the current weights' log-probs of each ranking's responses, on every process."""
    read = partial(sum_log_probs, engine.module, device=engine.accelerator.device)
    return score_rankings(read, rankings, backbone, budget, engine.accelerator) if rankings else []


def compute_reference(
    rankings: list[EncodedRanking],
    held_out: list[EncodedRanking],
    engine: TrainEngine,
    backbone: Backbone,
    profile: FlopsProfile,
    budget: int,
) -> tuple[list[ReferencedRanking], list[ReferencedRanking]]:
    """Return training and held-out rankings with reference log-probs from the current weights."""
    run, monitor = engine.run, Monitor(engine.run)
    run.print("dpo: computing the log-probs of all responses under the initial policy, the reference")
    examples, referenced = (
        [
            ReferencedRanking(item, log_probs)
            for item, log_probs in zip(part, log_probs_of(part, engine, backbone, budget), strict=True)
        ]
        for part in (rankings, held_out)
    )
    monitor.lap("reference")
    if run.checkpoint is None:
        tokens = float(sum(group_sizes(backbone, [*rankings, *held_out])))
        monitor.add({"tokens/read": tokens})
        monitor.add_speed(tokens, flops_of([*rankings, *held_out], backbone, profile, forward_flops))
        run.log(0, monitor.row)
    return examples, referenced


def flops_of(
    rankings: Sequence[EncodedRanking], backbone: Backbone, profile: FlopsProfile, count: Callable[..., float]
) -> float:
    """Return the FLOPs of forward passes (`forward_flops`) or of training (`training_flops`) on rankings."""
    return sum(group_flops(backbone, profile, item, count, list(map(len, item.responses))) for item in rankings)


def evaluate(
    engine: TrainEngine, backbone: Backbone, held_out: list[ReferencedRanking], pair_loss: PairLoss, budget: int
) -> tuple[dict[str, float], list[ScoredRanking]]:
    """Return metrics of the policy as a reward model, and the scored rankings; a reward is beta times a log-ratio."""
    if not held_out:
        return {}, []
    rankings = rankings_of(held_out)
    log_ratios = [
        [now - before for now, before in zip(log_probs, item.log_probs, strict=True)]
        for log_probs, item in zip(log_probs_of(rankings, engine, backbone, budget), held_out, strict=True)
    ]
    scored = with_rewards(rankings, [[pair_loss.beta * value for value in row] for row in log_ratios])
    pairs = pairs_of([item.ranks for item in rankings])
    flat = torch.tensor([value for row in log_ratios for value in row], dtype=torch.float64)
    loss = (pairs.weight.double() * losses_of_pairs(flat, rankings, pairs, pair_loss)).sum() / len(rankings)
    metrics = ranking_metrics(scored) | {"loss": float(loss)}
    return {f"validation/{name}": value for name, value in metrics.items()}, scored


def evaluate_and_save(
    loop: EpochLoop,
    loaded: LoadedModel,
    held_out: list[ReferencedRanking],
    pair_loss: PairLoss,
    data: str,
    metrics: dict[str, float],
) -> dict[str, float]:
    """Evaluate the policy and save it if it is the best; return the update's `metrics` with the evaluation's."""
    budget = loop.run.optimization.micro_batch_tokens
    evaluation, scored = evaluate(loop.engine, loaded.backbone, held_out, pair_loss, budget)
    metrics = metrics | evaluation
    if is_best := loop.is_best(metrics):
        save(loaded, loop.engine, data, metrics, scored)
    loop.record_evaluation(metrics, is_best)
    return metrics


def save(
    loaded: LoadedModel, engine: TrainEngine, data: str, metrics: dict[str, float], scored: list[ScoredRanking]
) -> None:
    """Save the policy as the run's result."""
    run = engine.run
    weights = weights_of(loaded.backbone, engine.model_state())

    def write() -> None:
        write_json(run.folder / "validation.json", [asdict(item) for item in scored])
        save_model(run.folder / "model", loaded, weights, run.card("Policy trained by DPO", data, metrics))

    run_on_main(write, run.accelerator)


class DPOTrainer:
    """Direct preference optimization of a policy on rankings of 2 to 9 responses.

        rankings = [{"prompt": "Hi", "responses": ["Hello!", "Hm.", "No."], "ranks": [1, 2, 3]}]
        trainer = DPOTrainer("smollm2-135m", rankings, DPOConfig(output_dir="runs/dpo"))
        folder = trainer.train()

    For arguments, see `SFTTrainer`.
    """

    @making_trainer()
    def __init__(
        self,
        policy: Model,
        train_data: TrainingData,
        config: DPOConfig,
        validation_data: Data = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
    ) -> None:
        self.config = config = with_data_names(config, train_data=train_data, validation_data=validation_data)
        source = ModelSource(policy, tokenizer, peft_config)
        self.run = run = Run(source.settings(config), "dpo")
        self.loaded = loaded = source.load(run)
        skip = config.skip_bad_rows
        encode = partial(encode_rankings, limits=config.limits, skip_bad_rows=skip, loaded=loaded, scored=False)
        data = (train_data, validation_data)
        mixed, self.held_out = encode_split(*data, encode, config.task_prefixes, config.validation_split)
        counts = f"{counted(len(mixed.examples), 'ranking')} to learn from, {len(self.held_out)} held out"
        run.print(f"dpo: {counts}; model {run.model_config.model}")
        module = LanguageModel(loaded.backbone, loaded.adapter)
        warn_if_prompts_are_reread(run, loaded.backbone, (len(ranking.responses) for ranking in mixed.examples))
        self.order = DataOrder(mixed, config.seed, config.batch_size, config.mixing_cap, config.mixing_temperature)
        run.print(run.memory.check(module))
        self.engine = build_engine(run, module, self.order.updates(config.num_train_epochs))

    def train(self) -> Path:
        """Train from the last checkpoint. Return the folder of the best policy."""
        with self.run:
            if self.config.dry_run:
                pair_loss = PairLoss(self.config.loss, self.config.beta, self.config.label_smoothing)
                measure = measure_of(pair_loss, self.held_out)
                return EpochLoop(self.engine, self.order, self.config.eval_steps, measure).end_dry_run()
            return train(self.config, self.loaded, self.engine, self.order, self.held_out)


def run_dpo(config: DPOConfig) -> Path:
    """Train `config.model` on the rankings in `config.train_data`; return the folder of the best policy."""
    return DPOTrainer(config.model, config.train_data, config, config.validation_data).train()


if __name__ == "__main__":
    run_stage(DPOConfig, run_dpo)
