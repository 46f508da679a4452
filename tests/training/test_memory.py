from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from align import cli
from align.core.errors import UserError
from align.core.tensor_ops import BatchLoss
from align.models.backbone.decoder import DecoderBackbone
from align.sft import SFTConfig, run_sft
from align.training import memory
from align.training.engine import TrainEngine
from align.training.memory import GIB, Sharding, cache_bytes, resident_memory, weights_bytes
from align.training.peak_memory import measure_peak_memory
from tests.launch.compared import metrics
from tests.training.test_resume import options

BF16 = [torch.empty(10, 100, dtype=torch.bfloat16), torch.empty(50, dtype=torch.bfloat16)]
"""1,050 trained numbers."""


def test_what_stays_by_hand():
    found = resident_memory("adamw", BF16, 2 * 1050, Sharding())
    assert found.resident == {"weights": 2100, "masters": 4200, "optimizer": 8400}
    assert found.gradients == 4200
    # Adafactor: 10 rows and 100 columns of the matrix, the whole vector.
    assert resident_memory("adafactor", BF16, 2100, Sharding()).resident["optimizer"] == 4 * (10 + 100 + 50)
    one, two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    two.weight = one.weight
    assert weights_bytes([one, two]) == 8 * 8 * 4, "shared weights count once"
    # float32 weights are their own masters.
    assert resident_memory("adamw", [torch.empty(7)], 28, Sharding()).resident == {
        "weights": 28,
        "masters": 0,
        "optimizer": 56,
    }


@pytest.mark.parametrize(
    ("sharding", "weights", "masters", "gradients"),
    [
        (Sharding(1, 2), 2100, 2100, 4200),
        (Sharding(2, 2), 2100, 2100, 2100),
        (Sharding(3, 2), 1050, 2100, 2100),
        (Sharding(3, 2, offload=True), 1050, 0, 2100),
    ],
)
def test_zero_spreads_it_over_processes(sharding, weights, masters, gradients):
    found = resident_memory("adamw", BF16, 2100, sharding)
    assert found.resident == {"weights": weights, "masters": masters, "optimizer": 2 * masters}
    assert found.gradients == gradients


def test_the_cache_by_hand(sharp_backbones):
    """2 layers of 2 key-value heads of 16 float32 numbers, keys and values; 264 logits, four times and once wide."""
    assert cache_bytes(sharp_backbones["tiny-llama"], tokens=100, rows=0) == 2 * 2 * 2 * 16 * 4 * 100
    assert cache_bytes(sharp_backbones["tiny-llama"], tokens=0, rows=10) == 10 * 264 * (4 * 4 + 8)
    assert cache_bytes(sharp_backbones["tiny-t5"], tokens=1, rows=0) == 2 * 2 * 4 * 16 * 4


def test_a_model_of_7b_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """6.74 billion weights: 18 bytes each in bfloat16 with AdamW are 113 GiB. There is no file of weights to read."""
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    settings = {"model": str(tmp_path), "output_dir": str(tmp_path / "run"), "report_to": ["none"], "dtype": "bfloat16"}
    monkeypatch.setattr(memory.Memory, "free", lambda _: 24 * GIB)
    with pytest.raises(UserError) as error:
        run_sft(SFTConfig(**settings))
    text = str(error.value)
    needed = float(text.split("needs about ")[1].split(" ")[0])
    assert 112 < needed < 118  # the process itself is there too
    assert "but 24.0 GiB are free" in text
    assert "set lora_r 16, or set optimizer adafactor or adamw_8bit, or shard it by ZeRO-3 (docs/clusters.md)" in text
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(memory.Memory, "free", lambda _: 200 * GIB)
    with pytest.raises(UserError, match="weights"):  # it fits; then the missing weights are an error
        run_sft(SFTConfig(**settings))
    monkeypatch.setattr(memory.Memory, "free", lambda _: 8 * GIB)
    with pytest.raises(
        UserError, match=r"about 1[2-6]\.. GiB.*set load_in_4bit true"
    ):  # 6.74 billion x 2 bytes, and the process
        run_sft(SFTConfig(**settings, lora_r=16))
    with pytest.raises(UserError, match="its weights"):  # 6.48 billion x 4.13 bits, 0.26 billion x 2 bytes
        run_sft(SFTConfig(**settings, lora_r=16, load_in_4bit=True))


