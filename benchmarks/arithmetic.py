"""The least time that each piece of work can take on this machine: operations over the measured rate of bfloat16 matrix
products, and bytes over the measured bandwidth.

Counted is what our way of doing the work cannot do without: a prompt is read once, the vocabulary matrix meets response
positions alone, nothing is computed on padding. A token costs 2 operations a weight forward and twice that backward
(Kaplan et al. 2020, table 1), attention 4 a layer, a unit of width and a token that it looks at (PaLM, appendix B). MFU
is these operations a second over the measured rate.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import Line, Summary, runs, summarize
from benchmarks.workloads import LORA_RANK, PPO_EPOCHS, SCALES, WORKS, Work, scaled

TRAINING = 3
"""A backward pass costs twice a forward pass."""
BYTES = 2
"""Of a weight or a cached state in bfloat16."""
ADAM_BYTES = 4 * (3 + 4) + 2
"""Moved for a weight by an AdamW step: master, two moments and gradient are read, the first three written; the copy too."""


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes.

    Attributes:
        body: weights of all layers.
        vocabulary: weights of the matrix that turns states into logits.
    """

    layers: int
    width: int
    cached: int
    body: int
    vocabulary: int

    @classmethod
    def from_model(cls, model: Path) -> "Shape":
        """Of a Llama's config.json."""
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        width, inner, layers = (config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
        head = config.get("head_dim") or width // config["num_attention_heads"]
        queries, cached = head * config["num_attention_heads"], head * config["num_key_value_heads"]
        layer = 2 * width * queries + 2 * width * cached + 3 * width * inner + 2 * width
        return cls(layers, queries, cached, layers * layer + width, config["vocab_size"] * width)

    def forward(self, prompt: float, responses: int, response: float, logits: bool) -> float:
        """Operations of reading a prompt with some responses to it, each of which sees the prompt and itself."""
        seen = prompt**2 / 2 + responses * (response * prompt + response**2 / 2)
        tokens = prompt + responses * response
        return (
            2 * self.body * tokens
            + 4 * self.layers * self.width * seen
            + (2 * self.vocabulary * responses * response if logits else 0)
        )

    def decode_bytes(self, rows: int, prompt: float, response: float) -> float:
        """Bytes of sampling: each step reads all weights once, and the cache of every row."""
        cache = 2 * self.layers * self.cached * rows * (prompt * response + response**2 / 2)
        return BYTES * (response * (self.body + self.vocabulary) + cache)


@dataclass(frozen=True)
class Cost:
    """Of a step: floating-point operations; and bytes where it is memory that holds up, which adds to them."""

    flops: float
    bytes: float

    def seconds(self, flops_rate: float, byte_rate: float) -> float:
        """The least time at the measured rates (a second)."""
        return self.flops / flops_rate + self.bytes / byte_rate


def cost(work: Work, shape: Shape) -> Cost:
    """Of one step of our way of doing the work; a span of lengths counts with its middle."""
    prompt, response = sum(work.prompt) / 2, sum(work.response) / 2
    weights = shape.body + shape.vocabulary
    update = ADAM_BYTES * weights
    read_once = work.rows * shape.forward(prompt, work.responses, response, work.stage != "reward")
    if work.stage == "sampling":
        return Cost(read_once, shape.decode_bytes(work.rows, prompt, response))
    if work.stage != "ppo":
        return Cost(TRAINING * read_once, update)
    scored = work.rows * shape.forward(prompt, 1, response, False)
    roles = 2 if work.settings.get("critic") == "separate" else 1
    epochs = work.settings.get("epochs", PPO_EPOCHS)
    trained = epochs * (TRAINING * read_once + (roles - 1) * TRAINING * scored)
    if work.settings.get("lora_rank"):  # no gradient of the frozen matrices: 2 of 3 parts remain, and hardly an update
        trained, update = trained * 2 / TRAINING, update * LORA_RANK / shape.width
    sampled = Cost(read_once, shape.decode_bytes(work.rows, prompt, response))
    passes = 2 * read_once + roles * scored  # policy and reference with logits, the reward model and a critic without
    return Cost(sampled.flops + passes + trained, sampled.bytes + epochs * roles * update)


def rows(lines: Sequence[Line], model: Path, scale: str) -> list[tuple[Summary, Cost, float, float]]:
    """Of each measured piece of work: its summary, its cost, the least seconds of a step, and our median."""
    rates, shape, found = rates_of(lines), Shape.from_model(model), []
    for work in WORKS:
        summary = summarize(work, lines)
        if summary is None or work.stage == "race":
            continue
        spent = cost(scaled(work, SCALES[scale]), shape)
        ours = statistics.median(seconds for line in runs(lines, work.name, "ours") for seconds in line["seconds"])
        found.append((summary, spent, spent.seconds(*rates), ours))
    return found


def rates_of(lines: Sequence[Line]) -> tuple[float, float]:
    """Operations and bytes a second, as they were measured."""
    machine = next(line["machine"] for line in reversed(lines) if "machine" in line)
    return machine["bfloat16_tflops"] * 1e12, machine["bandwidth_gb"] * 1e9


def report(lines: Sequence[Line], model: Path, scale: str) -> list[str]:
    """The lines of a Markdown table."""
    text = ["| work | TFLOP a step | GB a step | least s | our s | times the least | MFU |", "|" + " --- |" * 7]
    for summary, spent, least, seconds in rows(lines, model, scale):
        used = spent.flops / seconds / rates_of(lines)[0]
        figures = f"{spent.flops / 1e12:.2f} | {spent.bytes / 1e9:.1f} | {least:.2f} | {seconds:.2f} | {seconds / least:.1f}"
        text.append(f"| {summary.work.name} | {figures} | {used:.0%} |")
    return text
