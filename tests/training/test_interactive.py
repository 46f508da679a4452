"""PPO in a real IPython session, which keeps the last traceback with everything in it."""

import os
import sys

import pexpect
import pytest

from tests.files import ROOT

CELLS = """
import time
from align.ppo import PPOConfig, PPOTrainer

def failing(prompts, responses):
    if len(calls) == 1:
        raise ValueError("the service is down")
    calls.append(1)
    return [1.0] * len(responses)

def slow(prompts, responses):
    print("sco" + "ring", flush=True)
    time.sleep(3)
    return [1.0] * len(responses)

def trainer(reward):
    calls.clear()
    sizes = dict(total_updates=50, rollout_batch_size=4, num_ppo_epochs=1, max_new_tokens=4)
    config = PPOConfig(output_dir=f"{folder}/{reward.__name__}", dtype="float32", report_to=["none"], **sizes)
    return PPOTrainer("tiny-gpt2", [reward], ["a", "b", "c", "d"], config)

calls = []
"""


@pytest.mark.slow
def test_a_session_survives_a_failed_and_an_interrupted_run(tmp_path):
    (tmp_path / "cells.py").write_text(f"folder = {str(tmp_path)!r}\n{CELLS}")
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "IPYTHONDIR": str(tmp_path / "ipython"), "TERM": "dumb"}
    options = ["-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit"]
    session = pexpect.spawn(sys.executable, options, cwd=str(ROOT), env=variables, encoding="utf-8", timeout=300)

    def run(code: str, *expected: str) -> None:
        session.sendline(code)
        for text in expected:
            session.expect(text)

    run("from cells import *; print('re' + 'ady')", "ready")
    run("trainer(failing).train()", "the service is down", r"In \[")
    run("import signal; print(signal.getsignal(signal.SIGINT))", "default_int_handler")
    run("print('sle' + 'eping'); time.sleep(600)", "sleeping")
    session.sendintr()
    session.expect("KeyboardInterrupt")
    run("trainer(slow).train()", "scoring", "scoring")
    session.sendintr()
    session.expect("SIGINT: stopping after this update")
    session.expect("stopped by SIGINT after update 1")
    run("print(6 * 7, signal.getsignal(signal.SIGINT))", "42 .*default_int_handler")
    run("exit", pexpect.EOF)
    assert [path.name for path in tmp_path.glob("slow/checkpoints/*")] == ["update-000001"]
