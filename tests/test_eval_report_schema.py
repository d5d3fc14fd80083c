"""The published form of results.json: real results have it, and spoilt ones do not."""

from __future__ import annotations

import copy
import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from eyas.eval.report.build import collect_results
from eyas.heads.files import read_json, write_json
from tests.eval_records import write_session

SCHEMA = json.loads(resources.files("eyas.eval.report").joinpath("results.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def faults(results: dict[str, Any]) -> list[str]:
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in VALIDATOR.iter_errors(results)
    ]


@pytest.fixture(scope="module")
def full(full_session: Path) -> dict[str, Any]:
    return read_json(full_session / "results.json")


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    described = [name for name, part in SCHEMA["properties"].items() if not part["description"]]
    assert described == [], "every key says what it holds"


def test_a_whole_session_has_the_published_form(full: dict[str, Any]) -> None:
    assert faults(full) == []
    assert set(full) == set(SCHEMA["properties"])


def test_partial_sessions_have_it_too(tmp_path: Path) -> None:
    write_session(tmp_path)
    assert faults(collect_results(tmp_path)) == []
    for path in (tmp_path / "starts").glob("*-k*"):
        path.unlink()
    assert faults(collect_results(tmp_path)) == [], "plain decoding alone"


def test_a_single_start_and_a_failed_one(tmp_path: Path) -> None:
    write_session(tmp_path)
    for number in (3, 4, 5):
        for path in (tmp_path / "starts").glob(f"00{number}-*"):
            path.unlink()
    failure = {"arm": "k1", "start": 3, "reason": "exit code 1", "log_tail": ["no memory"]}
    write_json(tmp_path / "starts" / "003-k1.failed.json", failure)
    assert faults(collect_results(tmp_path)) == []


def test_what_is_written_has_it(tmp_path: Path) -> None:
    from eyas.eval.report.build import build_report

    write_session(tmp_path)
    build_report(tmp_path)
    assert faults(read_json(tmp_path / "results.json")) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("cells", 0, "verdict"), "FASTER"),
        (("cells", 0, "interval"), [0.9]),
        (("cells", 0, "ratio"), "1.2"),
        (("cells", 0, "batch_size"), 1.5),
        (("arms", "k3", "kind"), "eagle"),
        (("arms", "k3", "synthetic"), None),
        (("latency", 0, "e2e"), {"mean": 1.0}),
        (("surprise",), 1),
        (("schema",), 1),
    ],
)
def test_spoilt_results_do_not(full: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    spoilt = copy.deepcopy(full)
    place: Any = spoilt
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert faults(spoilt) != []


@pytest.mark.parametrize("key", sorted(SCHEMA["properties"]))
def test_no_key_may_be_missing(full: dict[str, Any], key: str) -> None:
    assert faults({name: value for name, value in full.items() if name != key}) != []
