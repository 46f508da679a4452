"""Open the evaluated models one at a time, and sample and store their answers."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from align.batches.encoding import ApplyLimits, Limits, encode_prompt, encode_records
from align.core.errors import UserError
from align.core.seeds import RngStream
from align.data.conversation import Conversation
from align.data.readers import FewShotPrompt
from align.data.records import Prompt
from align.eval.results import EvalPromptsConfig, subsample
from align.eval.store import Json, compute_once, content_hash, fingerprint
from align.model_registry.registry import resolve_model
from align.models.backbone import Backbone
from align.models.folders import base_of, load_config
from align.models.heads import response_log_probs
from align.models.loading import LoadedModel, load_frozen
from align.reward.checkpoint import LoadedReward, load_reward_model
from align.reward.rankings import pack_rankings, score_rankings
from align.reward.scoring import RewardModelScorer
from align.runtime.distributed import compute_dtype, make_accelerator, map_across_processes
from align.runtime.process import keep_freed_memory
from align.sampling.generation import SamplingParams, row_uniforms, sample
from align.sampling.settings import AnsweringConfig, FewShotConfig, InferenceConfig
from align.tokenization import Tokenization
from align.tokenization.encoded import EncodedPrompt, PromptResponses, SampledResponse

CHUNK = 400
"""Number of texts sampled or scored between writes."""
FEW_SHOT_SUFFIX = "+few_shot"
"""Suffix of model names that use few-shot examples and the instruction."""


# --------------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class EvaluationContext:
    """Processes, output folder and loading settings shared by all models of a task."""

    accelerator: Accelerator
    output: Path
    inference: InferenceConfig


@dataclass(frozen=True)
class EvaluatedModel:
    """A model under evaluation.

    Attributes:
        name: short name, unique in the evaluation and valid as a file name.
        source: folder or hub name of the model.
        fingerprint: hash of the weights and the few-shot prompt.
    """

    name: str
    loaded: LoadedModel
    context: EvaluationContext
    source: str = ""
    fingerprint: str = ""
    few_shot_prompt: FewShotPrompt = FewShotPrompt()

    @property
    def settings(self) -> Json:
        """Settings that identify the model in stored results."""
        return {"model": self.source, "weights": self.fingerprint}

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator that distributes the evaluation."""
        return self.context.accelerator

    def results_file(self, what: str) -> Path:
        """Return the file with the model's results of one kind."""
        return self.context.output / f"{what}-{self.name}.jsonl"

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Tokenize the prompt, after few-shot examples and instruction if the model uses them."""
        return self.loaded.tokenization.prompt_ids(self.few_shot_prompt.before(conversation))


def open_accelerator(dtype: str) -> Accelerator:
    """Return the accelerator that distributes an evaluation."""
    keep_freed_memory()
    return make_accelerator(compute_dtype(dtype), max_grad_norm=0.0)


def open_context(output: str, inference: InferenceConfig) -> EvaluationContext:
    """Create the context of an evaluation."""
    return EvaluationContext(open_accelerator(inference.dtype), Path(output), inference)


def open_models(
    names: Sequence[str], context: EvaluationContext, few_shot: FewShotConfig | None = None
) -> Iterator[EvaluatedModel]:
    """Open the models one at a time, frozen and in eval mode on the accelerator's device.

    Args:
        few_shot: few-shot settings of models whose names end in `FEW_SHOT_SUFFIX`. None if the task has no few-shot prompts.

    Raises:
        UserError: if there are no models, or one cannot be loaded. Names are checked before the first model is opened.
    """
    if not names:
        raise UserError("models is empty; set at least one model")
    examples, named, options = FewShotPrompt(), list[str](), context.inference
    if few_shot is not None:
        named = [name for name in names if name.endswith(FEW_SHOT_SUFFIX)]
        examples = few_shot.few_shot_prompt()
        if named and examples == FewShotPrompt():
            raise UserError(f"models: {named[0]} ends in {FEW_SHOT_SUFFIX}; set num_few_shot or instruction")
        if not named and examples != FewShotPrompt():
            advice = f"add one, such as {names[0]}{FEW_SHOT_SUFFIX}"
            raise UserError(f"num_few_shot and instruction apply only to models named MODEL{FEW_SHOT_SUFFIX}; {advice}")
    models = [name.removesuffix(FEW_SHOT_SUFFIX) if name in named else name for name in names]
    sources = [str(resolve_model(model)) for model in models]
    for name, short, model, source in zip(names, short_names(names), models, sources, strict=True):
        loaded = load_frozen(model, options.dtype, options.chat_template, context.accelerator.device, options.quantization)
        version, prompt = weights_version(source), FewShotPrompt()
        if name in named:
            version += f"{FEW_SHOT_SUFFIX}-{content_hash([examples.instruction, examples.examples])}"
            prompt = examples
        yield EvaluatedModel(short, loaded, context, model, version, prompt)
        del loaded  # free it before loading the next one


def weights_version(source: str) -> str:
    """Return the fingerprint of a model folder, or the commit of a Hub model. An adapter's version includes its base."""
    base, is_adapter = base_of(source)
    version = fingerprint(source) or str(getattr(load_config(source), "_commit_hash", None))
    return content_hash([version, weights_version(base)]) if is_adapter else version


