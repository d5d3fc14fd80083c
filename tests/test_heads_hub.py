"""Targets of the hub: what is used without a connection, what is left out, and errors that say the mend.

The hub is a server of this test on a local port, or a cache laid out as the hub's client lays it out.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from eyas.heads.hub import HubUnavailable, fetch_target
from eyas.heads.target_source import resolve_target

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "org/model"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same weights",
    "original/model.safetensors": b"the same weights",
    "params.json": b"{}",
    "tekken.json": b"another tokenizer",
}
BREAKS_OFF = ("generation_config.json",)
"""What is announced and never arrives."""
REFUSALS = {"org/gated": (403, "GatedRepo"), "org/nothing": (404, "RepoNotFound"), "org/broken": (500, "")}


class Hub(BaseHTTPRequestHandler):
    """The few answers of the hub that fetching a model takes."""

    def do_GET(self) -> None:
        for model, (status, code) in REFUSALS.items():
            if model in self.path:
                return self._answer(b"", status=status, code=code)
        if self.path.endswith("/revision/no-such"):
            return self._answer(b"", status=404, code="RevisionNotFound")
        if "/tree/" in self.path:
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "a" * 40} for name, data in FILES.items()]
            return self._answer(json.dumps(tree).encode())
        if "/resolve/" in self.path and self.path.endswith(BREAKS_OFF):
            return self._answer(b"half", length=8)
        if "/resolve/" in self.path:
            return self._answer(FILES[self.path.partition(f"/resolve/{COMMIT}/")[2]])
        return self._answer(json.dumps({"id": MODEL, "sha": COMMIT, "siblings": []}).encode())

    do_HEAD = do_GET

    def _answer(self, body: bytes, *, status: int = 200, code: str = "", length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{zlib.crc32(body):08x}"')
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command == "GET" and length is None:
            self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's client, and a hub that nobody answers for."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A hub that answers; its cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    yield cache
    server.shutdown()
    thread.join()
    server.server_close()


def fill(cache: Path, *names: str) -> Path:
    """A snapshot of the model in the cache with those files, as an earlier run left it."""
    storage = cache / "models--org--model"
    snapshot = storage / "snapshots" / COMMIT
    for name in names:
        path = snapshot / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(FILES.get(name, b"{}"))
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(COMMIT)
    return snapshot


def fetch(model: str = MODEL, *, revision: str | None = None, weights: bool = True) -> Path:
    return resolve_target(model, revision=revision, cache_dir=Path("unused"), weights=weights)


def error_of(model: str = MODEL, *, revision: str | None = None) -> str:
    with pytest.raises(HubUnavailable) as caught:
        fetch(model, revision=revision)
    return str(caught.value)


@pytest.mark.parametrize("offline", [True, False], ids=["HF_HUB_OFFLINE", "no connection"])
def test_without_the_hub_the_cache_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    snapshot = fill(cache, "config.json", "tokenizer.json", "model.safetensors")
    assert fetch() == snapshot
    if offline:  # without a connection the client tries for 20 seconds to list a commit
        assert fetch(revision=COMMIT) == snapshot


def test_a_cache_without_weights_serves_a_plan_and_no_run(cache: Path) -> None:
    snapshot = fill(cache, "config.json")
    assert fetch(weights=False) == snapshot
    assert "lack *.safetensors; run once with a connection" in error_of()


def test_a_cache_with_some_of_the_shards_is_no_target(cache: Path) -> None:
    snapshot = fill(cache, "config.json", "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lack b.safetensors; run once" in error_of()


def test_without_hub_and_cache_both_are_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = error_of()
    assert told.startswith("target.model: org/model cannot be had from the hub (")
    assert f"the cache {cache} does not hold it; try again with a connection" in told
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert f"HF_HUB_OFFLINE is set, and the cache {cache} does not hold all of org/model" in error_of()


def test_only_what_a_target_needs_is_downloaded(hub: Path) -> None:
    del hub
    described = fetch_target(MODEL, revision=None, weights=False)
    assert {path.name for path in described.rglob("*.*")} == {"config.json", "tokenizer.json"}
    whole = fetch_target(MODEL, revision=None, weights=True)
    assert {path.name for path in whole.rglob("*.*")} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (whole / "model.safetensors").read_bytes() == b"weights"


def test_refusals_of_the_hub_say_what_to_do(hub: Path) -> None:
    del hub
    gated = error_of("org/gated")
    assert "org/gated is gated: accept its terms at http://127.0.0.1:" in gated
    assert "`hf auth login`, or set HF_TOKEN), or download it elsewhere and give the directory" in gated
    assert "the hub has no org/nothing, or it is private: check the name" in error_of("org/nothing")
    assert "target.revision: org/model has no revision 'no-such'" in error_of(revision="no-such")
    assert "org/broken cannot be had from the hub" in error_of("org/broken")


def test_a_connection_that_breaks_and_a_full_disk_are_told_apart(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "generation_config.json", b"{}")
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _seconds: None)
    told = error_of()
    assert told.startswith("target.model: org/model cannot be had from the hub (RemoteProtocolError: ")
    assert "try again with a connection" in told

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    assert f"cannot be written to the cache {hub} (No space left on device); make room, or set HF_HOME" in error_of()


def test_a_gated_model_that_is_in_the_cache_needs_no_token(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = fill(hub, "config.json", "model.safetensors")
    monkeypatch.setitem(REFUSALS, MODEL, (403, "GatedRepo"))
    assert fetch() == snapshot


def test_a_name_that_no_hub_has_is_no_hub_id(cache: Path) -> None:
    del cache
    assert "'org/na me' is no hub id" in error_of("org/na me")
