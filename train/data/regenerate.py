"""Conversations whose every assistant turn the target wrote itself: `data.regenerate=true`.

Acceptance is agreement with the target, so a head is trained on what the target says, not on what somebody else once
answered. Training answers are sampled at a moderate temperature; held-out answers are greedy, because the quickstart
scores greedy decoding and the held-out tau is exact only on text the target would produce in that mode.

Answers that loop are dropped: a head learns nothing from them, and they make acceptance look better than it is. Their
number is in the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eyas.heads.chat import TargetChat
from eyas.train.data.conversations import Conversation, prompt_hash, write_conversations
from eyas.train.data.generate import GenerationRequest, generate
from eyas.train.data.prompts import (
    Prompt,
    chatterbot_prompts,
    chitchat_prompts,
    deduplicate,
    evals_prompts,
    self_prompt_seeds,
    usable,
)

OUTPUT_NAME = "conversations.jsonl.gz"
SELF_PROMPT_TEMPERATURE = 0.9
SELF_PROMPT_MIN_P = 0.05
SELF_PROMPT_MAX_TOKENS = 80
LOOP_NGRAM = 8


@dataclass(frozen=True)
class EngineSettings:
    """How the generation worker runs vLLM; none of these is meant to change what is said, only how fast."""

    target_dir: Path
    dtype: str
    max_model_len: int
    batch_size: int
    seed: int
    threads: int
    kv_cache_gib: int


@dataclass
class _Dialogue:
    """A conversation in the making: the next user turn is `turns[answered]`."""

    id: str
    prompt: Prompt
    heldout: bool
    messages: list[dict[str, str]]
    answered: int = 0
    truncated: bool = False
    dropped: bool = False
    history: list[str] = field(default_factory=list)


def regenerate(
    out_dir: Path,
    *,
    engine: EngineSettings,
    topics: Path,
    openers: Path,
    self_prompts: int,
    chitchat: int,
    chatterbot: int,
    evals: int,
    heldout_prompts: int,
    temperature: float,
    min_p: float,
    max_tokens: int,
    max_repeated_8gram_share: float,
    trust_remote_code: bool,
) -> dict[str, int]:
    """Write `conversations.jsonl.gz` into `out_dir`; a killed run continues where it stopped.

    Args:
        self_prompts: user turns for the target to write; chitchat, chatterbot, evals: prompts from those packages.
        heldout_prompts: so many prompts, chosen by their hash, are answered greedily and kept out of training.
        max_tokens: limit of one answer in tokens; longer ones are cut and marked.
        max_repeated_8gram_share: an answer with a larger share of repeated 8-grams counts as a loop and is dropped.

    Returns:
        Counts of prompts, conversations, answer tokens and everything dropped.
    """
    chat = TargetChat(engine.target_dir, trust_remote_code=trust_remote_code)
    own, counts = _self_written(
        self_prompts, chat=chat, engine=engine, work_dir=out_dir, topics=_lines(topics), openers=_lines(openers)
    )
    packaged = [
        *(chitchat_prompts(chitchat, seed=engine.seed) if chitchat else []),
        *(chatterbot_prompts(chatterbot, seed=engine.seed) if chatterbot else []),
        *(evals_prompts(evals, seed=engine.seed) if evals else []),
    ]
    prompts, dropped = deduplicate([*packaged, *own])
    dialogues = _dialogues(prompts, heldout_prompts=heldout_prompts)
    rounds = max(len(dialogue.prompt.turns) for dialogue in dialogues)
    for turn in range(rounds):
        _answer_round(
            [dialogue for dialogue in dialogues if not dialogue.dropped and len(dialogue.prompt.turns) > turn],
            turn=turn,
            chat=chat,
            engine=engine,
            work_dir=out_dir,
            temperature=temperature,
            min_p=min_p,
            max_tokens=max_tokens,
            max_repeated_share=max_repeated_8gram_share,
        )
    finished = [dialogue for dialogue in dialogues if dialogue.answered]
    write_conversations(out_dir / OUTPUT_NAME, [_conversation(dialogue) for dialogue in finished])
    return {
        **counts,
        **dropped,
        "prompts": len(prompts),
        "conversations": len(finished),
        "conversations_heldout": sum(dialogue.heldout for dialogue in finished),
        "conversations_looping": sum(dialogue.dropped for dialogue in dialogues),
        "answer_tokens": sum(len(chat.encode(text)) for dialogue in finished for text in dialogue.history),
    }


def repeated_ngram_share(token_ids: Sequence[int], *, n: int = LOOP_NGRAM) -> float:
    """Share of the n-grams of `token_ids` that occurred before; 0 for texts shorter than two n-grams."""
    ngrams = [tuple(token_ids[start : start + n]) for start in range(len(token_ids) - n + 1)]
    return 0.0 if len(ngrams) < n else 1.0 - len(set(ngrams)) / len(ngrams)


def _self_written(
    count: int,
    *,
    chat: TargetChat,
    engine: EngineSettings,
    work_dir: Path,
    topics: list[str],
    openers: list[str],
) -> tuple[list[Prompt], dict[str, int]]:
    """User turns sampled from the bare user prefix; the topic's system prompt is not kept in the conversation."""
    if not count:
        return [], {}
    seeds = self_prompt_seeds(count, topics=topics, openers=openers, seed=engine.seed)
    requests = [
        GenerationRequest(
            id=f"self-{index:06d}",
            token_ids=chat.encode(chat.user_turn_prefix(system=seed.system) + seed.opener),
            temperature=SELF_PROMPT_TEMPERATURE,
            min_p=SELF_PROMPT_MIN_P,
            max_tokens=SELF_PROMPT_MAX_TOKENS,
        )
        for index, seed in enumerate(seeds)
    ]
    answers = _generate(requests, name="self-prompts", chat=chat, engine=engine, work_dir=work_dir)
    texts = [
        (seed.opener + chat.decode(answers[request.id]["token_ids"])).strip()
        for seed, request in zip(seeds, requests, strict=True)
        if answers[request.id]["finish_reason"] == "stop"
        and repeated_ngram_share(answers[request.id]["token_ids"]) < 0.1
    ]
    prompts = [Prompt(source="self", system=None, turns=[text]) for text in texts if usable(text)]
    return prompts, {"self_prompts_sampled": len(requests), "self_prompts_usable": len(prompts)}


