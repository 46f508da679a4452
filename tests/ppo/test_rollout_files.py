from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from align.ppo import rollout_files, run_ppo
from align.ppo.rollout_files import recorded_updates, rollout_path, rollout_paths, write_rollout
from tests.files import metrics_of
from tests.ppo.test_train import settings

VARIED = "tests.ppo.rewards:letters=0.001"  # hardly ever the same twice


@pytest.mark.parametrize(
    ("updates", "count", "expected"),
    [(5, 0, []), (5, 1, [5]), (5, 2, [1, 5]), (9, 3, [1, 5, 9]), (5, 5, [1, 2, 3, 4, 5]), (3, 100, [1, 2, 3]), (1, 9, [1])],
)
def test_updates_are_chosen_evenly_with_the_first_and_the_last(updates: int, count: int, expected: list[int]) -> None:
    assert sorted(recorded_updates(updates, count)) == expected


def read_rollout(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, as pyarrow reads them."""
    return pq.read_table(path).to_pylist()


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    numbers = {"log_probs": [-0.1, -2.5, -1e-7], "reward/model": 0.1, "reward/brevity": 1e-8}
    first = {"text": "Yo.", "tokens": ["Y", "o.", "<eos>"], **numbers}
    second = {"category": "truth", "id": "a-1", "text": "\u65e5\x00</script>", "tokens": ["", "\u65e5", "\x00</script>"]}
    path = rollout_path(tmp_path, 7)
    write_rollout(path, [first, second])
    found = read_rollout(path)
    for name in ("category", "id", "text", "tokens"):
        assert [each[name] for each in found] == [each.get(name) for each in (first, second)]
    for name, value in numbers.items():
        assert found[0][name] == torch.tensor(value).tolist(), "float32 to the bit"
    assert rollout_paths(tmp_path) == {7: path}


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-t5"])
def test_a_run_writes_what_it_learned_from(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_files, "UPDATES", 2)
    config = settings(
        model,
        tmp_path,
        total_updates=4,
        rollout_batch_size=6,
        kl_coef=0.1,
        reward_functions=[f"align.ppo.toy_rewards:{name}" for name in ("share_of_e=2", "brevity")] + [VARIED],
    )
    run_ppo(config)
    folder = tmp_path / "run"
    files = rollout_paths(folder)
    assert sorted(files) == [1, 4]
    metrics = {line["update"]: line for line in metrics_of(folder)}
    assert 0 < metrics[4]["time/record"] < 1
    for update, path in files.items():
        rows = read_rollout(path)
        assert [(each["update"], each["row"]) for each in rows] == [(update, number) for number in range(6)]
        for each in rows:
            assert len(each["ids"]) == len(each["tokens"]) == len(each["kl"]) == len(each["advantages"]) <= 12
            assert each["reward"] == pytest.approx(
                sum(each[f"reward/{name}"] for name in ("share_of_e", "brevity", "letters")), abs=1e-6
            )
            assert each["reward/brevity"] == pytest.approx(1 - len(each["text"].split()) / 100, abs=1e-6)
        assert sum(each["reward"] for each in rows) / 6 == pytest.approx(metrics[update]["reward/mean"], rel=1e-5)
        assert sum(sum(each["kl"]) for each in rows) / 6 == pytest.approx(metrics[update]["kl/k1"], rel=1e-4, abs=1e-5)
        advantages = torch.tensor([value for each in rows for value in each["advantages"]])
        assert float(advantages.mean()) == pytest.approx(0, abs=1e-5)
        assert float(advantages.std(correction=0)) == pytest.approx(1, abs=1e-4), "whitened over the batch"
        # At the first update the policy is the reference.
        assert any(value != 0 for each in rows for value in each["kl"]) == (update > 1)
        assert any(value != 0 for each in rows for value in each["values"]), "fitted to the first rollout"
