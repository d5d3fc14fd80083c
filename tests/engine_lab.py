"""Real vLLM on many small cases in one process: what it drafts, accepts and answers, or the exception it raises.

`run_cases` starts this file as a script with the environment of an engine process. Importing vLLM costs some ten
seconds and an engine about one, so all cases of a test module go into one call.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

NUM_DRAFTED = 3


def run_cases(
    cases: list[dict[str, Any]], directory: Path, *, threads: int = 2, timeout: float = 900
) -> list[dict[str, Any]]:
    """Run every case in one engine process and return one result per case, in order.

    A case has `target` and `prompts`, and optionally `head` with `method`, `num_speculative_tokens`, `max_tokens`,
    `max_model_len` and `engine` (further arguments of `LLM`). A result has `seconds` and either `error` (text of the
    exception) or `drafts` ([tokens so far, drafted tokens] of every draft), `outputs` (generated tokens of each prompt)
    and `accepted` (accepted counts of each prompt's draft steps).

    Raises:
        RuntimeError: the process died; the results until then are in `directory`.
    """
    from eyas.heads.serving import engine_environment

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cases.json").write_text(json.dumps(cases))
    with (directory / "engine.log").open("w") as log:
        code = subprocess.run(
            [sys.executable, __file__, str(directory)],
            env=engine_environment(threads=threads, kv_cache_gib=1),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        ).returncode
    results = [json.loads(path.read_text()) for path in sorted(directory.glob("result-*.json"))]
    if code or len(results) != len(cases):
        tail = (directory / "engine.log").read_text()[-4000:]
        raise RuntimeError(f"the engine process ended with {code} after {len(results)} of {len(cases)} cases: {tail}")
    return results


def _serve(directory: Path) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    drafts: list[list[list[int]]] = []
    update = Scheduler.update_draft_token_ids

    def record(self: Any, draft_token_ids: Any) -> Any:
        for request_id, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is not None:
                drafts.append([list(request.all_token_ids), list(tokens)])
        return update(self, draft_token_ids)

    Scheduler.update_draft_token_ids = record
    for index, case in enumerate(json.loads((directory / "cases.json").read_text())):
        drafts.clear()
        begin = time.perf_counter()
        try:
            result = _serve_case(case) | {"drafts": drafts, "error": None}
        except BaseException as error:  # noqa: BLE001  # an engine may raise anything, and the next case is still to run
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        _release()
        result["seconds"] = time.perf_counter() - begin
        path = directory / f"result-{index:03d}.json"
        path.write_text(json.dumps({"name": case.get("name", str(index)), **result}))


def _serve_case(case: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": case.get("max_model_len", 256),
        "max_num_seqs": 8,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "disable_log_stats": False,
    }
    if case.get("head") is not None:
        arguments["per_request_spec_decode_metrics"] = "detailed"
        arguments["speculative_config"] = {
            "method": case["method"],
            "model": case["head"],
            "num_speculative_tokens": case.get("num_speculative_tokens", NUM_DRAFTED),
            **case.get("speculative", {}),
        }
    llm = LLM(case["target"], **(arguments | case.get("engine", {})))
    try:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in case["prompts"]],
            SamplingParams(temperature=0.0, max_tokens=case.get("max_tokens", 32), ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        completions = [output.outputs[0] for output in outputs]
        return {
            "outputs": [list(completion.token_ids) for completion in completions],
            "accepted": [_accepted(completion) for completion in completions],
        }
    finally:
        llm.llm_engine.engine_core.shutdown()


def _accepted(completion: Any) -> list[int] | None:
    metrics = getattr(completion, "spec_decode_metrics", None)
    return None if metrics is None else list(metrics.per_step_accepted)


def _release() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
