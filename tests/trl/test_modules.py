"""Reward and value models as public scripts for TRL 1.12 make them: modules with `base_model_prefix` and `score`."""

import copy
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from align.core.errors import UserError
from align.trl import AutoModelForCausalLMWithValueHead

ONE_UPDATE = {"total_episodes": 4, "learning_rate": 1e-3, "kl_coef": 0.0}


class Scorer(nn.Module):
    """A backbone and a head, as most scripts write it."""

    base_model_prefix = "backbone"

    def __init__(self, classifier):
        super().__init__()
        self.backbone, self.score, self.config = classifier.model, classifier.score, classifier.config


def history(make_trainer, tmp_path, name, settings=None, **arguments):
    torch.manual_seed(0)
    trainer = make_trainer(ONE_UPDATE | {"output_dir": str(tmp_path / name)} | (settings or {}), **arguments)
    trainer.train()
    return trainer.state.log_history[0], trainer


def test_modules_around_the_weights_of_classifiers_train_as_these_do(make_trainer, models, tmp_path):
    policies = {name: copy.deepcopy(models[name]) for name in ("model", "ref_model")}
    scorers = {name: Scorer(copy.deepcopy(models[name])) for name in ("reward_model", "value_model")}
    plain, _ = history(make_trainer, tmp_path, "plain")
    called, trainer = history(make_trainer, tmp_path, "called", **policies, **scorers)
    names = [name for name in plain if name not in ("eps", "step")]
    assert {name: called[name] for name in names} == pytest.approx({name: plain[name] for name in names}, abs=1e-5)
    assert trainer.value_model is scorers["value_model"]
    for plain_model, module in (("model", policies["model"]), ("value_model", scorers["value_model"])):
        trained = dict(models[plain_model].named_parameters())
        for name, weight in module.named_parameters():
            expected = trained[name.replace("backbone.", "model.", 1) if plain_model == "value_model" else name]
            assert torch.allclose(weight, expected, atol=1e-5), name
    assert not any(weight.grad is not None for weight in scorers["reward_model"].parameters())


class Offset(nn.Module):
    def __init__(self, score, offset):
        super().__init__()
        self.score, self.offset = score, offset

    def forward(self, states):
        return self.score(states) - self.offset


class Shifted(nn.Linear):
    def forward(self, states):
        return super().forward(states) - 5.0


def with_hook(classifier):
    classifier.score.register_forward_hook(lambda module, inputs, output: output - 5.0)


def with_module(classifier):
    classifier.score = Offset(classifier.score, 5.0)


def with_forward(classifier):
    forward = classifier.score.forward
    classifier.score.forward = types.MethodType(lambda self, states: forward(states) - 5.0, classifier.score)


def with_subclass(classifier):
    classifier.score.__class__ = Shifted


@pytest.mark.parametrize("change", [with_hook, with_module, with_forward, with_subclass])
def test_a_changed_head_of_a_classifier_is_called(make_trainer, models, tmp_path, change):
    change(models["reward_model"])
    change(models["value_model"])
    metrics, trainer = history(make_trainer, tmp_path, "changed", {"learning_rate": 0.0})
    assert metrics["objective/scores"] == pytest.approx(-5.0, abs=1.0)
    values = trainer.hooks.experience.old.values[trainer.hooks.experience.mask]
    assert float(values.mean()) == pytest.approx(-5.0, abs=1.0)


class TextReward(nn.Module):
    """Decodes the ids and scores the text; the backbone passes the scores on as hidden states."""

    base_model_prefix = "reader"

    def __init__(self, tokenizer):
        super().__init__()
        self.reader, self.score = TextReader(tokenizer), nn.Identity()


class TextReader(nn.Module):
    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer, self.texts = tokenizer, []

    def forward(self, input_ids, attention_mask, **settings):
        rows = zip(input_ids, attention_mask, strict=True)
        texts = [self.tokenizer.decode(ids[mask.bool()]) for ids, mask in rows]
        self.texts += texts
        scores = torch.tensor([float(len(text)) for text in texts])
        return types.SimpleNamespace(hidden_states=[scores[:, None, None].expand(*input_ids.shape, 1)])


