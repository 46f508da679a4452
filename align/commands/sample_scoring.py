"""Scores of sampled responses by reward models, rule models, rubrics and attribute models, and the best response."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator

from align.attributes.expressions import Condition, Expression
from align.attributes.scoring import AttributeScorer
from align.commands.sample_config import SampleConfig
from align.models.loading import LoadedModel
from align.reward.checkpoint import RULE, LoadedReward, load_reward_model
from align.reward.scoring import RewardModelScorer
from align.rules.rubrics import Rubric, load_rubrics
from align.rules.scoring import RuleScorer, best_response
from align.runtime.distributed import computes_on_cpu
from align.tokenization.encoded import EncodedPrompt, SampledResponse


@dataclass
class Scored:
    """Responses [N] with their scores by the reward model and the rule model.

    Attributes:
        rewards: [N]; empty without a reward model.
        violates: by rule, [N] how likely each response violates it.
        rubrics: each with the reward of each response [N].
        attributes: of each response [N], by name; empty without an attribute model.
    """

    texts: list[str]
    rewards: list[float] = field(default_factory=list)
    violates: dict[str, list[float]] = field(default_factory=dict)
    rubrics: list[tuple[Rubric, list[float]]] = field(default_factory=list)
    attributes: list[dict[str, float]] = field(default_factory=list)

    def best(self, config: SampleConfig, group: Sequence[int]) -> int | None:
        """The response of a group that is kept; None if no candidate passes the filter."""
        names = list(self.attributes[0]) if self.attributes else []
        if config.filter:
            condition = Condition(config.filter, names, "filter")
            group = [i for i in group if condition.holds(self.attributes[i])]
        if not group:
            return None
        if config.rank:
            rank = Expression(config.rank, names, "rank")
            return max(group, key=lambda i: rank(self.attributes[i]))
        rewards = [self.rewards[i] if self.rewards else 0.0 for i in group]
        for rubric, probabilities in self.rubrics:
            rewards = [reward + rubric.weight * probabilities[i] for reward, i in zip(rewards, group, strict=True)]
        follows = [[1 - probabilities[i] for probabilities in self.violates.values()] for i in group]
        return group[best_response(rewards, follows, config.rule_use, config.rule_threshold)]

    def columns(self, kept: Sequence[int]) -> dict[str, object]:
        """The fields of a prompt's row about the responses that were kept."""
        found: dict[str, object] = {}
        if self.rewards:
            found["rewards"] = [round(self.rewards[i], 6) for i in kept]
        if self.violates:
            found["violates"] = {rule: [round(given[i], 6) for i in kept] for rule, given in self.violates.items()}
        if self.rubrics:
            found["rubrics"] = {rubric.name: [round(given[i], 6) for i in kept] for rubric, given in self.rubrics}
        if self.attributes:
            names = self.attributes[0]
            found["attributes"] = {name: [round(self.attributes[i][name], 6) for i in kept] for name in names}
        return found


def inference_device() -> torch.device:
    """The GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def score_candidates(
    config: SampleConfig,
    loaded: LoadedModel,
    rules: Mapping[str, str],
    drawn: Sequence[EncodedPrompt],
    responses: Sequence[list[int]],
) -> Scored:
    """The scores of the responses by all models that the settings name.

    Args:
        config: the settings.
        loaded: the model that wrote the responses.
        rules: texts by id, for the rule model.
        drawn: the prompt of each response [N].
        responses: token ids in the vocabulary of `loaded` [N].
    """
    texts = [loaded.tokenization.text(ids) for ids in responses]
    scored, device = Scored(texts), inference_device()
    if config.reward_model:
        reward = load_reward_model(config.reward_model, config.dtype, config.chat_template)
        reward.model.to(device)
        scored.rewards = score(loaded, reward, drawn, responses, texts, config.batch_tokens)
    if rules:
        judge = load_reward_model(config.rule_model, config.dtype, kind=RULE)
        judge.model.to(device)
        scorer = scorer_of(loaded, judge, config.batch_tokens)
        given = RuleScorer(scorer, rules, judge.loaded.tokenization)(sampled(loaded, drawn, responses, texts))
        scored.violates = dict(zip(rules, given.tolist(), strict=True))
    for judged in load_rubrics(config, Accelerator(cpu=computes_on_cpu()), config.dtype, config.batch_tokens):
        categories, conversations = [prompt.category for prompt in drawn], [prompt.conversation for prompt in drawn]
        scored.rubrics.append((judged.rubric, judged(conversations, texts, categories)))
    if config.attribute_model:
        place = (loaded.tokenization, Accelerator(cpu=computes_on_cpu()), config.batch_tokens)
        scored.attributes = AttributeScorer.from_folder(config.attribute_model, config.dtype, *place)(
            sampled(loaded, drawn, responses, texts)
        )
    return scored


def score(
    loaded: LoadedModel,
    reward: LoadedReward,
    drawn: Sequence[EncodedPrompt],
    responses: Sequence[list[int]],
    texts: Sequence[str],
    batch_tokens: int,
) -> list[float]:
    """The reward of each response, minus the reward model's mean over demonstrations.

    Args:
        loaded: the model that wrote the responses.
        reward: the reward model.
        drawn: the prompt of each response [N].
        responses: token ids in the vocabulary of `loaded` [N].
        texts: the responses as text [N], for a reward model with another tokenizer.
        batch_tokens: tokens in one forward pass.

    Raises:
        UserError: if the reward model cannot read a prompt with its response.
    """
    return scorer_of(loaded, reward, batch_tokens)(sampled(loaded, drawn, responses, texts))


def scorer_of(loaded: LoadedModel, reward: LoadedReward, batch_tokens: int) -> RewardModelScorer:
    """A scorer of responses of `loaded`."""
    return RewardModelScorer.from_loaded(reward, loaded.tokenization, Accelerator(cpu=computes_on_cpu()), batch_tokens)


def sampled(
    loaded: LoadedModel, drawn: Sequence[EncodedPrompt], responses: Sequence[list[int]], texts: Sequence[str]
) -> list[SampledResponse]:
    """Responses as reward models take them; arguments as `score` has."""
    rows = zip(drawn, responses, texts, strict=True)
    ended = loaded.tokenization.has_ended
    return [SampledResponse(prompt.conversation, prompt.ids, ids, text, ended(ids)) for prompt, ids, text in rows]
