"""What the tests of evaluation share: reward models on sharpened tiny models, a labeling database, real HTTP servers."""

import json
from contextlib import ExitStack

import pytest

from annotation_ui.store import rule_sets
from annotation_ui.store.database import Database
from annotation_ui.store.judgments import Judgments
from annotation_ui.store.leases import Leases
from tests.http_stand_in import answering


@pytest.fixture(scope="session")
def reward_folders(load_sharp, tmp_path_factory):
    """Folders of two reward models, on tiny-llama and tiny-gpt2, whose heads are drawn at random."""
    import torch

    from align.models.checkpoint import weights_of
    from align.reward.checkpoint import save_reward_model

    root, folders = tmp_path_factory.mktemp("rewards"), {}
    for number, name in enumerate(("tiny-llama", "tiny-gpt2")):
        loaded = load_sharp(name)
        head = torch.randn(1, loaded.backbone.hidden_size, generator=torch.Generator().manual_seed(number))
        card = {"title": "Reward model", "stage": "reward"}
        save_reward_model(root / name, loaded, weights_of(loaded.backbone), head, {"mean": 0.5}, card)
        folders[name] = str(root / name)
    return folders


@pytest.fixture
def app(tmp_path):
    """A database with the shipped forms, and its judgments."""
    database = Database(f"sqlite:///{tmp_path}/app.db")
    database.upgrade()
    with database.write() as session:
        rule_sets.store_shipped(session)
    yield database, Judgments(Leases(database))
    database.close()


@pytest.fixture
def serve():
    """Start a server, `serve(answer)`, and return its address; `answer(path, headers, body)` gives status and content."""
    with ExitStack() as servers:

        def start(answer):
            def in_json(request):
                status, content = answer(request.path, request.headers, json.loads(request.body))
                return status, json.dumps(content).encode()

            return servers.enter_context(answering(in_json)) + "/v1"

        yield start
