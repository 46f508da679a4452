"""InstructGPT's ptx: language-model loss on demonstrations or raw text, added to PPO's loss against forgetting."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy
import torch
from accelerate import Accelerator
from torch import Tensor

from align.batches import texts
from align.batches.encoding import Limits, encode_demonstration_row, encode_demonstrations
from align.batches.limits import EncodedRow
from align.batches.micro_batches import micro_batches
from align.batches.streams import ExampleStream
from align.core.errors import UserError
from align.core.seeds import Stream, generator
from align.core.tensor_ops import Padded
from align.data.readers import Text, read_texts
from align.data.sources import SourceRow
from align.models.backbone import flops_profile
from align.models.loading import LoadedModel
from align.models.roles import Roles
from align.ppo.config import PPOConfig
from align.reward.rankings import group_flops, pack_rankings
from align.sft.loss import demonstration_loss
from align.tokenization import SpecialTokenError
from align.tokenization.encoded import EncodedDemonstration, PromptResponses
from align.training.optimization import Optimization, Sums

Read = TypeVar("Read")
Item = TypeVar("Item")
FITTED_EXAMPLES = 16
"""Examples checked at the start for whether they fit the model."""
SENTENCE_ENDS = (".", "!", "?")
"""Characters that end the last token of a sentence, for the shuffling of sentences."""


@dataclass(frozen=True)
class PtxExample:
    """One row: a prompt, responses to it that do not see each other, and masks of the tokens in the loss."""

    prompt: list[int]
    responses: list[list[int]]
    masks: list[list[bool]]

    @classmethod
    def from_ids(cls, prompt: list[int], *responses: list[int]) -> "PtxExample":
        """An example with all response tokens in the loss."""
        return cls(prompt, list(responses), [[True] * len(ids) for ids in responses])

    @property
    def predicted(self) -> int:
        """Number of tokens in the loss."""
        return sum(map(sum, self.masks))


class PtxKind(Protocol[Item]):
    """A kind of ptx data. Noise is redrawn each time an item becomes an example."""

    def read(self) -> list[Item]:
        """The items of all of the data."""

    def stream(self, accelerator: Accelerator) -> ExampleStream[Any, Item]:
        """The same items, read block by block during training."""

    def example(self, item: Item, random: numpy.random.Generator) -> PtxExample:
        """An item as a training example."""


class Demonstrations:
    """Demonstrations, of which the assistant's turns are learned."""

    def __init__(self, config: PPOConfig, loaded: LoadedModel) -> None:
        self.config, self.loaded = config, loaded
        setting = "max_prompt_tokens"
        self.limits = Limits(config.max_prompt_tokens, config.max_prompt_tokens, "truncate", (setting, setting))

    def read(self) -> list[EncodedDemonstration]:
        return encode_demonstrations(self.config.ptx_data, self.loaded, self.limits, self.config.skip_bad_rows)

    def stream(self, accelerator: Accelerator) -> ExampleStream[EncodedDemonstration, EncodedDemonstration]:
        encode = partial(encode_demonstration_row, self.loaded, self.limits)
        return _stream(self.config, encode, list, accelerator, self.limits)

    def example(self, item: EncodedDemonstration, random: numpy.random.Generator) -> PtxExample:
        return PtxExample(item.prompt, [item.response], [item.loss_mask])


class PackedTexts:
    """Raw texts, packed to length: an ordinary language model's examples. A stream packs each block by itself."""

    def __init__(self, config: PPOConfig, loaded: LoadedModel) -> None:
        self.config, self.loaded = config, loaded
        tokenizer = loaded.tokenization.tokenizer
        self.begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        self.end: int = tokenizer.eos_token_id

    def read(self) -> list[PromptResponses]:
        return self._pack(_documents(self.config, self.loaded))

    def stream(self, accelerator: Accelerator) -> ExampleStream[list[int], PromptResponses]:
        return _stream(self.config, partial(_document_row, self.loaded), self._pack, accelerator)

    def _pack(self, documents: Iterable[list[int]]) -> list[PromptResponses]:
        return texts.pack(([*ids, self.end] for ids in documents), self.begin, self.config.ptx_tokens)

    def example(self, item: PromptResponses, random: numpy.random.Generator) -> PtxExample:
        return PtxExample.from_ids(item.prompt, *item.responses)


