"""JSON over HTTP with retries: for judges and scorers that run elsewhere."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from align.errors import UserError

WORTH_RETRYING = {408, 409, 425, 429, 500, 502, 503, 504}
"""HTTP states that may be better in a moment."""


def post_json(
    url: str,
    payload: Mapping[str, Any],
    timeout: float = 60.0,
    retries: int = 3,
    headers: Mapping[str, str] | None = None,
    pause: float = 1.0,
) -> Any:
    """Send JSON, and give the JSON that comes back.

    Args:
        timeout: seconds for one try.
        retries: further tries after a lost connection, a timeout or a state of `WORTH_RETRYING`.
        pause: seconds before the first further try; doubled each time.

    Raises:
        UserError: if no try succeeds, or the answer is not JSON.
    """
    data = json.dumps(payload).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    for attempt in range(retries + 1):
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            why = f"HTTP {error.code} {error.reason}"
            if error.code not in WORTH_RETRYING:
                raise UserError(f"{url}: {why}: {error.read(200).decode(errors='replace')}") from error
        except (TimeoutError, urllib.error.URLError, HTTPException, ConnectionError) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            why = f"no answer in {timeout:g} s" if "timed out" in str(reason) else f"cannot be reached ({reason})"
        except ValueError as error:
            raise UserError(f"{url}: the answer is not JSON ({error})") from error
        if attempt < retries:
            time.sleep(pause * 2**attempt)
    raise UserError(f"{url}: {why}, tried {retries + 1} times; what was computed before is kept: start again to go on")
