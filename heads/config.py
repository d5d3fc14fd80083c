"""Shape of a draft head, as one frozen record. It is what a head directory's config.json says, without the file format."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Kind = Literal["eagle", "eagle3"]
LayerStyle = Literal["llama", "qwen3"]

DEFAULT_CAPTURED = 3
"""Layers that the engine captures when a head's config names none: 2, L//2 and L-3."""

ENGINE_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """A head of one of two kinds: EAGLE (arXiv 2401.15077) reads the target's last hidden state, EAGLE-3 (2503.01840)
    several captured layers. EAGLE-3.1 is EAGLE-3 with `fc_norm` and `norm_output`.

    Attributes:
        layer: "llama", or "qwen3" for RMS norms on queries and keys (EAGLE-3 only).
        hidden_size: the head's; target_hidden_size: the target's. When they differ the head has its own embedding.
        vocab_size: V, the target's; draft_vocab_size: D, the tokens the head can propose. D = V needs no mapping.
        rope_parameters: rotary settings in transformers' form (`rope_type`, `rope_theta`, ...).
        capture_layers: ids of the captured layers, ascending; id k is the residual stream after k decoder layers.
            None is the engine's default, which depends on the target. Empty for EAGLE.
        attention_bias: biases of q, k and v, and of o in Llama layers, as the engine builds them.
        sliding_window: tokens that attention reaches back, itself included; None is all of them.
        norm_before_residual: the first layer's residual is the normed feature instead of the raw one.
        norm_before_fc: one norm over all captured layers; fc_norm: one norm for each (EAGLE-3.1).
        norm_output: the feature fed back is the normed output (EAGLE-3.1).
        fc_bias: EAGLE only, as in the original repository; vLLM has no such bias.
        own_embedding: the head has its own token embedding instead of the target's.
        inherited_window: the target's window, where the engine gives it to layers that have none of their own. It is no
            part of a head's files, and no part of its identity.
    """

    kind: Kind = "eagle3"
    layer: LayerStyle = "llama"
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int = 1
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    capture_layers: tuple[int, ...] | None
    attention_bias: bool = False
    sliding_window: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    own_embedding: bool = False
    inherited_window: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}; grouped-query attention needs that"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} must lie between 1 and the target's {self.vocab_size}"
            )
        if self.rope_parameters.get("rope_type", "default") not in ENGINE_ROPE_TYPES:
            raise ValueError(
                f"rope_type {self.rope_parameters['rope_type']!r} is not supported; targets and heads with "
                f"{', '.join(ENGINE_ROPE_TYPES)} are"
            )
        extended = [name for name in ("alpha", "max_trained_positions") if name in self.rope_parameters]
        if extended:
            raise ValueError(
                f"rope_parameters with {', '.join(extended)} change the base in a way that eyas does not follow; "
                "a target that has them cannot be given a head here"
            )
        if self.hidden_size != self.target_hidden_size and not self.own_embedding:
            raise ValueError(
                f"hidden_size={self.hidden_size} differs from the target's {self.target_hidden_size}, so the head "
                "cannot share the target's embedding and must have its own"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window} must be at least 1; null is no window")
        if self.kind == "eagle":
            self._check_eagle()
        else:
            self._check_eagle3()

    def _check_eagle(self) -> None:
        variants = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "sliding_window")
        named = [name for name in variants if getattr(self, name)]
        if self.layer != "llama":
            named.append(f"layer={self.layer}")
        if named:
            raise ValueError(f"an EAGLE head has no {', '.join(named)}; these belong to EAGLE-3 (head.kind=eagle3)")
        if self.draft_vocab_size != self.vocab_size or self.hidden_size != self.target_hidden_size:
            raise ValueError(
                "an EAGLE head predicts the target's hidden state and reads out with the target's lm_head, so its hidden "
                "and vocabulary sizes are the target's"
            )
        if self.capture_layers != ():
            raise ValueError("an EAGLE head reads the last hidden state; capture_layers must be empty")

    def _check_eagle3(self) -> None:
        if self.fc_bias:
            raise ValueError("fc_bias is a variant of EAGLE's layout; an EAGLE-3 head has no bias in fc")
        layers = self.capture_layers
        if layers is not None and (list(layers) != sorted(set(layers)) or not layers):
            raise ValueError(
                f"capture_layers={list(layers)} must be ascending and without repeats: vLLM sorts them, "
                "and a head trained on another order would read the wrong layers"
            )

    @property
    def num_captured(self) -> int:
        """A, the captured layers that `fc` reads side by side."""
        return DEFAULT_CAPTURED if self.capture_layers is None else len(self.capture_layers)

    @property
    def output_bias(self) -> bool:
        """Whether o_proj has a bias: the engine gives it one in Llama layers and never in Qwen3 layers."""
        return self.attention_bias and self.layer == "llama"

    @property
    def window(self) -> int | None:
        """Tokens that attention reaches back when the head is served, itself included; None is all of them."""
        return self.sliding_window if self.sliding_window is not None else self.inherited_window

    def for_target(self, target_config: Any) -> HeadConfig:
        """The same head as the engine runs it beside a target (its transformers configuration)."""
        layers = self.capture_layers
        if layers is None:
            layers = default_capture_layers(target_config.num_hidden_layers)
        return replace(self, capture_layers=layers, inherited_window=inherited_window(target_config))


