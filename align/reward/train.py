"""Reward modeling: a scalar head learns to order responses as labelers ranked them.

Launch it by `accelerate launch align/reward/train.py --config configs/reward/x.yaml`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from align.batches.encoding import ApplyLimits, Data, Limits, encode_rankings, encode_records
from align.batches.mixtures import TrainingData, encode_mixture
from align.core.errors import UserError
from align.core.files import write_json
from align.core.launch import run_stage
from align.core.settings import MixtureConfig, SequenceConfig, option
from align.data.records import Demonstration
from align.models.checkpoint import weights_of
from align.models.heads import RewardLanguageModel, RewardModel, ScalarHead, freeze_unused_lm_head
from align.models.loading import LoadedModel
from align.models.roles import REWARD_ADAPTER
from align.reward.checkpoint import initial_head, require_savable_classifier, save_reward_model
from align.reward.loss import Pairs, centering_loss, ranking_loss
from align.reward.rankings import (
    ScoredRanking,
    group_flops,
    group_sizes,
    label_pairs,
    pack_rankings,
    ranking_metrics,
    reward_rankings,
    score_rankings,
    with_rewards,
)
from align.runtime.distributed import run_on_main
from align.tokenization import encode_demonstration
from align.tokenization.encoded import EncodedRanking
from align.training.data_order import EpochConfig
from align.training.engine import Sums
from align.training.loop import EpochTrainer, ExampleTask
from align.training.start import Model, share_sequences, with_data_names


@dataclass(kw_only=True)
class RewardConfig(MixtureConfig, SequenceConfig, EpochConfig):
    """A reward model on rankings of 2 to 9 responses."""

    train_data: str = option(
        "data/rankings.jsonl",
        "rankings or pairs to learn from: file, folder or hub name; several are separated by commas, each as NAME or "
        "NAME=WEIGHT",
    )
    validation_data: str = option("", "held-out rankings: metrics, and the choice of the best model; empty: none")
    demonstrations: str = option(
        "",
        "demonstrations whose mean reward is subtracted from every reward (InstructGPT, section 3.5); empty: none",
    )
    epochs: int = option(1, "passes over the rankings; more than one overfits soon (InstructGPT, appendix C.2)")
    batch_size: int = option(16, "rankings in one update, over all processes (InstructGPT: 64)")
    centering_weight: float = option(0.0, "weight of a term that keeps rewards near 0 (Eisenstein et al. 2023: 0.01)", ge=0)
    lm_loss_weight: float = option(
        0.0, "weight of a language-model loss on the responses that were ranked best (GPT-1, section 3.2: 0.5)", ge=0
    )
    soft_targets: bool = option(
        False, "learn the probabilities in the field preferences, where a ranking has it, instead of a sure order"
    )


class HeadTrainer(EpochTrainer):
    """Base of the trainers of models with a scalar head, which are saved as classifiers."""

    def __init__(
        self, config: EpochConfig, stage: str, model: Model, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        super().__init__(config, stage, model, tokenizer, REWARD_ADAPTER, allow_reward_model=True)
        run_on_main(lambda: require_savable_classifier(self.loaded), self.run.accelerator)


class RewardTrainer(HeadTrainer):
    """Training of a reward model on rankings of 2 to 9 responses.

        rankings = [{"prompt": "Hi", "responses": ["Hello!", "Hm.", "No."], "ranks": [1, 2, 3]}]
        trainer = RewardTrainer("smollm2-135m", rankings, RewardConfig(output_dir="runs/reward"))
        folder = trainer.train()

    Arguments are those of `EpochTrainer`; `demonstrations` are those whose mean reward becomes 0.
    """

    def __init__(
        self,
        model: Model,
        train_data: TrainingData,
        config: RewardConfig,
        validation_data: Data = (),
        demonstrations: Data = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        names = {"train_data": train_data, "validation_data": validation_data, "demonstrations": demonstrations}
        config = with_data_names(config, **names)
        super().__init__(config, "reward", model, tokenizer)
        share_sequences(self.run, self.loaded.backbone, config.sequence_parallel)
        encode = partial(encode_rankings, loaded=self.loaded, limits=config.limits, skip_bad_rows=config.skip_bad_rows)
        mixed = encode_mixture(train_data, encode, config.task_prefixes)
        held_out = encode(validation_data) if validation_data else []
        if config.soft_targets and all(item.preferences is None for item in mixed.examples):
            data = config.train_data
            raise UserError(f"soft_targets: no ranking in {data} has preferences; export them, or leave it off")
        demonstrated = encode_demonstrated(config, self.loaded, demonstrations) if demonstrations else []
        name = self.run.config.model
        self.run.say(f"reward: {len(mixed.examples)} rankings to learn from, {len(held_out)} held out; model {name}")
        head = initial_head(name, self.loaded.backbone)
        module = build_module(config, self.loaded, head)
        engine = self.build_engine(module, mixed, (len(ranking.responses) for ranking in mixed.examples))
        parts = (self.run, config, self.loaded, engine, mixed.examples, held_out)
        self.task = RewardTask(*parts, demonstrated=demonstrated)


def run_reward(config: RewardConfig) -> Path:
    """Train `config.model` on the rankings in `config.train_data`; returns the folder of the best model."""
    data = (config.validation_data, config.demonstrations)
    return RewardTrainer(config.model, config.train_data, config, *data).train()


def build_module(config: RewardConfig, loaded: LoadedModel, head: ScalarHead) -> RewardModel:
    """The module that is trained: with a language-model loss, the vocabulary matrix too.

    Raises:
        UserError: for a language-model loss on a model without that matrix.
    """
    if not config.lm_loss_weight:
        freeze_unused_lm_head(loaded.backbone)
        return RewardModel(loaded.backbone, head, loaded.adapter)
    if loaded.backbone.model.get_output_embeddings() is None:
        raise UserError(f"lm_loss_weight: model '{config.model}' has no vocabulary matrix to predict with; set it to 0")
    return RewardLanguageModel(loaded.backbone, head, loaded.adapter)


def predicted_tokens(ranking: EncodedRanking) -> list[int]:
    """Tokens of each response that a language-model loss is taken on: those of the responses that were ranked best."""
    return [len(ids) if rank == 1 else 0 for ids, rank in zip(ranking.responses, ranking.ranks, strict=True)]


def encode_demonstrated(config: RewardConfig, loaded: LoadedModel, data: Data) -> list[EncodedRanking]:
    """Demonstrations as rankings of one response, the one that a person wrote: for the mean reward."""

    def encode_one(record: Demonstration, apply_limits: ApplyLimits) -> Iterator[EncodedRanking]:
        example = encode_demonstration(loaded.tokenization, record, one_row=False)[-1]
        kept = apply_limits(example.prompt, example.response)
        assert kept is not None  # too long a text is truncated
        yield EncodedRanking(kept.prompt, [kept.response], [1])

    limits = Limits(config.max_prompt_tokens, config.max_response_tokens, "truncate")
    return encode_records(data, Demonstration, loaded, limits, config.skip_bad_rows, encode_one)


class RewardTask(ExampleTask):
    """Loss and evaluation of the reward model."""

    config: RewardConfig

    def __init__(self, *arguments: Any, demonstrated: Sequence[EncodedRanking] = ()) -> None:
        super().__init__(*arguments)
        self.demonstrated = demonstrated
        self.lengths = group_sizes(self.loaded.backbone, self.examples)
        self.scored: list[ScoredRanking] = []

    def loss(self, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        lm_weight = self.config.lm_loss_weight
        best_tokens = sum(sum(predicted_tokens(self.examples[row])) for row in rows)

        def loss_of_rows(part: list[int]) -> tuple[Tensor, Sums]:
            rankings = [self.examples[row] for row in part]
            rewards, lm_loss = self._read(rankings)
            columns = label_pairs(rankings, self.config.soft_targets)
            pairs = Pairs(*(column.to(rewards.device) for column in columns))
            loss = ranking_loss(rewards, pairs)
            sums = {"ranking_loss": loss / len(rows)}
            if self.config.centering_weight:
                loss = loss + self.config.centering_weight * centering_loss(rewards, pairs)
            is_right = (rewards[pairs.better] > rewards[pairs.worse]).float()
            sums |= {
                "accuracy": (pairs.weight * is_right).sum() / len(rows),
                "reward_sum": rewards.sum(),
                "responses": torch.full_like(loss, len(rewards)),
                "read": torch.full_like(loss, sum(group_sizes(self.loaded.backbone, rankings))),
                "flops": torch.tensor(sum(map(self._flops, rankings)), dtype=torch.float64, device=loss.device),
            }
            loss = loss / len(rows)
            if lm_loss is not None:
                sums["lm_loss"] = lm_loss / best_tokens
                loss = loss + lm_weight * sums["lm_loss"]
            return loss, sums

        return loss_of_rows

    def _read(self, rankings: Sequence[EncodedRanking]) -> tuple[Tensor, Tensor | None]:
        """Rewards [R], and the sum of -log p over the tokens of the best responses, if that is learned."""
        device = self.run.accelerator.device
        if not self.config.lm_loss_weight:
            return reward_rankings(self.engine.module, rankings, device), None
        prompt, response, prompt_index = pack_rankings(rankings, device)
        is_best = torch.tensor([rank == 1 for item in rankings for rank in item.ranks], device=device)
        mask = response.mask() & is_best[:, None]
        rewards, log_probs = self.engine.module(prompt, response, prompt_index, mask)
        return rewards, -log_probs.sum()

    def _flops(self, ranking: EncodedRanking) -> float:
        predicted = predicted_tokens(ranking) if self.config.lm_loss_weight else ()
        return group_flops(self.loaded.backbone, self.shape, ranking, predicted=predicted)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        lm_loss = {"lm_loss": sums["lm_loss"]} if "lm_loss" in sums else {}
        return lm_loss | {
            "loss": sums["loss"],
            "ranking_loss": sums["ranking_loss"],
            "accuracy": sums["accuracy"],
            "reward/mean": sums["reward_sum"] / sums["responses"],
            "tokens/read": sums["read"],
        }

    def _rewards(self, rankings: Sequence[EncodedRanking]) -> list[list[float]]:
        """Rewards of each ranking's responses, on every process."""
        accelerator = self.run.accelerator
        read = partial(reward_rankings, self.engine.module, device=accelerator.device)
        return score_rankings(read, rankings, self.loaded.backbone, self.config.micro_batch_tokens, accelerator)

    def evaluate(self) -> dict[str, float]:
        if not self.held_out:
            return {}
        self.scored = with_rewards(self.held_out, self._rewards(self.held_out))
        return {f"validation/{name}": value for name, value in ranking_metrics(self.scored).items()}

    def save(self, metrics: dict[str, float]) -> None:
        mean = 0.0
        if self.demonstrated:
            rewards = self._rewards(self.demonstrated)
            mean = sum(row[0] for row in rewards) / len(rewards)
        state = self.engine.model_state()

        def write() -> None:
            weights = weights_of(self.loaded.backbone, state, "backbone.model.")
            card = self.card("Reward model", metrics, mean=f"{mean:.4g}")
            write_json(self.run.folder / "validation.json", [asdict(item) for item in self.scored])
            facts = {"mean": mean, "mean_over": len(self.demonstrated)}
            save_reward_model(self.folder, self.loaded, weights, state["head.linear.weight"], facts, card)

        run_on_main(write, self.run.accelerator)


if __name__ == "__main__":
    run_stage(RewardConfig, run_reward)
