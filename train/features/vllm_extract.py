"""The extract stage with vLLM: the engine reads every document as a prompt and its states fill the feature store.

Run as `python -m eyas.train.features.vllm_extract PLAN.json`, a process of its own as in train/data/generate.py. The
store is that of the other backend (extract.py): the same shards of the same documents, so either goes on where the other
was killed. `batch_tokens` tokens are computed at a time, of as many documents as they hold: the engine pads nothing, and
cuts a document that is longer into pieces.

A shard's claim is held from its first request until its file is there. What the engine hands over goes through the
connector (connector.py) to a `DocumentWriter` (states.py) in the process that holds the states.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eyas.heads.files import read_json, write_json
from eyas.heads.serving import end_with_parent, engine_environment, require_vllm
from eyas.train.data.tokens import SPLITS, Tokens
from eyas.train.features.encoding import StoreForm
from eyas.train.features.extract import finished_counts, open_store, planned_identity
from eyas.train.features.generated import GeneratedStates
from eyas.train.features.identity import StoreIdentity
from eyas.train.features.shards import ShardWriter, claim, shard_name, shard_path
from eyas.train.features.states import drain, keep_states, states_arguments

ERROR = re.compile(r"(?:ValueError: |Value error, )(.*)")
TOO_LONG = "max_model_len"


def extract_vllm(
    out_dir: Path,
    *,
    tokens_dir: Path,
    target_dir: Path,
    capture_layers: Sequence[int] | None,
    dtype: str,
    form: StoreForm,
    batch_tokens: int,
    batch_size: int,
    threads: int,
    kv_cache_gib: int,
    tensor_parallel_size: int,
    gpu_memory_utilization: float,
    trust_remote_code: bool,
    generated_states: Path | None,
) -> dict[str, int]:
    """Write the feature store of both splits into `out_dir`.

    Args:
        capture_layers, dtype, form, generated_states: as in `extract`.
        batch_tokens: tokens of one forward pass. batch_size: documents that the engine works on at a time.
        threads, kv_cache_gib: of the engine, on CPU only.
        tensor_parallel_size: devices that the target is split over.
        gpu_memory_utilization: share of a GPU's memory that the engine takes; encoding works in the rest.

    Returns:
        As `extract`.

    Raises:
        ValueError: vLLM is missing, or as in `extract`; the message of what failed in the engine names its log.
    """
    require_vllm()
    identity = planned_identity(
        target_dir,
        tokens_dir=tokens_dir,
        capture_layers=capture_layers,
        dtype=dtype,
        form=form,
        trust_remote_code=trust_remote_code,
    )
    tokens = {split: Tokens(tokens_dir, split=split) for split in SPLITS}
    plans = open_store(out_dir, identity=identity, tokens=tokens, batch_tokens=batch_tokens)
    counts = {"padding_tokens": 0, "from_generation": 0}
    if any(plans.values()):
        longest = max(int(tokens[split].lengths.max()) for split in SPLITS if len(tokens[split]))
        plan = {
            "store": str(out_dir),
            "tokens_dir": str(tokens_dir),
            "generated_states": None if generated_states is None else str(generated_states),
            "identity": identity.as_json(),
            "shards": plans,
            "batch_size": batch_size,
            "engine": {
                "model": str(target_dir),
                "dtype": dtype,
                # The engine wants room for one token more than a document has, because it samples one.
                "max_model_len": longest + 1,
                "max_num_seqs": batch_size,
                "max_num_batched_tokens": max(batch_tokens, batch_size),
                "tensor_parallel_size": tensor_parallel_size,
                "gpu_memory_utilization": gpu_memory_utilization,
                "trust_remote_code": trust_remote_code,
            },
        }
        counts |= _run_worker(plan, environment=engine_environment(threads=threads, kv_cache_gib=kv_cache_gib))
    return finished_counts(out_dir, tokens) | counts


def _run_worker(plan: dict[str, Any], *, environment: dict[str, str]) -> dict[str, int]:
    store = Path(plan["store"])
    # Several processes may fill one store.
    path = store / f"vllm-{os.getpid()}.plan.json"
    log = store / f"vllm-{os.getpid()}.log"
    write_json(path, plan)
    with log.open("a") as log_stream:
        worker = subprocess.Popen(
            [sys.executable, "-m", "eyas.train.features.vllm_extract", str(path)],
            env=environment,
            stderr=log_stream,
            start_new_session=True,
        )
        try:
            code = worker.wait()
        except BaseException:
            worker.terminate()
            worker.wait()
            raise
    if code != 0:
        raise ValueError(f"the extraction in vLLM failed with exit code {code}{_last_error(log)}; its log is {log}")
    counts = read_json(_counts_path(path))
    for done in (path, _counts_path(path), log):
        done.unlink()
    return counts


def _counts_path(plan: Path) -> Path:
    return plan.with_suffix(".counts.json")


def _last_error(log: Path) -> str:
    """What the last ValueError in the log says: those of ours, and most of vLLM's."""
    errors = ERROR.findall(log.read_text(encoding="utf-8", errors="replace"))
    if not errors:
        return ""
    mend = ""
    if TOO_LONG in errors[-1]:
        mend = "; the engine needs a position more than the longest document has tokens: lower data.max_length, or set features.backend=hf"
    return f": {errors[-1]}{mend}"


def main(plan_path: Path) -> None:
    """The worker's body."""
    end_with_parent()
    plan = read_json(plan_path)
    engine = _start_engine(plan)
    extraction = _Extraction(plan, engine=engine)
    extraction.run()
    write_json(_counts_path(plan_path), dict(extraction.counts))
    engine.engine_core.shutdown()