@dataclass(frozen=True)
class NamedRewardModel:
    """A reward model with a short name and the version of its weights."""

    name: str
    fingerprint: str
    reward: LoadedReward

    @property
    def scorer(self) -> str:
        """Name of the scorer in results."""
        return f"reward model {self.name} {self.fingerprint}"


def open_reward_models(names: Sequence[str], inference: InferenceConfig) -> list[NamedRewardModel]:
    """Load reward models. Raise a `UserError` if one cannot be loaded."""
    models = []
    for name, short in zip(names, short_names(names), strict=True):
        folder = str(resolve_model(name))
        reward = load_reward_model(folder, inference.dtype, inference.chat_template, quantization=inference.quantization)
        models.append(NamedRewardModel(short, weights_version(folder), reward))
    return models


def short_names(models: Sequence[str]) -> list[str]:
    """Return the shortest distinct path suffixes, with '-' for '/': runs/a/ppo/model becomes 'ppo'."""
    parts = []
    for model in models:
        words = [word for word in Path(model).parts if word not in ("/", ".", "..")]
        parts.append(words[:-1] if len(words) > 1 and words[-1] == "model" else words)
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["-".join(words[-length:]) for words in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number}-{name}" for number, name in enumerate(names, 1)]


# ------------------------------------------------------------------------------------------------------------- sampling


class TokenPrompt(NamedTuple):
    """Token ids of a prompt, the key of its random numbers, and its name in error messages."""

    ids: list[int]
    key: tuple[int, ...]
    where: str


