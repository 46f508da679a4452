"""Reward modeling: train a scalar head to order responses as labelers ranked them.

Launch it with `accelerate launch align/reward/train.py --config configs/reward/x.yaml`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from peft import PeftConfig
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from align.batches.encoding import ApplyLimits, Data, Limits, encode_rankings, encode_records
from align.batches.micro_batches import micro_batches
from align.batches.mixtures import TrainingData, encode_split, is_given
from align.core.errors import UserError, counted
from align.core.files import write_json
from align.core.launch import run_stage
from align.core.tensor_ops import BatchLoss, Padded
from align.data.records import Demonstration
from align.models.backbone import Backbone, flops_profile
from align.models.checkpoint import weights_of
from align.models.heads import RewardModel, ScalarHead, response_log_probs
from align.models.loading import LoadedModel, freeze_unused_lm_head
from align.models.roles import REWARD_ADAPTER
from align.reward.checkpoint import initial_head, require_savable_classifier, save_reward_model
from align.reward.config import RewardConfig
from align.reward.loss import centering_loss, ordered_rightly, ranking_loss
from align.reward.rankings import (
    ScoredRanking,
    chance_warning,
    group_flops,
    group_sizes,
    label_pairs,
    mean_loss,
    pack_rankings,
    ranking_metrics,
    reward_rankings,
    score_rankings,
    with_rewards,
)
from align.runtime.distributed import run_on_main
from align.runtime.flops import FlopsProfile
from align.tokenization import encode_demonstration
from align.tokenization.encoded import EncodedRanking
from align.training.data_order import DataOrder, measured_on
from align.training.engine import TrainEngine
from align.training.epoch_loop import EpochLoop
from align.training.layerwise import layer_groups
from align.training.model_source import Model, ModelSource
from align.training.monitor import Monitor, examples_as_text
from align.training.process_state import making_trainer
from align.training.run import Run
from align.training.setup import build_engine, warn_if_prompts_are_reread, with_data_names


def train(
    config: RewardConfig,
    loaded: LoadedModel,
    engine: TrainEngine,
    order: DataOrder[EncodedRanking],
    held_out: list[EncodedRanking],
    demonstrated: list[EncodedRanking],
) -> Path:
    """Train a reward model from the last checkpoint. Return the folder of the best model.

    Rankings in `held_out` select it, and the mean reward of `demonstrated` becomes 0. Both may be empty.
    """
    run, budget, backbone, lm_weight = engine.run, config.micro_batch_tokens, loaded.backbone, config.lm_loss_weight
    profile = flops_profile(backbone, loaded.adapter)
    loss_of = partial(
        batch_loss,
        engine.module,
        soft_targets=config.soft_targets,
        centering_weight=config.centering_weight,
        lm_weight=lm_weight,
        device=run.accelerator.device,
    )
    measure = measured_on("validation_data", held_out, soft_targets=config.soft_targets)
    loop, monitor = EpochLoop(engine, order, config.eval_steps, measure), Monitor(run)
    planned = ((batch, group_sizes(backbone, batch)) for batch in order.first_batches())
    loop.measure_largest_micro_batch(planned, loss_of)
    evaluate_model = partial(evaluate_and_save, loop, loaded, held_out, demonstrated, config.train_data, config.soft_targets)

    for update in loop.updates():
        batch = order.batch(update)
        sizes = group_sizes(backbone, batch)
        with monitor.update(update, partial(examples_as_text, batch, loaded.tokenization)):
            for part in micro_batches(range(len(batch)), sizes, budget, run.accelerator):
                engine.backward(loss_of([batch[row] for row in part.rows], batch), part.weight)
            sums = engine.reduce_gradients()
            monitor.lap("learn")
            monitor.add(mean_rewards(sums, batch) | engine.step(update))
            monitor.lap("step")
        monitor.add({"tokens/read": float(sum(sizes))})
        monitor.add_speed(sum(sizes), sum(example_flops(backbone, profile, ranking, lm_weight) for ranking in batch))
        if loop.is_due(update):
            monitor.add(evaluate_model(monitor.row))
            monitor.lap("validate")
        monitor.log(update, loop.progress(monitor.row["loss"]))

    if loop.is_due_again():
        evaluate_model({})
    return run.folder / "model"


def mean_rewards(sums: dict[str, float], batch: Sequence[EncodedRanking]) -> dict[str, float]:
    """Return the metrics of an update, with the mean reward of all responses instead of their sum."""
    count = sum(len(ranking.responses) for ranking in batch)
    return {
        ("reward/mean" if name == "reward_sum" else name): (value / count if name == "reward_sum" else value)
        for name, value in sums.items()
    }


def batch_loss(
    model: nn.Module,
    rankings: Sequence[EncodedRanking],
    batch: Sequence[EncodedRanking],
    soft_targets: bool,
    centering_weight: float,
    lm_weight: float,
    device: torch.device,
) -> BatchLoss:
    """Return a micro-batch's contribution to the loss, which is a mean over the rankings of the global batch.

    Args:
        rankings: the micro-batch.
        batch: the global batch.
        model: a `RewardModel`, or a `RewardLanguageModel` if `lm_weight` is not 0.
        soft_targets: see `label_pairs`.
        centering_weight: weight of `centering_loss`.
        lm_weight: weight of the language-model loss on the best responses.
    """
    if lm_weight:
        inputs = pack_rankings(rankings, device)
        learned = torch.tensor([count for item in rankings for count in best_tokens(item)], device=device)
        positions = torch.arange(inputs.response.ids.shape[1], device=device)
        mask = positions < learned[:, None]
        rewards, log_probs = model(inputs.prompt, inputs.response, inputs.prompt_of_response, mask)
    else:
        rewards = reward_rankings(model, rankings, device)
    pairs = label_pairs(rankings, soft_targets).to(device)
    loss = ranking_loss(rewards, pairs)
    is_right = ordered_rightly(rewards[pairs.better] - rewards[pairs.worse])
    sums = {
        "ranking_loss": loss / len(batch),
        "accuracy": (pairs.weight * is_right).sum() / len(batch),
        "reward_sum": rewards.sum(),
    }
    if centering_weight:
        loss = loss + centering_weight * centering_loss(rewards, pairs)
    loss = loss / len(batch)
    if lm_weight:
        sums["lm_loss"] = -log_probs.sum() / sum(sum(best_tokens(ranking)) for ranking in batch)
        loss = loss + lm_weight * sums["lm_loss"]
    return BatchLoss(loss, sums)


class RewardLanguageModel(RewardModel):
    """A reward model that also predicts tokens, for a language-model loss in addition to the ranking loss."""

    def forward(  # type: ignore[override]
        self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return rewards [B], and with `mask` [B, T] bool also the log-probs [B, T] of response tokens where it is true."""
        if mask is None:
            return super().forward(prompt, response, prompt_of_response)
        with self.backbone.adapter(self.adapter_name):
            hidden = self.backbone.hidden(prompt, response, prompt_of_response)
            log_probs = response_log_probs(self.backbone, hidden, response, mask)[0]
        rows = torch.arange(len(response.lengths), device=hidden.device)
        return self.head(hidden[rows, response.lengths]), log_probs


