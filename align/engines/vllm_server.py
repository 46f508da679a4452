"""Sampling by a vLLM server on GPUs of its own, through TRL's client.

Only the first process talks to the server: it sends the policy's weights after each update (over NCCL, from GPU to GPU) and
asks for each row by itself, for a request's seed is that of its row. The others get the results from it.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from trl.generation.vllm_client import VLLMClient
from urllib3.util.retry import Retry

from align.config import EngineConfig
from align.distributed import on_main, whole_weights
from align.engines.weights import require_servable, served_weights, weight_layout
from align.errors import UserError
from align.generation import Responses, Sampling, row_seeds
from align.models.loading import Loaded
from align.tokenization import first_line
from align.training import Optimisation

CONCURRENT_REQUESTS = 64
HEALTH_SECONDS = 5.0
PROBE = "Zwölf Boxkämpfer, 1,234.5 (x != y)\n\tnaïve: 人工"
"""Any two tokenizers cut this differently: letters, digits, spaces and bytes of several kinds."""


class VLLMServer:
    """A server that was started with the policy's base or with any other checkpoint of its architecture.

    Args:
        longest: tokens of the longest prompt and response that will be asked for.

    Raises:
        UserError: if the server cannot be reached, serves something else, or takes no weights; on every process.
    """

    client: "Client"
    """On the first process alone."""

    def __init__(self, config: EngineConfig, optimisation: Optimisation, loaded: Loaded, longest: int) -> None:
        self.url, self.timeout = config.vllm_url.rstrip("/"), config.vllm_timeout
        self.optimisation, self.loaded = optimisation, loaded
        self.accelerator = optimisation.accelerator
        self.stale = True
        require_servable(loaded.backbone, loaded.adapter)
        on_main(lambda: self._connect(longest), self.accelerator)

    def sample(self, prompts: Sequence[list[int]], sampling: Sampling, seed: tuple[int, ...]) -> Responses:
        if self.stale:
            with whole_weights(self.optimisation.module, self.accelerator):
                on_main(self._send_weights, self.accelerator)
            self.stale = False
        seeds = row_seeds(len(prompts), *seed)
        return on_main(lambda: self._ask_all(prompts, sampling, seeds), self.accelerator)

    def weights_changed(self) -> None:
        self.stale = True

    def close(self) -> None:
        if self.accelerator.is_main_process:
            self.client.close_communicator()

    def _connect(self, longest: int) -> None:
        self.optimisation.run.say(f"waiting for the vLLM server at {self.url}")
        with self._telling("the server"):
            self.client = Client(self.url, self.timeout)
        self._require_same_model(longest)
        with self._telling("joining the server's weight transfer"), self._deadline("joining its weight transfer"):
            # No index: the current device, which accelerate has set.
            self.client.init_communicator("cuda")

    def _require_same_model(self, longest: int) -> None:
        """Refuse a server whose weights or tokens are others than the policy's."""
        tokenizer = self.loaded.tokenization.tokenizer
        with self._telling("asking for its model"):
            served = self.client.get_server_info()["model_config"]
            answer = self.client.session.post(
                f"{self.url}/tokenize", json={"prompt": PROBE, "add_special_tokens": False}
            ).json()
        name = served["model"]
        advice = f"start it with the model that is trained, {self.loaded.base}"
        ours = tokenizer(PROBE, add_special_tokens=False).input_ids
        if answer.get("tokens") != ours:
            raise UserError(f"vLLM server {self.url}: it serves {name}, which has another vocabulary; {advice}")
        if served["max_model_len"] < longest:
            raise UserError(
                f"vLLM server {self.url}: its context is {served['max_model_len']} tokens, but prompts and responses need "
                f"{longest}; start it with --max-model-len {longest}"
            )

    def _send_weights(self) -> None:
        backbone, adapter = self.loaded.backbone, self.loaded.adapter
        with self._telling("sending it the weights"), self._deadline("sending it the weights"):
            self.client.update_named_params(weight_layout(backbone, adapter), served_weights(backbone, adapter))
            self.client.reset_prefix_cache()

    def _ask_all(self, prompts: Sequence[list[int]], sampling: Sampling, seeds: list[int]) -> Responses:
        pool = ThreadPoolExecutor(CONCURRENT_REQUESTS)
        try:
            rows = list(pool.map(lambda row: self._ask(prompts[row], sampling, seeds[row]), range(len(prompts))))
        finally:
            pool.shutdown(cancel_futures=True)
        ends = self.loaded.tokenization.end_ids
        return Responses([ids for ids, _ in rows], [ids[-1] in ends for ids, _ in rows], [seen for _, seen in rows])

    def _ask(self, prompt: list[int], sampling: Sampling, seed: int) -> tuple[list[int], list[float]]:
        """One response and the server's log-prob of each of its tokens."""
        # Our ends alone: the server would add those of its checkpoint's generation_config.json.
        own = {"seed": seed, "ignore_eos": True, "stop_token_ids": sorted(self.loaded.tokenization.end_ids)}
        with self._telling("sampling"):
            found: Any = self.client.generate(
                [prompt],
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_new_tokens,
                generation_kwargs=own,
            )
            ids, seen = found["completion_ids"][0], [float(chosen[0]) for chosen in found["logprobs"][0]]
            if not ids or len(ids) != len(seen):
                raise ValueError(f"it gave {len(ids)} tokens with {len(seen)} log-probs")
        return ids, seen

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Turn whatever goes wrong with the server into a line; TRL's client raises all kinds, plain Exception too."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"vLLM server {self.url}: {what} failed ({first_line(error)}); see the server's own log, start it as "
                "docs/clusters.md says, then go on with --resume true"
            ) from error

    @contextmanager
    def _deadline(self, what: str) -> Iterator[None]:
        """End the process if a block takes too long: a broadcast over NCCL with a dead partner cannot be interrupted."""

        def end() -> None:
            print(f"error: vLLM server {self.url}: {what} took over {self.timeout:g} s; see its log", file=sys.stderr)
            os._exit(2)

        timer = threading.Timer(self.timeout + 2 * HEALTH_SECONDS, end)  # an answer's own limit comes first
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class Client(VLLMClient):
    """TRL's client, with a limit to every wait."""

    def __init__(self, url: str, timeout: float) -> None:
        self.timeout = timeout
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        super().__init__(base_url=url, group_port=port, connection_timeout=timeout)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 1.0) -> None:
        """Wait until the server is up. TRL calls this before it asks anything.

        Raises:
            UserError: if it is not up within `total_timeout` seconds.
        """
        self.session.headers["Connection"] = "close"  # a kept one would be dropped by the server during an update
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, _LimitedAdapter(self.timeout))
        begun = time.monotonic()
        while True:
            try:
                answer = requests.get(f"{self.base_url}/health", timeout=min(HEALTH_SECONDS, self.timeout))
                if answer.status_code == 200:
                    return
                found = f"it answers {answer.status_code}"
            except requests.RequestException as error:
                found = type(error).__name__
            if time.monotonic() - begun >= total_timeout:
                raise UserError(
                    f"vLLM server {self.base_url}: not up after {total_timeout:g} s ({found}); start it as docs/clusters.md "
                    "says, or correct vllm_url"
                )
            time.sleep(retry_interval)


class _LimitedAdapter(HTTPAdapter):
    """Gives up on an answer after a time, and tries a connection again, but never sends a request twice."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        once = Retry(connect=2, read=0, redirect=0, status=0, other=0, backoff_factor=0.5)
        super().__init__(pool_maxsize=CONCURRENT_REQUESTS, max_retries=once)

    def send(self, request: requests.PreparedRequest, *args: Any, **settings: Any) -> requests.Response:
        settings["timeout"] = settings.get("timeout") or self.limit
        return super().send(request, *args, **settings)
