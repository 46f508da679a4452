"""Verdicts of a chat model at an OpenAI-compatible service; the questions are in `winrate.by_judge` and `rules.scorers`."""

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from align.core.errors import UserError
from align.core.settings import option, require_setting
from align.eval.core.settings import EvalConfig
from align.runtime.endpoint import RESUME_HINT, post_json


@dataclass(kw_only=True)
class ChatJudgeConfig(EvalConfig):
    """How the judging service is called."""

    judge_model: str = option("", "chat judge: name of the model")
    key_variable: str = option(
        "OPENAI_API_KEY", "chat judge: environment variable that holds the API key; if it is unset, no key is sent"
    )
    timeout: float = option(60.0, "chat judge: seconds per request")
    retries: int = option(3, "chat judge: retries per request")
    parallel: int = option(4, "chat judge: requests at the same time")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "timeout", self.timeout > 0, "above 0")
        require_setting(self, "retries", self.retries >= 0, "0 or more")
        require_setting(self, "parallel", self.parallel > 0, "above 0")


def request_verdicts(
    url: str, service: ChatJudgeConfig, questions: Sequence[str], probabilities: Mapping[str, float], pause: float = 1.0
) -> list[float]:
    """Ask each question separately, at temperature 0, and return the probability that each verdict maps to.

    Args:
        url: the part before `/chat/completions`.
        service: model, key, timeout, retries.
        questions: what the model is asked.
        probabilities: by the words that may follow `VERDICT:`, in capitals; an answer's last verdict counts.
        pause: seconds before the first retry.

    Raises:
        UserError: if the service does not answer, or an answer contains no verdict.
    """
    address = url.rstrip("/") + "/chat/completions"
    key = os.environ.get(service.key_variable)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    verdict = re.compile(rf"VERDICT:?\W*({'|'.join(probabilities)})\b", re.IGNORECASE)

    def ask(question: str) -> float:
        payload = {"model": service.judge_model, "temperature": 0, "messages": [{"role": "user", "content": question}]}
        answer = post_json(address, payload, service.timeout, service.retries, headers, pause)
        try:
            text = str(answer["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"{address}: the reply has no choices[0].message.content: {str(answer)[:80]!r}; {RESUME_HINT}"
            ) from error
        named = verdict.findall(text)
        if not named:
            raise UserError(f"{address}: no verdict in the answer {text[-80:]!r}; {RESUME_HINT}")
        return probabilities[named[-1].upper()]

    with ThreadPoolExecutor(service.parallel) as pool:
        return list(pool.map(ask, questions))
