"""Real vLLM on many small cases in one process: what it drafts, accepts and answers, or the exception it raises.

`run_cases` starts this file as a script with the environment of an engine process. Importing vLLM costs some ten
seconds and an engine one to two, so all cases of a test module go into one call. The first use of a model class costs
some seconds once on a machine, because vLLM inspects it in a process of its own.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.heads.chain import Chains
from eyas.heads.drafting import draft_from_slots, simulate_chains
from eyas.heads.head import DraftHead
from eyas.heads.serving import engine_environment, speculative_config
from eyas.heads.target import HiddenStateCapture, load_target_model, load_target_pieces

NUM_DRAFTED = 3

KV_BLOCKS = 64
"""Blocks of the cache, of 128 tokens each on CPU: without a number the engine fills the whole gibibyte it is given."""


def run_cases(
    cases: list[dict[str, Any]], directory: Path, *, threads: int = 2, timeout: float = 900
) -> list[dict[str, Any]]:
    """Run every case in one engine process and return one result per case, in order.

    A case has `target` and `prompts`, and optionally `head` with `method`, `num_speculative_tokens`, `max_tokens`,
    `max_model_len`, and `engine` and `speculative` (further arguments of `LLM` and of its speculative config). A result has `seconds` and either `error` (text of the
    exception) or `drafts` ([tokens so far, drafted tokens] of every draft), `outputs` (generated tokens of each prompt),
    `accepted` (accepted counts of each prompt's draft steps) and `cached` (prompt tokens found in the prefix cache).

    Raises:
        RuntimeError: the process died; the results until then are in `directory`.
    """
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


@dataclass
class Comparison:
    """What the engine drafted for one case beside what `draft_from_slots` drafts from the same tokens.

    Attributes:
        drafts, accepted, distinct: draft steps, tokens accepted in them, and different first tokens among the drafts.
        ties: drafts that part where our two best logits are nearly equal.
        differences: drafts that part elsewhere, and prompts whose accepted counts differ, one line each.
    """

    drafts: int
    accepted: int
    distinct: int
    ties: int
    differences: list[str]


def compare(case: dict[str, Any], result: dict[str, Any], *, head: DraftHead, tie: float = 1e-4) -> Comparison:
    """Compare every draft and every accepted count of a case, in float32.

    Two best logits tie when their difference is below `tie` times the larger one's size.
    """
    assert result["error"] is None, result["error"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small take five times as long in two threads that have to meet
    try:
        return _compared(case, result, head=head, tie=tie)
    finally:
        torch.set_num_threads(threads)


def _compared(case: dict[str, Any], result: dict[str, Any], *, head: DraftHead, tie: float) -> Comparison:
    target = Path(case["target"])
    pieces = load_target_pieces(target)
    capture = HiddenStateCapture(
        load_target_model(target, dtype=torch.float32), capture_layers=head.config.capture_layers or ()
    )
    num_drafted = case.get("num_speculative_tokens", NUM_DRAFTED)
    found = Comparison(drafts=len(result["drafts"]), accepted=0, distinct=0, ties=0, differences=[])
    found.distinct = len({drafted[0] for _, drafted in result["drafts"]})
    matched = 0
    for prompt, output, accepted in zip(case["prompts"], result["outputs"], result["accepted"], strict=True):
        document = torch.tensor(prompt + output)
        captured_BTX, last_BTH = capture(document[None])
        arguments: dict[str, Any] = {
            "embedding_VH": pieces.embedding_VH,
            "target_readout_DH": pieces.readout_VH[head.draft_to_target_D],
            "token_ids_T": document,
            "states_TX": (last_BTH if head.feature_source == "last" else captured_BTX)[0],
        }
        slots_S = torch.arange(len(prompt) - 1, len(document) - 1)
        ours_SK = draft_from_slots(head, **arguments, slots_S=slots_S, num_tokens=num_drafted)
        drafted = _drafts_along(result["drafts"], document=prompt + output, num_prompt=len(prompt))
        matched += len(drafted)
        ties = found.ties
        for slot, theirs in drafted.items():
            ours = ours_SK[slot - len(prompt) + 1].tolist()
            if ours != theirs:
                step = next(index for index in range(num_drafted) if ours[index] != theirs[index])
                gap = _relative_gap(head, **arguments, slot=slot, drafted=ours[:step])
                found.ties += gap < tie
                if gap >= tie:
                    found.differences.append(f"slot {slot}, step {step}: {ours}, engine {theirs}, gap {gap:.1e}")
        found.accepted += sum(accepted)
        counts = simulate_chains(ours_SK, truth_T=document, slots_S=slots_S)
        # A tie may shift later steps. The engine may end at the requested length within or just before our last step.
        checked = max(len(counts) - 2, len(accepted) - 1)
        if found.ties == ties and counts[:checked] != accepted[:checked]:
            found.differences.append(f"accepted {counts}, engine {accepted}")
    if matched != found.drafts:
        found.differences.append(f"{found.drafts - matched} drafts belong to no prompt")
    return found


def _drafts_along(drafts: list[list[list[int]]], *, document: list[int], num_prompt: int) -> dict[int, list[int]]:
    """Drafted tokens by slot of the drafts made along one document."""
    return {
        len(tokens) - 2: drafted
        for tokens, drafted in drafts
        if len(tokens) > num_prompt and document[: len(tokens)] == tokens
    }


@torch.inference_mode()
def _relative_gap(
    head: DraftHead,
    *,
    embedding_VH: torch.Tensor,
    target_readout_DH: torch.Tensor,
    token_ids_T: torch.Tensor,
    states_TX: torch.Tensor,
    slot: int,
    drafted: list[int],
) -> float:
    """Difference of our two best logits after `drafted`, relative to the best one's size."""
    chains = Chains(
        head,
        states_TX=states_TX[:-1],
        embedding_TH=head.embed(token_ids_T[1:], embedding_VH=embedding_VH),
        slots_S=torch.tensor([slot]),
        lengths=[token_ids_T.shape[0] - 1],
    )
    for token in drafted:
        chains.advance(head.embed(torch.tensor([token]), embedding_VH=embedding_VH))
    logits_1D = head.logits(chains.outputs_SH, target_readout_DH=target_readout_DH)
    best, second = logits_1D[0].topk(2).values.tolist()
    return (best - second) / max(abs(best), 1e-9)


def _serve(directory: Path) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    drafts: list[list[list[int]]] = []
    update = Scheduler.update_draft_token_ids

    def record(self: Any, draft_token_ids: Any) -> Any:
        for request_id, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            # Between two pieces of a prompt the engine drafts too, and drops it.
            if request is not None and request.num_output_tokens > 0:
                drafts.append([list(request.all_token_ids), list(tokens)])
        return update(self, draft_token_ids)

    Scheduler.update_draft_token_ids = record
    # An engine collects garbage nine times between start and end, 0.3 s each with all of vLLM in memory; once does.
    collect, gc.collect = gc.collect, lambda *_: 0
    for index, case in enumerate(json.loads((directory / "cases.json").read_text())):
        drafts.clear()
        begin = time.perf_counter()
        result: dict[str, Any]
        try:
            result = _serve_case(case) | {"drafts": drafts, "error": None}
        except BaseException as error:  # an engine may raise anything, and the next case is still to run
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        _release()
        collect()
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
        "num_gpu_blocks_override": KV_BLOCKS,
    }
    if case.get("head") is not None:
        arguments["per_request_spec_decode_metrics"] = "detailed"
        num_drafted = case.get("num_speculative_tokens", NUM_DRAFTED)
        arguments["speculative_config"] = {
            **speculative_config(Path(case["head"]), method=case["method"], num_speculative_tokens=num_drafted),
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
            "cached": [output.num_cached_tokens for output in outputs],
            "accepted": [_accepted(completion) for completion in completions],
        }
    finally:
        llm.llm_engine.engine_core.shutdown()


def _accepted(completion: Any) -> list[int] | None:
    metrics = getattr(completion, "spec_decode_metrics", None)
    return None if metrics is None else list(metrics.per_step_accepted)


def _release() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
