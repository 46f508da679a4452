"""One PPO update of TRL 1.12's trainer, with the same models, prompts and responses as a test of `align.trl`.

    .venv-trl-1.12/bin/python -m benchmarks.trl_parity      # writes the numbers of TRL to tests/trl/trl-1.12.json

The weights come from a NumPy stream and the responses are fixed, so both sides compute the same update.
`tests/trl/test_parity.py` compares them. `CASES` lists the settings of each case.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

REFERENCE = Path(__file__).parents[1] / "tests" / "trl" / "trl-1.12.json"
WORDS, EOS = 23, 23
"""Ids 0 to 22 are words, 23 is EOS, and 24 is the padding token, for which the models have no embedding."""
LENGTH = 6
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]]
FULL = [[2, 4, 6, 8, 10, 12], [1, 3, 5, 7, 9, 11], [20, 19, 18, 17, 16, 15], [13, 14, 13, 14, 13, 14]]
ENDED = [[2, 4, 6, EOS], [1, 3, 5, 7, 9, EOS], [20, 19, 18, 17, 16, 15], [13, EOS]]


class Case(NamedTuple):
    """Responses, settings in addition to `SETTINGS`, and whether the policy is a PEFT model with its base as reference."""

    responses: list[list[int]]
    settings: dict[str, Any]
    lora: bool = False


CASES = {
    "full": Case(FULL, {}),
    "stop": Case(ENDED, {"stop_token": "eos"}),
    "k3": Case(FULL, {"kl_estimator": "k3"}),
    "lora": Case(FULL, {}, lora=True),
    "epochs": Case(FULL, {"num_ppo_epochs": 4, "learning_rate": 1e-2}),
}
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "num_ppo_epochs": 1,
    "total_episodes": 4,
    "response_length": LENGTH,
    "learning_rate": 1e-3,
    "kl_coef": 0.1,
    "vf_coef": 0.3,
    "gamma": 0.97,
    "lam": 0.9,
    "max_grad_norm": 0.0,  # TRL never clips
    "missing_eos_penalty": 0.5,
    "num_sample_generations": 0,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
}
METRICS = (
    *("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward", "objective/scores"),
    *("policy/approxkl_avg", "policy/clipfrac_avg", "loss/policy_avg", "loss/value_avg", "val/clipfrac_avg"),
    *("val/ratio", "val/num_eos_tokens", "lr", "episode"),
)
"""Metrics that both sides define identically. `eps` is a time, and TRL's entropy during training includes padding."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with 24 tokens and a padding token unknown to the models, as in TRL's example scripts."""
    words = {f"w{number}": number for number in range(WORDS)} | {"<eos>": EOS}
    fast = Tokenizer(WordLevel(words, unk_token="w0"))
    fast.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>", padding_side="left")
    made.add_special_tokens({"pad_token": "[PAD]"})
    return made


def draw(model: nn.Module, seed: int) -> None:
    """Set all weights from a NumPy stream, which is independent of the torch version."""
    stream = np.random.default_rng(seed)
    with torch.no_grad():
        for weight in model.parameters():
            numbers = torch.from_numpy(stream.standard_normal(tuple(weight.shape))).float()
            weight.copy_(numbers * 0.3 if weight.dim() > 1 else 1.0 + 0.1 * numbers)


def models(lora: bool) -> dict[str, Any]:
    """Return the models by TRL's argument names. With `lora`, the policy is a PEFT model and there is no reference."""
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=WORDS + 1, eos_token_id=EOS, bos_token_id=None, pad_token_id=None, **sizes)
    made: dict[str, Any] = {"model": LlamaForCausalLM(config), "ref_model": LlamaForCausalLM(config)}
    config.num_labels = 1
    made |= {name: LlamaForSequenceClassification(config) for name in ("reward_model", "value_model")}
    for seed, model in enumerate(made.values()):
        draw(model, seed)
    if lora:
        made["model"] = get_peft_model(made["model"], LoraConfig(r=2, lora_alpha=4, task_type="CAUSAL_LM"))
        draw(nn.ParameterList(weight for weight in made["model"].parameters() if weight.requires_grad), len(made))
        made["ref_model"] = None
    return made


def trainer_of(trainer: type[Any], config: type[Any], case: str, folder: str, **changes: Any) -> Any:
    """Return the trainer of either side for a case."""
    args = config(output_dir=folder, **SETTINGS | CASES[case].settings | changes)
    data = Dataset.from_dict({"input_ids": PROMPTS})
    return trainer(
        args=args, processing_class=tokenizer(), train_dataset=data, eval_dataset=data, **models(CASES[case].lora)
    )


def response_to(prompt: list[int], case: str) -> list[int]:
    """Return the fixed response to a prompt."""
    return CASES[case].responses[PROMPTS.index(prompt)]


def numbers_of(trainer: Any, advantages: Tensor) -> dict[str, Any]:
    """Return the numbers to compare: metrics, advantages in the order of prompts, and trained weights."""
    weights = {
        f"{role}.{name}": [float(f"{value:.9g}") for value in weight.detach().flatten().tolist()]
        for role, model in (("policy", trainer.model.policy), ("value_model", trainer.model.value_model))
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    metrics = {name: float(trainer.state.log_history[-1][name]) for name in METRICS}
    return {"metrics": metrics, "advantages": advantages.tolist(), "weights": weights}


def update_by_trl(case: str) -> dict[str, Any]:
    """Return the numbers of an update of TRL's trainer."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    order: list[list[int]] = []
    whitened: list[Tensor] = []
    whiten = ppo_trainer.masked_whiten

    def fixed_responses(model: Any, queries: Tensor, rows: int, pad: int, generation: Any) -> tuple[Tensor, Tensor]:
        order.extend([token for token in query if token != pad] for query in queries.tolist())
        written = [response_to(prompt, case) for prompt in order]
        responses = torch.tensor([response + [pad] * (LENGTH - len(response)) for response in written])
        texts = torch.cat([queries, responses], 1)
        logits = ppo_trainer.forward(model, texts, pad).logits[:, queries.shape[1] - 1 : -1]
        return texts, logits / generation.temperature

    def recorded_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
        whitened.append(whiten(values, mask, shift_mean).masked_fill(~mask, 0.0))
        return whitened[-1]

    ppo_trainer.batch_generation = fixed_responses
    ppo_trainer.masked_whiten = recorded_whiten
    ppo_trainer.selective_log_softmax = log_probs_of_real_tokens
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(PPOTrainer, PPOConfig, case, folder)
        trainer.train()
    return numbers_of(trainer, whitened[-1][[order.index(prompt) for prompt in PROMPTS]])


def log_probs_of_real_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    """Return log-probs [B, T]. The id of padding is outside the vocabulary, and TRL masks its log-probs."""
    return logits.log_softmax(-1).gather(-1, ids.clamp(max=EOS)[..., None])[..., 0]


if __name__ == "__main__":
    lines = json.dumps({case: update_by_trl(case) for case in CASES}, indent=1).replace(",\n    ", ", ")
    REFERENCE.write_text(f"{lines}\n", encoding="utf-8")  # lists of numbers on one line
