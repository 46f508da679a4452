"""PPO with reward functions that differ from call to call, or fail, in the processes that a launcher started.

Usage: own_rewards.py FOLDER; each process writes what it saw to RANK.json there. See test_two_processes.py.
"""

import json
import os
import random
import sys
from pathlib import Path

from align.core.errors import UserError
from align.ppo import PPOConfig, PPOTrainer, train

RANK, folder = os.environ["RANK"], Path(sys.argv[1])
drawn, calls = random.Random(int(RANK)), {"noisy": 0, "judge": 0}


def noisy(prompts, responses):
    calls["noisy"] += 1
    return [drawn.gauss(0, 1) for _ in responses]


def judge(prompts, responses):
    calls["judge"] += 1
    return [drawn.gauss(0, 1) for _ in responses]


def failing(prompts, responses):
    if RANK == "0":
        raise ValueError("the service is down")
    return [0.0] * len(responses)


def trainer(name, function, **more):
    config = PPOConfig(
        output_dir=str(folder / name),
        dtype="float32",
        report_to=["none"],
        total_updates=3,
        rollout_batch_size=4,
        num_ppo_epochs=1,
        max_new_tokens=4,
        eval_steps=1,
        collective_timeout=60,
        **more,
    )
    words = ["red", "green", "blue", "one"]
    return PPOTrainer("tiny-gpt2", [function], words, config, words, selection_reward_model=judge)


evaluators = []


class SeenEvaluator(train.Evaluator):
    def __init__(self, *given):
        super().__init__(*given)
        evaluators.append(self)


train.Evaluator = SeenEvaluator
made = trainer("noisy", noisy)
made.train()
seen = {
    "selection": evaluators[0].selection.state_dict(),
    "drift": evaluators[0].drift.state_dict(),
    "judge": made.setup.extensions[-1].state_dict(),
    "calls": dict(calls),
}
try:
    trainer("failing", failing).train()
except UserError as error:
    seen["failing"] = str(error)
(folder / f"{RANK}.json").write_text(json.dumps(seen))
