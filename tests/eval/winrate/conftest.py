"""What the tests of win rates share: three prompts, and two models that answer them."""

import pytest

from tests.eval.files import write_rows


@pytest.fixture
def settings(sharp_folders, tmp_path):
    models = [sharp_folders["tiny-gpt2"], sharp_folders["tiny-llama"]]
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": text} for text in ("Hi", "Count to three.", "Who?")])
    few = {"max_new_tokens": 6, "dtype": "float32", "output": str(tmp_path / "out")}
    return {"models": models, "prompts": prompts, **few}
