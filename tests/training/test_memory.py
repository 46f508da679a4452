"""The estimate of memory by hand arithmetic, against what real tensors take, and its refusal."""

import gc
import json
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from align.core.errors import UserError
from align.models.backbone import dry_run_states
from align.sft import SFTConfig, run_sft
from align.training import memory
from align.training.memory import GIB, MemoryEstimate, Sharding, cache_bytes, resident_memory, suggestions, weights_bytes
from align.training.memory_dry_run import BatchShape, LiveBytes, RolePass, pass_bytes

BF16 = [torch.empty(10, 100, dtype=torch.bfloat16), torch.empty(50, dtype=torch.bfloat16)]
"""1,050 trained numbers."""


def test_what_stays_by_hand():
    found = resident_memory("adamw", BF16, 2 * 1050, Sharding())
    assert found.resident == {"weights": 2100, "masters": 4200, "optimizer": 8400}
    assert found.gradients == 4200
    # Adafactor: 10 rows and 100 columns of the matrix, the whole vector.
    assert resident_memory("adafactor", BF16, 2100, Sharding()).resident["optimizer"] == 4 * (10 + 100 + 50)
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


def test_the_peak_is_that_of_the_largest_phase():
    found = MemoryEstimate({"weights": 100}, 40, {"learning": 50, "sampling": 80})
    assert found.total == 100 + 90  # gradients wait while a later micro-batch learns
    assert (
        MemoryEstimate({"weights": 100}, 40, {"learning": 50, "sampling": 20}, accumulates_gradients=False).total == 100 + 50
    )
    assert MemoryEstimate({"weights": 100}, 60, {"learning": 50}, accumulates_gradients=False).total == 100 + 60
    assert MemoryEstimate({"weights": 100}, 0, {"sampling": 80}, heap_overhead=0.25).total == 100 + 100


