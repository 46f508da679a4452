"""A model's answers to prompts and their rewards, stored as they are computed."""

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from align.batches.encoding import ApplyLimits, Limits, encode_prompt, encode_records
from align.builtin.zoo import resolve_model
from align.core.errors import UserError
from align.core.seeds import Stream
from align.data.readers import Primer
from align.data.records import Prompt
from align.eval.core.evaluated_models import EvaluatedModel, respond
from align.eval.core.fingerprints import fingerprint
from align.eval.core.result_store import ResultStore
from align.eval.core.results import Json
from align.eval.core.settings import AnsweringTaskConfig, take_evenly
from align.models.loading import LoadedModel
from align.reward.checkpoint import load_reward_model
from align.reward.scoring import RewardModelScorer
from align.sampling.generation import row_uniforms
from align.sampling.settings import BestOfSettings
from align.tokenization.encoded import EncodedPrompt, SampledResponse

CHUNK = 256
"""Responses sampled between two writes to the file."""


@dataclass(frozen=True)
class NumberedPrompt:
    """A prompt with its number in the file, from 1: ids need not be unique."""

    number: int
    prompt: EncodedPrompt


def read_prompts(config: AnsweringTaskConfig, loaded: LoadedModel) -> dict[str, NumberedPrompt]:
    """The prompts that fit a model, by their numbers.

    Raises:
        UserError: if a prompt exceeds the limits (see `overlong`) or the model's context.
    """
    numbers = itertools.count(1)

    def encode_one(record: Prompt, apply_limits: ApplyLimits) -> Iterator[NumberedPrompt]:
        number, encoded = next(numbers), encode_prompt(record, loaded, apply_limits)
        if encoded is not None:
            yield NumberedPrompt(number, encoded)

    limits = Limits(config.max_prompt_tokens, config.max_new_tokens, config.overlong)
    prompts = encode_records(config.prompts, Prompt, loaded, limits, config.skip_bad_rows, encode_one)
    return {str(numbered.number): numbered for numbered in take_evenly(prompts, config.limit)}


def sample_answers(
    config: AnsweringTaskConfig,
    task: str,
    evaluated: EvaluatedModel,
    accelerator: Accelerator,
    samples: int = 1,
    wanted: Container[str] | None = None,
) -> dict[str, list[SampledResponse]]:
    """Sample answers of a model to each prompt that fits it; a best-of-n model returns only the answers it keeps.

    The noise for a prompt depends on its number alone: in float32, more prompts, another number of processes or a restart
    change no text. In bfloat16 the batch that a prompt is in changes its logits a little. The answers are stored in
    `OUTPUT/<task>-<model>.jsonl`.

    Args:
        config: settings of sampling, and where results go.
        task: the beginning of the file's name.
        evaluated: the model.
        accelerator: the processes that share the work.
        samples: answers to return for each prompt.
        wanted: numbers of the prompts to answer; None: all.

    Returns:
        The answers to each prompt, by the prompt's number.
    """
    sampled = _sample_all(config, task, evaluated, accelerator, samples * evaluated.best_of, wanted)
    if evaluated.best_of == 1:
        return sampled
    assert isinstance(config, BestOfSettings)
    reward = load_reward_model(str(resolve_model(config.best_of_reward)), config.dtype, config.chat_template)
    scorer = RewardModelScorer.from_loaded(reward, evaluated.loaded.tokenization, accelerator, config.batch_tokens)
    settings = answer_settings(config) | {"model": evaluated.source, "weights": evaluated.fingerprint}
    rewards = score_answers(
        Path(config.output) / f"{task}-{evaluated.name}-chosen.jsonl", settings, scorer, sampled, accelerator
    )
    return {number: keep_best(answers, rewards[number], evaluated.best_of) for number, answers in sampled.items()}


def keep_best(answers: Sequence[SampledResponse], rewards: Sequence[float], best_of: int) -> list[SampledResponse]:
    """From each run of `best_of` adjacent answers, the one with the highest reward; the first if several are equal."""
    starts = range(0, len(answers), best_of)
    return [answers[max(range(start, start + best_of), key=lambda row: rewards[row])] for start in starts]


