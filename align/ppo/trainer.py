"""PPO on a policy, rewards and prompts, from files or from objects in memory."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from align.batches.encoding import Data, Limits, encode_prompts
from align.batches.mixtures import data_name
from align.core.errors import UserError
from align.extras.attributes.scoring import AttributeReward
from align.extras.rules.rubrics import Rubric
from align.extras.rules.scoring import RuleScorer, rules_of_model
from align.models.backbone import flops_profile
from align.models.loading import LoadedModel
from align.models.roles import ActorCritic, LanguageModel, Roles
from align.ppo.algorithm import PPOAlgorithm
from align.ppo.config import PPOConfig
from align.ppo.metrics import RoleFlopsProfiles
from align.ppo.ptx import PtxLoss
from align.ppo.rewards import RewardFunction, Rewards, WeightedFunction, load_functions
from align.ppo.rule_terms import RuleTerms, read_budgets
from align.ppo.scores import combine_rewards
from align.ppo.scoring_models import RewardSource, ScoringModels, load_scoring_models
from align.ppo.setup import ReferenceRefresh, build_actor_critic, check_memory, copy_backbone, rate_groups
from align.reward.checkpoint import LoadedReward, require_reward_model
from align.reward.scoring import RewardModelScorer
from align.runtime.distributed import zero_stage
from align.runtime.sharding import place_frozen_model, sharded_loading
from align.sampling.engines import make_engine
from align.tokenization import ConversationError, Tokenization
from align.tokenization.encoded import EncodedPrompt
from align.training.engine import TrainEngine
from align.training.start import Model, build_engine, open_run, say_if_prompts_are_repeated

Reward = str | Path | LoadedReward | RewardFunction | WeightedFunction
"""A part of the reward: the folder of a reward model, a loaded one (`align.reward.checkpoint.reward_of_classifier` makes one
of a transformers classifier in memory), or a function."""


class PPOTrainer:
    """PPO of a policy against rewards, on prompts.

        def politeness(prompts, responses):
            return [float("please" in response) for response in responses]

        config = PPOConfig(output_dir="runs/polite", updates=20)
        trainer = PPOTrainer("smollm2-135m", [politeness], ["Ask me for the salt."], config)
        folder = trainer.train()

    Args:
        policy: a name or folder, a transformers model, or a `LoadedModel`. The reference is a frozen copy of it, or its
            base if it is trained through LoRA.
        reward: reward models, combined by `reward_ensemble`, and functions; their weighted sum is the score of a response.
        prompts: a file, folder or hub name, or prompts in memory (`align.batches.encoding.Data`).
        config: all other settings. Its `model`, `prompts`, `validation_prompts`, `reward_model`, `reward_models`,
            `reward_functions` and `judge_model` are not read.
        validation_prompts: fixed prompts that the policy is evaluated on, and by which the best one is kept.
        tokenizer: of a transformers model.
        judge: a reward model or function that selects the policy to keep; None: the reward does.

    Raises:
        UserError: for a mistake in the settings or the data.
    """

    def __init__(
        self,
        policy: Model,
        reward: Sequence[Reward],
        prompts: Data,
        config: PPOConfig,
        validation_prompts: Data = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        judge: Reward | None = None,
    ) -> None:
        models, functions = split_rewards(reward)
        judges, judge_functions = split_rewards([judge] if judge else [])
        rule_texts = rules_of_model(config.rule_model, config.rules) if config.rule_model else {}
        read_budgets(config.rule_budgets, list(rule_texts))
        _require_rewards(config, [*models, *functions], [*models, *judges])
        if config.judge_patience and not (judge and validation_prompts):
            raise UserError("judge_patience needs judge_model and validation_prompts, which decide when to stop")
        names = reward_settings(models, functions, judge)
        config = replace(config, prompts=data_name(prompts), validation_prompts=data_name(validation_prompts), **names)
        copies = 2 if config.reference_refresh else 1
        self.run, self.loaded = open_run(config, "ppo", policy, tokenizer, frozen_copies=copies)
        self.config = config
        if [*functions, *judge_functions] and self.run.accelerator.num_processes > 1:
            _require_patience(config)
        encoded = self._encode(prompts)
        held_out = self._encode(validation_prompts) if validation_prompts else []
        self._all_prompts = [*encoded, *held_out]
        ptx = PtxLoss(config, self.loaded) if config.ptx_data else None

        with sharded_loading(self.run.accelerator):
            scoring = load_scoring_models(config, self.loaded, self.run.accelerator, models, judges)
            first = scoring.rewards[0] if scoring.rewards else RewardSource("")
            module = build_actor_critic(config, self.loaded, scoring.mounted, first.mounted, first.loaded)
        optimization, roles, refresh = self._prepare(module, scoring, encoded)
        combine = partial(combine_rewards, rule=config.reward_ensemble, uncertainty_weight=config.uncertainty_weight)
        others = {"combine": combine, "rubrics": scoring.rubrics, "attributes": scoring.attributes}
        rewards = self._rewards(scoring.rewards, functions, roles, **others)
        judge_rewards = self._rewards(scoring.judges, judge_functions, roles) if judge else None
        rules = self._rule_scorer(scoring.rules, rule_texts, roles) if scoring.rules else None
        self._report(encoded, held_out, bool(judge), [scorer.rubric for scorer in scoring.rubrics])
        longest = max(len(prompt.ids) for prompt in (*encoded, *held_out)) + config.max_new_tokens
        self.engine = make_engine(config, optimization, self.loaded, longest)
        self.algorithm = PPOAlgorithm(
            self.run,
            config,
            self.loaded,
            optimization,
            roles,
            _flops_profiles(config, self.loaded, module, rewards, rules),
            rewards,
            encoded,
            held_out,
            self.engine,
            ptx,
            judge_rewards,
            RuleTerms(config, rules),
            refresh,
        )

    def _report(
        self, prompts: list[EncodedPrompt], held_out: list[EncodedPrompt], has_judge: bool, rubrics: list[Rubric]
    ) -> None:
        """Print what the run trains on, and what may be wrong with it."""
        counts = f"{len(prompts)} prompts, {len(held_out)} held out"
        self.run.say(f"ppo: {counts}; model {self.run.config.model}")
        say_if_prompts_are_repeated(self.run, self.loaded.backbone, [self.config.samples_per_prompt])
        if held_out and not has_judge:
            chooser = "the best policy is chosen by the reward that it is trained on"
            self.run.say(f"{chooser}; judge_model lets another one choose")
        for rubric in rubrics:
            if not any(rubric.applies(prompt.category) for prompt in prompts):
                wanted = " or ".join(sorted(rubric.categories))
                self.run.say(f"warning: rubric '{rubric.name}' will always give 0: no prompt has category {wanted}")

    def _encode(self, prompts: Data) -> list[EncodedPrompt]:
        config = self.config
        limits = Limits(config.max_prompt_tokens, config.max_new_tokens, config.overlong)
        return encode_prompts(prompts, self.loaded, limits, config.skip_bad_rows)

    def _prepare(
        self, module: ActorCritic, scoring: ScoringModels, prompts: list[EncodedPrompt]
    ) -> tuple[TrainEngine, Roles, ReferenceRefresh | None]:
        """The optimization, all roles and the refresh of the reference, after checking that memory suffices."""
        config, loaded, accelerator = self.config, self.loaded, self.run.accelerator
        if config.reference_refresh and zero_stage(accelerator) == 3:
            raise UserError("reference_refresh is not possible under ZeRO-3, which shards the weights: use ZeRO-1 or 2")
        with sharded_loading(accelerator):
            reference = None if loaded.adapter else LanguageModel(copy_backbone(loaded.backbone))
            start = LanguageModel(copy_backbone(loaded.backbone)) if config.reference_refresh and reference else None
        frozen = [model for model in (reference, start, *scoring.modules) if model]
        check_memory(self.run, config, loaded, module, frozen)
        placed_reference = place_frozen_model(reference, accelerator) if reference else None
        placed_start = place_frozen_model(start, accelerator) if start else None
        steps = config.updates * config.epochs * config.minibatches
        optimization = build_engine(self.run, module, steps, rate_groups(config, module), config.ema_decay)
        refresh_every = config.reference_refresh
        roles = Roles(optimization.module, placed_reference, placed_start, reference_moves=refresh_every > 0)
        refresh = ReferenceRefresh(refresh_every, loaded, placed_reference) if refresh_every else None
        return optimization, roles, refresh

    def _rewards(
        self, sources: list[RewardSource], functions: Sequence[WeightedFunction], roles: Roles, **others: Any
    ) -> Rewards:
        models = [self._scorer(source, roles) for source in sources]
        attributes: AttributeReward | None = others.get("attributes")
        if attributes:
            scorer = attributes.scorer.scorer
            if scorer.tokenization:
                self._require_turns(self.config.attribute_model, scorer.tokenization)
            self._require_context(self.config.attribute_model, scorer, attributes.scorer.question_tokens)
        timeout, accelerator = self.config.reward_timeout, self.run.accelerator
        return Rewards(models, functions, timeout=timeout, accelerator=accelerator, **others)

    def _rule_scorer(self, source: RewardSource, texts: dict[str, str], roles: Roles) -> RuleScorer:
        scorer = self._scorer(source, roles)
        rules = RuleScorer(scorer, texts, scorer.tokenization or self.loaded.tokenization)
        self._require_context(source.name, scorer, max(rules.lengths))
        return rules

    def _scorer(self, source: RewardSource, roles: Roles) -> RewardModelScorer:
        """The scorer of a model, whose context is long enough; reports if it does not read the policy's token ids."""
        scorer = source.scorer(self.loaded, roles, self.run.accelerator, self.config.micro_batch_tokens)
        if scorer.tokenization:
            self._require_turns(source.name, scorer.tokenization)
            template = "" if source.loaded is None or source.loaded.has_template else self.config.chat_template
            form = f", which has no chat template and reads chat_template {template}" if template else ""
            self.run.say(f"{source.name}: reads other token ids than the policy; texts are tokenized again for it{form}")
        self._require_context(source.name, scorer)
        return scorer

    def _require_context(self, name: str, scorer: RewardModelScorer, after: int = 0) -> None:
        scorer.require_context(name, self._all_prompts, self.config.max_new_tokens, self.loaded.tokenization, after)

    def _require_turns(self, name: str, tokenization: Tokenization) -> None:
        """Refuse prompts of which a scoring model's chat template leaves out a turn, before any response is sampled."""
        for prompt in self._all_prompts:
            try:
                tokenization.require_turns((*prompt.conversation, {"role": "assistant", "content": ""}))
            except ConversationError as error:
                raise UserError(f"{name}: {error}") from error

    def train(self) -> Path:
        """Run all updates from the last checkpoint on; returns the folder of the best policy."""
        folder = self.algorithm.train()
        self.engine.close()
        self.run.close()
        return folder


