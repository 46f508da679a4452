"""Rollouts: the prompts of an update, and the policy's responses to them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from align.batches.streams import examples_digest, require_same_examples
from align.core.errors import UserError
from align.core.seeds import SeedKey, Stream, generator
from align.ppo.config import PPOConfig
from align.sampling.engines import SamplingEngine
from align.sampling.generation import Sampling
from align.tokenization import Tokenization
from align.tokenization.encoded import EncodedPrompt, SampledResponse
from align.training.run import Run


@dataclass(frozen=True)
class Rollout:
    """Prompts with sampled responses, one each, in an order that does not depend on processes."""

    prompts: list[EncodedPrompt]
    responses: list[list[int]]
    ended: list[bool]
    texts: list[str]
    log_probs: list[list[float]] | None = None
    """Log-prob of each response token as the engine computed it; None if the policy itself sampled."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> Tensor:
        """[B] response tokens."""
        return torch.tensor([len(response) for response in self.responses])

    @property
    def engine_log_probs(self) -> Tensor | None:
        """[B, T] `log_probs`, 0 past a response's end."""
        if self.log_probs is None:
            return None
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in self.log_probs], batch_first=True)

    @property
    def ended_mask(self) -> Tensor:
        """[B] bool: whether a response ended by itself."""
        return torch.tensor(self.ended)

    @property
    def sampled(self) -> list[SampledResponse]:
        """The responses as reward models take them."""
        return [
            SampledResponse(prompt.conversation, prompt.ids, ids, text, ended)
            for prompt, ids, text, ended in zip(self.prompts, self.responses, self.texts, self.ended, strict=True)
        ]


@contextmanager
def save_if_scoring_fails(run: Run, rollout: Rollout, update: int) -> Iterator[None]:
    """Save the rollout if scoring it fails, and add the file to the error: sampling may have taken an hour."""
    try:
        yield
    except UserError as error:
        rows = [
            {"prompt": list(prompt.conversation), "response": text, "ended": ended, "category": prompt.category}
            for prompt, text, ended in zip(rollout.prompts, rollout.texts, rollout.ended, strict=True)
        ]
        run.record("unscored", rows, update)
        raise UserError(f"{error}; the rollout of update {update} is in {run.folder / 'unscored.jsonl'}") from error


def prompts_of_update(config: PPOConfig, prompts: Sequence[EncodedPrompt], update: int) -> list[EncodedPrompt]:
    """The prompts of an update, from 1; each pass over the data is reshuffled and complete before the next begins."""
    count = config.rollout_size // config.samples_per_prompt
    rows: list[int] = []
    first = (update - 1) * count
    while len(rows) < count:
        epoch, index = divmod(first + len(rows), len(prompts))
        order = generator(config.seed, Stream.DATA_ORDER, epoch).permutation(len(prompts)).tolist()
        rows += order[index : index + count - len(rows)]
    return [prompts[row] for row in rows for _ in range(config.samples_per_prompt)]


class PromptIdentity:
    """Recognizes the prompts of a checkpoint, whose order `prompts_of_update` depends on."""

    def __init__(self, prompts: Sequence[EncodedPrompt]) -> None:
        self.values = {"examples": len(prompts), "digest": examples_digest(prompt.ids for prompt in prompts)}

    def state_dict(self) -> dict[str, Any]:
        """Their number and digest."""
        return self.values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise a UserError if a checkpoint has other prompts."""
        require_same_examples("the prompts", state, self.values)


def sample_rollout(
    engine: SamplingEngine,
    tokenization: Tokenization,
    prompts: list[EncodedPrompt],
    sampling: Sampling,
    key: SeedKey,
) -> Rollout:
    """Sample a response to each prompt with the random stream of `key`."""
    sampled = engine.sample([prompt.ids for prompt in prompts], sampling, key)
    texts = [tokenization.text(ids) for ids in sampled.ids]
    return Rollout(prompts, sampled.ids, sampled.ended, texts, sampled.log_probs)
