"""The collect stage: mixing, filters, splits, the guard, and that every row is kept or counted."""

from __future__ import annotations

import dataclasses
import json
import sys
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.train.data import filters
from eyas.train.data.collect import collect
from eyas.train.data.conversations import (
    Conversation,
    hash_split,
    iterate_conversations,
    prompt_hash,
    write_conversations,
)
from eyas.train.data.filters import Filters
from eyas.train.data.gather import UniqueIds, id_hash
from eyas.train.data.mix import check_weights, mix
from eyas.train.data.sources import Source

SHIPPED = Path(__file__).parent.parent / "recipes" / "data" / "smollm2-135m-chat.jsonl.gz"
LONG = "Write a function that takes a list of numbers and returns the sum of all those that are even."


def row(
    prompt: str, *more: str, split: str = "train", id: str | None = None, system: str | None = None
) -> dict[str, Any]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for turn in (prompt, *more):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": f"An answer to {turn}"}]
    return {"id": id or prompt, "split": split, "messages": messages}


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in rows))
    return path


def source(path: Path, **settings: Any) -> Source:
    return Source(path=str(path), **{"name": path.stem, **settings})


def collected(out_dir: Path) -> list[Conversation]:
    return list(iterate_conversations(out_dir / "conversations.jsonl", on_bad_line="stop"))


def ids(out_dir: Path) -> list[str]:
    return [conversation.id for conversation in collected(out_dir)]


# --- mixing -----------------------------------------------------------------------------------------------------------


@given(
    weights=st.lists(st.floats(0.05, 10), min_size=1, max_size=5),
    lengths=st.lists(st.integers(0, 30), min_size=5, max_size=5),
    limit=st.none() | st.integers(0, 60),
)
def test_shares_are_exact_at_every_point(weights: list[float], lengths: list[int], limit: int | None) -> None:
    streams = [iter(range(length)) for length in lengths[: len(weights)]]
    taken: Counter[int] = Counter()
    for number, (stream, item) in enumerate(mix(streams, weights=weights, when_exhausted="stop", limit=limit), start=1):
        assert item == taken[stream]
        taken[stream] += 1
        # Each stream is at most one item ahead of its share of what the furthest-behind one has had.
        behind = min(taken[index] / weight for index, weight in enumerate(weights))
        assert all(taken[index] <= behind * weight + 1 + 1e-9 for index, weight in enumerate(weights))
        assert limit is None or number <= limit
    if limit is None:  # it ended because the stream whose turn it was is empty
        due = min(range(len(weights)), key=lambda index: (taken[index] / weights[index], index))
        assert taken[due] == lengths[due]


@given(
    weights=st.none() | st.lists(st.floats(0.05, 10), min_size=4, max_size=4),
    lengths=st.lists(st.integers(0, 30), min_size=4, max_size=4),
)
def test_going_on_loses_nothing(weights: list[float] | None, lengths: list[int]) -> None:
    streams = [iter(range(length)) for length in lengths]
    mixed = list(mix(streams, weights=weights, when_exhausted="continue"))
    assert [[item for stream, item in mixed if stream == index] for index in range(4)] == [
        list(range(length)) for length in lengths
    ]
    if weights is None:
        assert [stream for stream, _ in mixed] == sorted(stream for stream, _ in mixed)


def test_weights_that_cannot_be() -> None:
    assert check_weights([None, None]) is None
    assert check_weights([1, 2.5]) == [1, 2.5]
    with pytest.raises(ValueError, match="some have a weight and some have none"):
        check_weights([1.0, None])
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="above 0"):
            check_weights([1.0, wrong])


def test_sources_are_mixed_and_what_is_not_needed_is_counted(tmp_path: Path) -> None:
    a = source(write(tmp_path / "a.jsonl", [row(f"a{n}") for n in range(9)]), weight=2.0)
    b = source(write(tmp_path / "b.jsonl", [row(f"b{n}") for n in range(9)]), weight=1.0)
    counts = collect(tmp_path / "out", sources=[a, b])
    assert ids(tmp_path / "out")[:6] == ["a0", "b0", "a1", "a2", "b1", "a3"]
    assert len(ids(tmp_path / "out")) == 14
    assert counts["sources"]["b"] == {
        "schema": "messages (messages: messages)", "read": 5, "kept": 5, "dropped": {}, "not_needed": 4
    }  # fmt: skip
    collect(tmp_path / "out", sources=[a, b], when_exhausted="continue")
    assert len(ids(tmp_path / "out")) == 18
    counts = collect(tmp_path / "out", sources=[a, b], max_conversations=6)
    assert ids(tmp_path / "out") == ["a0", "b0", "a1", "a2", "b1", "a3"]
    assert [counts["sources"][name]["not_needed"] for name in "ab"] == [5, 7]


