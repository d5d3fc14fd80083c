"""The cost model: seconds of one decode step as a function of the running batch, for every arm at once.

Three forms are tried. With B sequences and chains of k drafted tokens (k = 0 for plain decoding):

- *linear*: T = F + d_k + c (k+1) B + s B. F is the step's fixed cost, c that of one more token, s that of one more
  sequence (its context), d_k that of drafting k tokens. The form of SmartSpec (arXiv 2406.14066); break_even.py has the
  crossing in closed form.
- *roofline*: the same, but the first N* tokens of a step are free: c max(0, (k+1) B - N*). A processor that waits for
  weights can verify a few tokens at no cost. N* is one of the token counts measured, the one that fits best.
- *piecewise*: each arm's own straight lines between the batch sizes it was fitted on, continued beyond the last one.

Method arms that are no head (n-gram, draft model, suffix) do not verify k + 1 tokens in every step, so in the first
two forms each has a fixed cost and a cost per sequence of its own.

Some batch sizes are held out by rule and never enter a fit. The form is chosen among the fitted sizes alone, by leaving
them out in turn, so the error at the held-out sizes is that of a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
FormName = Literal["linear", "roofline", "piecewise"]
FORMS: tuple[FormName, ...] = ("linear", "roofline", "piecewise")
"""Simplest first."""

HOLD_OUT_RULE = (
    "of the measured batch sizes in ascending order every second one, beginning with the second, is held out; "
    "with fewer than three sizes none is"
)
WORTH = 0.005
"""By this much relative error a form must be better than a simpler one to be chosen instead."""
CHOICE_RULE = (
    "the form with the smallest mean relative error when each fitted batch size but the smallest is left out in turn, and of "
    f"forms that are equal within {WORTH:.1%} the simplest; the held-out sizes have no part in it"
)
SMALLEST_SECONDS = 1e-9
"""A line continued too far may predict a negative time; no step is shorter than this."""


class Point(NamedTuple):
    """A measured step time. `draft_length` is None for an arm that has a line of its own."""

    arm: str
    draft_length: int | None
    batch_size: int
    seconds: float


class Fit(Protocol):
    """A fitted form."""

    @property
    def form(self) -> FormName: ...

    def seconds(self, arm: str, batch_sizes: Sequence[float] | Floats) -> Floats:
        """Predicted step times of `arm`."""
        ...

    def constants(self) -> dict[str, float] | None:
        """The form's constants by name, in seconds (N* in tokens); None where the points do not tell them apart."""
        ...


def held_out(batch_sizes: Sequence[int]) -> list[int]:
    """The batch sizes that `HOLD_OUT_RULE` keeps from the fit."""
    ordered = sorted(batch_sizes)
    return ordered[1::2] if len(ordered) >= 3 else []


def fit(points: Sequence[Point], *, form: FormName) -> Fit:
    """Fit one form to measured step times; every point counts by its relative error."""
    return fit_many(points, np.array([[point.seconds for point in points]]), form=form)[0]


def fit_many(points: Sequence[Point], seconds_DP: Floats, *, form: FormName) -> list[Fit]:
    """`fit` for each of D drawn sets of step times of the same points; the points' own seconds are not looked at."""
    assert points, "there is something to fit"
    if form == "piecewise":
        return [Piecewise(_with_seconds(points, row)) for row in seconds_DP]
    knees = [0.0]
    if form == "roofline":
        counts = {(point.draft_length + 1) * point.batch_size for point in points if point.draft_length is not None}
        knees = [float(count) for count in sorted(counts)[:-1]] or [0.0]
    solved = [_solve(points, seconds_DP, knee=knee) for knee in knees]
    lengths = {point.arm: point.draft_length for point in points}
    best = np.argmin([each.errors_D for each in solved], axis=0)
    fits: list[Fit] = []
    for draw, index in enumerate(best):
        chosen = solved[int(index)]
        coefficients = dict(zip(chosen.names, chosen.coefficients_DC[draw].tolist(), strict=True))
        fits.append(TokenLine(form, knees[int(index)], lengths, coefficients, chosen.separable))
    return fits


def _with_seconds(points: Sequence[Point], seconds: Floats) -> tuple[Point, ...]:
    return tuple(point._replace(seconds=float(each)) for point, each in zip(points, seconds, strict=True))


def choose_form(points: Sequence[Point]) -> tuple[FormName, dict[FormName, float]]:
    """The form by `CHOICE_RULE`, and each form's mean relative error at that.

    With fewer than three batch sizes nothing can be left out; the form is then linear and there are no errors.
    """
    sizes = sorted({point.batch_size for point in points})
    if len(sizes) < 3:
        return "linear", {}
    errors: dict[FormName, float] = {form: _left_out_error(points, sizes=sizes, form=form) for form in FORMS}
    return next(form for form in FORMS if errors[form] <= min(errors.values()) + WORTH), errors