def _sample_all(
    config: AnsweringTaskConfig,
    task: str,
    evaluated: EvaluatedModel,
    accelerator: Accelerator,
    samples: int,
    wanted: Container[str] | None,
) -> dict[str, list[SampledResponse]]:
    tokenization = evaluated.loaded.tokenization
    read = read_prompts(config, evaluated.loaded)
    prompts = {number: prompt for number, prompt in read.items() if wanted is None or number in wanted}

    def sample_chunk(chunk: list[NumberedPrompt]) -> list[Json]:
        rows = [ids for numbered in chunk for ids in [_prompt_ids(evaluated, numbered, config)] * samples]
        uniforms = torch.cat(
            [
                row_uniforms(samples, config.sampling, config.seed, Stream.EVALUATION_ANSWERS, numbered.number)
                for numbered in chunk
            ]
        )
        ids = respond(evaluated, rows, uniforms, config.sampling, accelerator).ids
        groups = [ids[start : start + samples] for start in range(0, len(rows), samples)]
        return [{"texts": [tokenization.text(row) for row in group], "ids": group} for group in groups]

    settings = answer_settings(config) | {"model": evaluated.source, "weights": evaluated.fingerprint, "copies": samples}
    store = ResultStore(Path(config.output) / f"{task}-{evaluated.name}.jsonl", settings, accelerator)
    label = f"{task}: {evaluated.name} answers"
    rows = store.fill(prompts, sample_chunk, max(1, CHUNK // samples), label, lambda numbered: numbered.prompt.ids)
    return {
        number: [
            SampledResponse(numbered.prompt.conversation, numbered.prompt.ids, ids, text, tokenization.has_ended(ids))
            for ids, text in zip(row["ids"], row["texts"], strict=True)
        ]
        for (number, numbered), row in zip(prompts.items(), rows, strict=True)
    }


def _prompt_ids(evaluated: EvaluatedModel, numbered: NumberedPrompt, config: AnsweringTaskConfig) -> list[int]:
    """The token ids that the model reads, with its primer; reward models and judges see the prompt without it."""
    if evaluated.primer == Primer():
        return numbered.prompt.ids  # cut to the limits
    if numbered.prompt.given_as_ids:
        raise UserError(f"{config.prompts}: holds token ids (input_ids), which cannot follow examples; give prompts as text")
    ids = evaluated.prompt_ids(numbered.prompt.conversation)
    where = f"{config.prompts}: prompt {numbered.number} after its examples"
    evaluated.loaded.backbone.require_fit(len(ids), config.max_new_tokens, where)
    return ids


def answer_settings(config: AnsweringTaskConfig) -> Json:
    """The settings that decide what a model answers."""
    names = ["seed", "dtype", "chat_template", "prompts", "max_new_tokens", "max_prompt_tokens", "overlong"]
    names += ["temperature", "top_k", "top_p"]
    return {name: getattr(config, name) for name in names} | {"prompts_sha256": fingerprint(config.prompts)}


def score_answers(
    path: Path,
    settings: Json,
    scorer: RewardModelScorer,
    answers: dict[str, list[SampledResponse]],
    accelerator: Accelerator,
) -> dict[str, list[float]]:
    """The reward of each answer, by the prompt's number; stored in `path`."""

    def score_chunk(chunk: list[list[SampledResponse]]) -> list[Json]:
        rewards = iter(scorer([answer for group in chunk for answer in group]))
        return [{"rewards": [next(rewards) for _ in group]} for group in chunk]

    store = ResultStore(path, settings, accelerator)
    rows = store.fill(answers, score_chunk, CHUNK, f"{path.stem}: scoring", _content_of_answers)
    return {number: row["rewards"] for number, row in zip(answers, rows, strict=True)}


def _content_of_answers(answers: Sequence[SampledResponse]) -> list[object]:
    return [[answer.conversation, answer.prompt_ids, answer.ids, answer.text] for answer in answers]


def answered_by_all(answers: Sequence[Mapping[str, object]]) -> list[str]:
    """The numbers of the prompts that every model answered."""
    return [number for number in answers[0] if all(number in by_number for by_number in answers)]
