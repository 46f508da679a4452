import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from align.core.tensor_ops import BatchLoss
from align.data.readers import write_records
from align.data.records import Prompt
from align.ppo import PPOConfig, PPOTrainer, run_ppo
from align.ppo import train as train_module
from align.ppo.evaluation import Evaluator
from align.ppo.extensions.discovery import installed_extensions
from align.ppo.metrics import rollout_metrics
from align.ppo.monitor import PPOMonitor
from align.ppo.records import Experience, RoleOutputs, Rollout, TrainingSignal
from align.ppo.rewards import MissingEos
from align.ppo.toy_rewards import share_of_e
from align.ppo.train import compute_advantages
from align.tokenization.encoded import EncodedPrompt
from align.training.engine import TrainEngine
from tests.files import metrics_of, read_rows
from tests.ppo.rewards import fewer_es, long
from tests.settings import run_settings


def settings(model: str, folder: Path, **more: object) -> PPOConfig:
    """PPO on a tiny model with random weights: 12 bytes of answer to one of eight one-word prompts."""
    prompts = folder / "prompts.jsonl"
    words = ("red", "green", "blue", "one", "two", "three", "dog", "cat")
    write_records(prompts, [Prompt(prompt=({"role": "user", "content": word},)) for word in words])
    given: dict[str, object] = run_settings(
        folder / "run",
        model=model,
        prompts=str(prompts),
        validation_prompts=str(prompts),
        reward_functions=["align.ppo.toy_rewards:share_of_e"],
        total_updates=30,
        rollout_batch_size=64,
        max_new_tokens=12,
        missing_eos_score=None,
        learning_rate=3e-3,
        kl_coef=0.0,
        eval_steps=10,
        max_kl=1000.0,
    )
    return PPOConfig(**(given | more))


def metrics(folder: Path) -> list[dict[str, float]]:
    return metrics_of(folder / "run")


@pytest.mark.parametrize(
    ("model", "updates", "reward"),
    [
        ("tiny-t5", 20, 0.1),
        # Seeds 0 to 3 all arrive by then, and not all by 30.
        *(pytest.param(model, 48, 0.9, marks=pytest.mark.slow) for model in ("tiny-gpt2", "tiny-t5")),
    ],
)
def test_ppo_raises_a_known_reward_to_near_its_optimum(model: str, updates: int, reward: float, tmp_path: Path) -> None:
    """A random model says each of 264 tokens alike, so e has a share near 1/264; its optimum is 1."""
    run_ppo(settings(model, tmp_path, total_updates=updates))
    rows = metrics(tmp_path)
    assert rows[0]["validation/reward"] < 0.05
    assert rows[-1]["validation/reward"] > reward
    assert all(row["ratio/abs_error"] < 1 for row in rows[1:])


