"""Scores of text by a reward model, without the policy that wrote it: for files of answers and for a server."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from align.core.errors import UserError
from align.core.plugins import checked_scores
from align.data.records import Conversation
from align.reward.checkpoint import REWARD, HeadType, LoadedReward, load_reward_model, scorer_folder
from align.reward.scoring import RewardModelScorer
from align.runtime.distributed import computes_on_cpu
from align.tokenization import ConversationError, PairTokenization, Tokenization
from align.tokenization.encoded import PromptResponse, SampledResponse


@dataclass(frozen=True)
class TextAnswer:
    """A response to a conversation; `ended` is False if it was cut at a limit."""

    prompt: Conversation
    text: str
    ended: bool = True

    def as_sampled(self) -> SampledResponse:
        """Convert to the input of a scorer that tokenizes text."""
        return SampledResponse(self.prompt, [], [], self.text, self.ended)


def text_scorer(reward: LoadedReward, accelerator: Accelerator, batch_tokens: int) -> RewardModelScorer:
    """Return a loaded reward model's scorer for text, with at most `batch_tokens` padded tokens per forward pass."""
    return RewardModelScorer.from_loaded(reward, None, accelerator, batch_tokens)


class TextRewardModel:
    """A reward model of this package, or any classifier with one label, that scores text.

    Args:
        name: a folder, a hub name or a built-in model.
        batch_tokens: maximum padded tokens per forward pass.
        chat_template: chat template for a classifier whose tokenizer has none.
        quantization: quantization format of the weights, see `align.models.quantization`.

    Raises:
        UserError: if the model cannot be loaded.
    """

    def __init__(
        self,
        name: str,
        dtype: str = "auto",
        batch_tokens: int = 16_384,
        chat_template: str = "auto",
        quantization: str = "",
        kind: HeadType = REWARD,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.name = name
        reward = load_reward_model(scorer_folder(name), dtype, chat_template, kind, quantization)
        self.tokenization: Tokenization = reward.loaded.tokenization
        self.scorer = text_scorer(reward, accelerator or Accelerator(cpu=computes_on_cpu()), batch_tokens)

    def __call__(self, answers: Sequence[TextAnswer]) -> list[float]:
        """Return the reward of each answer, minus the mean over demonstrations.

        Raises:
            UserError: if an answer is too long for the model or its chat template leaves out a turn, or a reward is not a
                finite number. The error names the answer by its number, from 1.
        """
        return self._score([self.encode(answer, f"answer {number}") for number, answer in enumerate(answers, 1)])

    def encode(self, answer: TextAnswer, where: str) -> PromptResponse:
        """Return the model's token ids. Raise a UserError that begins with `where` if the answer does not fit."""
        try:
            return self._fitting(self.scorer.encode(answer.as_sampled()), where)
        except ConversationError as error:
            raise UserError(f"{where}: {error}") from error

    def score_rendered(self, texts: Sequence[str], prompts: Sequence[str] = ()) -> list[float]:
        """Return the rewards of text rendered by a chat template, as OpenRLHF sends it.

        Args:
            texts: prompts with their responses, including special tokens.
            prompts: prompt of each text. A text that does not begin with its prompt, or has none, is treated as a
                response without a prompt.
        """
        if isinstance(self.tokenization, PairTokenization):
            raise UserError(f"{self.name} reads prompt and response as a pair: send messages, or a prompt for each query")
        rows = []
        for number, text in enumerate(texts):
            prompt = prompts[number] if prompts and text.startswith(prompts[number]) else ""
            ids, prompt_ids = (self.tokenization.chat.template_ids(part) for part in (text, prompt))
            shared = len(prompt_ids) if ids[: len(prompt_ids)] == prompt_ids else 0
            end = self.tokenization.end_id
            if not ids or ids[-1] != end:  # as OpenRLHF's server: the score is read at the end token
                ids = [*ids, end]
            split = min(max(shared, 1), len(ids) - 1)
            rows.append(self._fitting(PromptResponse(ids[:split], ids[split:]), f"query {number + 1}"))
        return self._score(rows)

    def _fitting(self, row: PromptResponse, where: str) -> PromptResponse:
        backbone = self.scorer.backbone
        if not backbone.fits(len(row.prompt), len(row.response)):
            raise UserError(
                f"{where}: {len(row.prompt) + len(row.response)} tokens, and {self.name} reads {backbone.context_length}; "
                "shorten the text"
            )
        return row

    @torch.no_grad()
    def _score(self, rows: Sequence[PromptResponse]) -> list[float]:
        scores = self.scorer.score_rows(rows) if rows else []
        return checked_scores(scores, len(rows), f"reward model {self.name}", describe=lambda index: f"answer {index + 1}")
