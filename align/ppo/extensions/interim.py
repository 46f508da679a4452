"""The optional parts that PPO's flat settings configure, as extensions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from align.core.tensor_ops import length_mask
from align.extras.attributes.scoring import AttributeReward, AttributeScorer
from align.extras.rules.rubrics import LocalJudge, load_rubrics
from align.extras.rules.scoring import RuleScorer, rules_of_model
from align.models.adapters import adapter_parameters
from align.models.roles import REFERENCE_ADAPTER, Roles
from align.ppo.config import PPOConfig
from align.ppo.evaluation import PolicyEvaluation, mean_and_error
from align.ppo.extensions import Extension, TrainingContext
from align.ppo.losses import importance_weights
from align.ppo.metrics import OveroptimizationWatch, importance_metrics
from align.ppo.ptx import PtxLoss
from align.ppo.records import Experience, RoleOutputs, Rollout
from align.ppo.reward_functions import WeightedFunction
from align.ppo.rewards import Rewards
from align.ppo.rollout_files import RolloutWriter, recorded_updates
from align.ppo.rule_terms import LARGEST_MULTIPLIER, RuleTerms, read_budgets
from align.ppo.scores import adjust_for_length, apply_missing_eos, length_slope
from align.ppo.scoring_models import RULE_ADAPTER, load_rewards, load_source
from align.ppo.setup import make_scorer, require_patience, require_readable
from align.reward.checkpoint import RULE, LoadedReward, require_reward_model
from align.runtime.flops import forward_flops
from align.training.engine import TrainEngine

Judge = str | LoadedReward | WeightedFunction


def configured_extensions(config: PPOConfig, judge: Judge | None = None) -> list[Extension]:
    """Return the configured extensions, in the order in which their hooks are called."""
    chosen: dict[str, tuple[Any, Callable[[PPOConfig], Extension]]] = {
        "rubrics": (config.rubrics, RubricRewards),
        "attributes": (config.attribute_model, AttributeRewards),
        "rules": (config.rule_model, RuleExtension),
        "length": (config.length_adjustment, LengthAdjustment),
        "importance": (config.importance_cap, ImportanceWeights),
        "ptx": (config.ptx_data, PtxExtension),
        "reference": (config.reference_refresh, lambda config: ReferenceRefresh(config.reference_refresh)),
        "ema": (config.ema_decay, WeightMean),
        "rollouts": (config.rollout_updates, RolloutFiles),
    }
    found = {name: make(config) for name, (value, make) in chosen.items() if value}
    if judge is not None:
        found["judge"] = JudgeSelection(config, judge)
    for name, extension in found.items():
        extension.name = name
    return list(found.values())


@dataclass
class RubricRewards(Extension):
    """Rewards by rubrics."""

    config: PPOConfig
    gives_scores = True

    def load(self, context: TrainingContext) -> None:
        config, run = self.config, context.run
        self.scorers = load_rubrics(config.rubrics, run.accelerator, config.dtype, config.micro_batch_tokens)
        judges = [scorer.judge for scorer in self.scorers[:1]]  # one serves all rubrics
        self.modules = [judge.module for judge in judges if isinstance(judge, LocalJudge)]
        for scorer in self.scorers:
            rubric = scorer.rubric
            if not any(rubric.applies(prompt.category) for prompt in context.training_prompts):
                wanted = " or ".join(sorted(rubric.categories))
                run.say(f"warning: rubric '{rubric.name}' will always give 0: no prompt has category {wanted}")

    def score(self, rollout: Rollout) -> dict[str, Tensor]:
        conversations = [prompt.conversation for prompt in rollout.prompts]
        categories = [prompt.category for prompt in rollout.prompts]
        return {
            f"rubric/{scorer.rubric.name}": scorer.rubric.weight
            * torch.tensor(scorer(conversations, rollout.texts, categories))
            for scorer in self.scorers
        }


@dataclass
class AttributeRewards(Extension):
    """A reward from attributes."""

    config: PPOConfig
    gives_scores = True

    def load(self, context: TrainingContext) -> None:
        config, policy = self.config, context.policy
        folder, accelerator = config.attribute_model, context.run.accelerator
        scorer = AttributeScorer.from_folder(
            folder, config.dtype, policy.tokenization, accelerator, config.micro_batch_tokens
        )
        self.reward, self.modules = AttributeReward(scorer, config.attribute_reward), [scorer.module]
        require_readable(folder, scorer.scorer, context.prompts, config.max_new_tokens, policy, scorer.question_tokens)

    def score(self, rollout: Rollout) -> dict[str, Tensor]:
        return {"attributes": torch.tensor(self.reward(rollout.sampled))}

    def flops(self, work: Sequence[tuple[int, Sequence[int]]]) -> float:
        profile = self.reward.scorer.scorer.shape
        return sum(forward_flops(profile, prompt, responses) for prompt, responses in work) if profile else 0.0


class RuleExtension(Extension):
    """Rules in the reward."""

    gives_scores = True

    def __init__(self, config: PPOConfig) -> None:
        self.config, self.card = config, {"rule model": config.rule_model}
        self.texts = rules_of_model(config.rule_model, config.rules)
        read_budgets(config.rule_budgets, list(self.texts))

    def load(self, context: TrainingContext) -> None:
        self.context = context
        self.source = load_source(self.config.rule_model, context.policy, self.config.dtype, RULE_ADAPTER, RULE)
        self.adapters = [self.source.mounted] if self.source.mounted else []
        self.modules = [self.source.loaded.model] if self.source.loaded else []

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        context, config = self.context, self.config
        scorer = make_scorer(self.source, context.run, context.policy, roles, context.prompts, config.max_new_tokens)
        rules = RuleScorer(scorer, self.texts, scorer.tokenization or context.policy.tokenization)
        longest = max(rules.lengths)
        require_readable(self.source.name, scorer, context.prompts, config.max_new_tokens, context.policy, longest)
        self.scorer, self.terms = rules, RuleTerms(config, rules)

    def transform_scores(self, scores: Tensor, rollout: Rollout, parts: dict[str, Tensor]) -> Tensor:
        self.violations = self.terms.violations(rollout)
        parts |= {f"rule/{rule}": broken for rule, broken in self.violations.items()}
        return self.terms.score_to_learn(scores, self.violations)

    def metrics(self) -> dict[str, float]:
        return self.terms.metrics()

    def flops(self, work: Sequence[tuple[int, Sequence[int]]]) -> float:
        profile, rules = self.scorer.scorer.shape, self.scorer.lengths
        if profile is None:
            return 0.0
        return sum(forward_flops(profile, prompt + length, rules) for prompt, responses in work for length in responses)

    def after_update(self, update: int, experience: Experience) -> None:
        if update > self.config.critic_warmup:
            self.terms.adapt(self.violations)

    def evaluate(self, evaluation: PolicyEvaluation) -> None:
        violations, preference = self.terms.violations(evaluation.rollout), evaluation.scores
        excess = self.terms.excess(violations)
        evaluation.scores = self.terms.score_to_compare(preference, violations)
        evaluation.deduction += LARGEST_MULTIPLIER * excess
        evaluation.fault = "over the rule budgets" if excess else ""
        config, ended = self.config, evaluation.rollout.ended_mask
        preference = apply_missing_eos(preference, ended, config.missing_eos, config.missing_eos_score)
        evaluation.metrics["preference"] = float(preference.mean())
        evaluation.metrics |= {f"rule/{rule}": float(broken.mean()) for rule, broken in violations.items()}

    def state_dict(self) -> Any:
        return self.terms.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.terms.load_state_dict(state)


@dataclass
class LengthAdjustment(Extension):
    """Removes the part of the scores that lengths explain."""

    config: PPOConfig
    slope = 0.0

    def transform_scores(self, scores: Tensor, rollout: Rollout, parts: dict[str, Tensor]) -> Tensor:
        config, scores = self.config, scores.float()
        answers = (rollout.lengths, rollout.ended_mask, config.samples_per_prompt)
        self.slope = length_slope(scores, *answers)
        adjusted = adjust_for_length(scores, *answers, config.length_adjustment * self.slope)
        if config.missing_eos == "replace":  # these scores go into the running statistics alone
            adjusted = torch.where(rollout.ended_mask, adjusted, scores)
        return adjusted

    def metrics(self) -> dict[str, float]:
        return {"reward/length_slope": self.slope}


class ImportanceWeights(Extension):
    """Corrects for an engine that samples from a slightly different distribution."""

    corrects_sampling = True

    def __init__(self, config: PPOConfig) -> None:
        self.cap = config.importance_cap
        self.found: dict[str, float] = {}

    def token_weights(self, rollout: Rollout, old: RoleOutputs) -> Tensor | None:
        engine_log_probs = rollout.engine_log_probs
        if engine_log_probs is None:
            return None
        weights = importance_weights(old.log_probs, engine_log_probs, self.cap)
        self.found = importance_metrics(weights, length_mask(rollout.lengths, weights.shape[1]), self.cap)
        return weights

    def metrics(self) -> dict[str, float]:
        return self.found


@dataclass
class PtxExtension(Extension):
    """The ptx loss."""

    config: PPOConfig
    read_flops = 0.0

    def load(self, context: TrainingContext) -> None:
        self.ptx = PtxLoss(self.config, context.policy)

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        self.engine, self.roles = engine, roles

    def extra_loss(self, step_key: tuple[int, int, int], count: int) -> dict[str, float]:
        loss, flops = self.ptx.accumulate(self.engine, self.roles, count, step_key)
        self.read_flops += flops
        return {"loss/ptx": loss}

    def flops(self, work: Sequence[tuple[int, Sequence[int]]]) -> float:
        flops, self.read_flops = self.read_flops, 0.0
        return flops


class ReferenceRefresh(Extension):
    """Copies the policy's weights over the reference's every `every` updates."""

    moves_reference = True

    def __init__(self, every: int) -> None:
        self.every, self.moved = every, False

    def load(self, context: TrainingContext) -> None:
        self.policy = context.policy

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        self.find_weights(roles.reference_model)

    def find_weights(self, reference: nn.Module | None) -> None:
        """Find the weights to copy: of a frozen model, or of an adapter on the policy's base."""
        model = self.policy.backbone.model
        if reference is None:
            assert self.policy.adapter is not None
            self.weights = adapter_parameters(model, REFERENCE_ADAPTER)
            trained = adapter_parameters(model, self.policy.adapter).values()
            self.sources = dict(zip(self.weights, trained, strict=True))
        else:
            self.weights = {name.removeprefix("backbone.model."): weight for name, weight in reference.named_parameters()}
            policy = dict(model.named_parameters())
            self.sources = {name: policy[name] for name in self.weights}

    def after_update(self, update: int, experience: Experience) -> None:
        if update % self.every == 0:
            self._copy(self.sources)

    @torch.no_grad()
    def _copy(self, sources: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(sources[name])
        self.moved = True

    def state_dict(self) -> dict[str, Tensor]:
        """Return the reference's weights; none while it is the starting model."""
        return {name: weight.detach() for name, weight in self.weights.items()} if self.moved else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            self._copy(state)


class WeightMean(Extension):
    """Uses an exponential mean of the weights for evaluations and the result."""

    def __init__(self, config: PPOConfig) -> None:
        self.average_decay = config.ema_decay


@dataclass
class RolloutFiles(Extension):
    """Writes rollouts as files."""

    config: PPOConfig

    def load(self, context: TrainingContext) -> None:
        recorded = recorded_updates(self.config.updates, self.config.rollout_updates)
        self.writer = RolloutWriter(context.run, context.policy.tokenization, recorded)

    def resume(self, update: int) -> None:
        self.writer.drop_after(update)

    def on_experience(self, update: int, experience: Experience) -> None:
        self.writer.write(update, experience)


class JudgeSelection(Extension):
    """Selects the policy to keep by a judge, and stops a run whose judge falls while its reward rises."""

    selects_by = "judge's score"

    def __init__(self, config: PPOConfig, judge: Judge) -> None:
        self.config, self.judge, self.watch = config, judge, OveroptimizationWatch(config.judge_patience)
        self.card = {"chosen by": config.judge_model}
        if isinstance(judge, str):
            require_reward_model(judge)

    def load(self, context: TrainingContext) -> None:
        self.context = context
        if isinstance(self.judge, WeightedFunction):
            if context.run.accelerator.num_processes > 1:
                require_patience(self.config.reward_timeout, self.config.collective_timeout)
            return
        (self.source,) = load_rewards([self.judge], context.policy, self.config.dtype, self.config.chat_template, "judge")
        self.adapters = [self.source.mounted] if self.source.mounted else []
        self.modules = [self.source.loaded.model] if self.source.loaded else []

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        context, config, timeout = self.context, self.config, self.config.reward_timeout
        if isinstance(self.judge, WeightedFunction):
            self.rewards = Rewards([], [self.judge], timeout=timeout, accelerator=context.run.accelerator)
            return
        scorer = make_scorer(self.source, context.run, context.policy, roles, context.prompts, config.max_new_tokens)
        self.rewards = Rewards([scorer], timeout=timeout, accelerator=context.run.accelerator)

    @property
    def should_stop(self) -> bool:
        return self.watch.reached

    def evaluate(self, evaluation: PolicyEvaluation) -> None:
        scores = self.rewards(evaluation.rollout)[0]
        evaluation.selection_scores = evaluation.columns["judge"] = scores
        evaluation.metrics |= mean_and_error("judge", scores)

    def after_evaluation(self, update: int, metrics: dict[str, float]) -> str:
        return self.watch.check(update, metrics)

    def state_dict(self) -> Any:
        return self.watch.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.watch.load_state_dict(state)
