"""The open-loop part of a session: every rate in every start of every arm, each start a fresh server.

Arms alternate as in the closed loop (AR k3 k1 | k1 k3 AR | ...). A rate is a cell with a file of its own that appears when
the cell is complete, so that whatever ends the session, complete cells stay and the rest is done by the next run. A server
that dies or stops answering costs the cell under way; the next rates get a fresh one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from eyas.eval.arms import Arm
from eyas.eval.launch import relay_to_stdout
from eyas.eval.openloop.arrivals import poisson_arrivals
from eyas.eval.openloop.load import Measured, measure
from eyas.eval.openloop.plan import LoadPlan, LoadStart, plan_starts
from eyas.eval.openloop.records import (
    PLAN,
    SERVER,
    FailedCell,
    LoadCell,
    failure_path,
    partial_path,
    write_cell,
)
from eyas.eval.openloop.server import (
    Command,
    Server,
    ServerFailed,
    ServerNotReady,
    log_tail,
    serve_command,
    server_environment,
    serving,
    told_environment,
)
from eyas.eval.serve_options import ServedEngine
from eyas.heads.files import write_json

FAILURES_IN_A_ROW = 2
"""After so many cells lost on fresh servers the rest of a start is given up: each would cost a time limit."""

Serve = Callable[[ServedEngine], Command]
"""How an engine becomes a command line."""


def serve_vllm(engine: ServedEngine) -> Command:
    """The command line of the installed vLLM."""
    return lambda port, name: serve_command(engine, port=port, name=name)


def run_open_loop(
    directory: Path,
    *,
    plan: LoadPlan,
    arms: Sequence[Arm],
    starts_per_arm: int,
    wanted: int,
    slo_ttft_ms: float,
    slo_tpot_ms: float,
    environment: Mapping[str, str],
    ready_timeout_s: float,
    relay: Callable[[str], None] = relay_to_stdout,
    serve: Serve = serve_vllm,
) -> None:
    """Measure every arm at every rate under `directory`; complete cells of the same plan are kept.

    Failures (of requests, cells, servers) are recorded and not raised. Call it from the main thread.

    Args:
        directory: gets plan.json, and per start a directory with a file per rate, the servers' logs and their resolved
            configuration.
        arms: plain decoding and the others. One that is slowed down on purpose is left out: a server cannot be.
        starts_per_arm: fresh servers per arm.
        wanted: requests asked for at each rate; the plan has fewer where there are no more prompts.
        slo_ttft_ms, slo_tpot_ms: what a request must meet to count for goodput; they may change without measuring again.
        environment: of an engine process (`eyas.heads.serving.engine_environment`).
        ready_timeout_s: for a server to load.
        relay: takes a line of progress per cell.
        serve: how an engine becomes a command line; tests put a small program in the place of vLLM.

    Raises:
        ValueError: the plan measures something else than it says.
    """
    plan.check()
    served = [arm for arm in arms if not arm.slowed_by]
    objectives = {"wanted": wanted, "slo_ttft_ms": slo_ttft_ms, "slo_tpot_ms": slo_tpot_ms}
    write_json(directory / PLAN, plan.to_json() | objectives | {"arms": [arm.name for arm in served]})
    starts = list(plan_starts(directory, plan, arms=served, starts_per_arm=starts_per_arm))
    _remove_other_files(directory, starts)
    server_settings = server_environment(environment)
    for start in starts:
        runner = _Runner(start, environment=server_settings, ready_timeout_s=ready_timeout_s, relay=relay, serve=serve)
        runner.run()


def _remove_other_files(directory: Path, starts: Sequence[LoadStart]) -> None:
    """Files of another plan or order, left by an earlier session, would enter the report; failed cells are tried again."""
    kept = {path for start in starts for path in start.complete()}
    used = {path.parent for path in kept}
    for path in directory.glob("*/*"):
        of_kept_cells = path.name.startswith(SERVER) and path.parent in used
        if path not in kept and not of_kept_cells:
            path.unlink()


class _Runner:
    """One start: its missing cells, on as many servers as that takes."""

    def __init__(
        self,
        start: LoadStart,
        *,
        environment: Mapping[str, str],
        ready_timeout_s: float,
        relay: Callable[[str], None],
        serve: Serve,
    ) -> None:
        self.start = start
        self.command = serve(start.engine)
        self.environment = environment
        self.ready_timeout_s = ready_timeout_s
        self.relay = relay
        self.missing = start.missing()
        self.lost = 0
        """Cells lost in a row."""

    def run(self) -> None:
        """Measure what is missing, or record why it is not measured."""
        self.start.directory.mkdir(parents=True, exist_ok=True)
        while self.missing and self.lost < FAILURES_IN_A_ROW:
            earlier = len(list(self.start.directory.glob(f"{SERVER}*.log")))
            log_path = self.start.directory / f"{SERVER}{earlier}.log"
            try:
                self._one_server(log_path)
            except ServerFailed as failure:
                self._fail(self.missing.pop(0), reason=str(failure), tail=log_tail(log_path))
                self.lost += 1
        for rate in self.missing:
            self._fail(rate, reason=f"not tried: {self.lost} cells in a row were lost on fresh servers", tail=[])

    def _one_server(self, log_path: Path) -> None:
        """Cells until none is missing, or the server turns out to be broken before one has begun.

        Raises:
            ServerFailed: the first of `missing` is lost, and the server with it.
        """
        done = 0
        with serving(
            self.command, environment=self.environment, log_path=log_path, ready_timeout_s=self.ready_timeout_s
        ) as server:
            self._describe(server, log_path.with_suffix(".json"))
            while self.missing:
                try:
                    self._one_cell(server, rate=self.missing[0])
                except ServerNotReady as failure:
                    if not done:
                        raise
                    self.relay(f"{self._label(self.missing[0])}  on a fresh server: {failure}\n")
                    return
                del self.missing[0]
                done, self.lost = done + 1, 0

    def _describe(self, server: Server, path: Path) -> None:
        """Keep the command that started the server and what it resolved its settings to."""
        arm = self.start.arm
        description = {
            "session": self.start.plan.session,
            "arm": arm.name,
            "kind": arm.kind,
            "start": self.start.number,
            "speculative_config": arm.speculative_config,
            "command": self.command(0, "NAME"),
            "environment": told_environment(self.environment),
            "settings": server.settings(),
        }
        write_json(path, description)

    def _one_cell(self, server: Server, *, rate: float) -> None:
        """Measure one rate and keep it.

        Raises:
            ServerFailed: the server died, fell silent or gives no counters; what had come is kept aside.
        """
        plan, load_average = self.start.plan, os.getloadavg()[0]
        measured = measure(
            server,
            requests=plan.requests,
            arrivals=poisson_arrivals(len(plan.requests), rate=rate, seed=plan.seed),
            warmup=plan.warmup,
            sampling=plan.sampling,
            max_connections=plan.max_connections,
            patience=plan.patience,
            empty_prefix_cache=plan.engine.prefix_caching,
        )
        cell = _cell(self.start, measured, rate=rate, load_average=load_average)
        path = self.start.cells()[rate]
        if measured.given_up is not None:
            write_cell(partial_path(path), cell)
            raise ServerFailed(measured.given_up)
        write_cell(path, cell)
        answered = [request for request in cell.requests if request.failure is None]
        tokens = sum(request.n_out for request in answered)
        self.relay(
            f"{self._label(rate)}  {tokens / cell.seconds:8.1f} tok/s  {cell.seconds:6.1f} s  "
            f"{len(answered)} of {len(cell.requests)} answered\n"
        )

    def _fail(self, rate: float, *, reason: str, tail: list[str]) -> None:
        arm, session = self.start.arm, self.start.plan.session
        failed = FailedCell(session, arm.name, arm.kind, self.start.number, rate, reason, tail)
        write_json(failure_path(self.start.cells()[rate]), asdict(failed))
        self.relay(f"{self._label(rate)}  failed: {reason}\n")

    def _label(self, rate: float) -> str:
        return f"{self.start.number:03d} {self.start.arm.name:<4} {self.start.plan.dataset:<9} {rate:>5g} requests/s"


def _cell(start: LoadStart, measured: Measured, *, rate: float, load_average: float) -> LoadCell:
    plan = start.plan
    return LoadCell(
        session=plan.session,
        fingerprint=start.fingerprint(rate),
        arm=start.arm.name,
        kind=start.arm.kind,
        start=start.number,
        rate=rate,
        dataset=plan.dataset,
        temperature=plan.sampling.temperature,
        max_tokens=plan.sampling.max_tokens,
        fixed_length=plan.sampling.ignore_eos,
        max_num_seqs=plan.engine.max_num_seqs,
        max_connections=plan.max_connections,
        speculative_config=start.arm.speculative_config,
        seconds=measured.seconds,
        counters=measured.counters,
        accepted_per_position=measured.accepted_per_position,
        samples=measured.samples,
        loop_lags=measured.loop_lags,
        load_average=load_average,
        requests=measured.requests,
    )