def _left_out_error(points: Sequence[Point], *, sizes: Sequence[int], form: FormName) -> float:
    errors = []
    for size in sizes[1:]:  # no held-out size lies below the smallest fitted one, so nobody asks for that prediction
        rest = [point for point in points if point.batch_size != size]
        known = {point.arm for point in rest}
        left_out = [point for point in points if point.batch_size == size and point.arm in known]
        if left_out:
            errors.append(relative_error(fit(rest, form=form), left_out))
    return float(np.mean(errors))


def relative_error(fitted: Fit, points: Sequence[Point]) -> float:
    """Mean of |predicted / measured - 1| over points."""
    return float(np.mean([abs(residual(fitted, point)) for point in points]))


def residual(fitted: Fit, point: Point) -> float:
    """Predicted over measured step time, minus one."""
    return float(fitted.seconds(point.arm, [point.batch_size])[0]) / point.seconds - 1


@dataclass(frozen=True)
class TokenLine:
    """The linear and the roofline form (knee = N*, 0 for the linear one)."""

    form: FormName
    knee: float
    lengths: dict[str, int | None]
    coefficients: dict[str, float]
    separable: bool

    def seconds(self, arm: str, batch_sizes: Sequence[float] | Floats) -> Floats:
        sizes = np.asarray(batch_sizes, dtype=float)
        terms = _terms(arm, self.lengths[arm], sizes, knee=self.knee)
        total = sum((self.coefficients[name] * values for name, values in terms.items()), np.zeros_like(sizes))
        return np.maximum(total, SMALLEST_SECONDS)

    def constants(self) -> dict[str, float] | None:
        if not self.separable:
            return None
        return dict(self.coefficients) | ({"free_tokens": self.knee} if self.form == "roofline" else {})


def _terms(arm: str, draft_length: int | None, sizes: Floats, *, knee: float) -> dict[str, Floats]:
    """The columns of the model that an arm has, each [batch sizes]."""
    one = np.ones_like(sizes)
    if draft_length is None:
        return {f"step:{arm}": one, f"sequence:{arm}": sizes}
    tokens = (draft_length + 1) * sizes
    terms = {"step": one, "token": np.maximum(0.0, tokens - knee), "sequence": sizes}
    return terms | ({f"draft:{arm}": one} if draft_length else {})


class _Solved(NamedTuple):
    """Least squares at one knee: coefficients of every draw, and its mean absolute relative error."""

    names: list[str]
    coefficients_DC: Floats
    errors_D: Floats
    separable: bool


def _solve(points: Sequence[Point], seconds_DP: Floats, *, knee: float) -> _Solved:
    rows = [_terms(point.arm, point.draft_length, np.array([float(point.batch_size)]), knee=knee) for point in points]
    names = list(dict.fromkeys(name for row in rows for name in row))
    design_PC = np.array([[row[name][0] if name in row else 0.0 for name in names] for row in rows])
    scale_C = np.maximum(np.abs(design_PC).max(axis=0), np.finfo(float).tiny)
    relative_DPC = (design_PC / scale_C)[None] / seconds_DP[:, :, None]
    coefficients_DC = np.linalg.pinv(relative_DPC, rcond=1e-12).sum(axis=2)
    errors_D = np.abs(np.einsum("dpc,dc->dp", relative_DPC, coefficients_DC) - 1).mean(axis=1)
    separable = int(np.linalg.matrix_rank(design_PC / scale_C)) == len(names)
    return _Solved(names, coefficients_DC / scale_C, errors_D, separable)


@dataclass(frozen=True)
class Piecewise:
    """Straight lines between each arm's own points."""

    points: tuple[Point, ...]
    form: FormName = "piecewise"

    def seconds(self, arm: str, batch_sizes: Sequence[float] | Floats) -> Floats:
        own = sorted((point.batch_size, point.seconds) for point in self.points if point.arm == arm)
        knots, values = np.array(own, dtype=float).T
        sizes = np.asarray(batch_sizes, dtype=float)
        result = np.interp(sizes, knots, values)
        if len(knots) > 1:
            slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
            result = np.where(sizes > knots[-1], values[-1] + slope * (sizes - knots[-1]), result)
            slope = (values[1] - values[0]) / (knots[1] - knots[0])
            result = np.where(sizes < knots[0], values[0] + slope * (sizes - knots[0]), result)
        return np.maximum(result, SMALLEST_SECONDS)

    def constants(self) -> dict[str, float] | None:
        return None
