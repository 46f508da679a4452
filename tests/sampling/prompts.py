"""The prompts of the runs with vLLM."""

PROMPTS = ("Hi", "Count to three.", "What?")
