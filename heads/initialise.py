"""How a head starts: from the target's own weights where they fit, at random elsewhere, or as another head.

The choices were measured against each other at equal budget; docs/initialisation.md has the table and the defaults
follow it.

The draft layer of EAGLE-3 reads (embedding, feature), the target's layer reads one hidden state. So half of the target's
projections is placed in each half, and `fc` starts by passing the deepest captured layer through: the head begins as the
target's last layer, run early on the mean of both.

An EAGLE head works on states that the target's final norm has scaled, where no layer of the target fits (folding the
norms into a copy of the last layer started and learnt worse than random numbers). Its layer starts at random, and `fc`
by passing the feature through.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from eyas.heads.build import build_head
from eyas.heads.config import HeadConfig
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.head import DraftHead
from eyas.heads.layers import DraftLayer
from eyas.heads.target import TargetPieces, TargetWeights

RANDOM_STD = 0.02
WIDE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""Projections that read the layer's input, which in a first EAGLE-3 layer is twice as wide."""


@dataclass(frozen=True, kw_only=True)
class HeadStart:
    """Where the parts of a new head come from.

    Attributes:
        lm_head, train_lm_head, final_norm: EAGLE-3 only; an EAGLE head has neither.
        layer: None is the target's for EAGLE-3 and random for EAGLE, which cannot take the target's.
    """

    lm_head: Literal["target", "random"] = "target"
    train_lm_head: bool = True
    final_norm: Literal["target", "ones"] = "ones"
    layer: Literal["target", "random"] | None = None

    def copies_layer(self, config: HeadConfig) -> bool:
        """Whether the decoder layers of such a head start as the target's."""
        return config.kind == "eagle3" and self.layer != "random"


def new_head(
    config: HeadConfig,
    *,
    draft_to_target_D: Tensor,
    pieces: TargetPieces,
    target_dir: Path,
    num_target_layers: int,
    start: HeadStart,
    seed: int,
) -> DraftHead:
    """A head ready to train, in float32.

    Raises:
        ValueError: a part is asked from the target and the target has none of that shape.
    """
    require_start(config, target_dir=target_dir, num_target_layers=num_target_layers, start=start)
    generator = torch.Generator().manual_seed(seed)
    head = build_head(config, draft_to_target_D=draft_to_target_D).float()
    with torch.no_grad():
        _randomise(head, generator=generator)
        if isinstance(head, Eagle3Head):
            if start.lm_head == "target":
                head.lm_head.weight.copy_(pieces.readout_VH[draft_to_target_D].float())
            if start.final_norm == "target":
                head.norm.weight.copy_(pieces.final_norm_H.float())
        if start.copies_layer(config):
            _copy_layers(head, weights=TargetWeights(target_dir), num_target_layers=num_target_layers)
        if start.copies_layer(config) or config.kind == "eagle":
            # What to pass through stands last in fc's input: the deepest captured layer, or the last hidden state.
            head.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
    freeze(head, train_lm_head=start.train_lm_head)
    return head


def freeze(head: DraftHead, *, train_lm_head: bool) -> None:
    """Leave the readout as it is while training, when asked to."""
    if isinstance(head, Eagle3Head):
        head.lm_head.weight.requires_grad_(train_lm_head)


def require_start(config: HeadConfig, *, target_dir: Path, num_target_layers: int, start: HeadStart) -> None:
    """Fail before anything is spent when a head of this shape cannot start as asked.

    Raises:
        ValueError: names the setting, both shapes and the mend.
    """
    if config.kind == "eagle" and start.layer == "target":
        raise ValueError("init.layer=target is for EAGLE-3: no layer of the target fits an EAGLE head; remove it")
    same_size = config.hidden_size == config.target_hidden_size
    if config.kind == "eagle3" and not same_size:
        for name, value, mend in (
            ("lm_head", start.lm_head, "random"),
            ("final_norm", start.final_norm, "ones"),
            ("layer", start.layer or "target", "random"),
        ):
            if value == "target":
                raise ValueError(
                    f"init.{name}=target needs the target's hidden size, and head.hidden_size={config.hidden_size} "
                    f"differs from its {config.target_hidden_size}; set init.{name}={mend}"
                )
    if start.copies_layer(config):
        _require_layers(config, weights=TargetWeights(target_dir), num_target_layers=num_target_layers)