def test_a_kl_penalty_holds_the_policy_back(tmp_path: Path) -> None:
    """Moving all mass to one of 264 tokens costs log 264 = 5.6 nats per token, far more than the 1/12 of reward it earns."""
    (tmp_path / "free").mkdir()
    (tmp_path / "held").mkdir()
    run_ppo(settings("tiny-gpt2", tmp_path / "free", total_updates=15))
    run_ppo(settings("tiny-gpt2", tmp_path / "held", total_updates=15, kl_coef=0.1))
    free, held = metrics(tmp_path / "free")[-1], metrics(tmp_path / "held")[-1]
    assert free["kl/k1"] > 4
    assert held["kl/k1"] < 0.25 * free["kl/k1"]
    assert held["reward/mean"] < free["reward/mean"]
    assert held["reward/kl_penalized"] == pytest.approx(held["reward/mean"] - 0.1 * held["kl/k1"], abs=1e-5)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_the_policy_rests_while_the_critic_warms_up(critic: str, tmp_path: Path) -> None:
    """Three updates at rest: the same texts as the initial policy's, while the values learn."""
    run_ppo(
        settings(
            "tiny-gpt2",
            tmp_path,
            reward_functions=["align.ppo.toy_rewards:brevity=3"],  # between 2.6 and 3 for 12 bytes
            critic=critic,
            value_fit="none",
            total_updates=5,
            critic_warmup=3,
            value_learning_rate=1e-2,
            eval_steps=1,
            kl_coef=1e-4,
            kl_target=6.0,
        )
    )
    rows = metrics(tmp_path)
    assert [row["kl/k1"] for row in rows[1:4]] == [0.0] * 3
    assert rows[5]["kl/k1"] > 0
    assert len({row["validation/reward"] for row in rows[:4]}) == 1
    assert [row["learning_rate"] > 0 for row in rows[1:]] == [False, False, False, True, True]
    assert rows[1]["learning_rate/value"] == pytest.approx(1e-2 * 0.925)  # linear: the mean of 20, 19, 18, 17 of 20 parts
    assert min(row["loss/value"] for row in rows[2:5]) < 0.7 * rows[1]["loss/value"]
    assert len({row["kl/coef"] for row in rows[1:5]}) == 1, "beta adapted to the KL of a policy that rests"
    # Update 4 begins at a KL of 0, whose distance from the target is clipped at -0.2.
    assert rows[5]["kl/coef"] == pytest.approx(1e-4 * (1 - 0.2 * 64 / 10_000), rel=1e-6)
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "| update | 4 |" in card or "| update | 5 |" in card, "the initial policy was kept"


def test_a_judge_chooses_the_policy_and_stops_a_run_that_games_its_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings("tiny-gpt2", tmp_path, eval_steps=4, selection={"early_stopping_patience": 3}, total_updates=60)
    PPOTrainer(config.model, [share_of_e], config.prompts, config, config.prompts, selection_reward_model=fewer_es).train()
    rows = metrics(tmp_path)
    assert rows[-1]["update"] < 60
    name = "validation/selection_reward"
    evaluated = {row["update"]: row[name] for row in rows if name in row}
    best = max(evaluated, key=lambda update: (evaluated[update], -update))
    assert f"| update | {best} |" in (tmp_path / "run" / "model" / "README.md").read_text()
    printed = " ".join(capsys.readouterr().err.split())
    assert "stopped: from update" in printed
    assert "selecting the best policy by its training reward" not in printed
    sample = read_rows(tmp_path / "run" / "samples.jsonl")[0]
    assert sample["selection_reward"] == -sample["reward"]


@pytest.mark.parametrize(
    "more",
    [
        {
            "advantage_estimator": "rloo",
            "kl_in": "loss",
            "kl_estimator": "k2",
            "kl_coef": 0.001,
            "ent_coef": 0.001,
            "cliprange_high": 0.3,
        },
        pytest.param({"advantage_estimator": "grpo", "ema_decay": 0.5}, marks=pytest.mark.slow),
        {"advantage_estimator": "reinforce++", "kl_estimator": "k3", "kl_coef": 0.001},
    ],
    ids=lambda more: more["advantage_estimator"],
)
def test_a_reward_rises_without_a_critic(more: dict[str, object], tmp_path: Path) -> None:
    run_ppo(settings("tiny-gpt2", tmp_path, total_updates=14, samples_per_prompt=8, eval_steps=7, **more))
    rows = metrics(tmp_path)
    assert rows[0]["validation/reward"] < 0.05
    assert rows[-1]["validation/reward"] > 0.1
    assert not {"loss/value", "value/clipfrac", "value/explained_variance", "learning_rate/value"} & rows[-1].keys()
    assert ("loss/entropy" in rows[-1]) == ("ent_coef" in more)
    assert ("loss/kl" in rows[-1]) == ("kl_in" in more)
    penalty = 0.0 if "kl_in" in more else rows[-1]["kl/coef"] * rows[-1][f"kl/{more.get('kl_estimator', 'k1')}"]
    assert rows[-1]["reward/kl_penalized"] == pytest.approx(rows[-1]["reward/mean"] - penalty, abs=1e-5)