def best_tokens(ranking: EncodedRanking) -> list[int]:
    """Return the number of language-model loss tokens per response: all tokens of the best responses, else 0."""
    return [count if rank == 1 else 0 for count, rank in zip(ranking.written_tokens, ranking.ranks, strict=True)]


def example_flops(backbone: Backbone, profile: FlopsProfile, ranking: EncodedRanking, lm_weight: float) -> float:
    """Return the training FLOPs of a ranking."""
    return group_flops(backbone, profile, ranking, predicted=best_tokens(ranking) if lm_weight else ())


def evaluate(
    engine: TrainEngine, backbone: Backbone, held_out: list[EncodedRanking], budget: int, soft_targets: bool
) -> tuple[dict[str, float], list[ScoredRanking]]:
    """Return metrics on held-out rankings, equal on every process, and the rankings with their rewards.

    The loss uses the training targets. Print a warning if it exceeds the loss of equal rewards. The other metrics, and the
    returned rankings, leave out ties.
    """
    if not held_out:
        return {}, []
    scored = with_rewards(held_out, rewards_of(engine, backbone, held_out, budget))
    ordered = [item for item in scored if len(set(item.ranks)) > 1]
    metrics = ranking_metrics(ordered) if ordered else {}
    if soft_targets:
        metrics["loss"] = mean_loss(scored, label_pairs(held_out, soft_targets))
    if warning := chance_warning(metrics.get("loss")):
        causes = "check the labels, the learning rate and how many responses overlong: truncate has cut"
        engine.run.print(f"warning: {warning}; {causes}")
    return {f"validation/{name}": value for name, value in metrics.items()}, ordered


