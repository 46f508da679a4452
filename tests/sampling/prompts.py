"""The prompts of the runs with a vLLM server."""

PROMPTS = ("Hi", "Count to three.", "What?")
