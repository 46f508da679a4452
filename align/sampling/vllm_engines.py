"""Sampling with vLLM through TRL: on a server with separate GPUs, or inside the training processes.

The policy's weights are sent before each rollout, under the names of a plain checkpoint. Each row has a separate seed.
"""

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from torch import Tensor, nn
from trl.generation.vllm_client import VLLMClient
from urllib3.util.retry import Retry

from align.core.errors import UserError, first_line
from align.core.seeds import SeedKey, row_seeds
from align.models.loading import LoadedModel
from align.runtime.distributed import map_across_processes, run_on_main
from align.runtime.endpoint import transient_retries
from align.runtime.sharding import gathered_weights
from align.sampling.generation import Responses, SamplingParams
from align.sampling.settings import EngineConfig
from align.sampling.vllm_weights import require_servable, served_weights, weight_layout
from align.training.engine import TrainEngine

ROWS_AT_ONCE = 256
"""Maximum concurrent requests to a server; the default of vLLM's `max_num_seqs`."""
HEALTH_SECONDS = 5.0
REPEATABLE = ("/v1/completions", "/v1/models", "/server_info", "/get_world_size", "/tokenize")
"""Paths of a server whose requests can be repeated with the same result: each row has its seed. A transfer of weights is
repeated only as a whole, by a resumed run."""
PAUSE = 1.0
"""Seconds before the first retry, doubled each time."""
TOKENIZER_PROBE = "Zwölf Boxkämpfer, 1,234.5 (x != y)\n\tnaïve: 人工"
"""Text that distinguishes tokenizers: letters, digits, spaces and bytes of several kinds."""

Row = tuple[list[int], list[float]]
"""Token ids of a response, and vLLM's log-prob of each."""


