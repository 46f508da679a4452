"""Settings of PPO."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from align.core.settings import (
    ModelConfig,
    OptimizationConfig,
    Overlong,
    RunConfig,
    Schedule,
    Settings,
    SplitConfig,
    UnsetFloat,
    block,
    option,
    require_setting,
)
from align.ppo.advantages import NEEDS_CRITIC, NEEDS_GROUPS, AdvantageEstimator
from align.ppo.losses import LossCoefficients
from align.sampling.settings import EngineConfig

EnsembleMethod = Literal["mean", "wco", "uwo"]


@dataclass(kw_only=True)
class KLConfig(Settings):
    """KL penalty to the reference."""

    help_title = "KL penalty"

    kl_coef: float = option(0.05, "KL penalty coefficient (InstructGPT: 0.02). With kl_target, its initial value.", ge=0)
    kl_target: float = option(
        0.0,
        "Target KL for an adaptive kl_coef, in nats per response (lm-human-preferences: 6). 0 keeps kl_coef fixed.",
        ge=0,
    )
    kl_horizon: int = option(10000, "Horizon of the adaptive kl_coef, in responses (lm-human-preferences: 10,000).", gt=0)
    kl_in: Literal["reward", "loss"] = option(
        "reward", "Apply the KL penalty to the per-token reward, or add it to the loss (GRPO)."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = option("k1", "Per-token KL estimator. kl_in loss needs k2 or k3 (GRPO: k3).")

    def __post_init__(self) -> None:
        super().__post_init__()
        adapts = "above 0 with kl_target: an adaptive coefficient is multiplied, and stays 0"
        require_setting(self, "kl_coef", self.kl_coef > 0 or not self.kl_target, adapts)
        wanted = "k2 or k3 with kl_in loss: the gradient of k1 is 0 in expectation"
        require_setting(self, "kl_estimator", self.kl_in == "reward" or self.kl_estimator != "k1", wanted)


@dataclass(kw_only=True)
class LossConfig(Settings):
    """Policy and value loss."""

    help_title = "loss"

    cliprange: float = option(0.2, "Clip range of the policy ratio (epsilon).", ge=0)
    cliprange_high: float = option(0.0, "Upper clip range of the policy ratio (DAPO: 0.28). 0 uses cliprange.", ge=0)
    cliprange_value: float = option(
        0.2, "Clip range of the value function around the old values. 0 disables clipping.", ge=0
    )
    max_update_kl: float = option(
        0.02,
        "KL limit per update, in nats per token from the policy before the update. Beyond it, the update stops "
        "training the policy. 0 for no limit.",
        ge=0,
    )
    vf_coef: float = option(0.1, "Value loss coefficient (lm-human-preferences: 0.1).", ge=0)
    ent_coef: float = option(0.0, "Entropy bonus coefficient.", ge=0)


@dataclass(kw_only=True)
class ResponseConfig(Settings):
    """Sampling of responses."""

    help_title = "generation"

    max_new_tokens: int = option(64, "Maximum response length, in tokens.", gt=0)
    stop_token_ids: list[int] = option(
        [],
        "Stop token ids. Default: the model's EOS. The saved model stops at both.",
        ge=0,
    )
    ignore_eos: bool = option(
        False,
        "Always sample max_new_tokens. A response that contains EOS still counts as finished (see missing_eos_score).",
    )
    max_prompt_tokens: int = option(512, "Maximum prompt length, in tokens.", gt=0)
    overlong: Overlong = option(
        "error", "How to handle longer prompts: raise an error, drop them, or truncate their beginning."
    )
    temperature: float = option(
        1.0, "Sampling temperature. Also divides the logits of the policy and reference log-probs.", gt=0
    )

    @property
    def stop_ids(self) -> frozenset[int] | None:
        """Stop token ids. If None, the model's end tokens."""
        return frozenset(self.stop_token_ids) if self.stop_token_ids or self.ignore_eos else None


