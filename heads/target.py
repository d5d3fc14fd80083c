"""The target's side of a head: its frozen pieces (embedding, final norm, readout) and the hidden states it provides.

The pieces are read straight from the safetensors files, so training a head for a large target never loads the whole
model. They are frozen, shared and never written into checkpoints.

Shapes: B sequences, T slots, A captured layers, H hidden, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from eyas.heads.files import read_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types that a target is run in, by the names that recipes use."""


@dataclass(frozen=True)
class TargetPieces:
    """Frozen weights of the target that a head works with, as stored (usually bfloat16 or float32).

    The tables are mapped from the files, so all processes of a node share one copy in the page cache. Look rows up and
    convert those (`embedding_VH[ids_T].float()`): converting or moving a table makes a copy in every process.
    """

    embedding_VH: Tensor
    readout_VH: Tensor
    final_norm_H: Tensor

    def to(self, device: torch.device) -> TargetPieces:
        """The same pieces on another device."""
        return TargetPieces(self.embedding_VH.to(device), self.readout_VH.to(device), self.final_norm_H.to(device))

    def readout_rows(self, draft_to_target_D: Tensor, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The readout of a draft vocabulary, [D, H]: only its rows are read, converted and moved."""
        return self.readout_VH[draft_to_target_D.to(self.readout_VH.device)].to(device=device, dtype=dtype)


class TargetWeights:
    """Reads single tensors out of a target's safetensors files by the end of their name."""

    def __init__(self, target_dir: Path) -> None:
        self.target_dir = target_dir
        self._file_of = _tensor_files(target_dir)

    def find(self, suffix: str) -> Tensor | None:
        """The one tensor whose name ends with `.suffix` or equals it, mapped from its file; None when there is none.

        Raises:
            ValueError: several tensors match, so the choice would be a guess.
        """
        name = self._name(suffix)
        if name is None:
            return None
        with safe_open(self._file_of[name], framework="pt") as weights:
            return weights.get_tensor(name)

    def _name(self, suffix: str) -> str | None:
        names = [name for name in self._file_of if name == suffix or name.endswith("." + suffix)]
        if not names:
            return None
        if len(names) > 1:
            raise ValueError(
                f"the target {self.target_dir} has several tensors called {suffix}: {', '.join(sorted(names))}"
            )
        return names[0]

    def shape(self, suffix: str) -> tuple[int, ...] | None:
        """Shape of the tensor that `find` would return, read without its data."""
        name = self._name(suffix)
        if name is None:
            return None
        with safe_open(self._file_of[name], framework="pt") as weights:
            return tuple(weights.get_slice(name).get_shape())

    def require(self, suffix: str) -> Tensor:
        """As `find`, but a missing tensor is a ValueError."""
        tensor = self.find(suffix)
        if tensor is None:
            raise ValueError(
                f"the target {self.target_dir} has no tensor called {suffix}; is it a Llama-style decoder?"
            )
        return tensor


def load_target_pieces(target_dir: Path) -> TargetPieces:
    """Embedding, readout (the embedding when they are tied) and final norm of a target."""
    weights = TargetWeights(target_dir)
    embedding_VH = weights.require("embed_tokens.weight")
    readout_VH = weights.find("lm_head.weight")
    return TargetPieces(
        embedding_VH=embedding_VH,
        readout_VH=embedding_VH if readout_VH is None else readout_VH,
        final_norm_H=weights.require("model.norm.weight"),
    )


def load_target_model(
    target_dir: Path, *, dtype: torch.dtype, trust_remote_code: bool = False, device_map: str | None = None
) -> Any:
    """The target as a transformers causal language model in evaluation mode.

    Args:
        device_map: None loads onto the CPU; "auto" spreads the layers over all devices, by accelerate.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # half a second of loading does not need one
    model = AutoModelForCausalLM.from_pretrained(
        target_dir, dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code, device_map=device_map
    )
    return model.eval()


def input_device(model: Any) -> torch.device:
    """Where a target takes its token ids: the device of its embedding, whichever devices the layers are on."""
    device: torch.device = model.get_input_embeddings().weight.device
    # Offloaded weights are brought in by accelerate, which moves the ids as well.
    return torch.device("cpu") if device.type == "meta" else device


class HiddenStateCapture:
    """Runs the target's decoder and keeps only what a head needs of its hidden states.

    Hooks on the decoder layers avoid holding all L+1 states at once. The last state is taken after the final norm,
    because that is what the readout multiplies.
    """

    def __init__(self, model: Any, *, capture_layers: Sequence[int]) -> None:
        self.decoder: Any = model.get_decoder()
        self.capture_layers = tuple(capture_layers)
        self._captured: dict[int, Tensor] = {}
        layers: nn.ModuleList = self.decoder.layers
        for layer_id in self.capture_layers:
            layers[layer_id - 1].register_forward_hook(self._hook(layer_id))

    def _hook(self, layer_id: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._captured[layer_id] = output[0] if isinstance(output, tuple) else output

        return keep

    @torch.inference_mode()
    def __call__(self, token_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Captured states [B, T, A*H] and last state [B, T, H]; [B, T, 0] when no layer is captured.

        No attention mask is passed: with right padding and causal attention no real token ever sees a padded one, and
        without a mask the fused causal kernel is used.
        """
        output = self.decoder(input_ids=token_ids_BT, use_cache=False)
        last_BTH: Tensor = output.last_hidden_state
        if not self.capture_layers:
            return last_BTH[..., :0], last_BTH
        # A target over several devices leaves its states on all of them.
        captured_BTX = torch.cat([self._captured[layer].to(last_BTH.device) for layer in self.capture_layers], dim=-1)
        self._captured.clear()
        return captured_BTX, last_BTH


def _tensor_files(target_dir: Path) -> dict[str, Path]:
    index = target_dir / "model.safetensors.index.json"
    if index.is_file():
        return {name: target_dir / file for name, file in read_json(index)["weight_map"].items()}
    files: dict[str, Path] = {}
    for path in sorted(target_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            files.update(dict.fromkeys(weights.keys(), path))
    if not files:
        raise ValueError(f"the target {target_dir} holds no safetensors weights")
    return files
