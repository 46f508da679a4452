"""InstructGPT's ptx: a language-model loss on demonstrations or raw text, added to PPO's loss to prevent forgetting."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy

from align.batches.encoding import Limits, encode_demonstrations
from align.batches.micro_batches import micro_batches
from align.batches.raw_text import TextObjective, cut_into_pieces, pack
from align.core.errors import UserError
from align.core.seeds import RngStream, generator
from align.core.settings import Settings, option
from align.core.tensor_ops import BatchLoss, Padded
from align.models.backbone import flops_profile
from align.models.loading import LoadedModel
from align.models.roles import Roles
from align.ppo.extensions import Extension, OptimizerStep, TrainingContext
from align.reward.rankings import group_flops, group_sizes, pack_rankings
from align.sft.loss import demonstration_loss
from align.training.engine import TrainEngine

FITTED_EXAMPLES = 16
"""Number of examples that are checked against the model's limits at the start."""


@dataclass(kw_only=True)
class PtxSettings(Settings):
    """A language-model loss on demonstrations or raw text."""

    data: str = option("", "Demonstrations or raw text: file, folder or Hub id.", required=True)
    coef: float = option(27.8, "Loss coefficient (InstructGPT: 27.8).", gt=0)
    objective: Literal["demonstrations", "lm", "span_corruption", "infilling", "prefix"] = option(
        "demonstrations",
        "Training objective. demonstrations: assistant turns. On raw text, lm: next token; span_corruption: T5's "
        "masked spans; infilling: BART's masked text; prefix: continuation of a random prefix.",
    )
    tokens: int = option(512, "Block size for raw text, in tokens.", gt=1)
    per_response: int = option(1, "Examples per response (InstructGPT: 8).", gt=0)


@dataclass(frozen=True)
class PtxExample:
    """One row: a prompt, its responses, which do not attend to each other, and masks of the tokens in the loss."""

    prompt: list[int]
    responses: list[list[int]]
    masks: list[list[bool]]

    @classmethod
    def from_ids(cls, prompt: list[int], *responses: list[int]) -> "PtxExample":
        """Make an example with all response tokens in the loss."""
        return cls(prompt, list(responses), [[True] * len(ids) for ids in responses])

    @property
    def predicted(self) -> int:
        """Number of tokens in the loss."""
        return sum(map(sum, self.masks))


class PtxExamples:
    """Demonstrations or raw text, from which training examples are drawn at random.

    Args:
        max_tokens: maximum length of the prompt, and of the response, of a demonstration.
        seed: seed of the random draws.

    Raises:
        UserError: if data or settings do not fit the model.
    """

    def __init__(
        self, settings: PtxSettings, policy: LoadedModel, max_tokens: int, seed: int, skip_bad_rows: bool = False
    ) -> None:
        self.settings, self.backbone, self.seed = settings, policy.backbone, seed
        self.text: TextObjective | None = None
        if settings.objective != "demonstrations":
            self.text = TextObjective(settings.objective, policy, "ptx.objective")
        self.items = self._read(policy, max_tokens, skip_bad_rows)
        self.profile = flops_profile(policy.backbone, policy.adapter)
        self.draw(FITTED_EXAMPLES, (0,))

    def _read(self, policy: LoadedModel, max_tokens: int, skip_bad_rows: bool) -> Sequence[PtxExample | list[int]]:
        """Read the data: complete examples, or pieces of text whose target is drawn each time."""
        settings = self.settings
        if self.text is None:
            limits = Limits(max_tokens, max_tokens, "truncate", ("max_prompt_tokens", "max_prompt_tokens"))
            demonstrations = encode_demonstrations(settings.data, policy, limits, skip_bad_rows)
            return [PtxExample(item.prompt, [item.response], [item.loss_mask]) for item in demonstrations]
        documents = (ids for _, ids in self.text.documents(settings.data, skip_bad_rows))
        if settings.objective == "lm":
            rows = pack(documents, self.text.begin, settings.tokens)
            return [PtxExample.from_ids(row.prompt, *row.responses) for row in rows]
        pieces = cut_into_pieces(documents, settings.tokens)
        if not pieces:
            raise UserError(f"{settings.data}: no text has two tokens, so nothing can be masked; give longer texts")
        return pieces

    def _example(self, item: PtxExample | list[int], random: numpy.random.Generator) -> PtxExample:
        if isinstance(item, PtxExample):
            return item
        assert self.text is not None
        return PtxExample.from_ids(*self.text.example(item, random))

    def draw(self, count: int, key: tuple[int, ...]) -> list[PtxExample]:
        """Draw random examples, which depend only on `key`."""
        random = generator(self.seed, RngStream.PTX_ROWS, *key)
        items = [self.items[row] for row in random.integers(len(self.items), size=count).tolist()]
        examples = [self._example(item, random) for item in items]
        for example in examples:
            longest = max(map(len, example.responses))
            self.backbone.require_fit(len(example.prompt), longest, f"{self.settings.data}: an example")
        return examples

    def flops(self, example: PtxExample) -> float:
        """Return the FLOPs of training on an example."""
        return group_flops(self.backbone, self.profile, example, predicted=list(map(len, example.responses)))


class PtxLoss(Extension):
    """Adds the gradient of `coef` times the mean loss of random examples to each optimizer step."""

    def __init__(self, settings: PtxSettings) -> None:
        self.settings, self.flops_since_update = settings, 0.0

    def load(self, context: TrainingContext) -> None:
        config, self.budget = context.run.config, context.run.optimization.micro_batch_tokens
        self.examples = PtxExamples(
            self.settings, context.policy, context.max_prompt_tokens, seed=config.seed, skip_bad_rows=config.skip_bad_rows
        )

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        self.engine, self.roles = engine, roles

    def extra_loss(self, step: OptimizerStep) -> dict[str, float]:
        engine, accelerator = self.engine, self.engine.accelerator
        step_key = (step.update, step.epoch, step.minibatch)
        examples = self.examples.draw(step.responses * self.settings.per_response, step_key)
        tokens = sum(example.predicted for example in examples)
        sizes = group_sizes(self.examples.backbone, examples)
        for part in micro_batches(range(len(examples)), sizes, self.budget, accelerator):
            engine.backward(self._loss([examples[row] for row in part.rows], tokens), part.weight)
        self.flops_since_update += sum(map(self.examples.flops, examples))
        return {"loss/ptx": engine.reduce_gradients()["loss"] / self.settings.coef}

    def _loss(self, examples: Sequence[PtxExample], tokens: int) -> BatchLoss:
        """Return a micro-batch's contribution to the loss, which is a mean over `tokens` tokens."""
        device = self.engine.accelerator.device
        inputs = pack_rankings(examples, device)
        rows = [list(map(int, mask)) for example in examples for mask in example.masks]
        mask = Padded.from_lists(rows).ids.to(device) > 0
        log_probs = self.roles.language_model(inputs.prompt, inputs.response, inputs.prompt_of_response)
        return BatchLoss(self.settings.coef * demonstration_loss(log_probs, mask, ~mask, tokens, 0, 0.0))

    def flops(self, lengths: Sequence[tuple[int, Sequence[int]]]) -> float:
        flops, self.flops_since_update = self.flops_since_update, 0.0
        return flops
