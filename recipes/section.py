"""What every section of a recipe is: a frozen, closed, strict pydantic model; and the field types sections share."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_FLOAT_TEXT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def _read_float_text(value: Any) -> Any:
    """Turn text such as "2e-4" into the float it was meant to be; leave everything else to the type check."""
    return float(value) if isinstance(value, str) and _FLOAT_TEXT.fullmatch(value) else value


Number = Annotated[float, BeforeValidator(_read_float_text)]
Threads = Annotated[int, Field(gt=0)] | None
DType = Literal["bfloat16", "float16", "float32"]


class Section(BaseModel):
    """Base of every section: immutable, closed, strict, without NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
