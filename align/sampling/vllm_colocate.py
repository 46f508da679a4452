"""Sampling by vLLM inside the training processes, on their GPUs, through TRL's `VLLMGeneration`.

Each process holds a full copy of the policy in vLLM, in addition to the one in training, and samples its share of the rows;
with tensor parallelism, a few processes hold one copy together and sample the same rows. In between, vLLM may sleep: then it
holds neither weights nor cache, and is sent the weights again before it samples.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from trl.generation.vllm_generation import VLLMGeneration

from align.core.errors import UserError, first_line
from align.core.seeds import SeedKey
from align.models.loading import LoadedModel
from align.runtime.distributed import map_across_processes
from align.runtime.gathering import gathered_weights
from align.sampling.generation import Responses, Sampling, row_seeds
from align.sampling.settings import EngineConfig
from align.sampling.vllm_answers import require_answer
from align.sampling.vllm_weights import require_servable, served_weights
from align.training.optimization import Optimization


class VLLMColocate:
    """vLLM on the training's own GPUs.

    Args:
        longest: tokens of the longest prompt and response together.

    Raises:
        UserError: if vLLM cannot be started here.
    """

    def __init__(self, config: EngineConfig, optimization: Optimization, loaded: LoadedModel, longest: int) -> None:
        self.optimization, self.loaded = optimization, loaded
        self.stale, self.sleeps, self.processes_per_copy = True, config.vllm_sleep, config.vllm_tensor_parallel
        processes = optimization.accelerator.num_processes
        if processes % self.processes_per_copy:
            raise UserError(
                f"vllm_tensor_parallel is {self.processes_per_copy}, but there are {processes} processes: start a multiple"
            )
        require_servable(loaded.backbone, loaded.adapter)
        advice = "is there a GPU with memory for a second copy of the model (vllm_memory_share)?"
        with _vllm_errors("cannot start", advice):
            self.vllm = VLLMGeneration(
                _ServedModel(loaded),  # type: ignore[arg-type]  # it reads only the model's name and named weights
                optimization.accelerator,
                loaded.tokenization.tokenizer,
                mode="colocate",
                gpu_memory_utilization=config.vllm_memory_share,
                max_model_length=longest,
                max_num_seqs=config.vllm_requests,
                enable_sleep_mode=self.sleeps,
                tensor_parallel_size=self.processes_per_copy,
            )

    def sample(self, prompts: Sequence[list[int]], sampling: Sampling, seed: SeedKey) -> Responses:
        accelerator, seeds = self.optimization.accelerator, row_seeds(len(prompts), *seed)
        if self.stale:
            advice = "does it know this architecture and number format (it cannot on a CPU, where it packs weights)?"
            with gathered_weights(self.optimization.module, accelerator), _vllm_errors("does not take the weights", advice):
                self.vllm.sync_weights()
            self.stale = False

        def generate_rows(rows: list[int]) -> list[tuple[list[int], list[float]]]:
            return self._generate([prompts[row] for row in rows], sampling, [seeds[row] for row in rows])

        with self._awake():
            results = map_across_processes(range(len(prompts)), generate_rows, accelerator, self.processes_per_copy)
        ends = self.loaded.tokenization.end_ids
        return Responses([ids for ids, _ in results], [ids[-1] in ends for ids, _ in results], [seen for _, seen in results])

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """vLLM awake with its cache. After a sleep of level 2 it has no weights; `sync_weights` has sent them already."""
        if self.sleeps:
            with _vllm_errors("does not wake up", "lower vllm_memory_share, or set vllm_sleep to false"):
                self.vllm.llm.wake_up(tags=["kv_cache"])
        yield
        if self.sleeps:
            self.vllm.llm.sleep(level=2)
            self.stale = True

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
                # Only these end ids: vLLM would add those of the checkpoint's generation_config.json.
                ignore_eos=True,
                stop_token_ids=sorted(self.loaded.tokenization.end_ids),
                detokenize=False,
            )
            for seed in seeds
        ]
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        with _vllm_errors("cannot sample", "lower rollout_size or raise vllm_memory_share if memory ran out"):
            outputs = self.vllm.llm.generate(requests, sampling_params=settings, use_tqdm=False)
        with _vllm_errors("gave a wrong answer", "is this version of vLLM one that this package knows?"):
            rows = [row.outputs[0] for row in outputs]
            found = [
                (list(row.token_ids), [seen[id].logprob for id, seen in zip(row.token_ids, row.logprobs, strict=True)])
                for row in rows
            ]
            vocabulary = int(self.loaded.backbone.model.config.vocab_size)
            for ids, log_probs in found:
                require_answer(ids, log_probs, sampling.max_new_tokens, vocabulary, self.loaded.tokenization.end_ids)
        return found

    def weights_changed(self) -> None:
        self.stale = True

    def close(self) -> None:
        pass


@contextmanager
def _vllm_errors(what: str, advice: str) -> Iterator[None]:
    """Turn any error inside vLLM, which raises all kinds, into a UserError."""
    try:
        yield
    except Exception as error:
        raise UserError(f"engine vllm-colocate: vLLM {what} ({first_line(error)}); {advice}") from error


class _ServedModel(nn.Module):
    """The part of a model that `VLLMGeneration` uses: its folder, and its weights as vLLM loads them."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self.name_or_path = loaded.base
        self._loaded = [loaded]  # in a list, so that it is not registered as a submodule

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, Tensor]]:  # type: ignore[override]
        loaded = self._loaded[0]
        return served_weights(loaded.backbone, loaded.adapter)