def test_a_shaped_rollout_by_hand() -> None:
    config = PPOConfig(kl_coef=0.1, gamma=1.0, lam=1.0)
    old = RoleOutputs(
        log_probs=torch.tensor([[-1.0, -1.0], [-2.0, 0.0]]),
        ref_log_probs=torch.tensor([[-2.0, -1.0], [-1.0, 0.0]]),
        values=torch.tensor([[0.5, 1.0], [0.0, 0.0]]),
        entropy=torch.zeros(2, 2),
    )
    scores = MissingEos(score=-1.0).apply(torch.tensor([3.0, 9.0]), torch.tensor([True, False]))
    assert scores.tolist() == [3.0, -1.0]  # the second did not end
    signal = TrainingSignal(scores, {})
    advantages, returns = compute_advantages(config, signal, old, torch.tensor([2, 1]), kl_coef=0.1)
    # Rewards: row 1 -.1 x 1 = -.1, then 3; row 2 -.1 x (-1) - 1 = -.9. With lambda 1 returns are what is still to come.
    torch.testing.assert_close(returns, torch.tensor([[2.9, 3.0], [-0.9, 0.0]]), rtol=0, atol=1e-6)
    # Advantages 2.4, 2, -.9: mean 3.5 / 3 = 1.16667, squares 1.52111 + .69444 + 4.27111 = 6.48667, variance 2.16222,
    # deviation 1.47045.
    expected = torch.tensor([[1.23333 / 1.47045, 0.83333 / 1.47045], [-2.06667 / 1.47045, 0.0]])
    torch.testing.assert_close(advantages, expected, rtol=0, atol=2e-5)
    rollout = Rollout([EncodedPrompt((), [1])] * 2, [[7, 7], [7]], [True, False], ["xx", "x"])
    experience = Experience(rollout, scores, signal, old, advantages, returns, 0.1)
    assert experience.mask.tolist() == [[True, True], [True, False]]
    # KL per response by k1: 1 and -1; by k2: .5 and .5; by k3, e^-d - 1 + d of d = 1, -1: .367879 and .718282.
    for penalty, kl in (("k1", 0.0), ("k2", 0.5), ("k3", (0.367879 + 0.718282) / 2), (None, 0.0)):
        metrics = rollout_metrics(experience, penalty)
        assert metrics["reward/kl_penalized"] == pytest.approx(1.0 - 0.1 * kl, abs=1e-6)  # the mean score is 1
        assert metrics["objective/rlhf_reward"] == metrics["reward/kl_penalized"]


def test_token_rewards_of_extensions_are_added_on_response_tokens_alone() -> None:
    config = PPOConfig(gamma=1.0, lam=1.0)
    old = RoleOutputs(torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2))
    more = torch.tensor([[0.5, 0.25], [1.0, 7.0]])  # 7 stands past the end of the second response
    signal = TrainingSignal(torch.tensor([3.0, 9.0]), {}, token_rewards=more)
    _, returns = compute_advantages(config, signal, old, torch.tensor([2, 1]), 0.0)
    assert returns.tolist() == [[3.75, 3.25], [10.0, 0.0]]


