"""The `score` section of a recipe: what is measured in real vLLM, on which prompts, how often, and what is checked."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from eyas.recipes.section import DType, Number, Section, Threads

HUMANEVAL_SIZE = 164
PRESETS = ("heldout", "humaneval", "mix")
"""Datasets that eyas names itself."""

_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]*")

Turns = Literal["first", "all"]
Sizes = tuple[Annotated[int, Field(ge=1)], ...]


class PromptSet(Section):
    """A file of prompts to measure beside the held-out ones."""

    path: str = Field(min_length=1, description="JSONL(.gz) of messages, prompt or turns; see docs/evaluation.md")
    split: str = Field(
        default="heldout", min_length=1, description="lines that name another split are left out, counted"
    )
    turns: Turns = Field(default="first", description="of each conversation: the first user turn, or all with history")
    requests: int | None = Field(
        default=None, ge=1, description="prompts or conversations at most; null = what the batch sizes need"
    )


class Lossless(Section):
    """Does drafting change what comes out? The ladder from the sampler to whole answers."""

    requests: int = Field(default=32, ge=0, description="prompts answered with and without drafting; 0 = no check")
    max_tokens: int = Field(default=128, gt=0, description="answer tokens of one compared request")
    dtype: DType = Field(default="float32", description="of the engines whose outputs are compared")
    samples: int = Field(
        default=2000, ge=0, description="sampled answers per arm, to the two shortest prompts; 0 = greedy only"
    )


class OpenLoop(Section):
    """Load by arrival rate on a real `vllm serve`, as users bring it."""

    rates: tuple[Annotated[Number, Field(gt=0)], ...] = Field(
        default=(), strict=False, description="requests per second (Poisson), up to saturation; [] = off"
    )
    requests: int = Field(default=120, ge=1, description="requests at each rate; 100 prompts are needed for a p99")
    max_connections: int = Field(
        default=64, ge=1, description="requests in flight at most; later ones wait and are counted"
    )
    slo_ttft_ms: Number = Field(default=2000.0, gt=0, description="goodput: time to the first token at most")
    slo_tpot_ms: Number = Field(default=200.0, gt=0, description="goodput: time per output token at most")


class Score(Section):
    """Measurement in real vLLM: plain decoding against the head, and against other ways of drafting."""

    head: str | None = Field(
        default=None, min_length=1, description="measure this head directory as it is; nothing is trained or exported"
    )
    draft_lengths: Sizes = Field(
        default=(3, 1),
        strict=False,
        description="drafted tokens k to measure the head at, the main one first; [] = no head, only arms",
    )
    arms: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="other arms by name, each a speculative_config of vLLM (ngram, draft_model, suffix, ...)",
    )
    only: str | None = Field(
        default=None,
        description="this arm alone beside plain decoding, in a directory of its own; set by `eyas score --arm`",
    )
    schedule: bool = Field(default=False, description="choose k by batch size from the grid and measure it as an arm")
    protocol: Literal["starts", "side-by-side"] = Field(
        default="starts", description="one engine at a time in alternating fresh processes, or two loaded at once"
    )
    starts_per_arm: int = Field(default=3, ge=1, description="fresh engine processes per arm, or per pair of arms")
    budget_minutes: Number | None = Field(
        default=None, gt=0, description="as many starts of the grid as fit, starts_per_arm at least; null = just those"
    )
    blocks: int = Field(default=1, ge=1, description="times that one process measures each cell")
    batch_sizes: Sizes = Field(
        default=(1, 2, 4, 8, 16, 32), strict=False, min_length=1, description="concurrent sequences to measure at"
    )
    set_batch_sizes: Sizes | None = Field(
        default=None, strict=False, min_length=1, description="for HumanEval, prompt_sets and mix; null = batch_sizes"
    )
    temperatures: tuple[Annotated[Number, Field(ge=0)], ...] = Field(
        default=(0.0,), strict=False, min_length=1, description="sampling temperatures to measure at; 0 = greedy"
    )
    top_p: Number = Field(default=1.0, gt=0, le=1, description="sampling cut by summed probability; 1 = none")
    top_k: int = Field(default=0, ge=0, description="sampling cut by rank; 0 = none")
    seed: int = Field(default=0, ge=0, description="of sampling; request i is sampled with seed + i")
    heldout_turns: Turns = Field(default="first", description="of held-out conversations: first user turn, or all")
    humaneval_requests: int = Field(default=32, ge=0, le=HUMANEVAL_SIZE, description="HumanEval prompts; 0 = none")
    prompt_sets: dict[str, PromptSet] = Field(
        default_factory=dict, description="more prompts by name: path, split, turns, requests"
    )
    mix: bool = Field(
        default=False, description="one more dataset: prompts of all the others in equal shares, drawn by seed"
    )
    template_options: dict[str, Any] | None = Field(
        default=None, description="of the chat template, such as enable_thinking; null = data.template_options"
    )
    requests_per_batch_slot: int = Field(
        default=2, ge=1, description="prompts (a conversation is one) per concurrent sequence"
    )
    min_requests: int = Field(default=12, ge=1, description="prompts (a conversation is one) of a cell at least")
    max_tokens: int = Field(default=64, gt=0, description="answer tokens of one timed request at most")
    fixed_length: bool = Field(
        default=False, description="ignore the end of answers; figures carry a label of their own"
    )
    prefix_caching: bool = Field(default=False, description="prefix cache of the engines, emptied before every block")
    dtype: DType = Field(default="bfloat16", description="of the timed engines")
    max_model_len: int = Field(default=1024, gt=0, description="longest prompt plus answer, in tokens")
    enforce_eager: bool = Field(default=True, description="no graph capture or compilation in vLLM")
    threads: Threads = Field(default=None, description="OpenMP threads of vLLM on CPU; null = all cores")
    kv_cache_gib: int = Field(default=2, ge=1, description="KV cache of vLLM on CPU, in GiB")
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs that the target is split over, in every arm")
    gpu_memory_utilization: Number | None = Field(
        default=None, gt=0, le=1, description="share of a GPU's memory; null = vLLM's default; halved side by side"
    )
    timeout_s: int = Field(default=900, gt=0, description="seconds after which one engine process counts as hung")
    time_split: bool = Field(default=True, description="one more start per arm that times the parts of a step")
    lossless: Lossless = Lossless()
    open_loop: OpenLoop = OpenLoop()

    @field_validator("draft_lengths", "batch_sizes", "set_batch_sizes", "temperatures")
    @classmethod
    def _check_distinct(cls, values: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if values is not None and len(set(values)) != len(values):
            raise ValueError("values must be distinct")
        return values

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for name in self.prompt_sets:
            if name in PRESETS or not _SET_NAME.fullmatch(name):
                raise ValueError(
                    f"prompt_sets.{name}: choose a name of letters, digits, _ and . that is not {' or '.join(PRESETS)}"
                )
        for name, config in self.arms.items():
            _check_arm(name, config)
        return self

    @model_validator(mode="after")
    def _check_mix(self) -> Self:
        if self.mix and not self.humaneval_requests and not self.prompt_sets:
            raise ValueError(
                "mix: is drawn from several sets; give humaneval_requests or prompt_sets, or set it to false"
            )
        return self

    @model_validator(mode="after")
    def _check_arms(self) -> Self:
        if not self.draft_lengths and not self.arms:
            raise ValueError("draft_lengths: without a head there must be other arms; name some in score.arms")
        if self.schedule and not self.draft_lengths:
            raise ValueError("schedule: is chosen from the head's draft lengths; give some or set it to false")
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        for field, tokens in (("max_tokens", self.max_tokens), ("lossless.max_tokens", self.lossless.max_tokens)):
            if tokens >= self.max_model_len:
                raise ValueError(
                    f"{field} {tokens} leaves no room for a prompt in max_model_len {self.max_model_len}; "
                    "lower it or raise max_model_len"
                )
        return self

    @property
    def arm_names(self) -> list[str]:
        """All arms but plain decoding, in the order in which tasks of an array take them."""
        return [f"k{length}" for length in self.draft_lengths] + list(self.arms)

    @property
    def main_draft_length(self) -> int:
        """The draft length that an exported head names as its own."""
        return self.draft_lengths[0] if self.draft_lengths else 3


def _check_arm(name: str, config: dict[str, Any]) -> None:
    """Refuse an arm whose draft length nobody could know. Everything else about it vLLM checks itself."""
    from eyas.eval.arms import SLOWED_BY, require_free_name

    try:
        require_free_name(name)
    except ValueError as error:
        raise ValueError(f"arms.{name}: {str(error).partition(': ')[2]}") from error
    slowed = config.get(SLOWED_BY, 0.0)
    if isinstance(slowed, bool) or not isinstance(slowed, int | float) or slowed < 0:
        raise ValueError(f"arms.{name}.{SLOWED_BY}: is a share of each step's time, such as 0.1")
    served = config.keys() - {SLOWED_BY}
    if served and "method" not in served:
        raise ValueError(f"arms.{name}: a speculative_config of vLLM names its method, such as ngram or draft_model")
