"""What is saved loads elsewhere with the same numbers, and what cannot be saved or loaded whole is refused in one line."""

import json
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSeq2SeqLM, PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)
from trl import RewardConfig as TRLRewardConfig
from trl import RewardTrainer

from align.config import ModelConfig
from align.errors import UserError
from align.models.checkpoint import save_model, weights_of
from align.models.heads import ScalarHead
from align.models.loading import load, load_weights
from align.models.roles import ActorCritic, Policy, RewardModel
from align.reward.checkpoint import is_reward_model, load_head, load_reward_model, save_reward_model
from align.tensor_ops import Padded

PROMPTS, RESPONSES = [[9, 10, 11], [12]], [[20, 21, 1], [22, 23, 24, 25, 1]]
PROMPT, RESPONSE = Padded.from_lists(PROMPTS), Padded.from_lists(RESPONSES)
CARD = {"title": "A model", "stage": "sft", "data": "some.jsonl"}


def auto(name):
    return AutoModelForSeq2SeqLM if name == "tiny-t5" else AutoModelForCausalLM


@torch.no_grad()
def plain_logits(model, name, row):
    """The logits of a transformers model for a response and the token after it: [T+1, V]."""
    prompt, response = torch.tensor([PROMPTS[row]]), torch.tensor([RESPONSES[row]])
    if name == "tiny-t5":
        start = torch.tensor([[model.config.decoder_start_token_id]])
        return model(input_ids=prompt, decoder_input_ids=torch.cat([start, response], dim=1)).logits[0]
    return model(input_ids=torch.cat([prompt, response], dim=1)).logits[0, len(PROMPTS[row]) - 1 :]


@torch.no_grad()
def our_logits(loaded):
    with loaded.backbone.adapter(loaded.adapter):
        return loaded.backbone.logits(loaded.backbone.hidden(PROMPT, RESPONSE))


def assert_same_logits(model, name, expected):
    for row in range(2):
        found = plain_logits(model, name, row)
        torch.testing.assert_close(found, expected[row, : len(found)], atol=1e-5, rtol=0)


def changed(loaded):
    """The model after something like training: no weight is that of its folder."""
    with torch.no_grad():
        for weight in loaded.backbone.model.parameters():
            if weight.requires_grad:
                weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(9)))
    return loaded


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


# ------------------------------------------------------------------------------------------------------------ the policy


def test_a_saved_policy_loads_in_transformers_with_equal_logits(tiny_name, load_sharp, sharp_backbones, tmp_path):
    loaded = changed(load_sharp(tiny_name))
    # Out of a larger module's state, as an optimisation hands it over.
    module = ActorCritic(loaded.backbone, None, ScalarHead(loaded.backbone.hidden_size))
    save_model(tmp_path / "model", loaded, weights_of(loaded.backbone, module.state_dict(), "backbone.model."), CARD)
    theirs = auto(tiny_name).from_pretrained(tmp_path / "model").eval()
    expected = our_logits(loaded)
    assert_same_logits(theirs, tiny_name, expected)
    again = load(ModelConfig(model=str(tmp_path / "model")), torch.float32)
    assert torch.equal(our_logits(again), expected)
    before = sharp_backbones[tiny_name]
    assert (before.logits(before.hidden(PROMPT, RESPONSE)) - expected).abs().max() > 0.1


def test_beside_a_policys_weights_are_tokenizer_generation_settings_and_card(tiny_name, load_sharp, tmp_path):
    loaded = load_sharp(tiny_name)
    save_model(tmp_path / "model", loaded, weights_of(loaded.backbone), CARD)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "README.md"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == loaded.tokenization.tokenizer.chat_template
    settings = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (settings.eos_token_id, settings.pad_token_id) == ([1], 0)
    card = (tmp_path / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "| data | some.jsonl |" in card


def test_a_saved_adapter_loads_in_peft_with_equal_logits(tiny_name, load_sharp, sharp_folders, tmp_path):
    loaded = load_sharp(tiny_name, lora_rank=4)
    state = Policy(loaded.backbone, "policy").state_dict()
    save_model(tmp_path / "model", loaded, weights_of(loaded.backbone, state, "backbone.model."), CARD)
    expected = our_logits(loaded)
    base = auto(tiny_name).from_pretrained(sharp_folders[tiny_name])
    assert_same_logits(PeftModel.from_pretrained(base, tmp_path / "model").eval(), tiny_name, expected)
    auto_peft = AutoPeftModelForSeq2SeqLM if tiny_name == "tiny-t5" else AutoPeftModelForCausalLM
    assert_same_logits(auto_peft.from_pretrained(tmp_path / "model").eval(), tiny_name, expected)
    again = load(ModelConfig(model=str(tmp_path / "model"), lora_rank=4), torch.float32)
    torch.testing.assert_close(our_logits(again), expected, atol=1e-6, rtol=0)


def test_an_adapter_is_saved_without_its_base(tiny_name, load_sharp, tmp_path):
    loaded = load_sharp(tiny_name, lora_rank=4)
    save_model(tmp_path / "model", loaded, weights_of(loaded.backbone), CARD)
    stored = load_file(tmp_path / "model" / "adapter_model.safetensors")
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in stored)
    assert not (tmp_path / "model" / "model.safetensors").exists()
    assert "library_name: peft" in (tmp_path / "model" / "README.md").read_text()


