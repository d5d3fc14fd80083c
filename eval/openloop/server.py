"""One vLLM server on loopback: started, waited for, asked after its health, and ended with everything it started.

The port is found by binding to 0 and letting go, and somebody else may take it in between. vLLM binds before it loads,
so a server that lost the race ends at once and says so; another port is tried. The name under which the target is
served is made up for each start, so that whoever else answers on a port is never taken for our server.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eyas.eval.machine import ENVIRONMENT_PREFIXES, LEFT_OUT
from eyas.eval.openloop import supervisor
from eyas.eval.serve_options import ServedEngine, engine_options
from eyas.heads.serving import on_cpu

HOST = "127.0.0.1"
PORT_ATTEMPTS = 5
POLL_SECONDS = 0.25
PROBE_SECONDS = 3.0
INFO_SECONDS = 60.0
MACHINE_FACTS = (
    "os",
    "python_version",
    "vllm_version",
    "torch_version",
    "cuda_runtime_version",
    "nvidia_driver_version",
    "nvidia_gpu_models",
    "pip_packages",
)
PROCESSOR_FACTS = {"cpu": "Model name", "cpu_count": "CPU(s)"}
"""Names of facts about the processor, and of the lines of `lscpu` that hold them."""

LOG_TAIL_LINES = 30
TAKEN = ("address already in use", "errno 98")

Command = Callable[[int, str], list[str]]
"""From a port and the name to serve the target under: program and arguments."""


class ServerFailed(Exception):
    """A server that did not start, ended, or stopped answering. The message is the reason a report prints."""


class ServerNotReady(ServerFailed):
    """The same before anything was measured."""


def serve_command(engine: ServedEngine, *, port: int, name: str) -> list[str]:
    """What starts the server: `vllm serve`, by the module behind it, with the engine's options and its own.

    The CPU wheel's `vllm` command looks for its metadata under the GPU wheel's name and fails, so there the API server's
    own module is run.
    """
    cpu = on_cpu()
    module = "vllm.entrypoints.openai.api_server" if cpu else "vllm.entrypoints.cli.main"
    target = ["--model", engine.target_dir] if cpu else ["serve", engine.target_dir]
    own = ["--host", HOST, "--port", str(port), "--served-model-name", name, "--uvicorn-log-level", "warning"]
    own += ["--enable-per-request-metrics"]
    if engine.speculative_config is not None:
        # vLLM refuses the metrics without a head, so this is the one other argument by which arms differ.
        own += ["--per-request-spec-decode-metrics", "summary"]
    return [sys.executable, "-m", module, *target, *own, *engine_options(engine, on_cpu=cpu)]


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """An engine's environment as a server needs it.

    A real server runs its engine in a second process, and its development endpoints tell the resolved configuration and
    empty the prefix cache. Both arms have them, and nobody but this machine reaches them.
    """
    kept = {name: value for name, value in environment.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return kept | {"VLLM_SERVER_DEV_MODE": "1"}


def told_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a server's environment that may change its speed or its answers, without secrets."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(ENVIRONMENT_PREFIXES) and name not in LEFT_OUT
    }


class Server:
    """A running server. `name` is what requests call the target."""

    def __init__(self, process: subprocess.Popen[bytes], *, port: int, name: str, log_path: Path) -> None:
        self.process = process
        self.url = f"http://{HOST}:{port}"
        self.name = name
        self.log_path = log_path

    def ended(self, *, wait_s: float = 0.0) -> str | None:
        """Why it is gone, or is within `wait_s` seconds; None while it runs."""
        try:
            return f"the server ended with exit code {self.process.wait(timeout=wait_s)}"
        except subprocess.TimeoutExpired:
            return None

    def get(self, path: str, *, timeout_s: float) -> bytes | None:
        """Body of a successful answer, else None."""
        return _ask(urllib.request.Request(self.url + path), timeout_s=timeout_s)

    def serves(self) -> bool:
        """Whether it is healthy, and is our server and not somebody else's on the same port."""
        listed = self.get("/v1/models", timeout_s=PROBE_SECONDS)
        if listed is None or self.name not in listed.decode(errors="replace"):
            return False
        return self.get("/health", timeout_s=PROBE_SECONDS) is not None

    def settings(self) -> dict[str, Any] | None:
        """vLLM's configuration as it was resolved, its environment and the machine; None where the server does not tell.

        What changes from start to start (processor clocks, the name made up for it) is left out.
        """
        answer = self.get("/server_info?config_format=json", timeout_s=INFO_SECONDS)
        if answer is None:
            return None
        told = json.loads(answer)
        return {
            "engine": told.get("vllm_config"),
            "environment": told.get("vllm_env"),
            "machine": machine_facts(told.get("system_env") or {}),
        }