def sample_once(
    evaluated: EvaluatedModel,
    what: str,
    prompts: Mapping[str, TokenPrompt],
    samples: int,
    sampling: SamplingParams,
    stream: RngStream,
) -> dict[str, Json]:
    """Sample one text per prompt, skipping those already stored in the results of kind `what`.

    In float32 a sample depends only on the seed, the prompt's key and the model, not on other prompts, the number of
    processes or a restart. In bfloat16 the composition of a batch changes logits slightly.

    Returns:
        The `texts` and token `ids` of the samples, by prompt name.

    Raises:
        UserError: if a prompt with its longest continuation does not fit the model.
    """
    backbone, tokenization = evaluated.loaded.backbone, evaluated.loaded.tokenization
    path, seed = evaluated.results_file(what), evaluated.context.inference.seed

    def sample_chunk(chunk: list[TokenPrompt]) -> list[Json]:
        for prompt in chunk:
            if not prompt.ids:
                raise UserError(f"{prompt.where}: empty after tokenization; remove it")
            backbone.require_fit(len(prompt.ids), sampling.max_new_tokens, prompt.where)
        uniforms = torch.cat([row_uniforms(samples, sampling, seed, stream, *prompt.key) for prompt in chunk])
        ids = respond(evaluated, [prompt.ids for prompt in chunk for _ in range(samples)], uniforms, sampling)
        groups = [ids[start : start + samples] for start in range(0, len(ids), samples)]
        return [{"texts": [tokenization.text(row) for row in group], "ids": group} for group in groups]

    settings = asdict(sampling) | {"seed": seed, "samples": samples} | evaluated.settings
    del settings["batch_tokens"]
    settings["dtype"] = str(backbone.model.dtype)
    rows = compute_once(
        path, settings, prompts, sample_chunk, evaluated.accelerator, max(1, CHUNK // samples), lambda prompt: prompt.ids
    )
    return dict(zip(prompts, rows, strict=True))


def respond(
    evaluated: EvaluatedModel, prompts: Sequence[list[int]], uniforms: Tensor, sampling: SamplingParams
) -> list[list[int]]:
    """Sample a response to each prompt with `uniforms` [rows, max_new_tokens]. Identical on every process."""
    backbone, ends = evaluated.loaded.backbone, evaluated.loaded.tokenization.end_ids

    def sample_rows(rows: list[int]) -> list[list[int]]:
        return sample(backbone, [prompts[row] for row in rows], uniforms[rows], sampling, ends).ids if rows else []

    return map_across_processes(range(len(prompts)), sample_rows, evaluated.accelerator)


# ---------------------------------------------------------------------------------------------- answers to files of prompts


def sample_answers(
    given: EvalPromptsConfig, how: AnsweringConfig, task: str, evaluated: EvaluatedModel, samples: int = 1
) -> dict[str, list[SampledResponse]]:
    """Sample answers to each prompt that fits the model, by prompt number in the file, from 1.

    Reward models and judges see the prompt without the model's few-shot prompt.

    Raises:
        UserError: if a prompt exceeds the limits (see `overlong`) or the model's context.
    """
    numbers = itertools.count(1)

    def encode_one(record: Prompt, apply_limits: ApplyLimits) -> Iterator[tuple[str, EncodedPrompt]]:
        number, encoded = next(numbers), encode_prompt(record, evaluated.loaded, apply_limits)
        if encoded is not None:
            yield str(number), encoded

    tokenization = evaluated.loaded.tokenization
    inference = evaluated.context.inference
    limits = Limits(how.max_prompt_tokens, how.max_new_tokens, how.overlong)
    found = encode_records(given.prompts, Prompt, evaluated.loaded, limits, inference.skip_bad_rows, encode_one)
    # Select from all prompts, so that models that drop different prompts still answer the same ones.
    chosen = set(subsample(range(1, next(numbers)), given.limit))
    encoded = {number: prompt for number, prompt in found if int(number) in chosen}
    if not encoded:
        raise UserError(f"{given.prompts}: all {given.limit} prompts are too long; raise limit")
    prompts = {
        number: TokenPrompt(
            ids_after(evaluated.few_shot_prompt, prompt, tokenization, given.prompts),
            (int(number),),
            f"{given.prompts}: prompt {number}",
        )
        for number, prompt in encoded.items()
    }
    sampling = how.sampling(inference.batch_tokens)
    rows = sample_once(evaluated, task, prompts, samples, sampling, RngStream.EVALUATION_ANSWERS)
    return {
        number: sampled_responses([prompt] * samples, rows[number]["ids"], tokenization)
        for number, prompt in encoded.items()
    }


def ids_after(few_shot: FewShotPrompt, prompt: EncodedPrompt, tokenization: Tokenization, source: str) -> list[int]:
    """Tokenize a prompt after examples and instruction, or by itself within the limits."""
    if few_shot == FewShotPrompt():
        return prompt.ids
    if prompt.given_as_ids:
        raise UserError(f"{source}: prompts given as token ids (input_ids) do not support few-shot examples; use text")
    return tokenization.prompt_ids(few_shot.before(prompt.conversation))


def sampled_responses(
    prompts: Sequence[EncodedPrompt], ids: Sequence[list[int]], tokenization: Tokenization
) -> list[SampledResponse]:
    """Convert token ids to responses for reward models, one per prompt."""
    return [
        SampledResponse(
            prompt.conversation, prompt.ids, row, tokenization.text(row), tokenization.has_ended(row), prompt.given_as_ids
        )
        for prompt, row in zip(prompts, ids, strict=True)
    ]


def answer_log_likelihoods(
    backbone: Backbone, questions: Sequence[PromptResponses], budget: int, accelerator: Accelerator
) -> list[list[float]]:
    """Return the summed log-probability in nats of each answer to each question. Identical on every process.

    If the model supports it, each question is processed once for all its answers. `budget` is the padded tokens per batch.
    """

    def read(batch: Sequence[PromptResponses]) -> Tensor:
        inputs = pack_rankings(batch, backbone.device)
        hidden = backbone.hidden(inputs.prompt, inputs.response, inputs.prompt_of_response)
        return response_log_probs(backbone, hidden, inputs.response, inputs.response.mask())[0].double().sum(1)

    return score_rankings(read, questions, backbone, budget, accelerator)


def reward_answers(
    context: EvaluationContext,
    name: str,
    model: NamedRewardModel,
    answers: Mapping[str, list[SampledResponse]],
    policy: Tokenization,
    settings: Json,
) -> list[list[float]]:
    """Score a policy's answers with a reward model. Stored in `OUTPUT/<name>-by-<reward model>-<fingerprint>.jsonl`.

    Args:
        policy: tokenization of the answers.
        settings: settings that identify the policy.
    """
    accelerator, inference = context.accelerator, context.inference
    scorer = RewardModelScorer.from_loaded(model.reward, policy, accelerator, inference.batch_tokens)

    def score_chunk(chunk: list[list[SampledResponse]]) -> list[Json]:
        rewards = iter(scorer([answer for group in chunk for answer in group]))
        return [{"rewards": [next(rewards) for _ in group]} for group in chunk]

    def content(group: list[SampledResponse]) -> list[object]:
        return [[answer.conversation, answer.prompt_ids, answer.ids, answer.text] for answer in group]

    path = context.output / f"{name}-by-{model.name}-{model.fingerprint}.jsonl"
    rows = compute_once(path, {"dtype": inference.dtype} | settings, answers, score_chunk, accelerator, CHUNK, content)
    return [row["rewards"] for row in rows]
