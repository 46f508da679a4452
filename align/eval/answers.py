"""Answers of a model to prompts, kept as they are drawn, and their rewards."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from align.data.records import Prompt
from align.encoding import EncodedPrompt, Fit, Limits, encode
from align.eval.results import Json, Rows
from align.eval.settings import AnswerConfig, spread
from align.eval.subjects import Subject, fingerprint, respond
from align.generation import noise
from align.models.loading import Loaded
from align.reward.scoring import Answer, RewardModelScorer

ANSWERS = 7
"""What the random numbers are for: the second part of a seed, as in `align.ppo.rollout`."""
CHUNK = 256
"""Responses that are drawn before they are written."""


@dataclass(frozen=True)
class Asked:
    """A prompt with its number in the file, from 1: ids need not be unique."""

    number: int
    prompt: EncodedPrompt


def read_prompts(config: AnswerConfig, loaded: Loaded) -> dict[str, Asked]:
    """The prompts that a model can take, by their numbers.

    Raises:
        UserError: if a prompt is beyond the limits (see `overlong`) or beyond what the model can read.
    """
    numbers = itertools.count(1)

    def make(record: Prompt, fit: Fit) -> Iterator[Asked]:
        number, kept = next(numbers), fit(loaded.tokenization.prompt_ids(record.prompt), None)
        if kept is not None:
            yield Asked(number, EncodedPrompt(record.prompt, kept[0], record.category, record.id))

    limits = Limits(config.max_prompt_tokens, config.max_new_tokens, config.overlong)
    found = encode(config.prompts, Prompt, loaded, limits, config.skip_bad_rows, make)
    return {str(each.number): each for each in spread(found, config.limit)}


def draw_answers(
    config: AnswerConfig, task: str, subject: Subject, accelerator: Accelerator, copies: int = 1
) -> dict[str, list[Answer]]:
    """`copies` answers of a model to each prompt that it can take, by the prompt's number.

    The noise of a prompt comes from its number: more prompts, other processes and a second start change no text. They are
    kept in `OUTPUT/<task>-<model>.jsonl`.
    """
    loaded = subject.loaded
    asked = read_prompts(config, loaded)

    def work(chunk: list[Asked]) -> list[Json]:
        rows = [each.prompt.ids for each in chunk for _ in range(copies)]
        uniforms = torch.cat([noise(copies, config.sampling, config.seed, ANSWERS, each.number) for each in chunk])
        found = respond(subject, rows, uniforms, config.sampling, accelerator)
        parts = [slice(start, start + copies) for start in range(0, len(rows), copies)]
        return [
            {"texts": [loaded.tokenization.text(ids) for ids in found.ids[part]], "ids": found.ids[part]} for part in parts
        ]

    settings = drawing(config) | {"model": subject.source, "weights": subject.fingerprint, "copies": copies}
    rows = Rows(Path(config.output) / f"{task}-{subject.name}.jsonl", settings, accelerator)
    found = rows.fill(asked, work, max(1, CHUNK // copies), f"{task}: {subject.name} answers")
    return {
        number: [
            Answer(each.prompt.conversation, each.prompt.ids, ids, text)
            for ids, text in zip(row["ids"], row["texts"], strict=True)
        ]
        for (number, each), row in zip(asked.items(), found, strict=True)
    }


def drawing(config: AnswerConfig) -> Json:
    """The settings that decide what a model answers."""
    names = ["seed", "dtype", "chat_template", "prompts", "max_new_tokens", "max_prompt_tokens", "overlong"]
    names += ["temperature", "top_k", "top_p"]
    return {name: getattr(config, name) for name in names} | {"prompts_sha256": fingerprint(config.prompts)}


def score_answers(
    path: Path, settings: Json, scorer: RewardModelScorer, answers: dict[str, list[Answer]], accelerator: Accelerator
) -> dict[str, list[float]]:
    """The reward of each answer, by the prompt's number; kept in `path`."""

    def work(chunk: list[list[Answer]]) -> list[Json]:
        flat = iter(scorer([answer for row in chunk for answer in row]))
        return [{"rewards": [next(flat) for _ in row]} for row in chunk]

    rows = Rows(path, settings, accelerator).fill(answers, work, CHUNK, f"{path.stem}: scoring")
    return {number: row["rewards"] for number, row in zip(answers, rows, strict=True)}


def common(found: Sequence[dict[str, list[Answer]]]) -> list[str]:
    """The numbers of the prompts that every model answered."""
    return [number for number in found[0] if all(number in answers for answers in found)]
