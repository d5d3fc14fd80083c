"""Where hidden states leave vLLM: a KV connector that hands each finished request's states to a writer of ours.

vLLM's `extract_hidden_states` method keeps the states of the layers asked for in its KV cache, in blocks as keys and
values are, so they survive chunked prefill and are made anew with everything else when a request is preempted.
Under tensor parallelism every rank holds all of them and rank 0 writes. What vLLM ships writes one file a request
through CUDA streams; this subclass keeps how it finds and checks the cache, and replaces what happens at the end of a
request: the states go to a `StateWriter`, which encodes them into shards.

A request says what it is in `kv_transfer_params={"document": {...}}` (vLLM adds eight random characters to the id of
every request, and an id carries no structure); requests without one are not kept. Blocks stay allocated until the
writer has read them, so a slow writer slows the engine down instead of filling the memory.

Only vLLM imports this module, by its name, inside an engine process.

Shapes: S states of a request, N layers asked for, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor

from eyas.train.features.states import StateWriter, open_writer


class OneTokenScheduler(Scheduler):
    """A scheduler that never runs the tokens which the method `extract_hidden_states` hands back as drafts.

    They are the sampled tokens once more, so they are wrong unless a token repeats itself, and checking them makes every
    decoding step twice as wide. Without drafts an answer is also sampled exactly as without the method.
    """

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Keep no draft."""


class StatesWorker:
    """What the workers of an engine that keeps states can do beyond vLLM's own (`worker_extension_cls`)."""

    model_runner: Any
    vllm_config: VllmConfig
    device: torch.device

    def sample_with_min_p(self) -> None:
        """Add the part of sampling that vLLM leaves out when a speculative method is set."""
        if self.vllm_config.use_v2_model_runner:
            return  # it has min_p in its sampler
        pinned = is_pin_memory_available()
        processor = MinPLogitsProcessor(self.vllm_config, self.device, pinned)
        self.model_runner.input_batch.logitsprocs.argmax_invariant.append(processor)


@dataclass
class FinishedRequest:
    """A request whose states are complete in the cache.

    Attributes:
        document: what its sender said it is.
        token_ids: prompt and completion. All but the last, which was never an input, have a state.
        block_ids: its blocks of the hidden-state group, in order.
    """

    request_id: str
    document: dict[str, Any]
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class FinishedRequests(KVConnectorMetadata):
    """What the scheduler's side tells the worker's side with each step."""

    requests: list[FinishedRequest] = field(default_factory=list)


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """Hands the states of finished requests to the writer that `kv_connector_extra_config` describes."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _require_drafter_as_long_as_the_target(vllm_config)
        self._finished: list[FinishedRequest] = []  # scheduler's side
        self._writer: StateWriter | None = None  # worker's side, from here on
        self._background: _Background | None = None
        self._writing: dict[str, Future[None]] = {}

    # Called in the scheduler's process.

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:  # noqa: ARG002
        """The requests that finished since the last step."""
        finished, self._finished = self._finished, []
        return FinishedRequests(requests=finished)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note a finished request; True keeps its blocks until the worker's side has read them."""
        document = (request.kv_transfer_params or {}).get("document")
        if document is None:
            return False, None
        token_ids = list(request.all_token_ids)
        if request.num_computed_tokens < len(token_ids) - 1:
            return False, None  # ended from outside, before its states were complete
        assert len(block_ids) * self._block_size >= len(token_ids) - 1, "the blocks of a request end before its tokens"
        self._finished.append(FinishedRequest(request.request_id, document, token_ids, list(block_ids)))
        return True, None

    # Called in the worker's process, which holds the states.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find the cache of the hidden states, and open the writer on the rank that writes."""
        super().register_kv_caches(kv_caches)
        assert self._kv_cache is not None
        if self._is_tp_rank_zero:
            self._background = _Background(self._kv_cache.device)
            self._writer = open_writer(self._kv_transfer_config.kv_connector_extra_config, device=self._kv_cache.device)

    def wait_for_save(self) -> None:
        """Nothing is saved during a forward pass."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Begin to write what has finished, and name the requests whose blocks are free again.

        Called once a step. Whatever the writer raised is raised here and ends the engine.
        """
        if self._background is None:
            return None, None
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, FinishedRequests)
            for request in metadata.requests:
                self._writing[request.request_id] = self._background.run(lambda request=request: self._write(request))
        written = {request_id for request_id, future in self._writing.items() if future.done()}
        for request_id in written:
            self._writing.pop(request_id).result()
        return written or None, None

    def _write(self, request: FinishedRequest) -> None:
        assert self._kv_cache is not None and self._writer is not None
        num_states = len(request.token_ids) - 1
        slots_S = _slots(request.block_ids, block_size=self._block_size)[:num_states]
        states_SNH = extract_from_kv_cache(self._kv_cache, slots_S.to(self._kv_cache.device), num_states)
        self._writer.add(request.document, token_ids=request.token_ids, states_SNH=states_SNH)


class _Background:
    """Runs the writer's work: at once on CPU, where all cores are the engine's anyway; on CUDA in one thread and one
    stream of its own, so that copies to the host and the disk do not hold the forward passes up.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eyas-states")

    def run(self, work: Callable[[], None]) -> Future[None]:
        """Start `work`; what it reads must have been written by kernels that are queued already."""
        if self._stream is None:
            future: Future[None] = Future()
            with torch.inference_mode():
                work()
            future.set_result(None)
            return future
        written = torch.cuda.Event()
        written.record(torch.cuda.current_stream(self._device))
        return self._thread.submit(self._run, work, written)

    def _run(self, work: Callable[[], None], written: torch.cuda.Event) -> None:
        assert self._stream is not None
        # Everything here is queued on this stream, and a copy to ordinary memory waits for this stream only.
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._stream.wait_event(written)
            work()
            self._stream.synchronize()


def _slots(block_ids: list[int], *, block_size: int) -> Tensor:
    """Positions in the cache of a request's tokens, in order."""
    return (torch.tensor(block_ids, dtype=torch.long)[:, None] * block_size + torch.arange(block_size)).flatten()


def _require_drafter_as_long_as_the_target(vllm_config: VllmConfig) -> None:
    """vLLM keeps no states in a step with a sequence longer than the drafter takes, and says nothing."""
    assert vllm_config.speculative_config is not None
    drafter = vllm_config.speculative_config.draft_model_config.max_model_len
    if drafter is not None and drafter < vllm_config.model_config.max_model_len:
        raise ValueError(
            f"vLLM would keep hidden states up to {drafter} tokens only, and max_model_len is "
            f"{vllm_config.model_config.max_model_len}; lower data.max_length or set features.backend=hf"
        )
