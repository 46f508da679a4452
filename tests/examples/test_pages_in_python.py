import re
from pathlib import Path

import pytest
import torch

from align import cli
from align.commands.sample import scorer_of
from align.core.settings import ModelConfig
from align.data.conversation import user_turn
from align.models.loading import load
from align.reward.checkpoint import load_reward_model
from align.tokenization.encoded import SampledResponse
from tests.files import write_rows
from tests.project.test_pages import ROOT, blocks

CODE = blocks(ROOT / "docs" / "howto" / "use-the-model.md", ("python",))


def code_with(word, folder):
    """The block that contains a word, with the folder of this test."""
    (block,) = (block for block in CODE if word in block)
    return re.sub(r'"runs/[^"]*"', repr(str(folder)), block)


@pytest.fixture
def trained(tmp_path):
    """`trained("sft", "tiny-t5")`: the folder of a model."""

    def train(stage, model, *words):
        sft = [{"prompt": f"{i}?", "completion": "yes"} for i in range(8)]
        ranked = [{"prompt": f"{i}?", "responses": ["yes", "no"], "ranks": [1, 2]} for i in range(8)]
        data = tmp_path / f"{stage}.jsonl"
        write_rows(data, (sft if stage == "sft" else ranked))
        settings = ["--model", model, "--train_data", str(data), "--output_dir", str(tmp_path / "run")]
        settings += ["--batch_size", "4", "--report_to", "none", "--dtype", "float32"]
        cli.main([stage, *settings, *(["--demonstrations", ""] if stage == "reward" else []), *words])
        return tmp_path / "run" / "model"

    return train


def run(code, capsys):
    names = {}
    exec(code, names)
    return names, capsys.readouterr().out


def test_the_pipeline_answers(trained, capsys):
    names, _ = run(code_with("pipeline(", trained("sft", "tiny-llama")), capsys)
    answered = names["chat"](names["messages"], max_new_tokens=4)[0]["generated_text"]
    assert [turn["role"] for turn in answered] == ["user", "assistant"]


def test_t5_answers_as_align_sample_does(trained, capsys):
    folder = trained("sft", "tiny-t5")
    capsys.readouterr()
    _, text = run(code_with("AutoModelForSeq2SeqLM.from", folder), capsys)
    words = ["sample", str(folder), "--prompt", "Name a moon of Mars.", "--temperature", "0", "--max_new_tokens", "64"]
    cli.main([*words, "--dtype", "float32"])
    assert text.strip() == capsys.readouterr().out.strip()


def test_an_adapter_loads_in_peft_and_is_merged(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = trained("sft", "tiny-llama")
    (tmp_path / "run").rename(tmp_path / "base")
    folder = trained("sft", str(tmp_path / "base" / base.name), "--lora_r", "2")
    names, _ = run(code_with("AutoPeftModelForCausalLM", folder), capsys)
    cli.main(["model", "merge", str(folder), "--output", "merged"])
    ids = torch.tensor([[5, 6, 7]])
    ours, merged = (load(ModelConfig(model=str(path)), torch.float32).backbone.model for path in (folder, "merged"))
    for model in (names["model"].float(), merged):
        torch.testing.assert_close(model(ids).logits, ours(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("words", [[], ["--lora_r", "2"]], ids=["all weights", "adapter"])
def test_a_classifier_gives_the_scores_of_its_reward_model(trained, tmp_path, capsys, words):
    trained("sft", "tiny-llama")
    (tmp_path / "run").rename(tmp_path / "base")
    folder = trained("reward", str(tmp_path / "base" / "model"), *words)
    names, _ = run(code_with("AutoModelForSequenceClassification.from", folder), capsys)
    reward = load_reward_model(str(folder), "float32")
    asked = user_turn("Name a moon of Mars.")
    ids = reward.loaded.tokenization.answer_ids(asked, "Phobos.", whole=False)
    (expected,) = scorer_of(reward.loaded, reward, 1000)([SampledResponse(asked, *ids, "Phobos.")])
    assert names["score"] == pytest.approx(expected, abs=1e-5)


def test_the_blocks_run_in_their_order(tmp_path, monkeypatch):
    """Each by itself, with a tiny model in place of the real one."""
    monkeypatch.chdir(tmp_path)
    page = blocks(ROOT / "docs" / "howto" / "in-python.md", ("python",))
    few = "total_updates=1, rollout_batch_size=4, max_new_tokens=4"
    for block in page:
        code = block.replace("smollm2-135m", "tiny-llama").replace("total_updates=20", few)
        assert code != block
        exec(code, {})
    written = {name for block in page for name in re.findall(r'output_dir="(.*?)"', block)}
    assert len(written) == 6
    assert [name for name in sorted(written) if not (Path(name) / "model").is_dir()] == []
