"""Data loader, and padded model inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader

from align.trl.config import InvalidArgumentError
from align.trl.legacy.config import PPOConfig

LOGGED_COLUMNS = ("query", "response")
"""Default columns of the W&B table logged by `log_stats`."""
KEPT_COLUMNS = ("input_ids", "attention_mask", "label", *LOGGED_COLUMNS)
"""Columns kept by `remove_unused_columns`."""


def loader_of(
    dataset: Any, config: PPOConfig, collator: Callable[[list[Any]], Any] | None, accelerator: Accelerator
) -> DataLoader[Any]:
    """Return a loader of shuffled batches of `batch_size` rows. Each process gets different batches.

    Raises:
        InvalidArgumentError: If the data set has no length, or too few rows for a batch on each process.
    """
    rows = len(dataset) if hasattr(dataset, "__len__") else None
    if rows is None:
        raise InvalidArgumentError("`dataset` has no length: give a Dataset, such as Dataset.from_list(list(dataset))")
    if rows < config.batch_size * accelerator.num_processes:
        raise InvalidArgumentError(
            f"`dataset` has {rows} rows, but batch_size is {config.batch_size} on {accelerator.num_processes} processes: "
            "lower batch_size"
        )
    if isinstance(dataset, Dataset) and config.remove_unused_columns:
        dataset = dataset.remove_columns([name for name in dataset.column_names if name not in KEPT_COLUMNS])
    loader = DataLoader(dataset, config.batch_size, collate_fn=collator, shuffle=True, drop_last=True)
    prepared: DataLoader[Any] = accelerator.prepare_data_loader(loader)
    return prepared


def model_inputs(
    queries: Sequence[Tensor], responses: Sequence[Tensor], collator: Callable[[list[Any]], Any], has_encoder: bool
) -> Any:
    """Return the model inputs for queries and responses, padded by the collator."""

    def padded(rows: Sequence[Tensor]) -> Any:
        return collator([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows])

    if has_encoder:
        inputs, outputs = padded(queries), padded(responses)
        inputs |= {f"decoder_{name}": outputs[name] for name in ("input_ids", "attention_mask")}
    else:
        inputs = padded([torch.cat([query, response]) for query, response in zip(queries, responses, strict=True)])
    inputs.pop("labels", None)
    return inputs