def test_a_module_may_read_texts(make_trainer, tokenizer, tmp_path):
    module = TextReward(tokenizer)
    metrics, trainer = history(make_trainer, tmp_path, "texts", reward_model=module)
    rollout = trainer.hooks.experience.rollout
    expected = [
        tokenizer.decode([*prompt.ids, *ids]) for prompt, ids in zip(rollout.prompts, rollout.responses, strict=True)
    ]
    pad = tokenizer.pad_token
    assert sorted(module.reader.texts) == sorted(text.split(pad)[0] for text in expected)
    assert metrics["objective/scores"] == pytest.approx(sum(map(len, module.reader.texts)) / 4)


def test_an_adapter_is_trained_by_a_module_that_reads_texts_with_a_collator_of_ones_own(
    make_trainer, models, prompts, tokenizer, tmp_path
):
    """Dr.Post-Training: a PeftModel as policy, a reward of another vocabulary, and a collator that knows further columns."""

    class Collator:
        def __call__(self, rows):
            assert all(row["gold"] == "blue" for row in rows)
            return tokenizer.pad([{"input_ids": row["input_ids"]} for row in rows], return_tensors="pt")

    lora = LoraConfig(r=4, task_type="CAUSAL_LM")
    models |= {"model": get_peft_model(models["model"], lora), "ref_model": None}
    rows = prompts.remove_columns("attention_mask").add_column("gold", ["blue"] * len(prompts))
    arguments = {"reward_model": TextReward(tokenizer), "train_dataset": rows, "data_collator": Collator()}
    metrics, trainer = history(make_trainer, tmp_path, "texts", eval_dataset=None, **arguments)
    assert metrics["objective/scores"] > 5
    changed = [name for name, weight in trainer.policy_model.named_parameters() if "lora_B" in name and weight.any()]
    assert len(changed) > 0


def test_an_adapter_can_be_the_value_model(make_trainer, models, tmp_path):
    lora = LoraConfig(r=4, task_type="SEQ_CLS", modules_to_save=["score"])
    models["value_model"] = get_peft_model(models["value_model"], lora)
    before = {name: weight.clone() for name, weight in models["value_model"].named_parameters()}
    history(make_trainer, tmp_path, "adapter")
    changed = {name for name, weight in models["value_model"].named_parameters() if not weight.equal(before[name])}
    assert any("lora_B" in name for name in changed)
    assert all("lora_" in name or "modules_to_save" in name for name in changed)


def test_a_value_head_on_an_adapter_can_be_the_value_model(make_trainer, folder, tmp_path):
    lora = LoraConfig(r=4, task_type="CAUSAL_LM")
    head = AutoModelForCausalLMWithValueHead.from_pretrained(folder, peft_config=lora, dtype=torch.float32)
    before = {name: weight.clone() for name, weight in head.named_parameters()}
    history(make_trainer, tmp_path, "head", value_model=head)
    changed = {name for name, weight in head.named_parameters() if not weight.equal(before[name])}
    assert "v_head.summary.weight" in changed
    assert any("lora_B" in name for name in changed)
    assert all("lora_" in name or name.startswith("v_head") for name in changed)


def test_a_module_that_fails_or_returns_something_else_is_one_line(make_trainer, models, tmp_path):
    class Failing(nn.Module):
        def forward(self, **inputs):
            raise RuntimeError("no such layer")

    class Plain(nn.Module):
        def forward(self, **inputs):
            return types.SimpleNamespace()

    for name, body, message in (("failing", Failing(), "no such layer"), ("plain", Plain(), "hidden_states")):
        module = Scorer(models["reward_model"])
        module.backbone = body
        with pytest.raises(UserError, match=rf"reward_model.*{message}") as caught:
            history(make_trainer, tmp_path, name, reward_model=module)
        assert "\n" not in str(caught.value)


def test_a_reward_function_gets_the_columns_of_the_data(make_trainer, prompts, tmp_path):
    seen = []

    def exact(prompts, responses, answer):
        seen.extend(answer)
        return [None if value == "none" else 1.0 for value in answer]

    def short(completions, **columns):
        return [0.0 for _ in completions]

    rows = prompts.add_column("answer", ["none"] * len(prompts))
    metrics, _ = history(make_trainer, tmp_path, "columns", reward_model=[exact, short], train_dataset=rows)
    assert seen[:4] == ["none"] * 4
    assert metrics["objective/scores"] == 0.0
