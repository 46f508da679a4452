"""`align sample`: a model's responses to a file of prompts, as rows that the labelling app imports."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.progress import Progress

from align.config import ModelConfig, option, require
from align.data.conversation import to_json
from align.distributed import compute_dtype
from align.encoding import EncodedPrompt, Limits, encode_prompts
from align.errors import UserError
from align.files import write_text
from align.generation import noise, sample
from align.inference import AnsweringConfig
from align.models.loading import Loaded, load
from align.reward.checkpoint import LoadedReward, is_reward_model, load_head, load_reward_model
from align.reward.scoring import Answer, RewardModelScorer
from align.run import console

SAMPLES = 6
"""What the random numbers are for: the second part of a seed, as in `align.ppo.rollout`."""


@dataclass(kw_only=True)
class SampleConfig(AnsweringConfig):
    """Responses of a model to prompts."""

    model: str = option("", "model to sample from: a folder, a hub name or a built-in model")
    prompts: str = option("data/prompts.jsonl", "prompts: file, folder or hub name")
    output: str = option("", "JSON Lines file to write; it must not be there yet")
    samples_per_prompt: int = option(1, "responses that are kept for each prompt")
    best_of: int = option(1, "responses drawn for each one that is kept, the best by reward_model; 1: no choice")
    reward_model: str = option("", "folder of a reward model whose rewards are written too; empty: none")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model", "output"):
            require(self, name, bool(getattr(self, name)), "given")
        for name in ("samples_per_prompt", "best_of"):
            require(self, name, getattr(self, name) > 0, "above 0")
        require(self, "best_of", self.best_of == 1 or bool(self.reward_model), "1, unless reward_model is given")
        require(self, "output", self.output.endswith(".jsonl"), "a name that ends in .jsonl")


def run_sample(config: SampleConfig) -> Path:
    """Sample responses and write them; gives the file.

    A row holds `prompt`, `responses` [n], `model` [n] (which model wrote each), `id`, `category` where the prompt has
    one, and `rewards` [n] with a reward model. Responses come in the order in which they were drawn.

    Raises:
        UserError: for anything that the settings or the data have wrong; the output is written whole or not at all.
    """
    target = Path(config.output)
    if target.exists():
        raise UserError(f"{target} is already there; give another output, or remove it")
    if config.reward_model and not is_reward_model(config.reward_model):
        load_head(config.reward_model, 0)  # says so before the model is loaded
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = ModelConfig(model=config.model, chat_template=config.chat_template, dtype=config.dtype)
    loaded = load(settings, compute_dtype(config.dtype))
    loaded.backbone.to(device).eval().requires_grad_(False)
    limits = Limits(config.max_prompt_tokens, config.max_new_tokens, config.overlong)
    asked = encode_prompts(config.prompts, loaded, limits, config.skip_bad_rows)
    copies = config.samples_per_prompt * config.best_of
    drawn = [prompt for prompt in asked for _ in range(copies)]
    responses = _respond(config, loaded, drawn)
    texts = [loaded.tokenization.text(ids) for ids in responses]
    rewards: list[float] | None = None
    if config.reward_model:
        reward = load_reward_model(config.reward_model, config.dtype)
        reward.model.to(device)
        rewards = score(loaded, reward, drawn, responses, texts, config.batch_tokens)
    rows = [
        _row(config, prompt, number, texts, rewards, range(number * copies, (number + 1) * copies))
        for number, prompt in enumerate(asked)
    ]
    write_text(target, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    console.print(f"{target}: {len(rows)} prompts, {len(rows) * config.samples_per_prompt} responses", highlight=False)
    return target


def _respond(config: SampleConfig, loaded: Loaded, drawn: Sequence[EncodedPrompt]) -> list[list[int]]:
    """A response to each prompt, with a progress bar."""
    uniforms = noise(len(drawn), config.sampling, config.seed, SAMPLES)
    with Progress(console=console) as progress:
        task = progress.add_task("sample", total=len(drawn))
        found = sample(
            loaded.backbone,
            [prompt.ids for prompt in drawn],
            uniforms,
            config.sampling,
            loaded.tokenization.end_ids,
            lambda rows: progress.advance(task, rows),
        )
    return found.ids


def score(
    loaded: Loaded,
    reward: LoadedReward,
    drawn: Sequence[EncodedPrompt],
    responses: Sequence[list[int]],
    texts: Sequence[str],
    batch_tokens: int,
) -> list[float]:
    """The reward of each response, less the reward model's mean over demonstrations.

    Raises:
        UserError: if the reward model cannot read a prompt with its response.
    """
    scorer = RewardModelScorer.of(reward, loaded.tokenization, Accelerator(), batch_tokens)
    rows = zip(drawn, responses, texts, strict=True)
    return scorer([Answer(prompt.conversation, prompt.ids, ids, text) for prompt, ids, text in rows])


def _row(
    config: SampleConfig, prompt: EncodedPrompt, number: int, texts: Sequence[str], rewards: list[float] | None, drawn: range
) -> dict[str, object]:
    """One line of the output: of every `best_of` responses in `drawn`, the one of highest reward."""
    kept = list(drawn)
    if rewards is not None:
        groups = [drawn[start : start + config.best_of] for start in range(0, len(drawn), config.best_of)]
        kept = [max(group, key=rewards.__getitem__) for group in groups]
    row: dict[str, object] = {"id": prompt.id or str(number + 1), "prompt": to_json(prompt.conversation)}
    row |= {"responses": [texts[i] for i in kept], "model": [config.model] * len(kept)}
    if prompt.category is not None:
        row["category"] = prompt.category
    if rewards is not None:
        row["rewards"] = [round(rewards[i], 6) for i in kept]
    return row
