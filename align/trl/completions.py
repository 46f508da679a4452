"""Tables of sample completions, nearly greedy, with their scores."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table
from rich.text import Text

from align.core.seeds import RngStream
from align.ppo.rollout import sample_rollout
from align.ppo.setup import PPOSetup
from align.runtime.progress import console
from align.tokenization.encoded import EncodedPrompt

COMPLETION_TEMPERATURE = 0.01
COMPLETION_COLUMNS = ("query", "model response", "score")
SHOWN_COMPLETIONS = 5
"""Rows of a printed table."""


def complete_prompts(setup: PPOSetup, prompts: Sequence[EncodedPrompt], seed: int) -> list[tuple[str, str, float]]:
    """Return prompt, response and score of the current policy's completions; equal on all processes."""
    tokenizer = setup.policy.tokenization.tokenizer
    sampling = replace(setup.sampling, temperature=COMPLETION_TEMPERATURE)
    key = (seed, RngStream.VALIDATION_SAMPLES)
    rollout = sample_rollout(setup.sampler, setup.policy.tokenization, list(prompts), sampling, key)
    scores, _ = setup.rewards(rollout)
    queries = tokenizer.batch_decode([prompt.ids for prompt in prompts], skip_special_tokens=True)
    responses = tokenizer.batch_decode(rollout.responses)
    return list(zip(queries, responses, scores.tolist(), strict=True))


def print_completions(rows: Sequence[tuple[str, str, float]]) -> None:
    """Print the first rows."""
    table = Table(*COMPLETION_COLUMNS, show_lines=True)
    for query, response, score in rows[:SHOWN_COMPLETIONS]:
        table.add_row(Text(query), Text(response), f"{score:.4g}")  # text may look like markup
    console.print(table)


def log_completions_to_wandb(rows: Sequence[tuple[str, str, float]]) -> None:
    """Log a table to the active run of Weights & Biases; do nothing without one."""
    if importlib.util.find_spec("wandb") is None:
        return
    import wandb

    if wandb.run is not None:
        wandb.log({"completions": wandb.Table(columns=list(COMPLETION_COLUMNS), data=[list(row) for row in rows])})
