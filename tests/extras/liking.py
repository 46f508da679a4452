"""A simulated labeler that is hardly ever undecided."""


def code_points(prompts, responses):
    """The sum of a response's code points."""
    return [float(sum(map(ord, response))) for response in responses]
