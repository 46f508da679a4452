"""Judges that answer the questions of rubrics: a frozen local model, or an OpenAI-compatible service."""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from accelerate import Accelerator

from align.batches.micro_batches import map_rows
from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.models.loading import LoadedModel, load
from align.models.roles import LanguageModel
from align.rules.rubric_settings import RubricSettings
from align.rules.rubrics import LetterJudge, RubricQuestion, RubricScorer, read_rubrics
from align.runtime.distributed import compute_dtype, run_on_main
from align.runtime.endpoint import post_json
from align.runtime.sharding import place_frozen_model
from align.tokenization.encoded import PromptResponses

TOP_LOG_PROBS = 20
"""How many candidates for the first token a service is asked for: the maximum of OpenAI's own."""
KEY_VARIABLE = "OPENAI_API_KEY"
MAX_CACHED_ANSWERS = 100_000
"""How many answers of a service are kept in memory."""


class LocalJudge:
    """A frozen language model, which reads a question once for all of its letters.

    Args:
        budget: padded tokens that are read at once.
    """

    def __init__(self, loaded: LoadedModel, accelerator: Accelerator, budget: int) -> None:
        self.loaded, self.accelerator, self.budget = loaded, accelerator, budget
        self.module = place_frozen_model(LanguageModel(loaded.backbone, loaded.adapter), accelerator)

    def __call__(self, questions: Sequence[RubricQuestion]) -> list[list[float]]:
        """The log-probability of each letter as the beginning of the answer; the same on every process.

        Raises:
            UserError: if a question is longer than the model can read.
        """
        backbone, rows = self.loaded.backbone, [self._encode(question) for question in questions]
        for row in rows:
            backbone.require_fit(len(row.prompt), max(map(len, row.responses)), "a rubric's question")
        costs = [backbone.tokens_in_memory(len(row.prompt), list(map(len, row.responses))) for row in rows]

        @torch.no_grad()
        def score_rows(batch: list[int]) -> list[list[float]]:
            part = [rows[number] for number in batch]
            device = self.accelerator.device
            prompts = Padded.from_lists([row.prompt for row in part]).to(device)
            letters = Padded.from_lists([ids for row in part for ids in row.responses]).to(device)
            index = torch.tensor([number for number, row in enumerate(part) for _ in row.responses], device=device)
            sums = iter(self.module(prompts, letters, None, 1.0, index).double().sum(1).tolist())
            return [[next(sums) for _ in row.responses] for row in part]

        return map_rows(costs, self.budget, self.accelerator, score_rows)

    def _encode(self, question: RubricQuestion) -> PromptResponses:
        tokenization = self.loaded.tokenization
        prompt, letters = tokenization.answers_ids(({"role": "user", "content": question.text},), question.letters)
        return PromptResponses(prompt, [ids[:-1] for ids in letters])


class ServiceJudge:
    """A chat model of a service, judged by the log-probs of its first token; answers are cached.

    Args:
        settings: the service's URL, the model's name there and the number of retries.
        accelerator: the main process asks for all processes.
        pause: seconds before the first retry.
    """

    def __init__(self, settings: RubricSettings, accelerator: Accelerator, pause: float = 1.0) -> None:
        self.settings, self.accelerator, self.pause = settings, accelerator, pause
        self.address = settings.rubric_service.rstrip("/") + "/chat/completions"
        self.answers: dict[RubricQuestion, list[float]] = {}

    def __call__(self, questions: Sequence[RubricQuestion]) -> list[list[float]]:
        """The log-probability of each letter; the same on every process.

        Raises:
            UserError: if the service does not answer, or gives no log-probs of the letters.
        """
        return run_on_main(lambda: self._answer(questions), self.accelerator)

    def _answer(self, questions: Sequence[RubricQuestion]) -> list[list[float]]:
        new = [question for question in dict.fromkeys(questions) if question not in self.answers]
        with ThreadPoolExecutor(self.settings.rubric_parallel) as pool:
            for question, log_probs in zip(new, pool.map(self._ask, new), strict=True):
                self.answers[question] = log_probs
        found = [self.answers[question] for question in questions]
        while len(self.answers) > MAX_CACHED_ANSWERS:
            del self.answers[next(iter(self.answers))]
        return found

    def _ask(self, question: RubricQuestion) -> list[float]:
        settings, key = self.settings, os.environ.get(KEY_VARIABLE)
        payload = {
            "model": settings.rubric_model,
            "messages": [{"role": "user", "content": question.text}],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": TOP_LOG_PROBS,
        }
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        times = (settings.rubric_timeout, settings.rubric_retries)
        answer = post_json(self.address, payload, *times, headers, self.pause, advice="")
        try:
            candidates = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            token_log_probs = [(str(each["token"]).strip(), float(each["logprob"])) for each in candidates]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{self.address}: no log-probs in the answer {str(answer)[:80]!r}") from error
        log_probs = [_log_sum([value for token, value in token_log_probs if token == letter]) for letter in question.letters]
        if max(log_probs) == -math.inf:
            letters, count = ", ".join(question.letters), len(token_log_probs)
            raise UserError(
                f"{self.address}: none of the letters {letters} is among the model's {count} likeliest answers to a rubric; "
                "take a model that follows instructions"
            )
        return log_probs


def _log_sum(values: list[float]) -> float:
    """log of the sum of exp; -infinity for none. `A` and ` A` are two tokens of one letter."""
    highest = max(values, default=-math.inf)
    return highest if highest == -math.inf else highest + math.log(sum(math.exp(value - highest) for value in values))


def load_rubrics(settings: RubricSettings, accelerator: Accelerator, dtype: str, budget: int) -> list[RubricScorer]:
    """The rubrics of a command's settings, each with the judge that all of them share.

    Args:
        dtype: of a local model, as in settings.
        budget: padded tokens that it reads at once.

    Raises:
        UserError: if a rubric or the model cannot be loaded.
    """
    rubrics = read_rubrics(settings.rubrics)
    if not rubrics:
        return []
    judge: LetterJudge
    if settings.rubric_service:
        judge = ServiceJudge(settings, accelerator)
    else:
        loaded = load(ModelConfig(model=settings.rubric_model), compute_dtype(dtype))
        judge = LocalJudge(loaded, accelerator, budget)
    return [RubricScorer(rubric, judge) for rubric in rubrics]
