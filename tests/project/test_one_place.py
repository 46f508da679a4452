import ast
import os
import re
import subprocess
import sys
from functools import cache

import pytest

from tests.project.markdown import ROOT
from tests.project.test_layers import imports_in

SOURCES = sorted((ROOT / "align").rglob("*.py"))
# These make the built-in models: they name classes, but nothing there depends on what a given model is.
KNOWS_ARCHITECTURES = {
    f"align/models/backbone/{name}.py" for name in ("classifier", "decoder", "encoder", "encoder_decoder", "kinds", "layers")
}
BUILDS_ARCHITECTURES = KNOWS_ARCHITECTURES | {
    "align/model_registry/tiny.py",
    "align/model_registry/gguf_files.py",
    "align/model_registry/wheels.py",
    "align/extras/armo_rm.py",
}
TRL_CLASSES = {f"align/trl/{name}.py" for name in ("__init__", "config", "value_head")}
TRL_CLASSES |= {f"align/trl/legacy/{name}.py" for name in ("__init__", "config", "sampling", "setup", "trainer")}
"""TRL's models with a value head and its settings, whose names and outputs tell the kinds of models apart."""
PURE = (
    "align/core/tensor_ops.py",
    "align/extras/distill/loss.py",
    "align/sft/loss.py",
    "align/reward/loss.py",
    *(f"align/ppo/{name}.py" for name in ("advantages", "losses")),
)
ALLOWED = {"torch", "typing", "types", "collections", "dataclasses", "math", "align.core.tensor_ops"}


def name_of(path):
    return path.relative_to(ROOT).as_posix()


@cache
def code_of(path):
    """A file's code without comments and docstrings; strings that the program uses stay."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            documents = [each for each in node.body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)]
            node.body = [each for each in node.body if each not in documents] or [ast.Pass()]
    return ast.unparse(tree)


def files_with(pattern, exempt=frozenset()):
    return [name_of(path) for path in SOURCES if name_of(path) not in exempt and re.search(pattern, code_of(path))]


def test_only_the_backbone_and_the_builders_of_models_know_architectures():
    assert {name_of(path) for path in SOURCES} >= BUILDS_ARCHITECTURES | set(PURE), "the rules look at the real files"
    exempt = BUILDS_ARCHITECTURES | TRL_CLASSES
    assert files_with(r"is_encoder_decoder|Seq2Seq|seq2seq|SEQ_2_SEQ|CausalLM|CAUSAL_LM", exempt) == []
    pattern = r"encoder_hidden_states|decoder_input_ids|get_encoder|get_decoder"
    assert files_with(pattern) == [f"align/models/backbone/{name}.py" for name in ("encoder_decoder", "verification")]
    pattern = r"\b(T5|MT5|UMT5|Bart|GPT2|Llama|Bloom|Gemma)(Config|For|LMHead|Model|PreTrained)"
    assert files_with(pattern, BUILDS_ARCHITECTURES) == []
    # `setup.py` asks whether two models are of the same type, not of which.
    pattern = r"model_type (==|!=|in|not in) (\"|'|\(|\[|\{)|isinstance\([\w.]+, \w*(Encoder)?Decoder\w*|startswith\(.t5"
    assert files_with(pattern, KNOWS_ARCHITECTURES) == []


@pytest.mark.parametrize("name", PURE)
def test_pure_functions_import_torch_alone(name):
    imported = {module for module, _ in imports_in(ROOT / name)}
    wrong = {module for module in imported if module not in ALLOWED and module.split(".")[0] not in ALLOWED}
    assert wrong == set()


def test_nothing_is_pickled():
    pattern = r"\b(pickle|cloudpickle|dill|joblib|shelve|marshal)\b|torch\.(load|save)\b|weights_only|allow_pickle"
    assert files_with(pattern) == []


def test_no_stages_file_is_named_like_a_package():
    """Launching a script puts its folder first on the path: a file called like a package would hide it."""
    taken = {"datasets", "types", "logging", "evaluate", "trl", "peft", "torch", "transformers", "accelerate", "tokenizers"}
    launched = [path.parent for path in SOURCES if path.name == "train.py"] + [ROOT / "align" / "eval"]
    assert len(launched) == 1 + 7
    found = {file.stem for folder in launched for file in folder.glob("*.py")}
    assert not found & (taken | set(sys.stdlib_module_names))


SKIPS = """
import pytest

@pytest.mark.skip(reason="no such machine")
def test_skipped():
    pass

def test_inside():
    pytest.skip("no such file")

@pytest.mark.xfail(strict=True)
def test_expected():
    raise AssertionError
"""


def test_a_skip_is_a_failure_where_skips_are_forbidden(tmp_path):
    (tmp_path / "test_skips.py").write_text(SKIPS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", str(tmp_path)]
    environment = os.environ | {"ALIGN_NO_SKIP": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 xfailed, 1 error" in done.stdout
    assert "no such machine" in done.stdout
