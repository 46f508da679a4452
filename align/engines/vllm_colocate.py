"""Sampling by vLLM inside the training processes, on their GPUs, through TRL's `VLLMGeneration`.

Each process holds a whole copy of the policy in vLLM beside the one that is trained and samples its share of the rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from trl.generation.vllm_generation import VLLMGeneration

from align.config import EngineConfig
from align.distributed import map_shared, whole_weights
from align.engines.weights import require_servable, served_weights
from align.errors import UserError
from align.generation import Responses, Sampling, row_seeds
from align.models.loading import Loaded
from align.tokenization import first_line
from align.training import Optimisation


class VLLMColocate:
    """vLLM on the training's own GPUs.

    Args:
        longest: tokens of the longest prompt and response that will be asked for.

    Raises:
        UserError: if vLLM cannot be started here.
    """

    def __init__(self, config: EngineConfig, optimisation: Optimisation, loaded: Loaded, longest: int) -> None:
        self.optimisation, self.loaded = optimisation, loaded
        self.stale = True
        require_servable(loaded.backbone, loaded.adapter)
        advice = "is there a GPU with memory for a second copy of the model (vllm_memory_share)?"
        with _telling("cannot start", advice):
            self.vllm = VLLMGeneration(
                _Served(loaded),  # type: ignore[arg-type]  # it reads a name and named weights of its model
                optimisation.accelerator,
                loaded.tokenization.tokenizer,
                mode="colocate",
                gpu_memory_utilization=config.vllm_memory_share,
                max_model_length=longest,
            )

    def sample(self, prompts: Sequence[list[int]], sampling: Sampling, seed: tuple[int, ...]) -> Responses:
        accelerator, seeds = self.optimisation.accelerator, row_seeds(len(prompts), *seed)
        if self.stale:
            advice = "does it know this architecture and number format (it cannot on a CPU, where it packs weights)?"
            with whole_weights(self.optimisation.module, accelerator), _telling("does not take the weights", advice):
                self.vllm.sync_weights()
            self.stale = False

        def work(rows: list[int]) -> list[tuple[list[int], list[float]]]:
            return self._generate([prompts[row] for row in rows], sampling, [seeds[row] for row in rows])

        results = map_shared(range(len(prompts)), work, accelerator)
        ends = self.loaded.tokenization.end_ids
        return Responses([ids for ids, _ in results], [ids[-1] in ends for ids, _ in results], [seen for _, seen in results])

    def _generate(
        self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]
    ) -> list[tuple[list[int], list[float]]]:
        """Each response with vLLM's log-prob of each of its tokens."""
        from vllm import SamplingParams

        if not prompts:
            return []
        settings = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_new_tokens,
                logprobs=0,
                seed=seed,
                # Our ends alone: vLLM would add those of the checkpoint's generation_config.json.
                ignore_eos=True,
                stop_token_ids=sorted(self.loaded.tokenization.end_ids),
                detokenize=False,
            )
            for seed in seeds
        ]
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        with _telling("cannot sample", "lower rollout_size or raise vllm_memory_share if memory ran out"):
            found = self.vllm.llm.generate(asked, sampling_params=settings, use_tqdm=False)
        rows = [row.outputs[0] for row in found]
        return [
            (list(row.token_ids), [seen[id].logprob for id, seen in zip(row.token_ids, row.logprobs, strict=True)])
            for row in rows
        ]

    def weights_changed(self) -> None:
        self.stale = True

    def close(self) -> None:
        pass


@contextmanager
def _telling(what: str, advice: str) -> Iterator[None]:
    """Turn whatever goes wrong inside vLLM, which raises all kinds, into a line."""
    try:
        yield
    except Exception as error:
        raise UserError(f"engine vllm-colocate: vLLM {what} ({first_line(error)}); {advice}") from error


class _Served(nn.Module):
    """What `VLLMGeneration` needs to know of a model: where vLLM finds it, and its weights as vLLM loads them."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__()
        self.name_or_path = loaded.base
        self._loaded = [loaded]  # in a list: not a part of this module

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, Tensor]]:  # type: ignore[override]
        loaded = self._loaded[0]
        return served_weights(loaded.backbone, loaded.adapter)
