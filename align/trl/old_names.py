"""Names of earlier releases of TRL and transformers, with what takes their place."""

import re
from collections.abc import Collection

LOOP = "docs/migrate-from-trl.md, section 'From the loop `step(queries, responses, rewards)`'"

SETTINGS = {
    "model_name": "give the model to PPOTrainer",
    "ppo_epochs": "num_ppo_epochs",
    "init_kl_coef": "kl_coef",
    "steps": "total_episodes",
    "log_with": "report_to",
    "exp_name": "leave it out",
    "task_name": "leave it out",
    "tracker_project_name": "leave it out",
    "tracker_kwargs": "leave it out",
    "adap_kl_ctrl": "`align ppo` adapts kl_coef to a kl_target",
    "target": "`align ppo` has kl_target",
    "horizon": "`align ppo` has kl_horizon",
    "use_score_scaling": "scale the score in a reward function",
    "use_score_norm": "scale the score in a reward function",
    "score_clip": "clip the score in a reward function",
    "non_eos_penalty": "missing_eos_penalty",
    "penalty_reward_value": "missing_eos_penalty",
    "truncate_token": "stop_token",
    "truncate_token_id": "stop_token_id",
    "warmup_ratio": "warmup_steps; a value below 1 is a share of all steps",
    "logging_dir": "the environment variable TENSORBOARD_LOGGING_DIR",
    "overwrite_output_dir": "leave it out; a folder with an earlier run is refused",
    "no_cuda": "use_cpu",
    "save_safetensors": "leave it out; weights are always saved as safetensors",
    "evaluation_strategy": "eval_strategy",
    "tokenizer": "give the tokenizer to PPOTrainer as processing_class",
}
"""Settings that `align.trl.PPOConfig` and TRL 1.12 no longer have."""

ARGUMENTS = {
    "config": "args",
    "tokenizer": "processing_class",
    "dataset": "train_dataset",
    "policy": "model",
    "ref_policy": "ref_model",
    "optimizer": "optimizers=(optimizer, None)",
    "lr_scheduler": "optimizers=(None, lr_scheduler)",
}
"""Arguments of `PPOTrainer` under other names."""

MEMBERS = {
    "step": f"call train(), which samples, scores and learns ({LOOP})",
    "generate": "train() samples; generate_completions() prints samples of the evaluation prompts",
    "log_stats": "log(metrics)",
}
"""Members of TRL 0.11's `PPOTrainer`."""


def unknown_settings(given: Collection[str], known: Collection[str]) -> str:
    """Return the message for keyword arguments that are no settings; empty if all are."""
    return "; ".join(f"`{name}` is no setting{_instead(name, SETTINGS)}" for name in given if name not in known)


def renamed_arguments(given: Collection[str]) -> str:
    """Return the message for arguments of the trainer under earlier names; empty if there are none."""
    renamed = [f"`{name}`{_instead(name, ARGUMENTS)}" for name in given if name in ARGUMENTS]
    return f"PPOTrainer has other names for some arguments: {'; '.join(renamed)} ({LOOP})" if renamed else ""


def _instead(name: str, table: dict[str, str]) -> str:
    """What takes the place of a name; empty if unknown."""
    if name not in table:
        return ""
    here = table[name]
    return f": use `{here}`" if re.fullmatch(r"\w+", here) else f": {here}"
