"""A trained head made ready to serve: checked, written, checked again, with its model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eyas.heads.config import load_target_config
from eyas.heads.files import fingerprint_file, write_text
from eyas.heads.formats.check import check_head, inspect_head
from eyas.heads.formats.check_target import target_findings
from eyas.heads.formats.files import WEIGHTS_FILE, Format
from eyas.heads.formats.findings import Finding, errors
from eyas.heads.formats.read import read_head
from eyas.heads.formats.write import write_head


def export_head(
    out_dir: Path,
    *,
    head_dir: Path,
    target_dir: Path,
    dtype: torch.dtype,
    to: Format,
    verifier: str,
    draft_tokens: int,
    card: str,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Write the head of `head_dir` for serving in `dtype`, in layout `to`, with `card` as its README.md.

    Args:
        verifier: name of the target, and `draft_tokens` to draft per step, for layouts that note them.

    Returns:
        Parameter count, bytes and fingerprint of the weights, and the warnings of the check of what was written.

    Raises:
        ValueError: vLLM would refuse or misread the head, it does not fit the target, or the layout cannot hold it. In the
            EAGLE repository's layout, which vLLM need not serve, only what makes the head unreadable counts.
    """
    findings = _findings(head_dir, target_dir=target_dir, to=to, trust_remote_code=trust_remote_code)
    _refuse_errors(findings, directory=head_dir)
    head = read_head(head_dir, target_config=load_target_config(target_dir, trust_remote_code=trust_remote_code))
    write_head(out_dir, head, dtype=dtype, to=to, verifier=verifier, verifier_dir=target_dir, draft_tokens=draft_tokens)
    findings = _findings(out_dir, target_dir=target_dir, to=to, trust_remote_code=trust_remote_code)
    _refuse_errors(findings, directory=out_dir)
    write_text(out_dir / "README.md", card)
    weights = out_dir / WEIGHTS_FILE
    # What vLLM would refuse in another layout than its own is worth a warning there.
    served = check_head(out_dir, target_dir=target_dir, trust_remote_code=trust_remote_code)
    return {
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "bytes": weights.stat().st_size,
        "weights_fingerprint": fingerprint_file(weights),
        "warnings": [str(finding) for finding in served if finding.severity != "info"],
    }


def _findings(directory: Path, *, target_dir: Path, to: Format, trust_remote_code: bool) -> list[Finding]:
    if to != "eagle-repo":
        return check_head(directory, target_dir=target_dir, trust_remote_code=trust_remote_code)
    findings, files = inspect_head(directory)
    if files is None:
        return findings
    return findings + target_findings(files, target_dir, trust_remote_code=trust_remote_code)


def _refuse_errors(findings: list[Finding], *, directory: Path) -> None:
    problems = errors(findings)
    if problems:
        raise ValueError(f"vLLM would refuse or misread {directory}: " + "; ".join(problems))