def machine_facts(system: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, GPUs and processor out of what vLLM collects of its machine; what it does not tell is None."""
    lines = [line.partition(":") for line in (system.get("cpu_info") or "").splitlines()]
    told = {label.strip(): value.strip() for label, _, value in lines}
    processor = {name: told.get(label) for name, label in PROCESSOR_FACTS.items()}
    return {name: system.get(name) for name in MACHINE_FACTS} | processor


def _ask(request: urllib.request.Request, *, timeout_s: float) -> bytes | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return response.read()
    except (OSError, urllib.error.URLError, ValueError):
        return None


@contextlib.contextmanager
def serving(
    command: Command, *, environment: Mapping[str, str], log_path: Path, ready_timeout_s: float
) -> Iterator[Server]:
    """A server that is ready to answer, ended with its whole process group when the block is left.

    Call it from the main thread: the supervisor of the server is told when the *thread* that started it ends.

    Args:
        command: makes the command line from a port and a name.
        environment: of the server.
        log_path: where its output goes.
        ready_timeout_s: how long loading may take.

    Raises:
        ServerFailed: it ended or was not ready in time; names the log.
    """
    with contextlib.ExitStack() as stack:
        for _ in range(PORT_ATTEMPTS):
            server = _start(command, environment=environment, log_path=log_path)
            stack.callback(end_server, server.process)
            if _gets_ready(server, ready_timeout_s=ready_timeout_s):
                yield server
                return
    raise ServerFailed(f"other programs took the port {PORT_ATTEMPTS} times in a row; see {log_path}")


def _start(command: Command, *, environment: Mapping[str, str], log_path: Path) -> Server:
    port, name = free_port(), f"eyas-{uuid.uuid4().hex[:12]}"
    supervised = [sys.executable, "-m", supervisor.__name__, str(os.getpid()), *command(port, name)]
    with log_path.open("wb") as log:
        # A session of its own: Ctrl-C reaches only this process, which then ends the server.
        process = subprocess.Popen(
            supervised, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environment), start_new_session=True
        )
    return Server(process, port=port, name=name, log_path=log_path)


def free_port() -> int:
    """A port of the loopback that nobody used a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _gets_ready(server: Server, *, ready_timeout_s: float) -> bool:
    """Wait until `server` answers; False when it lost its port to somebody else.

    Raises:
        ServerFailed: it ended for another reason, or takes too long.
    """
    deadline = time.monotonic() + ready_timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = server.process.wait(timeout=POLL_SECONDS)
            if any(words in "\n".join(log_tail(server.log_path)).lower() for words in TAKEN):
                return False
            raise ServerFailed(f"the server ended with exit code {code} before it was ready; see {server.log_path}")
        if server.serves():
            return True
    raise ServerFailed(
        f"the server was not ready within {ready_timeout_s:g} s (score.timeout_s); see {server.log_path}, and raise the limit "
        "if it was still loading"
    )


def log_tail(path: Path) -> list[str]:
    """The last lines of a log; none of a log that is not there."""
    return path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:] if path.is_file() else []


def end_server(process: subprocess.Popen[bytes]) -> None:
    """End a server's whole process group. The supervisor is asked first, and killed with the rest when it is stuck."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=supervisor.GRACE_SECONDS + 5)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
