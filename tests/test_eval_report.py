from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.eval.report.build import build_report
from eyas.eval.report.words import terminal_table
from eyas.heads.files import read_json, write_json
from tests.eval_records import write_session


def cell_of(results: dict, batch_size: int, arm: str) -> dict:
    return next(
        each
        for each in results["cells"]
        if (each["dataset"], each["batch_size"], each["arm"]) == ("heldout", batch_size, arm)
    )


@pytest.fixture
def score_dir(tmp_path: Path) -> Path:
    write_session(tmp_path)
    return tmp_path


def test_numbers_of_the_results(score_dir: Path) -> None:
    results = build_report(score_dir)
    assert results == read_json(score_dir / "results.json")
    first = cell_of(results, 1, "k3")
    assert first["ar_tokens_per_second"] == pytest.approx(40)
    assert first["ratio"] == pytest.approx(1.25)
    assert first["tau_step_weighted"] == pytest.approx(2.5)
    assert (first["verdict"], first["draft_length"]) == ("INCONCLUSIVE", 3)
    assert "only 2 starts" in first["reason"]
    assert cell_of(results, 16, "k3")["verdict"] == "SLOWER"
    assert cell_of(results, 16, "k3")["ratio"] == pytest.approx(0.5)
    assert cell_of(results, 4, "k3")["null_spread"] == pytest.approx(1.04)
    best = {row["batch_size"]: row["draft_length"] for row in results["best_k"] if row["dataset"] == "heldout"}
    assert best == {1: 3, 4: 1, 16: 0}


def test_arms_differ_only_as_forced(score_dir: Path) -> None:
    differences = build_report(score_dir)["config_differences"]
    assert {each["setting"] for each in differences} == {
        "cache_config.num_gpu_blocks",
        "scheduler_config.max_num_scheduled_tokens",
    }
    assert all(each["forced"] for each in differences)


def test_an_unforced_difference_stands_out(score_dir: Path) -> None:
    path = score_dir / "starts" / "001-k3.json"
    description = read_json(path)
    description["engine"]["scheduler_config"]["max_num_batched_tokens"] = 2048
    write_json(path, description)
    build_report(score_dir)
    assert "NOT FORCED by the head" in (score_dir / "report.md").read_text()


def test_slower_is_said_first_and_printed_everywhere(score_dir: Path) -> None:
    results = build_report(score_dir)
    for name in ("report.md", "report.html"):
        text = (score_dir / name).read_text()
        assert "The head is SLOWER than plain decoding at batch size 16 (k=3: 0.50x, k=1: 0.80x)." in text
        assert text.index("The head is SLOWER") < text.index("TPOT =")
        assert "TPOT = (E2E - TTFT) / (n_out - 1)" in text
    table = terminal_table(results)
    assert "SLOWER" in table
    assert table.endswith("1: k=3, 4: k=1, 16: k=0")


def test_recomputing_changes_nothing(score_dir: Path) -> None:
    names = ("results.json", "report.md", "report.html")
    build_report(score_dir)
    before = {name: (score_dir / name).read_bytes() for name in names}
    build_report(score_dir)
    assert before == {name: (score_dir / name).read_bytes() for name in names}


def test_html_is_self_contained_and_its_ids_are_unique(score_dir: Path) -> None:
    build_report(score_dir)
    page = (score_dir / "report.html").read_text()
    assert page.count("<svg") == 4
    assert not re.findall(r"<(?:script|link|img)\b", page)
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    references = set(re.findall(r'"#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert references <= set(ids)


def test_text_from_outside_is_escaped(score_dir: Path) -> None:
    context = read_json(score_dir / "context.json")
    write_json(score_dir / "context.json", context | {"target": {"model": "<script>alert(1)</script>"}})
    build_report(score_dir)
    assert "<script>" not in (score_dir / "report.html").read_text()


def test_a_session_without_fidelity_and_training_still_reports(score_dir: Path) -> None:
    (score_dir / "fidelity.json").unlink()
    write_json(score_dir / "context.json", {})
    build_report(score_dir)
    text = (score_dir / "report.md").read_text()
    assert "Not checked: it has not run" in text
    assert "No training metrics" in text


def test_failed_starts_are_shown(score_dir: Path) -> None:
    for path in (score_dir / "starts").glob("004-k3.*"):
        path.unlink()
    failure = {"arm": "k3", "start": 4, "reason": "exit code 1", "log_tail": ["MemoryError"]}
    write_json(score_dir / "starts" / "004-k3.failed.json", failure)
    results = build_report(score_dir)
    assert results["starts"] == {"ar": 2, "k3": 1, "k1": 2}
    assert "MemoryError" in (score_dir / "report.md").read_text()


def test_nothing_to_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished start"):
        build_report(tmp_path)


def test_a_broken_record_names_file_and_line(score_dir: Path) -> None:
    path = score_dir / "starts" / "000-ar.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:40], *lines[2:]]))
    with pytest.raises(ValueError, match=r"000-ar\.jsonl, line 2"):
        build_report(score_dir)


def test_reporting_needs_neither_engine_nor_torch() -> None:
    code = "import sys, eyas.eval.report.build; print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []


def _with_data(score_dir: Path, *, trained_here: bool, guarded: bool = True) -> str:
    """The report's section on data for a session whose context carries counts of the data stages."""
    source = {
        "schema": "sharegpt",
        "read": 12,
        "kept": 9,
        "not_needed": 0,
        "dropped": {"duplicate": 1, "overlaps_heldout_exact": 2},
    }
    counts = {"sources": {"chats": source}, "guard": {"exact": 2, "ngram": 3, "evaluation_prompts": 171}}
    stages = {"collect": {"counts": counts, "seconds": 1.0}}
    if trained_here:
        tokens = {"train_conversations": 8, "train_tokens": 400, "train_answer_tokens": 300}
        tokens |= {"heldout_conversations": 1, "heldout_tokens": 50}
        stages |= {"prepare": {"counts": tokens, "seconds": 1.0}, "train": {"counts": {}, "seconds": 1.0}}
    guard = {"enabled": guarded, "ngram": 13}
    context = read_json(score_dir / "context.json") | {"stages": stages, "recipe": {"data": {"guard": guard}}}
    write_json(score_dir / "context.json", context)
    build_report(score_dir)
    markdown = (score_dir / "report.md").read_text()
    return markdown.partition("## Training data")[2].partition("\n## ")[0]


def test_the_report_tells_what_the_guard_removed(score_dir: Path) -> None:
    words = _with_data(score_dir, trained_here=True)
    assert "5 training conversations were removed" in words
    assert "one of 171 evaluation prompts: 2 the same prompt" in words
    assert "3 by 13 words in a row" in words
    assert "75.0 % of them answers" in words
    assert "| chats | sharegpt | 12 | 9 | 0 | 1 duplicate, 2 overlaps heldout exact |" in words


def test_a_missing_guard_and_a_foreign_head_are_said(score_dir: Path) -> None:
    assert "were NOT kept out" in _with_data(score_dir, trained_here=True, guarded=False)
    assert "what it was trained on is not known here" in _with_data(score_dir, trained_here=False)
