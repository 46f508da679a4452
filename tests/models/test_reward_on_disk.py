import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)
from trl import RewardConfig as TRLRewardConfig
from trl import RewardTrainer

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.data.conversation import user_turn
from align.eval.reward import RewardEvalConfig, run_reward_eval
from align.models.loading import load
from align.reward.checkpoint import is_reward_model, load_head, load_reward_model, require_reward_model
from align.reward.scoring import RewardModelScorer
from align.tokenization import Tokenization
from align.tokenization.encoded import SampledResponse
from tests.badly_behaved.specimens import CHATML
from tests.files import read_rows
from tests.models.adapters import PROMPT, PROMPTS, RESPONSE, RESPONSES, save_reward
from tests.refusals import refusal

TEXTS = ("Hello there.", "No", "Louÿs, perhaps?")


@pytest.fixture
def saved_reward(load_sharp, tmp_path):
    """`saved_reward("tiny-gpt2", lora_r=4)`: the rewards [2] of a reward model that was saved in tmp_path / "reward"."""

    def save(name, lora_r=0, mean=0.75):
        model = save_reward(tmp_path / "reward", load_sharp(name, adapter="reward", lora_r=lora_r), mean)
        with torch.no_grad():
            rewards = model(PROMPT, RESPONSE)
        assert (rewards[0] - rewards[1]).abs() > 0.1
        return rewards

    return save


@pytest.fixture
def padded_by(sharp_folders, tmp_path):
    """`padded_by("end", "tiny-llama")`: a tiny model whose padding token is its own, the end token, or that has none."""

    def made(pad, name):
        if pad == "own":
            return Path(sharp_folders[name])
        model, tokenizer = (auto.from_pretrained(sharp_folders[name]) for auto in (AutoModelForCausalLM, AutoTokenizer))
        tokenizer.pad_token = tokenizer.eos_token if pad == "end" else None
        model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return made