def test_live_bytes_by_hand():
    given = torch.ones(4, 8)
    with LiveBytes([given]) as live:
        first = given + 1  # 128 bytes
        assert live.now == 128
        view = first[:2].t()
        second = given.view(-1) * 2
        assert live.now == live.peak == 256, "views are free"
        del first, view
        gc.collect()
        assert (live.now, live.peak) == (128, 256)
    assert second.sum() == 64


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}, {"gradient_checkpointing": True}])
@pytest.mark.slow
def test_a_dry_run_counts_what_real_tensors_take(load_sharp, tiny_name, settings):
    loaded = load_sharp(tiny_name, **settings)
    backbone, rows = loaded.backbone, BatchShape(3, 20, [12], 36)
    found = pass_bytes([RolePass(backbone, loaded.adapter, takes_logits=False)], rows, backward=True)
    assert all(weight.grad is None for weight in backbone.parameters()), "nothing real was computed"
    trained = [weight for weight in backbone.parameters() if weight.requires_grad]
    handles = [weight.register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", None)) for weight in trained]
    with LiveBytes(list(backbone.parameters())) as live, backbone.adapter(loaded.adapter):
        dry_run_states(backbone, 3, 20, [12]).float().sum().backward()
    for handle in handles:
        handle.remove()
    assert found == pytest.approx(live.peak, rel=0.1)  # the kernels of attention differ a little in what they keep
    assert found > 3 * 32 * 64 * 4, "at least one state of each token"


def test_memory_grows_with_rows_and_shrinks_with_checkpointing(load_sharp):
    loaded = load_sharp("tiny-llama")
    role_passes = [RolePass(loaded.backbone, None, takes_logits=True)]
    small, large = (
        pass_bytes(role_passes, BatchShape.from_lengths([(20, [12])] * count), backward=True) for count in (8, 32)
    )
    assert 3.5 * small < large < 4.1 * small
    assert pass_bytes(role_passes, BatchShape.from_lengths([(20, [12])] * 32), backward=False) < large / 2
    recomputed = load_sharp("tiny-llama", gradient_checkpointing=True)
    assert (
        pass_bytes([RolePass(recomputed.backbone, None, True)], BatchShape.from_lengths([(20, [12])] * 32), backward=True)
        < 0.8 * large
    )


def test_the_cache_by_hand(sharp_backbones):
    """2 layers of 2 key-value heads of 16 float32 numbers, keys and values; 264 logits, four times and once wide."""
    assert cache_bytes(sharp_backbones["tiny-llama"], tokens=100, rows=0) == 2 * 2 * 2 * 16 * 4 * 100
    assert cache_bytes(sharp_backbones["tiny-llama"], tokens=0, rows=10) == 10 * 264 * (4 * 4 + 8)
    assert cache_bytes(sharp_backbones["tiny-t5"], tokens=1, rows=0) == 2 * 2 * 4 * 16 * 4


def test_shared_weights_count_once():
    one, two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    two.weight = one.weight
    assert weights_bytes([one, two]) == 8 * 8 * 4


def test_what_saves_most_comes_first():
    estimate = MemoryEstimate({"weights": 2 * GIB, "masters": 4 * GIB, "optimizer": 8 * GIB}, 4 * GIB, {"learning": 3 * GIB})
    found = suggestions(estimate, SFTConfig(), Sharding())
    assert found[0] == "lora_rank 16 (about 16.0 GiB)"
    assert [text.split(" (")[0] for text in found[1:]] == [
        "ZeRO-3 on two processes",
        "optimizer adafactor",
        "gradient_checkpointing true",
        "micro_batch_tokens 2048",
    ]
    learning = MemoryEstimate({"weights": GIB, "masters": 0, "optimizer": 0}, 0, {"learning": 9 * GIB})
    assert suggestions(learning, SFTConfig(lora_rank=16), Sharding(3, 2))[0].startswith("gradient_checkpointing")


LLAMA_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


def test_a_model_of_7b_is_refused_before_it_is_read(tmp_path):
    """6.74 billion weights: 18 bytes each in bfloat16 with AdamW are 113 GiB. There is no file of weights to read."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    settings = {"model": str(tmp_path), "output_dir": str(tmp_path / "run"), "log_to": ["none"], "dtype": "bfloat16"}
    with pytest.raises(UserError) as error:
        run_sft(SFTConfig(**settings, memory_limit=24))
    text = str(error.value)
    needed = float(text.split("needs about ")[1].split(" ")[0])
    # On a CPU gradients count a fifth more, and the process itself is there too.
    assert 112 < needed < 125
    assert "but 24.0 GiB are free" in text
    assert "to reduce it, the largest saving first: lora_rank 16 (about 100.4 GiB)" in text
    limit = int(text.split("memory_limit ")[1].split(" starts it anyway")[0])
    assert needed - 0.05 <= limit < needed + 1.05  # whole GiB above the need, which the text rounds to a tenth
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="weights"):  # the limit lets it pass; then the missing weights are an error
        run_sft(SFTConfig(**settings, memory_limit=200))


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


@pytest.mark.parametrize(
    ("flags", "dtype", "counted"),
    [({"amx_bf16"}, "bfloat16", True), ({"amx_bf16"}, "float32", False), ({"avx512_bf16"}, "bfloat16", False)],
)
def test_kernels_for_amx_are_counted_where_they_are_made(make_run, monkeypatch, flags, dtype, counted):
    run = make_run(SFTConfig, "sft")
    monkeypatch.setattr(memory, "ALWAYS_FITS_BYTES", 0)
    monkeypatch.setattr(memory, "cpu_flags", lambda: frozenset(flags))
    table = run.memory.check(
        SFTConfig(dtype=dtype), nn.Linear(2, 2), [], {"learning": lambda: 0}, accumulates_gradients=True
    )
    assert ("AMX kernels 1.80" in table) == counted
    run.memory.limit = 2.0
    config = SFTConfig(dtype=dtype)
    if counted:
        with pytest.raises(UserError, match=r"2\.0 GiB are free"):
            run.memory.check(config, nn.Linear(2, 2), [], {"learning": lambda: 0}, accumulates_gradients=True)
