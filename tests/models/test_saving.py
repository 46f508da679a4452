import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
)

from align.core.errors import UserError
from align.core.seeds import RngStream
from align.core.settings import ModelConfig
from align.model_registry.tiny import BOS, EOS, PAD, VOCABULARY, byte_tokenizer
from align.models.checkpoint import save_model, weights_of
from align.models.loading import load, load_on_meta
from align.sampling.generation import SamplingParams, row_uniforms, sample
from align.sft import SFTConfig, SFTTrainer
from tests.badly_behaved.specimens import CHATML
from tests.models.adapters import CARD
from tests.models.architectures import make_model
from tests.settings import run_settings

DEMONSTRATIONS = [{"prompt": "Hi", "completion": "Hello!"}] * 2


@pytest.fixture
def folder_with(sharp_folders, tmp_path):
    """`folder_with({"temperature": 0.9})`: a copy of a tiny model with other generation settings."""

    def copied(generation, source=sharp_folders["tiny-llama"]):
        folder = tmp_path / "base"
        shutil.copytree(source, folder)
        path = folder / "generation_config.json"
        settings = json.loads(path.read_text()) | generation
        settings.pop("_from_model_config", None)
        path.write_text(json.dumps(settings))
        return str(folder)

    return copied


@pytest.fixture
def in_memory(sharp_folders):
    """A model and its tokenizer."""
    return [auto.from_pretrained(sharp_folders["tiny-llama"]) for auto in (AutoModelForCausalLM, AutoTokenizer)]


def settings_of(tmp_path, **more):
    return run_settings(tmp_path / "run", **more)


DECODING = {
    "Vicuna": {"temperature": 0.9, "top_p": 0.6},
    "top_k": {"top_k": 0},
    "beams": {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "no_repeat_ngram_size": 3},
    "forced": {"forced_bos_token_id": 9, "forced_eos_token_id": 1, "min_length": 8, "repetition_penalty": 1.5},
    "suppressed": {"suppress_tokens": [105], "begin_suppress_tokens": [20], "min_new_tokens": 3},
}


