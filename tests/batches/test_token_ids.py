import datasets
import numpy as np
import pytest
import torch

from align import cli
from align.batches.encoding import Limits, encode_prompts
from align.batches.mixtures import Prefixed
from align.core.errors import UserError
from align.data import Prompt, Ranking, check_data, read_records
from align.data.formats import convert_row
from align.ppo import PPOConfig, PPOTrainer
from tests.files import read_rows, write_rows
from tests.refusals import refusal

TEXTS = ["Name a moon.", "Hi", "Why is the sky blue?"]
LIMITS = Limits(40, 8)


def tokenized(loaded, **more):
    tokenizer = loaded.tokenization.tokenizer
    return datasets.Dataset.from_list(
        [{"input_ids": tokenizer(text).input_ids, "lengths": len(text), **more} for text in TEXTS]
    )


@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_datasets_are_read_in_every_format(load_sharp, tiny_name, form):
    loaded = load_sharp(tiny_name)
    tokenizer, data = loaded.tokenization.tokenizer, tokenized(loaded).with_format(form)
    found = encode_prompts(data, loaded, LIMITS, False)
    assert [prompt.ids for prompt in found] == [tokenizer(text).input_ids for text in TEXTS]
    assert all(type(token) is int for prompt in found for token in prompt.ids)
    decoded = [tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) for text in TEXTS]
    assert [prompt.conversation for prompt in found] == [({"role": "user", "content": text},) for text in decoded]
    for rows in ([{"prompt": text} for text in TEXTS], [{"prompt": [{"role": "user", "content": "Hi"}], "n": 1}]):
        expected = encode_prompts(rows, loaded, LIMITS, False)
        assert encode_prompts(datasets.Dataset.from_list(rows).with_format(form), loaded, LIMITS, False) == expected


def test_token_ids_from_a_file_and_from_a_saved_dataset(load_sharp, tmp_path):
    loaded = load_sharp("tiny-gpt2")
    data = tokenized(loaded)
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "rows.parquet")
    data.to_json(tmp_path / "rows.jsonl")
    expected = encode_prompts(data, loaded, LIMITS, False)
    for name in ("saved", "rows.parquet", "rows.jsonl"):
        assert encode_prompts(str(tmp_path / name), loaded, LIMITS, False) == expected
    text = check_data(str(tmp_path / "rows.jsonl"))
    assert "kind:                  prompt\n" in text
    assert "tokens in the prompt:  min " in text
    assert "repeated prompts:      0 of 3 (0.0 %)\n" in text
    assert "unused columns:        lengths\n" in text


def test_padding_that_an_attention_mask_leaves_out_is_not_read():
    row = {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1]}
    (prompt,) = convert_row(row, Prompt)[1]
    assert prompt == Prompt(ids=(5, 6))
    assert prompt.to_row() == {"input_ids": [5, 6]}
    assert convert_row(prompt.to_row(), Prompt)[1] == [prompt]


