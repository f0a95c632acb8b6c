"""config.json from the Hub: memcalc as a program of its own against a small Hub on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from command import LLAMA, Ran, check_refused, program

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {**LLAMA, "hidden_size": 96, "architectures": ["LlamaForCausalLM"], "auto_map": {"AutoConfig": "evil.py"}}
FILES: dict[str, bytes] = {
    "owner/tiny": json.dumps(CONFIG).encode(),
    "owner/broken": b'{"model_type": ',
    "owner/list": b"[]",
    "owner/bytes": b"\xff\xfe",
    "owner/berd": b'{"model_type": "berd"}',
}
ERRORS: dict[str, tuple[int, str, str]] = {
    "owner/gated": (403, "GatedRepo", "Access to model owner/gated is restricted."),
    "owner/gatedanonymous": (401, "GatedRepo", "Access to model owner/gatedanonymous is restricted."),
    "owner/empty": (404, "EntryNotFound", "Entry not found"),
    "owner/teapot": (418, "", "I'm a teapot\nof two lines"),
    "owner/disabled": (403, "", "Access to this resource is disabled."),
}


class Hub(ThreadingHTTPServer):
    """Answers as the Hub does for one file of a few repositories, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """HEAD and GET of /{owner}/{name}/resolve/main/config.json."""

    server: Hub

    def _answer(self, with_body: bool) -> None:
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization")))
        repository, _, file = self.path.lstrip("/").partition("/resolve/")
        content = FILES.get(repository) if file.endswith("/config.json") else None
        if content is None:
            status, code, message = ERRORS.get(repository, (401, "RepoNotFound", "Repository not found"))
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", message.replace("\n", " "))
            content = message.encode()
        else:
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the test's output is its own."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(name: str, endpoint: str, home: Path, **changes: str) -> Ran:
    given = {
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "NO_PROXY": "*",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return program("estimate", "--model", name, "--json", **{**given, **changes})


def test_a_model_by_its_hub_id(hub: Hub, tmp_path: Path) -> None:
    ran = ask("owner/tiny", hub.url, tmp_path)
    assert ran.stderr == ""
    assert ran.status == 0
    document = json.loads(ran.stdout)
    assert document["model"]["name"] == "owner/tiny"
    assert document["model"]["model_type"] == "llama"
    assert {path for _, path, _ in hub.asked} == {"/owner/tiny/resolve/main/config.json"}
    assert all(token is None for _, _, token in hub.asked)


def test_the_token_arrives(hub: Hub, tmp_path: Path) -> None:
    assert ask("owner/tiny", hub.url, tmp_path, HF_TOKEN="hf_testing").status == 0
    assert hub.asked
    assert {token for _, _, token in hub.asked} == {"Bearer hf_testing"}


def test_offline_works_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    check_refused(ask("owner/tiny", hub.url, tmp_path, HF_HUB_OFFLINE="1"), "owner/tiny", "HF_HUB_OFFLINE")
    assert hub.asked == []
    online = ask("owner/tiny", hub.url, tmp_path)
    assert online.status == 0
    before = len(hub.asked)
    assert ask("owner/tiny", hub.url, tmp_path, HF_HUB_OFFLINE="1") == online
    assert len(hub.asked) == before


def test_a_hub_that_is_down(hub: Hub, tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"
    check_refused(ask("owner/tiny", nobody, tmp_path), "owner/tiny", nobody, "cannot be reached")
    online = ask("owner/tiny", hub.url, tmp_path)
    assert ask("owner/tiny", nobody, tmp_path) == online


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("owner/gated", ["is gated", "HF_TOKEN"]),
        ("owner/gatedanonymous", ["is gated", "HF_TOKEN"]),
        ("owner/missing", ["no such repository", "HF_TOKEN"]),
        ("owner/empty", ["no config.json"]),
        ("owner/broken", ["not valid JSON"]),
        ("owner/list", ["object"]),
        ("owner/bytes", ["not valid JSON"]),
        ("owner/berd", ["model_type", "berd", "bert"]),
        ("owner/teapot", ["could not be fetched", "418"]),
        ("owner/disabled", ["could not be fetched"]),
    ],
)
def test_refused(name: str, words: list[str], hub: Hub, tmp_path: Path) -> None:
    check_refused(ask(name, hub.url, tmp_path), f"--model {name}", *words)


def test_a_cache_that_cannot_be_written(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.write_text("not a folder")
    check_refused(ask("owner/tiny", hub.url, home), "--model owner/tiny")


@pytest.mark.parametrize("endpoint", ["nonsense", "http://", "http://127.0.0.1:99999"])
def test_an_endpoint_that_is_none(endpoint: str, tmp_path: Path) -> None:
    check_refused(ask("owner/tiny", endpoint, tmp_path), "--model owner/tiny")
