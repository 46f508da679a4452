import copy
import json

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.utils import create_reference_model

from align.core.errors import UserError
from align.reward.checkpoint import reward_of_classifier
from align.tokenization.encoded import SampledResponse
from tests.badly_behaved.specimens import CHATML


@pytest.mark.parametrize("templates", [{"default": CHATML, "tool_use": "{{ messages }}"}, None])
def test_a_tokenizer_keeps_its_chat_templates_in_memory_and_in_every_folder(templates, make_trainer, tokenizer, tmp_path):
    tokenizer.chat_template = copy.copy(templates)
    trainer = make_trainer({"save_steps": 1, "total_episodes": 4})
    trainer.train()
    trainer.save_model()
    assert trainer.processing_class is trainer.callback_handler.processing_class is tokenizer
    assert tokenizer.chat_template == templates
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-1"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == templates


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


def test_a_reference_may_share_frozen_layers_with_the_policy(make_trainer, models):
    models["ref_model"] = create_reference_model(models["model"], num_shared_layers=1)
    shared, own = (models["model"].model.layers[place].mlp.up_proj.weight for place in (0, 1))
    before = shared.clone(), own.clone()
    assert models["ref_model"].model.layers[0].mlp.up_proj.weight.data_ptr() == shared.data_ptr()
    make_trainer({"learning_rate": 1e-3}).train()
    assert torch.equal(shared, before[0])
    assert not torch.equal(own, before[1])
    assert torch.equal(models["ref_model"].model.layers[1].mlp.up_proj.weight, before[1])


def test_a_model_in_two_trained_roles_is_refused_and_its_copy_is_not(make_trainer, models):
    reward_model = models["reward_model"]
    with pytest.raises(ValueError, match="`value_model` and `reward_model` share weights"):
        make_trainer(value_model=reward_model)
    models["value_model"].model = models["model"].requires_grad_(False).model  # a new adapter would be in both
    with pytest.raises(ValueError, match="`model` and `value_model` share weights"):
        make_trainer(ref_model=None, peft_config=LoraConfig(r=4, task_type="CAUSAL_LM"))
    models["value_model"].model = copy.deepcopy(models["model"].requires_grad_(True).model)
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


TURNS = [{"role": "system", "content": "Be nice."}, {"role": "user", "content": "Hi"}]


@pytest.fixture
def chat_prompts(tokenizer):
    """Prompts that the policy's chat template has rendered; `chat_prompts(prompt=...)` adds a column to the token ids."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    ids = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
    return lambda **columns: Dataset.from_list([{"input_ids": ids, **columns}] * 4)


@pytest.fixture
def other_reward(models, folder):
    """A reward model of another vocabulary and template."""
    other = AutoTokenizer.from_pretrained(folder)
    other.add_tokens(["moon"])
    other.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    models["reward_model"].resize_token_embeddings(len(other), mean_resizing=False)
    models["reward_model"] = reward_of_classifier(models["reward_model"], other)
    return models["reward_model"]


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_a_reward_model_of_another_vocabulary_reads_the_turns_of_the_data(
    column, make_trainer, models, chat_prompts, other_reward
):
    answer = [{"role": "assistant", "content": "Ho"}] if column == "messages" else []
    for name in ("model", "ref_model", "value_model"):
        models[name].resize_token_embeddings(267, mean_resizing=False)
    trainer = make_trainer(train_dataset=chat_prompts(**{column: [*TURNS, *answer]}), eval_dataset=None)
    (scorer,) = trainer.setup.rewards.models
    prompt = trainer.setup.prompts[0]
    response = SampledResponse(prompt.conversation, prompt.ids, [20, 21], "It", given_as_ids=True)
    ids = scorer.encode(response)
    text = other_reward.loaded.tokenization.tokenizer.decode([*ids.prompt, *ids.response])
    assert text == "[system]Be nice.[user]Hi[assistant]It"
    trainer.train()


def test_markup_of_a_chat_template_is_no_text_of_a_prompt(make_trainer, models, chat_prompts, tokenizer, other_reward):
    rendered = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, tokenize=False)
    for columns in ({}, {"prompt": rendered}, {"prompt": 3}):
        with pytest.raises(UserError, match=r"a prompt of token ids contains '<\|im_(start|end)\|>', as a chat template"):
            make_trainer(train_dataset=chat_prompts(**columns))


def test_a_reward_model_may_lack_a_row_for_padding_that_the_policy_has(make_trainer, models, tokenizer):
    for name in ("model", "ref_model", "value_model"):
        models[name].resize_token_embeddings(len(tokenizer), mean_resizing=False)
    models["model"].lm_head.weight.data[tokenizer.pad_token_id] *= 1e3  # padding is sampled about every second time
    trainer = make_trainer({"save_steps": 1})
    trainer.train()
    trainer.save_model()
    assert models["reward_model"].get_input_embeddings().num_embeddings == len(tokenizer) - 1


def test_a_classifier_with_an_adapter_scores_also_if_it_is_not_merged(make_trainer, models, tmp_path):
    """`AutoModelForSequenceClassification.from_pretrained` of an adapter's folder has no `merge_and_unload`."""
    lora = LoraConfig(r=4, task_type="SEQ_CLS", modules_to_save=["score"], init_lora_weights=False)
    get_peft_model(models["reward_model"], lora).save_pretrained(tmp_path / "adapter")
    folder = tmp_path / "adapter"
    loaded = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    merged = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    unmerged = copy.deepcopy(merged)
    scores = []
    for name, model in (("loaded", loaded), ("merged", merged.merge_and_unload()), ("unmerged", unmerged)):
        settings = {"output_dir": str(tmp_path / name), "total_episodes": 4, "learning_rate": 0.0}
        trainer = make_trainer(settings, reward_model=model)
        trainer.train()
        scores.append(trainer.state.log_history[0]["objective/scores"])
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-5)


def test_the_console_shows_the_scores_that_are_logged_and_tables_those_without_the_penalty(make_trainer, tmp_path, capsys):
    # Without it, transformers' log level decides, which other tests lower.
    settings = {"missing_eos_penalty": 2.0, "total_episodes": 4, "num_sample_generations": 1, "disable_tqdm": False}
    trainer = make_trainer(settings, reward_model=lambda prompts, responses: [7.0] * len(responses))
    trainer.train()
    (row,) = (json.loads(line) for line in (tmp_path / "out" / "align" / "metrics.jsonl").read_text().splitlines())
    score = trainer.state.log_history[0]["objective/scores"]
    assert score == row["objective/scores"] == row["reward/mean"] == 5.0
    assert row["reward/missing_eos_penalty"] == -2.0
    shown = capsys.readouterr().err
    assert "ppo 1/1: reward 5.000" in shown
    assert " 7 " in shown.split("model response")[1]
