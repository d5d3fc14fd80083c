"""docs/cli.md from the command line itself: `python -m eyas.recipes.cli_reference [FILE]`.

It is read from the commands' signatures and not from the parser that typer makes of them, whose classes differ between
versions of typer; so the page depends on this repository alone, and a test can say that it is current.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from typer.models import ArgumentInfo, OptionInfo

from eyas.heads.files import write_text
from eyas.recipes.cli import app

PAGE = Path("docs") / "cli.md"
TYPES: dict[type, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}
PREFACE = """\
# Command line

Made by `python -m eyas.recipes.cli_reference` from the commands themselves; `eyas COMMAND --help` says the same.

RECIPE is a file, or the name of a shipped recipe (`eyas recipes ls`). What follows it are overrides, `section.field=value`,
whose values are read as YAML: `train.epochs=1 score.batch_sizes=[1,8] init.head=null`. `eyas recipes keys` lists all keys.
`eyas --version` shows the version, `eyas --install-completion` sets up completion in your shell.

| exit code | meaning |
| ---: | --- |
| 0 | done |
| 2 | something that you can mend: one line on stderr says what is wrong and how |
| 75 | a training was asked to stop, and saved: run the same command again |
| 130 | stopped by Ctrl-C: run the same command again |

| environment variable | meaning |
| --- | --- |
| `EYAS_CACHE` | where targets from packages are unpacked; default `~/.cache/eyas` |
| `EYAS_SLURM` | site file of `eyas slurm submit`; default `~/.config/eyas/slurm.yaml` |
| `EYAS_TRACEBACK` | 1 shows where an error came from |

`python -m eyas.train RECIPE` is `eyas train RECIPE` for launchers (`accelerate launch -m eyas.train RECIPE`)."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """An argument or an option: as it stands in the usage line, its default in words, and its meaning."""

    shown: str
    default: str
    about: str
    is_option: bool


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command by its words, such as ("recipes", "cp")."""

    words: tuple[str, ...]
    about: str
    parameters: tuple[Parameter, ...]


def commands(group: typer.Typer = app, *, words: tuple[str, ...] = ()) -> Iterator[Command]:
    """Every command of a group and of the groups in it, in the order in which they were registered."""
    for registered in group.registered_commands:
        callback = registered.callback
        assert callback is not None, "a command is a function"
        name = registered.name or callback.__name__.replace("_", "-")
        about = " ".join((inspect.getdoc(callback) or "").split())
        yield Command(words=(*words, name), about=about, parameters=tuple(_parameters(callback)))
    for inner in group.registered_groups:
        assert inner.typer_instance is not None and inner.name is not None, "groups are registered by name"
        yield from commands(inner.typer_instance, words=(*words, inner.name))


def reference() -> str:
    """The whole page."""
    return "\n\n".join([PREFACE, *(_section(command) for command in commands())]) + "\n"


def _parameters(callback: Callable[..., Any]) -> Iterator[Parameter]:
    hints = typing.get_type_hints(callback, include_extras=True)
    for name, parameter in inspect.signature(callback).parameters.items():
        kind, info = _annotated(hints[name])
        required = parameter.default is inspect.Parameter.empty
        if isinstance(info, OptionInfo):
            yield _option(name, info, kind=kind, default=parameter.default, required=required)
            continue
        metavar = info.metavar or name.upper()
        several = " ..." if typing.get_origin(kind) is list else ""
        shown = f"{metavar}{several}" if required else f"[{metavar}{several}]"
        yield Parameter(shown=shown, default="required" if required else "", about=info.help or "", is_option=False)


def _annotated(hint: Any) -> tuple[Any, ArgumentInfo | OptionInfo]:
    """Type without `| None`, and typer's description of the parameter."""
    kind, info = typing.get_args(hint)
    assert isinstance(info, ArgumentInfo | OptionInfo), "parameters are described to typer by Annotated"
    alternatives = [each for each in typing.get_args(kind) if each is not type(None)]
    if type(None) in typing.get_args(kind) and len(alternatives) == 1:
        kind = alternatives[0]
    return kind, info


def _option(name: str, info: OptionInfo, *, kind: Any, default: Any, required: bool) -> Parameter:
    # Inside Annotated the first name given to typer.Option lands in its `default`.
    declared = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
    names = [each for each in declared if each.startswith("-")] or [f"--{name.replace('_', '-')}"]
    value = "" if kind is bool else f" {_value(kind)}"
    about = info.help or ""
    if isinstance(kind, type) and issubclass(kind, Enum):
        about = f"{about.rstrip('.')}: {', '.join(each.value for each in kind)}."
    if info.min is not None:
        about = f"{about.rstrip('.')}; at least {info.min:g}."
    shown_default = "required" if required else _default(default)
    return Parameter(shown=f"{', '.join(names)}{value}", default=shown_default, about=about, is_option=True)


def _value(kind: Any) -> str:
    """What an option's value is called."""
    if typing.get_origin(kind) is list:
        return _value(typing.get_args(kind)[0])
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind.__name__.upper()
    return TYPES[kind]


def _default(value: Any) -> str:
    return "" if value is None or value is False else f"`{value}`"


def _section(command: Command) -> str:
    name = " ".join(("eyas", *command.words))
    options = "".join(
        f" {option.shown}" if option.default == "required" else "" for option in command.parameters if option.is_option
    )
    if any(option.is_option and option.default != "required" for option in command.parameters):
        options += " [OPTIONS]"
    arguments = "".join(f" {each.shown}" for each in command.parameters if not each.is_option)
    parts = [f"## {name}", command.about, f"    {name}{options}{arguments}"]
    if command.parameters:
        rows = [f"| `{each.shown}` | {each.default} | {each.about} |" for each in command.parameters]
        parts.append("\n".join(["| argument or option | default | meaning |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts)


def main(path: Path = PAGE) -> None:
    """Write the page.

    Raises:
        ValueError: there is no such folder, so this is no checkout.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder here; run this in a checkout, or name the file to write")
    write_text(path, reference())
    typer.echo(str(path))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