def test_an_adapter_is_merged_where_all_weights_are_to_be_trained(tiny_name, load_sharp, tmp_path):
    loaded = load_sharp(tiny_name, lora_rank=4)
    save_model(tmp_path / "model", loaded, weights_of(loaded.backbone), CARD)
    merged = load(ModelConfig(model=str(tmp_path / "model")), torch.float32)
    assert merged.adapter is None
    assert all(weight.requires_grad for weight in merged.backbone.model.parameters())
    torch.testing.assert_close(our_logits(merged), our_logits(loaded), atol=1e-4, rtol=0)
    save_model(tmp_path / "whole", merged, weights_of(merged.backbone), CARD)
    theirs = auto(tiny_name).from_pretrained(tmp_path / "whole").eval()
    assert_same_logits(theirs, tiny_name, our_logits(merged))


# ------------------------------------------------------------------------------------------------------ the reward model


def saved_reward(load_sharp, folder, name, lora_rank, mean=0.75):
    loaded = load_sharp(name, adapter="reward", lora_rank=lora_rank)
    torch.manual_seed(6)
    head = ScalarHead(loaded.backbone.hidden_size, bias=False)
    model = RewardModel(loaded.backbone, head, loaded.adapter)
    state = model.state_dict()
    weights = weights_of(loaded.backbone, state, "backbone.model.")
    facts = {"mean": mean, "mean_over": 4, "base": loaded.base}
    save_reward_model(folder, loaded, weights, state["head.linear.weight"], facts, CARD | {"stage": "reward"})
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
    loaded = load(ModelConfig(model=str(tmp_path / "reward"), lora_rank=lora_rank), torch.float32, adapter="reward")
    head, _ = load_head(str(tmp_path / "reward"), loaded.backbone.hidden_size)
    model = RewardModel(loaded.backbone, head, loaded.adapter)
    torch.testing.assert_close(model(PROMPT, RESPONSE).detach(), expected, atol=1e-5, rtol=0)
    weights = weights_of(loaded.backbone)
    facts = {"mean": 0.0, "mean_over": 0, "base": loaded.base}
    save_reward_model(tmp_path / "further", loaded, weights, head.linear.weight.detach(), facts, CARD)
    again = load_reward_model(str(tmp_path / "further"), "float32")
    torch.testing.assert_close(again.model(PROMPT, RESPONSE), expected, atol=1e-4, rtol=0)


def test_a_reward_model_is_no_policy(load_sharp, tmp_path):
    saved_reward(load_sharp, tmp_path / "reward", "tiny-gpt2", 0)
    with pytest.raises(UserError) as error:
        our_logits(load(ModelConfig(model=str(tmp_path / "reward")), torch.float32))
    assert "is a reward model" in one_line(error)


def test_a_policy_is_no_reward_model(sharp_folders, tmp_path, load_sharp):
    with pytest.raises(UserError) as error:
        load_reward_model(sharp_folders["tiny-gpt2"], "float32")
    assert "not a reward model of this package" in one_line(error)
    saved_reward(load_sharp, tmp_path / "reward", "tiny-gpt2", 0)
    with pytest.raises(UserError, match="its head reads 64 numbers, the model gives 63"):
        load_head(str(tmp_path / "reward"), 63)


# -------------------------------------------------------------------------------------- what cannot be loaded is refused


@pytest.fixture
def adapter_folder(load_sharp, tmp_path):
    loaded = load_sharp("tiny-llama", lora_rank=4)
    save_model(tmp_path / "adapter", loaded, weights_of(loaded.backbone), CARD)
    return tmp_path / "adapter"


def refusal(folder):
    with pytest.raises(UserError) as error:
        load(ModelConfig(model=str(folder), lora_rank=4), torch.float32)
    text = one_line(error)
    assert str(folder) in text
    return text


