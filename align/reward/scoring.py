"""Scoring answers with a reward model, whoever wrote them and with whatever tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from align.batching import over_families
from align.data.records import Conversation
from align.distributed import place_frozen
from align.errors import UserError
from align.flops import Shape
from align.models.backbone import Backbone
from align.reward.checkpoint import LoadedReward
from align.shared_prompts import families, family_tokens, lay_together
from align.tensor_ops import Padded
from align.tokenization import Tokenization


@dataclass(frozen=True)
class Answer:
    """A response to a prompt, as text and as token ids of the policy that gave it."""

    conversation: Conversation
    prompt_ids: list[int]
    ids: list[int]
    text: str


class RewardModelScorer:
    """A frozen reward model that scores answers.

    Args:
        module: takes prompts and responses as `Padded`, with whose prompt is whose, and gives rewards [B].
        mean: subtracted from every reward.
        backbone: what `module` reads with.
        accelerator: processes that share the work.
        budget: padded tokens that are read at once.
        tokenization: the reward model's own, where it is not the policy's: texts are then tokenized again.
        shape: what the cost of a score depends on; None: it is not counted.
    """

    def __init__(
        self,
        module: Callable[[Padded, Padded, Tensor | None], Tensor],
        mean: float,
        backbone: Backbone,
        accelerator: Accelerator,
        budget: int,
        tokenization: Tokenization | None = None,
        shape: Shape | None = None,
    ) -> None:
        self.module, self.mean, self.backbone, self.tokenization = module, mean, backbone, tokenization
        self.accelerator, self.budget, self.shape = accelerator, budget, shape

    @classmethod
    def of(cls, found: LoadedReward, policy: Tokenization, accelerator: Accelerator, budget: int) -> "RewardModelScorer":
        """A scorer of a reward model from disk, for answers of a policy with tokenization `policy`."""
        theirs = found.loaded.tokenization
        shape = found.loaded.backbone.shape(found.loaded.adapter)
        module = place_frozen(found.model, accelerator)
        bridge = None if theirs.reads_alike(policy) else theirs
        return cls(module, found.mean, found.loaded.backbone, accelerator, budget, bridge, shape)

    @torch.no_grad()
    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        """Rewards of answers, less the mean over demonstrations; the same on every process.

        Raises:
            UserError: if an answer is longer than the reward model can read.
        """
        rows = [self._tokens(answer) for answer in answers]
        prompts, responses = [prompt for prompt, _ in rows], [response for _, response in rows]
        for prompt, response in rows:
            if not self.backbone.fits(len(prompt), len(response)):
                raise UserError(
                    f"the reward model cannot read {len(prompt)} prompt and {len(response)} response tokens; "
                    "lower max_prompt_tokens or max_new_tokens"
                )
        device = self.accelerator.device

        def work(batch: list[int]) -> list[float]:
            rewards: list[float] = (self.module(*lay_together(prompts, responses, batch, device)) - self.mean).tolist()
            return rewards

        together = families(self.backbone, prompts, responses, range(len(rows)), self.budget)
        costs = family_tokens(self.backbone, prompts, responses, together)
        return over_families(together, costs, self.budget, self.accelerator, work)

    def _tokens(self, answer: Answer) -> tuple[list[int], list[int]]:
        if self.tokenization is None:
            return answer.prompt_ids, answer.ids
        return self.tokenization.prompt_ids(answer.conversation), self.tokenization.response_ids(answer.text)
