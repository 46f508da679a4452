"""Names of settings in other frameworks, and former names; the message for an unknown name gives the one to use."""

import re
from collections.abc import Collection
from typing import NamedTuple

from align.core.errors import nearest_name_hint

EPOCHS, BATCH = "num_train_epochs | num_ppo_epochs", "batch_size | rollout_batch_size"
SERVER = "a function that asks the server: docs/howto/reward-elsewhere.md"
LAUNCHER = "set it in the configuration of accelerate, --config_file configs/accelerate/zero2.yaml"
MINIBATCHES = "a count: rollout_batch_size divided by that size"
DATA, COLUMNS = "train_data | prompts", "in brackets after the file: FILE[FIELD=COLUMN, ...]"
BOTH = "max_prompt_tokens max_response_tokens | max_prompt_tokens max_new_tokens"
SPLIT = "in brackets after the name: NAME[split=...]"
PER_TOKEN = "in nats per response; it is per token there"
RESPONSES = "it counts responses: prompts x samples_per_prompt"
ROLLOUTS = "rollouts, not passes over the prompts"
GLOBAL = "over all processes: per-device size x accumulation steps x processes"
MEMORY = "a limit on memory that changes no result"
BLOCK = "a block before; the settings stand alone"
K2_K3 = "k2 and k3 were kl_in loss"

