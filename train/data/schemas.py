"""How rows of foreign data hold a conversation, and their conversion to ours.

    messages   a list of {"role", "content"} as OpenAI writes it: tool calls, tool results, reasoning, content in parts
    sharegpt   a list of {"from", "value"}: human, gpt, system, function_call, observation, ...
    pairs      a column with the prompt and one with the answer; "input" beside an instruction belongs to the prompt
    prompts    pairs without an answer; several prompts in a list are the user's turns of an evaluation set, which can be
               guarded against but, having nothing between them, not be trained on
    text       a column `text`, taken as one user turn that waits for an answer

`detect_schema` looks at the first rows and says which of these they are, by the usual column names or by those the
user gave. Conversion renames and unpacks only; whether the result is a conversation is decided in train/data/messages.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eyas.heads.chat import Message
from eyas.train.data.foreign_messages import openai_message, sharegpt_messages, tool_list
from eyas.train.data.messages import BadConversation

Form = Literal["messages", "sharegpt", "pairs", "prompts", "text"]
SchemaSetting = Literal["auto", "messages", "sharegpt", "pairs", "text"]
Row = Mapping[str, Any]

# Usual names, the commonest first.
MESSAGES = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
PROMPTS = ("prompt", "instruction", "question", "query", "problem", "user", "turns")
ANSWERS = ("response", "output", "answer", "completion", "chosen", "solution", "assistant")
LESSER = {
    "system": ("system", "system_prompt"),
    "tools": ("tools",),
    "id": ("id", "prompt_id", "question_id", "task_id", "conversation_id", "conversation_hash", "uuid"),
}
MAIN_ROLES: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("messages",),
    "pairs": ("prompt", "input", "answer"),
    "text": ("text",),
}
COLUMN_ROLES = ("messages", "prompt", "input", "answer", "text", "reasoning", "system", "tools", "id")
"""What `columns` of a source may name."""


@dataclass(frozen=True)
class Schema:
    """The form of a source's rows, and the column of each part of a conversation."""

    form: Form
    columns: dict[str, str]

    def __str__(self) -> str:
        main = {role: column for role, column in self.columns.items() if role not in LESSER}
        return f"{self.form} ({', '.join(f'{role}: {column}' for role, column in main.items())})"


def detect_schema(
    rows: Sequence[Row], *, form: SchemaSetting = "auto", columns: Mapping[str, str] | None = None
) -> Schema:
    """The schema that the first rows of a source share.

    Args:
        form: what the user says it is; "auto" finds out.
        columns: columns the user names, by role (`COLUMN_ROLES`).

    Raises:
        ValueError: the rows fit no schema, or different ones; the message names the columns and what to set.
    """
    columns = columns or {}
    merged: dict[str, Any] = {}
    for row in rows:
        merged |= {name: value for name, value in row.items() if value and name not in merged}
    names = sorted({name for row in rows for name in row})
    _check_columns(columns, names=names)
    schema = _schema_of(merged, form=form, columns=columns)
    mend = (
        f"they have the columns {', '.join(names) or '(none)'}; set the source's format (messages, sharegpt, pairs or text) and its columns, "
        "such as {prompt: question, answer: reply}"
    )
    if schema is None:
        known = "of no known schema" if form == "auto" else f"not in the form {form!r}"
        raise ValueError(f"the first rows are {known}; {mend}")
    for row in rows:
        own = _schema_of(row, form=form, columns=columns)
        if own is not None and own.columns[_main(own)] != schema.columns[_main(schema)]:
            raise ValueError(f"the first rows are of different schemas, {schema} and {own}; {mend}")
    return schema


def to_record(row: Row, schema: Schema) -> dict[str, Any]:
    """A record in the form of a conversation file, not checked yet: `messages`, and `tools` and `id` where there are any.

    Raises:
        BadConversation: a part of the row is not what the schema says.
    """
    columns = schema.columns
    value = row.get(columns[_main(schema)])
    if schema.form in ("messages", "sharegpt"):
        if not isinstance(value, list) or not value:
            raise BadConversation("no_messages", f"{columns['messages']!r} is missing or empty")
        messages = sharegpt_messages(value) if schema.form == "sharegpt" else [openai_message(each) for each in value]
    else:
        messages = [{"role": "user", "content": text} for text in _prompt_texts(row, value, columns=columns)]
        messages += _answer(row, columns=columns)
    system = row.get(columns.get("system", ""))
    if isinstance(system, str) and system.strip() and not _begins_with_system(messages):
        messages.insert(0, {"role": "system", "content": system})
    record: dict[str, Any] = {"messages": messages}
    tools = tool_list(row.get(columns.get("tools", "")))
    if tools:
        record["tools"] = tools
    own_id = row.get(columns.get("id", ""))
    if isinstance(own_id, str | int) and own_id != "":
        record["id"] = str(own_id)
    return record


