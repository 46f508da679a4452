"""Reward functions of tests."""

from align.ppo.toy_rewards import share_of_e


def long(prompts, responses):
    """The length of each response."""
    return [float(len(response)) for response in responses]


def letters(prompts, responses):
    """A reward that hardly ever is the same twice."""
    return [sum(map(ord, response)) / 1000 for response in responses]


def fewer_es(prompts, responses):
    """The opposite of `share_of_e`."""
    return [-value for value in share_of_e(prompts, responses)]
