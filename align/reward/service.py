"""A reward model for many callers: requests that arrive while it is busy wait, and are then scored together."""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from accelerate import Accelerator

from align.core.errors import UserError
from align.data.conversation import user_turn
from align.data.records import Prompt
from align.reward.checkpoint import LoadedReward
from align.reward.scoring import RewardModelScorer
from align.runtime.distributed import computes_on_cpu
from align.tokenization import Tokenization
from align.tokenization.encoded import SampledResponse


class RewardService:
    """Scores rows of many callers with one reward model, several calls at once.

    Args:
        reward: the reward model.
        batch_tokens: padded tokens that are read at once.
    """

    def __init__(self, reward: LoadedReward, batch_tokens: int) -> None:
        accelerator = Accelerator(cpu=computes_on_cpu())
        self.tokenization: Tokenization = reward.loaded.tokenization
        self._reads_whole_turns = reward.reads_whole_turns
        encoded = replace(reward, reads_whole_turns=False)  # rows come as the model reads them
        self._score = RewardModelScorer.from_loaded(encoded, self.tokenization, accelerator, batch_tokens)
        self._encoding = threading.Lock()  # a tokenizer holds settings of the call that it is in
        self._waiting: queue.Queue[tuple[list[SampledResponse], Future[list[float]]] | None] = queue.Queue()
        self._worker = threading.Thread(target=self._work, daemon=True)
        self._worker.start()

    def close(self) -> None:
        """Finish the calls that wait, and end the worker."""
        self._waiting.put(None)
        self._worker.join()

    def rewards(self, rows: list[SampledResponse]) -> list[float]:
        """The reward of each row, minus the model's mean over demonstrations; waits for its turn.

        Raises:
            UserError: if a row is longer than the model can read.
        """
        answer: Future[list[float]] = Future()
        self._waiting.put((rows, answer))
        return answer.result()

    def encode(self, prompt: Any, response: str) -> SampledResponse:
        """A prompt, as text or as a list of turns, and a response, both without any markup."""
        conversation = Prompt.from_row({"prompt": prompt}).prompt
        with self._encoding:
            if self._reads_whole_turns:
                ids = self.tokenization.whole_turn_ids(conversation, response)
            else:
                ids = self.tokenization.answer_ids(conversation, response, whole=False)
            return SampledResponse(conversation, *ids, response)

    def encode_rendered(self, prompt: str, query: str) -> SampledResponse:
        """A prompt as a chat template wrote it, special tokens included, and the same with its response behind it.

        Raises:
            UserError: if the query does not begin with the prompt.
        """
        if not prompt or not query.startswith(prompt):
            raise UserError("a query has to begin with its prompt, which must not be empty")
        response = query[len(prompt) :]
        with self._encoding:
            prompt_ids, response_ids = self.tokenization.rendered_ids(prompt, response, self._reads_whole_turns)
        return SampledResponse(user_turn(prompt), prompt_ids, response_ids, response)

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            calls = [call]
            while not self._waiting.empty():
                following = self._waiting.get()
                if following is None:
                    self._waiting.put(None)
                    break
                calls.append(following)
            self._answer(calls)

    def _answer(self, calls: Sequence[tuple[list[SampledResponse], Future[list[float]]]]) -> None:
        """Score several calls at once; if one of them is at fault, each by itself."""
        try:
            rewards = iter(self._score([row for rows, _ in calls for row in rows]))
            for rows, answer in calls:
                answer.set_result([next(rewards) for _ in rows])
        except (UserError, RuntimeError) as error:
            if len(calls) == 1:
                calls[0][1].set_exception(error)
                return
            for call in calls:
                self._answer([call])
