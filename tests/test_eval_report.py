from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.eval.report.build import build_report, collect_results
from eyas.eval.report.contents import all_sections
from eyas.eval.report.document import NOT_MEASURED, Section, markdown
from eyas.eval.report.page import html_page
from eyas.eval.report.terminal import terminal_table
from eyas.heads.files import read_json, write_json
from tests.eval_records import cell, write_session, write_start

OPTIONAL = (
    *("acceptance", "acceptance_cells", "acceptance_positions", "reconciliation", "step_times", "time_split"),
    *(
        "time_derived",
        "time_check",
        "cost",
        "schedule",
        "lossless",
        "parity",
        "open_loop",
        "calibration",
        "power",
        "null",
    ),
)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A small session: three batch sizes, two starts per arm, nothing beside the grid."""
    write_session(tmp_path)
    return tmp_path


def of_cell(rows: list[dict[str, Any]], batch_size: int, arm: str) -> dict[str, Any]:
    return next(
        row
        for row in rows
        if (row["dataset"], row["temperature"], row["batch_size"], row["arm"]) == ("heldout", 0.0, batch_size, arm)
    )


def walk(sections: list[Section]) -> Iterator[Section]:
    for section in sections:
        yield section
        yield from walk(section.parts)


def test_numbers_are_recomputed_from_raw_records(small: Path) -> None:
    results = build_report(small)
    assert results == read_json(small / "results.json")
    first = of_cell(results["cells"], 1, "k3")
    assert first["ar_tokens_per_second"] == pytest.approx(40)
    assert first["ratio"] == pytest.approx(1.25)
    assert first["verdict"] == "INCONCLUSIVE"
    assert of_cell(results["cells"], 16, "k3")["ratio"] == pytest.approx(0.5)
    curve = of_cell(results["latency_curves"], 1, "ar")
    assert curve["levels"][0] == 0 and curve["levels"][-1] == 1
    assert curve["e2e"] == pytest.approx([41 / 40] * len(curve["levels"]))
    assert curve["tpot"] == pytest.approx([0.9 * 41 / 40 / 40] * len(curve["levels"]))


def test_a_changed_raw_record_changes_the_report(small: Path) -> None:
    before = build_report(small)
    cells = [cell(80.0, batch_size=size, requests=max(4, size)) for size in (1, 4, 16)]
    cells.append(cell(80.0, batch_size=8, dataset="humaneval"))
    write_start(small / "starts", 0, "ar", cells, draft_length=0)
    after = build_report(small)
    assert of_cell(after["cells"], 1, "k3")["ratio"] < 0.9 * of_cell(before["cells"], 1, "k3")["ratio"]


def test_recomputing_changes_nothing(full_session: Path, tmp_path: Path) -> None:
    names = ("results.json", "report.md", "report.html")
    copy = tmp_path / "copy"
    shutil.copytree(full_session, copy)
    for name in names:
        (copy / name).unlink()
    build_report(copy)
    assert {name: (copy / name).read_bytes() for name in names} == {
        name: (full_session / name).read_bytes() for name in names
    }


def test_the_first_words_are_the_verdict_and_slower_cells_stand_in_them(full_session: Path) -> None:
    results = read_json(full_session / "results.json")
    slower = [row for row in results["cells"] if row["verdict"] == "SLOWER"]
    assert slower, "the made-up session has slower cells"
    for name in ("report.md", "report.html"):
        text = (full_session / name).read_text()
        assert text.index("Drafting pays up to") < text.index("TPOT =")
        assert text.index("Slower than plain decoding: k=5 from batch size") < text.index("A. Identity")
    shown = (full_session / "report.md").read_text().partition("## A. Identity")[0]
    for row in slower:
        assert f"{row['ratio']:.2f}x<br>" in shown
    assert shown.count("SLOWER") == len(slower)
    table = terminal_table(results)
    assert table.count("SLOWER") == len(slower)
    assert len(table.splitlines()) == 1 + len(results["cells"]) + 2


def test_all_letters_are_there_in_order_and_nothing_is_left_unmeasured(
    full_session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _leave_figures_undrawn(monkeypatch)
    text = (full_session / "report.md").read_text()
    places = [text.index(f"## {letter}. ") for letter in "ABCDEFGHIJK"]
    assert places == sorted(places)
    missing = [
        section.title
        for section in walk(all_sections(read_json(full_session / "results.json")))
        if _unmeasured(section)
    ]
    assert missing == []


def _unmeasured(section: Section) -> bool:
    return any(paragraph.startswith(NOT_MEASURED) for paragraph in section.paragraphs)


def _leave_figures_undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("eyas.eval.report.figures.") and "svg" in vars(module):
            monkeypatch.setattr(module, "svg", lambda _, **__: "<svg></svg>")


@pytest.mark.parametrize("key", OPTIONAL)
def test_a_part_that_is_missing_is_said_to_be_missing(
    full_session: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _leave_figures_undrawn(monkeypatch)
    results = read_json(full_session / "results.json")
    without = all_sections({name: value for name, value in results.items() if name != key})
    markdown("title", without)
    html_page("title", without)
    before = [section.title for section in walk(all_sections(results)) if _unmeasured(section)]
    assert len([section for section in walk(without) if _unmeasured(section)]) > len(before)
    markdown("title", all_sections(results | {key: None}))


def test_a_small_session_reports_and_warns(small: Path) -> None:
    build_report(small)
    text = (small / "report.md").read_text()
    assert "**Warning:** Fewer than 3 fresh starts of an engine (AR 2, k=3 2, k=1 2)" in text
    assert "**Warning:** Losslessness was not checked, so no cell can be SUPPORTED" in text
    assert "Not shown to pay at any batch size" in text
    assert NOT_MEASURED in text


def test_the_page_is_self_contained_and_its_ids_are_unique(full_session: Path) -> None:
    page = (full_session / "report.html").read_text()
    assert page.count("<svg") >= 10
    assert not re.findall(r"<(?:script|link|img)\b", page)
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    references = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert references <= set(ids)
    colours = re.findall(r'(?:fill|stroke)="(#[^"]*)"', page)
    assert colours and all(re.fullmatch(r"#[0-9a-fA-F]{6}", colour) for colour in colours)


def test_figures_use_colours_and_shapes_that_everybody_can_tell_apart() -> None:
    from eyas.eval.report.figures.canvas import COLOURS, DASHES, MARKERS

    # Okabe and Ito (2008) without black and yellow, which is too light for lines on white.
    assert set(COLOURS) == {"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"}
    assert len(set(MARKERS)) == len(set(map(str, DASHES))) == len(COLOURS)


def test_text_from_outside_is_escaped(small: Path) -> None:
    context = read_json(small / "context.json")
    evil = "<script>alert(1)</script>"
    write_json(small / "context.json", context | {"name": evil, "target": {"model": f"`{evil}`"}})
    failure = {"arm": "k3", "start": 9, "reason": f"`{evil}`", "log_tail": [evil]}
    write_json(small / "starts" / "009-k3.failed.json", failure)
    build_report(small)
    assert "<script" not in (small / "report.html").read_text()


def test_a_cell_with_a_bar_or_a_line_break_stays_one_cell_in_markdown(small: Path) -> None:
    failure = {"arm": "k3", "start": 9, "reason": "a|b", "log_tail": ["x\ny"]}
    write_json(small / "starts" / "009-k3.failed.json", failure)
    build_report(small)
    assert "| k=3 | a\\|b | x<br>y | 9 |" in (small / "report.md").read_text()


def test_failed_starts_are_shown_and_counted(small: Path) -> None:
    for path in (small / "starts").glob("004-k3.*"):
        path.unlink()
    failure = {"arm": "k3", "start": 4, "reason": "exit code 1", "log_tail": ["MemoryError"]}
    write_json(small / "starts" / "004-k3.failed.json", failure)
    results = build_report(small)
    assert results["starts"] == {"ar": 2, "k3": 1, "k1": 2}
    text = (small / "report.md").read_text()
    assert "MemoryError" in text
    assert "**Warning:** 1 starts failed (k=3); nothing of them is in any figure; see section J." in text


def test_an_unforced_difference_voids_and_is_named(small: Path) -> None:
    path = small / "starts" / "001-k3.json"
    description = read_json(path)
    description["engine"]["scheduler_config"]["max_num_batched_tokens"] = 2048
    write_json(path, description)
    build_report(small)
    text = (small / "report.md").read_text()
    assert "NOT FORCED by drafting" in text
    assert "**Warning:** Arm k=3 is not comparable with plain decoding: the engines differ in" in text


def test_synthetic_acceptance_is_named_first(small: Path) -> None:
    for path in (small / "starts").glob("*-k3.json"):
        description = read_json(path)
        description["speculative_config"]["rejection_sample_method"] = "synthetic"
        write_json(path, description)
    build_report(small)
    text = (small / "report.md").read_text()
    assert "**Warning:** Arm k=3 has synthetic acceptance" in text.partition("## A. Identity")[0]


def test_an_arm_without_a_partner_cell_is_still_reported(tmp_path: Path) -> None:
    write_session(tmp_path)
    for path in (tmp_path / "starts").glob("*-ar.*"):
        path.unlink()
    build_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "Nothing to judge" in text
    assert "Plain decoding (AR) did not finish in this session" in text


def test_nothing_to_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished start"):
        build_report(tmp_path)


def test_a_broken_record_names_file_and_line(small: Path) -> None:
    path = small / "starts" / "000-ar.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:40], *lines[2:]]))
    with pytest.raises(ValueError, match=r"000-ar\.jsonl, line 2"):
        build_report(small)


def test_records_of_two_sessions_are_refused(small: Path) -> None:
    write_start(small / "starts", 9, "k3", [cell(50.0)], draft_length=3, session="another")
    with pytest.raises(ValueError, match="mixes records of two sessions"):
        build_report(small)


def test_a_report_that_fails_leaves_the_old_one(small: Path) -> None:
    build_report(small)
    before = (small / "report.html").read_bytes()
    (small / "starts" / "000-ar.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"000-ar\.jsonl"):
        build_report(small)
    assert (small / "report.html").read_bytes() == before


def test_collecting_writes_nothing(small: Path) -> None:
    before = sorted(path.name for path in small.rglob("*"))
    collect_results(small)
    assert sorted(path.name for path in small.rglob("*")) == before


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
    text = (score_dir / "report.md").read_text()
    return text.partition("### Training data")[2].partition("\n### ")[0]


def test_the_report_tells_what_the_guard_removed(small: Path) -> None:
    words = _with_data(small, trained_here=True)
    assert "5 training conversations were removed" in words
    assert "one of 171 evaluation prompts: 2 the same prompt" in words
    assert "3 by 13 words in a row" in words
    assert "75.0 % of them answers" in words
    assert "| chats | sharegpt | 12 | 9 | 0 | 1 duplicate, 2 overlaps heldout exact |" in words


def test_a_missing_guard_and_a_foreign_head_are_said(small: Path) -> None:
    assert "were NOT kept out" in _with_data(small, trained_here=True, guarded=False)
    assert "what it was trained on is not known here" in _with_data(small, trained_here=False)
