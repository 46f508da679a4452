"""A server with the part of the hub's interface that uploads use: repositories, checks of cards, large files, commits."""

import base64
import hashlib
import json
import re
from contextlib import contextmanager

import pytest
import yaml

from tests.http_stand_in import answering


class Hub:
    """What the server has received.

    Attributes:
        repos: private or not, by name.
        commits: the files of each commit, by name.
        refuses: path of requests that are answered with status 500.
    """

    def __init__(self):
        self.repos, self.commits, self.large, self.refuses, self.url = {}, [], {}, "", ""

    @property
    def files(self):
        """The files of the last commit."""
        return self.commits[-1][1]

    def answer(self, path, body, url):
        """Status and JSON of a POST."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            known = name in self.repos
            self.repos.setdefault(name, asked.get("visibility") == "private")
            return (409 if known else 200), {"url": f"{url}/{name}", "error": "You already created this model repo"}
        if path == "/api/validate-yaml":
            head = yaml.safe_load(re.match(r"---\n(.*?)---\n", json.loads(body)["content"], re.S).group(1))
            base = head.get("base_model", "a/b")
            errors = [] if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base) else [{"message": '"base_model" must be a model id'}]
            return (400 if errors else 200), {"errors": errors, "warnings": []}
        if path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            large = {file["path"]: file["path"].endswith(".safetensors") for file in asked}
            modes = [
                {"path": p, "uploadMode": "lfs" if big else "regular", "shouldIgnore": False} for p, big in large.items()
            ]
            return 200, {"files": modes}
        if path.endswith("/objects/batch"):
            objects = [
                {**item, "actions": {"upload": {"href": f"{url}/large/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                row["value"]["path"]: base64.b64decode(row["value"]["content"]) for row in lines if row["key"] == "file"
            }
            files |= {row["value"]["path"]: self.large[row["value"]["oid"]] for row in lines if row["key"] == "lfsFile"}
            self.commits.append((found.group(1), files, lines[0]["value"]["summary"]))
            return 200, {"commitUrl": f"{url}/{found.group(1)}/commit/1", "commitOid": "1" * 40}
        return 404, {"error": f"no {path}"}


@pytest.fixture
def hub(monkeypatch):
    """A running stand-in, to which this process uploads."""
    from huggingface_hub import constants

    with running_hub() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in stores files as Git LFS does
        monkeypatch.setenv("HF_TOKEN", "token")
        yield running


@contextmanager
def running_hub():
    """A running stand-in; `hub.url` is what HF_ENDPOINT has to be."""
    state = Hub()

    def answer(request):
        if request.method == "PUT":
            digest = request.path.rsplit("/", 1)[1]
            assert hashlib.sha256(request.body).hexdigest() == digest
            state.large[digest] = request.body
            return 200, b"{}"
        path = request.path.partition("?")[0]
        is_refused = state.refuses and state.refuses in path
        closed = 403, {"error": "the hub is closed"}
        status, content = closed if is_refused else state.answer(path, request.body, state.url)
        return status, json.dumps(content).encode(), ("Content-Type", "application/json")

    with answering(answer) as state.url:
        yield state
