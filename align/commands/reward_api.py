"""The HTTP interface of `align serve-reward`.

`/score` takes plain prompts and responses, as reward functions of TRL and verl have them (docs/howto/reward-elsewhere.md has
a client for each). `/get_reward` is OpenRLHF's interface of remote reward models: texts rendered by the policy's chat
template.
"""

from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from align.core.errors import UserError
from align.reward.scoring import RewardService
from align.tokenization.encoded import SampledResponse


class PlainRequest(BaseModel):
    """Prompts, each a text or a list of {role, content}, and a response to each."""

    prompts: list[str | list[dict[str, str]]]
    responses: list[str]


class RenderedRequest(BaseModel):
    """OpenRLHF's request: `query` is prompt and response in one text; `labels` are not used."""

    query: list[str]
    prompts: list[str]
    labels: list[Any] | None = None


def make_api(service: RewardService, name: str) -> FastAPI:
    """The application around a service; `name` is what /health calls the model."""
    api = FastAPI(title="align serve-reward")

    @api.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok", "reward_model": name}

    @api.post("/score")
    def score(request: PlainRequest) -> dict[str, list[float]]:
        _same_length(request.prompts, request.responses, "responses")
        pairs = zip(request.prompts, request.responses, strict=True)
        return {"rewards": _rewards(service, lambda: [service.encode(prompt, response) for prompt, response in pairs])}

    @api.post("/get_reward")
    def get_reward(request: RenderedRequest) -> dict[str, Any]:
        _same_length(request.prompts, request.query, "query")
        pairs = zip(request.prompts, request.query, strict=True)
        rewards = _rewards(service, lambda: [service.encode_rendered(prompt, query) for prompt, query in pairs])
        return {"rewards": rewards, "scores": rewards, "extra_logs": {}}

    return api


def _same_length(prompts: list[Any], others: list[str], name: str) -> None:
    if len(prompts) != len(others):
        raise HTTPException(422, f"{len(prompts)} prompts and {len(others)} {name}: give one for each")


def _rewards(service: RewardService, encode: Any) -> list[float]:
    """The rewards, or status 422 with the reason if a row cannot be read."""
    try:
        rows: list[SampledResponse] = encode()
        return service.rewards(rows) if rows else []
    except UserError as error:
        raise HTTPException(422, str(error)) from error
