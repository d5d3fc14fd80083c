"""What the servers of the arms resolved differently, by the same rules as in the closed loop.

A server that did not tell what it resolved may have run with anything: its arm is no more comparable than one that differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.eval.configs import LEFTOVERS, Resolved, compare_settings, flatten, void_by_arm
from eyas.eval.machine import LEFT_OUT
from eyas.eval.openloop.records import SERVER, LoadCell, read_of_session
from eyas.eval.records import AR, longest_draft

OWN = (
    *LEFT_OUT,
    "instance_id",
    "served_model_name",
    "data_parallel_rpc_port",
    "data_parallel_master_port",
)
"""Last words of the settings that are each server's own, wherever in the configuration they stand."""


@dataclass(frozen=True)
class Described:
    """One server of a start; `settings` maps dotted names to values, None where it did not tell them."""

    arm: str
    start: int
    drafts: bool
    settings: dict[str, Any] | None


def read_servers(directory: Path, *, session: str) -> list[Described]:
    """Every server of an open loop, start after start.

    Raises:
        ValueError: a description is of another session; names the file.
    """
    raw = [read_of_session(path, session=session) for path in sorted(directory.glob(f"*/{SERVER}*.json"))]
    return [
        Described(
            arm=server["arm"],
            start=server["start"],
            drafts=longest_draft(server["speculative_config"]) > 0,
            settings=_settings(server),
        )
        for server in raw
    ]


def _settings(server: Mapping[str, Any]) -> dict[str, Any] | None:
    told = server["settings"]
    if told is None or not told["engine"]:
        return None
    machine = told["machine"] | {"environment": server["environment"] | told["environment"]}
    flat = flatten(told["engine"] | {"machine": machine})
    return {name: value for name, value in flat.items() if name not in LEFTOVERS and name.rpartition(".")[2] not in OWN}


def server_differences(servers: Sequence[Described]) -> list[dict[str, Any]]:
    """What `eyas.eval.configs` finds between the servers that told what they resolved."""
    told = [Resolved(each.arm, each.drafts, each.settings) for each in servers if each.settings is not None]
    return compare_settings(told)


def void_servers(servers: Sequence[Described], cells: Sequence[LoadCell]) -> dict[str, str]:
    """Arm -> why its cells are not comparable with plain decoding; an arm that is comparable is missing."""
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    unknown = _unknown(servers, cells)
    shared = {} if AR not in unknown else dict.fromkeys(arms, f"plain decoding: {unknown[AR]}")
    return shared | unknown | void_by_arm(server_differences(servers), arms=arms)


def _unknown(servers: Sequence[Described], cells: Sequence[LoadCell]) -> dict[str, str]:
    """Arms with a cell from a start of which some server, or every one, left no configuration."""
    found: dict[str, str] = {}
    for arm, start in dict.fromkeys((cell.arm, cell.start) for cell in cells):
        own = [server for server in servers if (server.arm, server.start) == (arm, start)]
        if not own or any(server.settings is None for server in own):
            found.setdefault(arm, f"the configuration of its server in start {start} is unknown")
    return found