def _dialogues(prompts: Sequence[Prompt], *, heldout_prompts: int) -> list[_Dialogue]:
    by_hash = sorted(range(len(prompts)), key=lambda index: prompt_hash(prompts[index].turns[0]))
    heldout = set(by_hash[:heldout_prompts])
    return [
        _Dialogue(
            id=f"{prompt.source}-{index:06d}",
            # A held-out conversation has one turn: it is the prompt that scoring sends to the server.
            prompt=replace(prompt, turns=prompt.turns[:1]) if index in heldout else prompt,
            heldout=index in heldout,
            messages=[] if prompt.system is None else [{"role": "system", "content": prompt.system}],
        )
        for index, prompt in enumerate(prompts)
    ]


def _answer_round(
    dialogues: Sequence[_Dialogue],
    *,
    turn: int,
    chat: TargetChat,
    engine: EngineSettings,
    work_dir: Path,
    temperature: float,
    min_p: float,
    max_tokens: int,
    max_repeated_share: float,
) -> None:
    """Let the target answer turn number `turn` of each dialogue, and drop what loops."""
    requests = []
    asked = [dialogue for dialogue in dialogues if not dialogue.truncated]
    for dialogue in asked:
        dialogue.messages.append({"role": "user", "content": dialogue.prompt.turns[turn]})
        requests.append(
            GenerationRequest(
                id=f"{dialogue.id}-{turn}",
                token_ids=chat.prompt_ids(dialogue.messages),
                temperature=0.0 if dialogue.heldout else temperature,
                min_p=min_p,
                max_tokens=max_tokens,
            )
        )
    answers = _generate(requests, name=f"answers-{turn}", chat=chat, engine=engine, work_dir=work_dir)
    for dialogue, request in zip(asked, requests, strict=True):
        _take_answer(dialogue, answers[request.id], chat=chat, max_repeated_share=max_repeated_share)


def _take_answer(dialogue: _Dialogue, answer: dict[str, Any], *, chat: TargetChat, max_repeated_share: float) -> None:
    text = chat.decode(answer["token_ids"])
    if repeated_ngram_share(answer["token_ids"]) > max_repeated_share or not text.strip():
        dialogue.messages.pop()  # the unanswered user turn; earlier turns of the dialogue stay
        dialogue.dropped = True
        return
    dialogue.messages.append({"role": "assistant", "content": text})
    dialogue.history.append(text)
    dialogue.answered += 1
    dialogue.truncated = answer["finish_reason"] == "length"


def _conversation(dialogue: _Dialogue) -> Conversation:
    return Conversation(
        id=dialogue.id,
        split="heldout" if dialogue.heldout else "train",
        source=dialogue.prompt.source,
        truncated=dialogue.truncated,
        messages=dialogue.messages,
    )


def _generate(
    requests: list[GenerationRequest], *, name: str, chat: TargetChat, engine: EngineSettings, work_dir: Path
) -> dict[str, dict[str, Any]]:
    return generate(
        requests,
        work_dir=work_dir,
        name=name,
        target_dir=engine.target_dir,
        stop_token_ids=chat.stop_token_ids,
        max_model_len=engine.max_model_len,
        batch_size=engine.batch_size,
        dtype=engine.dtype,
        seed=engine.seed,
        threads=engine.threads,
        kv_cache_gib=engine.kv_cache_gib,
    )


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").rstrip("\n").split("\n")
