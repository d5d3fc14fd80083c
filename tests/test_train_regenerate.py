"""The target writes the conversations: what is asked, what is kept, and the real worker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eyas.heads.chat import TargetChat
from eyas.train.data import regenerate as module
from eyas.train.data.conversations import read_conversations
from eyas.train.data.generate import GenerationRequest, generate
from eyas.train.data.prompts import Prompt
from eyas.train.data.regenerate import OUTPUT_NAME, EngineSettings, regenerate

LOOP = "again and again and again and again and again and again and again"


def _engine(target: Path) -> EngineSettings:
    return EngineSettings(
        target_dir=target, dtype="float32", max_model_len=256, batch_size=4, seed=0, threads=1, kv_cache_gib=1
    )


def _regenerate(out_dir: Path, target: Path, *, heldout_prompts: int) -> dict[str, int]:
    topics, openers = out_dir / "topics.txt", out_dir / "openers.txt"
    topics.write_text("one\ntwo\n")
    openers.write_text("How\n")
    return regenerate(
        out_dir,
        engine=_engine(target),
        topics=topics,
        openers=openers,
        self_prompts=0,
        chitchat=4,
        chatterbot=0,
        evals=0,
        heldout_prompts=heldout_prompts,
        temperature=0.7,
        min_p=0.02,
        max_tokens=32,
        max_repeated_8gram_share=0.3,
        trust_remote_code=False,
    )


def test_every_answer_is_asked_after_the_ones_before_and_loops_are_dropped(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = TargetChat(tiny_target)
    asked: dict[str, GenerationRequest] = {}

    def answer(requests: Sequence[GenerationRequest], **_settings: Any) -> dict[str, dict[str, Any]]:
        asked.update({request.id: request for request in requests})
        found = {}
        for request in requests:
            prompt = chat.tokenizer.decode(request.token_ids)
            text = LOOP if "loop here" in prompt else f"answer to {len(request.token_ids)} tokens"
            found[request.id] = {
                "id": request.id,
                "token_ids": chat.encode(text),
                "finish_reason": "length" if "cut here" in prompt else "stop",
            }
        return found

    prompts = [
        Prompt("chitchat", None, ["first question", "second question"]),
        Prompt("chitchat", "be kind", ["other question", "loop here"]),
        Prompt("chitchat", None, ["loop here at once", "never asked"]),
        Prompt("chitchat", None, ["cut here please", "never asked either"]),
    ]
    monkeypatch.setattr(module, "generate", answer)
    monkeypatch.setattr(module, "chitchat_prompts", lambda _count, **_: prompts)
    counts = _regenerate(tmp_path, tiny_target, heldout_prompts=0)
    rows, _ = read_conversations(tmp_path / OUTPUT_NAME, on_bad_line="stop")
    assert [len([m for m in row.messages if m["role"] == "assistant"]) for row in rows] == [2, 1, 1]
    assert [row.truncated for row in rows] == [False, False, True]
    assert all(row.messages[-1]["role"] == "assistant" for row in rows)
    assert counts["conversations"] == 3
    assert counts["conversations_looping"] == 2
    second = asked["chitchat-000000-1"]
    assert second.token_ids == chat.prompt_ids(rows[0].messages[:3])
    assert second.temperature == 0.7


def test_heldout_prompts_are_answered_greedily_once(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = TargetChat(tiny_target)
    temperatures: dict[str, float] = {}

    def answer(requests: Sequence[GenerationRequest], **_settings: Any) -> dict[str, dict[str, Any]]:
        temperatures.update({request.id: request.temperature for request in requests})
        return {
            request.id: {"id": request.id, "token_ids": chat.encode("fine"), "finish_reason": "stop"}
            for request in requests
        }

    prompts = [Prompt("chitchat", None, [f"question {i}", "and then"]) for i in range(6)]
    monkeypatch.setattr(module, "generate", answer)
    monkeypatch.setattr(module, "chitchat_prompts", lambda _count, **_: prompts)
    counts = _regenerate(tmp_path, tiny_target, heldout_prompts=2)
    rows, _ = read_conversations(tmp_path / OUTPUT_NAME, on_bad_line="stop")
    heldout = [row for row in rows if row.split == "heldout"]
    assert len(heldout) == counts["conversations_heldout"] == 2
    assert all(len(row.messages) == 2 and temperatures[f"{row.id}-0"] == 0.0 for row in heldout)
    assert sum(temperature == 0.0 for temperature in temperatures.values()) == 2


@pytest.mark.engine
def test_the_worker_generates_what_is_missing_and_keeps_what_is_there(tmp_path: Path, tiny_target: Path) -> None:
    engine = _engine(tiny_target)
    requests = [
        GenerationRequest(id=f"r{i}", token_ids=[3 + i, 4, 5], temperature=0.0, min_p=0.0, max_tokens=6)
        for i in range(6)
    ]
    kept = {"id": "r2", "token_ids": [1], "finish_reason": "stop"}
    (tmp_path / "answers.jsonl").write_text(json.dumps(kept) + '\n{"id": "r3", "tok')  # as a kill leaves it
    answers = generate(
        requests,
        work_dir=tmp_path,
        name="answers",
        target_dir=tiny_target,
        stop_token_ids=[2],
        max_model_len=engine.max_model_len,
        batch_size=engine.batch_size,
        dtype=engine.dtype,
        seed=0,
        threads=1,
        kv_cache_gib=1,
    )
    assert answers.keys() == {request.id for request in requests}
    assert answers["r2"] == kept
    assert all(1 <= len(answers[f"r{i}"]["token_ids"]) <= 6 for i in (0, 1, 3, 4, 5))
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 6
