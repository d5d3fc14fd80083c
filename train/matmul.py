"""Matrix products of half-precision matrices with a float32 result.

On CUDA the product itself writes float32 (`out_dtype` of `torch.mm`), so nothing is rounded to half precision and no
pass converts it. The CPU has no such kernel: there the product is rounded and then widened. Not for use under autocast,
which would round wide matrices.

Shapes: M, N and K are those of any matrix product.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of values of this type are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide_product(a_MK: Tensor, b_KN: Tensor, *, out_MN: Tensor | None = None) -> Tensor:
    """a b in `wide_dtype`, written to `out_MN` if given."""
    wide = wide_dtype(a_MK.dtype)
    if a_MK.dtype == wide:
        return torch.mm(a_MK, b_KN, out=out_MN)
    if a_MK.is_cuda:
        return torch.mm(a_MK, b_KN, out_dtype=wide, out=out_MN)
    product_MN = torch.mm(a_MK, b_KN)
    return product_MN.to(wide) if out_MN is None else out_MN.copy_(product_MN)


def add_product(total_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """Add a b to `total_MN`, which is of `wide_dtype`."""
    if a_MK.dtype == total_MN.dtype:
        total_MN.addmm_(a_MK, b_KN)
    else:
        # `torch.addmm` with `out_dtype` would spare the sum, but not every version takes a wide total with narrow factors.
        total_MN.add_(wide_product(a_MK, b_KN) if a_MK.is_cuda else torch.mm(a_MK, b_KN))
