"""What a check has to say about a head directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One observation. An error is a head that the engine refuses or misreads; a warning may be meant; info is worth
    knowing.

    Attributes:
        what: the observation, naming file and key or tensor.
        consequence: what happens at serving time because of it.
        mend: how to put it right.
    """

    severity: Severity
    what: str
    consequence: str
    mend: str

    def __str__(self) -> str:
        return f"{self.what}: {self.consequence}; {self.mend}"


def errors(findings: Sequence[Finding]) -> list[str]:
    """The findings that forbid serving the head, one sentence each."""
    return [str(finding) for finding in findings if finding.severity == "error"]
