"""Verdicts of a chat model at an endpoint; the questions are in `winrate.by_judge` and `rules.scorers`."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from align.core.errors import UserError
from align.runtime.endpoint import RESUME_HINT, EndpointConfig, chat_address, chat_completion


def request_verdicts(
    config: EndpointConfig, questions: Sequence[str], probabilities: Mapping[str, float], pause: float = 1.0
) -> list[float]:
    """Ask each question separately and return the probability that its verdict maps to.

    Args:
        probabilities: by the words that may follow `VERDICT:`, in capitals; an answer's last verdict counts.
        pause: seconds before the first retry.

    Raises:
        UserError: if the service does not answer, or an answer contains no verdict.
    """
    verdict = re.compile(rf"VERDICT:?\W*({'|'.join(probabilities)})\b", re.IGNORECASE)

    def ask(question: str) -> float:
        choice = chat_completion(config, question, pause)
        text = str((choice.get("message") or {}).get("content"))
        named = verdict.findall(text)
        if not named:
            raise UserError(f"{chat_address(config)}: no verdict in the answer {text[-80:]!r}; {RESUME_HINT}")
        return probabilities[named[-1].upper()]

    with ThreadPoolExecutor(config.endpoint_parallel) as pool:
        return list(pool.map(ask, questions))
