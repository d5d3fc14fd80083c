"""A scoring session: the id that all its starts carry, and what all its parts share."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.eval.arms import Arm
from eyas.eval.launch import Launcher
from eyas.eval.plan import StartPlan
from eyas.eval.prompts import Prompts
from eyas.heads.files import read_json, write_json

FILE = "session.json"


def open_session(score_dir: Path) -> str:
    """Id of the session in `score_dir`: made at its first call, read from session.json when the session is continued."""
    path = score_dir / FILE
    if not path.is_file():
        write_json(path, {"session": secrets.token_hex(8)})
    return read_json(path)["session"]


@dataclass(frozen=True, kw_only=True)
class Session:
    """What every part of a session needs.

    Attributes:
        directory: of the session.
        plan: engine settings and the grid's cells; an arm's start is this plan with the arm put in.
        prompts: of the session.
        arms: plain decoding and the others; the schedule joins them once it has been chosen.
        launcher: runs engine processes.
    """

    directory: Path
    plan: StartPlan
    prompts: Prompts
    arms: Sequence[Arm]
    launcher: Launcher

    @property
    def starts(self) -> Path:
        return self.directory / "starts"

    @property
    def heads(self) -> list[Arm]:
        return [arm for arm in self.arms if arm.kind == "head"]