def split_rewards(rewards: Sequence[Reward]) -> tuple[list[str | LoadedReward], list[WeightedFunction]]:
    """The reward models, and the functions with their weights. Raises: UserError for a model without a tokenizer."""
    for reward in rewards:
        if isinstance(reward, nn.Module):
            raise UserError(
                f"reward: {type(reward).__name__} is a model, whose tokenizer is not known: give its folder, "
                "align.reward.checkpoint.reward_of_classifier(model, tokenizer), or a function that calls it"
            )
    models = [
        str(reward) if isinstance(reward, Path) else reward
        for reward in rewards
        if isinstance(reward, str | Path | LoadedReward)
    ]
    functions = [
        reward if isinstance(reward, WeightedFunction) else WeightedFunction(function_name(reward), 1.0, reward)
        for reward in rewards
        if not isinstance(reward, str | Path | LoadedReward)
    ]
    return models, functions


def reward_settings(
    models: Sequence[str | LoadedReward], functions: Sequence[WeightedFunction], judge: Reward | None
) -> dict[str, Any]:
    """The settings that describe a run's rewards and judge."""
    names = [model if isinstance(model, str) else model.loaded.base for model in models]
    return {
        "reward_model": names[0] if len(names) == 1 else "",
        "reward_models": names if len(names) > 1 else [],
        "reward_functions": [function.specification or function.name for function in functions],
        "judge_model": judge_name(judge),
    }


