"""A worker without an engine, for tests of what runs workers: it writes the records of a start in no time.

`python fake_worker.py PLAN.json OUT.jsonl [--wait]`; FAKE_BEHAVIOUR in the environment, JSON, says per arm how it misbehaves:
crash, hang, nothing (ends without a result), half (dies after its first block), or half_hang (hangs after it).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

READY = "@ready"


def block_lines(cell: dict[str, Any], *, number: int, block: int) -> list[dict[str, Any]]:
    place = {"cell": number, "dataset": cell["dataset"], "batch_size": cell["batch_size"]}
    request = {
        "kind": "request",
        **place,
        "prompt_id": "p0",
        "conversation": None,
        "n_in": 2,
        "n_out": 1,
        "t_submit": 0.0,
        "t_first": 1.0,
        "t_finish": 1.0,
        "chunk_times": [1.0],
        "chunk_sizes": [1],
        "token_ids": [5],
        "finish_reason": "stop",
        "per_step_accepted": None,
        "per_step_drafted": None,
    }
    summary = {
        "kind": "cell",
        **place,
        "block": block,
        "temperature": cell["temperature"],
        "max_tokens": cell["max_tokens"],
        "makespan": 1.0,
        "mean_running": 1.0,
        "counters": {"preemptions": 0},
        "steps": [[1.0, 1, 1, 1]],
        "harness_seconds": 0.0,
    }
    return [request, summary]


def description_of(plan: dict[str, Any]) -> dict[str, Any]:
    places = ("session", "arm", "kind", "start", "round", "protocol", "phase", "beside", "speculative_config")
    return {name: plan[name] for name in places} | {"engine": {}, "machine": {}, "seconds": 2.0}


def main() -> None:
    plan, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    behaviour = json.loads(os.environ.get("FAKE_BEHAVIOUR", "{}")).get(plan["arm"], "work")
    waits = "--wait" in sys.argv
    print("progress of", plan["arm"], flush=True)
    if behaviour == "crash":
        sys.exit("out of memory")
    partial = out.with_name(out.name + ".partial")
    out.with_suffix(".json").write_text(json.dumps(description_of(plan)))
    with partial.open("w") as lines:
        number = 0
        for cell in plan["cells"]:
            for block in range(plan["blocks"]):
                wait_for_word(waits)
                if behaviour == "hang":
                    lines.write("half")
                    lines.flush()
                    print("hanging", flush=True)
                    time.sleep(600)
                for line in block_lines(cell, number=number, block=block):
                    lines.write(json.dumps(line) + "\n")
                lines.flush()
                print(f"block {plan['arm']} {number}", flush=True)
                number += 1
                if behaviour == "half_hang":
                    print("hanging", flush=True)
                    time.sleep(600)
                if behaviour == "half":
                    lines.write('{"kind": "request", "torn')
                    lines.flush()
                    os._exit(9)
    wait_for_word(waits)
    if behaviour != "nothing":
        partial.replace(out)


def wait_for_word(waits: bool) -> None:
    if waits:
        print(READY, flush=True)
        if not sys.stdin.readline():
            sys.exit("the parent is gone")


if __name__ == "__main__":
    main()