def test_free_memory_is_what_is_left_and_what_is_held(make_run, monkeypatch):
    run = make_run(SFTConfig, "sft")
    held = psutil.Process().memory_info().rss
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB))
    monkeypatch.setattr(memory, "cgroup_bytes_left", lambda: 3 * GIB)
    assert run.memory.free() == pytest.approx(3 * GIB + held, rel=0.02)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert run.memory.free() == pytest.approx(1.5 * GIB + held, rel=0.02)


def test_the_peak_is_remembered_and_forgotten_by_the_next_run(make_run):
    run = make_run(SFTConfig, "sft")
    before = run.memory.peak()
    block = torch.ones(2**26)  # 256 MiB
    del block
    assert run.memory.peak() > before + 200 * 2**20
    assert make_run(SFTConfig, "sft").memory.peak() < before + 100 * 2**20


@pytest.fixture
def tokens_read(monkeypatch):
    """Padded tokens of every forward pass with gradients."""
    seen, honest = [], DecoderBackbone.hidden

    def hidden(backbone, prompt, response, *more, **named):
        if torch.is_grad_enabled():
            seen.append(prompt.ids.numel() + response.ids.numel())
        return honest(backbone, prompt, response, *more, **named)

    monkeypatch.setattr(DecoderBackbone, "hidden", hidden)
    return seen


OTHERS = ["reward", "dpo", "distill"]


def without_ptx(words):
    """Options without those of ptx, whose micro-batches are not tried."""
    ours = [number for number, word in enumerate(words) if word.startswith("--ptx.")]
    return [word for number, word in enumerate(words) if number not in ours and number - 1 not in ours]


@pytest.mark.parametrize("stage", ["sft", "ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_the_largest_micro_batch_is_known_before_the_first_update(stage, tokens_read, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[2])
    cli.main([stage, *without_ptx(options(stage, tmp_path / "plain"))])
    plain = list(tokens_read)
    tokens_read.clear()
    assert "largest micro-batch" not in capsys.readouterr().err, "a small model fits anywhere"
    monkeypatch.setattr(memory, "ALWAYS_FITS_BYTES", 0)
    cli.main([stage, *without_ptx(options(stage, tmp_path / "measured"))])
    printed = capsys.readouterr().err
    assert printed.index("running the largest micro-batch") < printed.index("at the peak of the largest micro-batch")
    assert tokens_read[1:] == plain
    assert tokens_read[0] >= max(plain)
    assert metrics(tmp_path / "measured") == metrics(tmp_path / "plain"), "the measurement changes nothing"
    for path in (tmp_path / "plain").rglob("*.safetensors"):
        assert (tmp_path / "measured" / path.relative_to(tmp_path / "plain")).read_bytes() == path.read_bytes()


def test_a_trial_leaves_no_gradient_and_no_trace_in_random_numbers(toy_run):
    engine = TrainEngine(toy_run(), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1).bfloat16()), 5)
    before = torch.get_rng_state()
    held = []

    engine.run.memory.estimate = resident_memory("adamw", [], 0, Sharding())
    with measure_peak_memory(engine, 1, 4):
        held.extend(master.grad is not None for master in engine.masters.values())
        engine.backward(BatchLoss(engine.module(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum()))
    assert held == [True, True], "gradients of earlier micro-batches would be there"
    assert torch.equal(torch.get_rng_state(), before)
    assert all(tensor.grad is None for tensor in (*engine.masters.values(), *engine.module.parameters()))
    assert not engine.optimizer.state


@pytest.mark.parametrize(("stage", "more"), [("sft", []), ("ppo", ["--gradient_checkpointing", "true"])])
def test_a_micro_batch_that_does_not_fit_is_refused_with_advice(stage, more, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(memory, "ALWAYS_FITS_BYTES", 0)
    monkeypatch.setattr(memory.Memory, "_require", lambda *_: None)  # the arithmetic lets it pass
    monkeypatch.setattr(memory.Memory, "free", lambda _: GIB // 100)
    with pytest.raises(SystemExit):
        cli.main([stage, *options(stage, tmp_path / "run", *more)])
    line = capsys.readouterr().err.splitlines()[-1]
    assert "the largest micro-batch (" in line
    assert "but 0.0 GiB are free on cpu: lower micro_batch_tokens to " in line
    assert ("gradient_checkpointing" in line) == (not more)
    assert not (tmp_path / "run").exists(), "no update has begun"
