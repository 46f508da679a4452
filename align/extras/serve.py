"""`align serve`: a reward model over HTTP, in the formats of OpenRLHF, verl and vLLM.

    POST /score        {"messages": [[{role, content}, ...], ...], "ended": [...]}     -> {"rewards": [...]}
    POST /get_reward   {"query": [...], "prompts": [...], "labels": [...]}             -> {"rewards", "scores", "extra_logs"}
    POST /classify     {"input": text or list}  or {"messages": [...]}                 -> {"data": [{"index", "probs"}]}
    POST /pooling      as /classify                                                    -> {"data": [{"index", "data"}]}
    GET  /health, /v1/models

A conversation ends with the assistant turn to score. A `query` or `input` is text rendered by a chat template. Rewards
have the mean over demonstrations subtracted. No activation is applied.
"""

import hmac
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from align.core.errors import UserError, short_repr
from align.core.plugins import require_extra
from align.core.settings import option, require_setting
from align.data.conversation import check_answer, check_prompt
from align.data.fields import check_list
from align.reward.remote import TOKEN
from align.reward.text_scoring import TextAnswer, TextRewardModel
from align.runtime.progress import console
from align.sampling.settings import InferenceConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

LOCAL = ("127.0.0.1", "localhost", "::1")
MEGABYTE = 2**20


@dataclass(kw_only=True)
class ServeConfig(InferenceConfig):
    """Serve a reward model over HTTP."""

    model: list[str] = option([], "Reward model: local folder, Hub id of a classifier with one label or built-in name.")
    host: str = option("127.0.0.1", "Address to listen on. 0.0.0.0 accepts other machines.")
    port: int = option(5000, "Port to listen on.", ge=1, le=65_535)
    max_rows: int = option(1024, "Maximum responses per request.", gt=0)
    max_megabytes: float = option(32.0, "Maximum request size in MiB.", gt=0)
    max_waiting: int = option(64, "Maximum concurrent requests. Further requests get HTTP 503.", gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "model", len(self.model) == 1, "one reward model")


