"""Which prompts an update takes, and the responses that the policy gives to them."""

from collections.abc import Sequence
from dataclasses import dataclass

from align.encoding import EncodedPrompt
from align.engines import SamplingEngine
from align.generation import Sampling, generator
from align.ppo.config import PPOConfig
from align.reward.scoring import Answer
from align.tokenization import Tokenization

ORDER, ROLLOUT, EVALUATION, MINIBATCH, PTX = 1, 2, 3, 4, 5
"""What random numbers are for: the second part of a seed, see `align.generation.generator`."""


@dataclass(frozen=True)
class Rollout:
    """Prompts with sampled responses, one each, in an order that does not depend on processes."""

    prompts: list[EncodedPrompt]
    responses: list[list[int]]
    ended: list[bool]
    texts: list[str]
    log_probs: list[list[float]] | None = None
    """Of each response token, as the engine saw them; None where it is the policy itself that sampled."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def answers(self) -> list[Answer]:
        """The rollout as a reward model takes it."""
        return [
            Answer(prompt.conversation, prompt.ids, ids, text)
            for prompt, ids, text in zip(self.prompts, self.responses, self.texts, strict=True)
        ]


def prompts_of_update(config: PPOConfig, prompts: Sequence[EncodedPrompt], update: int) -> list[EncodedPrompt]:
    """The prompts of update 1..: each pass over the data is shuffled anew and used up before the next begins."""
    count = config.rollout_size // config.samples_per_prompt
    rows: list[int] = []
    first = (update - 1) * count
    while len(rows) < count:
        epoch, place = divmod(first + len(rows), len(prompts))
        order = generator(config.seed, ORDER, epoch).permutation(len(prompts)).tolist()
        rows += order[place : place + count - len(rows)]
    return [prompts[row] for row in rows for _ in range(config.samples_per_prompt)]


def respond(
    engine: SamplingEngine,
    tokenization: Tokenization,
    prompts: list[EncodedPrompt],
    sampling: Sampling,
    seed: tuple[int, ...],
) -> Rollout:
    """Sample a response to each prompt; the texts do not depend on how many processes there are.

    Args:
        seed: parts of the seed; what decides row i is the same however rows are spread.
    """
    found = engine.sample([prompt.ids for prompt in prompts], sampling, seed)
    texts = [tokenization.text(ids) for ids in found.ids]
    return Rollout(prompts, found.ids, found.ended, texts, found.log_probs)


def repetition(ids: Sequence[int], n: int = 3) -> float:
    """Share of a response's n-grams of tokens that occurred before in it; 0 for a response shorter than n."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