class VLLMServer:
    """Samples from a server started with the policy's base or a checkpoint of the same architecture.

    Only the main process talks to the server, and shares the results with the others.

    Args:
        longest: maximum tokens of a prompt and its response.

    Raises:
        UserError: if the server cannot be reached, serves another model, or takes no weights; on every process.
    """

    client: "Client"
    """Set on the main process only."""

    def __init__(self, config: EngineConfig, train_engine: TrainEngine, loaded: LoadedModel, longest: int) -> None:
        vllm = config.vllm
        self.url, self.timeout = vllm.url.rstrip("/"), vllm.timeout
        self.train_engine, self.loaded, self.longest, self.stale = train_engine, loaded, longest, True
        self.accelerator = train_engine.accelerator
        require_servable(loaded.backbone, loaded.adapter)
        run_on_main(self._connect, self.accelerator)

    def sample(self, prompts: Sequence[list[int]], sampling: SamplingParams, seed: SeedKey) -> Responses:
        seeds = row_seeds(len(prompts), *seed)
        if self.stale:
            with gathered_weights(self.train_engine.module, self.accelerator):
                run_on_main(self._send_weights, self.accelerator)
            self.stale = False
        rows = run_on_main(lambda: self._sample_rows(prompts, sampling, seeds), self.accelerator)
        return _responses(rows, sampling.stops(self.loaded.tokenization.end_ids))

    def weights_changed(self) -> None:
        self.stale = True

    def close(self) -> None:
        if self.accelerator.is_main_process:
            self.client.close_communicator()  # type: ignore[no-untyped-call]

    def _connect(self) -> None:
        self.train_engine.run.print(f"waiting for the vLLM server at {self.url}")
        with self._server_errors("the server"):
            self.client = Client(self.url, self.timeout)
        self._require_same_model()
        what = "joining the server's weight transfer"
        with self._server_errors(what), self._exit_after_timeout(what):
            # No index: accelerate has set the current device.
            self.client.init_communicator("cuda")

    def _require_same_model(self) -> None:
        """Reject a server with another vocabulary or too short a context."""
        tokenizer = self.loaded.tokenization.tokenizer
        with self._server_errors("asking for its model"):
            info = self.client.get_server_info()
            served, self.instance = info["model_config"], info.get("instance_id")
            answer = self.client.session.post(
                f"{self.url}/tokenize", json={"prompt": TOKENIZER_PROBE, "add_special_tokens": False}
            ).json()
        name = served["model"]
        advice = f"start it with the training model, {self.loaded.base}"
        expected = tokenizer(TOKENIZER_PROBE, add_special_tokens=False).input_ids
        if answer.get("tokens") != expected:
            raise UserError(f"vLLM server {self.url}: it serves {name}, which has a different vocabulary; {advice}")
        if served["max_model_len"] < self.longest:
            raise UserError(
                f"vLLM server {self.url}: its context length is {served['max_model_len']} tokens, but "
                f"prompts and responses need {self.longest}; start it with --max-model-len {self.longest}"
            )

    def _send_weights(self) -> None:
        backbone, adapter = self.loaded.backbone, self.loaded.adapter
        what = "sending it the weights"
        with self._server_errors(what), self._exit_after_timeout(what):
            # vLLM draws a new id on each start. A restarted server has not joined the transfer, so the broadcast would hang.
            if self.client.get_server_info().get("instance_id") != self.instance:
                raise ValueError("it was restarted since the last rollout")
            self.client.update_named_params(weight_layout(backbone, adapter), served_weights(backbone, adapter))
            self.client.reset_prefix_cache()  # type: ignore[no-untyped-call]

    def _sample_rows(self, prompts: Sequence[list[int]], sampling: SamplingParams, seeds: list[int]) -> list[Row]:
        pool = ThreadPoolExecutor(ROWS_AT_ONCE)
        try:
            return list(pool.map(self._sample_row, prompts, repeat(sampling), seeds))
        finally:
            pool.shutdown(cancel_futures=True)

    def _sample_row(self, prompt: list[int], sampling: SamplingParams, seed: int) -> Row:
        # Stop at these ids only; the server would add the ids in its checkpoint's generation_config.json.
        stops = sampling.stops(self.loaded.tokenization.end_ids)
        parameters = {"seed": seed, "ignore_eos": True, "stop_token_ids": sorted(stops)}
        with self._server_errors("sampling"):
            answer: Any = self.client.generate(
                [prompt],
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_new_tokens,
                generation_kwargs=parameters,
            )
            if answer["prompt_ids"][0] != prompt:
                raise ValueError("it responded to a different prompt")
            row = answer["completion_ids"][0], [float(chosen[0]) for chosen in answer["logprobs"][0]]
            require_answer(row, sampling.max_new_tokens, self.loaded, stops)
        return row

    @contextmanager
    def _server_errors(self, what: str) -> Iterator[None]:
        """Convert server errors to UserErrors. TRL's client raises many types, even plain Exception."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"vLLM server {self.url}: {what} failed ({first_line(error)}); see the server log, start it as "
                "described in docs/clusters.md, then resume with --resume_from_checkpoint auto"
            ) from error

    @contextmanager
    def _exit_after_timeout(self, what: str) -> Iterator[None]:
        """Exit the process after a timeout, because a NCCL broadcast to a dead process cannot be interrupted."""

        def end() -> None:
            print(
                f"error: vLLM server {self.url}: {what} took more than {self.timeout:g} s; see the server log",
                file=sys.stderr,
            )
            os._exit(2)

        timer = threading.Timer(self.timeout + 2 * HEALTH_SECONDS, end)  # requests time out earlier
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class Client(VLLMClient):
    """TRL's client with a timeout for every request, and one connection per parallel request."""

    def __init__(self, url: str, timeout: float) -> None:
        self.timeout = timeout
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        super().__init__(base_url=url, group_port=port, connection_timeout=timeout)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 1.0) -> None:
        """Wait until the server is healthy. TRL calls this before any request.

        Raises:
            UserError: if it is not up within `total_timeout` seconds.
        """
        self.session.headers["Connection"] = "close"  # the server drops idle connections during an update
        once = Retry(connect=2, read=0, redirect=0, status=0, other=0, backoff_factor=0.5)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, _TimeoutAdapter(self.timeout, once))
        for path in REPEATABLE:  # proxies return 502, 503 or 504 while the server is busy
            repeated = transient_retries(pause=PAUSE, read=0)
            self.session.mount(self.base_url + path, _TimeoutAdapter(self.timeout, repeated))
        started = time.monotonic()
        while True:
            try:
                answer = requests.get(f"{self.base_url}/health", timeout=min(HEALTH_SECONDS, self.timeout))
                if answer.status_code == 200:
                    return
                status = f"it answers {answer.status_code}"
            except requests.RequestException as error:
                status = type(error).__name__
            if time.monotonic() - started >= total_timeout:
                raise UserError(
                    f"vLLM server {self.base_url}: not available after {total_timeout:g} s ({status}); start it as "
                    "described in docs/clusters.md or correct vllm.url"
                )
            time.sleep(retry_interval)


class _TimeoutAdapter(HTTPAdapter):
    """Adds a timeout to requests. A request without a response is not repeated."""

    def __init__(self, limit: float, retries: Retry) -> None:
        self.limit = limit
        super().__init__(pool_maxsize=ROWS_AT_ONCE, max_retries=retries)

    def send(self, request: requests.PreparedRequest, *args: Any, **settings: Any) -> requests.Response:
        settings["timeout"] = settings.get("timeout") or self.limit
        return super().send(request, *args, **settings)