def user_texts(record: Mapping[str, Any]) -> list[str]:
    """Texts of the user turns of a record, whether or not the rest of it is a conversation."""
    messages = record["messages"]
    return [
        message["content"]
        for message in messages
        if isinstance(message, Mapping)
        and message.get("role") == "user"
        and isinstance(message.get("content"), str)
        and message["content"].strip()
    ]


def _check_columns(columns: Mapping[str, str], *, names: Sequence[str]) -> None:
    for role, column in columns.items():
        if role not in COLUMN_ROLES:
            raise ValueError(f"columns: {role!r} is no part of a conversation; use {', '.join(COLUMN_ROLES)}")
        if column not in names:
            raise ValueError(f"columns: the first rows have no column {column!r}; theirs are {', '.join(names)}")


def _schema_of(row: Row, *, form: SchemaSetting, columns: Mapping[str, str]) -> Schema | None:
    named = {role for roles in MAIN_ROLES.values() for role in roles} & set(columns)
    kinds = (
        [form] if form != "auto" else [kind for kind, roles in MAIN_ROLES.items() if not named or named & set(roles)]
    )
    schema = next((schema for kind in kinds if (schema := _as_kind(row, kind, columns=columns))), None)
    if schema is None:
        return None
    # Later rows may have what the first ones lack, so each of these is looked for under its commonest name at least.
    lesser = {role: next((name for name in names if row.get(name)), names[0]) for role, names in LESSER.items()}
    free = {role: name for role, name in lesser.items() if name not in schema.columns.values()}
    return Schema(schema.form, schema.columns | free | dict(columns))


def _as_kind(row: Row, kind: str, *, columns: Mapping[str, str]) -> Schema | None:
    """The schema of a row if it is of this kind, with its main columns only."""
    if kind == "text":
        column = columns.get("text", "text")
        return Schema("text", {"text": column}) if isinstance(row.get(column), str) else None
    if kind == "pairs":
        return _as_pair(row, columns=columns)
    names = (columns["messages"],) if "messages" in columns else MESSAGES
    who, what = ("role", "content") if kind == "messages" else ("from", "value")
    column = next((name for name in names if _has_turns(row.get(name), who, what)), None)
    if column is None:
        return None
    return Schema("messages" if kind == "messages" else "sharegpt", {"messages": column})


def _as_pair(row: Row, *, columns: Mapping[str, str]) -> Schema | None:
    def first(role: str, names: Sequence[str]) -> str | None:
        usual = (name for name in names if isinstance(row.get(name), str) or _is_texts(row.get(name)))
        return columns.get(role) or next(usual, None)

    answer = first("answer", ANSWERS)
    prompt = first("prompt", PROMPTS) or first("prompt", ["input"])
    if prompt is None or row.get(prompt) is None:
        return None
    parts = {"prompt": prompt}
    more = columns.get("input") or ("input" if prompt == "instruction" and answer != "input" else None)
    if more is not None:
        parts["input"] = more
    return Schema("prompts", parts) if answer is None else Schema("pairs", parts | {"answer": answer})


def _prompt_texts(row: Row, value: Any, *, columns: Mapping[str, str]) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise BadConversation("content_not_text", "the prompt is not a text")
    more = row.get(columns.get("input", ""))
    return [f"{texts[0]}\n\n{more}", *texts[1:]] if isinstance(more, str) and more.strip() else texts


def _answer(row: Row, *, columns: Mapping[str, str]) -> list[Message]:
    """The assistant turn of a pair; none where the row has no answer."""
    text, reasoning = row.get(columns.get("answer", "")), row.get(columns.get("reasoning", ""))
    if text is None:
        return []
    return [{"role": "assistant", "content": text, **({"reasoning_content": reasoning} if reasoning else {})}]


def _main(schema: Schema) -> str:
    return {"messages": "messages", "sharegpt": "messages", "text": "text"}.get(schema.form, "prompt")


def _has_turns(value: Any, who: str, what: str) -> bool:
    return (
        isinstance(value, list)
        and any(isinstance(turn, Mapping) and who in turn for turn in value)
        and any(isinstance(turn, Mapping) and what in turn for turn in value)
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _begins_with_system(messages: Sequence[Any]) -> bool:
    return bool(messages) and isinstance(messages[0], Mapping) and messages[0].get("role") in ("system", "developer")