def test_a_limit_counts_usable_conversations(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["nonsense", row("a"), row("A "), row("b"), row("c"), row("d")])
    counts = collect(tmp_path / "out", sources=[source(path, limit=2)], on_bad_line="skip")
    assert ids(tmp_path / "out") == ["a", "b"]
    assert counts["sources"]["a"]["dropped"] == {"duplicate": 1, "not_json": 1}
    assert counts["sources"]["a"]["not_needed"] == 2


# --- what stays the same ----------------------------------------------------------------------------------------------


def test_one_source_without_overlaps_is_left_as_it_is(tmp_path: Path) -> None:
    original = list(iterate_conversations(SHIPPED, on_bad_line="stop"))
    counts = collect(tmp_path, sources=[source(SHIPPED)], guard=False)
    assert collected(tmp_path) == original
    assert counts["conversations"] == counts["sources"][SHIPPED.stem]["read"] == len(original)
    assert counts["dropped"] == {}
    assert (tmp_path / "evaluation_prompts.jsonl").read_text() == ""
    collect(tmp_path / "again", sources=[source(tmp_path / "conversations.jsonl")], guard=False)
    assert collected(tmp_path / "again") == original


def test_records_keep_their_source_and_ids_become_unique(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [row("a", id="1") | {"source": "old"}, row("b", id="1"), row("c", id="1~2")])
    b = write(tmp_path / "b.jsonl", [{"prompt": "d", "answer": "x", "id": 1}, {"prompt": "e", "answer": "x"}])
    collect(tmp_path / "out", sources=[source(a), source(b)])
    rows = collected(tmp_path / "out")
    assert [each.id for each in rows] == ["1", "1~3", "1~2", "1~4", "b-000002"]
    assert [each.source for each in rows] == ["old", "a", "a", "b", "b"]


@given(st.lists(st.sampled_from(["a", "b", "a~2", "a~3", "a~2~2", "b~2"]), max_size=12))
def test_ids_are_unique_and_unrepeated_ones_stay(names: list[str]) -> None:
    book = UniqueIds([id_hash(name) for name in names])
    given = [book.unique(name) for name in names]
    assert len(set(given)) == len(names)
    assert all(new == old for new, old in zip(given, names, strict=True) if names.count(old) == 1)
    assert all(given[names.index(name)] == name for name in names)


def test_a_second_run_writes_the_same_bytes(tmp_path: Path) -> None:
    counts = [
        collect(tmp_path / name, sources=[source(SHIPPED)], near_duplicates=0.8, evaluation_prompts=[LONG])
        for name in "xy"
    ]
    assert counts[0] == counts[1]
    assert (tmp_path / "x" / "conversations.jsonl").read_bytes() == (
        tmp_path / "y" / "conversations.jsonl"
    ).read_bytes()


# --- duplicates, filters, splits --------------------------------------------------------------------------------------


def test_the_first_of_equal_and_of_similar_prompts_is_kept(tmp_path: Path) -> None:
    near = LONG.replace("numbers", "integers")
    a = write(tmp_path / "a.jsonl", [row(LONG, id="first"), row("hi", system="Sing."), row("hi", "go on", id="two")])
    b = write(tmp_path / "b.jsonl", [row(LONG.upper(), id="copy"), row(near, id="near"), row("hi", id="one")])
    counts = collect(tmp_path / "out", sources=[source(a), source(b)])
    assert ids(tmp_path / "out") == ["first", "hi", "two", "near", "one"]
    assert counts["sources"]["b"]["dropped"] == {"duplicate": 1}
    counts = collect(tmp_path / "out", sources=[source(a), source(b)], near_duplicates=0.7)
    assert ids(tmp_path / "out") == ["first", "hi", "two", "one"]
    assert counts["dropped"] == {"duplicate": 1, "near_duplicate": 1}
    assert counts["near_duplicates"]["missed_at_threshold"] <= 0.01


@pytest.mark.parametrize(
    ("settings", "kept", "reason"),
    [
        (Filters(min_turns=2), ["Two turns, please."], "too_few_turns"),
        (Filters(max_turns=1), ["hi", "Eine längere Frage."], "too_many_turns"),
        (Filters(min_characters=3), ["Two turns, please.", "Eine längere Frage."], "prompt_too_short"),
        (Filters(max_characters=60), ["hi", "Eine längere Frage."], "too_many_characters"),
    ],
)
def test_filters_drop_and_count(tmp_path: Path, settings: Filters, kept: list[str], reason: str) -> None:
    path = write(
        tmp_path / "a.jsonl", [row("hi"), row("Two turns, please.", "And the second."), row("Eine längere Frage.")]
    )
    counts = collect(tmp_path / "out", sources=[source(path)], filters=settings)
    assert ids(tmp_path / "out") == kept
    assert counts["dropped"] == {reason: 3 - len(kept)}