FORMER = "before"
TABLES = {
    FORMER: f"""
        kl: kl_coef kl_target kl_horizon ({BLOCK})
        kl_beta: kl_coef
        kl.beta: kl_coef
        kl.target: kl_target
        kl.horizon: kl_horizon
        kl_penalty: kl_in kl_estimator ({K2_K3})
        kl.penalty: kl_in kl_estimator ({K2_K3})
        loss: cliprange vf_coef ent_coef ({BLOCK})
        loss.clip: cliprange
        loss.clip_high: cliprange_high
        loss.value_clip: cliprange_value
        loss.value_weight: vf_coef
        loss.entropy_weight: ent_coef
        clip: cliprange
        clip_high: cliprange_high
        value_clip: cliprange_value
        value_weight: vf_coef
        entropy_weight: ent_coef
        ptx_weight: ptx.coef
        ptx_data: ptx.data
        epochs: {EPOCHS}
        minibatches: num_mini_batches
        updates: total_updates
        rollout_size: rollout_batch_size
        advantages: advantage_estimator
        missing_eos: missing_eos_score missing_eos_penalty
        log_to: report_to
        schedule: lr_scheduler_type
        warmup: warmup_ratio
        save_every: save_steps
        keep_checkpoints: save_total_limit
        resume: resume_from_checkpoint
        evaluate_every: eval_steps
        lora_rank: lora_r
        lora_targets: lora_target_modules
        keep_confidence: best_policy_confidence
        judge_model: selection.reward_model
        judge_patience: selection.early_stopping_patience
        selection.patience: selection.early_stopping_patience
        student_share: on_policy_fraction
        student_start: student
        held_out_share: validation_split
        primer: few_shot
        layer_step: keep_every_nth_layer
        overlap: labelers_per_item
        reward_timeout: (a function that calls a server sets a timeout itself)
        layerwise_lr_decay: (every layer has the same learning rate)
        router_aux_loss_coef: (a mixture of experts is trained without a balancing loss)
    """,
    "TRL": f"""
        response_length: max_new_tokens
        max_completion_length: max_new_tokens
        max_prompt_length: max_prompt_tokens
        num_generations: samples_per_prompt
        sft_model_path: model
        reward_model_path: reward_model
        model_name_or_path: model
        dataset_name: {DATA}
        init_kl_coef: kl_coef
        target: kl_target
        horizon: kl_horizon
        steps: total_episodes
        epsilon: cliprange
        epsilon_high: cliprange_high
        reward_funcs: reward_functions
        center_rewards_coefficient: centering_weight
        loss_type: loss
        optim: optimizer
        beta: kl_coef (its default is 0 in GRPO)
        adap_kl_ctrl: kl_target (above 0: kl_coef is adapted)
        stop_token: stop_token_ids (ids instead of a word; eos is the default)
        stop_token_id: stop_token_ids
        max_length: max_prompt_tokens max_response_tokens (a limit each)
        per_device_train_batch_size: {BATCH} ({GLOBAL})
        mini_batch_size: num_mini_batches ({MINIBATCHES})
        gradient_accumulation_steps: micro_batch_tokens ({MEMORY})
        local_rollout_forward_batch_size: micro_batch_tokens ({MEMORY})
        per_device_eval_batch_size: micro_batch_tokens ({MEMORY})
        warmup_steps: warmup_ratio (as a share of all updates)
        max_steps: num_train_epochs | total_updates (passes over the data, or rollouts in PPO)
        bf16: dtype (dtype bfloat16)
        fp16: dtype (there is no float16; dtype bfloat16)
        torch_dtype: dtype
        use_peft: lora_r (above 0)
        use_vllm: engine (vllm-server or vllm-colocate)
        logging_steps: (each update is logged)
        eval_strategy: eval_steps
        num_sample_generations: eval_steps (with validation_prompts, in samples.jsonl)
        deepspeed: ({LAUNCHER})
        dataset_config: {DATA} (in brackets after the name: NAME[subset=...])
        dataset_train_split: {DATA} ({SPLIT})
        dataset_test_split: validation_data | validation_prompts ({SPLIT})
    """,
    "OpenRLHF": f"""
        algo.kl.init_coef: kl_coef
        algo.kl.horizon: kl_horizon
        algo.advantage.estimator: advantage_estimator
        algo.advantage.gamma: gamma
        algo.advantage.lambd: lam
        actor.eps_clip: cliprange
        critic.value_clip: cliprange_value
        rollout.n_samples_per_prompt: samples_per_prompt
        rollout.max_new_tokens: max_new_tokens
        reward.model_name_or_path: reward_model
        train.max_epochs: num_ppo_epochs
        eps_clip: cliprange
        lambd: lam
        n_samples_per_prompt: samples_per_prompt
        generate_max_len: max_new_tokens
        prompt_max_len: max_prompt_tokens
        pretrain: model
        reward_pretrain: reward_model
        prompt_data: prompts
        dataset: {DATA}
        actor_learning_rate: learning_rate
        critic_learning_rate: value_learning_rate
        freezing_actor_steps: critic_warmup
        ptx_coef: ptx.coef
        save_path: output_dir
        target_modules: lora_target_modules
        max_epochs: {EPOCHS}
        num_episodes: total_updates ({ROLLOUTS})
        rollout.batch_size: rollout_batch_size ({RESPONSES})
        algo.kl.target: kl_target ({PER_TOKEN})
        train.batch_size: num_mini_batches ({MINIBATCHES})
        train_batch_size: num_mini_batches | batch_size | rollout_batch_size (num_mini_batches is a count, not a size)
        micro_train_batch_size: micro_batch_tokens ({MEMORY})
        use_kl_loss: kl_in (kl_in loss)
        critic.adam.lr: value_learning_rate
        remote_rm_url: reward_functions ({SERVER})
        reward.remote_url: reward_functions ({SERVER})
        reward.stop_properly_penalty_coef: missing_eos_score missing_eos_penalty
        zero_stage: ({LAUNCHER})
        input_key: {DATA} ({COLUMNS})
        output_key: {DATA} ({COLUMNS})
        prompt_key: {DATA} ({COLUMNS})
        chosen_key: {DATA} ({COLUMNS})
        rejected_key: {DATA} ({COLUMNS})
    """,
    "verl": f"""
        algorithm.kl_ctrl.kl_coef: kl_coef
        algorithm.kl_ctrl.horizon: kl_horizon
        algorithm.adv_estimator: advantage_estimator
        algorithm.gamma: gamma
        algorithm.lam: lam
        adv_estimator: advantage_estimator
        actor_rollout_ref.model.path: model
        actor_rollout_ref.actor.optim.lr: learning_rate
        actor_rollout_ref.actor.clip_ratio: cliprange
        actor_rollout_ref.actor.clip_ratio_high: cliprange_high
        actor_rollout_ref.actor.entropy_coeff: ent_coef
        actor_rollout_ref.actor.ppo_epochs: num_ppo_epochs
        actor_rollout_ref.rollout.n: samples_per_prompt
        actor_rollout_ref.rollout.temperature: temperature
        critic.cliprange_value: cliprange_value
        critic.optim.lr: value_learning_rate
        clip_ratio: cliprange
        clip_ratio_high: cliprange_high
        entropy_coeff: ent_coef
        max_response_length: max_new_tokens
        data.max_response_length: max_new_tokens
        data.max_prompt_length: max_prompt_tokens
        data.train_files: prompts
        data.val_files: validation_prompts
        trainer.logger: report_to
        trainer.save_freq: save_steps
        trainer.test_freq: eval_steps
        trainer.default_local_dir: output_dir
        algorithm.use_kl_in_reward: kl_in (kl_in reward)
        actor_rollout_ref.actor.use_kl_loss: kl_in (kl_in loss)
        actor_rollout_ref.actor.kl_loss_coef: kl_coef (with kl_in loss)
        actor_rollout_ref.actor.kl_loss_type: kl_estimator (low_var_kl is k3, mse is k2)
        kl_loss_coef: kl_coef (with kl_in loss)
        data.prompt_key: {DATA} ({COLUMNS})
        data.train_batch_size: rollout_batch_size ({RESPONSES})
        algorithm.kl_ctrl.target_kl: kl_target ({PER_TOKEN})
        target_kl: kl_target ({PER_TOKEN})
        actor_rollout_ref.actor.ppo_mini_batch_size: num_mini_batches ({MINIBATCHES})
        ppo_mini_batch_size: num_mini_batches ({MINIBATCHES})
        trainer.total_epochs: total_updates ({ROLLOUTS})
    """,
    "LLaMA-Factory": f"""
        ppo_epochs: num_ppo_epochs
        ppo_target: kl_target
        ppo_whiten_rewards: whiten_rewards
        lora_target: lora_target_modules
        pref_beta: beta
        val_size: validation_split
        template: chat_template
        cutoff_len: {BOTH} (a limit each, for prompt and answer)
        columns: {DATA} ({COLUMNS})
        ppo_buffer_size: rollout_batch_size (ppo_buffer_size x batch size)
        finetuning_type: lora_r (above 0 for lora, 0 for full)
        stage: (the stage is the command: align sft, align reward, align ppo, align dpo)
    """,
    "axolotl": "val_set_size: validation_split",
}
"""A line for each name: the settings here, separated by spaces, alternatives for several stages by |, and a note."""
LINE = re.compile(r"(?P<name>[\w.]+): *(?P<here>[\w.| ]*?) *(\((?P<note>.*)\))?")


