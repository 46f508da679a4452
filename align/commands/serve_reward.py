"""`align serve-reward`: serve a reward model over HTTP, with the interfaces of other frameworks.

`/score` takes plain prompts and responses, as reward functions of TRL and verl have them (docs/howto/reward-elsewhere.md has
a client for each). `/get_reward` is OpenRLHF's interface of remote reward models: texts rendered by the policy's chat
template.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from align.core.errors import UserError
from align.core.plugins import require_extra
from align.core.settings import Settings, option
from align.reward.checkpoint import load_reward_model
from align.reward.scoring import RewardService
from align.tokenization.encoded import SampledResponse

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass(kw_only=True)
class ServeRewardConfig(Settings):
    """Serve a reward model's scores over HTTP."""

    reward_model: str = option(
        "", "folder of a reward model, or of any transformers classifier with one label", required=True
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: every network of this machine, without a password")
    port: int = option(8300, "port to listen on", gt=0, lt=65536)
    dtype: Literal["auto", "float32", "bfloat16"] = option("auto", "number format that the model computes in")
    batch_tokens: int = option(8192, "padded tokens that are read at once", gt=0)


def run_serve_reward(config: ServeRewardConfig) -> None:
    """Load the reward model and answer requests until the process is stopped."""
    with require_extra("serve"):
        import fastapi  # noqa: F401
        import uvicorn
    service = RewardService(load_reward_model(config.reward_model, config.dtype), config.batch_tokens)
    api = make_api(service, config.reward_model)
    server = uvicorn.Server(uvicorn.Config(api, config.host, config.port, log_level="warning"))
    try:
        print(f"reward model {config.reward_model} at http://{config.host}:{config.port}; stop it with Ctrl-C", flush=True)
        server.run()
    except SystemExit:  # uvicorn has logged the reason
        raise UserError(f"cannot listen on {config.host}:{config.port}; give another --port") from None


def make_api(service: RewardService, name: str) -> "FastAPI":
    """Return the application around a service; `name` is what /health calls the model."""
    from fastapi import FastAPI, HTTPException
    from pydantic import BaseModel

    class PlainRequest(BaseModel):
        """Prompts, each a text or a list of {role, content}, and a response to each."""

        prompts: list[str | list[dict[str, str]]]
        responses: list[str]

    class RenderedRequest(BaseModel):
        """OpenRLHF's request: `query` is prompt and response in one text; `labels` are not used."""

        query: list[str]
        prompts: list[str]
        labels: list[Any] | None = None

    api = FastAPI(title="align serve-reward")

    def rewards(prompts: list[Any], others: list[str], kind: str, encode: Any) -> list[float]:
        """Return the rewards, or status 422 with the reason if a row cannot be read."""
        if len(prompts) != len(others):
            raise HTTPException(422, f"{len(prompts)} prompts and {len(others)} {kind}: give one for each")
        try:
            rows: list[SampledResponse] = [encode(prompt, other) for prompt, other in zip(prompts, others, strict=True)]
            return service.rewards(rows) if rows else []
        except UserError as error:
            raise HTTPException(422, str(error)) from error

    @api.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok", "reward_model": name}

    @api.post("/score")
    def score(request: PlainRequest) -> dict[str, list[float]]:
        return {"rewards": rewards(request.prompts, request.responses, "responses", service.encode)}

    @api.post("/get_reward")
    def get_reward(request: RenderedRequest) -> dict[str, Any]:
        found = rewards(request.prompts, request.query, "query", service.encode_rendered)
        return {"rewards": found, "scores": found, "extra_logs": {}}

    return api
