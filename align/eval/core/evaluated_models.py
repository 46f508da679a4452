"""The models under evaluation: opened one after the other, frozen, each with a short unique name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor

from align.builtin.zoo import resolve_model
from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.data.conversation import Conversation
from align.data.readers import Primer
from align.eval.core.fingerprints import content_hash, fingerprint
from align.eval.core.settings import EvalConfig
from align.models.loading import LoadedModel, load
from align.runtime.distributed import compute_dtype, make_accelerator, map_across_processes
from align.runtime.environment import console
from align.sampling.generation import Responses, Sampling, sample
from align.sampling.settings import BestOfSettings, PrimerSettings

SHOTS_SUFFIX = "+shots"
"""Ends the name of a model that reads the settings' few-shot examples and instruction before each prompt."""
BEST_SUFFIX = "+best"
"""Ends the name of a model that samples `best_of` answers and keeps the one `best_of_reward` scores highest."""


@dataclass(frozen=True)
class EvaluatedModel:
    """A model under evaluation.

    Attributes:
        name: short, unique among the models of the evaluation, and fit for a file name.
        loaded: the model.
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
    """The primer of each model: that of the settings if its name ends in `SHOTS_SUFFIX`, else an empty one.

    Raises:
        UserError: if a primer is missing, or no model uses it.
    """
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
    """How many answers each model samples to keep one: `best_of` if its name ends in `BEST_SUFFIX`, else 1.

    Raises:
        UserError: if best_of is missing, or no model uses it.
    """
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
        uniforms: [rows, max_new_tokens] from `align.sampling.generation.row_uniforms`. A row's noise should come from what
            the row is, not from its place in this call, so that an interrupted evaluation goes on with the same texts.
    """
    backbone, ends = evaluated.loaded.backbone, evaluated.loaded.tokenization.end_ids

    def sample_rows(rows: list[int]) -> list[tuple[list[int], bool]]:
        if not rows:
            return []
        responses = sample(backbone, [prompts[row] for row in rows], uniforms[rows], sampling, ends)
        return list(zip(responses.ids, responses.ended, strict=True))

    results = map_across_processes(range(len(prompts)), sample_rows, accelerator)
    return Responses([ids for ids, _ in results], [ended for _, ended in results])
