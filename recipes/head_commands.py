"""Commands about head directories: `eyas check` and `eyas convert`. Registered by recipes/cli.py."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from eyas.heads.formats.findings import Finding

FAILED = 2
SEVERITIES: tuple[Literal["error", "warning", "info"], ...] = ("error", "warning", "info")


class Layout(StrEnum):
    """Layouts of a head directory; the same names as in heads/formats/files.py, which is too heavy to import here."""

    VLLM = "vllm"
    SPECULATORS = "speculators"
    EAGLE_REPO = "eagle-repo"


def check(
    head_dir: Annotated[Path, typer.Argument(help="Directory of a head, in any layout.")],
    target: Annotated[
        str | None,
        typer.Option(help="Its target (directory, hub id or package:NAME), to check that the two fit."),
    ] = None,
) -> None:
    """Say what vLLM would do with a head directory; exit code 2 if it would refuse or misread it."""
    from eyas.heads.formats.check import check_and_read
    from eyas.heads.target_source import cache_root, resolve_target

    target_dir = None if target is None else resolve_target(target, revision=None, cache_dir=cache_root())
    findings, files = check_and_read(head_dir, target_dir=target_dir)
    _show(findings)
    what = "no readable head" if files is None else f"{files.config.kind} head, {files.format} layout"
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    beside = "" if target is not None else " (not checked against a target: --target)"
    typer.echo(f"{head_dir}: {what}: {counts['error']} errors, {counts['warning']} warnings{beside}")
    if counts["error"]:
        raise typer.Exit(FAILED)


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Directory of a head, in any layout.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="New directory.")],
    to: Annotated[Layout, typer.Option(help="Layout to write.")],
    target: Annotated[
        str | None, typer.Option(help="Name or directory of the target, for layouts that note it.")
    ] = None,
) -> None:
    """Write a head in another layout; every weight keeps its bits."""
    from eyas.heads.formats.check import check_head
    from eyas.heads.formats.write import convert_head

    convert_head(source, destination, to=to.value, target=target)
    target_dir = Path(target) if target is not None and Path(target).is_dir() else None
    findings = [one for one in check_head(destination, target_dir=target_dir) if one.severity != "info"]
    _show(findings)
    typer.echo(f"{source} -> {destination} ({to.value} layout)")
    # The EAGLE repository serves heads that vLLM does not, such as one with a bias in fc; the conversion has worked then.
    if to is not Layout.EAGLE_REPO and any(finding.severity == "error" for finding in findings):
        raise typer.Exit(FAILED)


def _show(findings: list[Finding]) -> None:
    for finding in sorted(findings, key=lambda one: SEVERITIES.index(one.severity)):
        typer.echo(f"{finding.severity}: {finding.what}\n  consequence: {finding.consequence}\n  mend: {finding.mend}")
