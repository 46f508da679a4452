"""A saved reward model: a classifier for transformers, PEFT and TRL, and the same rewards and mean for this package."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig as TRLRewardConfig
from trl import RewardTrainer

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.eval.reward.task import RewardEvalConfig, run_reward_eval
from align.models.checkpoint import weights_of
from align.models.heads import RewardModel, ScalarHead
from align.models.loading import load
from align.models.roles import Role, Roles
from align.ppo.scoring_models import can_share_base, load_reward_adapter, load_rewards
from align.ppo.setup import build_actor_critic
from align.reward.checkpoint import (
    is_reward_model,
    load_head,
    load_reward_model,
    require_reward_model,
    save_reward_model,
)
from align.reward.scoring import RewardModelScorer, RewardService
from align.tokenization.encoded import SampledResponse
from tests.models.adapters import PROMPT, PROMPTS, RESPONSE, RESPONSES, adapter_weights, states, trainable

CARD = {"title": "A model", "stage": "reward"}


def saved_reward(load_sharp, folder, name, lora_rank, mean=0.75):
    loaded = load_sharp(name, adapter="reward", lora_rank=lora_rank)
    torch.manual_seed(6)
    head = ScalarHead(loaded.backbone.hidden_size, bias=False)
    model = RewardModel(loaded.backbone, head, loaded.adapter)
    state = model.state_dict()
    weights = weights_of(loaded.backbone, state, "backbone.model.")
    facts = {"mean": mean, "mean_over": 4, "base": loaded.base}
    save_reward_model(folder, loaded, weights, state["head.linear.weight"], facts, CARD)
    with torch.no_grad():
        rewards = model(PROMPT, RESPONSE)
    assert (rewards[0] - rewards[1]).abs() > 0.1
    return rewards


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_a_saved_reward_model_is_a_classifier_for_other_libraries(name, lora_rank, load_sharp, sharp_folders, tmp_path):
    expected = saved_reward(load_sharp, tmp_path / "reward", name, lora_rank)
    if lora_rank:
        base = AutoModelForSequenceClassification.from_pretrained(sharp_folders[name], num_labels=1)
        classifier = PeftModel.from_pretrained(base, tmp_path / "reward").eval()
    else:
        classifier, report = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "reward", output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
    rows = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    width = max(map(len, rows)) + 3
    for left in (False, True):
        padding = [[0] * (width - len(row)) for row in rows]
        ids = torch.tensor([pad + row if left else row + pad for pad, row in zip(padding, rows, strict=True)])
        mask = (ids != 0).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            found = classifier(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        assert found.shape == (2, 1)
        torch.testing.assert_close(found[:, 0], expected, atol=1e-5, rtol=0)


def test_trls_reward_trainer_takes_a_saved_reward_model(load_sharp, tmp_path):
    expected = saved_reward(load_sharp, tmp_path / "reward", "tiny-llama", 0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "reward")
    rows = Dataset.from_list([{"prompt": "Hi", "chosen": " there", "rejected": " no"}] * 2)
    settings = TRLRewardConfig(
        output_dir=str(tmp_path / "trl"), report_to="none", use_cpu=True, per_device_train_batch_size=1
    )
    trainer = RewardTrainer(str(tmp_path / "reward"), settings, train_dataset=rows, processing_class=tokenizer)
    assert type(trainer.model).__name__ == "LlamaForSequenceClassification"
    ids = torch.tensor([PROMPTS[0] + RESPONSES[0]])
    with torch.no_grad():
        found = trainer.model.eval()(input_ids=ids.to(trainer.model.device)).logits
    assert float(found) == pytest.approx(float(expected[0]), abs=1e-2)  # TRL may load it in bfloat16


@pytest.mark.parametrize("lora_rank", [0, 4])
@torch.no_grad()
def test_a_reward_model_comes_back_with_its_mean(tiny_name, lora_rank, load_sharp, tmp_path):
    expected = saved_reward(load_sharp, tmp_path / "reward", tiny_name, lora_rank, mean=-1.25)
    found = load_reward_model(str(tmp_path / "reward"), "float32")
    # A merged adapter multiplies in another order.
    torch.testing.assert_close(found.model(PROMPT, RESPONSE), expected, atol=1e-4 if lora_rank else 1e-6, rtol=0)
    assert found.mean == -1.25
    assert not any(weight.requires_grad for weight in found.model.parameters())
    assert is_reward_model(str(tmp_path / "reward"))
    shared = found.model(Padded.from_lists([PROMPTS[0]]), Padded.from_lists(RESPONSES), torch.tensor([0, 0]))
    assert float(shared[0]) == pytest.approx(float(expected[0]), abs=1e-4)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_training_can_go_on_from_a_reward_model(tiny_name, lora_rank, load_sharp, tmp_path):
    expected = saved_reward(load_sharp, tmp_path / "reward", tiny_name, lora_rank)
    loaded = load(
        ModelConfig(model=str(tmp_path / "reward"), lora_rank=lora_rank),
        torch.float32,
        adapter="reward",
        allow_reward_model=True,
    )
    head, _ = load_head(str(tmp_path / "reward"), loaded.backbone)
    model = RewardModel(loaded.backbone, head, loaded.adapter)
    torch.testing.assert_close(model(PROMPT, RESPONSE).detach(), expected, atol=1e-5, rtol=0)
    weights = weights_of(loaded.backbone)
    facts = {"mean": 0.0, "mean_over": 0, "base": loaded.base}
    save_reward_model(tmp_path / "further", loaded, weights, head.linear.weight.detach(), facts, CARD)
    again = load_reward_model(str(tmp_path / "further"), "float32")
    torch.testing.assert_close(again.model(PROMPT, RESPONSE), expected, atol=1e-4, rtol=0)


# What most templates of the ecosystem do: a token ends the turn, and a line break follows it.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def foreign(sharp_folders, tmp_path):
    """`foreign("tiny-llama", labels=1)`: a folder as another library leaves it, with a chat template of its own."""

    def made(name, **settings):
        torch.manual_seed(5)
        folder = tmp_path / name
        AutoModelForSequenceClassification.from_pretrained(sharp_folders[name], **settings).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(sharp_folders[name])
        tokenizer.chat_template = CHATML
        tokenizer.save_pretrained(folder)
        return str(folder)

    return made


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
@torch.no_grad()
def test_any_classifier_with_one_label_is_a_reward_model(name, foreign, load_sharp):
    """Its rewards are those that transformers computes from the tokenizer's own rendering of the conversation."""
    folder = foreign(name, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    classifier.config.pad_token_id = None  # one row at a time: the last token is read, whatever it is
    prompt, policy = ({"role": "user", "content": "Hi <|im_end|> you"},), load_sharp(name)
    texts = ["There.", "No", ""]
    expected = []
    for text in texts:
        messages = [*prompt, {"role": "assistant", "content": text}]
        ids = tokenizer.apply_chat_template(messages, return_dict=False, sanitize_control_tokens=True)
        expected.append(float(classifier(input_ids=torch.tensor([ids])).logits))
    found = load_reward_model(folder, "float32")
    scorer = RewardModelScorer.from_loaded(found, policy.tokenization, Accelerator(cpu=True), 999)
    assert scorer([SampledResponse(prompt, [1], [2], text) for text in texts]) == pytest.approx(expected, abs=1e-5)
    assert len({round(reward, 3) for reward in expected}) == 3
    require_reward_model(folder)
    service = RewardService(found, 999)
    assert service.rewards([service.encode(prompt, text) for text in texts]) == pytest.approx(expected, abs=1e-5)
    plain = [{"role": "user", "content": "Hi"}]
    answered = [*plain, {"role": "assistant", "content": "There."}]
    opening = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    rendered = service.encode_rendered(opening, tokenizer.apply_chat_template(answered, tokenize=False))
    other = service.encode(plain, "There.")
    assert (rendered.prompt_ids, rendered.ids) == (other.prompt_ids, other.ids)


def test_preferences_are_scored_to_the_end_of_a_turn_too(foreign, tmp_path):
    """The line break that the template writes after a response is read, by `align eval reward` as by transformers."""
    folder = foreign("tiny-llama", num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    classifier.config.pad_token_id = None
    texts = ["There.", "No", "\nSo"]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Hi", "responses": texts, "ranks": [1, 2, 3]}))
    expected = []
    for text in texts:
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
        with torch.no_grad():
            ids = torch.tensor([tokenizer.apply_chat_template(turns, return_dict=False)])
            expected.append(float(classifier(input_ids=ids).logits))
    settings = {"preferences": str(tmp_path / "rows.jsonl"), "output": str(tmp_path / "out"), "dtype": "float32"}
    run_reward_eval(RewardEvalConfig(reward_model=folder, resamples=100, **settings))
    row = json.loads((tmp_path / "out" / "reward-tiny-llama.jsonl").read_text().splitlines()[1])
    assert row["rewards"] == pytest.approx(expected, abs=1e-5)


def test_a_classifier_of_three_labels_is_no_reward_model(foreign):
    with pytest.raises(UserError, match="it is a classifier of 3 labels; a reward model has one"):
        load_reward_model(foreign("tiny-llama", num_labels=3), "float32")


def test_a_classifier_with_code_of_its_own_is_refused_and_its_code_is_not_run(tmp_path):
    config = {"model_type": "llama", "architectures": ["LlamaForQuantiles"], "num_labels": 19}
    auto = {"AutoModelForSequenceClassification": "modeling_custom.LlamaForQuantiles"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": auto}))
    (tmp_path / "modeling_custom.py").write_text("raise SystemExit('this code was run')")
    with pytest.raises(UserError, match=r"neither a reward model of this package .*, nor a transformers classifier"):
        load_reward_model(str(tmp_path), "float32")


def test_a_reward_model_is_no_policy(load_sharp, tmp_path):
    saved_reward(load_sharp, tmp_path / "reward", "tiny-gpt2", 0)
    with pytest.raises(UserError) as error:
        load(ModelConfig(model=str(tmp_path / "reward")), torch.float32).backbone.logits(torch.zeros(1, 64))
    assert "is a reward model" in str(error.value)


def test_a_policy_is_no_reward_model(sharp_folders, tmp_path, load_sharp):
    with pytest.raises(UserError) as error:
        load_reward_model(sharp_folders["tiny-gpt2"], "float32")
    assert "neither a reward model of this package" in str(error.value)
    saved_reward(load_sharp, tmp_path / "reward", "tiny-gpt2", 0)
    save_file({"weight": torch.ones(1, 63)}, tmp_path / "reward" / "reward_head.safetensors")
    with pytest.raises(UserError, match="its head is made for states of width 63, the model's have 64"):
        load_reward_model(str(tmp_path / "reward"), "float32")


@pytest.fixture
def reward_folder(tiny_name, load_sharp, tmp_path):
    """A saved reward model that is an adapter on the base that the policy uses too."""
    loaded = load_sharp(tiny_name, adapter="reward", lora_rank=3)
    with torch.no_grad():
        for weight in adapter_weights(loaded.backbone, "reward").values():
            weight.mul_(1.2)  # not the policy's weights
    torch.manual_seed(8)
    head = ScalarHead(loaded.backbone.hidden_size, bias=False)
    folder = tmp_path / "reward"
    facts = {"mean": 0.25, "mean_over": 3, "base": loaded.base}
    weights = weights_of(loaded.backbone)
    save_reward_model(folder, loaded, weights, head.linear.weight.detach(), facts, CARD | {"stage": "reward"})
    return str(folder)


@torch.no_grad()
def test_a_reward_adapter_on_the_policys_base_says_what_the_reward_model_says(lora, reward_folder):
    found = load_reward_model(reward_folder, "float32")
    policy, bare = states(lora.backbone, "policy"), states(lora.backbone, None)
    assert can_share_base(reward_folder, lora)
    head, mean, _ = load_reward_adapter(reward_folder, lora)
    mounted = RewardModel(lora.backbone, head, "reward")
    torch.testing.assert_close(mounted(PROMPT, RESPONSE), found.model(PROMPT, RESPONSE), atol=1e-5, rtol=0)
    assert mean == found.mean == 0.25
    assert found.model(PROMPT, RESPONSE).std() > 1e-2
    assert torch.equal(states(lora.backbone, "policy"), policy)
    assert torch.equal(states(lora.backbone, None), bare)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_mounted_reward_is_frozen_and_the_policy_stays_trainable(lora, reward_folder, make_ppo, critic):
    trainer = make_ppo(lora, load_reward_adapter(reward_folder, lora), critic=critic)
    names = {name for name in trainer.engine.trainable if "adapter" not in name}
    assert not any(".reward." in name or name.startswith("reward_head") for name in names)
    assert set(adapter_weights(lora.backbone, "policy")) <= trainable(lora.backbone)
    with torch.no_grad():
        rewards = trainer.roles.reward("reward", PROMPT, RESPONSE)
        found = load_reward_model(reward_folder, "float32").model(PROMPT, RESPONSE)
    torch.testing.assert_close(rewards, found, atol=1e-5, rtol=0)


@torch.no_grad()
def test_two_reward_adapters_share_the_policys_base(lora, reward_folder, tmp_path):
    """Members of an ensemble: two adapters, two heads, one base; the second one's head is the negative of the first's."""
    other = Path(shutil.copytree(reward_folder, tmp_path / "other"))
    head = load_file(other / "reward_head.safetensors")["weight"]
    save_file({"weight": -head}, other / "reward_head.safetensors")
    found = load_reward_model(reward_folder, "float32")
    sources = load_rewards([reward_folder, str(other)], lora, "float32")
    assert [source.mounted.adapter for source in sources] == ["reward_1", "reward_2"]
    module = build_actor_critic(lora, adapters=[source.mounted for source in sources])
    expected, roles = found.model(PROMPT, RESPONSE), Roles(module)
    torch.testing.assert_close(roles.reward("reward_1", PROMPT, RESPONSE), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(roles.reward("reward_2", PROMPT, RESPONSE), -expected, atol=1e-5, rtol=0)
    assert not any("reward" in name for name, weight in module.named_parameters() if weight.requires_grad)


@torch.no_grad()
def test_a_critic_adapter_starts_as_the_mounted_reward(lora, reward_folder, make_ppo):
    mounted = load_reward_adapter(reward_folder, lora)
    module = make_ppo(lora, mounted, critic="separate").engine.module
    values = module(Role.POLICY, PROMPT, RESPONSE).values
    rewards = mounted.head(states(lora.backbone, "reward"))  # [:, t]: the reward of what was said before token t
    assert values.std() > 1e-2
    torch.testing.assert_close(values, (rewards[:, :-1] - mounted.mean) * RESPONSE.mask(), atol=1e-5, rtol=0)


def test_a_reward_model_with_a_chat_template_of_its_own_is_not_mounted(reward_folder, load_sharp, tiny_name):
    """Its adapter would read the policy's token ids, which are those of another template: wrong scores, without a word."""
    alike, other = load_sharp(tiny_name, lora_rank=4), load_sharp(tiny_name, lora_rank=4, chat_template="raw")
    assert can_share_base(reward_folder, alike)
    assert not can_share_base(reward_folder, other)
    scorers = [
        RewardModelScorer.from_loaded(
            load_reward_model(reward_folder, "float32"), policy.tokenization, Accelerator(cpu=True), 99
        )
        for policy in (alike, other)
    ]
    conversation = ({"role": "user", "content": "Hi"},)
    rewards = [
        scorer([SampledResponse(conversation, policy.tokenization.prompt_ids(conversation), [20, 21, 1], "ab")])[0]
        for scorer, policy in zip(scorers, (alike, other), strict=True)
    ]
    ids = alike.tokenization.response_ids("ab")
    again = scorers[0]([SampledResponse(conversation, alike.tokenization.prompt_ids(conversation), ids, "ab")])[0]
    assert rewards[1] == pytest.approx(again, abs=1e-5)  # read through the reward model's own template


def test_a_reward_model_on_another_base_is_not_mounted(reward_folder, load_sharp, sharp_folders, tmp_path, tiny_name):
    other = "tiny-llama" if tiny_name != "tiny-llama" else "tiny-gpt2"
    assert not can_share_base(reward_folder, load_sharp(other, lora_rank=4))
    assert not can_share_base(reward_folder, load_sharp(tiny_name))  # the policy's weights are trained: nothing to share
    assert not can_share_base(sharp_folders[tiny_name], load_sharp(tiny_name, lora_rank=4))  # not a reward model