@dataclass(kw_only=True)
class EvaluationConfig(Settings):
    """Evaluation and checkpoint selection."""

    help_title = "evaluation"

    validation_prompts: str = option("", "Prompts to evaluate on.")
    eval_steps: int = option(10, "Number of updates between evaluations on validation_prompts.", gt=0)
    max_kl: float = option(
        25.0,
        "KL limit for checkpoint selection, in nats per response: the policy with the highest validation reward "
        "below it is saved.",
        gt=0,
    )
    stop_on_collapse: bool = option(
        True, "Stop with an error if the mean score stays far below that of the first rollout. If false, only warn."
    )
    save_best_policy: bool = option(
        True, "Save the best policy on validation_prompts as the final model. If false, save the last one."
    )


@dataclass(kw_only=True)
class PPOConfig(
    KLConfig,
    LossConfig,
    ResponseConfig,
    EvaluationConfig,
    SplitConfig,
    EngineConfig,
    ModelConfig,
    RunConfig,
    OptimizationConfig,
):
    """PPO with a KL penalty to the reference, the initial policy."""

    length_setting = "total_updates"
    needs = "a model, prompts and a reward (reward_model, reward_functions, rules, rubrics or attributes)"
    first_run = "configs/ppo/first-run.yaml"

    adam_epsilon: float = option(1e-5, "AdamW epsilon (The N Implementation Details of RLHF with PPO: 1e-5).")
    learning_rate: float = option(3e-6, "Peak learning rate. 1e-4 to 3e-4 with LoRA.")
    lr_scheduler_type: Schedule = option("linear", "Learning rate schedule.")
    warmup_ratio: float = option(0.0, "Fraction of all updates used for linear warmup from 0.")

    prompts: str = option(
        "data/prompts.jsonl", "Training prompts: file, folder or Hub id. Use FILE[prompt=COLUMN] to read another column."
    )
    reward_model: list[str] = option([], "Reward model folder, or several to combine by reward_ensemble.")
    reward_ensemble: EnsembleMethod = option(
        "mean",
        "How to combine several reward models: mean, wco (minimum) or uwo (mean minus uncertainty_weight times the "
        "variance).",
    )
    uncertainty_weight: float = option(
        0.1, "Variance penalty of reward_ensemble uwo. The rewards must share one scale.", ge=0
    )
    reward_functions: list[str] = option(
        [], "Reward functions, each module:function or module:function=weight. Added to the reward model's score."
    )
    total_updates: int = option(100, "Number of PPO updates, one rollout each.", gt=0)
    rollout_batch_size: int = option(64, "Responses per rollout, over all processes (lm-human-preferences: 512).", gt=0)
    samples_per_prompt: int = option(1, "Responses sampled per prompt.", gt=0)
    num_ppo_epochs: int = option(4, "Epochs per rollout (summarize_from_feedback_details: 4, InstructGPT: 1).", gt=0)
    num_mini_batches: int = option(1, "Minibatches (optimizer steps) per epoch.", gt=0)
    advantage_estimator: AdvantageEstimator = option(
        "gae", "Advantage estimator. Only gae uses a critic. rloo and grpo need samples_per_prompt of 2 or more."
    )
    gamma: float = option(1.0, "Discount factor.", ge=0, le=1)
    lam: float = option(0.95, "GAE lambda.", ge=0, le=1)
    value_lam: float | None = option(
        None, "GAE lambda of the value targets (decoupled GAE; VC-PPO and VAPO: 1). none uses lam.", ge=0, le=1
    )
    whitening_floor: float = option(
        0.1,
        "Minimum divisor for advantage whitening, as a fraction of the scores' standard deviation. 0 for no minimum.",
        ge=0,
    )
    whiten_rewards: bool = option(
        False, "Scale rewards to unit variance, keeping their mean. Requires a critic (see advantage_estimator)."
    )
    missing_eos_penalty: float | None = option(
        None,
        "Penalty subtracted from the score of a response without EOS, instead of missing_eos_score. none for no penalty.",
        ge=0,
    )
    missing_eos_score: float | None = option(
        UnsetFloat(-1.0),
        "Score assigned to a response without EOS (summarize_from_feedback_details: -1). none keeps its own score.",
    )
    critic: Literal["shared", "separate", "reward"] = option(
        "shared",
        "Backbone of the value head: shared with the policy, a separate trained copy (with LoRA, an adapter), or "
        "the frozen reward model, whose head is trained by value_fit.",
    )
    value_learning_rate: float = option(
        0.0,
        "Peak learning rate of the value head and of a separate critic (InstructGPT: 9e-6). 0 uses learning_rate.",
        ge=0,
    )
    value_fit: Literal["none", "first", "every"] = option(
        "every",
        "Fit the value head to the returns by ridge regression: on every rollout, on the first, or on none (train "
        "by gradient descent only).",
    )
    critic_warmup: int = option(0, "Number of initial updates that train only the critic.", ge=0)
    num_critic_epochs: int = option(
        0,
        "Critic epochs per rollout. Those beyond num_ppo_epochs train only the critic. 0 uses num_ppo_epochs.",
        ge=0,
    )

    ema_decay: float = option(
        0.0,
        "Decay of an exponential moving average (EMA) of the weights, which is evaluated and saved (InstructGPT: "
        "0.992). 0 disables it.",
        ge=0,
        lt=1,
    )
    # Extensions, in the order in which their hooks are called.
    rubrics: Any = block(
        "align.extras.rules.rubrics:RubricSettings", "Reward from rubrics that a frozen model grades.", extension=True
    )
    attributes: Any = block(
        "align.extras.attributes.attribute_rewards:AttributeRewardSettings",
        "Reward from an attribute model.",
        extension=True,
    )
    rules: Any = block(
        "align.extras.rules.rule_terms:RuleTermSettings",
        "Reward from a rule model's verdicts, added to the other rewards.",
        extension=True,
    )
    length_adjustment: float = option(
        0.0,
        "Fraction of the length-correlated part of the scores to remove, by linear regression among responses to "
        "the same prompt. Requires samples_per_prompt of 2 or more. 0 disables it.",
        extension=True,
        ge=0,
        le=1,
    )
    hold_length: float = option(
        0.0,
        "Reward per token for each 100 % by which the rollout's mean response is shorter than in the first "
        "rollout. Requires samples_per_prompt of 2 or more. 0 disables it.",
        extension=True,
        ge=0,
    )
    ptx: Any = block(
        "align.ppo.extensions.ptx:PtxSettings",
        "Language-model loss on demonstrations or raw text (InstructGPT's ptx).",
        extension=True,
    )
    selection: Any = block(
        "align.ppo.extensions.selection:SelectionSettings",
        "Separate reward model for checkpoint selection. Default: select by the training reward.",
        extension=True,
    )
    extensions: list[str] = option(
        [], "Installed extensions by name, or module:Class of an `align.ppo.extensions.Extension`."
    )

    @property
    def has_critic(self) -> bool:
        """Whether the run learns values."""
        return self.advantage_estimator in NEEDS_CRITIC

    @property
    def trains_critic(self) -> bool:
        """Whether the critic is trained by gradient descent."""
        return self.critic == "separate" or (self.has_critic and self.critic == "shared" and self.value_fit != "every")

    @property
    def epochs(self) -> int:
        """Number of passes over a rollout, by the policy or the critic."""
        return max(self.num_ppo_epochs, self.num_critic_epochs)

    def without_effect(self) -> dict[str, str]:
        """Return the settings that have no effect because of other settings, with the reason."""
        unused, estimator = super().without_effect(), self.advantage_estimator
        critic = ["value_learning_rate", "cliprange_value"]
        if not self.has_critic:
            critic += ["value_fit", "num_critic_epochs", "value_lam", "whitening_floor", "vf_coef", "lam"]
            critic += [] if estimator == "reinforce++" else ["gamma"]
            unused |= dict.fromkeys(critic, f"advantage_estimator {estimator}")
        elif not self.trains_critic:
            reason = "critic reward" if self.critic == "reward" else "value_fit every"
            critic += ["vf_coef", "num_critic_epochs", "value_lam"]
            unused |= dict.fromkeys(critic, f"{reason} does not train the critic by gradients")
        elif not self.vf_coef:
            unused |= dict.fromkeys([*critic, "critic"], "vf_coef 0 does not train the critic")
        if len(self.reward_model) < 2:
            unused |= dict.fromkeys(["reward_ensemble", "uncertainty_weight"], "fewer than two reward models")
        elif self.reward_ensemble != "uwo":
            unused["uncertainty_weight"] = f"reward_ensemble {self.reward_ensemble}"
        if not self.kl_target:
            unused["kl_horizon"] = "kl_target 0"
        return unused

    def loss_coefficients(self, kl_coef: float) -> LossCoefficients:
        """Return the loss coefficients for the current KL penalty coefficient."""
        return LossCoefficients(
            cliprange=self.cliprange,
            cliprange_high=self.cliprange_high or self.cliprange,
            cliprange_value=self.cliprange_value or math.inf,
            vf_coef=self.vf_coef,
            ent_coef=self.ent_coef,
            kl_coef=kl_coef,
            kl_estimator=self.kl_estimator if self.kl_in == "loss" else None,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reward_model = [name for name in self.reward_model if name]  # --reward_model "" clears a file's value
        if self.missing_eos_penalty is not None and isinstance(self.missing_eos_score, UnsetFloat):
            self.missing_eos_score = None
        alone, grouped = self.samples_per_prompt == 1, self.advantage_estimator in NEEDS_GROUPS
        one = self.missing_eos_penalty is None or self.missing_eos_score is None
        selects = not self.selection or self.save_best_policy or self.selection.early_stopping_patience > 0
        prompts, rest = divmod(self.rollout_batch_size, self.samples_per_prompt)
        reason = f"because advantage_estimator {self.advantage_estimator} has no critic"
        for name, holds, wanted in (
            ("missing_eos_score", one, "none with missing_eos_penalty: a score is replaced or lowered"),
            ("critic_warmup", self.critic_warmup < self.total_updates, f"below total_updates ({self.total_updates})"),
            ("samples_per_prompt", not (grouped and alone), f"2 or more for advantage_estimator {self.advantage_estimator}"),
            ("samples_per_prompt", not (self.length_adjustment and alone), "2 or more for length_adjustment"),
            ("samples_per_prompt", not (self.hold_length and alone), "2 or more for hold_length"),
            ("critic", self.has_critic or self.critic == "shared", f"shared, {reason}"),
            ("value_fit", self.critic != "reward" or self.value_fit != "none", "first or every with critic reward"),
            (
                "critic_warmup",
                self.critic != "reward" or not self.critic_warmup,
                "0 with critic reward, which is not trained",
            ),
            ("critic_warmup", self.has_critic or not self.critic_warmup, f"0, {reason}"),
            (
                "num_critic_epochs",
                self.num_critic_epochs == 0 or self.num_critic_epochs >= self.num_ppo_epochs,
                f"0, or at least num_ppo_epochs ({self.num_ppo_epochs})",
            ),
            # Keeping the mean adds a constant to every token; summed over a response, it rewards length. A critic learns
            # this part as a baseline; the other estimators turn it into an advantage.
            ("whiten_rewards", self.has_critic or not self.whiten_rewards, f"false, {reason}"),
            ("save_best_policy", selects, "true with selection.reward_model, unless early_stopping_patience uses it"),
            ("ignore_eos", not (self.ignore_eos and self.stop_token_ids), "false where stop_token_ids is given"),
            ("samples_per_prompt", not rest, f"a divisor of rollout_batch_size ({self.rollout_batch_size})"),
            (
                "num_mini_batches",
                self.num_mini_batches <= prompts,
                f"at most rollout_batch_size / samples_per_prompt ({prompts})",
            ),
        ):
            require_setting(self, name, holds, wanted)
