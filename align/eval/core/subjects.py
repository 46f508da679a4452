"""The models under evaluation: opened one after the other, frozen, each with a short unique name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor

from align.builtin.zoo import resolve_model
from align.data.conversation import Conversation
from align.data.primer import Primer
from align.errors import UserError
from align.eval.core.fingerprints import content_hash, fingerprint
from align.eval.core.settings import EvalConfig
from align.models.loading import LoadedModel, load
from align.runtime.distributed import compute_dtype, make_accelerator, map_across_processes
from align.sampling.generation import Responses, Sampling, sample
from align.sampling.settings import BestOfSettings, PrimerSettings
from align.settings import ModelConfig

SHOTS = "+shots"
"""At the end of a model's name: it reads the examples and the instruction of the settings before each prompt."""
BEST = "+best"
"""At the end of a model's name: of `best_of` answers it keeps the one that `best_of_reward` likes most."""


@dataclass(frozen=True)
class Subject:
    """A model under evaluation.

    Attributes:
        name: short and unique among the models of the evaluation; can be part of a file's name.
        loaded: the model.
        source: the folder or hub name that it was loaded from.
        fingerprint: tells this model from another one in the same place, and one primer from another.
        primer: what it reads before each prompt.
        best_of: how many answers it gives for one that is kept.
    """

    name: str
    loaded: LoadedModel
    source: str = ""
    fingerprint: str = ""
    primer: Primer = Primer()
    best_of: int = 1

    def read(self, conversation: Conversation) -> list[int]:
        """What the model reads of a prompt: after its examples and instruction, where it has any."""
        return self.loaded.tokenization.prompt_ids(self.primer.before(conversation))


def open_accelerator(config: EvalConfig) -> Accelerator:
    """The processes that share an evaluation."""
    return make_accelerator(compute_dtype(config.dtype), max_grad_norm=0.0)


def subjects(config: EvalConfig, accelerator: Accelerator) -> Iterator[Subject]:
    """Open the models one at a time: frozen, in evaluation mode, on the accelerator's device.

    Raises:
        UserError: if there are none, or one cannot be loaded; names are checked before the first is opened.
    """
    if not config.models:
        raise UserError("models is empty: name at least one model to evaluate")
    primers = _primers(config)
    tries = _tries(config)
    models = [
        model.removesuffix(SHOTS if primer != Primer() else BEST if best_of > 1 else "")
        for model, primer, best_of in zip(config.models, primers, tries, strict=True)
    ]
    sources = [str(resolve_model(model)) for model in models]
    named = zip(short_names(config.models), models, sources, primers, tries, strict=True)
    for name, model, source, primer, best_of in named:
        settings = ModelConfig(model=model, chat_template=config.chat_template, dtype=config.dtype)
        loaded = load(settings, compute_dtype(config.dtype))
        loaded.backbone.to(accelerator.device).eval().requires_grad_(False)
        commit = getattr(loaded.backbone.model.config, "_commit_hash", None)
        variant = f"{SHOTS}-{content_hash([primer.instruction, primer.examples])}" if primer != Primer() else ""
        if best_of > 1:
            assert isinstance(config, BestOfSettings)
            variant += f"{BEST}{best_of}-{fingerprint(str(resolve_model(config.best_of_reward)))}"
        yield Subject(name, loaded, model, (fingerprint(source) or str(commit)) + variant, primer, best_of)
        del loaded  # before the next one is opened


def _primers(config: EvalConfig) -> list[Primer]:
    """What each model reads before a prompt: the primer of the settings if its name ends in `SHOTS`, else nothing.

    Raises:
        UserError: if a primer is missing, or nobody reads it.
    """
    if not isinstance(config, PrimerSettings):
        return [Primer()] * len(config.models)
    wanted = [model.endswith(SHOTS) for model in config.models]
    if any(wanted) and not config.primes:
        raise UserError(f"models: {config.models[wanted.index(True)]} is to read examples; set shots or instruction")
    if config.primes and not any(wanted):
        raise UserError(
            f"shots and instruction are for models named MODEL{SHOTS}: name one, such as {config.models[0]}{SHOTS}"
        )
    primer = config.primer() if any(wanted) else Primer()
    return [primer if primed else Primer() for primed in wanted]


def _tries(config: EvalConfig) -> list[int]:
    """How many answers each model gives for one that is kept: `best_of` if its name ends in `BEST`, else 1.

    Raises:
        UserError: if best_of is missing, or nobody uses it.
    """
    if not isinstance(config, BestOfSettings):
        return [1] * len(config.models)
    wanted = [model.endswith(BEST) for model in config.models]
    if any(wanted) and config.best_of == 1:
        raise UserError(f"models: {config.models[wanted.index(True)]} chooses among answers; set best_of and best_of_reward")
    if config.best_of > 1 and not any(wanted):
        raise UserError(f"best_of is for models named MODEL{BEST}: name one, such as {config.models[0]}{BEST}")
    return [config.best_of if chooses else 1 for chooses in wanted]


def short_names(models: Sequence[str]) -> list[str]:
    """The shortest ends of the models' paths that tell them apart, with '-' for '/': runs/a/ppo/model becomes 'ppo'."""
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
    subject: Subject, prompts: Sequence[list[int]], uniforms: Tensor, sampling: Sampling, accelerator: Accelerator
) -> Responses:
    """Sample a response to each prompt; the same on every process, however many share the work.

    Args:
        prompts: token ids of each prompt; repeat a prompt for several samples.
        uniforms: [rows, max_new_tokens] from `align.sampling.generation.row_uniforms`. A row's noise should come from what
            the row is, not from its place in this call, so that an interrupted evaluation goes on with the same texts.
    """
    backbone, ends = subject.loaded.backbone, subject.loaded.tokenization.end_ids

    def sample_rows(rows: list[int]) -> list[tuple[list[int], bool]]:
        if not rows:
            return []
        responses = sample(backbone, [prompts[row] for row in rows], uniforms[rows], sampling, ends)
        return list(zip(responses.ids, responses.ended, strict=True))

    results = map_across_processes(range(len(prompts)), sample_rows, accelerator)
    return Responses([ids for ids, _ in results], [ended for _, ended in results])
