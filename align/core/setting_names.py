"""Map setting names of TRL and of other stages to the names used here, for error messages."""

import re
from collections.abc import Collection
from typing import NamedTuple

from align.core.errors import nearest_name_hint

BATCH, DATA = "batch_size | rollout_batch_size", "train_data | prompts"

TABLES = {
    "TRL": f"""
        response_length: max_new_tokens
        max_completion_length: max_new_tokens
        max_prompt_length: max_prompt_tokens
        num_generations: samples_per_prompt
        sft_model_path: model
        reward_model_path: reward_model
        model_name_or_path: model
        dataset_name: {DATA}
        dataset_train_split: {DATA} (write the split in brackets: NAME[split=...])
        init_kl_coef: kl_coef
        adap_kl_ctrl: kl_target (kl_coef is adaptive if kl_target is above 0)
        target: kl_target
        horizon: kl_horizon
        ppo_epochs: num_ppo_epochs
        total_episodes: total_updates (total_episodes / rollout_batch_size)
        steps: total_updates (steps / rollout_batch_size)
        epsilon: cliprange
        epsilon_high: cliprange_high
        reward_funcs: reward_functions
        loss_type: loss
        optim: optimizer
        beta: kl_coef (its default is 0 in GRPO)
        stop_token: stop_token_ids (token ids; EOS is the default)
        stop_token_id: stop_token_ids
        center_rewards_coefficient: centering_weight
        max_length: max_prompt_tokens max_response_tokens (separate limits)
        per_device_train_batch_size: {BATCH} (global: per-device batch size x accumulation steps x processes)
        mini_batch_size: num_mini_batches (their number: rollout_batch_size / mini_batch_size)
        gradient_accumulation_steps: micro_batch_tokens (a memory limit that does not change results)
        warmup_steps: warmup_ratio (a fraction of all updates)
        max_steps: num_train_epochs | total_updates (epochs; in PPO, rollouts)
        bf16: dtype (dtype bfloat16)
        fp16: dtype (float16 is not supported; use bfloat16)
        torch_dtype: dtype
        use_peft: lora_r (above 0)
        use_vllm: engine (vllm-server or vllm-colocate)
        logging_steps: (every update is logged)
        eval_strategy: eval_steps
        hub_private_repo: (new repositories are private; change this on the Hub)
        deepspeed: (set it in accelerate's config, such as --config_file configs/accelerate/zero2.yaml)
    """,
    "another stage": """
        total_updates: num_train_epochs (epochs)
        num_train_epochs: total_updates (rollouts, not epochs over the prompts)
        train_data: prompts
        prompts: train_data
        validation_data: validation_prompts
    """,
}
"""One line per name: the settings here, separated by spaces; alternatives for several stages separated by |; a note."""
LINE = re.compile(r"(?P<name>\w+): *(?P<here>[\w.| ]*?) *(\((?P<note>.*)\))?")


class OtherName(NamedTuple):
    """A name from TRL or another stage.

    Attributes:
        source: "TRL" or "another stage".
        here: alternative replacements, each a list of settings. The first one whose settings all exist in the stage applies.
        note: conversion of the value, or the reason why there is no such setting.
    """

    source: str
    name: str
    here: list[list[str]]
    note: str


def _read(source: str, line: str) -> OtherName:
    match = LINE.fullmatch(line.strip())
    assert match, line
    return OtherName(source, match["name"], [part.split() for part in match["here"].split("|")], match["note"] or "")


NAMES = tuple(_read(source, line) for source, table in TABLES.items() for line in table.strip().splitlines())


def explain(name: str, known: Collection[str]) -> str:
    """Return the equivalent of a name, as in "TRL's `optim` is `optimizer` here", or "" if unknown."""
    for other in NAMES:
        names = next((names for names in other.here if set(names) <= set(known)), None)
        if other.name == name and names is not None:
            if not names:
                return f"{other.source}'s `{name}` is not needed here: {other.note}"
            note = f" ({other.note})" if other.note else ""
            return f"{other.source}'s `{name}` is {', '.join(f'`{setting}`' for setting in names)} here{note}"
    return ""


def describe_unknown(what: str, name: str, known: Collection[str], prefix: str = "", valid_names: str = "") -> str:
    """Return the message for an unknown setting: the name used here, or the nearest one, after `prefix`.

    `what` describes the name as the user wrote it (`option --kl_beta`). `valid_names` is the hint if no setting is similar.
    """
    if explanation := explain(name, known):
        return f"unknown {what}: {explanation}"
    hint = nearest_name_hint(name, known, prefix) or (f"; {valid_names}" if valid_names else "")
    return f"unknown {what}{hint}"