class RequestError(Exception):
    """A request that is rejected with an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RewardService:
    """A reward model with request limits, which scores one request at a time."""

    def __init__(self, model: TextRewardModel, name: str, max_rows: int = 1024) -> None:
        self.model, self.name, self.max_rows = model, name, max_rows
        self._lock = threading.Lock()

    def score(self, request: Mapping[str, Any]) -> list[float]:
        """Return the rewards of a request in any of the formats.

        Raises:
            RequestError: 400 if the request cannot be parsed, 413 if it has too many responses.
        """
        try:
            if "query" in request:
                texts, prompts = (self._texts(request, name) for name in ("query", "prompts"))
                if prompts and len(prompts) != len(texts):
                    raise UserError(f"prompts has {len(prompts)} texts, query {len(texts)}")
                return self._locked(lambda: self.model.score_rendered(texts, prompts))
            if "messages" in request:
                answers = self._answers(request)
                return self._locked(lambda: self.model(answers))
            if "input" in request:
                inputs = self._texts(request, "input")
                return self._locked(lambda: self.model.score_rendered(inputs))
        except UserError as error:
            raise RequestError(400, str(error)) from error
        raise RequestError(400, "the request has none of the fields messages, query and input")

    def _locked(self, score: Callable[[], list[float]]) -> list[float]:
        with self._lock:
            return score()

    def _texts(self, request: Mapping[str, Any], name: str) -> list[str]:
        given = request.get(name) or []
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"{name} is {short_repr(given)}, but must be a text or a list of texts")
        self._require_rows(len(texts))
        return texts

    def _answers(self, request: Mapping[str, Any]) -> list[TextAnswer]:
        given = check_list(request["messages"], "messages")
        conversations = [given] if given and isinstance(given[0], Mapping) else given
        self._require_rows(len(conversations))
        ended = request.get("ended") or [True] * len(conversations)
        if not isinstance(ended, list) or len(ended) != len(conversations):
            raise UserError(f"ended is {short_repr(ended)}, but must be a list of {len(conversations)} values")
        answers = []
        for number, (turns, is_ended) in enumerate(zip(conversations, ended, strict=True)):
            field = f"messages[{number}]"
            last = turns[-1] if isinstance(turns, list) and turns else None
            if not isinstance(last, Mapping) or last.get("role") != "assistant":
                raise UserError(f"{field} must end with the assistant turn to score")
            text = check_answer(last.get("content"), field, may_be_empty=True)
            answers.append(TextAnswer(check_prompt(turns[:-1], field), text, bool(is_ended)))
        return answers

    def _require_rows(self, count: int) -> None:
        if count > self.max_rows:
            raise RequestError(413, f"{count} responses in one request, and at most {self.max_rows} are scored (max_rows)")


def make_app(service: RewardService, token: str | None, max_bytes: int) -> "FastAPI":
    """Return the application of a service.

    Args:
        token: bearer token that every request except `/health` must send, or None.
        max_bytes: maximum size of a request body, in bytes.
    """
    with require_extra("serve"):
        from fastapi import FastAPI, Request
        from fastapi.responses import JSONResponse
        from starlette.concurrency import run_in_threadpool

    app = FastAPI(title="align serve", docs_url=None, redoc_url=None, openapi_url=None)

    def error(status: int, message: str) -> JSONResponse:
        return JSONResponse({"error": {"message": message, "code": status}}, status)

    def is_allowed(request: Request) -> bool:
        sent = request.headers.get("authorization", "")
        return token is None or hmac.compare_digest(sent.encode(), f"Bearer {token}".encode())

    async def body_of(request: Request) -> Mapping[str, Any]:
        content = b""
        async for chunk in request.stream():
            content += chunk
            if len(content) > max_bytes:
                raise RequestError(413, f"the request is larger than {max_bytes:,} bytes (max_megabytes)")
        try:
            given = json.loads(content)
        except (ValueError, RecursionError) as problem:
            raise RequestError(400, "the request is not JSON") from problem
        if not isinstance(given, Mapping):
            raise RequestError(400, "the request must be a JSON object")
        return given

    async def answer(request: Request, write: Callable[[list[float]], Mapping[str, Any]]) -> JSONResponse:
        if not is_allowed(request):
            return error(401, "send the token as `Authorization: Bearer TOKEN`")
        try:
            given = await body_of(request)
            return JSONResponse(write(await run_in_threadpool(service.score, given)))
        except RequestError as problem:
            return error(problem.status, str(problem))

    def listed(kind: str, field: str, rewards: list[float]) -> Mapping[str, Any]:
        data = [{"index": number, "object": kind, field: [reward]} for number, reward in enumerate(rewards)]
        if field == "probs":
            data = [{**entry, "label": "LABEL_0", "num_classes": 1} for entry in data]
        head = {"id": f"reward-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": service.name}
        return {**head, "data": data, "usage": {"prompt_tokens": 0, "total_tokens": 0}}

    @app.post("/score")
    async def score(request: Request) -> JSONResponse:
        return await answer(request, lambda rewards: {"rewards": rewards})

    @app.post("/get_reward")
    async def get_reward(request: Request) -> JSONResponse:
        return await answer(request, lambda rewards: {"rewards": rewards, "scores": rewards, "extra_logs": {}})

    @app.post("/classify")
    async def classify(request: Request) -> JSONResponse:
        return await answer(request, lambda rewards: listed("classify", "probs", rewards))

    @app.post("/pooling")
    async def pooling(request: Request) -> JSONResponse:
        return await answer(request, lambda rewards: listed("pooling", "data", rewards))

    @app.get("/v1/models")
    async def models(request: Request) -> JSONResponse:
        if not is_allowed(request):
            return error(401, "send the token as `Authorization: Bearer TOKEN`")
        return JSONResponse({"object": "list", "data": [{"id": service.name, "object": "model"}]})

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok", "model": service.name})

    return app


def run_serve(config: ServeConfig) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Raises:
        UserError: if the model cannot be loaded, or the address is in use.
    """
    with require_extra("serve"):
        import uvicorn
    token = os.environ.get(TOKEN) or None
    (name,) = config.model
    model = TextRewardModel(name, config.dtype, config.batch_tokens, config.chat_template, config.quantization)
    app = make_app(RewardService(model, name, config.max_rows), token, int(config.max_megabytes * MEGABYTE))
    address = f"http://{config.host}:{config.port}"
    if token is None and config.host not in LOCAL:
        console.print(f"warning: anyone who reaches {address} can use it; set {TOKEN} to require a token")
    console.print(f"serving {name} at {address}; use it as reward_model {address}; Ctrl-C stops it")
    settings = uvicorn.Config(
        app,
        config.host,
        config.port,
        log_level="warning",
        limit_concurrency=config.max_waiting,
        timeout_graceful_shutdown=30,
    )
    server = uvicorn.Server(settings)
    try:
        with settings.bind_socket() as socket:
            server.run(sockets=[socket])
    except SystemExit as stopped:  # raised by uvicorn after it has logged the error
        raise UserError(f"{address} cannot be served: is the port in use? set another port") from stopped