@pytest.fixture
def gpt2_of_bytes(sharpen, tmp_path):
    """A GPT-2 whose only special token is the end of a text, as published: padding has to be an ordinary token."""
    vocabulary = {token: id for id, token in enumerate(sorted(ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end, unk_token=end)
    size = {"vocab_size": 257, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = sharpen(GPT2LMHeadModel(GPT2Config(**size, bos_token_id=256, eos_token_id=256)))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def read_by_transformers(classifier, tokenizer, rows):
    """[3, R]: rewards of rows one by one, and as a batch that the saved tokenizer padded on either side."""
    found = [torch.cat([classifier(input_ids=torch.tensor([row])).logits[:, 0] for row in rows])]
    for side in ("left", "right"):
        batch = tokenizer.pad({"input_ids": rows}, padding_side=side, return_tensors="pt")
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        found.append(classifier(**batch, position_ids=positions).logits[:, 0])
    return torch.stack(found)


@pytest.mark.parametrize("lora_r", [0, 2])
@pytest.mark.parametrize(
    "kind", ["tiny-gpt2 own", "tiny-llama own", "tiny-llama none", "tiny-llama end", "one special token"]
)
@torch.no_grad()
def test_a_saved_reward_model_is_a_classifier_with_the_same_scores_in_transformers(kind, lora_r, request, tmp_path):
    if kind == "one special token":
        base = request.getfixturevalue("gpt2_of_bytes")
    else:
        name, pad = kind.split()
        base = request.getfixturevalue("padded_by")(pad, name)
    config = ModelConfig(model=str(base), lora_r=lora_r)
    loaded = load(config, torch.float32, "reward", allow_reward_model=True)
    for name, weight in loaded.backbone.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model = save_reward(tmp_path / "reward", loaded)
    prompt, responses = loaded.tokenization.prompt_ids(user_turn("Hi")), [*map(loaded.tokenization.response_ids, TEXTS)]
    expected = model(Padded.from_lists([prompt] * len(TEXTS)), Padded.from_lists(responses))
    assert len({round(reward, 2) for reward in expected.tolist()}) == len(TEXTS)
    rows = [prompt + response for response in responses]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "reward")
    assert tokenizer.pad_token_id not in {row[-1] for row in rows}
    assert tokenizer.pad_token == "<pad>" or "own" not in kind  # padding that ends no text is kept
    if lora_r:
        classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        classifier.config.pad_token_id = tokenizer.pad_token_id
        classifier = PeftModel.from_pretrained(classifier, tmp_path / "reward").eval()
    else:
        classifier, report = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "reward", output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert (classifier.config.pad_token_id, classifier.config.num_labels) == (tokenizer.pad_token_id, 1)
    found = read_by_transformers(classifier.eval(), tokenizer, rows)
    torch.testing.assert_close(found, expected.expand(3, -1), atol=1e-5, rtol=0)
    # The saved tokenizer reads as before, and the policy's ids are still the reward model's.
    before = AutoTokenizer.from_pretrained(base)
    assert [tokenizer(text).input_ids for text in TEXTS] == [before(text).input_ids for text in TEXTS]
    assert Tokenization(tokenizer).reads_alike(Tokenization(before))
    again = load_reward_model(str(tmp_path / "reward"), "float32")
    found = again.model(Padded.from_lists([[row[0]] for row in rows]), Padded.from_lists([row[1:] for row in rows]))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_trls_reward_trainer_takes_a_saved_reward_model(saved_reward, tmp_path):
    expected = saved_reward("tiny-llama")
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


@pytest.mark.parametrize("lora_r", [0, 4])
@torch.no_grad()
def test_a_reward_model_comes_back_with_its_mean_and_training_can_go_on_from_it(tiny_name, lora_r, saved_reward, tmp_path):
    expected = saved_reward(tiny_name, lora_r, mean=-1.25)
    found = load_reward_model(str(tmp_path / "reward"), "float32")
    # A merged adapter multiplies in another order.
    torch.testing.assert_close(found.model(PROMPT, RESPONSE), expected, atol=1e-4 if lora_r else 1e-6, rtol=0)
    assert found.mean == -1.25
    assert not any(weight.requires_grad for weight in found.model.parameters())
    assert is_reward_model(str(tmp_path / "reward"))
    shared = found.model(Padded.from_lists([PROMPTS[0]]), Padded.from_lists(RESPONSES), torch.tensor([0, 0]))
    assert float(shared[0]) == pytest.approx(float(expected[0]), abs=1e-4)
    config = ModelConfig(model=str(tmp_path / "reward"), lora_r=lora_r)
    loaded = load(config, torch.float32, adapter="reward", allow_reward_model=True)
    head, _ = load_head(str(tmp_path / "reward"), loaded.backbone)
    further = save_reward(tmp_path / "further", loaded, head=head)
    torch.testing.assert_close(further(PROMPT, RESPONSE), expected, atol=1e-5, rtol=0)
    again = load_reward_model(str(tmp_path / "further"), "float32")
    torch.testing.assert_close(again.model(PROMPT, RESPONSE), expected, atol=1e-4, rtol=0)


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


@torch.no_grad()
def scores_by_transformers(folder, prompt, texts, *, to_the_last_token):
    """A classifier's scores of answers, each in the tokenizer's own rendering of the conversation.

    Args:
        to_the_last_token: read the last token, whatever it is; else the last one that is no padding.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    if to_the_last_token:
        classifier.config.pad_token_id = None
    conversations = [[*prompt, {"role": "assistant", "content": text}] for text in texts]
    rows = [
        tokenizer.apply_chat_template(turns, return_dict=False, return_tensors="pt", sanitize_control_tokens=True)
        for turns in conversations
    ]
    return [float(classifier(input_ids=row).logits) for row in rows]


@torch.no_grad()
def test_any_classifier_with_one_label_is_a_reward_model(foreign, load_sharp):
    """Its rewards are those that transformers computes from the tokenizer's own rendering of the conversation."""
    folder = foreign("tiny-llama", num_labels=1)
    policy = load_sharp("tiny-llama")
    prompt, texts = user_turn("Hi <|im_end|> you"), ["There.", "No", ""]
    expected = scores_by_transformers(folder, prompt, texts, to_the_last_token=True)
    found = load_reward_model(folder, "float32")
    scorer = RewardModelScorer.from_loaded(found, policy.tokenization, Accelerator(cpu=True), 999)
    assert scorer([SampledResponse(prompt, [1], [2], text) for text in texts]) == pytest.approx(expected, abs=1e-5)
    assert len({round(reward, 3) for reward in expected}) == 3
    require_reward_model(folder)


# An end token and a line break after a turn, the end token alone, and a template that does not open an answer.
TEMPLATES = {
    "line break": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}",
    "end": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "no opening": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("pad", ["end", "none"])
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_a_classifier_of_another_library_is_read_where_transformers_reads_it(
    name, pad, template, padded_by, load_sharp, tmp_path
):
    base, folder = padded_by(pad, name), tmp_path / "foreign"
    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=1).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    prompt, texts = user_turn("Hi"), ["There.", "", "No"]
    expected = scores_by_transformers(folder, prompt, texts, to_the_last_token=False)
    found = load_reward_model(str(folder), "float32")
    scorer = RewardModelScorer.from_loaded(found, load_sharp(name).tokenization, Accelerator(cpu=True), 999)
    assert scorer([SampledResponse(prompt, [1], [2], text) for text in texts]) == pytest.approx(expected, abs=1e-5)


def test_preferences_are_scored_to_the_end_of_a_turn_too(foreign, tmp_path):
    """The line break that the template writes after a response is read, by `align eval reward` as by transformers."""
    folder = foreign("tiny-llama", num_labels=1)
    texts = ["There.", "No", "\nSo"]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Hi", "responses": texts, "ranks": [1, 2, 3]}))
    expected = scores_by_transformers(folder, user_turn("Hi"), texts, to_the_last_token=True)
    settings = {"preferences": str(tmp_path / "rows.jsonl"), "output": str(tmp_path / "out"), "dtype": "float32"}
    run_reward_eval(RewardEvalConfig(reward_model=folder, **settings))
    row = read_rows(tmp_path / "out" / "reward-tiny-llama.jsonl")[1]
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


def test_a_reward_model_is_no_policy_and_a_policy_no_reward_model(sharp_folders, tmp_path, saved_reward):
    saved_reward("tiny-gpt2")
    with pytest.raises(UserError, match="is a reward model"):
        load(ModelConfig(model=str(tmp_path / "reward")), torch.float32).backbone.logits(torch.zeros(1, 64))
    assert "neither a reward model of this package" in refusal(load_reward_model, sharp_folders["tiny-gpt2"], "float32")
    save_file({"weight": torch.ones(1, 63)}, tmp_path / "reward" / "reward_head.safetensors")
    with pytest.raises(UserError, match="its head is made for states of width 63, the model's have 64"):
        load_reward_model(str(tmp_path / "reward"), "float32")


def test_an_adapter_of_another_library_is_to_be_merged(sharp_folders, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(sharp_folders["tiny-llama"], num_labels=1)
    get_peft_model(model, LoraConfig(r=2, task_type="SEQ_CLS")).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"merge its adapter .* by merge_and_unload\(\) and save"):
        load_reward_model(str(tmp_path), "float32")
    for lora_r in (0, 2):  # a policy would have its layers, and not its head
        with pytest.raises(UserError, match="it is the adapter of a classifier, such as a reward model: it cannot generate"):
            load(ModelConfig(model=str(tmp_path), lora_r=lora_r), torch.float32)