def test_an_adapter_whose_file_is_cut_off_is_refused(adapter_folder):
    path = adapter_folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refusal(adapter_folder)


def test_an_adapter_without_weights_is_refused(adapter_folder):
    (adapter_folder / "adapter_model.safetensors").unlink()
    refusal(adapter_folder)


def test_an_adapter_with_no_tensor_or_too_few_is_refused(adapter_folder):
    path = adapter_folder / "adapter_model.safetensors"
    stored = load_file(path)
    kept = dict(list(stored.items())[:-1])
    for some in (kept, {}, {f"other.{name}": weight for name, weight in stored.items()}):
        save_file(some, path)
        refusal(adapter_folder)


def test_an_adapter_of_another_shape_is_refused(adapter_folder):
    settings = json.loads((adapter_folder / "adapter_config.json").read_text())
    (adapter_folder / "adapter_config.json").write_text(json.dumps(settings | {"r": 8}))
    refusal(adapter_folder)


def test_an_adapter_of_another_model_is_refused(adapter_folder, sharp_folders):
    settings = json.loads((adapter_folder / "adapter_config.json").read_text())
    other = settings | {"base_model_name_or_path": sharp_folders["tiny-t5"]}
    (adapter_folder / "adapter_config.json").write_text(json.dumps(other))
    refusal(adapter_folder)


def test_an_adapter_that_does_not_name_its_base_is_refused(adapter_folder):
    settings = json.loads((adapter_folder / "adapter_config.json").read_text())
    (adapter_folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": None}))
    assert "base_model_name_or_path is empty" in refusal(adapter_folder)


def test_pickled_weights_are_refused(tiny_name, sharp_folders, tmp_path):
    folder = tmp_path / "pickled"
    shutil.copytree(sharp_folders[tiny_name], folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError) as error:
        load_weights(str(folder), torch.float32)
    assert str(folder) in one_line(error)


def test_a_pickled_adapter_is_refused(adapter_folder):
    path = adapter_folder / "adapter_model.safetensors"
    torch.save(load_file(path), adapter_folder / "adapter_model.bin")
    path.unlink()
    refusal(adapter_folder)


def test_weights_that_are_cut_off_are_refused(tiny_name, sharp_folders, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(sharp_folders[tiny_name], folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError) as error:
        load_weights(str(folder), torch.float32)
    assert str(folder) in one_line(error)


def test_an_adapter_without_weights_is_not_saved(load_sharp, tmp_path):
    loaded = load_sharp("tiny-gpt2", lora_rank=4)
    bare = {name: weight for name, weight in weights_of(loaded.backbone).items() if "lora" not in name}
    with pytest.raises(UserError, match=r"^adapter 'policy' holds no weights: nothing was saved$"):
        save_model(tmp_path / "model", loaded, bare, CARD)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------- a write that fails


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(params=["full", "limited"])
def scarce(request, tmp_path):
    """A folder for about 900 kB more: a real small disk where this machine lets the test mount one, and a limit on the
    size of a file (100 kB: enough for a tokenizer, not for weights).
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(folder)]
    mounted = request.param == "full" and not _fails(command)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield folder
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def _fails(command):
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode != 0
    except OSError:  # no such program here
        return True


@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_a_write_that_fails_leaves_the_old_folder_and_says_so_in_one_line(load_sharp, scarce, kind):
    loaded, target = load_sharp("tiny-llama"), scarce / "model"
    weights, card = weights_of(loaded.backbone), CARD
    target.mkdir()
    for number in range(7):  # with the new weights of 440 kB, more than the disk holds
        (target / f"model-{number}.safetensors").write_bytes(bytes(range(250)) * 360)
    before = snapshot(target)
    head = ScalarHead(loaded.backbone.hidden_size, bias=False).linear.weight.detach()
    save = {
        "policy": lambda: save_model(target, loaded, weights, card),
        "reward": lambda: save_reward_model(target, loaded, weights, head, {"mean": 0.0}, card),
    }
    with pytest.raises(UserError) as error:
        save[kind]()
    text = one_line(error)
    assert text.startswith(f"{target}: cannot be written")
    assert snapshot(target) == before
    assert [path.name for path in scarce.iterdir()] == ["model"]


def test_saving_again_replaces_the_folder_whole(load_sharp, tmp_path):
    loaded = load_sharp("tiny-gpt2")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "left-over.txt").write_text("old")
    save_model(tmp_path / "model", loaded, weights_of(loaded.backbone), CARD)
    assert not (tmp_path / "model" / "left-over.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert Path(tmp_path / "model" / "model.safetensors").stat().st_mode & 0o777 == 0o644