def test_token_rewards_past_the_end_do_not_reach_the_whitening_floor() -> None:
    config, zeros = PPOConfig(gamma=1.0, lam=1.0, whitening_floor=0.1), torch.zeros(2, 2)
    old = RoleOutputs(zeros, zeros, zeros, zeros)
    (first, _), (second, _) = (
        compute_advantages(
            config,
            TrainingSignal(torch.tensor([1.0, 2.0]), {}, token_rewards=torch.tensor([[0.0, 0.0], [0.0, past]])),
            old,
            torch.tensor([2, 1]),
            0.0,
        )
        for past in (0.0, 7e6)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_no_part_of_the_state_has_the_name_of_an_extension(make_ppo, load_sharp) -> None:
    ppo = make_ppo(load_sharp("tiny-gpt2"))
    evaluator, monitor = Evaluator(ppo.setup, ppo.config, 1, 0), PPOMonitor(ppo.config, ppo.setup)
    names = ppo.setup.stateful() | monitor.stateful() | evaluator.stateful()
    assert names.keys() == {"prompts", "negative_kl", "collapse", "drift", "best_policy"}
    assert not {*names, "kl"} & installed_extensions().keys()


def test_whitened_rewards_keep_their_mean_and_reach_the_returns() -> None:
    config = PPOConfig(gamma=1.0, lam=1.0, whiten_rewards=True)
    nothing = torch.zeros(2, 1)
    old = RoleOutputs(nothing, nothing, nothing, nothing)
    signal, lengths = TrainingSignal(torch.tensor([2.0, 6.0]), {}), torch.tensor([1, 1])
    advantages, returns = compute_advantages(config, signal, old, lengths, kl_coef=0.0)
    # Rewards 2 and 6: mean 4, deviation 2, so 4 - 1 and 4 + 1.
    assert returns[:, 0].tolist() == pytest.approx([3.0, 5.0], abs=1e-6)
    assert advantages[:, 0].tolist() == pytest.approx([-1.0, 1.0], abs=1e-6)


def test_the_graph_of_a_micro_batch_is_gone_when_the_next_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept by a name in the loop, it took 1.4 GiB of a PPO update of SmolLM2-135M."""
    losses: list[weakref.ref[torch.Tensor]] = []
    backward, make = TrainEngine.backward, train_module.policy_and_critic_loss

    def watched_backward(engine: TrainEngine, loss: BatchLoss, weight: float = 1.0) -> None:
        losses.append(weakref.ref(loss.loss))
        backward(engine, loss, weight)

    def watched_loss(*call: Any) -> Any:
        assert [each() for each in losses] == [None] * len(losses)
        return make(*call)

    monkeypatch.setattr(TrainEngine, "backward", watched_backward)
    monkeypatch.setattr(train_module, "policy_and_critic_loss", watched_loss)
    run_ppo(settings("tiny-llama", tmp_path, total_updates=1, micro_batch_tokens=64, num_mini_batches=2))
    assert len(losses) > 4


def test_an_update_stops_training_the_policy_at_the_kl_limit_and_the_critic_goes_on(tmp_path: Path) -> None:
    """At a learning rate that is far too high, one step of four exceeds the limit; a critic of its own makes all four."""
    config = settings(
        "tiny-gpt2",
        tmp_path,
        reward_functions=["tests.ppo.rewards:letters"],
        total_updates=2,
        learning_rate=0.05,
        num_ppo_epochs=4,
        num_mini_batches=1,
        critic="separate",
        value_fit="none",
        value_learning_rate=1e-3,
    )
    run_ppo(config)
    rows = metrics(tmp_path)
    assert rows[1]["policy/epochs"] == 1.0  # the first step has a KL of 0 before it, the second one more than the limit
    limited = rows[1]["policy/approx_kl"]
    assert limited == pytest.approx(0, abs=1e-6)


def test_passes_of_the_critic_alone_do_not_move_the_policy(tmp_path: Path) -> None:
    """With 2 more passes of the critic, the first update's policy is the same, and values are nearer to the returns."""
    texts, losses = [], []
    for number, epochs in enumerate((0, 3)):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = settings(
            "tiny-llama",
            folder,
            reward_functions=[],
            total_updates=1,
            num_ppo_epochs=1,
            num_mini_batches=1,
            lr_scheduler_type="constant",
            value_fit="none",
            value_learning_rate=1e-2,
            num_critic_epochs=epochs,
            max_update_kl=0.0,
            eval_steps=1,
            cliprange_value=0.0,
        )
        trainer = PPOTrainer(config.model, [long], config.prompts, config, config.prompts)
        trainer.train()
        weights = trainer.setup.policy.backbone.model.state_dict()
        texts.append({name: weight.clone() for name, weight in weights.items()})
        losses.append(float(trainer.setup.roles.value_head.linear.bias.detach().abs()))
    assert all(torch.equal(texts[0][name], weight) for name, weight in texts[1].items())
    assert losses[1] > 2 * losses[0] > 0  # the bias moves toward the returns, near 3, in each of the critic's steps
