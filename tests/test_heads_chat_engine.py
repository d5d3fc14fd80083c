"""Our prompts against vLLM's own rendering, to the token: `LLM.chat`, and the request form of its OpenAI server.

One engine with a tiny random target serves the templates of all families. It runs in a process of its own, as this file
started as a module.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas.heads.chat import TargetChat
from eyas.heads.serving import engine_environment
from tests import chat_templates as templates
from tests import tiny

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parent.parent
USER = {"role": "user", "content": "  rain in Bonn?\n"}
TURNS = [USER, {"role": "assistant", "content": "\n yes "}, {"role": "user", "content": "more <|im_end|>\n\nth"}]
REASONED = [USER, {"role": "assistant", "content": "yes", "reasoning_content": "look\nup"}, TURNS[2]]
SYSTEM = [{"role": "system", "content": "be brief "}, *TURNS]
DEVELOPER = [{"role": "system", "content": "be brief"}, {"role": "developer", "content": "and kind"}, *TURNS]
TOOL_USE = [
    USER,
    {"role": "assistant", "content": "", "reasoning_content": "must look", "tool_calls": [templates.CALL]},
    {"role": "tool", "content": "wet", "tool_call_id": "call-1"},
    {"role": "assistant", "content": "It rains."},
    {"role": "user", "content": "thanks"},
]
NULL_CONTENT = [{**message, "content": message["content"] or None} for message in TOOL_USE]
BROKEN_CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": "{broken"}}
BROKEN_TOOL_USE = [USER, {"role": "assistant", "content": "", "tool_calls": [BROKEN_CALL]}, *TOOL_USE[2:]]
BARE_TOOLS = [{"function": {"parameters": {"type": "object"}, "name": "weather", "extra": 1}, "type": "function"}]

CASES: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]] = {
    "chatml": ("chatml", TURNS, None, {}),
    "chatml-system": ("chatml", SYSTEM, None, {}),
    "chatml-developer": ("chatml", DEVELOPER, None, {}),
    "llama3": ("llama3", SYSTEM, None, {}),
    "llama3-tools": ("llama3", TOOL_USE, templates.TOOLS, {}),
    "llama3-broken-call": ("llama3", BROKEN_TOOL_USE, templates.TOOLS, {}),
    "qwen3-on": ("qwen3", REASONED, None, {"enable_thinking": True}),
    "qwen3-off": ("qwen3", REASONED, None, {"enable_thinking": False}),
    "qwen3-tools": ("qwen3", TOOL_USE, templates.TOOLS, {}),
    "qwen3-tool-loop": ("qwen3", TOOL_USE[:3], templates.TOOLS, {}),
    "qwen3-bare-tools": ("qwen3", TOOL_USE, BARE_TOOLS, {}),
    "thinking-only": ("thinking-only", REASONED, None, {}),
    "r1": ("r1", REASONED, None, {}),
    "mistral": ("mistral", TURNS, None, {}),
    "mistral-late-system": ("mistral-late-system", SYSTEM, None, {}),
    "harmony": ("harmony", DEVELOPER[1:], None, {"reasoning_effort": "low"}),
    "harmony-tools": ("harmony", TOOL_USE, templates.TOOLS, {}),
    "tagged": ("tagged-header", REASONED, None, {"enable_thinking": False}),
    "phi": ("phi", SYSTEM, None, {}),
    "parts": ("parts", SYSTEM, None, {}),
    "parts-developer": ("parts", DEVELOPER, None, {}),
    "parts-tools": ("parts", NULL_CONTENT, templates.TOOLS, {}),
    "qwen3-null-content": ("qwen3", NULL_CONTENT, templates.TOOLS, {}),
    "glm-off": ("glm", REASONED, None, {"enable_thinking": False}),
    "glm-tools": ("glm", TOOL_USE, templates.TOOLS, {}),
    "cohere": ("cohere", SYSTEM, None, {}),
}
"""Family, conversation, tools, template options."""


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM makes of every case: `offline` and `server`, token ids or the text of an exception."""
    directory = tmp_path_factory.mktemp("rendering")
    target = tiny.write_target(directory / "target", num_layers=2)
    templates.write_chat(target, templates.CHATML)
    cases = {
        name: {
            "template": templates.FAMILIES[family].template,
            "messages": messages,
            "tools": tools,
            "options": options,
        }
        for name, (family, messages, tools, options) in CASES.items()
    }
    (directory / "cases.json").write_text(json.dumps(cases))
    with (directory / "engine.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "tests.test_heads_chat_engine", str(directory)],
            cwd=ROOT,
            env=engine_environment(threads=1, kv_cache_gib=1),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=600,
            check=False,
        )
    output = directory / "rendered.json"
    assert output.is_file(), (directory / "engine.log").read_text()[-4000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_those_of_vllm(rendered: dict[str, dict[str, Any]], name: str, tmp_path: Path) -> None:
    family, messages, tools, options = CASES[name]
    chat = TargetChat(
        templates.write_chat(tmp_path, templates.FAMILIES[family]),
        template_options=options,
    )
    ours = chat.prompt_ids(messages, tools=tools)
    assert ours == rendered[name]["server"]
    if tools is not BARE_TOOLS:  # LLM.chat does not complete tools, as the server does
        assert ours == rendered[name]["offline"]


def test_each_document_begins_with_the_prompt_of_vllm(rendered: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """The last document of the conversation whose next answer vLLM was asked for."""
    for name, answer in (("llama3-tools", "ok"), ("qwen3-off", "ok"), ("mistral-late-system", "ok"), ("chatml", "ok")):
        family, messages, tools, options = CASES[name]
        chat = TargetChat(
            templates.write_chat(tmp_path / name, templates.FAMILIES[family]),
            template_options=options,
        )
        documents = chat.encode_conversation([*messages, {"role": "assistant", "content": answer}], tools=tools)
        prompt = rendered[name]["server"]
        assert documents[-1].token_ids[: len(prompt)] == prompt
        assert not documents[-1].answer_mask[len(prompt) - 1]
        assert all(documents[-1].answer_mask[len(prompt) :])


def main(directory: Path) -> None:
    """Render every case with vLLM."""
    from vllm import LLM

    llm = LLM(
        str(directory / "target"), dtype="float32", max_model_len=512, max_num_seqs=1, enforce_eager=True,
        num_gpu_blocks_override=16,
    )  # fmt: skip
    cases = json.loads((directory / "cases.json").read_text())
    output = {
        name: {"offline": _attempt(_render_offline, llm, case), "server": _attempt(_render_as_server, llm, case)}
        for name, case in cases.items()
    }
    llm.llm_engine.engine_core.shutdown()
    (directory / "rendered.json").write_text(json.dumps(output))


def _attempt(function: Any, llm: Any, case: dict[str, Any]) -> list[int] | str:
    try:
        return list(function(llm, copy.deepcopy(case)))  # vLLM parses arguments in the caller's own messages
    except Exception as error:  # shown by the assertion that compares
        return repr(error)


def _render_offline(llm: Any, case: dict[str, Any]) -> list[int]:
    from vllm import SamplingParams

    # LLM.chat reads `reasoning` only; the server renames `reasoning_content`.
    messages = [
        {"reasoning" if key == "reasoning_content" else key: value for key, value in message.items()}
        for message in case["messages"]
    ]
    outputs = llm.chat(
        messages,
        SamplingParams(max_tokens=1),
        use_tqdm=False,
        chat_template=case["template"],
        tools=case["tools"],
        chat_template_kwargs=case["options"],
    )
    return outputs[0].prompt_token_ids


def _render_as_server(llm: Any, case: dict[str, Any]) -> list[int]:
    """The steps of `OnlineRenderer.preprocess_chat`, which wants a server around it."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(
        model="tiny", messages=case["messages"], tools=case["tools"], chat_template_kwargs=case["options"]
    )
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    parameters = request.build_chat_params(case["template"], "auto").with_defaults({"tools": tools, "tokenize": False})
    _, (prompt,) = llm.renderer.render_chat([request.messages], parameters, request.build_tok_params(llm.model_config))
    return prompt["prompt_token_ids"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
