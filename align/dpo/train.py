"""Direct preference optimization of a policy on rankings.

Launch it by `accelerate launch align/dpo/train.py --config configs/dpo/x.yaml`.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from align.batches.encoding import Data, encode_rankings
from align.batches.mixtures import TrainingData, encode_mixture
from align.core.files import write_json
from align.core.launch import run_stage
from align.core.settings import MixtureConfig, option, require_setting
from align.dpo.loss import dpo_losses, ipo_losses
from align.models.checkpoint import save_model, weights_of
from align.models.heads import LanguageModel
from align.reward.loss import Pairs, pairs_of
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
from align.runtime.flops import Clock, forward_flops, training_flops
from align.tokenization.encoded import EncodedRanking
from align.training.data_order import EpochConfig
from align.training.engine import Sums
from align.training.loop import EpochTrainer, ExampleTask
from align.training.start import Model, with_data_names


@dataclass(kw_only=True)
class DPOConfig(MixtureConfig, EpochConfig):
    """A policy that learns from rankings without a reward model; the reference is the model that training starts from."""

    learning_rate: float = option(1e-6, "peak learning rate (1e-6 for all weights: DPO, appendix B; some 1e-5 with LoRA)")
    train_data: str = option(
        "data/rankings.jsonl",
        "rankings or pairs to learn from: file, folder or hub name; several are separated by commas, each as NAME or "
        "NAME=WEIGHT",
    )
    validation_data: str = option("", "held-out rankings: metrics, and the choice of the best policy; empty: none")
    epochs: int = option(1, "passes over the rankings")
    batch_size: int = option(32, "rankings in one update, over all processes (DPO: 64 pairs)")
    beta: float = option(0.1, "how strongly the policy is held near the reference (DPO: 0.1)", gt=0)
    loss: Literal["dpo", "ipo"] = option("dpo", "dpo, or ipo (Azar et al. 2023), which pulls pairs apart only so far")
    label_smoothing: float = option(
        0.0,
        "probability that a pair is labeled the wrong way round, for dpo (cDPO, Mitchell 2023); 0: plain DPO",
        ge=0,
        lt=0.5,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        smooth = self.loss == "dpo" or not self.label_smoothing
        require_setting(self, "label_smoothing", smooth, "0 for ipo")


class DPOTrainer(EpochTrainer):
    """Direct preference optimization of a policy on rankings of 2 to 9 responses.

        rankings = [{"prompt": "Hi", "responses": ["Hello!", "Hm.", "No."], "ranks": [1, 2, 3]}]
        trainer = DPOTrainer("smollm2-135m", rankings, DPOConfig(output_dir="runs/dpo"))
        folder = trainer.train()

    The reference is the policy before its first update. Its log-probs never change, so they are computed once,
    by the policy itself, and no copy of the model is kept.

    Arguments are those of `EpochTrainer`.
    """

    task: "DPOTask"

    def __init__(
        self,
        policy: Model,
        train_data: TrainingData,
        config: DPOConfig,
        validation_data: Data = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        config = with_data_names(config, train_data=train_data, validation_data=validation_data)
        super().__init__(config, "dpo", policy, tokenizer)
        encode = partial(encode_rankings, loaded=self.loaded, limits=config.limits, skip_bad_rows=config.skip_bad_rows)
        mixed = encode_mixture(train_data, encode, config.task_prefixes)
        held_out = encode(validation_data) if validation_data else []
        counts = f"{len(mixed.examples)} rankings to learn from, {len(held_out)} held out"
        self.run.say(f"dpo: {counts}; model {self.run.config.model}")
        module = LanguageModel(self.loaded.backbone, self.loaded.adapter)
        engine = self.build_engine(module, mixed, (len(ranking.responses) for ranking in mixed.examples))
        self.task = DPOTask(self.run, config, self.loaded, engine, mixed.examples, held_out)

    def train(self) -> Path:
        """Train from the last checkpoint on; returns the folder of the best policy."""
        self.task.read_reference()  # while the weights are still those of the start, also where a run is resumed
        return super().train()


def run_dpo(config: DPOConfig) -> Path:
    """Train `config.model` on the rankings in `config.train_data`; returns the folder of the best policy."""
    return DPOTrainer(config.model, config.train_data, config, config.validation_data).train()


class DPOTask(ExampleTask):
    """Loss and evaluation of DPO. Before training the policy is its own reference, so evaluating it shows nothing."""

    config: DPOConfig

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lengths = group_sizes(self.loaded.backbone, self.examples)
        self.scored: list[ScoredRanking] = []
        self.reference: list[list[float]] = []
        self.held_out_reference: list[list[float]] = []

    def read_reference(self) -> None:
        """Compute the reference's log-probs of all responses: those under the current weights."""
        self.run.say("dpo: reading all responses with the start, which is the reference")
        clock = Clock()
        self.reference = self._log_probs_of_all(self.examples)
        self.held_out_reference = self._log_probs_of_all(self.held_out)
        clock.lap("reference")
        if self.run.checkpoint is None:
            read = [*self.examples, *self.held_out]
            tokens = float(sum(group_sizes(self.loaded.backbone, read)))
            flops = sum(self._flops(item, forward_flops) for item in read)
            speed = self.run.speed(tokens, flops, sum(clock.seconds.values()))
            self.run.log(0, {"tokens/read": tokens, "flops": flops} | speed)

    def _log_probs(self, rankings: Sequence[EncodedRanking]) -> Tensor:
        """Log-probs [R] of all responses of some rankings, each summed over its tokens."""
        prompt, response, prompt_index = pack_rankings(rankings, self.run.accelerator.device)
        log_probs: Tensor = self.engine.module(prompt, response, None, 1.0, prompt_index)
        return log_probs.sum(dim=1)

    def _log_probs_of_all(self, rankings: Sequence[EncodedRanking]) -> list[list[float]]:
        """Log-probs of each ranking's responses, on every process."""
        parts = (self.loaded.backbone, self.config.micro_batch_tokens, self.run.accelerator)
        return score_rankings(self._log_probs, rankings, *parts) if rankings else []

    def _pair_losses(self, log_ratios: Tensor, rankings: Sequence[EncodedRanking], pairs: Pairs) -> Tensor:
        """The loss of each pair [P], from log-ratios [R]."""
        if self.config.loss == "ipo":
            lengths = [len(response) for item in rankings for response in item.responses]
            log_ratios = log_ratios / torch.tensor(lengths, device=log_ratios.device)
        difference = log_ratios[pairs.better] - log_ratios[pairs.worse]
        if self.config.loss == "ipo":
            return ipo_losses(difference, self.config.beta)
        return dpo_losses(difference, self.config.beta, self.config.label_smoothing)

    def loss(self, rows: list[int]) -> Callable[[list[int]], tuple[Tensor, Sums]]:
        def loss_of_rows(part: list[int]) -> tuple[Tensor, Sums]:
            rankings = [self.examples[row] for row in part]
            log_probs = self._log_probs(rankings)
            reference = [value for row in part for value in self.reference[row]]
            log_ratios = log_probs - torch.tensor(reference, device=log_probs.device)
            pairs = pairs_on(log_probs.device, rankings)
            loss = (pairs.weight * self._pair_losses(log_ratios, rankings, pairs)).sum() / len(rows)

            def mean(values: Tensor) -> Tensor:
                return (pairs.weight * values).sum() / len(rows)

            rewards = self.config.beta * log_ratios.detach()
            chosen, rejected = rewards[pairs.better], rewards[pairs.worse]
            return loss, {
                "accuracy": mean((chosen > rejected).float()),
                "rewards/chosen": mean(chosen),
                "rewards/rejected": mean(rejected),
                "logps/chosen": mean(log_probs.detach()[pairs.better]),
                "logps/rejected": mean(log_probs.detach()[pairs.worse]),
                "read": torch.full_like(loss, sum(group_sizes(self.loaded.backbone, rankings))),
                "flops": torch.tensor(sum(map(self._flops, rankings)), dtype=torch.float64, device=loss.device),
            }

        return loss_of_rows

    def _flops(self, ranking: EncodedRanking, flops: Callable[..., float] = training_flops) -> float:
        return group_flops(self.loaded.backbone, self.shape, ranking, flops, list(map(len, ranking.responses)))

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        same = ("loss", "accuracy", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")
        margin = sums["rewards/chosen"] - sums["rewards/rejected"]
        return {name: sums[name] for name in same} | {"rewards/margin": margin, "tokens/read": sums["read"]}

    def evaluate(self) -> dict[str, float]:
        """The policy as a reward model: its implicit rewards, beta times the log-ratios, against the labelers' ranks."""
        if not self.held_out:
            return {}
        log_ratios = [
            [now - before for now, before in zip(*pair, strict=True)]
            for pair in zip(self._log_probs_of_all(self.held_out), self.held_out_reference, strict=True)
        ]
        self.scored = with_rewards(self.held_out, [[self.config.beta * value for value in row] for row in log_ratios])
        pairs = pairs_on(torch.device("cpu"), self.held_out)
        flat = torch.tensor([value for row in log_ratios for value in row], dtype=torch.float64)
        loss = (pairs.weight.double() * self._pair_losses(flat, self.held_out, pairs)).sum() / len(self.held_out)
        metrics = ranking_metrics(self.scored) | {"loss": float(loss)}
        return {f"validation/{name}": value for name, value in metrics.items()}

    def save(self, metrics: dict[str, float]) -> None:
        state = weights_of(self.loaded.backbone, self.engine.model_state(), "backbone.model.")

        def write() -> None:
            write_json(self.run.folder / "validation.json", [asdict(item) for item in self.scored])
            save_model(self.folder, self.loaded, state, self.card("Policy trained by DPO", metrics))

        run_on_main(write, self.run.accelerator)


def pairs_on(device: torch.device, rankings: Sequence[EncodedRanking]) -> Pairs:
    """All untied pairs of some rankings; margins of records are only for the reward model."""
    return Pairs(*(column.to(device) for column in pairs_of([item.ranks for item in rankings])))


if __name__ == "__main__":
    run_stage(DPOConfig, run_dpo)
