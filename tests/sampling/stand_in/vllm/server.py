"""A real HTTP server with the endpoints of vLLM that TRL's client calls; it notes everything that it is asked."""

import json
import math
import socket
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoTokenizer

from vllm.model import Model
from vllm.sampling_params import SamplingParams


class Server(ThreadingHTTPServer):
    """Serves a folder's model until it is stopped.

    Attributes:
        requests: the body of each request for a completion.
        updates: the tensors of each weight update, by name.
        paths: what was asked for, in order; completions are left out.
        answers: path to a (status, body) that is given instead of the true answer.
        passing: path to the statuses that its next requests get, as from a proxy; they do not reach the server.
        dies_after: completions after which nobody is there any more.
        instance: what identifies this start of the server.
        silent: a path that is answered only after `seconds_silent`.
    """

    daemon_threads = True
    seconds_silent = 10.0

    def __init__(self, folder: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model, self.tokenizer = Model(folder), AutoTokenizer.from_pretrained(folder)
        self.folder, self.requests, self.updates, self.paths = folder, [], [], []
        self.instance = uuid.uuid4().hex[:5]
        self.passing: dict[str, list[int]] = {}
        self.answers, self.dies_after, self.silent, self.channel = {}, math.inf, None, None
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address) -> None:
        """Nobody reads a traceback of a client that left."""

    def model_info(self) -> dict:
        config = {"model": self.folder, "max_model_len": self.model.model.config.max_position_embeddings}
        info = {"model_config": config, "weight_transfer_config": {"backend": "nccl"}, "instance_id": self.instance}
        return {"vllm_config": info}

    def join(self, init_info: dict) -> None:
        for _ in range(200):
            try:
                self.channel = socket.create_connection((init_info["master_address"], init_info["master_port"]), 10)
                return
            except OSError:
                time.sleep(0.01)
        raise TimeoutError("the trainer did not open its end")

    def update(self, info: dict) -> None:
        received = {}
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            kind = getattr(torch, dtype)
            data = bytearray()
            while len(data) < math.prod(shape) * kind.itemsize:
                data += self.channel.recv(min(1 << 20, math.prod(shape) * kind.itemsize - len(data)))
            received[name] = torch.frombuffer(data, dtype=kind).view(shape)
        self.model.load_weights(received.items())
        self.updates.append(received)

    def complete(self, body: dict) -> dict:
        self.requests.append(body)
        (prompt,) = body["prompt"]
        assert (body["n"], body["repetition_penalty"], body["min_p"]) == (1, 1.0, 0.0)
        assert body["return_token_ids"]
        assert body["return_tokens_as_token_ids"]
        names = ("temperature", "top_p", "top_k", "max_tokens", "logprobs", "seed", "ignore_eos", "stop_token_ids")
        ids, seen = self.model.generate(prompt, SamplingParams(**{name: body[name] for name in names}))
        tokens = [f"token_id:{id}" for id in ids]
        logprobs = {
            "tokens": tokens,
            "token_logprobs": seen,
            "top_logprobs": [{t: s} for t, s in zip(tokens, seen, strict=True)],
        }
        return {"choices": [{"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs}]}


class Handler(BaseHTTPRequestHandler):
    """Reads a request, answers in JSON."""

    server: Server

    def log_message(self, *_) -> None:
        """Tests need no log of requests."""

    def do_GET(self) -> None:
        server, path = self.server, self.path.split("?")[0]
        if self._is_intercepted(path):
            return
        server.paths.append(path)
        self._answer(
            path,
            {
                "/health": lambda: {},
                "/v1/models": lambda: {"data": [{"id": server.folder}]},
                "/server_info": server.model_info,
                "/get_world_size": lambda: {"world_size": 1},
            },
        )

    def do_POST(self) -> None:
        server, path = self.server, self.path
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if self._is_intercepted(path):
            return
        if path != "/v1/completions":
            server.paths.append(path)
        elif len(server.requests) >= server.dies_after:
            server.socket.close()
            self.connection.close()
            return
        self._answer(
            path,
            {
                "/tokenize": lambda: {"tokens": server.tokenizer(body["prompt"], add_special_tokens=False).input_ids},
                "/init_weight_transfer_engine": lambda: server.join(body["init_info"]),
                "/start_weight_update": lambda: {},
                "/update_weights": lambda: server.update(body["update_info"]),
                "/finish_weight_update": lambda: {},
                "/reset_prefix_cache": lambda: {"success": True},
                "/v1/completions": lambda: server.complete(body),
            },
        )

    def _is_intercepted(self, path: str) -> bool:
        statuses = self.server.passing.get(path)
        if not statuses:
            return False
        self.send_error(statuses.pop(0))
        return True

    def _answer(self, path: str, known: dict) -> None:
        if path == self.server.silent:
            time.sleep(self.server.seconds_silent)
            return
        try:
            status, answer = self.server.answers.get(path) or (200, known[path]() or {})
        except KeyError:
            status, answer = 404, {"detail": "Not Found"}
        except Exception as error:  # what vLLM's server does with one
            status, answer = 500, {"error": {"message": repr(error)}}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