def evaluate_and_save(
    loop: EpochLoop,
    loaded: LoadedModel,
    held_out: list[EncodedRanking],
    demonstrated: list[EncodedRanking],
    data: str,
    soft_targets: bool,
    metrics: dict[str, float],
) -> dict[str, float]:
    """Evaluate the model and save it if it is the best; return the update's `metrics` with the evaluation's."""
    budget = loop.run.optimization.micro_batch_tokens
    evaluation, scored = evaluate(loop.engine, loaded.backbone, held_out, budget, soft_targets)
    metrics = metrics | evaluation
    if is_best := loop.is_best(metrics):
        save(loaded, loop.engine, data, metrics, scored, demonstrated)
    loop.record_evaluation(metrics, is_best)
    return metrics


def rewards_of(
    engine: TrainEngine, backbone: Backbone, rankings: Sequence[EncodedRanking], budget: int
) -> list[list[float]]:
    """Return the rewards of each ranking's responses, on every process."""
    read = partial(reward_rankings, engine.module, device=engine.accelerator.device)
    return score_rankings(read, rankings, backbone, budget, engine.accelerator)


def save(
    loaded: LoadedModel,
    engine: TrainEngine,
    data: str,
    metrics: dict[str, float],
    scored: list[ScoredRanking],
    demonstrated: list[EncodedRanking],
) -> None:
    """Save the model as the run's result, with the mean reward over demonstrations that is subtracted from all rewards."""
    run, mean = engine.run, 0.0
    if demonstrated:
        rewards = rewards_of(engine, loaded.backbone, demonstrated, run.optimization.micro_batch_tokens)
        mean = sum(row[0] for row in rewards) / len(rewards)
    state = engine.model_state()

    def write() -> None:
        weights = weights_of(loaded.backbone, state)
        warning = chance_warning(metrics.get("validation/loss"))
        rows = {"mean": f"{mean:.4g}"} | ({"warning": warning} if warning else {})
        card = run.card("Reward model", data, metrics, **rows)
        write_json(run.folder / "validation.json", [asdict(item) for item in scored])
        metadata = {"mean": mean, "mean_over": len(demonstrated)}
        save_reward_model(run.folder / "model", loaded, weights, state["head.linear.weight"], metadata, card)

    run_on_main(write, run.accelerator)


def build_module(loaded: LoadedModel, head: ScalarHead, name: str, with_lm_loss: bool) -> RewardModel:
    """Return the module to train, which includes the vocabulary matrix if there is a language-model loss.

    Raises:
        UserError: if a language-model loss is requested for a model without a vocabulary matrix.
    """
    if not with_lm_loss:
        freeze_unused_lm_head(loaded.backbone)
        return RewardModel(loaded.backbone, head, loaded.adapter)
    if loaded.backbone.model.get_output_embeddings() is None:
        raise UserError(f"lm_loss_weight: model '{name}' has no vocabulary matrix to predict with; set it to 0")
    return RewardLanguageModel(loaded.backbone, head, loaded.adapter)


