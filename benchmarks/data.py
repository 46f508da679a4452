"""The models and texts that both sides read, made once: `python -m benchmarks.data --scale cpu FOLDER [--only ppo]`."""

import argparse
import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
)

from align.core.files import new_folder, write_json_lines
from align.model_registry.registry import resolve_model
from align.models.loading import load_tokenization
from align.reward import RewardConfig, run_reward
from benchmarks.workloads import ALL, SCALES, Work, scaled, works_of


def make(folder: Path, scale: str, names: Sequence[str] = ()) -> None:
    """Write the models and data of the works `names` (default: all) at a scale, unless this code has written them before."""
    here = Path(__file__).parent
    recipe = hashlib.sha256((here / "data.py").read_bytes() + (here / "workloads.py").read_bytes()).hexdigest()
    made = folder / "made"
    if not made.exists() or made.read_text(encoding="utf-8") != recipe:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for work in (scaled(ALL[name], SCALES[scale]) for name in names or works_of(scale)):
        if not (folder / work.model_folder).exists():
            is_race = work.stage == "race"
            name = "tiny-llama" if is_race else (*work.gpu_models, SCALES[scale].model)[0]
            make_model(folder / work.model_folder, name, endless=not is_race)
        if not (folder / f"{work.name}.ids.jsonl").exists():
            make_texts(folder, work, folder / work.model_folder, list(ALL).index(work.name))
        if work.stage == "ppo":
            make_reward_model(folder, work)
    made.write_text(recipe, encoding="utf-8")


def random_model(shape: str, vocabulary: int, kind: type[Any] = AutoModelForCausalLM) -> PreTrainedModel:
    """Return a model with a shape of `SHAPES` and random bfloat16 weights, created on the GPU if there is one."""
    config = SHAPES[shape](vocabulary)
    config.num_labels = 1  # of a classifier
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: PreTrainedModel = kind.from_config(config, dtype=torch.bfloat16)
    return model


def shape_of(config: type[PreTrainedConfig], smallest: int = 0, **sizes: Any) -> Callable[[int], PreTrainedConfig]:
    """Return a function that creates a config for a vocabulary size. `smallest` is the minimum vocabulary size."""
    return lambda vocabulary: config(vocab_size=max(vocabulary, smallest), **sizes)


GROUPED: dict[str, Any] = {"num_key_value_heads": 8, "tie_word_embeddings": True}
LLAMA = partial(shape_of, LlamaConfig, head_dim=64, max_position_embeddings=4096, **GROUPED)
OPT = partial(shape_of, OPTConfig, num_hidden_layers=24, dropout=0.0)
QWEN3 = partial(shape_of, Qwen3Config, 151936, head_dim=128, max_position_embeddings=40960, **GROUPED)
SHAPES: dict[str, Callable[[int], PreTrainedConfig]] = {
    # Llama 3.2 1B
    "llama-1b": LLAMA(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32),
    "opt-1.3b": OPT(hidden_size=2048, ffn_dim=8192, num_attention_heads=32, word_embed_proj_dim=2048),
    "opt-350m": OPT(
        hidden_size=1024, ffn_dim=4096, num_attention_heads=16, word_embed_proj_dim=512, do_layer_norm_before=False
    ),
    "qwen3-0.6b": QWEN3(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "qwen3-4b": QWEN3(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
}
"""Configs of published models. Qwen3's have their own vocabulary, a quarter of the weights of the smallest model."""


def make_model(folder: Path, name: str, endless: bool = True) -> None:
    """Save a model. If `endless`, its responses never end, so that both sides sample the same number of tokens.

    End and padding tokens are then replaced with special tokens that a trained model never samples. A random model may
    sample them.
    """
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m" if name in SHAPES else name))
    if name in SHAPES:
        model, tokenizer.chat_template = random_model(name, len(tokenizer)), None
    else:
        model = AutoModelForCausalLM.from_pretrained(resolve_model(name))
    if endless:
        unused = ("<extra_id_0>", "<extra_id_1>") if name.startswith("tiny") else ("<issue_closed>", "<empty_output>")
        tokenizer.eos_token, tokenizer.pad_token = unused
        for settings in (model.config, model.generation_config):
            settings.eos_token_id, settings.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with new_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return strings that are always one token: words after a space, or letters if the tokenizer is byte-level."""
    vocabulary = tokenizer.get_vocab()
    found = sorted(token for token in vocabulary if re.fullmatch("Ġ[a-z]{3,8}", token))
    return [token.replace("Ġ", " ") for token in found] or list("abcdefghijklmnopqrstuvwxyz")


def make_texts(folder: Path, work: Work, model: Path, seed: int) -> None:
    """Write the work's examples as text and as our side's token ids, with the intended number of tokens each."""
    tokenization = load_tokenization(str(model), "raw")
    vocabulary, random = words(tokenization.tokenizer), Random(seed)

    def text(count: int) -> str:
        return "".join(random.choices(vocabulary, k=count))

    rows, ids = [], []
    for _ in range(work.rows * (work.warmup + work.measured + 1)):
        prompt_tokens = random.randint(*work.prompt)
        prompt = text(prompt_tokens)
        prompt_ids = tokenization.prompt_ids(({"role": "user", "content": prompt},))
        lengths = [random.randint(*work.response) for _ in range(work.responses)]
        responses = [text(length - 1) for length in lengths]
        response_ids = [tokenization.response_ids(response) for response in responses]
        assert len(prompt_ids) == prompt_tokens
        assert [len(response) for response in response_ids] == lengths
        ids.append({"prompt": prompt_ids, "responses": response_ids})
        row: dict[str, Any] = {"prompt": prompt}
        if work.stage == "reward":
            row |= {"responses": responses, "ranks": list(range(1, work.responses + 1))}
        elif work.stage == "sft":
            row |= {"completion": responses[0]}
        rows.append(row)
    for name, listed in (("jsonl", rows), ("ids.jsonl", ids)):
        write_json_lines(folder / f"{work.name}.{name}", listed)


def make_reward_model(folder: Path, work: Work) -> None:
    """Write the reward model of a PPO work, unless it exists. Only its cost matters, not its scores.

    It has random weights, or the weights of the scale's model after one training step.
    """
    target = folder / work.reward_folder
    if target.exists():
        return
    tokenizer = AutoTokenizer.from_pretrained(folder / work.model_folder)
    if work.gpu_models:
        model = random_model(work.gpu_models[1], len(tokenizer), AutoModelForSequenceClassification)
        model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        with new_folder(target) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        return
    with tempfile.TemporaryDirectory(dir=folder) as run:
        first, second = words(tokenizer)[:2]
        data = Path(run) / "rankings.jsonl"
        write_json_lines(data, [{"prompt": first, "responses": [first, second], "ranks": [1, 2]}])
        more = {"train_data": str(data), "output_dir": f"{run}/run", "report_to": ["none"]}
        more |= {"lora_r": work.settings.get("lora_r", 0), "chat_template": "raw"}
        run_reward(RewardConfig(model=str(folder / work.model_folder), **more)).rename(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", choices=SCALES, default="cpu")
    parser.add_argument("--only", nargs="*", default=[], choices=ALL, metavar="WORK", help=", ".join(ALL))
    arguments = parser.parse_args()
    make(arguments.folder, arguments.scale, arguments.only)