@pytest.mark.parametrize(
    "text",
    [{"prompt": "Hi"}, {"prompt": [{"role": "user", "content": "Hi"}]}, {"instruction": "Hi", "output": "Ho"}],
    ids=["text", "turns", "another layout"],
)
def test_a_text_beside_token_ids_is_for_reward_functions(text, load_sharp):
    loaded, row = load_sharp("tiny-gpt2"), {"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1], "category": "c", **text}
    (record,) = convert_row(row, Prompt)[1]
    assert (record.ids, record.prompt) == ((5, 6), ({"role": "user", "content": "Hi"},))
    assert convert_row(record.to_row(), Prompt)[1] == [record]
    (encoded,) = encode_prompts([row], loaded, LIMITS, False)
    assert (encoded.ids, encoded.conversation, encoded.given_as_ids) == ([5, 6], record.prompt, True)


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_prompts_in_memory_may_be_lists_and_matrices_of_token_ids(kind, load_sharp, tmp_path):
    loaded = load_sharp("tiny-gpt2")
    found = encode_prompts([[5, 6], (7,), kind([8, 9])], loaded, LIMITS, False)
    assert [prompt.ids for prompt in found] == [[5, 6], [7], [8, 9]]
    assert all(prompt.given_as_ids for prompt in found)
    rows = kind([[5, 6], [7, 8]])
    config = PPOConfig(output_dir=str(tmp_path / "run"), report_to=["none"], rollout_batch_size=2, dtype="float32")
    made = PPOTrainer(loaded, [lambda prompts, responses: [0.0] * len(responses)], rows, config, rows[:1])
    assert (made.config.prompts, made.config.validation_prompts) == ("2 records in memory", "1 record in memory")
    assert [prompt.ids for prompt in made.setup.prompts] == [[5, 6], [7, 8]]
    assert [prompt.ids for prompt in made.setup.validation] == [[5, 6]]


BAD = [
    ({"input_ids": []}, "field 'input_ids': is empty"),
    ({"input_ids": "5 6"}, "field 'input_ids': must be a list, not '5 6'"),
    ({"input_ids": [[5, 6]]}, r"field 'input_ids\[0\]': is \[5, 6\]; use a whole number of 0 or more"),
    ({"input_ids": [5, -100]}, r"field 'input_ids\[1\]': is -100; use a whole number of 0 or more"),
    (
        {"input_ids": [5], "attention_mask": [1, 1]},
        "field 'attention_mask': must contain a 0 or 1 for each of the 1 input_ids",
    ),
    ({"input_ids": [5], "labels": [5]}, "field 'labels': marks training targets"),
    ({"input_ids": [5], "system": "s"}, "field 'system': cannot be combined with token ids"),
]


@pytest.mark.parametrize(("row", "message"), BAD, ids=range(len(BAD)))
def test_bad_token_ids_are_refused(row, message):
    with pytest.raises(UserError, match=f"^{message}"):
        convert_row(row, Prompt)


def test_ids_outside_the_vocabulary_are_refused_with_the_record(load_sharp, tmp_path):
    loaded = load_sharp("tiny-gpt2")
    size = len(loaded.tokenization.tokenizer)
    path = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [size - 1]}, {"input_ids": [1, size]}])
    assert refusal(encode_prompts, path, loaded, LIMITS, False) == (
        f"{path}: record 2: field 'input_ids': contains id {size}, but the model's tokenizer has {size} tokens; "
        "tokenize the prompts with the model's tokenizer"
    )


def test_token_ids_are_refused_where_text_is_needed(load_sharp, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6]}])
    with pytest.raises(UserError, match="contains prompts as token ids"):
        read_records(path, Prompt)
    with pytest.raises(UserError, match="do not match a known layout of a ranking"):
        read_records(path, Ranking)
    with pytest.raises(UserError, match="task_prefixes cannot be used with prompts given as token ids"):
        encode_prompts(Prefixed(path, "Answer: "), load_sharp("tiny-gpt2"), LIMITS, False)


def test_names_of_splits_and_columns_are_not_prompts(load_sharp):
    loaded = load_sharp("tiny-gpt2")
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"prompt": "Hi"}])})
    with pytest.raises(UserError, match="is a DatasetDict, not a sequence of rows"):
        encode_prompts(splits, loaded, LIMITS, False)
    with pytest.raises(UserError, match="is a DataFrame, not a sequence of rows"):
        encode_prompts(splits["train"].to_pandas(), loaded, LIMITS, False)


def test_ppo_on_token_ids_shows_their_text_to_functions_and_in_samples(load_sharp, tmp_path):
    loaded, seen = load_sharp("tiny-gpt2"), set()

    def reward(prompts, responses):
        seen.update(prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts)
        return [float(len(response)) for response in responses]

    sizes = {"total_updates": 1, "rollout_batch_size": 6, "num_ppo_epochs": 1, "max_new_tokens": 4}
    config = PPOConfig(output_dir=str(tmp_path / "run"), report_to=["none"], **sizes)
    data = tokenized(loaded).with_format("torch")
    PPOTrainer(loaded, [reward], data, config, data).train()
    assert seen == set(TEXTS)
    samples = read_rows(tmp_path / "run" / "samples.jsonl")
    assert {row["prompt"][0]["content"] for row in samples} == set(TEXTS)


def test_sampling_to_token_ids_writes_their_text(load_sharp, sharp_folders, tmp_path):
    data, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    tokenized(load_sharp("tiny-gpt2")).to_json(data)
    words = f"sample --model {sharp_folders['tiny-gpt2']} --prompts {data} --output {output} --max_new_tokens 3"
    cli.main(words.split())
    assert [row["prompt"] for row in read_rows(output)] == TEXTS
