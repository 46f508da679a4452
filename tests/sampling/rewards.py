"""The prompts of the runs with vLLM, and a reward that differs from text to text."""

PROMPTS = ("Hi", "Count to three.", "What?")


def letters(prompts, responses):
    """The sum of a response's code points modulo 7, in 0 to 6."""
    return [float(sum(map(ord, response)) % 7) for response in responses]