def _start_engine(plan: dict[str, Any]) -> Any:
    from vllm import LLM

    settings = {
        "writer": "documents",
        "store": plan["store"],
        "tokens_dir": plan["tokens_dir"],
        "target_dir": plan["engine"]["model"],
        "identity": plan["identity"],
        "trust_remote_code": plan["engine"]["trust_remote_code"],
    }
    # Prompts only: graphs of decoding steps would be captured for nothing.
    fixed = {"skip_tokenizer_init": True, "enforce_eager": True}
    return LLM(**plan["engine"], **fixed, **states_arguments(settings)).llm_engine


@dataclass
class _OpenShard:
    """A shard that is being made: what of it the engine has not answered yet, and its claims."""

    path: Path
    unanswered: int
    held: ExitStack


class _Extraction:
    """Keeps the engine busy with the documents of one shard after the other."""

    def __init__(self, plan: dict[str, Any], *, engine: Any) -> None:
        self.engine, self.store, self.batch_size = engine, Path(plan["store"]), plan["batch_size"]
        self.identity = StoreIdentity.from_json(plan["identity"])
        self.plans: dict[str, list[list[int]]] = plan["shards"]
        self.tokens = {split: Tokens(Path(plan["tokens_dir"]), split=split) for split in SPLITS}
        self.generated = None
        if plan["generated_states"] is not None:
            self.generated = GeneratedStates(Path(plan["generated_states"]), identity=self.identity)
        self.counts: Counter[str] = Counter()
        self.running = 0
        self._open: list[_OpenShard] = []
        self._shard_of: dict[str, _OpenShard] = {}

    def run(self) -> None:
        """Make every shard of the plan; those that others hold are looked at again at the end."""
        total = sum(int(self.tokens[split].lengths[shard].sum()) for split, shard in self._shards())
        skipped: list[tuple[str, list[int]]] = []
        with tqdm(total=total, unit="tok", desc="extract", file=sys.stdout, disable=None) as progress:
            for split, documents in self._shards():
                if not self._make(split, documents, progress=progress, wait=False):
                    skipped.append((split, documents))
            self._finish()
            for split, documents in skipped:
                self._make(split, documents, progress=progress, wait=True)
                self._finish()  # before waiting for others, who may wait for what is held here

    def _shards(self) -> Iterator[tuple[str, list[int]]]:
        return ((split, documents) for split in self.plans for documents in self.plans[split])

    def _make(self, split: str, documents: list[int], *, progress: tqdm, wait: bool) -> bool:
        """Hand a shard's documents to the engine unless it is there; False when another process is at it."""
        with ExitStack() as held:
            if not held.enter_context(claim(self.store, split=split, name=shard_name(documents), wait=wait)):
                return False
            lengths = self.tokens[split].lengths
            if shard_path(self.store, split=split, name=shard_name(documents)).is_file():
                progress.update(int(lengths[documents].sum()))
                return True
            left = self._without_generated(split, documents, held=held, wait=wait, progress=progress)
            if left is None:
                return False
            if left:
                path = shard_path(self.store, split=split, name=shard_name(left))
                self._open.append(_OpenShard(path, len(left), held.pop_all()))
                for index in left:
                    self._add(split, index, shard=self._open[-1], left=left)
                    progress.update(int(lengths[index]))
        return True

    def _without_generated(
        self, split: str, documents: list[int], *, held: ExitStack, wait: bool, progress: tqdm
    ) -> list[int] | None:
        """Documents that generation left no states of; those it did become a shard of their own.

        None: another process, which began when that shard was there already, is at the rest.
        """
        if self.generated is None:
            return documents
        found = {
            index: document
            for index in documents
            if (document := self.generated.find(*self.tokens[split][index])) is not None
        }
        left = [index for index in documents if index not in found]
        if not found:
            return left
        if left and left[0] != documents[0]:
            if not held.enter_context(claim(self.store, split=split, name=shard_name(left), wait=wait)):
                return None
            if shard_path(self.store, split=split, name=shard_name(left)).is_file():
                left = []
        ShardWriter(self.store, identity=self.identity, split=split).write(shard_name(list(found)), [*found.items()])
        self.counts["from_generation"] += len(found)
        progress.update(sum(document.num_tokens for document in found.values()))
        return left

    def _add(self, split: str, index: int, *, shard: _OpenShard, left: list[int]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        while self.running >= self.batch_size:
            self._step()
        document = {"split": split, "shard": shard_name(left), "index": index, "of": len(left)}
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=keep_states(document),
        )
        request_id = f"{split}-{index}"
        token_ids_T, _ = self.tokens[split][index]
        self.engine.add_request(request_id, {"prompt_token_ids": token_ids_T.tolist()}, parameters)
        self._shard_of[request_id] = shard
        self.running += 1

    def _step(self) -> None:
        for output in self.engine.step():
            assert output.finished
            self._shard_of.pop(output.request_id).unanswered -= 1
            self.running -= 1
        self._let_go()

    def _let_go(self) -> None:
        """Give up the claims of shards that are written."""
        for shard in [shard for shard in self._open if not shard.unanswered and shard.path.is_file()]:
            shard.held.close()
            self._open.remove(shard)

    def _finish(self) -> None:
        while self.running:
            self._step()
        drain(self.engine)
        self._let_go()
        assert not self._open, "every document was answered, and a shard is not there"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
