"""Where padding is the token that ends a turn, rewards here and in transformers are those of the same token."""

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
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

from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.data.conversation import user_turn
from align.models.checkpoint import weights_of
from align.models.heads import RewardModel, ScalarHead
from align.models.loading import load
from align.reward.checkpoint import load_reward_model, save_reward_model
from align.reward.scoring import RewardModelScorer
from align.tokenization import Tokenization
from align.tokenization.encoded import SampledResponse

CARD = {"title": "A model", "stage": "reward"}
TEXTS = ("Hello there.", "No", "Louÿs, perhaps?")


def saved_reward(base, folder, lora_rank):
    """Save a reward model on `base`; returns its rows of ids and their rewards, computed here."""
    loaded = load(ModelConfig(model=str(base), lora_rank=lora_rank), torch.float32, "reward", allow_reward_model=True)
    torch.manual_seed(6)
    for name, weight in loaded.backbone.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model = RewardModel(loaded.backbone, ScalarHead(loaded.backbone.hidden_size, bias=False), loaded.adapter)
    weights, head = weights_of(loaded.backbone), model.head.linear.weight.detach()
    save_reward_model(folder, loaded, weights, head, {"mean": 0.0}, CARD)
    prompt = loaded.tokenization.prompt_ids(user_turn("Hi"))
    responses = [loaded.tokenization.response_ids(text) for text in TEXTS]
    with torch.no_grad():
        rewards = model(Padded.from_lists([prompt] * len(TEXTS)), Padded.from_lists(responses))
    assert len({round(reward, 2) for reward in rewards.tolist()}) == len(TEXTS)
    return [prompt + response for response in responses], rewards


def assert_transformers_agrees(classifier, tokenizer, rows, expected):
    """Row by row, and as a batch that the saved tokenizer padded on either side."""
    with torch.no_grad():
        single = torch.cat([classifier(input_ids=torch.tensor([row])).logits[:, 0] for row in rows])
    torch.testing.assert_close(single, expected, atol=1e-5, rtol=0)
    for side in ("left", "right"):
        batch = tokenizer.pad({"input_ids": rows}, padding_side=side, return_tensors="pt")
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            found = classifier(**batch, position_ids=positions).logits[:, 0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.fixture
def padded_by(sharp_folders, tmp_path):
    """`padded_by("end", "tiny-llama")`: a tiny model whose padding token is the end token, or that has none."""

    def made(pad, name):
        model, tokenizer = (auto.from_pretrained(sharp_folders[name]) for auto in (AutoModelForCausalLM, AutoTokenizer))
        tokenizer.pad_token = tokenizer.eos_token if pad == "end" else None
        model.config.pad_token_id = tokenizer.pad_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
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


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("kind", ["no padding", "padding is the end", "one special token"])
def test_a_saved_reward_model_scores_the_same_in_transformers(kind, lora_rank, request, tmp_path):
    if kind == "one special token":
        base = request.getfixturevalue("gpt2_of_bytes")
    else:
        base = request.getfixturevalue("padded_by")("end" if kind == "padding is the end" else None, "tiny-llama")
    rows, expected = saved_reward(base, tmp_path / "reward", lora_rank)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "reward")
    assert tokenizer.pad_token_id not in {row[-1] for row in rows}
    if lora_rank:
        classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        classifier.config.pad_token_id = tokenizer.pad_token_id
        classifier = PeftModel.from_pretrained(classifier, tmp_path / "reward").eval()
    else:
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward").eval()
        assert classifier.config.pad_token_id == tokenizer.pad_token_id
    assert_transformers_agrees(classifier, tokenizer, rows, expected)
    # The saved tokenizer reads as before, and the policy's ids are still the reward model's.
    before = AutoTokenizer.from_pretrained(base)
    assert [tokenizer(text).input_ids for text in TEXTS] == [before(text).input_ids for text in TEXTS]
    assert Tokenization(tokenizer).reads_alike(Tokenization(before))
    again = load_reward_model(str(tmp_path / "reward"), "float32")
    with torch.no_grad():
        found = again.model(Padded.from_lists([[row[0]] for row in rows]), Padded.from_lists([row[1:] for row in rows]))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_padding_that_ends_no_text_is_kept(sharp_folders, tmp_path):
    saved_reward(sharp_folders["tiny-llama"], tmp_path / "reward", 0)
    for text in ((tmp_path / "reward" / "tokenizer_config.json"),):
        assert '"pad_token": "<pad>"' in text.read_text()
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward").config.pad_token_id == 0


# An end token and a line break after a turn, the end token alone, and a template that does not open an answer.
TEMPLATES = {
    "line break": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}",
    "end": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "no opening": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("pad", ["end", None])
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
    classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    prompt, texts, expected = user_turn("Hi"), ["There.", "", "No"], []
    for text in texts:
        messages = [*prompt, {"role": "assistant", "content": text}]
        ids = tokenizer.apply_chat_template(messages, return_dict=False, return_tensors="pt")
        with torch.no_grad():
            expected.append(float(classifier(input_ids=ids).logits))
    found = load_reward_model(str(folder), "float32")
    scorer = RewardModelScorer.from_loaded(found, load_sharp(name).tokenization, Accelerator(cpu=True), 999)
    assert scorer([SampledResponse(prompt, [1], [2], text) for text in texts]) == pytest.approx(expected, abs=1e-5)
