"""Checks of the trainer's arguments, and the prompts and the reference that they stand for."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from datasets import Dataset, DatasetDict, IterableDataset
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import DataCollatorWithPadding, EarlyStoppingCallback

from align.batches.encoding import Limits, encode_prompts
from align.models.loading import LoadedModel
from align.ppo.inputs import sharing_pair
from align.tokenization.encoded import EncodedPrompt
from align.trl.config import InvalidArgumentError, PPOConfig
from align.trl.value_head import PreTrainedModelWrapper

TURN_COLUMNS = ("prompt", "messages")
"""Columns of the prompts' texts, beside those of their token ids."""


def problems(
    args: PPOConfig, models: Mapping[str, Any], train_dataset: Any, peft_config: Any, callbacks: Sequence[Any]
) -> Iterator[str]:
    """Find arguments that exclude each other, or that cannot be used; after a first problem no others can be found.

    Args:
        models: by the names of the trainer's arguments; `model` is the policy.
    """
    if not isinstance(args, PPOConfig):
        yield f"`args` must be an `align.trl.PPOConfig`, not {type(args).__name__}"
    for name in ("model", "value_model"):
        if not isinstance(models[name], nn.Module):
            yield f"`{name}` must be a loaded model, not {models[name]!r}"
    if train_dataset is None:
        yield "`train_dataset` is required"
    if isinstance(train_dataset, DatasetDict):
        names, first = ", ".join(train_dataset), next(iter(train_dataset))
        yield f"`train_dataset` is a `DatasetDict` of {names}: give one of them, such as train_dataset[{first!r}]"
    if isinstance(train_dataset, IterableDataset):
        advice = "give a `Dataset`, such as Dataset.from_list(list(train_dataset))"
        yield f"`train_dataset` is an `IterableDataset`, which has no length: {advice}"
    for name in ("model", "ref_model"):
        if isinstance(models[name], PreTrainedModelWrapper):
            advice = "give its `pretrained_model`; a second one, whose weights it does not share, can be the `value_model`"
            yield f"`{name}` is an {type(models[name]).__name__}: {advice}"
    model, ref_model = models["model"], models["ref_model"]
    if not all(weight.is_floating_point() for weight in model.parameters()):
        yield "`model` is quantized, which is not supported: load it without `quantization_config`"
    if ref_model is model:
        yield "`model` and `ref_model` cannot be the same object: give a copy, or None for a copy of the initial policy"
    if pair := sharing_pair(list(models.items()), trained=("model", "value_model")):
        yield f"`{pair[0]}` and `{pair[1]}` share weights, which training changes: give a copy of one, copy.deepcopy(model)"
    if peft_config is not None and not isinstance(peft_config, PeftConfig):
        yield f"`peft_config` must be a `peft.PeftConfig`, not {type(peft_config).__name__}"
    if peft_config is not None and isinstance(model, PeftModel):
        advice = "leave `peft_config` out to train the adapter that is there, or merge it first by merge_and_unload()"
        yield f"You passed a `PeftModel` together with a `peft_config`: {advice}"
    if args.ref_adapter_name and ref_model is not None:
        yield "`ref_adapter_name` and `ref_model` both name a reference: leave one out"
    for name in ("model_adapter_name", "ref_adapter_name"):
        adapter = getattr(args, name)
        if adapter and not isinstance(model, PeftModel):
            yield f"`{name}` is {adapter!r}, but `model` is no `PeftModel`: load it as one, or leave the name out"
        elif adapter and adapter not in model.peft_config:
            yield f"`{name}` is {adapter!r}, but `model` has the adapters {', '.join(model.peft_config)}"
    if any(isinstance(each, EarlyStoppingCallback) or each is EarlyStoppingCallback for each in callbacks):
        yield (
            "`callbacks`: EarlyStoppingCallback reads evaluations, which this trainer does not make; write one that sets "
            "`control.should_training_stop`, or use selection.early_stopping_patience of `align ppo`"
        )


def data_sets(given: Dataset | Mapping[str, Dataset] | None) -> list[Dataset]:
    """Return the data sets of an argument that is one, several by name, or None."""
    if given is None:
        return []
    return list(given.values()) if isinstance(given, Mapping) else [given]


def eval_prompts(
    dataset: Dataset | Mapping[str, Dataset] | None,
    collator: DataCollatorWithPadding | None,
    pad_id: int | None,
    policy: LoadedModel,
    response_length: int,
    with_turns: bool,
) -> list[EncodedPrompt]:
    """Return the prompts of the sample tables; empty without data."""
    rows = [row for part in data_sets(dataset) for row in prompt_rows(part, collator, pad_id, with_turns)]
    if not rows:
        return []
    limits = Limits(max(len(row["input_ids"]) for row in rows), response_length)
    return encode_prompts(rows, policy, limits, skip_bad_rows=False)


def token_list(name: str, value: Any) -> list[int]:
    """Return a column's value of one row as a list of integers.

    Raises:
        InvalidArgumentError: for another kind of value.
    """
    if isinstance(value, Mapping):
        raise InvalidArgumentError(
            f"`{name}` of a row is a dict with {', '.join(value)}: call apply_chat_template with return_dict=False"
        )
    found = torch.as_tensor(value)
    if found.dim() != 1:
        raise InvalidArgumentError(f"`{name}` of a row is nested: tokenize each row without return_tensors")
    return cast(list[int], found.tolist())


def padding_hint(rows: Sequence[Mapping[str, Sequence[int]]], eos_token_id: int | None) -> list[str]:
    """Return a line if rows without an attention mask seem to be padded with the EOS token, which is then read as text."""
    padded = sum(
        "attention_mask" not in row and eos_token_id in (*_run(row["input_ids"][:2]), *_run(row["input_ids"][-2:]))
        for row in rows
    )
    if not padded:
        return []
    return [
        f"{padded} of {len(rows)} prompts begin or end with several EOS tokens and have no attention mask, so that these "
        "are read as text: keep the tokenizer's column attention_mask"
    ]


def _run(ids: Sequence[int]) -> Sequence[int]:
    """The token that two ids have in common."""
    return ids[:1] if len(ids) == 2 and ids[0] == ids[1] else []


def prompt_rows(
    dataset: Dataset, collator: DataCollatorWithPadding | None, pad_id: int | None, with_turns: bool
) -> list[dict[str, Any]]:
    """Return the token ids of each prompt, with its attention mask if it has one.

    Args:
        collator: a user's, which may change rows.
        pad_id: is left out of rows without an attention mask; None: no token is padding.
        with_turns: keep the columns `prompt` and `messages`, for rewards that read texts.

    Raises:
        InvalidArgumentError: if there are no rows, or no token ids.
    """
    rows = []
    for row in dataset:
        if collator is not None:
            row = {name: value[0] for name, value in collator([row]).items()}
        if "input_ids" not in row:
            raise InvalidArgumentError("the data set has no column `input_ids`: map the tokenizer over its prompts first")
        names = [name for name in ("input_ids", "attention_mask") if row.get(name) is not None]
        rows.append({name: token_list(name, row[name]) for name in names})
        if "attention_mask" not in rows[-1]:
            rows[-1]["input_ids"] = [token for token in rows[-1]["input_ids"] if token != pad_id]
        if with_turns:
            rows[-1] |= {name: row[name] for name in TURN_COLUMNS if has_turns(row.get(name))}
    if not rows:
        raise InvalidArgumentError("the data set has no rows")
    return rows


def has_turns(value: object) -> bool:
    """Return whether the value of a column is a text or a list of turns."""
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, list) and bool(value) and all(isinstance(turn, Mapping) and "role" in turn for turn in value)
