from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import EarlyStoppingCallback

from align.core.errors import UserError
from align.trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from align.trl.config import InvalidArgumentError, set_batch_sizes


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("init_kl_coef", 0.2, "align.trl.legacy"),
        ("log_with", "wandb", "align.trl.legacy"),
        ("truncate_token", "eos", "stop_token"),
        ("warmup_ratio", 0.0, "warmup_steps; a value below 1 is a share"),
        ("model_name", "gpt2", "align.trl.legacy"),
        ("no_such", 1, "`no_such` is no setting"),
    ],
)
def test_a_setting_of_an_earlier_release_names_what_takes_its_place(name, value, instead):
    with pytest.raises(InvalidArgumentError) as caught:
        PPOConfig(output_dir="o", **{name: value})
    assert instead in str(caught.value)
    assert f"`{name}`" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_subclass_may_have_settings_of_its_own():
    class Own(PPOConfig):
        def __init__(self, *values, extra=1, **given):
            super().__init__(*values, **given)
            self.extra = extra

    assert Own(output_dir="o", extra=3, kl_coef=0.5).extra == 3


def test_arguments_of_an_earlier_release_name_those_of_today():
    with pytest.raises(InvalidArgumentError, match="`config`: use `args`; `tokenizer`: use `processing_class`"):
        PPOTrainer(config=None, tokenizer=None, reward_model=None)


def test_a_call_of_trl_0_11_is_answered_once_with_all_that_changes(models, tokenizer, prompts):
    model = models["model"]
    calls = [
        lambda: PPOTrainer(None, model, None, tokenizer),
        lambda: PPOTrainer(None, model, None, tokenizer, dataset=prompts, data_collator=None),
        lambda: PPOTrainer(config=None, model=model, ref_model=None, tokenizer=tokenizer, dataset=prompts),
        lambda: PPOTrainer(config=None, model=model, tokenizer=tokenizer),
        lambda: PPOConfig(ppo_epochs=4, steps=100, mini_batch_size=1, target_kl=0.1, kl_penalty="full"),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError) as caught:
            call()
        assert all(word in str(caught.value) for word in ("align.trl.legacy", "LengthSampler", "reward function"))
        assert "\n" not in str(caught.value)


def test_a_subclass_may_have_arguments_of_its_own():
    class Own(PPOTrainer):
        def __init__(self, config, **given):
            self.own = config
            super().__init__(**given)

    with pytest.raises(TypeError, match="missing"):  # Python's own check: `config` is not taken for an earlier name
        Own(config=3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SFTTrainer", "import it from trl"),
        ("PPOv2Trainer", "it is PPOTrainer since TRL 0.12"),
        ("create_reference_model", "align.trl.legacy"),
        ("nothing", "cannot import"),
    ],
)
def test_an_import_that_is_not_here_says_where_it_is(name, message):
    with pytest.raises(ImportError, match=message):
        exec(f"from align.trl import {name}")


def test_given_sizes_that_do_not_count_are_one_line_each():
    args = PPOConfig(output_dir="o", per_device_train_batch_size=4, batch_size=16, mini_batch_size=4)
    (line,) = set_batch_sizes(args, rows=8, processes=1)
    assert line.startswith("batch_size is 16 and has no effect: it is 4")
    assert set_batch_sizes(args, rows=8, processes=1) == []


def test_overridden_methods_are_called_or_named(make_trainer, capsys):
    seen, saved = [], []

    class Own(PPOTrainer):
        def log(self, logs, start_time=None):
            seen.append(dict(logs))
            super().log(logs | {"mine": 1.0}, start_time)

        def _save_checkpoint(self, model, trial):
            saved.append(model)
            super()._save_checkpoint(model, trial)

        def save_model(self, output_dir=None, _internal_call=False):
            saved.append((Path(output_dir).name, _internal_call))
            super().save_model(output_dir, _internal_call)

        def create_optimizer(self):
            raise NotImplementedError

        def null_ref_context(self):
            raise NotImplementedError

    trainer = make_trainer(trainer=Own)
    said = capsys.readouterr().err
    assert all(f"Own.{name} is never called" in said for name in ("create_optimizer", "null_ref_context"))
    trainer.train()
    trainer.save_model(trainer.args.output_dir)
    assert saved == [trainer.model, ("checkpoint-2", True), ("out", False)]
    assert len(seen) == 2
    history = [row for row in trainer.state.log_history if "mine" in row]
    assert [row["step"] for row in history] == [1, 2]
    assert all(row["epoch"] > 0 for row in history)


def test_an_error_inside_a_property_is_not_hidden(make_trainer):
    class Own(PPOTrainer):
        @property
        def mine(self):
            return {}.foo

    with pytest.raises(AttributeError, match="'dict' object has no attribute 'foo'"):
        make_trainer(trainer=Own).mine  # noqa: B018


@pytest.mark.parametrize("begin", ["padding", "text"])
def test_rows_that_are_padded_with_several_eos_are_named(make_trainer, tokenizer, capsys, begin):
    tokenizer.pad_token = tokenizer.eos_token
    eos = tokenizer.eos_token_id
    first = [eos, eos, 65, 66] if begin == "padding" else [eos, 65, 66]
    rows = Dataset.from_list([{"input_ids": first}, {"input_ids": [65, 66, 67, eos]}] * 4)
    make_trainer(train_dataset=rows, eval_dataset=None)
    said = "4 of 8 prompts begin or end with several EOS tokens" in capsys.readouterr().err
    assert said == (begin == "padding")


