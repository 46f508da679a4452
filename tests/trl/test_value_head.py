import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig

from align.core.errors import UserError
from align.model_registry.registry import resolve_model
from align.trl import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead

KINDS = {
    "tiny-gpt2": (AutoModelForCausalLMWithValueHead, AutoModelForCausalLM),
    "tiny-llama": (AutoModelForCausalLMWithValueHead, AutoModelForCausalLM),
    "tiny-t5": (AutoModelForSeq2SeqLMWithValueHead, AutoModelForSeq2SeqLM),
}
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def inputs(name):
    return {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :3]} if name == "tiny-t5" else {})


@pytest.fixture(params=KINDS)
def name(request):
    return request.param


@pytest.fixture
def model(name):
    torch.manual_seed(0)
    return KINDS[name][0].from_pretrained(str(resolve_model(name)), dtype=torch.float32).eval()


@torch.no_grad()
def test_values_are_the_head_of_the_last_states(name, model):
    logits, loss, values = model(**inputs(name))
    plain = model.pretrained_model(**inputs(name), output_hidden_states=True)
    states = plain.decoder_hidden_states if name == "tiny-t5" else plain.hidden_states
    expected = states[-1] @ model.v_head.summary.weight[0] + model.v_head.summary.bias
    assert torch.allclose(values, expected, atol=1e-6)
    assert torch.equal(logits, plain.logits)
    assert loss is None
    assert values.shape == logits.shape[:2]
    assert not torch.equal(model.v_head.summary.bias, torch.zeros(1))


def test_the_cache_is_returned_if_it_is_asked_for(name, model):
    assert len(model(**inputs(name), return_past_key_values=True)[3]) == 2  # layers


@pytest.mark.parametrize("settings", [{}, {"max_shard_size": "50KB"}])
def test_a_saved_folder_has_the_head_and_loads_without_it(name, model, tmp_path, settings):
    model.save_pretrained(tmp_path / "saved", **settings)
    again = KINDS[name][0].from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert all(torch.equal(weight, again.state_dict()[key]) for key, weight in model.state_dict().items())
    plain = KINDS[name][1].from_pretrained(tmp_path / "saved", dtype=torch.float32).state_dict()
    assert plain.keys() == model.state_dict().keys() - {"v_head.summary.weight", "v_head.summary.bias"}
    assert all(torch.equal(weight, model.state_dict()[key]) for key, weight in plain.items())
    assert [path for path in (tmp_path / "saved").iterdir() if path.suffix == ".bin"] == []


def test_dropout_and_initialization_follow_the_arguments(name):
    made, plain = KINDS[name]
    folder = str(resolve_model(name))
    assert made.from_pretrained(folder, summary_dropout_prob=0.5).v_head.dropout.p == 0.5
    assert made.from_pretrained(folder).v_head.dropout.p == 0.1
    base = plain.from_pretrained(folder)
    base.config.summary_dropout_prob = 0.25
    assert made.from_pretrained(base, summary_dropout_prob=0.5).v_head.dropout.p == 0.25
    head = made.from_pretrained(base, v_head_init_strategy="normal").v_head.summary
    assert float(head.bias) == 0.0
    assert 0.1 < float(head.weight.std()) < 0.3
    with pytest.raises(UserError, match="must be 'normal' or None"):
        made.from_pretrained(base, v_head_init_strategy="zeros")


def test_a_head_in_a_pickle_is_refused_and_not_drawn(name, model, tmp_path):
    model.pretrained_model.save_pretrained(tmp_path)
    torch.save(model.pretrained_model.state_dict(), tmp_path / "pytorch_model.bin")
    KINDS[name][0].from_pretrained(tmp_path)  # no head is stored
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        UserError, match=r"may be in pytorch_model\.bin, a pickled file, which is not read; convert it to saf"
    ):
        KINDS[name][0].from_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"may be in pytorch_model\.bin"):
        KINDS[name][0].from_pretrained(tmp_path)


def test_an_unknown_path_is_one_line(tmp_path):
    with pytest.raises(UserError, match="is not a local folder, GGUF") as caught:
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "no" / "such" / "folder")
    assert "\n" not in str(caught.value)


def test_a_reward_adapter_is_refused():
    with pytest.raises(UserError, match="reward_adapter is not supported: give the trainer a merged classifier"):
        AutoModelForCausalLMWithValueHead.from_pretrained(str(resolve_model("tiny-gpt2")), reward_adapter="adapter")


def test_it_generates_in_bfloat16(name):
    model = KINDS[name][0].from_pretrained(str(resolve_model(name)), dtype=torch.bfloat16)
    logits, _, values = model(**inputs(name))
    assert (logits.dtype, values.dtype) == (torch.float32, torch.float32)
    assert model.generate(IDS, generation_config=GenerationConfig(max_new_tokens=2, min_new_tokens=2)).shape[0] == 2


def test_an_adapter_keeps_its_head_in_a_file_beside_it(tmp_path):
    torch.manual_seed(0)
    config = LoraConfig(r=4, task_type="CAUSAL_LM")
    folder = str(resolve_model("tiny-llama"))
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder, peft_config=config, dtype=torch.float32)
    assert isinstance(model.pretrained_model, PeftModel)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert {"v_head.summary.weight", "v_head.summary.bias"} < set(trained)
    assert all("lora" in name or name.startswith("v_head.") for name in trained)
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "v_head.safetensors").keys() == {"v_head.summary.weight", "v_head.summary.bias"}
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, is_trainable=True, dtype=torch.float32)
    assert all(torch.equal(weight, again.state_dict()[key]) for key, weight in model.state_dict().items())
    assert [name for name, weight in again.named_parameters() if weight.requires_grad] == trained
