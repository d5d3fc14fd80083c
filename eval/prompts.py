"""The session's prompts: which are measured in which cell, and the one that warms engines up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eyas.eval.mix import mix_workload
from eyas.eval.plan import CellPlan
from eyas.eval.settings import Load, PromptSources
from eyas.eval.workload import (
    HELDOUT,
    Request,
    Workload,
    load_heldout,
    load_humaneval,
    load_prompt_set,
    of_first_units,
    units,
)
from eyas.heads.chat import TargetChat

FIXED_LENGTH = "-fixed-length"
"""Ends the dataset names of sessions that ignore the end of an answer: such figures must not pass for users' answers."""


@dataclass(frozen=True)
class Prompts:
    """The session's prompts, held-out ones first.

    The first held-out prompt (or conversation, with all its turns) warms engines up and is never measured. It is the first
    so that it stays the same however many prompts are loaded.
    """

    workloads: list[Workload]

    @property
    def heldout(self) -> list[Request]:
        """The measured held-out prompts."""
        return self.measured(self.workloads[0])

    @property
    def warmup(self) -> list[int]:
        return self.workloads[0].requests[0].token_ids

    def measured(self, workload: Workload) -> list[Request]:
        if workload.dataset != HELDOUT:
            return workload.requests
        return [request for request in workload.requests if request.unit != workload.requests[0].unit]

    def cells(self, load: Load) -> list[CellPlan]:
        """A cell per dataset, temperature and batch size, each on the dataset's first prompts or conversations."""
        return [
            _cell(workload.dataset, self.measured(workload), load, temperature=temperature, batch_size=size)
            for workload in self.workloads
            for temperature in load.temperatures
            for size in (load.batch_sizes if workload.dataset == HELDOUT else load.set_batch_sizes)
        ]

    def describe(self) -> dict[str, dict[str, Any]]:
        """Per dataset: where it comes from, how many prompts there are, their hash, and what was left out."""
        return {
            workload.dataset: {
                "file": workload.source.file,
                "file_sha256": workload.source.sha256,
                "split": workload.source.split,
                "turns": workload.turns,
                "prompts": len(units(self.measured(workload))),
                "requests": len(self.measured(workload)),
                "sha256": replace(workload, requests=self.measured(workload)).digest,
                **workload.left_out,
            }
            for workload in self.workloads
        }


def _cell(dataset: str, requests: Sequence[Request], load: Load, *, temperature: float, batch_size: int) -> CellPlan:
    name = dataset + FIXED_LENGTH if load.fixed_length else dataset
    return CellPlan(
        dataset=name,
        batch_size=batch_size,
        temperature=temperature,
        max_tokens=load.max_tokens,
        seed=load.seed,
        requests=[replace(request, dataset=name) for request in of_first_units(requests, load.wanted(batch_size))],
        top_p=load.top_p,
        top_k=load.top_k,
        ignore_eos=load.fixed_length,
    )


def load_prompts(
    chat: TargetChat, *, sources: PromptSources, load: Load, at_least: int, max_prompt_tokens: int
) -> Prompts:
    """Load what the cells need, no prompt twice, and one held-out prompt (or conversation) more for warm-up.

    Args:
        chat: the target's tokenizer and chat template.
        sources: where prompts come from.
        load: the batch sizes, which say how many are needed.
        at_least: held-out prompts that another part of the session needs.
        max_prompt_tokens: longer prompts are left out and counted.

    Raises:
        ValueError: a file is missing or broken, or there are fewer than two held-out prompts.
    """
    heldout = load_heldout(
        sources.heldout_path,
        chat,
        limit=max(at_least, *(load.wanted(size) for size in load.batch_sizes)) + 1,
        max_prompt_tokens=max_prompt_tokens,
        turns=sources.heldout_turns,
    )
    if len(units(heldout.requests)) < 2:
        raise ValueError(
            "scoring needs at least 2 held-out prompts, one of them for warm-up; "
            "raise data.heldout_share or give more held-out conversations"
        )
    workloads = [heldout]
    if sources.humaneval_requests:
        workloads.append(load_humaneval(chat, limit=sources.humaneval_requests, max_prompt_tokens=max_prompt_tokens))
    needed = max(load.wanted(size) for size in load.set_batch_sizes)
    for name, source in sources.sets.items():
        workloads.append(
            load_prompt_set(
                name,
                source.path,
                chat,
                limit=min(needed, source.requests or needed),
                max_prompt_tokens=max_prompt_tokens,
                turns=source.turns,
                split=source.split,
            )
        )
    if sources.mix:
        measured = {each.dataset: Prompts(workloads).measured(each) for each in workloads}
        workloads.append(mix_workload(measured, limit=needed, seed=load.seed))
    return Prompts(workloads)
