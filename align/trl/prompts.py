"""Prompts in TRL's data sets: token ids, and columns for rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from datasets import Dataset
from torch import nn
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from align.batches.encoding import Limits, encode_prompts
from align.models.backbone.kinds import has_separate_encoder
from align.models.loading import LoadedModel
from align.tokenization.encoded import EncodedPrompt
from align.trl.config import InvalidArgumentError

TURN_COLUMNS = ("prompt", "messages")
"""Columns with the text of prompts."""
TOKEN_COLUMNS = ("input_ids", "attention_mask", "labels")


def check_context(
    rows: Sequence[Mapping[str, Sequence[int]]], models: Mapping[str, nn.Module | None], response_length: int
) -> None:
    """Raise `InvalidArgumentError` if the longest prompt leaves no room for a response in a decoder's context."""
    longest = max(len(row["input_ids"]) for row in rows)
    for name, model in models.items():
        config: Any = getattr(model, "config", None)
        if config is None or has_separate_encoder(config):
            continue
        limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        if limit and longest + response_length > limit:
            raise InvalidArgumentError(
                f"the longest prompt has {longest} tokens, and response_length is {response_length}, but `{name}` "
                f"reads {limit}; shorten or remove it, or lower response_length"
            )


def data_sets(given: Dataset | Mapping[str, Dataset] | None) -> list[Dataset]:
    """Return the data sets of an argument: a data set, a mapping of names to data sets, or None."""
    if given is None:
        return []
    return list(given.values()) if isinstance(given, Mapping) else [given]


@dataclass(frozen=True)
class PromptReader:
    """Reads the token ids of prompts from data sets.

    Attributes:
        tokenizer: tokenizer of the policy.
        collator: user's collator, which may change rows, or None.
        with_turns: whether to keep the columns `prompt` and `messages`, for rewards that read text.
    """

    tokenizer: PreTrainedTokenizerBase
    collator: DataCollatorWithPadding | None
    with_turns: bool

    @property
    def pad_id(self) -> int | None:
        """Padding token to remove from rows without an attention mask. None if it equals EOS or there is none."""
        pad_id: int | None = self.tokenizer.pad_token_id
        return None if pad_id == self.tokenizer.eos_token_id else pad_id

    def rows(self, dataset: Dataset) -> list[dict[str, Any]]:
        """Return the token ids of each prompt, see `prompt_rows`."""
        return prompt_rows(dataset, self.collator, self.pad_id, self.with_turns)

    def encoded(
        self, dataset: Dataset | Mapping[str, Dataset] | None, policy: LoadedModel, response_length: int
    ) -> list[EncodedPrompt]:
        """Return the prompts of the sample tables. Empty if there is no data set."""
        rows = [row for part in data_sets(dataset) for row in self.rows(part)]
        if not rows:
            return []
        check_context(rows, {"model": policy.backbone.model}, response_length)
        limits = Limits(max(len(row["input_ids"]) for row in rows), response_length)
        return encode_prompts(rows, policy, limits, skip_bad_rows=False)

    def hints(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> list[str]:
        """Return a line if rows without an attention mask appear to be padded with the EOS token."""
        return padding_hint(rows, self.tokenizer.eos_token_id) if self.pad_id is None else []


def token_list(name: str, value: Any) -> list[int]:
    """Convert a value of a column to a list of integers.

    Raises:
        InvalidArgumentError: If the value is a mapping or nested.
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
    """Return a line if rows without an attention mask appear to be padded with EOS tokens, which are then read as text."""
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
    """Return the first of two ids if both are equal, or nothing."""
    return ids[:1] if len(ids) == 2 and ids[0] == ids[1] else []


def prompt_rows(
    dataset: Dataset, collator: DataCollatorWithPadding | None, pad_id: int | None, with_turns: bool
) -> list[dict[str, Any]]:
    """Return the token ids of each prompt, with its attention mask if it has one.

    Args:
        dataset: prompts.
        collator: user's collator, which may change rows, or None.
        pad_id: padding token to remove from rows without an attention mask, if any.
        with_turns: whether to keep the columns `prompt` and `messages`, for rewards that read text, and all columns except
            token ids in `columns`.

    Raises:
        InvalidArgumentError: If there are no rows or no token ids.
    """
    rows: list[dict[str, Any]] = []
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
            rows[-1]["columns"] = {name: value for name, value in row.items() if name not in TOKEN_COLUMNS}
    if not rows:
        raise InvalidArgumentError("the data set has no rows")
    return rows


def has_turns(value: object) -> bool:
    """Return whether the value of a column is nonblank text or a list of turns."""
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, list) and bool(value) and all(isinstance(turn, Mapping) and "role" in turn for turn in value)