def layer_suffixes(config: HeadConfig) -> tuple[str, ...]:
    """Names within a target's layer of everything that a draft layer can take from it."""
    suffixes = [f"{name}.weight" for name in (*WIDE, "self_attn.o_proj")]
    suffixes += [f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")]
    suffixes += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    if config.layer == "qwen3":
        suffixes += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    return tuple(suffixes)


def _require_layers(config: HeadConfig, *, weights: TargetWeights, num_target_layers: int) -> None:
    hidden, head_dim = config.hidden_size, config.head_dim
    query, key_value = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    expected = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (config.intermediate_size, hidden),
        "mlp.up_proj.weight": (config.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, config.intermediate_size),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
    }
    for layer in _source_layers(config, num_target_layers=num_target_layers):
        for suffix in layer_suffixes(config):
            shape = weights.shape(f"layers.{layer}.{suffix}")
            if shape is None:
                raise ValueError(
                    f"the target has no layers.{layer}.{suffix}, so a draft layer cannot start from it; "
                    "set init.layer=random"
                )
            if shape != expected[suffix]:
                raise ValueError(
                    f"head sizes differ from the target's layer {layer} ({suffix}: {shape} there, {expected[suffix]} in "
                    "the head), so it cannot start from it; set init.layer=random or leave the head's sizes to the target's"
                )
        if config.layer == "llama" and weights.shape(f"layers.{layer}.self_attn.q_norm.weight") is not None:
            raise ValueError(
                "the target's attention norms queries and keys, and a Llama-style draft layer does not, so it cannot "
                "start from it; set head.layer=qwen3 or init.layer=random"
            )


def _source_layers(config: HeadConfig, *, num_target_layers: int) -> range:
    return range(num_target_layers - config.num_layers, num_target_layers)


def _randomise(head: DraftHead, *, generator: torch.Generator) -> None:
    """Matrices normal, biases zero, norms one; fc first, so that its draw does not depend on the other choices."""
    ordered = sorted(head.named_parameters(), key=lambda item: not item[0].startswith("fc."))
    for name, parameter in ordered:
        if parameter.dim() == 2:
            parameter.normal_(0.0, RANDOM_STD, generator=generator)
        elif name.endswith(".bias"):
            parameter.zero_()


def _copy_layers(head: DraftHead, *, weights: TargetWeights, num_target_layers: int) -> None:
    sources = _source_layers(head.config, num_target_layers=num_target_layers)
    for index, source in enumerate(sources):
        layer = head.layers[index]
        assert isinstance(layer, DraftLayer)
        tensors = {
            suffix: weights.require(f"layers.{source}.{suffix}").float() for suffix in layer_suffixes(head.config)
        }
        if index == 0:
            tensors = _first_layer(tensors)
        for suffix, tensor in tensors.items():
            layer.get_parameter(suffix).copy_(tensor)
        if head.config.attention_bias:
            _copy_biases(layer, weights=weights, source=source)


def _first_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The target's layer as the first layer of a head: half of its projections for each half of the input."""
    tensors = dict(tensors)
    tensors["hidden_norm.weight"] = tensors.pop("input_layernorm.weight")
    for name in WIDE:
        half = 0.5 * tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = torch.cat((half, half), dim=1)
    return tensors


def _copy_biases(layer: nn.Module, *, weights: TargetWeights, source: int) -> None:
    """Biases of the target's attention where it has them; the others stay zero."""
    for name, parameter in layer.named_parameters():
        if name.startswith("self_attn.") and name.endswith("_proj.bias"):
            tensor = weights.find(f"layers.{source}.{name}")
            if tensor is not None:
                parameter.copy_(tensor.float())
