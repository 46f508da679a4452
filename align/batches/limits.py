"""Token limits of prompts and responses, and counts of overlong records."""

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from align.core.errors import UserError
from align.core.settings import Overlong
from align.tokenization.encoded import PromptResponse

logger = logging.getLogger(__name__)
MIN_KEPT = 0.1
"""Minimum fraction of records that `overlong: drop` must keep. Below it, the limits are probably wrong."""
REMEDY = "raise the limit, or set overlong to drop or truncate"


class OverlongError(UserError):
    """Raised for an overlong record, after all overlong records of the source have been counted."""


@dataclass(frozen=True)
class Limits:
    """Maximum prompt and response lengths in tokens, and how to handle longer ones.

    Attributes:
        overlong: `error` raises an error; `drop` leaves out; `truncate` keeps a prompt's end with its start token and
            system turn, and a response's beginning.
        settings: names of the settings of the two limits, for messages.
    """

    prompt: int
    response: int
    overlong: Overlong = "error"
    settings: tuple[str, str] = ("max_prompt_tokens", "max_response_tokens")

    def exceeded(self, prompt: Sequence[int], response: Sequence[int]) -> dict[str, int]:
        """Return the number of tokens of each limit that is exceeded, by setting name."""
        lengths = zip((len(prompt), len(response)), (self.prompt, self.response), self.settings, strict=True)
        return {setting: length for length, limit, setting in lengths if length > limit}

    def apply(
        self, prompt: list[int], response: list[int], where: str, fixed: tuple[int, int] = (0, 0)
    ) -> PromptResponse | None:
        """Truncate a prompt and a response to the limits, or return None if they are dropped.

        Args:
            fixed: numbers of tokens to keep at the prompt's beginning and at the response's end.
        """
        too_long = self.exceeded(prompt, response)
        if too_long and self.overlong == "error":
            is_prompt = len(prompt) > self.prompt
            what = f"prompt has {len(prompt)}" if is_prompt else f"response has {len(response)}"
            limit = f"{next(iter(too_long))} is {self.prompt if is_prompt else self.response}"
            raise OverlongError(f"{where}: the {what} tokens, {limit}; {REMEDY}")
        if too_long and self.overlong == "drop":
            return None
        before, after = fixed
        if len(prompt) > self.prompt:
            prompt = [*prompt[:before], *prompt[len(prompt) - max(self.prompt - before, 0) :]]
        if len(response) > self.response:
            response = [*response[: max(self.response - after, 0)], *response[len(response) - after :]]
        return PromptResponse(prompt, response)


class OverlongCounts:
    """Count overlong records: total, dropped, truncated."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.records = self.dropped = self.cut = 0
        self.over: Counter[str] = Counter()
        self.longest: dict[str, int] = {}
        self.error: OverlongError | None = None

    def add(self, over: Mapping[str, int], kept: int) -> None:
        """Count a record that exceeds the limits in `over` and has `kept` examples left."""
        self.records += 1
        self.over.update(over.keys())
        for setting, tokens in over.items():
            self.longest[setting] = max(tokens, self.longest.get(setting, 0))
        self.dropped += bool(over and not kept)
        self.cut += bool(over and kept)

    def raise_error(self, kind: str) -> None:
        """Raise the error of the first overlong record, with the total counts."""
        if self.error is None:
            return
        if self.dropped == 1:
            raise self.error
        longest = ", ".join(f"the longest {tokens}" for tokens in self.longest.values())
        all_of_them = f"{self.dropped} of {self.records} {kind}s are too long: {self._over_which()}; {longest}"
        raise UserError(f"{self.error} ({all_of_them})") from self.error

    def report(self, source: str, kind: str) -> None:
        """Log the number of dropped or truncated records on the first process. `kind` is the singular noun for a record.

        Raises:
            UserError: if overlong records are an error, or too few are left.
        """
        self.raise_error(kind)
        left = self.records - self.dropped
        if self.dropped and not left:
            wrong = f"all {kind}s exceed the limits; raise them, or set overlong to truncate"
            raise UserError(f"{source}: {wrong} ({self._over_which()} of {self.records})")
        if self.dropped and left < MIN_KEPT * self.records:
            wrong = (
                f"overlong drop leaves {left} of {self.records} {kind}s ({self._over_which()}), fewer than {MIN_KEPT:.0%}"
            )
            raise UserError(f"{source}: {wrong}; raise the limit, set overlong to truncate, or remove the long rows")
        if not self.over or os.environ.get("RANK", "0") != "0":
            return
        overlong = self.limits.overlong
        done = f"{'truncated' if overlong == 'truncate' else 'dropped turns of'} {self.cut} of {self.records} {kind}s"
        if self.dropped:
            turns = f", and turns of {self.cut} more" if self.cut else ""
            done = f"dropped {self.dropped} of {self.records} {kind}s{turns}"
        logger.warning("%s: %s (%s)", source, done, self._over_which())

    def _over_which(self) -> str:
        values = dict(zip(self.limits.settings, (self.limits.prompt, self.limits.response), strict=True))
        return ", ".join(f"{count} over {setting} {values[setting]}" for setting, count in self.over.items())
