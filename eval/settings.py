"""What a scoring session is asked to do, as plain values in groups that travel together.

The recipe's `score` section is turned into these by `eyas.recipes.score_stage`; nothing here reads a recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.eval.conversations import Turns
from eyas.eval.records import Protocol


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured: the target, the head at each draft length, other arms by name, and the schedule or not.

    `others` maps a name to a `speculative_config`; an empty one is plain decoding under another name (a control), and
    the key `slowed_by` in it slows its engine down by that share of each step (a calibration).
    """

    target_dir: Path
    trust_remote_code: bool
    head_dir: Path | None
    method: str | None
    draft_lengths: tuple[int, ...]
    others: Mapping[str, Mapping[str, Any]]
    schedule: bool


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """A file of prompts; lines of another split than `split` are left out.

    `requests`: at most this many prompts or conversations; None = as many as the largest batch size needs.
    """

    path: Path
    split: str
    turns: Turns
    requests: int | None


@dataclass(frozen=True, kw_only=True)
class PromptSources:
    """Where the measured prompts come from, and the options of the chat template that renders them.

    With `mix` one more dataset is drawn from all the others.
    """

    heldout_path: Path
    heldout_turns: Turns
    humaneval_requests: int
    sets: Mapping[str, PromptSet]
    mix: bool
    template_options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Load:
    """How the prompts are served: batch sizes, sampling, answer length, and how many prompts a cell wants.

    `set_batch_sizes` is for HumanEval, the prompt sets and the mix. With `fixed_length` the end of an answer is ignored, and the
    datasets carry a label that says so.
    """

    batch_sizes: tuple[int, ...]
    set_batch_sizes: tuple[int, ...]
    temperatures: tuple[float, ...]
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    fixed_length: bool
    requests_per_batch_slot: int
    min_requests: int

    def wanted(self, batch_size: int) -> int:
        """Independent prompts that a cell of this batch size needs; a conversation is one, however many turns it has."""
        return max(self.min_requests, self.requests_per_batch_slot * batch_size)


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """How often: starts (of each arm, or of each pair), blocks of a cell in a start, and minutes to fill, if any.

    With `budget_minutes` a first round of starts tells how long one takes; then as many follow as fit, `starts_per_arm`
    at least.
    """

    protocol: Protocol
    starts_per_arm: int
    blocks: int
    budget_minutes: float | None


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Settings that all arms share, and the limits of an engine process.

    `threads` and `kv_cache_gib` are of CPUs; `gpu_memory_utilization` is of GPUs, None = vLLM's default, and is shared
    between two engines that are loaded side by side.
    """

    dtype: str
    max_model_len: int
    enforce_eager: bool
    prefix_caching: bool
    threads: int
    kv_cache_gib: int
    timeout_s: float
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None


@dataclass(frozen=True, kw_only=True)
class LosslessSettings:
    """The losslessness ladder: how many prompts and sampled answers, of which length, in which precision. 0 requests = off."""

    requests: int
    max_tokens: int
    dtype: str
    samples: int


@dataclass(frozen=True, kw_only=True)
class OpenLoopSettings:
    """Load by arrival rate on a real server: requests a second, how many, and the service levels. No rates = off."""

    rates: tuple[float, ...]
    requests: int
    max_connections: int
    slo_ttft_ms: float
    slo_tpot_ms: float


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What is measured beside the grid."""

    lossless: LosslessSettings
    time_split: bool
    open_loop: OpenLoopSettings
