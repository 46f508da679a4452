"""What a kit for a GPU machine without network holds; that it is enough was tried by hand, as docs/howto/gpu.md says."""

from importlib.metadata import requires
from pathlib import Path

import torch

from align.model_registry.registry import resolve_model
from align.models.loading import load_whole
from benchmarks.gpu_kit import MACHINE, MODEL, NEVER, direct_requirements, missing, pins, unpack
from tests.files import ROOT

REQUIRES = {
    "trl": ["datasets>=4", "numpy", "pandas>=2.1"],
    "datasets": ["dill<1", "numpy", 'tomli; python_version < "3.11"', 'Pillow; extra == "vision"'],
    "hub": ["click"],
}


def test_only_what_is_missing_or_too_old_by_hand():
    machine = {"numpy": "2.5.2", "pandas": "", "transformers": "5.17.0", "hub": "1.33.0"}
    found = missing(["trl>=1.16", "transformers>=5.23", "hub>=1.3"], machine, "3.12", REQUIRES.get)
    # pandas is taken to be new enough; of what is there already, nothing further is asked.
    assert found == {"trl", "datasets", "dill", "transformers"}
    # A later requirement can be stricter.
    strict = {"one": ["two>=2"], "three": []}
    assert missing(["two>=1", "one"], {"two": "1.5"}, "3.12", strict.get) == {"one", "two"}


def test_everything_that_is_brought_is_pinned_and_small():
    machine, pinned = pins(MACHINE), pins(ROOT / "constraints.txt")
    needed = missing(direct_requirements(), machine, "3.12", requires)
    assert {"trl", "peft", "datasets", "gguf", "transformers", "deepspeed"} <= needed <= pinned.keys()
    assert not needed & set(NEVER)
    assert machine["torch"].startswith("2.11")


def test_the_machine_makes_a_random_model_that_says_so(tmp_path, sharp_folders, monkeypatch):
    (tmp_path / "model").mkdir()
    for path in Path(sharp_folders["tiny-llama"]).iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    unpack(tmp_path)
    monkeypatch.setenv("ALIGN_CACHE", str(tmp_path / "cache"))
    made = Path(resolve_model(MODEL))
    assert "Random weights" in (made / "README.md").read_text()
    assert load_whole(str(made), torch.bfloat16).backbone.model.dtype == torch.bfloat16
