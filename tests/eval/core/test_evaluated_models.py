"""The models of an evaluation: names, run folders, fingerprints, one at a time."""

import shutil

import pytest

from align.core.errors import UserError
from align.core.seeds import Stream
from align.eval.core.evaluated_models import open_accelerator, open_models, respond, short_names
from align.eval.core.fingerprints import content_hash, fingerprint
from align.eval.core.settings import EvalConfig
from align.sampling.generation import Sampling, row_uniforms


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (["runs/demo/sft", "runs/demo/ppo/model"], ["sft", "ppo"]),
        (["/a/x/ppo/model", "/b/x/ppo"], ["a-x-ppo", "b-x-ppo"]),
        (["runs/a/ppo", "runs/b/ppo", "tiny-gpt2"], ["a-ppo", "b-ppo", "tiny-gpt2"]),
        (["me/it"], ["it"]),
        (["model"], ["model"]),
        (["ppo", "./ppo/model"], ["1-ppo", "2-ppo"]),
    ],
)
def test_short_names(models, names):
    assert short_names(models) == names


def test_models_are_opened_frozen_one_after_the_other(sharp_folders, tmp_path):
    run = tmp_path / "ppo"
    shutil.copytree(sharp_folders["tiny-gpt2"], run / "model")
    (run / "config.yaml").write_text("seed: 0\n")
    config = EvalConfig(models=[str(run), sharp_folders["tiny-t5"]], dtype="float32")
    accelerator, seen = open_accelerator(config), {}
    for evaluated in open_models(config, accelerator):
        seen[evaluated.name] = evaluated.fingerprint
        model = evaluated.loaded.backbone.model
        assert not model.training
        assert not any(weight.requires_grad for weight in model.parameters())
        sampling = Sampling(5)
        rows = [evaluated.loaded.tokenization.prompt_ids(({"role": "user", "content": text},)) for text in ("Hi", "Count.")]
        both = respond(evaluated, rows, row_uniforms(2, sampling, 1, Stream.ROLLOUT), sampling, accelerator)
        assert (
            respond(evaluated, rows[1:], row_uniforms(2, sampling, 1, Stream.ROLLOUT)[1:], sampling, accelerator).ids
            == both.ids[1:]
        )
    assert list(seen) == ["ppo", "tiny-t5"]
    assert len(set(seen.values())) == 2


def test_a_fingerprint_changes_with_the_weights(sharp_folders, tmp_path):
    shutil.copytree(sharp_folders["tiny-gpt2"], tmp_path / "m")
    before = fingerprint(str(tmp_path / "m"))
    assert before == fingerprint(sharp_folders["tiny-gpt2"])
    with open(tmp_path / "m" / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert fingerprint(str(tmp_path / "m")) != before
    assert fingerprint("a/hub-name") == ""


def test_no_model_and_a_wrong_one():
    config = EvalConfig()
    with pytest.raises(UserError, match="models is empty"):
        next(open_models(config, open_accelerator(config)))
    config = EvalConfig(models=["tiny-gpt2", "./nowhere"])
    with pytest.raises(UserError, match="nowhere"):
        next(open_models(config, open_accelerator(config)))
    with pytest.raises(UserError, match="without repetitions"):
        EvalConfig(models=["a", "a"])


@pytest.mark.parametrize("name", ["r.jsonl", "deep/er/r.jsonl", "r.parquet", "r.jsonl.gz", "data-00000.arrow"])
def test_a_fingerprint_of_a_folder_changes_with_its_data(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"one")
    before = fingerprint(str(tmp_path))
    (tmp_path / name).write_bytes(b"two")
    after = fingerprint(str(tmp_path))
    assert len({before, after, ""}) == 3
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / name.rpartition("/")[2]).write_bytes(b"no row of the data")
    assert fingerprint(str(tmp_path)) == after


def test_a_fingerprint_of_nothing_is_nothing(tmp_path, monkeypatch):
    (tmp_path / "x.json").write_text("{}")
    monkeypatch.chdir(tmp_path)  # "" as a path is the working directory
    assert fingerprint("") == ""


def test_a_fingerprint_of_a_model_changes_with_its_chat_template(sharp_folders, tmp_path):
    shutil.copytree(sharp_folders["tiny-gpt2"], tmp_path / "m")
    before = fingerprint(str(tmp_path / "m"))
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages }}")
    assert fingerprint(str(tmp_path / "m")) != before


def test_the_content_of_half_a_surrogate_pair_has_a_hash():
    assert content_hash(["\ud83d"]) != content_hash(["\ud83e"])