def encode_demonstrated(data: Data, loaded: LoadedModel, limits: Limits, skip_bad_rows: bool) -> list[EncodedRanking]:
    """Return demonstrations as rankings of one response, the human-written one, for the mean reward."""

    def encode_one(record: Demonstration, apply_limits: ApplyLimits) -> Iterator[EncodedRanking]:
        complete = replace(record, finish_reason=None)  # a score is read at the end token
        example = encode_demonstration(loaded.tokenization, complete, one_row=False)[-1]
        kept = apply_limits(example.prompt, example.response)
        assert kept is not None  # long text is truncated
        yield EncodedRanking(kept.prompt, [kept.response], [1])

    limits = Limits(limits.prompt, limits.response, "truncate")
    return encode_records(data, Demonstration, loaded, limits, skip_bad_rows, encode_one, kept_end=1)


class RewardTrainer:
    """Training of a reward model on rankings of 2 to 9 responses.

        rankings = [{"prompt": "Hi", "responses": ["Hello!", "Hm.", "No."], "ranks": [1, 2, 3]}]
        trainer = RewardTrainer("smollm2-135m", rankings, RewardConfig(output_dir="runs/reward"))
        folder = trainer.train()

    For arguments, see `SFTTrainer`. The adapter of a `LoadedModel` must be named `reward`. The mean reward of
    `demonstrations` becomes 0.
    """

    @making_trainer()
    def __init__(
        self,
        model: Model,
        train_data: TrainingData,
        config: RewardConfig,
        validation_data: Data = (),
        demonstrations: Data = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
    ) -> None:
        names = {"train_data": train_data, "validation_data": validation_data, "demonstrations": demonstrations}
        self.config = config = with_data_names(config, **names)
        source = ModelSource(model, tokenizer, peft_config)
        self.run = run = Run(source.settings(config), "reward")
        self.loaded = loaded = source.load(run, REWARD_ADAPTER, allow_reward_model=True)
        run_on_main(lambda: require_savable_classifier(loaded), run.accelerator)
        encode = partial(
            encode_rankings,
            loaded=loaded,
            limits=config.limits,
            skip_bad_rows=config.skip_bad_rows,
            soft_targets=config.soft_targets,
        )
        data = (train_data, validation_data)
        mixed, self.held_out = encode_split(*data, encode, config.task_prefixes, config.validation_split)
        if config.soft_targets and all(item.preferences is None for item in mixed.examples):
            raise UserError(f"soft_targets: no ranking in {config.train_data} has preferences; export them, or leave it off")
        self.demonstrated: list[EncodedRanking] = []
        if is_given(demonstrations):
            self.demonstrated = encode_demonstrated(demonstrations, loaded, config.limits, config.skip_bad_rows)
        name = run.model_config.model
        rankings = counted(len(mixed.examples), "ranking")
        run.print(f"reward: {rankings} to learn from, {len(self.held_out)} held out; model {name}")
        module = build_module(loaded, initial_head(name, loaded.backbone), name, config.lm_loss_weight > 0)
        warn_if_prompts_are_reread(run, loaded.backbone, (len(ranking.responses) for ranking in mixed.examples))
        self.order = DataOrder(mixed, config.seed, config.batch_size, config.mixing_cap, config.mixing_temperature)
        run.print(run.memory.check(module))
        updates = self.order.updates(config.num_train_epochs)
        groups = layer_groups(config, config.learning_rate, loaded.backbone, module, updates)
        self.engine = build_engine(run, module, updates, groups)

    def train(self) -> Path:
        """Train from the last checkpoint. Return the folder of the best model."""
        with self.run:
            if self.config.dry_run:
                measure = measured_on("validation_data", self.held_out, soft_targets=self.config.soft_targets)
                return EpochLoop(self.engine, self.order, self.config.eval_steps, measure).end_dry_run()
            return train(self.config, self.loaded, self.engine, self.order, self.held_out, self.demonstrated)


def run_reward(config: RewardConfig) -> Path:
    """Train `config.model` on the rankings in `config.train_data`; return the folder of the best model."""
    data = (config.validation_data, config.demonstrations)
    return RewardTrainer(config.model, config.train_data, config, *data).train()


if __name__ == "__main__":
    run_stage(RewardConfig, run_reward)
