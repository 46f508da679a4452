"""A reward model in the published form of ArmoRM: its score by plain products, wherever it is asked for one."""

import json

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaModel

from align.core.errors import UserError
from align.eval.reward import RewardEvalConfig, run_reward_eval
from align.extras.armo_rm import last_place
from align.ppo import PPOConfig, run_ppo
from align.reward.checkpoint import load_reward_model
from align.reward.scoring import RewardModelScorer
from align.tokenization.encoded import SampledResponse
from tests.files import read_rows, write_rows
from tests.settings import run_settings

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 264}
GATE = {"num_objectives": 5, "gating_hidden_dim": 8, "gating_n_hidden": 2, "gating_temperature": 2.0}
TEXTS = ["There.", "No, never!", "\nWell"]


@pytest.fixture
def published(sharp_folders, sharpen, tmp_path):
    """A folder as the published one, and the tensors in it."""
    folder = tmp_path / "gated"
    folder.mkdir()
    trunk = sharpen(LlamaModel(LlamaConfig(**SIZES, **GATE)))
    names = {"model_type": "llama", "architectures": ["LlamaForRewardModelWithGating"], "num_labels": 5}
    auto = {"AutoModelForSequenceClassification": "modeling_custom.LlamaForRewardModelWithGating"}
    (folder / "config.json").write_text(json.dumps(trunk.config.to_dict() | names | {"auto_map": auto}))
    (folder / "modeling_custom.py").write_text("raise SystemExit('this code was run')")
    torch.manual_seed(2)
    shapes = {"regression_layer.weight": (5, 64), "reward_transform_matrix": (5, 5), "gating.logit_scale": (1,)}
    for number, (rows, columns) in enumerate([(8, 64), (8, 8), (5, 8)]):
        shapes |= {f"gating.layers.{number}.weight": (rows, columns), f"gating.layers.{number}.bias": (rows,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors | {f"model.{name}": value for name, value in trunk.state_dict().items()}, folder / "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(sharp_folders["tiny-llama"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder), trunk.eval(), tensors


@torch.no_grad()
def score_by_hand(published, prompt, text):
    """As the published code has it: attributes at the last token, weights at the last token before the answer is opened."""
    folder, trunk, t = published
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": prompt}]
    whole, before = (
        tokenizer.apply_chat_template(messages, return_dict=False)
        for messages in ([*asked, {"role": "assistant", "content": text}], asked)
    )
    states = trunk(input_ids=torch.tensor([whole])).last_hidden_state[0]
    state = states[len(before) - 1]
    for number in range(2):
        state = torch.relu(t[f"gating.layers.{number}.weight"] @ state + t[f"gating.layers.{number}.bias"])
    weights = torch.softmax((t["gating.layers.2.weight"] @ state + t["gating.layers.2.bias"]) / 2.0, 0)
    attributes = (t["regression_layer.weight"] @ states[-1]) @ t["reward_transform_matrix"]
    return float((weights * t["gating.logit_scale"] * attributes).sum())


def test_scores_are_those_of_the_published_code_which_is_not_run(published, load_sharp):
    folder = published[0]
    expected = [score_by_hand(published, "Hi you", text) for text in TEXTS]
    assert len({round(value, 2) for value in expected}) == 3
    found = load_reward_model(folder, "float32")
    policy = load_sharp("tiny-gpt2").tokenization
    scorer = RewardModelScorer.from_loaded(found, policy, Accelerator(cpu=True), 999)
    asked = ({"role": "user", "content": "Hi you"},)
    together = scorer([SampledResponse(asked, [1], [2], text) for text in TEXTS])
    assert together == pytest.approx(expected, abs=1e-4)
    assert found.loaded.backbone.shares_prompts


def test_it_is_evaluated_and_rewards_a_policy(published, tmp_path):
    folder = published[0]
    pairs = [("Hi", "There.", "No"), ("Why?", "So it is", "x"), ("Who are you?", "Me", "A very long answer")]
    rows = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in pairs]
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    settings = {"preferences": str(data), "output": str(tmp_path / "out"), "dtype": "float32"}
    (found,) = run_reward_eval(RewardEvalConfig(reward_model=folder, **settings))
    scores = [[score_by_hand(published, prompt, text) for text in texts] for prompt, *texts in pairs]
    assert found.measurements[0].value == pytest.approx(sum(good > bad for good, bad in scores) / 3)
    stored = read_rows(tmp_path / "out" / "reward-gated.jsonl")[1:]
    assert [row["rewards"] for row in stored] == [pytest.approx(row, abs=1e-4) for row in scores]
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt, *_ in pairs])
    ppo = {"rollout_batch_size": 3, "num_mini_batches": 1, "total_updates": 1, "max_new_tokens": 6, "prompts": str(prompts)}
    ppo |= run_settings(tmp_path / "ppo", max_prompt_tokens=64)
    run_ppo(PPOConfig(model="tiny-llama", reward_model=folder, **ppo))
    (row,) = read_rows(tmp_path / "ppo" / "metrics.jsonl")
    assert row["reward/model"] != 0.0


def test_the_place_of_an_opening():
    assert last_place([7, 1, 2, 3, 9, 1, 2, 3], [1, 2, 3]) == 5
    assert last_place([7, 1, 2], [1, 2, 3]) == 1  # the opening's last token has joined the answer
    with pytest.raises(UserError, match="was truncated or does not end with"):
        last_place([1, 2, 3, 4], [1, 2, 3])
