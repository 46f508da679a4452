"""The peers: TRL's RewardTrainer and SFTTrainer, transformers' generate, and the last PPOTrainer (TRL 1.12.0).

PPO needs a separate environment, which also imports this file. The settings are the fastest found for the same work: no
gradient checkpointing, sample generations, evaluation or saving, and the same fused AdamW. The bfloat16 variant is autocast
over float32 weights, because bfloat16 weights would round away updates of 3e-6. Frozen PPO models (reference, reward) are
in bfloat16.
"""

import itertools
import os
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from transformers.modeling_outputs import BaseModelOutput
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from benchmarks.measuring import TOKENS, Measurement, examples, finish_line, letters
from benchmarks.workloads import LEARNING_RATE, PPO_EPOCHS, RACE_KL_BETA, RACE_TARGET, RACE_UPDATES, Work

ON_CPU = not torch.cuda.is_available()


class Clock(TrainerCallback):
    """Records wall time, real tokens and logged figures at the end of each step.

    Args:
        target: value of `objective/scores` at which training ends, if any.
    """

    def __init__(self, target: float | None = None) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.rows: list[dict[str, float]] = []
        self.target = target

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())
        self.tokens.append(0)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.rows.append(logs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())
        self.tokens.append(int(state.num_input_tokens_seen))
        if self.target is not None and self.rows[-1]["objective/scores"] >= self.target:
            raise StopIteration  # PPOTrainer's loop does not read `control`

    @property
    def seconds(self) -> list[float]:
        """Seconds of each step."""
        return [after - before for before, after in itertools.pairwise(self.times)]

    def measurement(self, work: Work) -> Measurement:
        """Return the steps after the warm-up. Each is measured from the end of the previous step."""
        tokens = [after - before for before, after in itertools.pairwise(self.tokens)]
        return Measurement(self.seconds[work.warmup :], tokens[work.warmup :])


