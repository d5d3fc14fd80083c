"""Chat templates of the usual families, small, in words of our own but built like the real ones; and one tokenizer.

The tokenizer knows the special tokens of all of them and merges bytes across lines, so that the tokens of a text are
often others than those of its parts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    "<s>",
    "</s>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "[INST]",
    "[/INST]",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that are not special, as in Qwen3."""

_MERGES = [("Ċ", "Ċ"), ("h", "e"), ("l", "l"), ("Ġ", "t"), (">", "Ċ"), ("t", "h"), ("ĊĊ", "a"), ("Ġ", "Ġ"), (":", "Ġ")]


@dataclass(frozen=True)
class Family:
    """A template, and the end-of-sequence tokens of the targets that use it."""

    template: str
    stops: tuple[str, ...]


CHATML = Family(
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_end|>", "<|endoftext|>"),
)
LLAMA3 = Family(
    """<|begin_of_text|>
{%- macro head(role) %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n{% endmacro %}
{%- if tools %}{{ head('system') }}Tools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|eot_id|>{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ head('ipython') }}{{ message.content | tojson }}<|eot_id|>
    {%- elif message.tool_calls %}
        {%- set function = message.tool_calls[0].function %}
        {{- head('assistant') }}{"name": "{{ function.name }}", "parameters": {{ function.arguments | tojson }}}<|eom_id|>
    {%- else %}{{ head(message.role) }}{{ message.content | trim }}<|eot_id|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}""",
    ("</s>", "<|eom_id|>", "<|eot_id|>"),
)
_QWEN3 = """
{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}# Tools
{%- for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n
{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}
{%- set asked = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content or '' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > asked.last and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + message.content.lstrip('\n') }}
        {%- else %}{{ message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
    {%- PROMPT %}
{%- endif %}"""
QWEN3 = Family(
    _QWEN3.replace(
        "{%- PROMPT %}",
        "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
    ),
    ("<|im_end|>", "<|endoftext|>"),
)
THINKING_ONLY = Family(_QWEN3.replace("{%- PROMPT %}", "{{- '<think>\\n' }}"), ("<|im_end|>",))
"""Qwen3-Thinking: the generation prompt opens the think block."""
R1 = Family(
    "<s>{% for message in messages %}{% if message.role == 'user' %}<|user|>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<|assistant|>{{ message.content.split('</think>')[-1] }}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
    ("</s>",),
)
"""DeepSeek-R1: the generation prompt opens a think block that no rendered answer has."""
MISTRAL = Family(
    """<s>
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user and assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}{{ '[INST] ' + message.content + '[/INST]' }}
    {%- else %}{{ ' ' + message.content + '</s>' }}{% endif %}
{%- endfor %}""",
    ("</s>",),
)
MISTRAL_LATE_SYSTEM = Family(
    """<s>
{%- if messages[0].role == 'system' %}{% set system, turns = messages[0].content + '\n\n', messages[1:] %}
{%- else %}{% set system, turns = '', messages %}{% endif %}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system if turns[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list | length == 0
            else '') + message.content + '[/INST]' }}
    {%- else %}{{ ' ' + message.content + '</s>' }}{% endif %}
{%- endfor %}""",
    ("</s>",),
)
"""Mistral v3: the system turn stands in the last user turn, so it moves with every turn."""
HARMONY = Family(
    """<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- for message in messages %}
    {%- set late = messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list | length == 0 %}
    {%- if message.role in ('system', 'developer') %}<|start|>developer<|message|>{{ message.content }}<|end|>
    {%- elif message.role == 'user' %}<|start|>user<|message|>{{ message.content }}<|end|>
    {%- elif message.role == 'tool' %}<|start|>functions.it to=assistant<|channel|>commentary<|message|>
        {{- message.content | tojson }}<|end|>
    {%- else %}
        {%- if message.reasoning_content and (late and (message.tool_calls or loop.last)) %}<|start|>assistant
            {{- '<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}
        {%- endif %}
        {%- if message.tool_calls %}<|start|>assistant to=functions.{{ message.tool_calls[0].function.name }}
            {{- '<|channel|>commentary json<|message|>' }}{{ message.tool_calls[0].function.arguments | tojson }}<|call|>
        {%- else %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}
            {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}""",
    ("<|return|>", "<|call|>"),
)
TAGGED = Family(
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_end|>",),
)
"""Tags around the text alone."""
TAGGED_HEADER = Family(
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n' }}"
    "{% if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n' }}"
    "{% else %}{{ '<think>\n\n</think>\n' }}{% endif %}{{ message.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n' }}{% endif %}{% endif %}",
    ("<|im_end|>",),
)
"""SmolLM3: tags around the header, an empty think block and the line after the turn as well."""
PHI = Family(
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
    ("<|endoftext|>", "<|assistant|>", "<|end|>"),
)
"""A second end-of-sequence token at the end of the text."""
PARTS = Family(
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content | trim }}{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_end|>",),
)
"""Text is trimmed, but the parts that the server makes of it are not."""

GLM = Family(
    "{% for message in messages %}{% if message.role == 'user' %}<|user|>\n{{ message.content }}"
    "{{ '/nothink' if enable_thinking is defined and not enable_thinking else '' }}"
    "{% elif message.role == 'assistant' %}<|assistant|>\n"
    "{% if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}"
    "{% else %}<think></think>{% endif %}{{ '\n' + message.content if message.content else '' }}"
    "{% for call in message.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}"
    "{% elif message.role == 'tool' %}<|observation|>\n{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '\n<think></think>' if enable_thinking is defined and "
    "not enable_thinking else '' }}{% endif %}",
    ("<|endoftext|>", "<|user|>", "<|observation|>"),
)
"""GLM-4.5: an answer ends with the header of the next turn, and the mode without thinking changes user turns."""
COHERE = Family(
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}"
    "{{ '<|end|>' if message.role == 'assistant' else '' }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}",
    ("<|eot_id|>",),
)
"""Command R7B: the target closes its text before it ends its turn."""
R1_TAGGED = Family(
    R1.template.replace(
        "{{ message.content.split('</think>')[-1] }}</s>",
        "{% generation %}{{ message.content }}</s>{% endgeneration %}",
    ),
    R1.stops,
)

FAMILIES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "thinking-only": THINKING_ONLY,
    "r1": R1,
    "mistral": MISTRAL,
    "mistral-late-system": MISTRAL_LATE_SYSTEM,
    "harmony": HARMONY,
    "tagged": TAGGED,
    "tagged-header": TAGGED_HEADER,
    "phi": PHI,
    "parts": PARTS,
    "glm": GLM,
    "cohere": COHERE,
    "r1-tagged": R1_TAGGED,
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather in a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Bonn"}'}}


def write_chat(directory: Path, family: Family) -> Path:
    """Tokenizer, template and generation config, as they lie beside a target's weights."""
    vocabulary: dict[str, int] = {}
    for token in (*SPECIAL, *WORDS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _MERGES)):
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in WORDS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=family.stops[0])
    fast.add_special_tokens({"additional_special_tokens": [token for token in SPECIAL if token != "<s>"]})
    fast.chat_template = family.template
    directory.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(directory)
    stops = fast.convert_tokens_to_ids(list(family.stops))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return directory
