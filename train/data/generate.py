"""Offline generation: one vLLM process that answers round after round.

Run as `python -m eyas.train.data.generate ENGINE.json READY_FD`. It is a process of its own because vLLM wants its
environment set before Python starts, and because a crash in the engine must not take the pipeline with it. It lives as
long as its `OfflineEngine`: loading a large target takes minutes, and a conversation of several turns takes several
rounds. Each line of its standard input is the path of a round's plan; a byte on the pipe READY_FD says that the round is
done.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from eyas.heads.files import read_json, write_json
from eyas.heads.serving import end_with_parent, engine_environment, on_cpu, require_vllm
from eyas.train.data.answers import Answer, GenerationRequest, answer_file, append_answer, read_finished

PROGRESS_EVERY = 50
MIN_BATCHED_TOKENS = 4096
"""Tokens of one engine step at least, where prompts are not read in pieces."""
END_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How the worker runs vLLM; none of these is meant to change what is said, only how fast.

    Attributes:
        max_model_len: tokens of a prompt and its answer together at most.
        batch_size: sequences decoded at a time.
        threads, kv_cache_gib: used on CPU only.
        tensor_parallel_size, gpu_memory_utilization: GPUs the target is split over, and the share of their memory.
        states: keep the hidden states of each conversation's last request, as `generation_states_settings` of
            train/features/states.py describes it; None = do not.
    """

    target_dir: Path
    dtype: str
    max_model_len: int
    batch_size: int
    seed: int
    threads: int
    kv_cache_gib: int
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.85
    trust_remote_code: bool = False
    states: dict[str, Any] | None = None


class OfflineEngine:
    """The backend that answers with vLLM on this machine; a context manager that ends the worker when it closes."""

    def __init__(self, settings: EngineSettings, *, work_dir: Path) -> None:
        """The worker starts with the first round that has something to answer.

        Raises:
            ValueError: vLLM is missing.
        """
        require_vllm()
        self.settings = settings
        self.work_dir = work_dir
        self._log = work_dir / "engine.log"
        self._worker: subprocess.Popen[str] | None = None
        self._ready = -1

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None)

    def __call__(self, requests: list[GenerationRequest], name: str) -> dict[str, Answer]:
        """Answers of the round `name`, by request id; those of an earlier, killed call are reused.

        Raises:
            ValueError: the worker failed (the message names its log).
        """
        output = answer_file(self.work_dir, name)
        finished = read_finished(output)
        missing = [request for request in requests if request.id not in finished]
        if not missing:
            return finished
        plan = self.work_dir / f"{name}.plan.json"
        write_json(plan, {"output": str(output), "requests": [asdict(request) for request in missing]})
        try:
            self._run_round(plan)
        except BaseException:
            self.close(at_once=True)
            raise
        plan.unlink()
        return read_finished(output)

    def close(self, *, at_once: bool = False) -> None:
        """End the worker: after its last step, or at once when something went wrong."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        assert worker.stdin is not None
        with suppress(BrokenPipeError):  # it may have ended by itself
            worker.stdin.close()
        if at_once:
            worker.terminate()
        try:
            worker.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            worker.kill()  # its answers are on disk, so nothing is lost but the engine's farewell
            worker.wait()
        os.close(self._ready)

    def _run_round(self, plan: Path) -> None:
        if self._worker is None:
            self._worker = self._start()
        worker = self._worker
        assert worker.stdin is not None
        with suppress(BrokenPipeError):  # when the worker is gone, the loop below says so
            worker.stdin.write(f"{plan}\n")
            worker.stdin.flush()
        # Not a plain read: processes that the worker started may hold the pipe open after it died.
        while not select.select([self._ready], [], [], 1.0)[0]:
            if worker.poll() is not None:
                break
        if worker.poll() is not None or not os.read(self._ready, 1):
            raise ValueError(f"the generation worker failed with exit code {worker.wait()}; its log is {self._log}")

    def _start(self) -> subprocess.Popen[str]:
        settings = self.settings
        engine = self.work_dir / "engine.json"
        write_json(engine, {**asdict(settings), "target_dir": str(settings.target_dir), "enforce_eager": on_cpu()})
        self._ready, theirs = os.pipe()
        try:
            with self._log.open("a") as log_stream:
                return subprocess.Popen(
                    [sys.executable, "-m", "eyas.train.data.generate", str(engine), str(theirs)],
                    env=engine_environment(threads=settings.threads, kv_cache_gib=settings.kv_cache_gib),
                    stdin=subprocess.PIPE,
                    stderr=log_stream,
                    start_new_session=True,
                    pass_fds=[theirs],
                    text=True,
                )
        finally:
            os.close(theirs)


def main(engine_path: Path, ready: int) -> None:
    """The worker's body: one engine, and a round for every line of standard input."""
    end_with_parent()
    settings = read_json(engine_path)
    engine = _start_engine(settings)
    for line in sys.stdin:
        plan = read_json(Path(line.rstrip("\n")))
        _answer_round(engine, plan, batch_size=settings["batch_size"], keep_states=settings["states"] is not None)
        os.write(ready, b"\n")


