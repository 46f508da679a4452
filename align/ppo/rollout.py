"""Rollouts: the prompts of an update, and the policy's responses to them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from align.batches.streams import examples_digest, require_same_examples
from align.core.errors import UserError
from align.core.seeds import SeedKey, Stream, generator
from align.ppo.records import Rollout
from align.sampling.engines import SamplingEngine
from align.sampling.generation import Sampling
from align.tokenization import Tokenization
from align.tokenization.encoded import EncodedPrompt
from align.training.run import Run


def prompts_of_update(
    prompts: Sequence[EncodedPrompt], update: int, count: int, samples: int, seed: int
) -> list[EncodedPrompt]:
    """Return `count` prompts of an update (from 1), each `samples` times.

    Each pass over the data is reshuffled and complete before the next begins.
    """
    rows: list[int] = []
    first = (update - 1) * count
    while len(rows) < count:
        epoch, index = divmod(first + len(rows), len(prompts))
        order = generator(seed, Stream.DATA_ORDER, epoch).permutation(len(prompts)).tolist()
        rows += order[index : index + count - len(rows)]
    return [prompts[row] for row in rows for _ in range(samples)]


class PromptIdentity:
    """Recognizes the prompts of a checkpoint, whose order `prompts_of_update` depends on."""

    def __init__(self, prompts: Sequence[EncodedPrompt]) -> None:
        self.values = {"examples": len(prompts), "digest": examples_digest(prompt.ids for prompt in prompts)}

    def state_dict(self) -> dict[str, Any]:
        """Return their number and digest."""
        return self.values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise a UserError if a checkpoint has other prompts."""
        require_same_examples("the prompts", state, self.values)


def sample_rollout(
    sampler: SamplingEngine, tokenization: Tokenization, prompts: list[EncodedPrompt], sampling: Sampling, key: SeedKey
) -> Rollout:
    """Sample a response to each prompt with the random stream of `key`."""
    sampled = sampler.sample([prompt.ids for prompt in prompts], sampling, key)
    texts = [tokenization.text(ids) for ids in sampled.ids]
    return Rollout(prompts, sampled.ids, sampled.ended, texts, sampled.log_probs)


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
