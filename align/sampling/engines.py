"""Sampling engine interface, and the engine that samples with the training model."""

import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from align.core.errors import UserError
from align.core.plugins import install_hint
from align.core.seeds import SeedKey
from align.models.backbone import Backbone
from align.models.loading import LoadedModel
from align.runtime.distributed import gather_rows, max_across_processes, shard_of_process
from align.runtime.sharding import LayerGathering, full_nbytes, gathered_parameters, is_sharded, without_engine_hooks
from align.sampling.generation import Responses, SamplingParams, row_uniforms, sample
from align.sampling.settings import EngineConfig
from align.training.engine import TrainEngine
from align.training.memory import GIB, Memory, cache_bytes

SHARE_OF_FREE_MEMORY = 0.5
"""Fraction of the memory remaining after weights and optimizer that sampling uses. While the cache grows or drops a row, one
layer is in memory twice, and torch keeps freed blocks of sizes that no longer fit."""


class SamplingEngine(Protocol):
    """Samples from the current policy.

    PPO trains on log-probs that the policy computes. The engine's log-probs are used for a metric and importance weights.
    """

    def sample(self, prompts: Sequence[list[int]], sampling: SamplingParams, seed: SeedKey) -> Responses:
        """Sample a response to each prompt. Collective: all processes must call it and get the same result.

        Args:
            prompts: token ids; none may be empty.
            seed: parts of the seed. The random numbers of a row depend only on the seed and the row index.

        Raises:
            UserError: if the engine cannot be used; on every process.
        """
        ...

    def weights_changed(self) -> None:
        """Notify the engine of updated weights. The next sample must use them."""
        ...

    def close(self) -> None:
        """Release resources outside this process."""
        ...


class TransformersEngine:
    """Samples with the training model, distributing the rows over processes."""

    def __init__(self, train_engine: TrainEngine, loaded: LoadedModel) -> None:
        self.train_engine, self.loaded = train_engine, loaded
        self.sampled_whole: bool | None = None

    def sample(self, prompts: Sequence[list[int]], sampling: SamplingParams, seed: SeedKey) -> Responses:
        loaded, accelerator = self.loaded, self.train_engine.accelerator
        uniforms = row_uniforms(len(prompts), sampling, *seed)
        assigned = shard_of_process(range(len(prompts)), accelerator)
        own_prompts = [prompts[row] for row in assigned]
        stops = sampling.stops(loaded.tokenization.end_ids)
        with self._gathered_weights(self._fits_whole(prompts, sampling)), loaded.backbone.adapter(loaded.adapter):
            sampled = sample(loaded.backbone, own_prompts, uniforms[assigned], sampling, stops)
        rows = sorted(gather_rows(list(zip(assigned, sampled.ids, sampled.ended, strict=True)), accelerator))
        return Responses([ids for _, ids, _ in rows], [ended for _, _, ended in rows])

    def weights_changed(self) -> None:
        pass

    @contextmanager
    def _gathered_weights(self, whole: bool) -> Iterator[None]:
        """Gather ZeRO-3 weights for a rollout, at once or layer by layer."""
        model, accelerator = self.loaded.backbone.model, self.train_engine.accelerator
        reading = gathered_parameters(model.parameters()) if whole else LayerGathering(model, accelerator).reading()
        with without_engine_hooks(self.train_engine.module, accelerator), reading:
            yield

    def _fits_whole(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> bool:
        """Return whether all weights and the cache fit into memory on every process. Changes are printed."""
        run, backbone = self.train_engine.run, self.loaded.backbone
        sharded = [weight for weight in backbone.model.parameters() if is_sharded(weight)]
        if not sharded:
            return True
        rows = math.ceil(len(prompts) / run.accelerator.num_processes)
        tokens = min(rows * (max(map(len, prompts), default=0) + sampling.max_new_tokens), sampling.batch_tokens)
        needed = sum(map(full_nbytes, sharded)) + cache_bytes(backbone, tokens, rows)
        left = -max_across_processes(-run.memory.left(), run.accelerator)
        whole = needed <= left
        if whole != self.sampled_whole:
            mode = "all weights gathered at once" if whole else "weights gathered layer by layer, which is slower"
            run.print(f"sampling with {mode}: all weights need {needed / GIB:.2f} GiB, {left / GIB:.2f} GiB free")
        self.sampled_whole = whole
        return whole

    def close(self) -> None:
        pass


def make_engine(config: EngineConfig, train_engine: TrainEngine, loaded: LoadedModel, longest: int) -> SamplingEngine:
    """Create the engine selected by `config.engine`.

    Args:
        longest: maximum tokens of a prompt and its response.

    Raises:
        UserError: if vLLM is not installed or cannot serve this model, or if its server cannot be used.
    """
    if config.engine == "transformers":
        return TransformersEngine(train_engine, loaded)
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"engine {config.engine}: vLLM is not installed in the training environment (it sends the weights to the server"
            f"); use engine transformers, or {install_hint('vllm')}"
        )
    if not loaded.backbone.causal:
        kind = "a prefix language model" if loaded.backbone.prompt_in_row else "an encoder-decoder"
        name = loaded.backbone.model.config.model_type
        raise UserError(f"engine {config.engine}: vLLM cannot sample from {kind} ({name}); use engine transformers")
    from align.sampling.vllm_engines import VLLMColocate, VLLMServer

    kind_of_engine = VLLMServer if config.engine == "vllm-server" else VLLMColocate
    return kind_of_engine(config, train_engine, loaded, longest)


def sampling_tokens(memory: Memory, backbone: Backbone, width: int) -> int:
    """Return the cache size in tokens: the default on a CPU, half of the free memory on a GPU.

    It is rounded down to a power of two, so that a resumed run with slightly different free memory forms the same batches
    and samples the same bits.

    Args:
        memory: memory of a run with an existing estimate.
        width: maximum tokens of a prompt and its response.
    """
    if memory.device.type == "cpu":
        return SamplingParams.batch_tokens
    room = SHARE_OF_FREE_MEMORY * (memory.free() - memory.resident_bytes)
    per_token = cache_bytes(backbone, 1, 0) + cache_bytes(backbone, 0, 1) / width
    fitting = max(width, int(room / per_token))  # always allow a single row
    return 1 << (fitting.bit_length() - 1)