def test_languages(tmp_path: Path) -> None:
    pytest.importorskip("py3langid")
    german, english = "Wie backt man zu Hause ein gutes Brot aus Roggenmehl?", "How do you bake good bread at home?"
    path = write(tmp_path / "a.jsonl", [row(german), row(english)])
    counts = collect(tmp_path / "out", sources=[source(path)], filters=Filters(languages=("de",)))
    assert ids(tmp_path / "out") == [german]
    assert counts["dropped"] == {"other_language": 1}
    with pytest.raises(ValueError, match=r"data\.filters\.languages: german is no language"):
        collect(tmp_path / "out", sources=[source(path)], filters=Filters(languages=("german",)))


def test_languages_need_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filters._identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(ValueError, match="pip install py3langid"):
        collect(tmp_path, sources=[source(write(tmp_path / "a.jsonl", [row("a")]))], filters=Filters(languages=("de",)))


def test_the_split_is_the_records_own_or_by_hash(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"p{n}", "answer": "x"} for n in range(400)]
    path = write(tmp_path / "a.jsonl", rows)
    counts = collect(tmp_path / "out", sources=[source(path)], heldout_share=0.1)
    expected = {f"p{n}": hash_split(f"p{n}", heldout_share=0.1) for n in range(400)}
    assert {each.messages[0]["content"]: each.split for each in collected(tmp_path / "out")} == expected
    heldout = [prompt for prompt, split in expected.items() if split == "heldout"]
    assert counts["heldout_conversations"] == len(heldout) > 10
    counts = collect(tmp_path / "out", sources=[source(path)], heldout_share=0.1, max_heldout=5)
    kept = [each.messages[0]["content"] for each in collected(tmp_path / "out") if each.split == "heldout"]
    assert sorted(kept, key=prompt_hash) == sorted(heldout, key=prompt_hash)[:5]
    assert counts["dropped"] == {"heldout_over_limit": len(heldout) - 5}
    own = write(tmp_path / "own.jsonl", [row(f"p{n}", split="train") for n in range(400)])
    assert collect(tmp_path / "out", sources=[source(own)], heldout_share=0.1)["heldout_conversations"] == 0


# --- the guard --------------------------------------------------------------------------------------------------------


def test_the_guard_removes_and_says_why(tmp_path: Path) -> None:
    passage = " ".join(LONG.split()[2:16])
    path = write(
        tmp_path / "a.jsonl",
        [
            row("clean"),
            row("say HELLO!", id="exact"),
            row("Fine.", f"Now: {passage}?", id="later turn"),
            row("held out prompt", "thank you", split="heldout"),
            row("Held-out prompt.", id="as held out"),
            row("again", "thank you"),
            row("from a file", id="in evaluation"),
            row("say hello", split="heldout", id="held out is not guarded"),
        ],
    )
    evaluation = source(write(tmp_path / "e.jsonl", [{"turns": ["what?", "From a file!"]}]), schema="pairs")
    counts = collect(
        tmp_path / "out", sources=[source(path)], evaluation=[evaluation], evaluation_prompts=["Say hello", LONG]
    )
    assert ids(tmp_path / "out") == ["clean", "held out prompt", "again", "held out is not guarded"]
    assert counts["dropped"] == {
        "overlaps_evaluation_exact": 2, "overlaps_evaluation_ngram": 1, "overlaps_heldout_exact": 1
    }  # fmt: skip
    assert counts["guard"] == {"exact": 3, "ngram": 1, "evaluation_prompts": 6}
    assert counts["evaluation"]["e"]["prompts"] == 2
    prompts = [json.loads(line) for line in (tmp_path / "out" / "evaluation_prompts.jsonl").read_text().splitlines()]
    assert prompts == [
        {"text": "what?", "from": "e"},
        {"text": "From a file!", "from": "e"},
        {"text": "Say hello", "from": "evaluation_prompts"},
        {"text": LONG, "from": "evaluation_prompts"},
        {"text": "held out prompt", "from": "heldout"},
        {"text": "say hello", "from": "heldout"},
    ]
    counts = collect(tmp_path / "out", sources=[source(path)], evaluation_prompts=[LONG], guard_ngram=None)
    assert "later turn" in ids(tmp_path / "out")
    assert collect(tmp_path / "out", sources=[source(path)], guard=False)["guard"]["evaluation_prompts"] == 0
    assert len(ids(tmp_path / "out")) == 8


def test_long_later_turns_of_the_held_out_side_are_guarded(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row("x", LONG, split="heldout"), row(f"{LONG} Please.", id="y"), row("z")])
    assert collect(tmp_path / "out", sources=[source(path)])["dropped"] == {"overlaps_heldout_ngram": 1}
    assert ids(tmp_path / "out") == ["x", "z"]


# --- nothing is lost, nothing half written ----------------------------------------------------------------------------

