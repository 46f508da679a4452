"""Settings of PPO."""

from dataclasses import dataclass
from typing import Literal

from align.config import EngineConfig, ModelConfig, RunConfig, option, require


@dataclass(kw_only=True)
class PPOConfig(ModelConfig, EngineConfig, RunConfig):
    """Clipped-ratio PPO with a KL penalty to the reference, which is the model that training starts from."""

    adam_epsilon: float = option(1e-5, "epsilon of AdamW (the N implementation details of RLHF with PPO: 1e-5)")
    learning_rate: float = option(3e-6, "peak learning rate (3e-6 for all weights, 1e-4 to 3e-4 with LoRA)")
    schedule: Literal["cosine", "linear", "inverse_sqrt", "constant"] = option("linear", "decay of the learning rate")
    warmup: float = option(0.0, "share of all updates in which the learning rate rises from 0")

    prompts: str = option("data/prompts.jsonl", "prompts to sample from: file, folder or hub name")
    validation_prompts: str = option("", "fixed prompts for evaluation; empty: none")
    reward_model: str = option("", "folder of a reward model; empty: reward_functions alone")
    reward_functions: list[str] = option(
        [], "own rewards, each module:function or module:function=weight; added to the reward model's"
    )
    updates: int = option(100, "rollouts to sample and learn from")
    rollout_size: int = option(64, "responses in one rollout, over all processes (lm-human-preferences: 512)")
    samples_per_prompt: int = option(1, "responses to each prompt of a rollout")
    epochs: int = option(4, "passes over a rollout (summarize_from_feedback_details: 4, InstructGPT: 1)")
    minibatches: int = option(1, "optimiser steps in one pass over a rollout")
    max_new_tokens: int = option(64, "longest response, in tokens")
    max_prompt_tokens: int = option(512, "longest prompt, in tokens")
    temperature: float = option(1.0, "sampling temperature; log-probs of policy and reference are taken at it")
    kl_beta: float = option(0.05, "coefficient of the KL penalty (InstructGPT: 0.02); the first one if kl_target is set")
    kl_target: float = option(0.0, "KL that beta adapts to, in nats a response (lm-human-preferences: 6); 0: beta is fixed")
    kl_horizon: int = option(10000, "responses over which beta adapts (lm-human-preferences: 10,000)")
    clip: float = option(0.2, "epsilon of the policy's ratio clip")
    value_clip: float = option(0.2, "how far a value may move from its old one in one update")
    value_weight: float = option(0.1, "weight of the value loss (lm-human-preferences: 0.1)")
    gamma: float = option(1.0, "discount of later rewards")
    lam: float = option(0.95, "lambda of generalised advantage estimation")
    whiten_rewards: bool = option(False, "scale rewards to unit variance, keeping their mean")
    missing_end: Literal["replace", "lower", "keep"] = option(
        "replace",
        "score of a response that did not end: replace it by missing_end_score, lower it by that much, keep it",
    )
    missing_end_score: float = option(-1.0, "see missing_end (summarize_from_feedback_details: -1)")
    critic: Literal["shared", "separate"] = option(
        "shared",
        "where values come from: a head on the policy's trunk, or a model (with LoRA: an adapter) of the critic's own",
    )
    ptx_data: str = option("", "demonstrations whose language-model loss is added (InstructGPT's ptx); empty: none")
    ptx_weight: float = option(27.8, "weight of that loss (InstructGPT: 27.8)")
    evaluate_every: int = option(10, "updates between evaluations on validation_prompts")
    max_kl: float = option(25.0, "the best checkpoint is the one of highest held-out reward with a KL of at most this")

    keep_policies: bool = option(False, "keep the policy of every evaluation in policies/, for reward against KL")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = ("updates", "rollout_size", "samples_per_prompt", "epochs", "minibatches", "max_new_tokens")
        for name in (*positive, "max_prompt_tokens", "temperature", "kl_horizon", "max_kl", "evaluate_every"):
            require(self, name, getattr(self, name) > 0, "above 0")
        for name in ("kl_beta", "kl_target", "clip", "value_clip", "value_weight", "ptx_weight"):
            require(self, name, getattr(self, name) >= 0, "0 or more")
        for name in ("gamma", "lam"):
            require(self, name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        responses = self.rollout_size
        require(
            self,
            "samples_per_prompt",
            responses % self.samples_per_prompt == 0,
            f"a divisor of rollout_size ({responses})",
        )
        prompts = responses // self.samples_per_prompt
        most = f"at most rollout_size / samples_per_prompt ({prompts})"
        require(self, "minibatches", self.minibatches <= prompts, most)
        given = bool(self.reward_model or self.reward_functions)
        require(self, "reward_model", given, "given, unless reward_functions are")
