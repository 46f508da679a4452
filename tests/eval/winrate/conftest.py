"""What the tests of win rates share: three prompts, and two models that answer them."""

import json

import pytest


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hi", "Count to three.", "Who?")))
    return str(path)


@pytest.fixture
def settings(sharp_folders, prompts, tmp_path):
    models = [sharp_folders["tiny-gpt2"], sharp_folders["tiny-llama"]]
    few = {"max_new_tokens": 6, "dtype": "float32", "resamples": 100, "output": str(tmp_path / "out")}
    return {"models": models, "prompts": prompts, **few}
