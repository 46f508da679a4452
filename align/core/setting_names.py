"""Names of settings in TRL and in other stages; the message for an unknown name gives the one to use."""

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
        dataset_train_split: {DATA} (in brackets after the name: NAME[split=...])
        init_kl_coef: kl_coef
        adap_kl_ctrl: kl_target (above 0: kl_coef is adapted)
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
        stop_token: stop_token_ids (ids instead of a word; eos is the default)
        stop_token_id: stop_token_ids
        center_rewards_coefficient: centering_weight
        max_length: max_prompt_tokens max_response_tokens (a limit each)
        per_device_train_batch_size: {BATCH} (over all processes: per-device size x accumulation steps x processes)
        mini_batch_size: num_mini_batches (a count: rollout_batch_size divided by that size)
        gradient_accumulation_steps: micro_batch_tokens (a limit on memory that changes no result)
        warmup_steps: warmup_ratio (as a share of all updates)
        max_steps: num_train_epochs | total_updates (passes over the data, or rollouts in PPO)
        bf16: dtype (dtype bfloat16)
        fp16: dtype (there is no float16; dtype bfloat16)
        torch_dtype: dtype
        use_peft: lora_r (above 0)
        use_vllm: engine (vllm-server or vllm-colocate)
        logging_steps: (each update is logged)
        eval_strategy: eval_steps
        hub_private_repo: (a new repository is private; its page on the hub makes it public)
        deepspeed: (set it in the configuration of accelerate, --config_file configs/accelerate/zero2.yaml)
    """,
    "another stage": """
        total_updates: num_train_epochs (passes over the data)
        num_train_epochs: total_updates (rollouts, not passes over the prompts)
        train_data: prompts
        prompts: train_data
        validation_data: validation_prompts
    """,
}
"""A line for each name: the settings here, separated by spaces, alternatives for several stages by |, and a note."""
LINE = re.compile(r"(?P<name>\w+): *(?P<here>[\w.| ]*?) *(\((?P<note>.*)\))?")


class OtherName(NamedTuple):
    """A name that is no setting here.

    Attributes:
        source: TRL, or another stage.
        here: the settings that take its place. Of alternatives, the first counts whose settings the stage has.
        note: a conversion, if the values differ, or the reason why there is no such setting.
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
    """Return which of a stage's `known` settings a name stands for: "TRL's `optim` is `optimizer` here"; "" if none."""
    for other in NAMES:
        names = next((names for names in other.here if set(names) <= set(known)), None)
        if other.name == name and names is not None:
            if not names:
                return f"{other.source}'s `{name}` is no setting here: {other.note}"
            note = f" ({other.note})" if other.note else ""
            return f"{other.source}'s `{name}` is {', '.join(f'`{each}`' for each in names)} here{note}"
    return ""


def describe_unknown(what: str, name: str, known: Collection[str], prefix: str = "", valid_names: str = "") -> str:
    """Return the message for a name that is no setting: the setting in its place, or the nearest one, after `prefix`.

    `what` is the name as the user gave it (`option --kl_beta`); `valid_names` tells where to look if no setting is similar.
    """
    if explained := explain(name, known):
        return f"unknown {what}: {explained}"
    hint = nearest_name_hint(name, known, prefix) or (f"; {valid_names}" if valid_names else "")
    return f"unknown {what}{hint}"
