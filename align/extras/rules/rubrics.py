"""Rubrics: multiple-choice questions about a response, answered by a frozen model. Each option has a reward.

As GPT-4's rule-based reward models (OpenAI 2023, section 6): the reward of a response is the sum over options of
P(letter) x its reward. A prompt outside the rubric's categories gets exactly 0, without a forward pass.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from accelerate import Accelerator
from torch import Tensor

from align.core.errors import UserError, first_line
from align.core.files import resolve_path
from align.core.settings import option, require_setting
from align.data.conversation import Conversation, as_paragraphs, user_turn
from align.models.heads import LanguageModel
from align.models.loading import LoadedModel, load_whole
from align.ppo.extensions import Extension, TrainingContext
from align.ppo.records import Rollout
from align.reward.rankings import pack_rankings, score_rankings
from align.runtime.distributed import compute_dtype, run_on_main
from align.runtime.endpoint import EndpointConfig, request_verdicts
from align.runtime.sharding import place_frozen_model
from align.tokenization.encoded import PromptResponses

FORM = """Below is a conversation and the reply that an assistant gave.

<conversation>
{conversation}
</conversation>

<reply>
{response}
</reply>

{question}
{options}"""
LOCAL_END = "\n\nAnswer with the letter alone."
SERVICE_END = "\n\nEnd with a line that holds VERDICT: and the letter, and nothing else."


class Option(NamedTuple):
    """An option of a rubric: letter, text and reward."""

    letter: str
    text: str
    reward: float


class RubricQuestion(NamedTuple):
    """A question without answer instructions, and the valid letters."""

    text: str
    letters: tuple[str, ...]


LetterJudge = Callable[[Sequence[RubricQuestion]], list[list[float]]]
"""Maps rubric questions to the log-probability of each letter, in nats; -infinity for an impossible letter."""


@dataclass(frozen=True)
class Rubric:
    """A question about a response, with its possible answers."""

    name: str
    question: str
    options: tuple[Option, ...]
    categories: frozenset[str] = frozenset()
    """Prompt categories to which the rubric applies. Empty for all."""
    weight: float = 1.0

    def applies(self, category: str | None) -> bool:
        """Return whether the rubric applies to prompts of this category."""
        return not self.categories or category in self.categories

    def question_about(self, conversation: Conversation, response: str) -> RubricQuestion:
        """Format the question about a response."""
        dialogue = as_paragraphs(conversation)
        options = "\n".join(f"{option.letter}: {option.text}" for option in self.options)
        text = FORM.format(conversation=dialogue, response=response, question=self.question, options=options)
        return RubricQuestion(text, tuple(option.letter for option in self.options))

    def rewards(
        self,
        judge: LetterJudge,
        conversations: Sequence[Conversation],
        responses: Sequence[str],
        categories: Sequence[str | None],
    ) -> list[float]:
        """Return the unweighted reward of each response, 0 outside the categories."""
        rows = [row for row, category in enumerate(categories) if self.applies(category)]
        answers = judge([self.question_about(conversations[row], responses[row]) for row in rows]) if rows else []
        rewards = [0.0] * len(responses)
        for row, log_probs in zip(rows, answers, strict=True):
            rewards[row] = expected_reward(log_probs, [option.reward for option in self.options])
        return rewards


def expected_reward(log_probs: Sequence[float], rewards: Sequence[float]) -> float:
    """Return the sum over options of P(letter) x reward, with P normalized over the letters. One must be possible."""
    highest = max(log_probs)
    weights = [math.exp(value - highest) for value in log_probs]
    return sum(weight * reward for weight, reward in zip(weights, rewards, strict=True)) / sum(weights)


def read_rubrics(paths: Sequence[str]) -> list[Rubric]:
    """Read rubrics from files, each given as FILE or FILE=WEIGHT.

    Raises:
        UserError: if a file is missing or not a rubric, or two rubrics have the same name.
    """
    rubrics = [_read(path) for path in paths]
    names = [rubric.name for rubric in rubrics]
    for path, name in zip(paths, names, strict=True):
        if names.count(name) > 1:
            raise UserError(f"{path}: duplicate rubric '{name}'")
    return rubrics


def _read(path: str) -> Rubric:
    file, equals, number = path.rpartition("=")
    file = file if equals else path
    try:
        weight = float(number) if equals else 1.0
    except ValueError as error:
        raise UserError(f"rubric '{path}': use FILE or FILE=WEIGHT ({error})") from error
    try:
        return _rubric(yaml.safe_load(resolve_path(file).read_text(encoding="utf-8")), Path(file).stem, weight)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        needs = "it needs a question and options with letter, text and reward; categories are optional"
        raise UserError(f"{file}: not a rubric ({first_line(error)}); {needs}") from error


def _rubric(stored: Mapping[str, Any], name: str, weight: float) -> Rubric:
    options = tuple(Option(str(o["letter"]), str(o["text"]), float(o["reward"])) for o in stored["options"])
    letters = [option.letter for option in options]
    alike = len(set(map(str.upper, letters))) < len(letters)
    if len(options) < 2 or alike or not all(len(letter) == 1 and letter.isalnum() for letter in letters):
        raise ValueError("it needs two or more options with distinct letters")
    numbers = [weight, *(option.reward for option in options)]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("rewards and weights must be finite numbers")
    categories = stored.get("categories") or []
    if not isinstance(categories, list):
        raise TypeError("categories must be a list")
    return Rubric(str(stored.get("name", name)), str(stored["question"]), options, frozenset(map(str, categories)), weight)


@dataclass(kw_only=True)
class RubricSettings(EndpointConfig):
    """Rubrics and the frozen model that grades by them."""

    files: list[str] = option([], "Rubric files as in forms/rubrics, each FILE or FILE=WEIGHT.", required=True)
    model: str = option("", "Local model that grades: local folder, Hub id or built-in model. Default: the endpoint.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "model", bool(self.model or self.endpoint), "set, or endpoint")


def load_rubrics(
    settings: RubricSettings, accelerator: Accelerator, dtype: str, budget: int
) -> tuple[list[Rubric], LetterJudge]:
    """Load rubrics and a shared judge. A local judge processes `budget` padded tokens at a time.

    Raises:
        UserError: if a rubric or the model cannot be loaded.
    """
    rubrics = read_rubrics(settings.files)
    if not settings.model:
        return rubrics, ServiceJudge(settings, accelerator)
    return rubrics, LocalJudge(load_whole(settings.model, compute_dtype(dtype)), accelerator, budget)


class RubricRewards(Extension):
    """Adds the weighted reward of each rubric to the score of PPO."""

    gives_scores = True

    def __init__(self, settings: RubricSettings) -> None:
        self.settings = settings

    def load(self, context: TrainingContext) -> None:
        run, dtype = context.run, context.run.model_config.dtype
        self.rubrics, self.judge = load_rubrics(self.settings, run.accelerator, dtype, run.optimization.micro_batch_tokens)
        self.modules = [self.judge.module] if isinstance(self.judge, LocalJudge) else []
        for rubric in self.rubrics:
            if not any(rubric.applies(prompt.category) for prompt in context.training_prompts):
                wanted = " or ".join(sorted(rubric.categories))
                run.print(f"warning: rubric '{rubric.name}' is always 0: no prompt has category {wanted}")

    def score(self, rollout: Rollout) -> dict[str, Tensor]:
        conversations = [prompt.conversation for prompt in rollout.prompts]
        categories = [prompt.category for prompt in rollout.prompts]
        rewards = {each.name: each.rewards(self.judge, conversations, rollout.texts, categories) for each in self.rubrics}
        return {f"rubric/{rubric.name}": rubric.weight * torch.tensor(rewards[rubric.name]) for rubric in self.rubrics}


class LocalJudge:
    """A frozen language model. Encodes a question once for all letters."""

    def __init__(self, loaded: LoadedModel, accelerator: Accelerator, budget: int) -> None:
        self.loaded, self.accelerator, self.budget = loaded, accelerator, budget
        self.module = place_frozen_model(LanguageModel(loaded.backbone, loaded.adapter), accelerator)

    def __call__(self, questions: Sequence[RubricQuestion]) -> list[list[float]]:
        """Return the log-probability of each letter as the beginning of the answer, the same on every process."""
        backbone, rows = self.loaded.backbone, []
        for question in questions:
            prompt, letters = self.loaded.tokenization.answers_ids(user_turn(question.text + LOCAL_END), question.letters)
            rows.append(PromptResponses(prompt, [ids[:-1] for ids in letters]))
            backbone.require_fit(len(prompt), max(map(len, rows[-1].responses)), "a rubric's question")

        def read(part: Sequence[PromptResponses]) -> Tensor:
            inputs = pack_rankings(part, self.accelerator.device)
            log_probs: Tensor = self.module(inputs.prompt, inputs.response, prompt_of_response=inputs.prompt_of_response)
            return log_probs.double().sum(1)

        return score_rankings(read, rows, backbone, self.budget, self.accelerator)


class ServiceJudge:
    """The endpoint's chat model. The letter of its verdict has probability 1. Only the main process sends requests."""

    def __init__(self, settings: EndpointConfig, accelerator: Accelerator) -> None:
        self.settings, self.accelerator = settings, accelerator

    def __call__(self, questions: Sequence[RubricQuestion]) -> list[list[float]]:
        """Return the log-probability of each letter, the same on every process. For errors, see `request_verdicts`."""
        letters, texts = questions[0].letters, [question.text + SERVICE_END for question in questions]
        meanings = {letter.upper(): letter for letter in letters}
        verdicts = run_on_main(lambda: request_verdicts(self.settings, texts, meanings, advice=""), self.accelerator)
        return [[0.0 if letter == verdict else -math.inf for letter in letters] for verdict in verdicts]
