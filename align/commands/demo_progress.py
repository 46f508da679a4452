"""The lines that the demo prints between its parts: prompts with the models' answers so far, and the time of each part."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from accelerate import Accelerator

from align.core.seeds import RngStream
from align.core.settings import ModelConfig
from align.data.records import Prompt
from align.models.loading import load
from align.runtime.distributed import compute_dtype, computes_on_cpu
from align.sampling.generation import SamplingParams, row_uniforms, sample

WIDTH = 160
"""Characters of a prompt or an answer that are printed."""


class PartTimes:
    """Seconds of each part of the demo, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part, whose name is printed at its start."""
        print(f"\n== {name} ==", flush=True)
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started

    def __str__(self) -> str:
        """One line with the minutes and seconds of each part and of all."""
        times = self.seconds | {"total": sum(self.seconds.values())}
        return "time: " + ", ".join(f"{name} {_minutes(value)}" for name, value in times.items())


def sample_answers(model: ModelConfig, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[str]:
    """Sample one answer of a model to each prompt."""
    loaded = load(ModelConfig(model=model.model, chat_template=model.chat_template), compute_dtype(model.dtype))
    loaded.backbone.requires_grad_(False).to(Accelerator(cpu=computes_on_cpu()).device)
    ids = [loaded.tokenization.prompt_ids(prompt.prompt) for prompt in prompts]
    uniforms = row_uniforms(len(ids), sampling, seed, RngStream.POLICY_COMPARISON)
    responses = sample(loaded.backbone, ids, uniforms, sampling, loaded.tokenization.end_ids)
    return [loaded.tokenization.text(response) for response in responses.ids]


def print_answers(
    prompts: Sequence[Prompt], answers: Mapping[str, Sequence[str]], rewards: Mapping[str, Sequence[float]] | None = None
) -> None:
    """Print each prompt with the answers of some models.

    Args:
        answers: the name of a model -> its answer to each prompt.
        rewards: the name of a model -> the reward of each answer, where there are any.
    """
    width = max(map(len, ("prompt", *answers)))
    for i, prompt in enumerate(prompts):
        print(f"  {'prompt':<{width}}  {_one_line(prompt.prompt[-1]['content'])}")
        for name, texts in answers.items():
            reward = f"  [reward {rewards[name][i]:+.2f}]" if rewards else ""
            print(f"  {name:<{width}}  {_one_line(texts[i]) or '(empty)'}{reward}")
    print(flush=True)


def _one_line(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= WIDTH else words[: WIDTH - 3] + "..."


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
