"""What the tests of evaluation share: a reward model on a sharpened tiny model, and real HTTP servers."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


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


class Handler(BaseHTTPRequestHandler):
    """Answers a request with the status and the JSON that `server.answer(path, headers, body)` gives."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, content = self.server.answer(self.path, self.headers, body)
        data = json.dumps(content).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except BrokenPipeError:  # the client has given up
            pass

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    """Start a server on this machine, `serve(answer)`; returns it with its address as `url`. See `Handler`."""
    servers = []

    def start(answer):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.answer, server.url = answer, f"http://127.0.0.1:{server.server_port}/v1"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
