"""T5 with TRL's value heads, as in the trainers of sequence-to-sequence models before TRL 0.12."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5ForSequenceClassification

from align.core.errors import UserError
from align.model_registry.registry import resolve_model
from align.trl import AutoModelForSeq2SeqLMWithValueHead

ROLES = ("model", "value_model")


@pytest.fixture
def folder():
    return str(resolve_model("tiny-t5"))


@pytest.fixture
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def models(folder):
    def length(prompts, responses):
        return [float(len(response)) for response in responses]

    torch.manual_seed(0)
    policy, trunk = (AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    value_model = AutoModelForSeq2SeqLMWithValueHead(trunk)
    return {"model": policy, "ref_model": None, "reward_model": length, "value_model": value_model}


@pytest.fixture
def prompts(tokenizer):
    return Dataset.from_dict({"input_ids": [tokenizer("Name " + "a " * number + "color").input_ids for number in range(4)]})


@pytest.mark.parametrize("lora", [None, LoraConfig(r=4, task_type="SEQ_2_SEQ_LM")], ids=["whole", "lora"])
def test_policy_and_value_head_are_trained_in_place(make_trainer, models, tmp_path, lora):
    policy, critic = ({key: weight.clone() for key, weight in models[name].state_dict().items()} for name in ROLES)
    trainer = make_trainer({"learning_rate": 1e-3, "total_episodes": 4, "stop_token": "eos"}, peft_config=lora)
    trainer.train()
    trainer.save_model()
    assert trainer.model.value_model is models["value_model"]
    names = {key for key, weight in models["value_model"].state_dict().items() if not weight.equal(critic[key])}
    assert {"v_head.summary.weight", "v_head.summary.bias", "decoder.final_layer_norm.weight"} <= names
    kept = {key.replace("base_layer.", ""): weight for key, weight in models["model"].state_dict().items()}
    assert all(kept[key].equal(weight) for key, weight in policy.items()) == (lora is not None)
    assert (tmp_path / "out" / ("adapter_model.safetensors" if lora else "model.safetensors")).exists()


def test_a_classifier_of_another_kind_is_answered_with_what_to_give(make_trainer, folder):
    classifier = T5ForSequenceClassification.from_pretrained(folder, num_labels=1)
    with pytest.raises(UserError, match=r"value_model: .* 'score'.*give one of the models with a value head"):
        make_trainer(value_model=classifier)
    with pytest.raises(UserError, match="has no linear layer 'score'; give a reward function that calls it"):
        make_trainer({"output_dir": "again"}, reward_model=classifier)
