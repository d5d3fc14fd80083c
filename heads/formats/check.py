"""Whether vLLM 0.32 will do with a head directory what it is meant to, told before it is served.

Two questions are kept apart. Can the directory be read at all, unchanged (`inspect_head`)? And does the engine serve what
was read (`check_head`)? A head of the EAGLE repository with a bias in `fc` answers yes and no: it can be trained on and
converted, and vLLM drops the bias.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.heads.config import HeadConfig
from eyas.heads.files import read_json
from eyas.heads.formats import eagle_repo, speculators, vllm
from eyas.heads.formats.check_config import detect_format, engine_findings, unsupported_findings
from eyas.heads.formats.check_target import target_findings
from eyas.heads.formats.check_tensors import mapping_findings, tensor_findings, unused
from eyas.heads.formats.files import CONFIG_FILE, MAPPING, Format, HeadFiles, stored_names, stored_tensors
from eyas.heads.formats.findings import Finding, errors

__all__ = ["Finding", "check_and_read", "check_head", "errors", "inspect_head"]

UNREADABLE = "neither vLLM nor eyas can read the head"


def check_head(directory: Path, *, target_dir: Path | None, trust_remote_code: bool = False) -> list[Finding]:
    """Everything worth saying about a head directory before it is served; empty when all is as it should be.

    Args:
        target_dir: the head's target, to check that the two fit; None checks the head alone.
        trust_remote_code: run code that comes with the target's configuration.
    """
    return check_and_read(directory, target_dir=target_dir, trust_remote_code=trust_remote_code)[0]


def check_and_read(
    directory: Path, *, target_dir: Path | None, trust_remote_code: bool = False
) -> tuple[list[Finding], HeadFiles | None]:
    """As `check_head`, with the head's content when it can be read."""
    findings, files = inspect_head(directory)
    if files is None:
        return findings, None
    values = read_json(directory / CONFIG_FILE)
    findings += engine_findings(values, files.config, layout=files.format, path=directory / CONFIG_FILE)
    findings += _served_differently(files, stored=stored_names(directory), directory=directory)
    if target_dir is not None:
        findings += target_findings(files, target_dir, trust_remote_code=trust_remote_code)
    return findings, files


def inspect_head(directory: Path) -> tuple[list[Finding], HeadFiles | None]:
    """What is wrong with the directory itself, and its content; the content is None after an error."""
    path = directory / CONFIG_FILE
    try:
        values = _config_values(path)
        layout = detect_format(values, path=path)
        findings = unsupported_findings(values, layout=layout, path=path)
        stored = stored_tensors(directory)
        config = _head_config(values, layout=layout, tensor_names=set(stored), path=path)
    except ValueError as error:
        return [_unreadable(str(error))], None
    tensors = _canonical(stored)
    if len(tensors) < len(stored):
        findings.append(_unreadable(f"{directory}: holds the first layer under both midlayer. and layers.0."))
    findings += tensor_findings(tensors, config, directory=directory)
    findings += mapping_findings(stored, config, directory=directory)
    if errors(findings):
        return findings, None
    kept = {name: tensor for name, tensor in tensors.items() if name not in MAPPING and not unused(name, config)}
    files = _head_files(values, layout=layout, config=config, tensors=kept, d2t=stored.get("d2t"))
    return findings, files


def _unreadable(what: str) -> Finding:
    head, _, mend = what.rpartition("; ")
    if not head:
        return Finding("error", what, UNREADABLE, "restore the file or save the head again")
    return Finding("error", head, UNREADABLE, mend)


def _config_values(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing; a head directory describes the head there")
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object; restore it")
    return values


def _head_config(values: dict[str, Any], *, layout: Format, tensor_names: set[str], path: Path) -> HeadConfig:
    module = {"vllm": vllm, "speculators": speculators, "eagle-repo": eagle_repo}[layout]
    try:
        return module.head_config(values, tensor_names=tensor_names, path=path)
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(str(path)) else f"{path}: {message}") from error


def _canonical(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the module's names; the engine knows the raw layout's name of the first layer in every layout."""
    return {vllm.canonical_name(name): tensor for name, tensor in stored.items()}


def _head_files(
    values: dict[str, Any], *, layout: Format, config: HeadConfig, tensors: dict[str, Tensor], d2t: Tensor | None
) -> HeadFiles:
    identity_D = torch.arange(config.draft_vocab_size)
    verifier, architectures, tokens = None, (), None
    if layout == "speculators":
        verifier, architectures, tokens = speculators.serving_fields(values)
    return HeadFiles(
        format=layout,
        config=config,
        tensors=tensors,
        target_ids_D=identity_D if d2t is None else identity_D + d2t.long(),
        verifier=verifier,
        draft_tokens=tokens,
        verifier_architectures=architectures,
    )


def _served_differently(files: HeadFiles, *, stored: set[str], directory: Path) -> list[Finding]:
    findings = []
    config = files.config
    if config.draft_vocab_size == config.vocab_size and "d2t" in stored:
        what = f"{directory}: d2t in a head whose draft vocabulary is the target's whole vocabulary"
        consequence = "vLLM has no parameter for it then and refuses to load the head"
        findings.append(
            Finding("error", what, consequence, "convert the head with `eyas convert`, which leaves it out")
        )
    if config.fc_bias:
        zero = not bool(files.tensors["fc.bias"].any())
        consequence = "vLLM's EAGLE head has no bias there and drops it" + ("" if zero else ": it drafts other tokens")
        mend = "`eyas convert` leaves it out" if zero else "train on from it with head.fc_bias=false, then export"
        what = f"{directory}: tensor fc.bias is {'zero' if zero else 'not zero'}"
        findings.append(Finding("info" if zero else "error", what, consequence, mend))
    return findings