class VLLMColocate:
    """vLLM inside the training processes, on their GPUs.

    Each process holds a full copy of the policy in vLLM, in addition to the trained one, and samples its part of the rows.

    Args:
        longest: maximum tokens of a prompt and its response.

    Raises:
        UserError: if vLLM cannot be started here.
    """

    def __init__(self, config: EngineConfig, train_engine: TrainEngine, loaded: LoadedModel, longest: int) -> None:
        self.train_engine, self.loaded, self.stale = train_engine, loaded, True
        require_servable(loaded.backbone, loaded.adapter)
        advice = "is there a GPU with memory for a second copy of the model (vllm.memory_share)?"
        with _vllm_errors("cannot start", advice):
            from trl.generation.vllm_generation import VLLMGeneration  # imports vLLM, which clients of a server do not need

            self.vllm = VLLMGeneration(
                _ServedModel(loaded),  # type: ignore[arg-type]  # it reads only the model's name and named weights
                train_engine.accelerator,
                loaded.tokenization.tokenizer,
                mode="colocate",
                gpu_memory_utilization=config.vllm.memory_share,
                max_model_length=longest,
                max_num_seqs=ROWS_AT_ONCE,
            )

    def sample(self, prompts: Sequence[list[int]], sampling: SamplingParams, seed: SeedKey) -> Responses:
        accelerator, seeds = self.train_engine.accelerator, row_seeds(len(prompts), *seed)
        if self.stale:
            advice = "does it know this architecture and number format (it cannot on a CPU, where it packs weights)?"
            with gathered_weights(self.train_engine.module, accelerator), _vllm_errors("does not take the weights", advice):
                self.vllm.sync_weights()
            self.stale = False

        def generate_rows(rows: list[int]) -> list[Row]:
            return self._generate([prompts[row] for row in rows], sampling, [seeds[row] for row in rows])

        rows = map_across_processes(range(len(prompts)), generate_rows, accelerator)
        return _responses(rows, sampling.stops(self.loaded.tokenization.end_ids))

    def _generate(self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int]) -> list[Row]:
        import vllm

        if not prompts:
            return []
        stops = sampling.stops(self.loaded.tokenization.end_ids)
        settings = [
            vllm.SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_new_tokens,
                logprobs=0,
                seed=seed,
                # Stop at these ids only; vLLM would add the ids in the checkpoint's generation_config.json.
                ignore_eos=True,
                stop_token_ids=sorted(stops),
                detokenize=False,
            )
            for seed in seeds
        ]
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        with _vllm_errors("cannot sample", "lower rollout_batch_size or raise vllm.memory_share if memory ran out"):
            outputs = self.vllm.llm.generate(requests, sampling_params=settings, use_tqdm=False)
        with _vllm_errors("gave a wrong answer", "is this version of vLLM one that this package knows?"):
            rows = []
            for output in (row.outputs[0] for row in outputs):
                pairs = zip(output.token_ids, output.logprobs, strict=True)
                rows.append((list(output.token_ids), [seen[id].logprob for id, seen in pairs]))
                require_answer(rows[-1], sampling.max_new_tokens, self.loaded, stops)
        return rows

    def weights_changed(self) -> None:
        self.stale = True

    def close(self) -> None:
        pass


@contextmanager
def _vllm_errors(what: str, advice: str) -> Iterator[None]:
    """Convert errors inside vLLM, which raises many types, to UserErrors."""
    try:
        yield
    except Exception as error:
        raise UserError(f"engine vllm-colocate: vLLM {what} ({first_line(error)}); {advice}") from error


class _ServedModel(nn.Module):
    """The part of a model that `VLLMGeneration` uses: its folder, and its weights in vLLM's format."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self.name_or_path = loaded.base
        self._loaded = [loaded]  # in a list, so that it is not registered as a submodule

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, Tensor]]:  # type: ignore[override]
        loaded = self._loaded[0]
        return served_weights(loaded.backbone, loaded.adapter)


def _responses(rows: list[Row], stops: frozenset[int]) -> Responses:
    return Responses([ids for ids, _ in rows], [ids[-1] in stops for ids, _ in rows], [seen for _, seen in rows])


def require_answer(row: Row, max_new_tokens: int, loaded: LoadedModel, stops: frozenset[int]) -> None:
    """Reject an impossible response. `stops` are the stop token ids.

    Raises:
        ValueError: if it is empty, too long, truncated, continues after its end, or has an impossible token or log-prob.
    """
    ids, log_probs = row
    vocabulary = int(loaded.backbone.model.config.vocab_size)
    if not ids or len(ids) != len(log_probs):
        raise ValueError(f"it returned {len(ids)} tokens with {len(log_probs)} log-probs")
    if len(ids) > max_new_tokens:
        raise ValueError(f"it returned {len(ids)} tokens, but the limit is {max_new_tokens}")
    for id in ids:
        if not 0 <= id < vocabulary:
            raise ValueError(f"it returned token {id}, but the vocabulary is 0 to {vocabulary - 1}")
    for log_prob in log_probs:
        if not math.isfinite(log_prob):
            raise ValueError(f"it returned a log-prob of {log_prob}")
    if any(id in stops for id in ids[:-1]):
        raise ValueError("it returned tokens after a stop token")
    if ids[-1] not in stops and len(ids) < max_new_tokens:
        raise ValueError(f"it returned {len(ids)} tokens without a stop token, fewer than the limit of {max_new_tokens}")
