"""What the servers of the arms resolved differently, by the same rules as in the closed loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.eval.configs import FORCED
from eyas.eval.machine import LEFT_OUT
from eyas.eval.openloop.records import SERVER
from eyas.eval.records import AR, longest_draft
from eyas.heads.files import read_json

OWN = (
    *(f"environment.{name}" for name in LEFT_OUT),
    "engine.instance_id",
    "engine.speculative_config",
    "engine.model_config.served_model_name",
    "engine.parallel_config.data_parallel_rpc_port",
    "engine.parallel_config.data_parallel_master_port",
)
"""Settings that are each start's own, and the one by which arms are meant to differ."""


def server_differences(directory: Path) -> list[dict[str, Any]]:
    """Resolved settings in which a server differs from the first one of plain decoding, each with the reason if it has one."""
    servers = [read_json(path) for path in sorted(directory.glob(f"*/{SERVER}*.json"))]
    told = [server for server in servers if server["settings"] is not None]
    baselines = [server for server in told if server["arm"] == AR]
    if not baselines:
        return []
    reference = _flatten(baselines[0]["settings"])
    differences: dict[tuple[str, str], dict[str, Any]] = {}
    for server in told:
        settings, drafts = _flatten(server["settings"]), longest_draft(server["speculative_config"]) > 0
        for name in sorted({*reference, *settings}):
            if reference.get(name) != settings.get(name):
                differences[server["arm"], name] = {
                    "arm": server["arm"],
                    "setting": name,
                    "ar": reference.get(name),
                    "value": settings.get(name),
                    "forced": FORCED.get(name.removeprefix("engine.")) if drafts else None,
                }
    return list(differences.values())


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf of nested objects by its dotted path, without what is each start's own."""
    if prefix in OWN:
        return {}
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= _flatten(inner, f"{prefix}.{name}" if prefix else name)
    return flat
