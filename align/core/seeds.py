"""Named random streams of a run.

A stream is keyed by the run's seed, the stream's number and further numbers such as the update. An exact resume therefore
requires no saved state, and no two purposes share random numbers. torch's generator only initializes new weights, which a
resume overwrites. Dropout and the like are disabled (`align.models.backbone.determinism.disable_dropout`).
"""

from enum import IntEnum

import numpy


class RngStream(IntEnum):
    """Purpose of random numbers. The values are part of every result: add new ones, never change or reuse one."""

    DATA_ORDER = 1
    """The order of a pass over training examples or prompts."""
    ROLLOUT = 2
    """The tokens of a PPO rollout."""
    VALIDATION_SAMPLES = 3
    """The tokens of PPO's evaluations on fixed prompts, the same at every evaluation."""
    MINIBATCH_ORDER = 4
    """The order of a rollout's rows in each epoch."""
    PTX_ROWS = 5
    """The examples in the ptx loss of an optimizer step, and the parts removed from them."""
    SAMPLE_COMMAND = 6
    """The tokens of `align sample`."""
    JUDGE_SPLIT = 7
    """The held-out questions when a judge is trained."""
    TRUTHFUL_ANSWERS = 8
    """The tokens of answers to TruthfulQA questions."""
    EVALUATION_ANSWERS = 9
    """The tokens of answers for win rates and best-of-n."""
    POLICY_COMPARISON = 10
    """Tokens of two policies compared on the same prompts with the same random numbers."""
    TOXICITY_CONTINUATIONS = 11
    """The tokens of continuations that are scored for toxicity."""
    MIXTURE_ORDER = 12
    """The order of a pass over one source of a mixture."""
    LOOP_PROMPTS = 13
    """The prompts to label in a round of `align loop`, and its held-out rankings."""
    BIAS_COMPLETIONS = 14
    """The tokens of completions about groups of people."""
    BEST_OF = 15
    """The tokens of best-of-n answers, as a baseline for a policy."""
    # 16 to 19 are unused.
    HELD_OUT_CONVERSATIONS = 20
    """The held-out conversations when a model is trained on judgments."""
    CHAT = 21
    """The tokens of answers in `align chat`."""
    TEXT_OBJECTIVE = 22
    """The parts of raw text that are masked or removed in an update of fine-tuning."""


SeedKey = tuple[int, RngStream, *tuple[int, ...]]
"""Arguments of `generator`: the run's seed, the stream, and numbers that distinguish draws from the same stream."""


def generator(seed: int, stream: RngStream, *key: int) -> numpy.random.Generator:
    """Return a random generator for one purpose. `key` (update, epoch) distinguishes draws from the same stream."""
    # NumPy's seed sequences separate the streams; torch's CPU generator uses only 32 bits of its seed.
    return numpy.random.Generator(numpy.random.Philox(numpy.random.SeedSequence(seed, spawn_key=(stream, *key))))


def row_seeds(rows: int, seed: int, stream: RngStream, *key: int) -> list[int]:
    """Return one seed per row, for sampling engines that draw random numbers themselves."""
    return [int(number) for number in generator(seed, stream, *key).integers(2**62, size=rows)]