def default_capture_layers(num_layers: int) -> tuple[int, ...]:
    """Layer ids 2, L//2 and L-3, the choice of EAGLE-3 and vLLM's default, for a target of `num_layers` layers."""
    layers = tuple(sorted({2, num_layers // 2, num_layers - 3}))
    if len(layers) < 3 or layers[0] < 1:
        raise ValueError(
            f"a target of {num_layers} layers has no default capture layers (2, L//2, L-3 must differ); "
            "set features.capture_layers, for example [1, 2, 3]"
        )
    return layers


def load_target_config(target_dir: Path, *, trust_remote_code: bool = False) -> Any:
    """The target's text configuration (transformers), whatever wraps it."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(target_dir, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"transformers cannot read the config of the target {target_dir}: {error}") from error
    return config.get_text_config()


def inherited_window(target_config: Any) -> int | None:
    """The window that vLLM 0.32 gives to every layer without one of its own, a head's included: the target's, when all of
    the target's layers slide. A target that mixes kinds of attention passes nothing on."""
    values = target_config.to_dict()
    if set(values.get("layer_types") or ()) - {"sliding_attention"}:
        return None
    return values.get("sliding_window") or None  # the engine takes 0 for none


def head_rope_parameters(target_config: Any) -> dict[str, Any]:
    """The target's rotary settings as a head can use them.

    Targets with different settings per attention type give those of full attention. Rotating only a part of each head
    (`partial_rotary_factor`) and multimodal sections are properties of the target's own layers: a head rotates
    whole heads with the same base.
    """
    parameters: dict[str, Any] = target_config.rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}
    parameters = dict(parameters.get("full_attention", parameters))
    for name in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        parameters.pop(name, None)
    return parameters


def head_config_for_target(
    target_config: Any,
    *,
    kind: Kind = "eagle3",
    layer: LayerStyle = "llama",
    num_layers: int = 1,
    draft_vocab_size: int,
    capture_layers: tuple[int, ...],
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    attention_bias: bool = False,
    sliding_window: int | None = None,
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
    fc_bias: bool = False,
) -> HeadConfig:
    """A head for a target, with the target's own layer sizes wherever None is given.

    Raises:
        ValueError: a captured layer does not exist in the target, or sizes do not fit together.
    """
    num_target_layers = target_config.num_hidden_layers
    if not all(1 <= layer_id <= num_target_layers for layer_id in capture_layers):
        raise ValueError(
            f"capture_layers={list(capture_layers)} must lie between 1 and the target's {num_target_layers} layers"
        )
    heads = target_config.num_attention_heads
    values = target_config.to_dict()
    own_head_dim = values.get("head_dim") or target_config.hidden_size // heads
    target_hidden = target_config.hidden_size
    return HeadConfig(
        kind=kind,
        layer=layer,
        hidden_size=hidden_size or target_hidden,
        target_hidden_size=target_hidden,
        intermediate_size=intermediate_size or target_config.intermediate_size,
        num_layers=num_layers,
        num_attention_heads=num_attention_heads or heads,
        num_key_value_heads=num_key_value_heads or values.get("num_key_value_heads") or heads,
        head_dim=head_dim or own_head_dim,
        vocab_size=target_config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=target_config.rms_norm_eps,
        rope_parameters=head_rope_parameters(target_config),
        max_position_embeddings=target_config.max_position_embeddings,
        capture_layers=capture_layers,
        attention_bias=attention_bias,
        sliding_window=sliding_window,
        norm_before_residual=norm_before_residual,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=norm_output,
        fc_bias=fc_bias,
        own_embedding=hidden_size is not None and hidden_size != target_hidden,
        inherited_window=inherited_window(target_config),
    )