class OtherName(NamedTuple):
    """A name that is no setting here.

    Attributes:
        source: the framework that uses it, or `FORMER`.
        name: without dashes; sections are separated by points.
        here: the settings that take its place. Of alternatives, the first counts whose settings the stage has.
        note: a conversion, if the values differ, or the reason why there is no such setting.
    """

    source: str
    name: str
    here: str
    note: str


def _read(source: str, line: str) -> OtherName:
    match = LINE.fullmatch(line.strip())
    assert match, line
    return OtherName(source, match["name"], match["here"], match["note"] or "")


NAMES = tuple(_read(source, line) for source, table in TABLES.items() for line in table.strip().splitlines())


def explain(name: str, known: Collection[str]) -> str:
    """Return which settings of a stage another name stands for, such as "TRL's `optim` is `optimizer` here"; "" if unknown.

    Args:
        known: the settings of the stage.
    """
    for other in NAMES:
        if other.name == name and (names := settings_of(other, known)) is not None:
            is_former = other.source == FORMER
            if not names:
                removed, foreign = f"`{name}` was removed", f"{other.source}'s `{name}` is no setting here"
                return f"{removed if is_former else foreign}: {other.note}"
            found, note = ", ".join(f"`{each}`" for each in names), f" ({other.note})" if other.note else ""
            return f"`{name}` is now {found}{note}" if is_former else f"{other.source}'s `{name}` is {found} here{note}"
    return ""


def describe_unknown(what: str, name: str, known: Collection[str], prefix: str = "", valid_names: str = "") -> str:
    """Return the message for a name that is no setting: the setting in its place, or the nearest one.

    Args:
        what: the name as the user gave it, such as `option --kl_beta`.
        prefix: precedes the nearest setting.
        valid_names: where to look if there is no similar setting, such as `--help-all lists the valid names`.
    """
    if explained := explain(name, known):
        return f"unknown {what}: {explained}"
    hint = nearest_name_hint(name, known, prefix) or (f"; {valid_names}" if valid_names else "")
    return f"unknown {what}{hint}"


def settings_of(other: OtherName, known: Collection[str]) -> list[str] | None:
    """Return the settings that a name stands for; None if none of its alternatives is known to the stage."""
    alternatives = [part.split() for part in other.here.split("|")]
    return next((names for names in alternatives if set(names) <= set(known)), None)
