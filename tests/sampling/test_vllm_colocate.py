"""PPO with vLLM in the training process, through TRL's `VLLMGeneration` over the stand-in."""

import sys
from pathlib import Path

import pytest

from align.core.errors import UserError
from align.core.seeds import RngStream, row_seeds
from align.ppo import PPOConfig, run_ppo
from tests.launch.compared import metrics
from tests.sampling.rewards import PROMPTS


@pytest.fixture
def settings(common_settings):
    engine = {"engine": "vllm-colocate", "vllm": {"memory_share": 0.25}}
    return common_settings | {"rollout_batch_size": 3, "max_new_tokens": 5, **engine}


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_two_updates_sample_from_the_weights_of_each(stand_in_vllm, settings, load_sharp, rank):
    folder = run_ppo(PPOConfig(**settings, lora_r=rank)).parent
    from vllm.model import MADE

    llm = MADE.pop()
    tokenization = load_sharp("tiny-llama").tokenization
    longest = max(len(tokenization.prompt_ids(({"role": "user", "content": t},))) for t in PROMPTS)
    assert llm.settings["max_model_len"] == longest + 5
    assert llm.settings["gpu_memory_utilization"] == 0.25
    assert llm.settings["logprobs_mode"] == "processed_logprobs"
    assert (llm.settings["max_num_seqs"], llm.settings["tensor_parallel_size"]) == (256, 1)
    assert llm.states == ["generate"] * 2
    names = [name for name, _ in load_sharp("tiny-llama").backbone.model.named_parameters()]
    assert llm.loaded == 2 * names, "all weights before each rollout"
    assert llm.resets == 2
    assert llm.seeds == row_seeds(3, 0, RngStream.ROLLOUT, 1) + row_seeds(3, 0, RngStream.ROLLOUT, 2)
    assert all(0 <= row["sampling/engine_kl"] < 1e-6 for row in metrics(folder))


def raising(error):
    def call(*_, **__):
        raise error

    return call


@pytest.mark.parametrize(
    ("part", "behavior", "line"),
    [
        (
            "trl.generation.vllm_generation.LLM",
            raising(RuntimeError("no GPU\nwas found")),
            r"engine vllm-colocate: vLLM cannot start \(no GPU\); .*vllm.memory_share",
        ),
        (
            "vllm.model.Model.load_weights",
            raising(AttributeError("no attribute 'weight_loader'")),
            r"vLLM does not take the weights \(no attribute 'weight_loader'\); does it know this",
        ),
        (
            "vllm.model.Model.generate",
            lambda *_: ([1_000_000], [-1.0]),
            r"vLLM gave a wrong answer \(it returned token 1000000",
        ),
    ],
    ids=["start", "weights", "tokens"],
)
def test_a_vllm_that_fails_is_one_line(stand_in_vllm, settings, monkeypatch, part, behavior, line):
    monkeypatch.setattr(part, behavior)
    with pytest.raises(UserError, match=line) as caught:
        run_ppo(PPOConfig(**settings))
    assert "\n" not in str(caught.value)
    assert Path(settings["output_dir"]).exists() == ("cannot start" not in line), "nothing is left behind before the start"


@pytest.mark.parametrize("engine", ["vllm-server", "vllm-colocate"])
def test_without_vllm_its_engines_are_refused_with_what_to_install(settings, monkeypatch, engine):
    monkeypatch.setitem(sys.modules, "vllm", None)  # Python's own way of saying that there is none
    with pytest.raises(UserError, match=rf"engine {engine}: vLLM is not installed .* pip install .* '\.\[vllm\]'"):
        run_ppo(PPOConfig(**settings | {"engine": engine}))
