"""A vLLM server under ZeRO-3: one process talks to it, and the numbers are those of one process."""

from pathlib import Path

import pytest
import torch

from align import cli
from tests.launch.compared import compare
from tests.launch.launcher import ROOT, launch_in_turn

SCRIPT = Path(__file__).with_name("align_with_stand_in.py")
SETTINGS = """
    --dtype float32 --report_to none --reward_functions tests.sampling.rewards:letters
    --prompts data/prompts_validation.jsonl --overlong truncate --max_prompt_tokens 24
    --total_updates 2 --rollout_batch_size 5 --num_ppo_epochs 1 --max_new_tokens 5
    --learning_rate 1e-3 --missing_eos_score none --lora_r 4 --engine vllm-server --vllm.timeout 60
"""


@pytest.mark.slow  # test_vllm_server.py has one process
def test_two_processes_under_zero3_ask_and_send_what_one_does(serve, sharp_folders, tmp_path, monkeypatch):
    model, servers, words = sharp_folders["tiny-llama"], {}, {}
    for processes in (1, 2):
        servers[processes] = serve(model)
        own = ["--model", model, "--vllm.url", servers[processes].url, "--output_dir", str(tmp_path / str(processes))]
        words[processes] = ["ppo", *SETTINGS.split(), *own]
    monkeypatch.chdir(ROOT)
    cli.main(words[1])
    launch_in_turn([[str(SCRIPT), *words[2]]], tmp_path, "zero3")
    one, two = servers[1], servers[2]
    assert compare(tmp_path / "1", tmp_path / "2").figure < 2e-3

    def asked(server):
        return sorted((body["prompt"], body["seed"]) for body in server.requests)

    assert len(two.requests) == 2 * 5, "the second process asks for nothing"
    assert asked(two) == asked(one)
    assert two.paths == one.paths
    assert [list(sent) for sent in two.updates] == [list(sent) for sent in one.updates]
    for sent, twin in zip(two.updates, one.updates, strict=True):
        assert all(torch.allclose(value, twin[name], atol=1e-4) for name, value in sent.items())
