"""Distillation losses of a head on token distributions, and the reference that they are tested against."""

from eyas.train.losses.chunked import chunked_distillation
from eyas.train.losses.dense import dense_distillation
from eyas.train.losses.rows import DistillationResult, JudgedBy, StepRows
from eyas.train.losses.terms import TokenLoss, require_terms

__all__ = [
    "DistillationResult",
    "JudgedBy",
    "StepRows",
    "TokenLoss",
    "chunked_distillation",
    "dense_distillation",
    "require_terms",
]
