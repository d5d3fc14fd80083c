"""What a chat template's source says about how it wants its input.

The server reads the same things out of it before it renders: whether content comes as text or as parts, and whether
there is a developer role.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import Environment, TemplateSyntaxError, meta, nodes

_THINKING_FIELD = re.compile(r"\.thinking\b|\[['\"]thinking['\"]\]")
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


@dataclass(frozen=True)
class TemplateFacts:
    """What a chat template's source says about how it wants its input."""

    variables: frozenset[str]
    """Names that the template reads from outside."""
    loops_over_parts: bool
    """It iterates over the content of a message, so the server passes `[{"type": "text", "text": ...}]`."""
    knows_developer: bool
    reads_thinking: bool
    """It takes an answer's reasoning by the name `thinking` (gpt-oss)."""
    tags_answers: bool
    """It marks what the assistant wrote by `{% generation %}`."""


@lru_cache(maxsize=32)
def template_facts(template: str) -> TemplateFacts:
    """Read a chat template's source.

    Raises:
        ValueError: it is not valid Jinja.
    """
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAG.sub("", template))
    except TemplateSyntaxError as error:
        raise ValueError(f"the target's chat template is not valid Jinja ({error}); mend its chat_template") from error
    return TemplateFacts(
        variables=frozenset(meta.find_undeclared_variables(tree)),
        loops_over_parts=_loops_over_parts(tree),
        knows_developer='"developer"' in template or "'developer'" in template,
        reads_thinking=_THINKING_FIELD.search(template) is not None,
        tags_answers=_GENERATION_TAG.search(template) is not None,
    )


def _loops_over_parts(tree: nodes.Template) -> bool:
    """Whether any loop runs over a message's content, named directly or through a macro's parameter."""
    messages = _names_of_messages(tree)
    within_macro: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        filled = _parameters_filled_with_content(tree, macro, messages=messages)
        within_macro |= {id(loop): filled for loop in macro.find_all(nodes.For)}
    for loop in tree.find_all(nodes.For):
        source = _without_filters(loop.iter)
        if isinstance(source, nodes.Name) and source is loop.iter:
            if source.name in within_macro.get(id(loop), {"content"}):
                return True
        elif _is_content(source, messages=messages):
            return True
    return False


def _names_of_messages(tree: nodes.Template) -> set[str]:
    """Names of loop variables that run over the messages, or over a name that was set to some of them."""
    lists = {"messages"}
    assignments = list(tree.find_all(nodes.Assign))
    for _ in assignments:  # a chain of assignments is at most this long
        for assignment in assignments:
            source = _without_filters(assignment.node)
            if isinstance(source, nodes.Name) and source.name in lists and isinstance(assignment.target, nodes.Name):
                lists.add(assignment.target.name)
    names: set[str] = set()
    for loop in tree.find_all(nodes.For):
        source = _without_filters(loop.iter)
        if isinstance(source, nodes.Name) and source.name in lists and isinstance(loop.target, nodes.Name):
            names.add(loop.target.name)
    return names


def _parameters_filled_with_content(tree: nodes.Template, macro: nodes.Macro, *, messages: set[str]) -> set[str]:
    parameters = [argument.name for argument in macro.args]
    filled: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        for name, value in zip(parameters, call.args, strict=False):
            if _is_content(_without_filters(value), messages=messages):
                filled.add(name)
        for keyword in call.kwargs:
            if keyword.key in parameters and _is_content(_without_filters(keyword.value), messages=messages):
                filled.add(keyword.key)
    return filled


def _without_filters(node: nodes.Node) -> nodes.Node:
    """The value below filters, tests and slices."""
    while (
        (isinstance(node, nodes.Filter) and node.node is not None)
        or isinstance(node, nodes.Test)
        or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice))
    ):
        assert node.node is not None
        node = node.node
    return node


def _is_content(node: nodes.Node, *, messages: set[str]) -> bool:
    if isinstance(node, nodes.Getattr):
        key = node.attr
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        key = node.arg.value
    else:
        return False
    return key == "content" and isinstance(node.node, nodes.Name) and node.node.name in messages
