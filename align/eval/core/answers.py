"""The models under evaluation, opened one after the other, and their answers to prompts, stored as they are computed."""

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from align.batches.encoding import ApplyLimits, Limits, encode_prompt, encode_records
from align.builtin.zoo import resolve_model
from align.core.errors import UserError
from align.core.seeds import Stream
from align.core.settings import ModelConfig
from align.data.conversation import Conversation
from align.data.readers import Primer
from align.data.records import Prompt
from align.eval.core.results import Json, ResultStore, content_hash, fingerprint
from align.eval.core.settings import AnsweringTaskConfig, EvalConfig, take_evenly
from align.models.loading import LoadedModel, load
from align.reward.checkpoint import load_reward_model
from align.reward.scoring import RewardModelScorer
from align.runtime.distributed import compute_dtype, make_accelerator, map_across_processes
from align.runtime.environment import console
from align.sampling.generation import Responses, Sampling, row_uniforms, sample
from align.sampling.settings import BestOfSettings, PrimerSettings
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


@dataclass(frozen=True)
class EvaluatedModel:
    """A model under evaluation.

    Attributes:
        name: short, unique among the models of the evaluation, and fit for a file name.
        source: the folder or hub name that it was loaded from.
        fingerprint: changes with the weights and with the primer.
        primer: what it reads before each prompt.
        best_of: answers sampled for each one that is kept.
    """

    name: str
    loaded: LoadedModel
    source: str = ""
    fingerprint: str = ""
    primer: Primer = Primer()
    best_of: int = 1

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Token ids of the prompt, after the model's examples and instruction if it has any."""
        return self.loaded.tokenization.prompt_ids(self.primer.before(conversation))


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

    Returns:
        By the prompt's number, `samples` answers to each prompt (None as `wanted`: to all).
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


SHOTS_SUFFIX = "+shots"
"""Ends the name of a model that reads the settings' few-shot examples and instruction before each prompt."""
BEST_SUFFIX = "+best"
"""Ends the name of a model that samples `best_of` answers and keeps the one `best_of_reward` scores highest."""


def open_accelerator(config: EvalConfig) -> Accelerator:
    """The processes that share an evaluation; prints what data it uses, which may be the project's own."""
    accelerator = make_accelerator(compute_dtype(config.dtype), max_grad_norm=0.0)
    if accelerator.is_main_process:
        for line in config.data_lines():
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return accelerator


def open_models(config: EvalConfig, accelerator: Accelerator) -> Iterator[EvaluatedModel]:
    """Open the models one at a time: frozen, in evaluation mode, on the accelerator's device.

    Raises:
        UserError: if there are none, or one cannot be loaded; names are checked before the first is opened.
    """
    if not config.models:
        raise UserError("models is empty: name at least one model to evaluate")
    primers = _primers(config)
    answers_per_prompt = _answers_per_prompt(config)
    models = [
        model.removesuffix(SHOTS_SUFFIX if primer != Primer() else BEST_SUFFIX if best_of > 1 else "")
        for model, primer, best_of in zip(config.models, primers, answers_per_prompt, strict=True)
    ]
    sources = [str(resolve_model(model)) for model in models]
    named = zip(short_names(config.models), models, sources, primers, answers_per_prompt, strict=True)
    for name, model, source, primer, best_of in named:
        settings = ModelConfig(model=model, chat_template=config.chat_template, dtype=config.dtype)
        loaded = load(settings, compute_dtype(config.dtype))
        loaded.backbone.to(accelerator.device).eval().requires_grad_(False)
        commit = getattr(loaded.backbone.model.config, "_commit_hash", None)
        variant = f"{SHOTS_SUFFIX}-{content_hash([primer.instruction, primer.examples])}" if primer != Primer() else ""
        if best_of > 1:
            assert isinstance(config, BestOfSettings)
            variant += f"{BEST_SUFFIX}{best_of}-{fingerprint(str(resolve_model(config.best_of_reward)))}"
        yield EvaluatedModel(name, loaded, model, (fingerprint(source) or str(commit)) + variant, primer, best_of)
        del loaded  # before the next one is opened


def _primers(config: EvalConfig) -> list[Primer]:
    """The primer of each model: that of the settings if its name ends in `SHOTS_SUFFIX`, else an empty one."""
    if not isinstance(config, PrimerSettings):
        return [Primer()] * len(config.models)
    wanted = [model.endswith(SHOTS_SUFFIX) for model in config.models]
    if any(wanted) and not config.primes:
        raise UserError(f"models: {config.models[wanted.index(True)]} ends in {SHOTS_SUFFIX}: set shots or instruction")
    if config.primes and not any(wanted):
        example = f"{config.models[0]}{SHOTS_SUFFIX}"
        raise UserError(f"shots and instruction are for models named MODEL{SHOTS_SUFFIX}: name one, such as {example}")
    primer = config.primer() if any(wanted) else Primer()
    return [primer if primed else Primer() for primed in wanted]


def _answers_per_prompt(config: EvalConfig) -> list[int]:
    """How many answers each model samples to keep one: `best_of` if its name ends in `BEST_SUFFIX`, else 1."""
    if not isinstance(config, BestOfSettings):
        return [1] * len(config.models)
    wanted = [model.endswith(BEST_SUFFIX) for model in config.models]
    if any(wanted) and config.best_of == 1:
        raise UserError(f"models: {config.models[wanted.index(True)]} ends in {BEST_SUFFIX}: set best_of and best_of_reward")
    if config.best_of > 1 and not any(wanted):
        raise UserError(f"best_of is for models named MODEL{BEST_SUFFIX}: name one, such as {config.models[0]}{BEST_SUFFIX}")
    return [config.best_of if chooses else 1 for chooses in wanted]


def short_names(models: Sequence[str]) -> list[str]:
    """The shortest path suffixes that distinguish the models, with '-' for '/': runs/a/ppo/model becomes 'ppo'."""
    parts = []
    for model in models:
        words = [word for word in Path(model).parts if word not in ("/", ".", "..")]
        parts.append(words[:-1] if len(words) > 1 and words[-1] == "model" else words)
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["-".join(words[-length:]) for words in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number}-{name}" for number, name in enumerate(names, 1)]


def respond(
    evaluated: EvaluatedModel, prompts: Sequence[list[int]], uniforms: Tensor, sampling: Sampling, accelerator: Accelerator
) -> Responses:
    """Sample a response to each prompt; the same on every process, however many share the work.

    Args:
        prompts: token ids of each prompt; repeat a prompt for several samples.
        uniforms: [rows, max_new_tokens]. A row's noise comes from what the row is, not from its place in this call: an
            interrupted evaluation then continues with the same texts.
    """
    backbone, ends = evaluated.loaded.backbone, evaluated.loaded.tokenization.end_ids

    def sample_rows(rows: list[int]) -> list[tuple[list[int], bool]]:
        if not rows:
            return []
        responses = sample(backbone, [prompts[row] for row in rows], uniforms[rows], sampling, ends)
        return list(zip(responses.ids, responses.ended, strict=True))

    results = map_across_processes(range(len(prompts)), sample_rows, accelerator)
    return Responses([ids for ids, _ in results], [ended for _, ended in results])