class DenoisedTexts:
    """Raw texts with a masked part to reconstruct; the part is redrawn each time."""

    def __init__(self, config: PPOConfig, loaded: LoadedModel) -> None:
        self.config, self.loaded = config, loaded
        self.objective, self.tokenization = config.ptx_objective, loaded.tokenization
        self.end: int = loaded.tokenization.tokenizer.eos_token_id
        self.denoising = texts.Denoising([], -1) if self.objective == "prefix" else _denoising(config, loaded)

    def read(self) -> list[list[int]]:
        pieces = self._cut(_documents(self.config, self.loaded))
        if not pieces:
            raise UserError(f"{self.config.ptx_data}: no text has two tokens, so nothing can be masked; give longer texts")
        return pieces

    def stream(self, accelerator: Accelerator) -> ExampleStream[list[int], list[int]]:
        return _stream(self.config, partial(_document_row, self.loaded), self._cut, accelerator)

    def _cut(self, documents: Iterable[list[int]]) -> list[list[int]]:
        return texts.cut_into_pieces(documents, self.config.ptx_tokens)

    def example(self, item: list[int], random: numpy.random.Generator) -> PtxExample:
        if self.objective == "infilling":
            found = texts.infilling(item, self.denoising, random, self._sentence_ends(item))
        else:
            objectives = {"span_corruption": texts.span_corruption, "mass": texts.mass, "prefix": texts.prefix}
            found = objectives[self.objective](item, self.denoising, random)
        # As in T5's own data, input and target each end with the token that ends a text.
        return PtxExample.from_ids(self.tokenization.as_whole_text(found.prompt), [*found.response, self.end])

    def _sentence_ends(self, ids: list[int]) -> list[int]:
        token_texts = self.tokenization.token_texts(ids)
        return [index for index in range(1, len(ids)) if token_texts[index - 1].rstrip().endswith(SENTENCE_ENDS)]


def _documents(config: PPOConfig, loaded: LoadedModel) -> Iterator[list[int]]:
    """The ids of raw texts, without special tokens."""
    for number, text in enumerate(read_texts(config.ptx_data, config.skip_bad_rows), start=1):
        try:
            yield loaded.tokenization.text_ids(text.text)
        except SpecialTokenError as error:
            raise UserError(f"{config.ptx_data}: text {text.id or number}: {error}") from error


def _document_row(loaded: LoadedModel, row: SourceRow) -> list[list[int]]:
    """The ids of a row's text, without special tokens."""
    if row.error is not None:
        raise UserError(f"{row.where}: {row.error}")
    try:
        return [loaded.tokenization.text_ids(Text.from_row(row.row).text)]
    except (UserError, SpecialTokenError) as error:
        raise UserError(f"{row.where}: {error}") from error


def _stream(
    config: PPOConfig,
    encode: Callable[[SourceRow], Sequence[Read] | EncodedRow[Read]],
    arrange: Callable[[list[Read]], list[Item]],
    accelerator: Accelerator,
    limits: Limits | None = None,
) -> ExampleStream[Read, Item]:
    """The data of `ptx_data`, block by block; several sources come one after the other."""
    block, key = config.ptx_stream_block, (config.seed, 0)
    return ExampleStream(config.ptx_data, encode, arrange, block, key, accelerator, config.skip_bad_rows, limits)