def _settings(seed: int, scratch: Path, variant: str) -> dict[str, Any]:
    """Return the settings shared by all trainers. `variant` is the number format."""
    return {
        "output_dir": str(scratch / "run"),
        "seed": seed,
        "bf16": variant == "bfloat16",
        "use_cpu": ON_CPU,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def _supervised(
    work: Work, folder: Path, stage: tuple[type, type], model: nn.Module, rows: list[dict[str, Any]], **more: Any
) -> Measurement:
    """Train on rows of token ids and measure the steps. `stage` is TRL's trainer and its config class."""
    (trainer, config), clock = stage, Clock()
    settings = config(
        learning_rate=LEARNING_RATE,
        include_num_input_tokens_seen="non_padding",
        max_length=None,
        dataloader_pin_memory=not ON_CPU,
        max_steps=work.warmup + work.measured,
        **more,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / work.model_folder)
    data = Dataset.from_list(rows)
    trainer(model=model, args=settings, train_dataset=data, processing_class=tokenizer, callbacks=[clock]).train()
    return clock.measurement(work)


def reward(work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    """Measure reward model training. An update has all pairs of `rows` rankings, as in InstructGPT.

    With `pairs_read`, measured steps contain only this number of pairs per ranking, and the time is scaled to all pairs.
    """
    rankings, read = examples(folder, work), work.pairs_read or work.pairs
    pairs = [
        {"chosen_ids": row["prompt"] + row["responses"][i], "rejected_ids": row["prompt"] + row["responses"][j]}
        for row in rankings
        for i, j in list(itertools.combinations(range(work.responses), 2))[:read]
    ]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1, dtype=torch.float32)
    micro = min(read, 6)  # pairs (12 responses); faster than 36 pairs, with a sixth of the memory
    sizes = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": work.rows * read // micro}
    more = _settings(seed, scratch, variant) | sizes
    found = _supervised(work, folder, (RewardTrainer, RewardConfig), model, pairs, **more)
    found.seconds = [seconds * work.pairs / read for seconds in found.seconds]
    return found


def sft(work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    texts = [(row["prompt"], row["responses"][0]) for row in examples(folder, work)]
    rows = [{"input_ids": a + b, "completion_mask": [0] * len(a) + [1] * len(b)} for a, b in texts]
    model = AutoModelForCausalLM.from_pretrained(folder / work.model_folder, dtype=torch.float32)
    micro = work.peer_rows or min(work.rows, 4)  # faster than 8 or 16 because of less padding
    sizes = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": max(1, work.rows // micro)}
    more = _settings(seed, scratch, variant) | sizes
    return _supervised(work, folder, (SFTTrainer, SFTConfig), model, rows, completion_only_loss=True, **more)


def sampling(work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, variant)).eval()
    model = model.to("cpu" if ON_CPU else "cuda")
    prompts = torch.tensor([row["prompt"] for row in examples(folder, work)], device=model.device)
    seconds, tokens = [], []
    for step in range(work.warmup + work.measured):
        part = prompts[step * work.rows : (step + 1) * work.rows]
        begun = time.perf_counter()
        ids = model.generate(
            input_ids=part,
            attention_mask=torch.ones_like(part),
            do_sample=True,
            top_k=0,
            max_new_tokens=work.response[1],
        )
        if not ON_CPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        tokens.append(int((ids[:, part.shape[1] :] != model.config.pad_token_id).sum()))
    return Measurement(seconds[work.warmup :], tokens[work.warmup :])


def _train_ppo(
    work: Work, folder: Path, tokenizer: PreTrainedTokenizerBase, models: dict[str, nn.Module], clock: Clock, **more: Any
) -> None:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    # Four micro-batches are as fast as one, and avoid holding the logits of 32 rows over 49,152 tokens at once.
    micro = work.peer_rows or max(1, work.rows // 4)
    config = PPOConfig(
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=work.rows // micro,
        local_rollout_forward_batch_size=work.rows // 4 if work.peer_rows else work.rows,
        num_ppo_epochs=work.settings.get("num_ppo_epochs", PPO_EPOCHS),
        response_length=work.response[1],
        temperature=1.0,
        adam_epsilon=1e-5,
        num_sample_generations=0,
        **more,
    )
    data = Dataset.from_list([{"input_ids": row["prompt"]} for row in examples(folder, work)])
    trainer = PPOTrainer(
        args=config, processing_class=tokenizer, train_dataset=data, eval_dataset=data, callbacks=[clock], **models
    )
    try:
        trainer.train()
    except StopIteration:
        assert clock.target is not None


def ppo(work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    # PPOTrainer's Accelerator ignores the config's number format and reads this variable.
    os.environ["ACCELERATE_MIXED_PRECISION"] = {"float32": "no", "bfloat16": "bf16"}[variant]
    tokenizer = AutoTokenizer.from_pretrained(folder / work.model_folder, padding_side="left")
    frozen = getattr(torch, variant)
    models = {
        "model": AutoModelForCausalLM.from_pretrained(folder / work.model_folder, dtype=torch.float32),
        "ref_model": AutoModelForCausalLM.from_pretrained(folder / work.model_folder, dtype=frozen),
        "reward_model": AutoModelForSequenceClassification.from_pretrained(folder / work.reward_folder, dtype=frozen),
        "value_model": AutoModelForSequenceClassification.from_pretrained(folder / work.reward_folder, dtype=torch.float32),
    }
    clock, steps = Clock(), work.warmup + work.measured
    more = _settings(seed, scratch, variant) | {"learning_rate": LEARNING_RATE, "total_episodes": work.rows * steps}
    _train_ppo(work, folder, tokenizer, models, clock, **more)
    tokens = [work.rows * work.response[1]] * work.measured  # without a stop token every response has full length
    return Measurement(clock.seconds[work.warmup :], tokens, {"kl": clock.rows[-1]["objective/kl"]})


class KnownReward(nn.Module):
    """The race's reward as a sequence classifier. The backbone returns the score of the row at every position."""

    base_model_prefix = "backbone"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int) -> None:
        super().__init__()
        self.backbone = _LettersOf(tokenizer, prompt_tokens)
        self.score = nn.Identity()


class _LettersOf(nn.Module):
    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int) -> None:
        super().__init__()
        self.tokenizer, self.prompt_tokens = tokenizer, prompt_tokens

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> BaseModelOutput:
        texts = self.tokenizer.batch_decode(input_ids[:, self.prompt_tokens :], skip_special_tokens=True)
        scores = torch.tensor(letters([()] * len(texts), texts), device=input_ids.device)
        return BaseModelOutput(hidden_states=(scores[:, None, None].expand(*input_ids.shape, 1),))


def race(work: Work, variant: str, folder: Path, seed: int, scratch: Path) -> Measurement:
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # a tiny model gains nothing from bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder / "race", padding_side="left")
    models = {
        "model": AutoModelForCausalLM.from_pretrained(folder / "race", dtype=torch.float32),
        "ref_model": AutoModelForCausalLM.from_pretrained(folder / "race", dtype=torch.float32),
        "reward_model": KnownReward(tokenizer, work.prompt[1]),
        "value_model": AutoModelForSequenceClassification.from_pretrained(folder / "race", num_labels=1),
    }
    clock = Clock(RACE_TARGET)
    assert work.response[1] == TOKENS
    more = _settings(seed, scratch, "float32") | {
        "learning_rate": float(variant),
        "lr_scheduler_type": "constant",
        "total_episodes": work.rows * RACE_UPDATES,
        "kl_coef": RACE_KL_BETA,
        "stop_token": "eos",
    }
    _train_ppo(work, folder, tokenizer, models, clock, **more)
    rows = zip(clock.seconds, clock.rows, strict=True)
    return finish_line([(seconds, row["objective/scores"], row["objective/kl"]) for seconds, row in rows])
