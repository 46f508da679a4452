"""Reward functions to try the trainer with. Custom reward functions have the same form and can be in any module.

Each takes prompts (conversations) and the text of their responses, and returns one score per response.
"""

from collections.abc import Sequence

from align.data.records import Conversation


def share_of_e(prompts: Sequence[Conversation], responses: Sequence[str]) -> list[float]:
    """Return the fraction of letters e in each response: a reward with a known optimum, 1."""
    return [response.count("e") / max(1, len(response)) for response in responses]


def brevity(prompts: Sequence[Conversation], responses: Sequence[str]) -> list[float]:
    """Return 1 for an empty response, decreasing to 0 at 100 words."""
    return [max(0.0, 1.0 - len(response.split()) / 100) for response in responses]
