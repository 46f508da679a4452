"""Rubrics: a question with lettered options, each worth a reward, that a frozen model answers about a response.

As GPT-4's rule-based reward models (OpenAI 2023, section 6): the reward of a response is the sum over options of
P(letter) x its reward. A prompt outside the rubric's categories gets exactly 0, and nothing is read for it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from align.core.errors import UserError
from align.core.shipped import resolve_path
from align.data.records import Conversation

FORM = """Below is a conversation and the reply that an assistant gave.

<conversation>
{conversation}
</conversation>

<reply>
{response}
</reply>

{question}
{options}

Answer with the letter alone."""


class Option(NamedTuple):
    """An answer to a rubric's question: its letter, its text, and its reward."""

    letter: str
    text: str
    reward: float


@dataclass(frozen=True)
class Rubric:
    """A question about a response, with its possible answers.

    Attributes:
        categories: of the prompts that it applies to; empty: all.
        weight: of its reward in the sum of rewards.
    """

    name: str
    question: str
    options: tuple[Option, ...]
    categories: frozenset[str] = frozenset()
    weight: float = 1.0

    def applies(self, category: str | None) -> bool:
        """Whether it is asked about responses to a prompt of this category."""
        return not self.categories or category in self.categories

    def question_about(self, conversation: Conversation, response: str) -> "RubricQuestion":
        """The question that a model is asked about a response."""
        dialogue = "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in conversation)
        options = "\n".join(f"{option.letter}: {option.text}" for option in self.options)
        text = FORM.format(conversation=dialogue, response=response, question=self.question, options=options)
        return RubricQuestion(text, tuple(option.letter for option in self.options))


class RubricQuestion(NamedTuple):
    """A question as a model reads it, and the letters that it may answer with."""

    text: str
    letters: tuple[str, ...]


LetterJudge = Callable[[Sequence[RubricQuestion]], list[list[float]]]
"""Returns for each question the log-probability of each of its letters, in nats; -infinity for an impossible one."""


def expected_reward(log_probs: Sequence[float], rewards: Sequence[float]) -> float:
    """The sum over options of P(letter) x reward, where P is over the letters alone.

    Args:
        log_probs: [K] of the letters, not all of them -infinity.
        rewards: [K].
    """
    highest = max(log_probs)
    weights = [math.exp(value - highest) for value in log_probs]
    return sum(weight * reward for weight, reward in zip(weights, rewards, strict=True)) / sum(weights)


class RubricScorer:
    """Scores responses by a rubric.

    Args:
        judge: answers its questions.
    """

    def __init__(self, rubric: Rubric, judge: LetterJudge) -> None:
        self.rubric, self.judge = rubric, judge

    def __call__(
        self, conversations: Sequence[Conversation], responses: Sequence[str], categories: Sequence[str | None]
    ) -> list[float]:
        """The reward of each response, without the rubric's weight; 0 outside of its categories.

        Raises:
            UserError: if the judge cannot answer.
        """
        rows = [row for row, category in enumerate(categories) if self.rubric.applies(category)]
        answers = (
            self.judge([self.rubric.question_about(conversations[row], responses[row]) for row in rows]) if rows else []
        )
        option_rewards = [option.reward for option in self.rubric.options]
        rewards = [0.0] * len(responses)
        for row, log_probs in zip(rows, answers, strict=True):
            rewards[row] = expected_reward(log_probs, option_rewards)
        return rewards


def read_rubrics(paths: Sequence[str]) -> list[Rubric]:
    """Rubrics from files.

    Args:
        paths: files as in forms/rubrics, each as FILE or FILE=WEIGHT.

    Raises:
        UserError: if a file is missing or is no rubric, or two have one name.
    """
    rubrics = [_read(path) for path in paths]
    names = [rubric.name for rubric in rubrics]
    for path, name in zip(paths, names, strict=True):
        if names.count(name) > 1:
            raise UserError(f"{path}: rubric '{name}' is there twice")
    return rubrics


def _read(path: str) -> Rubric:
    file, equals, number = path.rpartition("=")
    file = file if equals else path
    try:
        weight = float(number) if equals else 1.0
        stored: Any = yaml.safe_load(resolve_path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"rubric '{path}': write FILE or FILE=WEIGHT ({error})") from error
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{file}: not YAML ({str(error).splitlines()[0]})") from error
    try:
        return _rubric(stored, Path(file).stem, weight)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{file}: not a rubric ({error}); it needs a question, options with letter, text and reward, and may have "
            "categories"
        ) from error


def _rubric(stored: Mapping[str, Any], name: str, weight: float) -> Rubric:
    options = tuple(Option(str(o["letter"]), str(o["text"]), float(o["reward"])) for o in stored["options"])
    letters = [option.letter for option in options]
    if len(options) < 2 or len(set(letters)) < len(letters) or not all(len(letter) == 1 for letter in letters):
        raise ValueError("two or more options, each with a letter of its own")
    numbers = [weight, *(option.reward for option in options)]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("rewards and weights are finite numbers")
    categories = stored.get("categories") or []
    if not isinstance(categories, list):
        raise TypeError("categories are a list")
    return Rubric(str(stored.get("name", name)), str(stored["question"]), options, frozenset(map(str, categories)), weight)
