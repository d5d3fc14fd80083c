"""A target from the model hub: which of its files are needed, and what went wrong, in words that say the mend.

Without a connection, or with HF_HUB_OFFLINE=1, what the cache holds is used, if it is whole.
"""

from __future__ import annotations

import errno
from pathlib import Path

from eyas.heads.files import read_json

DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHTS = "*.safetensors"
OTHER_FORMS = ("original/*", "metal/*", "onnx/*", "consolidated*", "params.json", "tekken.json")
"""The same target in other forms, which would be downloaded for nothing. Beside Mistral's own params.json, consolidated weights
and tekken.json vLLM and transformers read those and not what a head was trained on."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS}
"""Why a file cannot be written here, whatever the hub does."""


class HubUnavailable(ValueError):
    """A model that is neither to be had from the hub now nor whole in the cache."""


def fetch_target(model: str, *, revision: str | None, weights: bool) -> Path:
    """Snapshot of a hub model in the cache, fetched as far as it is not there.

    Raises:
        HubUnavailable: missing, gated, out of reach, incomplete, or no room for it; the message says what to do.
    """
    from httpx2 import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = [*DESCRIPTION, *([WEIGHTS] if weights else [])]
    try:
        snapshot = snapshot_download(
            model, revision=revision, allow_patterns=patterns, ignore_patterns=list(OTHER_FORMS)
        )
    except (HTTPError, HFValidationError, OSError) as error:  # HTTPError: a connection that broke, too
        raise HubUnavailable(_explain(error, model=model, revision=revision)) from error
    directory = Path(snapshot)
    missing = _missing(directory, weights=weights)
    if missing:
        raise HubUnavailable(
            f"target.model: {model}: its files in {directory} lack {', '.join(missing)}; run once with a connection to the "
            "hub to fetch the rest (a model without a config.json or without safetensors weights cannot be a target)"
        )
    return directory


def _missing(directory: Path, *, weights: bool) -> list[str]:
    """What a target needs and a snapshot does not have: an interrupted download, or another kind of model."""
    missing = [] if (directory / "config.json").is_file() else ["config.json"]
    if not weights:
        return missing
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = set(read_json(index)["weight_map"].values())
        return missing + sorted(name for name in names if not (directory / name).is_file())
    return missing if list(directory.glob(WEIGHTS)) else [*missing, WEIGHTS]


def _explain(error: Exception, *, model: str, revision: str | None) -> str:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{model}"
    by_hand = "or download it elsewhere and give the directory as target.model"
    log_in = "log in (`hf auth login`, or set HF_TOKEN)"
    if isinstance(error, errors.GatedRepoError):
        return f"target.model: {model} is gated: accept its terms at {page}, then {log_in}, {by_hand}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"target.revision: {model} has no revision {revision!r}; {page}/tree/main lists its branches and tags"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"target.model: the hub has no {model}, or it is private: check the name at {page}; for a private one "
            f"{log_in}, {by_hand}"
        )
    if isinstance(error, errors.HFValidationError):
        return (
            f"target.model: {model!r} is no hub id ({_first_line(error)}); write org/name, or a directory that is there"
        )
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return (
            f"target.model: {model} cannot be written to the cache {constants.HF_HUB_CACHE} ({error.strerror}); make room, or "
            f"set HF_HOME to another disk, {by_hand}"
        )
    if constants.HF_HUB_OFFLINE:
        return (
            f"target.model: HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} does not hold all of {model}; unset it "
            f"for one run with a connection, {by_hand}"
        )
    return (
        f"target.model: {model} cannot be had from the hub ({_first_line(error)}), and the cache {constants.HF_HUB_CACHE} does "
        f"not hold it; try again with a connection, {by_hand}"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