def test_mistakes_are_value_errors(make_trainer, models, prompts, folder):
    wrapped = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    rows = {"ids": [5], "dict": {"input_ids": [1], "attention_mask": [1]}, "nested": [[5, 6]]}
    data = {name: Dataset.from_list([{"input_ids": ids}]) for name, ids in rows.items()}
    for arguments, message in (
        ({"args": None}, "`args` must be an `align.trl.PPOConfig`, not NoneType"),
        ({"processing_class": None}, "`processing_class` must be a tokenizer of transformers, not NoneType"),
        ({"model": "gpt2"}, "`model` must be a loaded model of transformers, not 'gpt2'"),
        ({"model": torch.compile(torch.nn.Linear(1, 1))}, "loaded model of transformers, not OptimizedModule"),
        ({"value_model": None}, "`value_model` must be a loaded model of transformers, not None"),
        ({"train_dataset": None}, "`train_dataset` is required"),
        ({"train_dataset": prompts.rename_column("input_ids", "ids")}, "no column `input_ids`"),
        ({"train_dataset": prompts.select([])}, "the data set has no rows"),
        ({"train_dataset": prompts.to_iterable_dataset()}, "`train_dataset` is an `IterableDataset`, which has no length"),
        ({"train_dataset": DatasetDict(test=data["ids"])}, r"such as train_dataset\['test'\]"),
        ({"train_dataset": data["dict"]}, "return_dict=False"),
        ({"train_dataset": data["nested"]}, "nested: tokenize each row without return_tensors"),
        ({"ref_model": models["model"]}, "`model` and `ref_model` cannot be the same object"),
        ({"model": wrapped}, "`model` is an AutoModelForCausalLMWithValueHead: give its `pretrained_model`"),
        ({"ref_model": wrapped}, "`ref_model` is an AutoModelForCausalLMWithValueHead: give its"),
        ({"peft_config": {"r": 8}}, "`peft_config` must be a `peft.PeftConfig`, not dict"),
        ({"callbacks": [EarlyStoppingCallback()]}, "EarlyStoppingCallback reads evaluations"),
        ({"settings": {"num_mini_batches": 3}}, "multiple of `num_mini_batches`, inexact division: 4 / 3"),
        ({"settings": {"stop_token": "eos", "stop_token_id": 1}}, "You cannot set both `stop_token` and `stop_token_id`"),
        ({"settings": {"kl_estimator": "k2"}}, "`kl_estimator` is 'k2', but must be 'k1' or 'k3'"),
        ({"settings": {"kl_estimator": "K1"}}, "`kl_estimator` is 'K1', but must be 'k1' or 'k3'"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(**arguments)
    models["model"].lm_head.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="is quantized, so its weights cannot be trained: give a `peft_config`"):
        make_trainer()


def test_a_trainer_has_the_attributes_of_trl_generates_with_it_and_explains_an_earlier_loop(
    make_trainer, models, tokenizer, prompts
):
    from trl.models.utils import unwrap_model_for_generation

    trainer = make_trainer()
    assert trainer.policy_model is models["model"]
    assert not trainer.is_peft_model
    assert trainer.args.local_batch_size == len(next(iter(trainer.dataloader))["input_ids"])
    assert sum(len(batch["input_ids"]) for batch in trainer.eval_dataloader) == len(prompts)
    with pytest.raises(AttributeError, match=r"'step': call train\(\)"):
        trainer.step([], [], [])
    with pytest.raises(AttributeError, match="'evaluate': the trainer does not evaluate"):
        trainer.evaluate()
    with unwrap_model_for_generation(trainer.model, trainer.accelerator) as unwrapped:
        assert unwrapped.policy is trainer.policy_model
        ids = unwrapped.policy.generate(**tokenizer(["a"], return_tensors="pt"), max_new_tokens=2, do_sample=False)
    assert ids.shape[0] == 1


def test_a_module_without_the_parts_that_are_called_is_refused(make_trainer, models):
    class Own(nn.Module):
        def __init__(self, backbone):
            super().__init__()
            self.backbone = backbone

    with pytest.raises(UserError, match="value_model: Own is no model of transformers"):
        make_trainer(value_model=Own(models["value_model"].model))
    with pytest.raises(UserError, match="reward_model: Own is a model, but no transformers classifier: give a function"):
        make_trainer(reward_model=Own(models["reward_model"].model))


def test_training_data_are_not_replaced_without_a_word(make_trainer):
    trainer = make_trainer()
    with pytest.raises(InvalidArgumentError, match="train_dataset"):
        trainer.dataloader = []


def test_prompts_with_two_start_tokens_are_named(make_trainer, tokenizer, caplog):
    start = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = start
    texts = [tokenizer.bos_token + "Name a color.", "Name a color.", "Name a color."]
    make_trainer(train_dataset=Dataset.from_list([tokenizer(text).data for text in texts]), eval_dataset=None)
    assert "1 of 3 prompts begin with a duplicate start token" in caplog.text
