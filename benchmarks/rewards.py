"""The reward of the race, known to the last digit; both sides call it with the text of their responses."""

from collections.abc import Sequence

TOKENS = 16
"""Longest response of the race: with a letter in each of its places the reward is 1."""


def letters(prompts: Sequence[object], responses: Sequence[str]) -> list[float]:
    """Lower-case letters in a response over the most there could be: 1 is the optimum, 26/264 the start."""
    return [sum("a" <= letter <= "z" for letter in response) / TOKENS for response in responses]
