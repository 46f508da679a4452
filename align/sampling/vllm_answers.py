"""Checks that what vLLM returned for a row is a response to that row's prompt."""

import math
from collections.abc import Collection, Sequence


def require_answer(
    ids: Sequence[int], log_probs: Sequence[float], max_new_tokens: int, vocabulary: int, ends: Collection[int]
) -> None:
    """Refuse a response that sampling cannot have given.

    Args:
        ids: the response's tokens [T].
        log_probs: of each token [T].
        max_new_tokens: the most tokens that were asked for.
        vocabulary: the number of the model's tokens.
        ends: tokens that end a response.

    Raises:
        ValueError: if it is empty, too long, cut off, continues after its end, or holds a token or log-prob that cannot be.
    """
    if not ids or len(ids) != len(log_probs):
        raise ValueError(f"it returned {len(ids)} tokens with {len(log_probs)} log-probs")
    if len(ids) > max_new_tokens:
        raise ValueError(f"it returned {len(ids)} tokens, but at most {max_new_tokens} were asked for")
    for id in ids:
        if not 0 <= id < vocabulary:
            raise ValueError(f"it returned token {id}, but the model has tokens 0 to {vocabulary - 1}")
    for log_prob in log_probs:
        if not math.isfinite(log_prob):
            raise ValueError(f"it returned a log-prob of {log_prob}")
    if any(id in ends for id in ids[:-1]):
        raise ValueError("it returned tokens after the token that ends a response")
    if ids[-1] not in ends and len(ids) < max_new_tokens:
        raise ValueError(f"it returned {len(ids)} tokens without an end, of {max_new_tokens} that were asked for")
