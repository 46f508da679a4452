from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from align import cli
from align.model_registry.tiny import byte_tokenizer
from tests.launch.compared import metrics
from tests.launch.launcher import ROOT, launch_in_turn
from tests.models.architectures import make_model

COMMON = (
    "--model tiny-llama --dtype float32 --report_to none --overlong truncate --max_prompt_tokens 64 --learning_rate 1e-3"
)
COMMON += " --max_response_tokens 33 --micro_batch_tokens 256"
WORDS = {
    "sft": f"{COMMON} --train_data data/demonstrations_heldout.jsonl --validation_data data/demonstrations_heldout.jsonl"
    " --batch_size 10",
    "reward": f"{COMMON} --train_data data/rankings_heldout.jsonl --validation_data data/rankings_heldout.jsonl"
    " --demonstrations data/demonstrations_heldout.jsonl --batch_size 15 --lm_loss_weight 0.5",
    "lora": f"{COMMON} --train_data data/demonstrations_heldout.jsonl --batch_size 30 --lora_r 4"
    " --gradient_checkpointing true",
    "experts": f"{COMMON} --train_data data/demonstrations_heldout.jsonl --batch_size 30",
}


def words(name: str, folder: Path, *more: str) -> list[str]:
    model = save_experts(folder / "mixtral") if name == "experts" else "tiny-llama"
    return [*WORDS[name].replace("tiny-llama", model).split(), "--output_dir", str(folder / name), *more]


def save_experts(folder: Path) -> str:
    make_model("Mixtral, experts").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def stage_of(name: str) -> str:
    return "reward" if name == "reward" else "sft"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name in WORDS:
            cli.main([stage_of(name), *words(name, folder)])
    return folder


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    scripts = [[f"align/{stage_of(name)}/train.py", *words(name, folder, "--sequence_parallel", "2")] for name in WORDS]
    launch_in_turn(scripts, folder, "cpu2")
    return folder


@pytest.mark.parametrize("name", WORDS)
def test_shared_rows_teach_what_whole_rows_do(alone: Path, together: Path, name: str) -> None:
    one, two = metrics(alone / name), metrics(together / name)
    assert len(one) == len(two) > 1
    for ours, theirs in zip(two, one, strict=True):
        assert ours.keys() == theirs.keys()
        # Without shared rows, each response is read with a prompt of its own: that costs more.
        for key in ours.keys() - ({"tokens/read", "flops"} if name == "reward" else set()):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
    weights = [load_file(next((folder / name / "model").glob("*model.safetensors"))) for folder in (together, alone)]
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][key], rtol=0, atol=5e-4, msg=key)
