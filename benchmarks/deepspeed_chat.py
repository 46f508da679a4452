"""PPO at the shapes of DeepSpeed-Chat's published row, with random weights: `python -m benchmarks.deepspeed_chat FOLDER`.

Actor 1.3 B and reward model 350 M (OPT's shapes), prompts and responses of 256 tokens, one epoch, all weights. Two
differences: the vocabulary is SmolLM2's (49,152 tokens, OPT has 50,272), and the critic is a copy of the actor, because a
critic of another size is not supported: more work than theirs. Prints tokens a second, the shares of sampling, scoring and
learning, and MFU.
"""

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

from align.builtin.zoo import resolve_model
from align.files import new_folder
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.training.metrics_file import read_metrics
from benchmarks.data import words

TOKENS = 256
# config.json of facebook/opt-1.3b and facebook/opt-350m.
SHAPES: dict[str, dict[str, Any]] = {
    "actor": {"hidden_size": 2048, "ffn_dim": 8192, "num_attention_heads": 32},
    "reward": {
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_attention_heads": 16,
        "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
    },
    "tiny": {"hidden_size": 64, "ffn_dim": 128, "num_attention_heads": 4, "num_hidden_layers": 2},
}


def make_model(folder: Path, shape: str) -> Path:
    """Random weights in one of OPT's shapes, with SmolLM2's tokenizer, whose end never comes; made once."""
    if folder.exists():
        return folder
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))
    tokenizer.eos_token, tokenizer.pad_token = "<issue_closed>", "<empty_output>"
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    whole = {"vocab_size": len(tokenizer), "num_hidden_layers": 24, "max_position_embeddings": 2048}
    config = OPTConfig(**whole | ids | SHAPES[shape])
    with new_folder(folder) as temporary:
        OPTForCausalLM(config).to(torch.bfloat16).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return folder


def make_prompts(path: Path, tokenizer: Any, count: int, tokens: int) -> None:
    """Prompts of one length."""
    vocabulary, random = words(tokenizer), Random(0)
    rows = [{"prompt": "".join(random.choices(vocabulary, k=tokens))} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_reward(folder: Path, model: Path) -> Path:
    """A reward model, barely trained."""
    if not (folder / "model").exists():
        ranking = folder.with_suffix(".jsonl")
        ranking.write_text(json.dumps({"prompt": "a", "responses": ["b", "c"], "ranks": [1, 2]}) + "\n", encoding="utf-8")
        settings: dict[str, Any] = {"chat_template": "raw", "log_to": ["none"], "train_data": str(ranking)}
        run_reward(RewardConfig(model=str(model), output_dir=str(folder), **settings))
    return folder / "model"


def measure(folder: Path, rows: int, tokens: int, shapes: tuple[str, str], settings: dict[str, Any]) -> dict[str, float]:
    """Three updates, of which the first is a warm-up; figures are means over the others."""
    folder.mkdir(parents=True, exist_ok=True)
    actor, judge = (make_model(folder / shape, shape) for shape in shapes)
    make_prompts(folder / "prompts.jsonl", AutoTokenizer.from_pretrained(actor), 3 * rows, tokens)
    config = PPOConfig(
        **{
            "model": str(actor),
            "reward_model": str(make_reward(folder / "reward-run", judge)),
            "prompts": str(folder / "prompts.jsonl"),
            "chat_template": "raw",
            "critic": "separate",
            "value_start": "zero",
            "epochs": 1,
            "minibatches": 1,
            "rollout_size": rows,
            "updates": 3,
            "max_prompt_tokens": tokens,
            "max_new_tokens": tokens,
            "missing_eos": "keep",
            "log_to": ["none"],
            "output_dir": str(folder / "ppo"),
        }
        | settings
    )
    run_ppo(config)
    measured = read_metrics(Path(config.output_dir))[1:]

    def mean(name: str) -> float:
        return sum(row[name] for row in measured) / len(measured)

    seconds, responses = mean("time/update"), mean("text/length") * rows
    figures = {
        "seconds": seconds,
        "new tokens/s": responses / seconds,
        "all tokens/s": (responses + rows * tokens) / seconds,
    }
    figures |= {part: mean(f"time/{part}") for part in ("sample", "score", "record", "learn")}
    return figures | {"MFU": mean("speed/mfu"), "peak GiB": mean("memory/peak")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=512, help="responses of an update")
    parser.add_argument("--setting", nargs="*", default=[], metavar="NAME=JSON", help="further settings of PPO")
    given = parser.parse_args()
    settings = {name: json.loads(value) for name, _, value in (word.partition("=") for word in given.setting)}
    settings = {"micro_batch_tokens": 32768} | settings
    print(json.dumps(measure(given.folder, given.rows, TOKENS, ("actor", "reward"), settings), indent=1))


if __name__ == "__main__":
    main()
