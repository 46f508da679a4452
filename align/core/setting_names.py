"""Names that settings had before, and names that other frameworks give them; the message for an unknown one names ours."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

FORMER = "before"


class OtherName(NamedTuple):
    """A name that is no setting here.

    Attributes:
        source: the framework that uses it, or `FORMER`.
        name: without dashes; sections are separated by points.
        here: the settings that take its place, separated by spaces. Of alternatives for several stages, separated by |, the
            first counts whose settings the stage has.
        note: a conversion, if the values differ, or the reason why there is no such setting.
    """

    source: str
    name: str
    here: str
    note: str = ""


def _renamed(source: str, pairs: str) -> Iterator[OtherName]:
    """Names whose values stay as they are, one `name here` a line."""
    for line in pairs.strip().splitlines():
        name, here = line.split(maxsplit=1)
        yield OtherName(source, name, here)


EPOCHS, BATCH = "num_train_epochs | num_ppo_epochs", "batch_size | rollout_batch_size"
FRACTION = "as a share of all updates"
SERVER = "a function that asks the server: docs/howto/reward-elsewhere.md"
LAUNCHER = "set it in the configuration of accelerate, --config_file configs/accelerate/zero2.yaml"
MINIBATCHES = "a count: rollout_batch_size divided by that size"
DATA, COLUMNS = "train_data | prompts", "in brackets after the file: FILE[FIELD=COLUMN, ...]"
SPLIT = "in brackets after the name: NAME[split=...]"
BOTH = "max_prompt_tokens max_response_tokens | max_prompt_tokens max_new_tokens"
LIMITS = "a limit each, for prompt and answer"
PER_TOKEN = "in nats per response; it is per token there"
RESPONSES = "it counts responses: prompts x samples_per_prompt"
GLOBAL = "over all processes: per-device size x accumulation steps x processes"

NAMES: tuple[OtherName, ...] = (
    *_renamed(
        FORMER,
        """
        kl_beta kl_coef
        kl.beta kl_coef
        kl.target kl_target
        kl.horizon kl_horizon
        clip cliprange
        clip_high cliprange_high
        value_clip cliprange_value
        value_weight vf_coef
        entropy_weight ent_coef
        loss.clip cliprange
        loss.clip_high cliprange_high
        loss.value_clip cliprange_value
        loss.value_weight vf_coef
        loss.entropy_weight ent_coef
        minibatches num_mini_batches
        updates total_updates
        rollout_size rollout_batch_size
        advantages advantage_estimator
        log_to report_to
        schedule lr_scheduler_type
        warmup warmup_ratio
        layer_decay layerwise_lr_decay
        save_every save_steps
        keep_checkpoints save_total_limit
        router_loss_weight router_aux_loss_coef
        resume resume_from_checkpoint
        evaluate_every eval_steps
        lora_rank lora_r
        lora_targets lora_target_modules
        keep_confidence best_policy_confidence
        judge_patience selection.early_stopping_patience
        selection.patience selection.early_stopping_patience
        judge_model selection.reward_model
        lost_after peer_timeout
        student_share on_policy_fraction
        layer_step keep_every_nth_layer
        held_out_share validation_split
        student_start student
        overlap labelers_per_item
        ptx_data ptx.data
        ptx_weight ptx.coef
        """,
    ),
    OtherName(FORMER, "epochs", EPOCHS),
    OtherName(FORMER, "kl", "kl_coef kl_target kl_horizon", "a block before; the settings stand alone"),
    OtherName(FORMER, "kl_penalty", "kl_in kl_estimator", "k2 and k3 were kl_in loss"),
    OtherName(FORMER, "kl.penalty", "kl_in kl_estimator", "k2 and k3 were kl_in loss"),
    OtherName(FORMER, "loss", "cliprange vf_coef ent_coef", "a block before; the settings stand alone"),
    OtherName(
        FORMER,
        "missing_eos",
        "missing_eos_score missing_eos_penalty",
        "replace is the score, lower the penalty, and keep is missing_eos_score none",
    ),
    *_renamed(
        "TRL",
        """
        response_length max_new_tokens
        max_completion_length max_new_tokens
        max_prompt_length max_prompt_tokens
        num_generations samples_per_prompt
        sft_model_path model
        reward_model_path reward_model
        model_name_or_path model
        dataset_name train_data | prompts
        init_kl_coef kl_coef
        target kl_target
        horizon kl_horizon
        steps total_episodes
        epsilon cliprange
        epsilon_high cliprange_high
        reward_funcs reward_functions
        center_rewards_coefficient centering_weight
        loss_type loss
        optim optimizer
        """,
    ),
    OtherName("TRL", "beta", "kl_coef", "its default is 0 in GRPO"),
    OtherName("TRL", "adap_kl_ctrl", "kl_target", "above 0: kl_coef is adapted"),
    OtherName("TRL", "stop_token", "stop_token_ids", "ids instead of a word; eos is the default"),
    OtherName("TRL", "stop_token_id", "stop_token_ids"),
    OtherName("TRL", "max_length", "max_prompt_tokens max_response_tokens", "a limit each"),
    OtherName("TRL", "per_device_train_batch_size", BATCH, GLOBAL),
    OtherName("TRL", "mini_batch_size", "num_mini_batches", MINIBATCHES),
    OtherName("TRL", "gradient_accumulation_steps", "micro_batch_tokens", "a limit on memory that changes no result"),
    OtherName("TRL", "local_rollout_forward_batch_size", "micro_batch_tokens", "a limit on memory that changes no result"),
    OtherName("TRL", "per_device_eval_batch_size", "micro_batch_tokens", "a limit on memory that changes no result"),
    OtherName("TRL", "warmup_steps", "warmup_ratio", FRACTION),
    OtherName("TRL", "max_steps", "num_train_epochs | total_updates", "passes over the data, or rollouts in PPO"),
    OtherName("TRL", "bf16", "dtype", "dtype bfloat16"),
    OtherName("TRL", "fp16", "dtype", "there is no float16; dtype bfloat16"),
    OtherName("TRL", "torch_dtype", "dtype"),
    OtherName("TRL", "use_peft", "lora_r", "above 0"),
    OtherName("TRL", "use_vllm", "engine", "vllm-server or vllm-colocate"),
    OtherName("TRL", "logging_steps", "", "each update is logged"),
    OtherName("TRL", "eval_strategy", "eval_steps"),
    OtherName("TRL", "num_sample_generations", "eval_steps", "with validation_prompts, in samples.jsonl"),
    OtherName("TRL", "deepspeed", "", LAUNCHER),
    OtherName("TRL", "dataset_config", DATA, "in brackets after the name: NAME[subset=...]"),
    OtherName("TRL", "dataset_train_split", DATA, SPLIT),
    OtherName("TRL", "dataset_test_split", "validation_data | validation_prompts", SPLIT),
    *_renamed(
        "OpenRLHF",
        """
        algo.kl.init_coef kl_coef
        algo.kl.horizon kl_horizon
        algo.advantage.estimator advantage_estimator
        algo.advantage.gamma gamma
        algo.advantage.lambd lam
        actor.eps_clip cliprange
        critic.value_clip cliprange_value
        rollout.n_samples_per_prompt samples_per_prompt
        rollout.max_new_tokens max_new_tokens
        reward.model_name_or_path reward_model
        train.max_epochs num_ppo_epochs
        eps_clip cliprange
        lambd lam
        n_samples_per_prompt samples_per_prompt
        generate_max_len max_new_tokens
        prompt_max_len max_prompt_tokens
        pretrain model
        reward_pretrain reward_model
        prompt_data prompts
        dataset train_data | prompts
        actor_learning_rate learning_rate
        critic_learning_rate value_learning_rate
        freezing_actor_steps critic_warmup
        ptx_coef ptx.coef
        save_path output_dir
        target_modules lora_target_modules
        """,
    ),
    OtherName("OpenRLHF", "max_epochs", EPOCHS),
    OtherName("OpenRLHF", "num_episodes", "total_updates", "rollouts, not passes over the prompts"),
    OtherName("OpenRLHF", "rollout.batch_size", "rollout_batch_size", RESPONSES),
    OtherName("OpenRLHF", "algo.kl.target", "kl_target", PER_TOKEN),
    OtherName("OpenRLHF", "train.batch_size", "num_mini_batches", MINIBATCHES),
    OtherName("OpenRLHF", "train_batch_size", f"num_mini_batches | {BATCH}", "num_mini_batches is a count, not a size"),
    OtherName("OpenRLHF", "micro_train_batch_size", "micro_batch_tokens", "a limit on memory that changes no result"),
    OtherName("OpenRLHF", "use_kl_loss", "kl_in", "kl_in loss"),
    OtherName("OpenRLHF", "critic.adam.lr", "value_learning_rate"),
    OtherName("OpenRLHF", "remote_rm_url", "reward_functions", SERVER),
    OtherName(
        "OpenRLHF",
        "reward.remote_url",
        "reward_functions",
        SERVER,
    ),
    OtherName("OpenRLHF", "reward.stop_properly_penalty_coef", "missing_eos_score missing_eos_penalty"),
    OtherName("OpenRLHF", "zero_stage", "", LAUNCHER),
    OtherName("OpenRLHF", "input_key", DATA, COLUMNS),
    OtherName("OpenRLHF", "output_key", DATA, COLUMNS),
    OtherName("OpenRLHF", "prompt_key", DATA, COLUMNS),
    OtherName("OpenRLHF", "chosen_key", DATA, COLUMNS),
    OtherName("OpenRLHF", "rejected_key", DATA, COLUMNS),
    *_renamed(
        "verl",
        """
        algorithm.kl_ctrl.kl_coef kl_coef
        algorithm.kl_ctrl.horizon kl_horizon
        algorithm.adv_estimator advantage_estimator
        algorithm.gamma gamma
        algorithm.lam lam
        adv_estimator advantage_estimator
        actor_rollout_ref.model.path model
        actor_rollout_ref.actor.optim.lr learning_rate
        actor_rollout_ref.actor.clip_ratio cliprange
        actor_rollout_ref.actor.clip_ratio_high cliprange_high
        actor_rollout_ref.actor.entropy_coeff ent_coef
        actor_rollout_ref.actor.ppo_epochs num_ppo_epochs
        actor_rollout_ref.rollout.n samples_per_prompt
        actor_rollout_ref.rollout.temperature temperature
        critic.cliprange_value cliprange_value
        critic.optim.lr value_learning_rate
        clip_ratio cliprange
        clip_ratio_high cliprange_high
        entropy_coeff ent_coef
        max_response_length max_new_tokens
        data.max_response_length max_new_tokens
        data.max_prompt_length max_prompt_tokens
        data.train_files prompts
        data.val_files validation_prompts
        trainer.logger report_to
        trainer.save_freq save_steps
        trainer.test_freq eval_steps
        trainer.default_local_dir output_dir
        """,
    ),
    OtherName("verl", "algorithm.use_kl_in_reward", "kl_in", "kl_in reward"),
    OtherName("verl", "actor_rollout_ref.actor.use_kl_loss", "kl_in", "kl_in loss"),
    OtherName("verl", "actor_rollout_ref.actor.kl_loss_coef", "kl_coef", "with kl_in loss"),
    OtherName("verl", "actor_rollout_ref.actor.kl_loss_type", "kl_estimator", "low_var_kl is k3, mse is k2"),
    OtherName("verl", "kl_loss_coef", "kl_coef", "with kl_in loss"),
    OtherName("verl", "data.prompt_key", DATA, COLUMNS),
    OtherName("verl", "data.train_batch_size", "rollout_batch_size", RESPONSES),
    OtherName("verl", "algorithm.kl_ctrl.target_kl", "kl_target", PER_TOKEN),
    OtherName("verl", "target_kl", "kl_target", PER_TOKEN),
    OtherName("verl", "actor_rollout_ref.actor.ppo_mini_batch_size", "num_mini_batches", MINIBATCHES),
    OtherName("verl", "ppo_mini_batch_size", "num_mini_batches", MINIBATCHES),
    OtherName("verl", "trainer.total_epochs", "total_updates", "rollouts, not passes over the prompts"),
    *_renamed(
        "LLaMA-Factory",
        """
        ppo_epochs num_ppo_epochs
        ppo_target kl_target
        ppo_whiten_rewards whiten_rewards
        lora_target lora_target_modules
        pref_beta beta
        val_size validation_split
        template chat_template
        """,
    ),
    OtherName("LLaMA-Factory", "cutoff_len", BOTH, LIMITS),
    OtherName("LLaMA-Factory", "columns", DATA, COLUMNS),
    OtherName("axolotl", "val_set_size", "validation_split"),
    OtherName("LLaMA-Factory", "ppo_buffer_size", "rollout_batch_size", "ppo_buffer_size x batch size"),
    OtherName("LLaMA-Factory", "finetuning_type", "lora_r", "above 0 for lora, 0 for full"),
    OtherName("LLaMA-Factory", "stage", "", "the stage is the command: align sft, align reward, align ppo, align dpo"),
)


def explain(name: str, known: Collection[str]) -> str:
    """Return which settings of a stage another name stands for, such as "`kl_beta` is now `kl_coef`"; "" if unknown.

    Args:
        known: the settings of the stage.
    """
    for other in NAMES:
        if other.name == name and (names := settings_of(other, known)) is not None:
            found = ", ".join(f"`{each}`" for each in names)
            owner = "" if other.source == FORMER else f"{other.source}'s "
            verb = "is now" if other.source == FORMER else "is"
            place = "" if other.source == FORMER else " here"
            if not names:
                return f"{owner}`{name}` is no setting here: {other.note}"
            return f"{owner}`{name}` {verb} {found}{place}" + (f" ({other.note})" if other.note else "")
    return ""


def settings_of(other: OtherName, known: Collection[str]) -> list[str] | None:
    """Return the settings that a name stands for; None if none of its alternatives is known to the stage."""
    alternatives = [part.split() for part in other.here.split("|")]
    return next((names for names in alternatives if set(names) <= set(known)), None)
