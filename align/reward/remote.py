"""A reward model behind a URL: this package's server, OpenRLHF's `get_reward`, vLLM's `classify` and `pooling`.

| path | request | response |
| --- | --- | --- |
| none or `/score` | `{"messages": [[{role, content}, ...], ...]}` | `{"rewards": [...]}` |
| `/get_reward` (OpenRLHF) | `{"query": [...], "prompts": [...], "labels": [...]}` | `{"rewards": [...]}` |
| `/classify` (vLLM, verl) | `{"messages": [...], "use_activation": false}` | `{"data": [{"probs": [...]}]}` |
| `/pooling` (vLLM) | `{"messages": [...]}` | `{"data": [{"data": [...]}]}` |
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from align.core.errors import UserError, short_repr
from align.core.plugins import checked_scores
from align.data.conversation import as_paragraphs, to_json
from align.data.records import Conversation
from align.reward.text_scoring import TextAnswer
from align.runtime.endpoint import post_json

TOKEN = "ALIGN_SERVE_TOKEN"
"""Environment variable with the bearer token of server and client."""
TIMEOUT, RETRIES, PAUSE = 180.0, 5, 2.0
"""Timeout of a request in seconds (OpenRLHF: 180), number of retries, and seconds before the first retry, then doubled."""
AT_ONCE, PARALLEL = 64, 8
"""Number of answers per request, and concurrent requests to a server that accepts one conversation each."""
FORMATS = ("score", "get_reward", "classify", "pooling")
"""Last part of an address, which selects the format."""
Render = Callable[[Conversation, str], tuple[str, str]]
"""Maps a conversation and a response to the text of the prompt, and of both, in the policy's chat template."""


def is_url(name: str) -> bool:
    """Return whether the name of a reward model is an address."""
    return name.startswith(("http://", "https://"))


class RemoteRewardModel:
    """A reward model behind a URL, called as a reward function: prompts and responses to scores.

    The environment variable `ALIGN_SERVE_TOKEN` holds the bearer token, if the server requires one.

    Args:
        url: the address, whose path selects the format. Without a path, this package's format.
        render: renders text for OpenRLHF's format. Default: paragraphs that begin with the role.

    Raises:
        UserError: if the address has no host, or its path names no format.
    """

    def __init__(self, url: str, render: Render | None = None) -> None:
        try:
            parts = urlsplit(url)
            path, has_host = parts.path.rstrip("/"), bool(parts.hostname and parts.port != 0)
        except ValueError as error:
            raise UserError(f"reward_model '{url}': not an address ({error})") from error
        if not has_host:
            raise UserError(f"reward_model '{url}': not an address; write http://HOST:PORT")
        self.format = path.rpartition("/")[2] or "score"
        if self.format not in FORMATS:
            paths = ", ".join(f"/{name}" for name in FORMATS)
            raise UserError(f"reward_model '{url}': the path is none of {paths}, which name the format of the server")
        self.url = url if path else url.rstrip("/") + "/score"
        self.render = render or _as_paragraphs
        self.__name__ = "remote"

    def __call__(self, prompts: Sequence[Conversation], responses: Sequence[str]) -> list[float]:
        """Return the score of each response.

        Raises:
            UserError: if the server cannot be reached or rejects the request, or a score is not a finite number.
        """
        return self.score([TextAnswer(prompt, text) for prompt, text in zip(prompts, responses, strict=True)])

    def check(self) -> None:
        """Score one short answer. Raise a UserError, without further attempts, if the server does not answer."""
        self._request([TextAnswer(({"role": "user", "content": "Name a color."},), "Blue.")], retries=0)

    def score(self, answers: Sequence[TextAnswer], retries: int | None = None) -> list[float]:
        """Return the score of each answer. For errors, see `__call__`."""
        size = 1 if self.format in ("classify", "pooling") else AT_ONCE
        parts = [answers[start : start + size] for start in range(0, len(answers), size)]
        with ThreadPoolExecutor(PARALLEL if size == 1 else 1) as pool:
            return [score for scores in pool.map(lambda part: self._request(part, retries), parts) for score in scores]

    def _request(self, answers: Sequence[TextAnswer], retries: int | None = None) -> list[float]:
        token = os.environ.get(TOKEN)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        attempts = RETRIES if retries is None else retries
        try:
            given = post_json(self.url, self._payload(answers), TIMEOUT, attempts, headers, PAUSE, advice="")
        except UserError as error:
            hint = f"; set {TOKEN} to the server's token" if "HTTP 401" in str(error) else ""
            raise UserError(f"reward_model {error}{hint}") from error
        scores = self._scores(given)
        return checked_scores(
            scores,
            len(answers),
            f"reward_model {self.url}",
            items="responses",
            describe=lambda index: f"the response {answers[index].text[:60]!r}",
        )

    def _payload(self, answers: Sequence[TextAnswer]) -> dict[str, Any]:
        conversations = [to_json((*answer.prompt, {"role": "assistant", "content": answer.text})) for answer in answers]
        if self.format == "score":
            return {"messages": conversations, "ended": [answer.ended for answer in answers]}
        if self.format == "get_reward":
            texts = [self.render(answer.prompt, answer.text) for answer in answers]
            return {
                "query": [whole for _, whole in texts],
                "prompts": [prompt for prompt, _ in texts],
                "labels": [""] * len(texts),
            }
        more = {"use_activation": False} if self.format == "classify" else {}
        return {"messages": conversations[0], "add_generation_prompt": False, **more}

    def _scores(self, given: Any) -> list[Any]:
        try:
            if self.format in ("score", "get_reward"):
                return list(given["rewards"])
            part = given["data"][0]
            value = part["probs"] if self.format == "classify" else part["data"]
            while isinstance(value, Sequence) and not isinstance(value, str):  # the last of several tokens
                value = value[-1]
            return [value]
        except (KeyError, IndexError, TypeError) as error:
            wanted = {"classify": "data[0].probs", "pooling": "data[0].data"}.get(self.format, "rewards")
            raise UserError(f"reward_model {self.url}: no {wanted} in its answer {short_repr(given)}") from error


def _as_paragraphs(conversation: Conversation, text: str) -> tuple[str, str]:
    prompt = as_paragraphs(conversation) + "\n\n"
    return prompt, prompt + text
