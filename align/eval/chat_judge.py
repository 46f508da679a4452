"""Verdicts of a chat model behind an OpenAI-compatible service; who asks what is in `judges` and `rule_scorers`."""

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from align.config import option, require
from align.errors import UserError
from align.eval.endpoint import post_json
from align.eval.settings import EvalConfig

KEPT = "what was judged is kept: start again to go on"


@dataclass(kw_only=True)
class ChatJudgeConfig(EvalConfig):
    """How a service is asked that judges."""

    judge_model: str = option("", "of a service: the model's name")
    key_variable: str = option(
        "OPENAI_API_KEY", "of a service: the environment variable with its key; none is sent without it"
    )
    timeout: float = option(60.0, "of a service: seconds for one answer")
    retries: int = option(3, "of a service: further tries after a failed one")
    parallel: int = option(4, "of a service: questions under way at once")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "timeout", self.timeout > 0, "above 0")
        require(self, "retries", self.retries >= 0, "0 or more")
        require(self, "parallel", self.parallel > 0, "above 0")


def verdicts(
    url: str, service: ChatJudgeConfig, questions: Sequence[str], chances: Mapping[str, float], pause: float = 1.0
) -> list[float]:
    """Ask each question by itself, at temperature 0; gives the number that `chances` has for each verdict.

    Args:
        url: what stands before `/chat/completions`.
        chances: from the words that may follow `VERDICT:`, in capitals; the last verdict of an answer counts.
        pause: seconds before the first further try.

    Raises:
        UserError: if the service does not answer or an answer holds no verdict.
    """
    address = url.rstrip("/") + "/chat/completions"
    key = os.environ.get(service.key_variable)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    verdict = re.compile(rf"VERDICT:?\W*({'|'.join(chances)})\b", re.IGNORECASE)

    def ask(question: str) -> float:
        payload = {"model": service.judge_model, "temperature": 0, "messages": [{"role": "user", "content": question}]}
        answer = post_json(address, payload, service.timeout, service.retries, headers, pause)
        try:
            said = str(answer["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"{address}: no answer in {str(answer)[:80]!r}; {KEPT}") from error
        found = verdict.findall(said)
        if not found:
            raise UserError(f"{address}: no verdict in the answer {said[-80:]!r}; {KEPT}")
        return chances[found[-1].upper()]

    with ThreadPoolExecutor(service.parallel) as pool:
        return list(pool.map(ask, questions))
