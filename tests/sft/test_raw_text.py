import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from align.batches.mixtures import Prefixed
from align.core.errors import UserError
from align.extras.plan import sft_work
from align.models.loading import LoadedModel
from align.sft import SFTConfig, SFTTrainer
from align.sft.raw_text import RawText
from tests.files import metrics_of, write_rows
from tests.settings import run_settings

TEXTS = [{"text": f"{number} moons. The sea is calm, and so is the sky above. Count to {number}!"} for number in range(24)]
OBJECTIVES = ("lm", "span_corruption", "infilling", "prefix")


@pytest.fixture
def texts(tmp_path):
    return write_rows(tmp_path / "texts.jsonl", TEXTS)


@pytest.fixture
def config(tmp_path, texts):
    """`config(name, objective="lm")`: the settings of a short run into a folder of that name."""

    def make(name="run", **settings):
        common = run_settings(tmp_path / name, train_data=texts)
        common |= {"batch_size": 6, "learning_rate": 3e-3, "text_tokens": 40, "lr_scheduler_type": "constant"}
        return SFTConfig(**(common | settings))

    return make


def tokens_of(loaded: LoadedModel, text: str) -> list[int]:
    return loaded.tokenization.text_ids(text)


def test_the_input_and_the_target_of_each_objective(load_sharp):
    loaded = load_sharp("tiny-t5")
    tokenizer = loaded.tokenization.tokenizer
    end = tokenizer.eos_token_id
    first, second = (tokenizer.convert_tokens_to_ids(f"<extra_id_{number}>") for number in (0, 1))
    ids = tokens_of(loaded, "moon")  # four bytes, of which 15 % are one
    examples = {}
    for objective in OBJECTIVES:
        texts = RawText(objective, loaded, 40, 0)
        (examples[objective],) = texts.examples(texts.read([{"text": "moon"}]), 1)
    lm, span, infilled, prefix = (examples[name] for name in OBJECTIVES)
    assert (lm.prompt, lm.response) == ([tokenizer.bos_token_id], [*ids, end])
    masked = span.response[1]
    place = span.prompt.index(first)
    assert span.response == [first, masked, second, end]
    assert span.prompt == [*ids[:place], first, *ids[place + 1 :], end]
    assert masked == ids[place]
    assert infilled.response == [*ids, end]
    assert first in infilled.prompt, "a tokenizer without a mask token masks with the first sentinel"
    assert [*prefix.prompt[:-1], *prefix.response] == [*ids, end]
    assert prefix.prompt[-1] == end, "an encoder's input ends with the token that ends a text"
    assert all(all(example.loss_mask) for example in examples.values())


def test_each_update_masks_other_tokens_and_the_same_update_the_same(load_sharp):
    texts = RawText("span_corruption", load_sharp("tiny-t5"), 40, 0)
    pieces = texts.read(TEXTS)
    assert max(len(piece.response) for piece in pieces) == 40
    assert texts.examples(pieces, 3) == texts.examples(pieces, 3)
    assert texts.examples(pieces, 3) != texts.examples(pieces, 4)


@pytest.mark.parametrize(
    ("model", "objective"),
    [("tiny-t5", "span_corruption"), ("tiny-t5", "infilling"), ("tiny-gpt2", "prefix"), ("tiny-llama", "lm")],
)
def test_a_model_learns_the_texts_and_a_resumed_run_is_the_same(model, objective, config, texts, tmp_path):
    settings = {"objective": objective, "num_train_epochs": 2, "validation_data": texts, "save_steps": 1}
    folder = SFTTrainer(model, texts, config("whole", **settings), texts).train()
    whole = metrics_of(tmp_path / "whole")
    assert whole[-1]["validation/loss"] < whole[0]["validation/loss"] - 0.3
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<eos>"

    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for path in (tmp_path / "again" / "checkpoints").iterdir():
        if path.name != "update-000007":
            shutil.rmtree(path)
    resumed = SFTTrainer(model, texts, config("again", **settings, resume_from_checkpoint=True), texts).train()
    weights, expected = load_file(resumed / "model.safetensors"), load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert [row["loss"] for row in metrics_of(tmp_path / "again") if "loss" in row] == [
        row["loss"] for row in whole if "loss" in row
    ]


def test_mistakes_are_named(load_sharp, config, tmp_path):
    loaded = load_sharp("tiny-llama")
    with pytest.raises(UserError, match=r"prompt_loss_weight is 0.5, .*0 with objective prefix"):
        config(objective="prefix", prompt_loss_weight=0.5)
    with pytest.raises(UserError, match=r"task_prefixes is .*empty with objective lm"):
        config(objective="lm", task_prefixes=["a: "])
    with pytest.raises(UserError, match="task_prefixes must be empty"):
        RawText("lm", loaded, 40, 0).read(Prefixed(TEXTS, "a: "))
    with pytest.raises(UserError, match="no text has two tokens"):
        RawText("prefix", loaded, 40, 0).read([{"text": "a"}])
    with pytest.raises(UserError, match="field 'text'"):
        RawText("prefix", loaded, 40, 0).read([{"prompt": "a", "completion": "b"}])
    with pytest.raises(UserError, match=r"text_tokens 4000.*context"):
        RawText("lm", loaded, 4000, 0).read([{"text": "x" * 5000}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(loaded.tokenization.tokenizer), "get_vocab", lambda tokenizer: {"a": 0})
        with pytest.raises(UserError, match="objective span_corruption:"):
            RawText("span_corruption", loaded, 40, 0)
        with pytest.raises(UserError, match="objective infilling: the tokenizer has neither a mask token"):
            RawText("infilling", loaded, 40, 0)
    assert "text_tokens=40" in config().without_effect_warning()
    assert "overlong=drop" in config(objective="lm", overlong="drop").without_effect_warning()


def test_the_plan_counts_the_work_on_raw_text(config):
    phases = {name: sft_work(config(model="tiny-t5", objective=name)).flops["learning"] for name in OBJECTIVES}
    assert phases["infilling"] > phases["span_corruption"] > 0, "the target of infilling is the text"
