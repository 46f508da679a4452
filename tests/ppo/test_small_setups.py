"""PPO must not ruin a policy, whatever its size: random small set-ups with a task that the policy already solves.

The defaults of the value head, whitening and the KL limit of an update decide this. With a value head that starts at 0, most
of these set-ups lose a tenth to a half of their reward in the first update.
"""

import random

import pytest

from align.ppo import PPOConfig, PPOTrainer
from align.sft import SFTConfig, SFTTrainer
from tests.files import metrics_of

WORDS = [
    *("apple", "bird", "cold", "door", "east", "fish", "gold", "hand", "iron", "jump"),
    *("king", "leaf", "moon", "nest", "open", "pink", "quiz", "rain", "star", "tree"),
]


def answer(word: str) -> str:
    return word[::-1][:3]


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory):
    """Folders of tiny models that were trained on `answer`, for many epochs (sharp) or few (flat)."""
    folders = {}

    def train(model: str, sharp: bool) -> str:
        if (model, sharp) not in folders:
            config = SFTConfig(
                output_dir=str(tmp_path_factory.mktemp("sft")),
                num_train_epochs=60 if sharp else 12,
                batch_size=10,
                learning_rate=5e-3,
                report_to=["none"],
            )
            demonstrations = [{"prompt": word, "completion": answer(word)} for word in WORDS]
            folders[model, sharp] = str(SFTTrainer(model, demonstrations, config).train())
        return folders[model, sharp]

    return train


def setup_of(seed: int) -> dict:
    rng = random.Random(seed)
    return {
        "model": rng.choice(["tiny-llama", "tiny-t5", "tiny-gpt2"]),
        "sharp": rng.random() < 0.7,
        "kind": ["constant", "nearly constant", "sparse", "noisy", "dense"][seed % 5],
        "rows": rng.choice([4, 8, 16, 32, 64]),
        "lora_r": rng.choice([0, 8]),
        "critic": rng.choice(["shared", "separate"]),
    }


def score(kind: str, word: str, is_right: bool, rng: random.Random) -> float:
    if kind == "constant":
        return 1.4
    if kind == "nearly constant":
        return 1.4 + 0.1 * rng.gauss(0, 1)
    if kind == "sparse":
        return float(is_right and word in WORDS[:3])
    return is_right + 0.5 * rng.gauss(0, 1) if kind == "noisy" else 2.0 * is_right


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 4)) for seed in range(20)])
def test_no_update_ruins_a_policy(seed, fine_tuned, tmp_path):
    made = setup_of(seed)
    rng = random.Random(seed)
    rewards: list[tuple[float, float]] = []  # mean and squared standard error of each call

    def reward(prompts, responses):
        words = [prompt[-1]["content"] for prompt in prompts]
        pairs = zip(words, responses, strict=True)
        scores = [score(made["kind"], word, text.strip() == answer(word), rng) for word, text in pairs]
        mean = sum(scores) / len(scores)
        rewards.append((mean, sum((each - mean) ** 2 for each in scores) / len(scores) ** 2))
        return scores

    config = PPOConfig(
        output_dir=str(tmp_path / "run"),
        total_updates=5,
        rollout_batch_size=made["rows"],
        max_new_tokens=6,
        missing_eos_score=None,  # it would be a reward of its own
        learning_rate=1e-3 if made["lora_r"] else 3e-4,
        lr_scheduler_type="constant",
        lora_r=made["lora_r"],
        critic=made["critic"],
        eval_steps=1,
        seed=seed,
        report_to=["none"],
        save_best_policy=False,
    )
    validation = WORDS * 10
    folder = fine_tuned(made["model"], made["sharp"])
    PPOTrainer(folder, [reward], WORDS * 4, config, validation_prompts=validation).train()
    evaluations = rewards[0::2]  # of the initial policy; then a rollout and an evaluation in each update
    for (before, error), (after, later_error) in zip(evaluations[:-1], evaluations[1:], strict=True):
        assert after > before - 4 * (error + later_error) ** 0.5 - 1e-6, made
    if made["kind"] == "constant":
        kl = [row["validation/kl"] for row in metrics_of(tmp_path / "run") if "validation/kl" in row]
        assert max(map(abs, kl)) < 0.01, made