def _denoising(config: PPOConfig, loaded: LoadedModel) -> texts.Denoising:
    """The tokenizer's sentinels and mask, or those that the settings name.

    Raises:
        UserError: if it has none.
    """
    tokenizer = loaded.tokenization.tokenizer
    names = config.ptx_sentinels or [f"<extra_id_{number}>" for number in range(100)]
    known = tokenizer.get_vocab()
    missing = [name for name in config.ptx_sentinels if name not in known]
    sentinels = [known[name] for name in names if name in known]
    if missing or len(sentinels) < 2:
        lacking = missing[0] if missing else "<extra_id_0>, ..."
        raise UserError(
            f"ptx_objective {config.ptx_objective}: the tokenizer lacks {lacking}; name in "
            "ptx_sentinels at least two tokens that texts do not use, or set ptx_objective to lm or prefix"
        )
    return texts.Denoising(sentinels, tokenizer.mask_token_id if tokenizer.mask_token_id is not None else sentinels[0])


class PtxLoss:
    """Adds the ptx loss of a random batch, or of the next examples of a stream, to each optimizer step.

    Args:
        loaded: the policy.
        accelerator: the processes that share the reading of a stream.

    Raises:
        UserError: for data or settings that do not fit the model.
    """

    def __init__(self, config: PPOConfig, loaded: LoadedModel, accelerator: Accelerator) -> None:
        self.config, self.backbone = config, loaded.backbone
        kinds: dict[str, Callable[[PPOConfig, LoadedModel], PtxKind[Any]]] = {
            "demonstrations": Demonstrations,
            "lm": PackedTexts,
        }
        self.kind = kinds.get(config.ptx_objective, DenoisedTexts)(config, loaded)
        self.stream = self.kind.stream(accelerator) if config.ptx_stream_block else None
        self.items = [] if self.stream else self.kind.read()
        self.shape = flops_profile(loaded.backbone, loaded.adapter)
        start = self.state()
        self.draw(FITTED_EXAMPLES, (0,))
        self.load_state(start)

    def state(self) -> dict[str, Any]:
        """The position in a stream."""
        return self.stream.state() if self.stream else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        if self.stream and state:
            self.stream.load_state(state)

    def draw(self, count: int, key: tuple[int, ...]) -> list[PtxExample]:
        """`count` random examples, the same with the same noise for the same key; from a stream, the next ones."""
        random = generator(self.config.seed, Stream.PTX_ROWS, *key)
        if self.stream:
            items = self.stream.take(count)
        else:
            items = [self.items[row] for row in random.integers(len(self.items), size=count).tolist()]
        examples = [self.kind.example(item, random) for item in items]
        for example in examples:
            longest = max(map(len, example.responses))
            self.backbone.require_fit(len(example.prompt), longest, f"{self.config.ptx_data}: an example")
        return examples

    def flops(self, example: PtxExample) -> float:
        """FLOPs of learning from an example."""
        return group_flops(self.backbone, self.shape, example, predicted=list(map(len, example.responses)))

    def accumulate(self, optimization: Optimization, roles: Roles, count: int, step_key: tuple[int, ...]) -> Sums:
        """Add the gradient of ptx_weight times the mean loss of random examples, `ptx_per_response` for each response.

        Args:
            count: responses of the optimizer step.
            step_key: update, epoch and minibatch, which decide the draw.
        """
        examples = self.draw(count * self.config.ptx_per_response, step_key)
        token_count = sum(example.predicted for example in examples)
        device = optimization.accelerator.device

        def loss_of_rows(part: list[int]) -> tuple[Tensor, Sums]:
            chosen = [examples[row] for row in part]
            prompt, response, prompt_index = pack_rankings(chosen, device)
            masks = [list(map(int, mask)) for example in chosen for mask in example.masks]
            mask = Padded.from_lists(masks).ids.to(device) > 0
            log_probs = roles.language_model(prompt, response, prompt_index)
            return self.config.ptx_weight * demonstration_loss(log_probs, mask, ~mask, token_count, 0, 0.0), {}

        lengths = [self.backbone.tokens_in_memory(len(e.prompt), list(map(len, e.responses))) for e in examples]
        plan = micro_batches(range(len(examples)), lengths, self.config.micro_batch_tokens, optimization.accelerator)
        loss = optimization.accumulate(plan, loss_of_rows)["loss"] / self.config.ptx_weight
        flops = torch.tensor(sum(map(self.flops, examples)), dtype=torch.float64)
        return {"ptx_loss": loss, "ptx_flops": flops}
