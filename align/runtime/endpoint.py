"""Requests to external judges and scorers: JSON over HTTP with retries, and OpenAI-compatible chat models."""

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.exceptions import HTTPError, MaxRetryError, NewConnectionError, TimeoutError

from align.core.errors import UserError
from align.core.settings import Settings, option, require_setting

Meaning = TypeVar("Meaning")
TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504}
"""HTTP status codes that are retried."""
TIMEOUT = 60.0
"""Timeout of a chat model request, in seconds."""
RETRIES = 3
"""Number of retries of a chat model request."""
REQUEST = {"temperature": 0}
"""Fields of every chat model request."""
RESUME_HINT = "completed results are saved; rerun the command to continue"
"""Hint for errors after which completed work is kept."""
logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # suppress warnings for every attempt


@dataclass(kw_only=True)
class EndpointConfig(Settings):
    """OpenAI-compatible endpoint of a judge or scorer. Shared by several commands."""

    endpoint: str = option("", "Base URL of an OpenAI-compatible API whose chat model judges, such as http://host:8000/v1.")
    endpoint_model: str = option("", "Model name at the endpoint.")
    endpoint_key: str = option(
        "OPENAI_API_KEY", "Environment variable with the endpoint's API key. If unset, no key is sent."
    )
    endpoint_parallel: int = option(4, "Number of concurrent requests to the endpoint.", gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "endpoint_model", bool(self.endpoint_model) or not self.endpoint, "set with endpoint")


class DoublingRetry(urllib3.Retry):
    """urllib3 retries for any method and failure, including truncated bodies, with exponential backoff.

    Unlike urllib3, it also pauses before the first retry.
    """

    def get_backoff_time(self) -> float:
        return float(self.backoff_factor * 2 ** (len(self.history) - 1))


def transient_retries(retries: int = RETRIES, pause: float = 1.0, read: int | None = None) -> DoublingRetry:
    """Return the retry policy for lost connections, timeouts and the status codes in `TRANSIENT`.

    The last response is returned even if it has one of these status codes.

    Args:
        retries: maximum number of retries.
        pause: seconds before the first retry. Doubled before each further retry.
        read: maximum number of retries of requests that were sent and not answered. Default: `retries`.
    """
    return DoublingRetry(
        total=retries,
        read=read,
        redirect=False,
        status_forcelist=TRANSIENT,
        allowed_methods=None,
        backoff_factor=pause,
        raise_on_status=False,
        respect_retry_after_header=False,  # a server may request hours
    )


def post_json(
    url: str,
    payload: Mapping[str, Any],
    timeout: float = TIMEOUT,
    retries: int = RETRIES,
    headers: Mapping[str, str] | None = None,
    pause: float = 1.0,
    advice: str = RESUME_HINT,
) -> Any:
    """Post JSON and return the JSON response. Uses the proxies configured in the environment.

    Args:
        url: address of the endpoint.
        payload: JSON object to post.
        timeout: seconds per attempt.
        retries: number of retries after a lost connection, a timeout or a status in `TRANSIENT`.
        headers: headers in addition to the content type.
        pause: seconds before the first retry. Doubled before each further retry.
        advice: end of the error message after several attempts.

    Raises:
        UserError: If no attempt succeeds or the response is not JSON.
    """
    data, sent = json.dumps(payload).encode(), {"Content-Type": "application/json", **(headers or {})}
    tried = f"tried {retries + 1} times" + (f"; {advice}" if advice else "")
    try:
        with _connections(url) as connections:
            answer = connections.request(
                "POST", url, body=data, headers=sent, timeout=timeout, retries=transient_retries(retries, pause)
            )
    except MaxRetryError as error:
        if isinstance(error.reason, TimeoutError) and not isinstance(error.reason, NewConnectionError):
            raise UserError(f"{url}: no response within {timeout:g} s, {tried}") from error
        raise UserError(f"{url}: cannot be reached ({_cause(error.reason or error)}), {tried}") from error
    except HTTPError as error:
        raise UserError(f"{url}: cannot be reached ({_cause(error)})") from error
    if answer.status in TRANSIENT:
        raise UserError(f"{url}: HTTP {answer.status} {answer.reason}, {tried}")
    if answer.status >= 300:
        raise UserError(f"{url}: HTTP {answer.status} {answer.reason}: {answer.data[:200].decode(errors='replace')}")
    try:
        return json.loads(answer.data)
    except ValueError as error:
        raise UserError(f"{url}: the response is not JSON ({error})") from error


def _connections(url: str) -> urllib3.PoolManager:
    """Return connections to a URL, through the environment's proxy if set.

    Raises:
        UserError: If the URL cannot be parsed.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UserError(f"{url}: invalid URL ({error})") from error
    proxy = getproxies().get(parts.scheme)
    if proxy and not proxy_bypass(parts.hostname or ""):
        return urllib3.ProxyManager(proxy)
    return urllib3.PoolManager()


def _cause(error: Exception) -> str:
    """Return the root cause of a urllib3 error in one line."""
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]


def question_version(question: str) -> str:
    """Return 12 hex digits of the hash of a question template and `REQUEST`."""
    return hashlib.sha256(json.dumps([question, REQUEST]).encode()).hexdigest()[:12]


def request_verdicts(
    config: EndpointConfig, questions: Sequence[str], meanings: Mapping[str, Meaning], advice: str = RESUME_HINT
) -> list[Meaning]:
    """Ask the endpoint's chat model each distinct question at temperature 0, and parse its verdicts.

    Args:
        config: endpoint.
        questions: questions to ask.
        meanings: word after `VERDICT:`, in capitals -> meaning. The last verdict in a response counts.
        advice: end of error messages.

    Raises:
        UserError: If the service does not respond or a response contains no verdict.
    """
    verdict = re.compile(rf"VERDICT:?\W*({'|'.join(meanings)})\b", re.IGNORECASE)
    address, key = config.endpoint.rstrip("/") + "/chat/completions", os.environ.get(config.endpoint_key)
    headers, end = {"Authorization": f"Bearer {key}"} if key else {}, f"; {advice}" if advice else ""

    def ask(question: str) -> Meaning:
        payload = {"model": config.endpoint_model, **REQUEST, "messages": [{"role": "user", "content": question}]}
        answer = post_json(address, payload, TIMEOUT, RETRIES, headers, advice=advice)
        try:
            text = str((answer["choices"][0].get("message") or {}).get("content"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UserError(f"{address}: the response has no choices[0]: {str(answer)[:80]!r}{end}") from error
        named = verdict.findall(text)
        if not named:
            raise UserError(f"{address}: no verdict in the response {text[-80:]!r}{end}")
        return meanings[named[-1].upper()]

    distinct = list(dict.fromkeys(questions))
    with ThreadPoolExecutor(config.endpoint_parallel) as pool:
        verdicts = dict(zip(distinct, pool.map(ask, distinct), strict=True))
    return [verdicts[question] for question in questions]
