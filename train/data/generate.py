"""The generation worker: one vLLM process that completes a list of token prompts and appends each answer as it ends.

Run as `python -m eyas.train.data.generate PLAN.json OUT.jsonl`. It is a process of its own because vLLM wants its
environment set before Python starts, and because a crash in the engine must not take the pipeline with it.

OUT.jsonl is append-only: a line is written when a request finishes, and a request whose id is already there is not
generated again. Killing the worker loses at most the requests that were running.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.heads.files import read_json, write_json
from eyas.heads.serving import end_with_parent, engine_environment, require_vllm


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to make. `temperature` 0 is greedy; `min_p` drops tokens below that share of the likeliest one."""

    id: str
    token_ids: list[int]
    temperature: float
    min_p: float
    max_tokens: int


def read_finished(path: Path) -> dict[str, dict[str, Any]]:
    """Answers already in the worker's output, by request id. A last line cut by a kill is dropped and made again."""
    if not path.is_file():
        return {}
    finished: dict[str, dict[str, Any]] = {}
    kept: list[str] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        finished[record["id"]] = record
        kept.append(line)
    if len(kept) != len(lines):
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    return finished


def generate(
    requests: Sequence[GenerationRequest],
    *,
    work_dir: Path,
    name: str,
    target_dir: Path,
    stop_token_ids: Sequence[int],
    max_model_len: int,
    batch_size: int,
    dtype: str,
    seed: int,
    threads: int,
    kv_cache_gib: int,
) -> dict[str, dict[str, Any]]:
    """Complete `requests` with the target in a vLLM process of its own.

    Returns:
        Request id -> {"id", "token_ids", "finish_reason"}. Answers of an earlier, killed call are reused.

    Raises:
        ValueError: vLLM is missing, or the worker failed (the message names its log).
    """
    require_vllm()
    output = work_dir / f"{name}.jsonl"
    finished = read_finished(output)
    missing = [request for request in requests if request.id not in finished]
    if missing:
        plan = work_dir / f"{name}.plan.json"
        write_json(
            plan,
            {
                "target_dir": str(target_dir),
                "dtype": dtype,
                "max_model_len": max_model_len,
                "batch_size": batch_size,
                "seed": seed,
                "stop_token_ids": list(stop_token_ids),
                "requests": [asdict(request) for request in missing],
            },
        )
        _run_worker(plan, output=output, log=work_dir / f"{name}.log", threads=threads, kv_cache_gib=kv_cache_gib)
    return read_finished(output)


def _run_worker(plan: Path, *, output: Path, log: Path, threads: int, kv_cache_gib: int) -> None:
    command = [sys.executable, "-m", "eyas.train.data.generate", str(plan), str(output)]
    environment = engine_environment(threads=threads, kv_cache_gib=kv_cache_gib)
    with log.open("a") as log_stream:
        worker = subprocess.Popen(command, env=environment, stderr=log_stream, start_new_session=True)
        try:
            code = worker.wait()
        except BaseException:
            worker.terminate()
            worker.wait()
            raise
    if code != 0:
        raise ValueError(f"the generation worker failed with exit code {code}; its log is {log}")


def main(plan_path: Path, output_path: Path) -> None:
    """The worker's body: keep `batch_size` requests running until all are done."""
    end_with_parent()
    plan = read_json(plan_path)
    requests = {request["id"]: request for request in plan["requests"]}
    engine = _start_engine(plan)
    pending = list(requests.values())[::-1]
    running = done = tokens = 0
    started = time.perf_counter()
    with output_path.open("a", encoding="utf-8") as stream:
        while pending or running:
            while pending and running < plan["batch_size"]:
                _add(engine, pending.pop(), stop_token_ids=plan["stop_token_ids"])
                running += 1
            for output in engine.step():
                if not output.finished:
                    continue
                running -= 1
                done += 1
                tokens += len(output.outputs[0].token_ids)
                stream.write(json.dumps(_record(output)) + "\n")
                if done % 50 == 0 or not (pending or running):
                    stream.flush()
                    rate = tokens / (time.perf_counter() - started)
                    _progress(f"generated {done}/{len(requests)} answers, {tokens} tokens, {rate:.0f} tok/s")


def _start_engine(plan: dict[str, Any]) -> Any:
    from vllm import LLM

    llm = LLM(
        plan["target_dir"],
        dtype=plan["dtype"],
        max_model_len=plan["max_model_len"],
        max_num_seqs=plan["batch_size"],
        seed=plan["seed"],
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    return llm.llm_engine


def _add(engine: Any, request: dict[str, Any], *, stop_token_ids: list[int]) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        temperature=request["temperature"],
        # min_p, not top_p: on CPU vLLM sorts the vocabulary for top_p, which costs three quarters of the throughput.
        min_p=request["min_p"] if request["temperature"] > 0 else 0.0,
        max_tokens=request["max_tokens"],
        stop_token_ids=stop_token_ids,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine.add_request(request["id"], {"prompt_token_ids": request["token_ids"]}, parameters)


def _record(output: Any) -> dict[str, Any]:
    answer = output.outputs[0]
    return {"id": output.request_id, "token_ids": list(answer.token_ids), "finish_reason": answer.finish_reason}


def _progress(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
