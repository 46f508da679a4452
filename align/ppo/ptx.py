"""InstructGPT's ptx: a language-model loss on demonstrations or raw text, added to PPO's loss against forgetting."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

from align.batches import texts
from align.batches.encoding import Limits, encode_demonstrations
from align.batches.micro_batches import micro_batches
from align.core.errors import UserError
from align.core.seeds import Stream, generator
from align.core.tensor_ops import Padded
from align.data.readers import read_texts
from align.models.backbone import flops_profile
from align.models.loading import LoadedModel
from align.models.roles import Roles
from align.ppo.config import PPOConfig
from align.reward.rankings import group_flops, pack_rankings
from align.sft.loss import demonstration_loss
from align.tokenization import SpecialTokenError
from align.training.engine import TrainEngine

FITTED_EXAMPLES = 16
"""Examples checked at the start for whether they fit the model."""


@dataclass(frozen=True)
class PtxExample:
    """One row: a prompt, responses to it that do not see each other, and masks of the tokens in the loss."""

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


class PtxLoss:
    """Adds the ptx loss of a random batch to each optimizer step.

    Raises:
        UserError: for data or settings that do not fit the model.
    """

    def __init__(self, config: PPOConfig, loaded: LoadedModel) -> None:
        self.config, self.backbone, self.tokenization = config, loaded.backbone, loaded.tokenization
        self.end: int = loaded.tokenization.tokenizer.eos_token_id
        self.sentinels = _sentinels(loaded) if config.ptx_objective == "span_corruption" else []
        self.items = self._read(loaded)
        self.shape = flops_profile(loaded.backbone, loaded.adapter)
        self.draw(FITTED_EXAMPLES, (0,))

    def _read(self, loaded: LoadedModel) -> Sequence[PtxExample | list[int]]:
        """Read `ptx_data`: finished examples, or pieces of text whose target is drawn each time."""
        config = self.config
        if config.ptx_objective == "demonstrations":
            names = ("max_prompt_tokens", "max_prompt_tokens")
            limits = Limits(config.max_prompt_tokens, config.max_prompt_tokens, "truncate", names)
            found = encode_demonstrations(config.ptx_data, loaded, limits, config.skip_bad_rows)
            return [PtxExample(item.prompt, [item.response], [item.loss_mask]) for item in found]
        documents = _documents(config, loaded)
        if config.ptx_objective == "lm":
            begin = self.tokenization.tokenizer.bos_token_id
            begin = self.end if begin is None else begin
            packed = texts.pack(([*ids, self.end] for ids in documents), begin, config.ptx_tokens)
            return [PtxExample.from_ids(row.prompt, *row.responses) for row in packed]
        pieces = texts.cut_into_pieces(documents, config.ptx_tokens)
        if not pieces:
            raise UserError(f"{config.ptx_data}: no text has two tokens, so nothing can be masked; give longer texts")
        return pieces

    def _example(self, item: PtxExample | list[int], random: numpy.random.Generator) -> PtxExample:
        if isinstance(item, PtxExample):
            return item
        if self.config.ptx_objective == "prefix":
            found = texts.prefix(item, random)
        else:
            found = texts.span_corruption(item, self.sentinels, random)
        # As in T5's own data, input and target each end with the token that ends a text.
        return PtxExample.from_ids(self.tokenization.as_whole_text(found.prompt), [*found.response, self.end])

    def draw(self, count: int, key: tuple[int, ...]) -> list[PtxExample]:
        """Draw random examples: the same with the same noise for the same key."""
        random = generator(self.config.seed, Stream.PTX_ROWS, *key)
        items = [self.items[row] for row in random.integers(len(self.items), size=count).tolist()]
        examples = [self._example(item, random) for item in items]
        for example in examples:
            longest = max(map(len, example.responses))
            self.backbone.require_fit(len(example.prompt), longest, f"{self.config.ptx_data}: an example")
        return examples

    def flops(self, example: PtxExample) -> float:
        """FLOPs of learning from an example."""
        return group_flops(self.backbone, self.shape, example, predicted=list(map(len, example.responses)))

    def accumulate(self, engine: TrainEngine, roles: Roles, count: int, step_key: tuple[int, ...]) -> tuple[float, float]:
        """Add the gradient of ptx_weight times the mean loss of random examples, `ptx_per_response` for each response.

        Args:
            count: responses of the optimizer step.
            step_key: update, epoch and minibatch, which decide the draw.

        Returns:
            The mean loss, and the FLOPs of learning it.
        """
        examples = self.draw(count * self.config.ptx_per_response, step_key)
        token_count = sum(example.predicted for example in examples)
        device = engine.accelerator.device
        lengths = [self.backbone.tokens_in_memory(len(e.prompt), list(map(len, e.responses))) for e in examples]
        plan = micro_batches(range(len(examples)), lengths, self.config.micro_batch_tokens, engine.accelerator)
        for rows in engine.micro_batches(plan):
            chosen = [examples[row] for row in rows]
            prompt, response, prompt_index = pack_rankings(chosen, device)
            masks = [list(map(int, mask)) for example in chosen for mask in example.masks]
            mask = Padded.from_lists(masks).ids.to(device) > 0
            log_probs = roles.language_model(prompt, response, prompt_index)
            engine.backward(self.config.ptx_weight * demonstration_loss(log_probs, mask, ~mask, token_count, 0, 0.0))
        return engine.sums["loss"] / self.config.ptx_weight, sum(map(self.flops, examples))


def _documents(config: PPOConfig, loaded: LoadedModel) -> Iterator[list[int]]:
    """The ids of raw texts, without special tokens."""
    for number, text in enumerate(read_texts(config.ptx_data, config.skip_bad_rows), start=1):
        try:
            yield loaded.tokenization.text_ids(text.text)
        except SpecialTokenError as error:
            raise UserError(f"{config.ptx_data}: text {text.id or number}: {error}") from error


def _sentinels(loaded: LoadedModel) -> list[int]:
    """T5's sentinel tokens in order.

    Raises:
        UserError: if the tokenizer has fewer than two.
    """
    known = loaded.tokenization.tokenizer.get_vocab()
    names = [f"<extra_id_{number}>" for number in range(100)]
    sentinels = [known[name] for name in names if name in known]
    if len(sentinels) < 2:
        raise UserError(
            "ptx_objective span_corruption: the tokenizer lacks T5's sentinels <extra_id_0>, <extra_id_1>, ...; set "
            "ptx_objective to lm or prefix"
        )
    return sentinels