def judge_name(judge: Reward | None) -> str:
    """The judge's name in a run's settings."""
    if isinstance(judge, (str, Path, LoadedReward)):
        return judge.loaded.base if isinstance(judge, LoadedReward) else str(judge)
    return function_name(judge) if judge else ""


def function_name(function: RewardFunction | WeightedFunction) -> str:
    """The name that a function's reward is logged under."""
    name = getattr(function, "__name__", type(function).__name__)
    return "function" if name == "<lambda>" else name


def make_trainer(config: PPOConfig) -> PPOTrainer:
    """The trainer that the settings describe. Raises: UserError for a mistake in the settings or the data."""
    reward: list[Reward] = [*config.all_reward_models, *load_functions(config.reward_functions)]
    judge = config.judge_model or None
    return PPOTrainer(config.model, reward, config.prompts, config, config.validation_prompts, judge=judge)


def run_ppo(config: PPOConfig) -> Path:
    """Train a policy by PPO; returns the best policy's folder. Raises: UserError for a mistake in settings or data."""
    return make_trainer(config).train()


def _require_rewards(config: PPOConfig, rewards: Sequence[object], models: Sequence[str | LoadedReward]) -> None:
    """Refuse a run without a reward, or with a reward model or judge that is not a reward model."""
    if not (rewards or config.rule_model or config.rubrics or config.attribute_model):
        kinds = "reward_model, reward_functions, rule_model, rubrics, attribute_model, or several of them"
        raise UserError(f"PPO needs a reward: set {kinds}")
    for model in models:
        if isinstance(model, str):
            require_reward_model(model)


def _require_patience(config: PPOConfig) -> None:
    """Refuse a `reward_timeout` that the processes which wait for the first one cannot outlast."""
    if config.reward_timeout >= config.collective_timeout:
        raise UserError(
            f"reward_timeout is {config.reward_timeout:g}, but the other processes wait for collective_timeout "
            f"({config.collective_timeout:g} s): raise that above reward_timeout"
        )


def _flops_profiles(
    config: PPOConfig, loaded: LoadedModel, module: ActorCritic, rewards: Rewards, rules: RuleScorer | None
) -> RoleFlopsProfiles:
    """What each role's FLOPs depend on."""
    separate_critic = None
    if config.critic == "separate":
        separate_critic = flops_profile(module.critic or loaded.backbone, module.critic_adapter)
    return RoleFlopsProfiles(
        policy=flops_profile(loaded.backbone, loaded.adapter),
        reference=flops_profile(loaded.backbone, module.reference_adapter),
        start=flops_profile(loaded.backbone, loaded.start_adapter) if config.reference_refresh else None,
        critic=separate_critic,
        rewards=rewards.shapes,
        rules=rules.scorer.shape if rules else None,
        rule_lengths=rules.lengths if rules else (),
    )