def engine_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for the settings of an `EngineSettings`, as JSON holds them."""
    arguments = {
        "model": settings["target_dir"],
        "dtype": settings["dtype"],
        "max_model_len": settings["max_model_len"],
        "max_num_seqs": settings["batch_size"],
        "seed": settings["seed"],
        "tensor_parallel_size": settings["tensor_parallel_size"],
        "gpu_memory_utilization": settings["gpu_memory_utilization"],
        "trust_remote_code": settings["trust_remote_code"],
        "skip_tokenizer_init": True,
        # On CPU compiling takes longer than most rounds; on GPUs the graphs pay within seconds.
        "enforce_eager": settings["enforce_eager"],
    }
    if on_cpu():
        # A seeded request whose prompt is read in pieces ends the engine there: "CPU Generator does not use offset".
        tokens = max(settings["max_model_len"], settings["batch_size"], MIN_BATCHED_TOKENS)
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
    if settings["states"] is None:
        return arguments
    from eyas.train.features.states import states_arguments

    return arguments | states_arguments(settings["states"])


def _start_engine(settings: dict[str, Any]) -> Any:
    from vllm import LLM

    engine = LLM(**engine_arguments(settings)).llm_engine
    if settings["states"] is not None:
        from eyas.train.features.states import allow_min_p

        allow_min_p(engine)
    return engine


def _answer_round(engine: Any, plan: dict[str, Any], *, batch_size: int, keep_states: bool) -> None:
    """Keep `batch_size` requests running until all of a plan are done, and append each answer as it ends."""
    pending = plan["requests"][::-1]
    total = len(pending)
    running = done = tokens = 0
    started = time.perf_counter()
    with Path(plan["output"]).open("a", encoding="utf-8") as stream:
        while pending or running:
            while pending and running < batch_size:
                request = pending.pop()
                _add(engine, request, keep_states=keep_states and request["last"])
                running += 1
            for output in engine.step():
                if not output.finished:
                    continue
                running -= 1
                done += 1
                tokens += len(output.outputs[0].token_ids)
                append_answer(stream, _answer(output))
                if done % PROGRESS_EVERY == 0 or not (pending or running):
                    rate = tokens / (time.perf_counter() - started)
                    _progress(f"generated {done}/{total} answers, {tokens} tokens, {rate:.0f} tok/s")
    if keep_states:
        from eyas.train.features.states import flush_states

        flush_states(engine)


def _add(engine: Any, request: dict[str, Any], *, keep_states: bool) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from eyas.train.features import states

    sampled = request["temperature"] > 0
    parameters = SamplingParams(
        temperature=request["temperature"],
        # Off unless asked for: on CPU vLLM sorts the vocabulary for top_p, which costs three quarters of the throughput.
        top_p=request["top_p"] if sampled else 1.0,
        top_k=request["top_k"] if sampled else 0,
        min_p=request["min_p"] if sampled else 0.0,
        seed=request["seed"] if sampled else None,
        max_tokens=request["max_tokens"],
        stop_token_ids=request["stop_token_ids"],
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=states.keep_states({"id": request["id"]}) if keep_states else None,
    )
    engine.add_request(request["id"], {"prompt_token_ids": request["token_ids"]}, parameters)


def _answer(output: Any) -> Answer:
    answer = output.outputs[0]
    return {"id": output.request_id, "token_ids": list(answer.token_ids), "finish_reason": answer.finish_reason}


def _progress(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
