"""Three PPO steps of TRL 0.11's trainer, with the same models, queries and responses as a test of `align.trl.legacy`.

    .venv-trl-0.11/bin/python -m benchmarks.trl_legacy_parity      # writes TRL's numbers to tests/trl/trl-0.11.json

The weights come from a NumPy stream, and responses, scores and the order of minibatches are fixed, so both sides compute the
same steps. `tests/trl/test_legacy_parity.py` compares them. `CASES` lists the settings of each case.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from benchmarks.trl_parity import EOS, WORDS, draw, tokenizer

REFERENCE = Path(__file__).parents[1] / "tests" / "trl" / "trl-0.11.json"
START = 0
"""Start token of T5 responses."""
QUERIES = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]]
RESPONSES = [
    [[2, 4, 6, EOS], [1, 3, 5, 7, 9, EOS], [20, 19, 18, 17, 16, 15], [13, 7, EOS]],
    [[2, 4, 6, 8, 10, 12], [1, 3, EOS], [20, 19, 18, 17, 16], [13, 14, 13, 14, 13, 14]],
    [[8, 9, EOS], [1, 1, 2, 3, 5, 8], [13, 21, 3, 4], [3, 1, 4, 1, 5, 9]],
]
SCORES = [[1.0, -0.5, 0.25, 2.0], [0.5, 0.75, -1.25, 1.5], [3.0, -2.0, 0.0, 0.5]]
ORDERS = [[2, 0, 3, 1], [1, 3, 0, 2], [0, 1, 2, 3], [3, 2, 1, 0]]
"""Order of rows in each epoch, repeated."""


class Case(NamedTuple):
    """Settings in addition to `SETTINGS`, and the kind of model."""

    settings: dict[str, Any]
    kind: str = "gpt2"


CASES = {
    "gpt2": Case({}),
    "t5": Case({}, "t5"),
    "lora": Case({"learning_rate": 1e-2}, "lora"),
    "minibatches": Case({"mini_batch_size": 2}),
    "fixed_kl": Case({"adap_kl_ctrl": False, "init_kl_coef": 0.5, "ppo_epochs": 4, "learning_rate": 1e-2}),
    "abs": Case({"kl_penalty": "abs"}),
    "mse": Case({"kl_penalty": "mse"}),
    "full": Case({"kl_penalty": "full"}),
    "full_t5": Case({"kl_penalty": "full"}, "t5"),
    "scaled": Case({"use_score_scaling": True, "use_score_norm": True, "score_clip": 0.5}),
    "whitened": Case({"whiten_rewards": True, "max_grad_norm": 0.5, "gamma": 0.97, "lam": 0.9}),
    "early_stop": Case({"early_stopping": True, "target_kl": 0.01, "learning_rate": 3e-2, "ppo_epochs": 4}),
    "skipped": Case({"ratio_threshold": 1.02, "learning_rate": 3e-2, "ppo_epochs": 4}),
}
SETTINGS: dict[str, Any] = {
    "batch_size": 4,
    "mini_batch_size": 4,
    "ppo_epochs": 2,
    "learning_rate": 3e-3,
    "init_kl_coef": 0.1,
    "target": 1.0,
    "horizon": 20.0,
    "vf_coef": 0.3,
}
STATS = (
    *("objective/kl", "objective/kl_coef", "objective/entropy"),
    *("ppo/mean_non_score_reward", "ppo/mean_scores", "ppo/std_scores"),
    *("ppo/loss/policy", "ppo/loss/value", "ppo/loss/total"),
    *("ppo/policy/entropy", "ppo/policy/approxkl", "ppo/policy/policykl", "ppo/policy/clipfrac"),
    *("ppo/policy/advantages_mean", "ppo/returns/mean", "ppo/returns/var"),
    *("ppo/val/vpred", "ppo/val/error", "ppo/val/clipfrac", "ppo/val/mean", "ppo/val/var", "ppo/val/var_explained"),
    *("tokens/queries_len_mean", "tokens/queries_len_std", "tokens/responses_len_mean", "ppo/learning_rate"),
)


def language_model(kind: str, seed: int) -> Any:
    """Return a tiny GPT-2 or T5 without dropout, or a PEFT model of GPT-2."""
    if kind == "t5":
        sizes: dict[str, Any] = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
        tokens = {"decoder_start_token_id": START, "pad_token_id": START, "eos_token_id": EOS}
        model: Any = T5ForConditionalGeneration(T5Config(vocab_size=WORDS + 2, dropout_rate=0.0, **sizes, **tokens))
    else:
        dropouts = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "summary_first_dropout": 0.0}
        sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_inner": 8}
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=WORDS + 2, bos_token_id=EOS, eos_token_id=EOS, **sizes, **dropouts)  # type: ignore[arg-type]
        )
    draw(model, seed)
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))
        draw(nn.ParameterList(weight for weight in model.parameters() if weight.requires_grad), seed + 1)
    return model


def responses_of(step: int, kind: str) -> list[Tensor]:
    """Return the fixed responses of a step. T5 responses begin with the start token, as returned by `generate`."""
    return [torch.tensor([START, *row] if kind == "t5" else row) for row in RESPONSES[step]]


def orders() -> Iterator[list[int]]:
    """Yield the order of rows in each epoch."""
    return itertools.cycle(ORDERS)


def steps(library: Any, case: str, **changes: Any) -> dict[str, Any]:
    """Return the statistics of each step and the final weights, computed by TRL or `align.trl.legacy`.

    Args:
        library: namespace with `PPOConfig`, `PPOTrainer` and the classes with a value head.
        case: key of `CASES`.
        changes: settings that override those of the case.
    """
    settings, kind = CASES[case]
    wrapper = library.AutoModelForSeq2SeqLMWithValueHead if kind == "t5" else library.AutoModelForCausalLMWithValueHead
    model = wrapper.from_pretrained(language_model(kind, 1), summary_dropout_prob=0.0)
    draw(model.v_head, 2)
    reference = None if kind == "lora" else wrapper.from_pretrained(language_model(kind, 3), summary_dropout_prob=0.0)
    config = library.PPOConfig(**SETTINGS | settings | changes)
    words = tokenizer()
    words.padding_side = "right"  # TRL counts padding on the left as positions of a GPT-2, and as tokens of a T5's response
    trainer = library.PPOTrainer(config, model, reference, words)
    rows = []
    for step, scores in enumerate(SCORES):
        queries = [torch.tensor(query) for query in QUERIES]
        stats = trainer.step(queries, responses_of(step, kind), [torch.tensor(score) for score in scores])
        rows.append({name: float(stats[name]) for name in STATS})
    weights = {
        name: [float(f"{value:.7g}") for value in weight.detach().flatten().tolist()]
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    return {"stats": rows, "weights": weights}


def steps_by_trl(case: str) -> dict[str, Any]:
    """Return the numbers of TRL, after fixing four bugs.

    - TRL skips the first token of a T5 response, although it computes the log-prob. It is not skipped here.
    - `use_score_scaling` fails, because the running moments are numbers but a tensor is expected.
    - `whiten_rewards` gives padding a reward that affects the advantages of real tokens.
    - `max_grad_norm` clips only the first optimizer step, because the weights are in an iterator that is then exhausted.
    """
    import numpy as np
    import trl
    import trl.trainer.ppo_trainer
    from trl.trainer.utils import RunningMoments

    order = orders()
    whiten = trl.core.masked_whiten

    def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
        return whiten(values, mask, shift_mean) * mask

    class Moments(RunningMoments):  # type: ignore[misc]
        def update(self, scores: Tensor) -> Any:
            moments = super().update(scores)
            self.mean, self.std = torch.as_tensor(self.mean), torch.as_tensor(self.std)
            return moments

    class Trainer(trl.PPOTrainer):  # type: ignore[misc]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.running, self.model_params = Moments(self.accelerator), list(self.model_params)

        def batched_forward_pass(self, *given: Any, **named: Any) -> Any:
            *outputs, masks = super().batched_forward_pass(*given, **named)
            if self.is_encoder_decoder:
                masks[:, 0] = 1
            return (*outputs, masks)

    class Library:
        PPOConfig, PPOTrainer = trl.PPOConfig, Trainer
        AutoModelForCausalLMWithValueHead = trl.AutoModelForCausalLMWithValueHead
        AutoModelForSeq2SeqLMWithValueHead = trl.AutoModelForSeq2SeqLMWithValueHead

    trl.trainer.ppo_trainer.masked_whiten = masked_whiten
    np.random.permutation = lambda rows: np.array(next(order))  # type: ignore[assignment,misc]
    return steps(Library, case)


if __name__ == "__main__":
    lines = json.dumps({case: steps_by_trl(case) for case in CASES}, indent=1).replace(",\n    ", ", ")
    REFERENCE.write_text(f"{lines}\n", encoding="utf-8")  # lists of numbers on one line
