"""The models and texts that both sides read, made once: `python -m benchmarks.data --scale cpu FOLDER`."""

import argparse
import hashlib
import re
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from align.core.files import new_folder, write_json_lines
from align.model_registry.registry import resolve_model
from align.reward import RewardConfig, run_reward
from align.tokenization import load_tokenization
from benchmarks.workloads import ALL, LORA_RANK, SCALES, Work, scaled


def make(folder: Path, scale: str) -> None:
    """Write everything that the runs at a scale read, unless it is there already, made by this very code."""
    here = Path(__file__).parent
    recipe = hashlib.sha256((here / "data.py").read_bytes() + (here / "workloads.py").read_bytes()).hexdigest()
    made = folder / "made"
    if made.exists() and made.read_text(encoding="utf-8") == recipe:
        return
    shutil.rmtree(folder, ignore_errors=True)
    make_model(folder / "model", SCALES[scale].model)
    make_model(folder / "race", "tiny-llama", endless=False)
    for seed, work in enumerate(ALL.values()):
        make_texts(folder, scaled(work, SCALES[scale]), folder / ("race" if work.stage == "race" else "model"), seed)
    make_reward_model(folder, {})
    make_reward_model(folder, {"lora_r": LORA_RANK})
    made.write_text(recipe, encoding="utf-8")


def llama_1b(vocabulary: int) -> LlamaConfig:
    """Llama 3.2 1B's shape (its config.json) with another number of tokens: that of the tokenizer at hand."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def make_model(folder: Path, name: str, endless: bool = True) -> None:
    """A model whose responses do not end by themselves, so that both sides sample the same number of tokens.

    Its end and padding tokens become special ones that a trained model has no use for; a random model may draw them.
    """
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m" if name == "llama-1b" else name))
    if name == "llama-1b":
        torch.manual_seed(0)
        model = LlamaForCausalLM(llama_1b(len(tokenizer))).to(torch.bfloat16)
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
    """Texts of one token each, wherever they stand: words behind a space, or letters where the tokenizer has bytes."""
    vocabulary = tokenizer.get_vocab()
    found = sorted(token for token in vocabulary if re.fullmatch("Ġ[a-z]{3,8}", token))
    return [token.replace("Ġ", " ") for token in found] or list("abcdefghijklmnopqrstuvwxyz")


def make_texts(folder: Path, work: Work, model: Path, seed: int) -> None:
    """The work's examples as text, and as the ids that our side makes of them, as many as each text was meant to have."""
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


def make_reward_model(folder: Path, settings: dict[str, Any]) -> None:
    """A reward model, barely trained: what it says is of no interest here, what it costs is. Both sides read it."""
    target = folder / ("reward_lora" if settings else "reward")
    with tempfile.TemporaryDirectory(dir=folder) as run:
        data = Path(run) / "rankings.jsonl"
        data.write_text((folder / "reward_k4.jsonl").read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")
        more = settings | {"train_data": str(data), "output_dir": f"{run}/run", "report_to": ["none"]}
        run_reward(RewardConfig(model=str(folder / "model"), chat_template="raw", **more)).rename(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", choices=SCALES, default="cpu")
    arguments = parser.parse_args()
    make(arguments.folder, arguments.scale)
