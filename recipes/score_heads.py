"""The heads and models that a session measures: what they are, whether the engine can serve them, and their fingerprints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.heads.files import fingerprint_directory, fingerprint_file

if TYPE_CHECKING:
    from eyas.heads.config import HeadConfig

HEAD_FILES = ("config.json", "*.safetensors")
MODEL_FILES = (*HEAD_FILES, "*.bin")


def servable_head(head_dir: Path, *, target_dir: Path, trust_remote_code: bool) -> HeadConfig:
    """What the head in a directory is; its kind is also vLLM's name of the method.

    Raises:
        ValueError: vLLM would refuse or misread the head; every error is named.
    """
    from eyas.heads.formats.check import check_and_read, errors

    findings, files = check_and_read(head_dir, target_dir=target_dir, trust_remote_code=trust_remote_code)
    problems = errors(findings)
    if problems or files is None:
        raise ValueError(f"{head_dir} cannot be served: " + "; ".join(problems))
    return files.config


def require_servable_arm(name: str, config: Mapping[str, Any], *, target_dir: Path, trust_remote_code: bool) -> None:
    """Check the head of another arm as the measured one is checked, where it lies in a directory.

    Raises:
        ValueError: as `servable_head`, or the arm names another method than the head's.
    """
    from eyas.heads.serving import SPECULATIVE_METHODS

    directory = local_model(name, config)
    if directory is None or config["method"] not in SPECULATIVE_METHODS:
        return
    kind = servable_head(directory, target_dir=target_dir, trust_remote_code=trust_remote_code).kind
    if kind != config["method"]:
        raise ValueError(
            f"score.arms.{name}: {directory} is an {kind} head, and method is {config['method']}; set method to {kind}"
        )


def local_model(name: str, config: Mapping[str, Any]) -> Path | None:
    """Directory of an arm's model; None where it has none, or one that vLLM downloads by its name.

    Raises:
        ValueError: the model is a path, and nothing is there.
    """
    model = config.get("model")
    if not isinstance(model, str):
        return None
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    if model.startswith(("/", "~", "./", "../")):
        raise ValueError(f"score.arms.{name}.model: {directory} is no directory; name one, or a model of the hub")
    return None


def head_fingerprint(head_dir: Path) -> str:
    """Identity of a head directory from elsewhere.

    Raises:
        ValueError: there is no such directory.
    """
    if not (head_dir / "config.json").is_file():
        raise ValueError(f"{head_dir}: no head directory (no config.json); see `eyas check {head_dir}`")
    return fingerprint_directory(head_dir, patterns=HEAD_FILES)


def arm_fingerprints(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What each arm with a model in a directory reads. A model of the hub is known by its name and revision alone.

    Raises:
        ValueError: as `local_model`.
    """
    found = {name: local_model(name, config) for name, config in arms.items()}
    return {
        f"model of arm {name}": fingerprint_directory(directory, patterns=MODEL_FILES)
        for name, directory in found.items()
        if directory is not None
    }


def head_files(head_dir: Path) -> dict[str, Any]:
    """Fingerprint, size and the files of a head directory, each with its checksum."""
    paths = sorted({path for pattern in HEAD_FILES for path in head_dir.glob(pattern)})
    return {
        "fingerprint": head_fingerprint(head_dir),
        "bytes": sum(path.stat().st_size for path in paths),
        "sha256": {path.name: fingerprint_file(path) for path in paths},
    }
