"""The objects that a script gives the trainer: what is changed in them, and which of them may share weights."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_tokenizer_keeps_its_chat_templates_in_memory_and_in_every_folder(make_trainer, tokenizer, tmp_path):
    templates = {"default": CHATML, "tool_use": "{{ messages }}"}
    tokenizer.chat_template = dict(templates)
    trainer = make_trainer({"save_steps": 1, "total_episodes": 4})
    trainer.train()
    trainer.save_model()
    assert trainer.processing_class is trainer.callback_handler.processing_class is tokenizer
    assert tokenizer.chat_template == templates
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-1"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == templates


def test_a_tokenizer_without_a_chat_template_gets_none(make_trainer, tokenizer, tmp_path):
    tokenizer.chat_template = None
    make_trainer().save_model()
    assert tokenizer.chat_template is None
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is None


@pytest.mark.parametrize("is_peft", [False, True])
@pytest.mark.parametrize(
    ("kept", "other"),
    [
        ("model", "ref_model"),
        ("model", "reward_model"),
        ("model", "value_model"),
        ("ref_model", "value_model"),
        ("value_model", "reward_model"),
    ],
)
def test_models_that_share_weights_of_a_trained_one_are_refused(kept, other, is_peft, make_trainer, models):
    """The body alone is shared, as in `reward_model.model = model.model`."""
    models[other].model = models[kept].model
    if is_peft:
        models["model"] = get_peft_model(models["model"], LoraConfig(r=4, task_type="CAUSAL_LM"))
        models["ref_model"] = models["ref_model"] if "ref_model" in (kept, other) else None
    with pytest.raises(ValueError, match=f"`{kept}` and `{other}` share weights, which training changes: give a copy"):
        make_trainer()


def test_a_model_in_two_trained_roles_is_refused_and_its_copy_is_not(make_trainer, models):
    reward_model = models["reward_model"]
    with pytest.raises(ValueError, match="`value_model` and `reward_model` share weights"):
        make_trainer(value_model=reward_model)
    before = copy.deepcopy(reward_model.state_dict())
    value_model = copy.deepcopy(reward_model)
    make_trainer({"learning_rate": 1e-3}, value_model=value_model, ref_model=None).train()
    assert all(torch.equal(weight, before[name]) for name, weight in reward_model.state_dict().items())
    assert not any(torch.equal(weight, before[name]) for name, weight in value_model.named_parameters())


def test_a_frozen_body_of_the_value_model_stays_frozen(make_trainer, models):
    value_model = models["value_model"]
    value_model.model.requires_grad_(False)
    before = copy.deepcopy(value_model.state_dict())
    make_trainer({"learning_rate": 1e-3}).train()
    changed = [name for name, weight in value_model.state_dict().items() if not torch.equal(weight, before[name])]
    assert changed == ["score.weight"]
