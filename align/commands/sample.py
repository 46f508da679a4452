"""`align sample`: a model's responses to a file of prompts, as rows that the labeling app imports."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from rich.progress import Progress

from align.batches.encoding import Limits, encode_prompts
from align.core.errors import UserError
from align.core.files import write_text
from align.core.seeds import Stream
from align.core.settings import ModelConfig, option, require_setting
from align.data.conversation import to_json
from align.extras.attributes.expressions import Condition, Expression
from align.extras.attributes.model import heads_of
from align.extras.attributes.scoring import AttributeScorer
from align.extras.rules.rubrics import Rubric, RubricSettings, load_rubrics
from align.extras.rules.scoring import RuleScorer, RuleUse, best_response, rules_of_model
from align.models.loading import LoadedModel, load
from align.reward.checkpoint import RULE, LoadedReward, load_reward_model, require_reward_model
from align.reward.scoring import RewardModelScorer
from align.runtime.distributed import compute_dtype, computes_on_cpu
from align.runtime.environment import console
from align.sampling.generation import row_uniforms, sample
from align.sampling.settings import AnsweringConfig, PrimerSettings
from align.tokenization.encoded import EncodedPrompt, SampledResponse


@dataclass(kw_only=True)
class SampleConfig(PrimerSettings, RubricSettings, AnsweringConfig):
    """Which model answers which prompts, and how the answers that are kept are chosen."""

    model: str = option("", "model to sample from: a folder, a hub name or a built-in model", required=True)
    prompts: str = option("data/prompts.jsonl", "prompts: file, folder or hub name")
    output: str = option("", "JSON Lines file to write; it must not exist yet", required=True)
    samples_per_prompt: int = option(1, "responses that are kept for each prompt", gt=0)
    best_of: int = option(
        1,
        "responses drawn for each one that is kept, the best by reward_model, rule_model and rubrics; 1: no selection",
        gt=0,
    )
    reward_model: str = option("", "folder of a reward model whose rewards are written too; empty: none")
    rule_model: str = option("", "folder of a rule model whose verdicts are written too; empty: none")
    rules: list[str] = option(
        [], "rules that it judges by: files of rules, FILE:ID, or ids that it was trained on; empty: all of those"
    )
    rule_use: RuleUse = option(
        "filter",
        "how rules choose with best_of: filter keeps responses whose geometric mean of P(follows) is at least "
        "rule_threshold, then the best reward; multiply takes the product of that mean with the reward's probability",
    )
    rule_threshold: float = option(
        0.5, "see rule_use; where no response is left, the one that obeys most is kept", ge=0, le=1
    )

    attribute_model: str = option("", "folder of an attribute model whose attributes are written too; empty: none")
    filter: str = option(
        "", "what its attributes must be for a candidate of best_of, such as unsafe<0.2, sensible>0.5; empty: anything"
    )
    rank: str = option(
        "", "what is highest for the best candidate, such as 3*sensible+specific; empty: the reward and rules"
    )
    fallback: str = option("", "what is written where filter leaves no candidate; empty: the prompt is left out and counted")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("filter", "rank"):
            given = bool(self.attribute_model) or not getattr(self, name)
            require_setting(self, name, given, "empty without attribute_model")
        chooses = bool(self.reward_model or self.rule_model or self.rubrics or self.attribute_model)
        by = "unless reward_model, rule_model, rubrics or attribute_model is given"
        require_setting(self, "best_of", self.best_of == 1 or chooses, f"1, {by}")
        require_setting(self, "rules", bool(self.rule_model) or not self.rules, "empty without rule_model")
        require_setting(self, "output", self.output.endswith(".jsonl"), "a name that ends in .jsonl")


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


def run_sample(config: SampleConfig) -> Path:
    """Sample responses and write them; returns the written file.

    A row holds `prompt`, `responses` [n], `model` [n] (which model wrote each), `id`, `category` where the prompt has
    one, `rewards` [n] with a reward model, `violates` (by rule, [n]) with a rule model, and `rubrics` (by name, [n], without
    their weights) with rubrics, and `attributes` (by name, [n]) with an attribute model. Responses come in the order in
    which they were drawn; where `filter` left no candidate, `fallback` takes its place, or the prompt is left out.

    Raises:
        UserError: for a mistake in the settings or the data; the output is written completely or not at all.
    """
    target = Path(config.output)
    if target.exists():
        raise UserError(f"{target} already exists; give another output, or remove it")
    if config.reward_model:
        require_reward_model(config.reward_model)
    rules = rules_of_model(config.rule_model, config.rules) if config.rule_model else {}
    _check_expressions(config)
    settings = ModelConfig(model=config.model, chat_template=config.chat_template, dtype=config.dtype)
    loaded = load(settings, compute_dtype(config.dtype))
    loaded.backbone.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)
    limits = Limits(config.max_prompt_tokens, config.max_new_tokens, config.overlong)
    prompts = encode_prompts(config.prompts, loaded, limits, config.skip_bad_rows)
    copies = config.samples_per_prompt * config.best_of
    drawn = [prompt for prompt in prompts for _ in range(copies)]
    responses = _draw_responses(config, loaded, primed(config, loaded, drawn))
    scored = score_candidates(config, loaded, rules, drawn, sampled(loaded, drawn, responses))
    found = [
        _row(config, prompt, number, scored, range(number * copies, (number + 1) * copies))
        for number, prompt in enumerate(prompts)
    ]
    rows = [row for row in found if row is not None]
    write_text(target, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    written = sum(len(cast(list[str], row["responses"])) for row in rows)
    left_out = f"; {len(found) - len(rows)} prompts left out by the filter" if len(rows) < len(found) else ""
    console.print(f"{target}: {len(rows)} prompts, {written} responses{left_out}", highlight=False)
    return target


def _check_expressions(config: SampleConfig) -> None:
    """Refuse a filter or a rank that the attribute model cannot answer, before anything is sampled."""
    if config.attribute_model:
        names = [head.name for head in heads_of(config.attribute_model)]
        for kind, text, where in ((Condition, config.filter, "filter"), (Expression, config.rank, "rank")):
            if text:
                kind(text, names, where)


def _draw_responses(config: SampleConfig, loaded: LoadedModel, drawn: Sequence[EncodedPrompt]) -> list[list[int]]:
    """A response to each prompt, with a progress bar."""
    uniforms = row_uniforms(len(drawn), config.sampling, config.seed, Stream.SAMPLE_COMMAND)
    with Progress(console=console) as progress:
        task = progress.add_task("sample", total=len(drawn))
        responses = sample(
            loaded.backbone,
            [prompt.ids for prompt in drawn],
            uniforms,
            config.sampling,
            loaded.tokenization.end_ids,
            lambda rows: progress.advance(task, rows),
        )
    return responses.ids


def primed(config: SampleConfig, loaded: LoadedModel, prompts: Sequence[EncodedPrompt]) -> list[EncodedPrompt]:
    """The prompts as the model reads them, after examples and instruction; what is written and scored has neither.

    Raises:
        UserError: if the examples cannot be read, or a prompt with them does not fit the model.
    """
    if not config.primes:
        return list(prompts)
    primer, found = config.primer(), []
    for prompt in prompts:
        if prompt.given_as_ids:
            remedy = "give prompts as text"
            raise UserError(f"{config.prompts}: holds token ids (input_ids), which cannot follow examples; {remedy}")
        ids = loaded.tokenization.prompt_ids(primer.before(prompt.conversation))
        loaded.backbone.require_fit(
            len(ids), config.max_new_tokens, f"{config.prompts}: a prompt after {config.shots} shots"
        )
        found.append(replace(prompt, ids=ids))
    return found


def _row(config: SampleConfig, prompt: EncodedPrompt, number: int, scored: Scored, drawn: range) -> dict[str, object] | None:
    """One line of the output: of each `best_of` responses in `drawn`, the best; None if the filter left none.

    A response that `fallback` replaces has `fallback` as its model, and no figures.
    """
    groups = [drawn[start : start + config.best_of] for start in range(0, len(drawn), config.best_of)]
    kept = [i for i in (scored.best(config, group) for group in groups) if i is not None]
    texts, models, columns = [scored.texts[i] for i in kept], [config.model] * len(kept), scored.columns(kept)
    if not kept:
        if not config.fallback:
            return None
        texts, models, columns = [config.fallback], ["fallback"], {}
    row: dict[str, object] = {"id": prompt.id or str(number + 1), "prompt": to_json(prompt.conversation)}
    row |= {"responses": texts, "model": models}
    if prompt.category is not None:
        row["category"] = prompt.category
    return row | columns


def score_candidates(
    config: SampleConfig,
    loaded: LoadedModel,
    rules: Mapping[str, str],
    prompts: Sequence[EncodedPrompt],
    rows: Sequence[SampledResponse],
) -> Scored:
    """Score responses by all models that the settings name.

    Args:
        loaded: the model that wrote the responses.
        rules: texts by id, for the rule model.
        prompts: of each response [N].
    """
    texts, accelerator = [row.text for row in rows], Accelerator(cpu=computes_on_cpu())
    scored = Scored(texts)
    if config.reward_model:
        reward = load_reward_model(config.reward_model, config.dtype, config.chat_template)
        scored.rewards = scorer_of(loaded, reward, config.batch_tokens)(rows)
    if rules:
        judge = load_reward_model(config.rule_model, config.dtype, kind=RULE)
        given = RuleScorer(scorer_of(loaded, judge, config.batch_tokens), rules, judge.loaded.tokenization)(rows)
        scored.violates = dict(zip(rules, given.tolist(), strict=True))
    for judged in load_rubrics(config, accelerator, config.dtype, config.batch_tokens):
        categories, conversations = [prompt.category for prompt in prompts], [prompt.conversation for prompt in prompts]
        scored.rubrics.append((judged.rubric, judged(conversations, texts, categories)))
    if config.attribute_model:
        place = (loaded.tokenization, accelerator, config.batch_tokens)
        scored.attributes = AttributeScorer.from_folder(config.attribute_model, config.dtype, *place)(rows)
    return scored


def scorer_of(loaded: LoadedModel, reward: LoadedReward, batch_tokens: int) -> RewardModelScorer:
    """Return a scorer of responses of `loaded`; rewards have the mean over demonstrations subtracted."""
    reward.model.to("cuda" if torch.cuda.is_available() else "cpu")
    return RewardModelScorer.from_loaded(reward, loaded.tokenization, Accelerator(cpu=computes_on_cpu()), batch_tokens)


def sampled(loaded: LoadedModel, prompts: Sequence[EncodedPrompt], responses: Sequence[list[int]]) -> list[SampledResponse]:
    """Return responses, token ids in the vocabulary of `loaded`, as reward models take them."""
    tokenization = loaded.tokenization
    return [
        SampledResponse(prompt.conversation, prompt.ids, ids, tokenization.text(ids), tokenization.has_ended(ids))
        for prompt, ids in zip(prompts, responses, strict=True)
    ]
