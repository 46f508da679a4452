import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from align.core.settings import ModelConfig
from align.model_registry.registry import resolve_model
from align.models.loading import load
from align.sampling.generation import row_uniforms, sample
from tests.launch.launcher import launch_in_turn
from tests.launch.programs.sharded import COUNTS, ENDS, PROMPTS, SEED, sampling_of

PROGRAM = str(Path(__file__).parent / "programs" / "sharded.py")
MODELS = ("tiny-llama", "tiny-t5")
OBJECTS = 16e6
"""Bytes for what is no tensor of a model: modules, threads, imports."""


def write_classifier(model: str, folder: Path) -> None:
    """A decoder of `model`'s architecture with one label, as another library would have saved it."""
    config = LlamaConfig.from_pretrained(model, num_labels=1)
    torch.manual_seed(1)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    for path in Path(model).glob("tokenizer*"):
        shutil.copy(path, folder)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes under ZeRO-3 loaded and sampled, a folder for each model."""
    folder = tmp_path_factory.mktemp("sharded")
    write_classifier(str(resolve_model("tiny-llama")), folder / "reward")
    scripts = []
    for model in MODELS:
        resolve_model(model)  # two processes cannot make it at once
        (folder / model).mkdir()
        scripts.append([PROGRAM, "roles", str(folder / model), model, str(folder / "reward"), "check"])
        scripts.append([PROGRAM, "sampling", str(folder / model), model])
    launch_in_turn(scripts, folder, "zero3")
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_each_process_keeps_its_part_of_every_role(sharded: Path, model: str) -> None:
    found = [json.loads((sharded / model / f"roles-{rank}.json").read_text()) for rank in (0, 1)]
    for role in ("policy", "reference", "reward", "critic"):
        parts = [one[role] for one in found]
        assert all(part["sharded"] and part["equal"] for part in parts), role
        assert sum(part["own"] for part in parts) == parts[0]["whole"], "nothing is kept twice, nothing is lost"
        assert max(part["own"] for part in parts) < 0.51 * parts[0]["whole"]
    ours, whole = found[0]["shares_prompts"]
    assert ours == whole, "the checks on loading read the sharded model as they read a whole one"


@pytest.mark.parametrize("model", MODELS)
def test_processes_that_end_at_other_times_sample_what_one_samples(sharded: Path, model: str) -> None:
    loaded = load(ModelConfig(model=model), torch.float32)
    ends, expected = loaded.tokenization.end_ids | ENDS, []
    for count in COUNTS:
        uniforms = row_uniforms(count, sampling_of(count), *SEED)
        expected.append(sample(loaded.backbone, PROMPTS[:count], uniforms, sampling_of(count), ends).ids)
    assert len({len(ids) for rows in expected for ids in rows}) > 1, "some rows end before others"
    found = json.loads((sharded / model / "sampling-0.json").read_text())
    assert found["whole"] == found["layers"] == expected
    kinds = ["all weights gathered at once", "weights gathered layer by layer, which is slower"]
    starts = [f"sampling with {kinds[number]}: all weights need 0.00 GiB, " for number in (0, 1)]
    assert all(line.startswith(start) for line, start in zip(found["printed"], starts, strict=True))


@pytest.mark.slow
def test_four_processes_never_hold_more_than_a_quarter_and_a_layer(tmp_path: Path) -> None:
    """A model of 400 MB, in files of 100, and at the peak of loading a layer more, with gloo's copy of what it sends."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=7,
        num_attention_heads=16,
        tie_word_embeddings=False,
        **{f"{name}_token_id": number for number, name in enumerate(("pad", "eos", "bos"))},
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="100MB")
    for path in resolve_model("tiny-llama").glob("tokenizer*"):
        shutil.copy(path, tmp_path / "model")
    write_classifier(str(tmp_path / "model"), tmp_path / "reward")
    words = [PROGRAM, "roles", str(tmp_path), str(tmp_path / "model"), str(tmp_path / "reward")]
    launch_in_turn([words], tmp_path, "zero3", processes=4)
    for rank in range(4):
        for role, part in json.loads((tmp_path / f"roles-{rank}.json").read_text()).items():
            assert 380e6 < part["whole"] < 450e6
            assert part["own"] <= part["whole"] / 4
            assert part["sharded"], (rank, role)
            assert part["peak"] <= part["whole"] / 4 + part["layer"] + part["weight"] + OBJECTS, (rank, role)


@pytest.mark.slow
def test_nan_in_one_part_is_reported_by_every_process(tmp_path: Path) -> None:
    """Only the process that keeps the part has seen it, and all of them must end."""
    source = resolve_model("tiny-llama")
    shutil.copytree(source, tmp_path / "model")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][-1, -1] = float("nan")
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    launch_in_turn([[PROGRAM, "roles", str(tmp_path), str(tmp_path / "model"), "no reward"]], tmp_path, "zero3")
    for rank in (0, 1):
        error = json.loads((tmp_path / f"roles-{rank}.json").read_text())["error"]
        assert "its weight 'model.layers.1.mlp.up_proj.weight' holds NaN" in error