prompts = st.sampled_from(["a", "b b", "B  b", "c", LONG, LONG + " Thanks.", LONG.replace("sum", "mean"), "d", "e"])
records = st.one_of(
    st.builds(row, prompts, split=st.sampled_from(["train", "train", "heldout"]), id=st.sampled_from("xyz")),
    st.builds(row, prompts, prompts),
    st.sampled_from(["nonsense", {}, {"messages": []}, {"messages": [{"role": "assistant", "content": "a"}]}]),
)


@settings(max_examples=60, deadline=None)
@given(
    files=st.lists(st.lists(records, max_size=8), min_size=1, max_size=3),
    weighted=st.booleans(),
    near=st.none() | st.just(0.6),
    limits=st.tuples(st.none() | st.integers(1, 8), st.none() | st.integers(0, 2), st.none() | st.integers(1, 4)),
)
def test_every_row_is_kept_or_counted(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[Any]],
    weighted: bool,
    near: float | None,
    limits: tuple[int | None, int | None, int | None],
) -> None:
    folder = tmp_path_factory.mktemp("collect")
    sources = [
        source(write(folder / f"{n}.jsonl", [*rows, row(f"own {n}", id="x")]), weight=1 + n if weighted else None, limit=limits[2])
        for n, rows in enumerate(files)
    ]  # fmt: skip
    sources = [dataclasses.replace(each, schema="messages") for each in sources]
    try:
        counts = collect(
            folder / "out",
            sources=sources,
            on_bad_line="skip",
            near_duplicates=near,
            max_conversations=limits[0],
            max_heldout=limits[1],
            evaluation_prompts=[LONG],
        )
    except ValueError as error:
        assert "no training conversation is left" in str(error) or "data source" in str(error)
        return
    rows = collected(folder / "out")
    assert len({each.id for each in rows}) == len(rows) == counts["conversations"]
    assert counts["train_conversations"] + counts["heldout_conversations"] == len(rows)
    for n, lines in enumerate(files):
        tally = counts["sources"][str(n)]
        assert tally["read"] == tally["kept"] + sum(tally["dropped"].values())
        assert tally["read"] + tally["not_needed"] == len(lines) + 1
    assert sum(tally["kept"] for tally in counts["sources"].values()) == len(rows)
    total = Counter[str]()
    for tally in counts["sources"].values():
        total.update(tally["dropped"])
    assert counts["dropped"] == total
    json.dumps(counts, allow_nan=False)


def test_a_failure_leaves_the_last_result_and_no_scratch(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [row("a")])
    collect(tmp_path / "out", sources=[source(path)])
    before = (tmp_path / "out" / "conversations.jsonl").read_bytes()
    write(path, [row("b"), "nonsense"])
    with pytest.raises(ValueError, match=r"row 2 .*data\.on_bad_line=skip"):
        collect(tmp_path / "out", sources=[source(path)])
    assert (tmp_path / "out" / "conversations.jsonl").read_bytes() == before
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [
        "conversations.jsonl", "evaluation_prompts.jsonl"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": []}, "there are none"),
        ({"sources": ["a", "a"]}, "several are called 'a'"),
        ({"evaluation": ["weighted"]}, "has a weight"),
        ({"near_duplicates": 0.3}, "between 0.5 and 1"),
        ({"filters": Filters(min_characters=100)}, "no training conversation is left .*prompt_too_short"),
        ({"sources": ["weighted", "a"]}, "some have a weight"),
        ({"evaluation": ["empty"]}, "data source 'empty'"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    known = {
        "a": source(write(tmp_path / "a.jsonl", [row("a")])),
        "weighted": source(tmp_path / "a.jsonl", name="weighted", weight=1.0),
        "empty": source(write(tmp_path / "empty.jsonl", [])),
    }
    given = {"sources": ["a"], **settings}
    given |= {key: [known[name] for name in given[key]] for key in ("sources", "evaluation") if key in given}
    with pytest.raises(ValueError, match=message):
        collect(tmp_path / "out", **given)


def test_memory_does_not_hold_the_conversations(tmp_path: Path) -> None:
    """20 MB of answers pass through; what is held at the peak is a tenth of it, buffers and tables included."""
    path = tmp_path / "a.jsonl"

    def talk(number: int) -> Conversation:
        answer = {"role": "assistant", "content": f"{number} " * 2500}
        return Conversation(f"{number}", "train", "s", False, [{"role": "user", "content": f"prompt {number}"}, answer])

    write_conversations(path, map(talk, range(2000)))
    size = path.stat().st_size
    assert size > 20e6
    collect(tmp_path / "warm", sources=[source(path)], max_conversations=10)
    tracemalloc.start()
    collect(tmp_path / "out", sources=[source(path)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(ids(tmp_path / "out")) == 2000
    assert peak < size / 10