@pytest.fixture
def bart(sharpen, tmp_path):
    """The folder of a tiny BART."""
    ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": EOS}
    sizes = {f"{part}_{size}": 2 for part in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    widths = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    config = BartConfig(vocab_size=VOCABULARY, forced_eos_token_id=None, **ids, **sizes, **widths)
    torch.manual_seed(0)
    sharpen(BartForConditionalGeneration(config)).save_pretrained(tmp_path / "bart")
    byte_tokenizer(append_eos=True).save_pretrained(tmp_path / "bart")
    return tmp_path / "bart"


@pytest.mark.parametrize("settings", DECODING.values(), ids=DECODING)
@pytest.mark.parametrize("name", ["bart", "tiny-gpt2"])
def test_generate_of_a_saved_model_writes_what_sampling_here_does(
    name, settings, bart, folder_with, sharp_folders, tmp_path
):
    base = folder_with(settings | {"max_new_tokens": 7}, source=bart if name == "bart" else sharp_folders[name])
    loaded = load(ModelConfig(model=base), torch.float32)
    save_model(tmp_path / "saved", loaded, weights_of(loaded.backbone), CARD)
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    saved.validate(strict=True)
    assert saved.max_new_tokens == 7
    prompt, params = [9, 10, 11], SamplingParams(12, temperature=0.0)
    sampled = sample(loaded.backbone, [prompt], row_uniforms(1, params, 0, RngStream.ROLLOUT), params, frozenset({EOS}))
    auto = AutoModelForSeq2SeqLM if name == "bart" else AutoModelForCausalLM
    written = auto.from_pretrained(tmp_path / "saved").eval().generate(torch.tensor([prompt]), max_new_tokens=12)[0]
    assert written.tolist()[1 if name == "bart" else len(prompt) :] == sampled.ids[0]


@pytest.mark.parametrize(("lora_r", "kept"), [(0, "the saved model does not keep them"), (2, "base still applies them")])
def test_decoding_settings_that_are_not_applied_are_named_in_a_line(lora_r, kept, folder_with, tmp_path, capsys):
    base = folder_with(DECODING["beams"] | {"min_new_tokens": 3, "use_cache": True})
    SFTTrainer(base, DEMONSTRATIONS, SFTConfig(**settings_of(tmp_path, lora_r=lora_r)))
    names = "early_stopping, length_penalty, min_new_tokens, no_repeat_ngram_size, num_beams"
    assert f"settings that sampling does not apply: {names}; " in (printed := " ".join(capsys.readouterr().err.split()))
    assert kept in printed


@pytest.mark.parametrize("lora_r", [0, 2])
def test_settings_changed_in_memory_are_saved_too(lora_r, in_memory, tmp_path):
    model, tokenizer = in_memory
    model.generation_config.temperature = 0.7
    config = SFTConfig(**settings_of(tmp_path, lora_r=lora_r))
    SFTTrainer(model, DEMONSTRATIONS, config, tokenizer=tokenizer).train()
    GenerationConfig.from_pretrained(tmp_path / "run" / "model").validate(strict=True)


@pytest.mark.parametrize("part", ["config", "generation config", "tokenizer"])
def test_what_cannot_be_saved_is_refused_before_training(part, in_memory, tmp_path):
    model, tokenizer = in_memory
    if part == "config":
        model.config.extra = object()  # no JSON
    elif part == "generation config":
        model.generation_config.max_new_tokens = -1
    else:
        tokenizer.init_kwargs["extra"] = object()
    message = "generation_config.json: it is invalid" if part == "generation config" else "could not be saved after training"
    with pytest.raises(UserError, match=message):
        SFTTrainer(model, DEMONSTRATIONS, SFTConfig(**settings_of(tmp_path)), tokenizer=tokenizer)
    assert not (tmp_path / "run").exists()


def test_a_token_without_a_row_in_the_embedding_matrix_is_refused(folder_with):
    """By every stage: see tests/badly_behaved."""
    base = folder_with({})
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<tool>", "</tool>"])
    tokenizer.save_pretrained(base)
    message = r"embedding matrix has 264 rows, .* 2 tokens beyond them, '<tool>' \(id 264\) for one; call model.resize"
    for loads in (load, load_on_meta):
        with pytest.raises(UserError, match=message):
            loads(ModelConfig(model=base), torch.float32)


def test_a_special_token_without_a_row_is_refused_if_the_template_writes_it(folder_with, tmp_path):
    """ChatML's tokens were added, and the model was not resized."""
    base = folder_with({})
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(base)
    assert load(ModelConfig(model=base), torch.float32).tokenization.end_ids == {1}
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(base)
    with pytest.raises(UserError, match=r"has 2 tokens beyond them, '<\|im_start\|>' \(id 264\)"):
        load(ModelConfig(model=base), torch.float32)


@pytest.mark.parametrize("chat_template", ["plain", "raw"])
def test_special_tokens_that_no_text_becomes_may_lack_a_row(chat_template, folder_with, tmp_path):
    """Llama 2 with an added padding token; Gemma 3 1B, whose tokenizer has the image token of the larger models."""
    base = folder_with({})
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"pad_token": "<padding>", "additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(base)
    loaded = load(ModelConfig(model=base, chat_template=chat_template), torch.float32)
    written = loaded.tokenization.prompt_ids(({"role": "user", "content": "<image> and <padding>"},))
    assert max(written) < 264
    save_model(tmp_path / "saved", loaded, weights_of(loaded.backbone), CARD)
    assert GenerationConfig.from_pretrained(tmp_path / "saved").pad_token_id == 1


def always_says(folder, token):
    """Change a Llama: whatever it reads, it predicts one token."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[token] = 1.0
    model.save_pretrained(folder)


def sampled(loaded):
    settings = SamplingParams(max_new_tokens=5, temperature=0.1)
    uniforms = row_uniforms(1, settings, 0, RngStream.ROLLOUT)
    with loaded.backbone.adapter(loaded.adapter):
        return sample(loaded.backbone, [[9, 10]], uniforms, settings, loaded.tokenization.end_ids)


@pytest.mark.parametrize("lora_r", [0, 2])
def test_a_response_ends_at_every_end_of_the_generation_config_here_and_in_what_is_saved(lora_r, folder_with, tmp_path):
    base = folder_with({"eos_token_id": [1, 30]})
    always_says(base, 30)
    path = Path(base) / "generation_config.json"
    assert json.loads(path.read_text())["eos_token_id"] == [1, 30]
    ids = torch.tensor([[9, 10]])
    theirs = AutoModelForCausalLM.from_pretrained(base).generate(ids, max_new_tokens=5)[0, 2:].tolist()
    loaded = load(ModelConfig(model=base, lora_r=lora_r), torch.float32)
    found = sampled(loaded)
    assert (found.ids, found.ended) == ([theirs], [True])
    assert theirs == [30]
    save_model(tmp_path / "saved", loaded, weights_of(loaded.backbone), CARD)
    ends = GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id
    assert ends == [1, 30]
    again = load(ModelConfig(model=str(tmp_path / "saved")), torch.float32)
    assert again.tokenization.end_ids == load_on_meta(ModelConfig(model=base), torch.float32).tokenization.end_ids == {1, 30}
    if not lora_r:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert saved.generate(ids, max_new_tokens=5)[0, 2:].tolist() == [30]


def test_an_adapter_without_a_generation_config_ends_where_its_base_does(folder_with, tmp_path):
    loaded = load(ModelConfig(model=folder_with({"eos_token_id": [1, 30]}), lora_r=2), torch.float32)
    save_model(tmp_path / "saved", loaded, weights_of(loaded.backbone), CARD)
    (tmp_path / "saved" / "generation_config.json").unlink()
    assert load(ModelConfig(model=str(tmp_path / "saved")), torch.float32).tokenization.end_ids == {1, 30}


def test_a_model_in_memory_ends_where_its_generation_config_says_and_its_tokenizer_stays_as_it_is(in_memory, tmp_path):
    model, tokenizer = in_memory
    model.generation_config = GenerationConfig(eos_token_id=[1, 30])
    own = tokenizer.chat_template
    config = SFTConfig(**settings_of(tmp_path, chat_template="raw"))
    trainer = SFTTrainer(model, DEMONSTRATIONS, config, tokenizer=tokenizer)
    assert trainer.loaded.tokenization.end_ids == {1, 30}
    assert trainer.loaded.tokenization.chat.template != own
    assert tokenizer.chat_template == own


def test_a_default_of_a_config_class_is_no_end_in_another_vocabulary(folder_with):
    """A Llama that was made without `eos_token_id` has 2; here 30 stands for it, an ordinary token."""
    base = folder_with({})
    (Path(base) / "generation_config.json").write_text('{"eos_token_id": 30, "_from_model_config": true}')
    assert load(ModelConfig(model=base), torch.float32).tokenization.end_ids == {1}


@pytest.mark.parametrize("text", ['{"eos_token_id": "</s>"}', "{"])
def test_a_broken_generation_config_is_refused(text, folder_with):
    base = folder_with({})
    (Path(base) / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"generation_config\.json: (eos_token_id must be an id|it cannot be read)"):
        load(ModelConfig(model=base), torch.float32)


def test_weights_that_a_model_has_no_place_for_are_named(folder_with, capsys):
    """TRL saves its value head next to the policy."""
    base = folder_with({})
    path = Path(base) / "model.safetensors"
    weights = load_file(path)
    load(ModelConfig(model=base), torch.float32)
    assert "not read" not in capsys.readouterr().err
    save_file(
        weights | {"v_head.summary.weight": torch.ones(1, 64), "v_head.summary.bias": torch.ones(1)}, path, {"format": "pt"}
    )
    load(ModelConfig(model=base), torch.float32)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "are not read: v_head.summary.bias, v_head.summary.weight" in err


@pytest.mark.parametrize(("name", "tied"), [("T5 v1.1, flan-T5", False), ("mT5", False), ("T5 v1.0", True)])
def test_a_separate_output_matrix_of_t5_is_saved_as_transformers_4_reads_it(name, tied, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    model = make_model(name)
    if not tied:  # as in published weights; transformers ties it in a new model
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(source)
    byte_tokenizer(append_eos=True).save_pretrained(source)
    loaded = load(ModelConfig(model=str(source)), torch.float32)
    save_model(target, loaded, weights_of(loaded.backbone), CARD)
    # transformers 4 ties the matrices and scales the states by this value; 5 reads it as whether to scale them.
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] is tied
    ids = torch.tensor([[5, 6, 7]])
    before, after = (
        AutoModelForSeq2SeqLM.from_pretrained(folder)(input_ids=ids, decoder_input_ids=ids).logits
        for folder in (source, target)
    )
    assert torch.equal(before, after)
