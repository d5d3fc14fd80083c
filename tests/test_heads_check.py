"""`eyas check`: every way in which vLLM would refuse or misread a head directory, each with its severity."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MistralConfig, Qwen2Config

from eyas.heads.config import HeadConfig, head_config_for_target, load_target_config
from eyas.heads.formats.check import Finding, check_head, errors
from eyas.heads.formats.check_target import EAGLE3_TARGETS
from eyas.heads.formats.export import export_head
from eyas.heads.formats.files import Format, HeadFiles
from eyas.heads.formats.read import read_files, read_head
from eyas.heads.formats.write import write_files, write_head
from tests import tiny

Breakage = Callable[[Path], None]


def head_for(target: Path, **changes: Any) -> HeadConfig:
    """A head with the target's sizes."""
    fields: dict[str, Any] = {"draft_vocab_size": 128, "capture_layers": tiny.CAPTURE_LAYERS, **changes}
    return head_config_for_target(load_target_config(target), **fields)


def eagle_for(target: Path, **changes: Any) -> HeadConfig:
    """An EAGLE head with the target's sizes."""
    return head_for(target, kind="eagle", draft_vocab_size=tiny.VOCAB_SIZE, capture_layers=(), **changes)


def edit(**changes: Any) -> Breakage:
    """Set keys of config.json; None removes one. `layer__key` means a key of transformer_layer_config."""

    def apply(directory: Path) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        for key, value in changes.items():
            holder = config["transformer_layer_config"] if key.startswith("layer__") else config
            name = key.removeprefix("layer__")
            holder.pop(name, None)
            if value is not None:
                holder[name] = value
        path.write_text(json.dumps(config))

    return apply


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Breakage:
    """Change the stored tensors in place."""

    def apply(directory: Path) -> None:
        stored = load_file(directory / "model.safetensors")
        change(stored)
        save_file(stored, directory / "model.safetensors")

    return apply


def add(name: str, shape: tuple[int, ...] = (1,)) -> Breakage:
    """Store one more tensor."""
    return tensors(lambda stored: stored.update({name: torch.ones(shape)}))


def _one_nan(stored: dict[str, Tensor]) -> None:
    stored["norm.weight"][3] = float("nan")


def _one_infinite(stored: dict[str, Tensor]) -> None:
    stored["fc.weight"][0, 0] = float("inf")


def _absolute_ids(stored: dict[str, Tensor]) -> None:
    stored["d2t"] = stored["d2t"] + torch.arange(stored["d2t"].shape[0])


def _twice(stored: dict[str, Tensor]) -> None:
    stored["d2t"][1] = stored["d2t"][0] - 1


def _other_t2d(stored: dict[str, Tensor]) -> None:
    stored["t2d"] = ~stored["t2d"]


def _pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


UNREADABLE: dict[str, tuple[Breakage, str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    "config not json": (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
    "config a list": (lambda d: (d / "config.json").write_text("[]"), "no JSON object"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors is missing"),
    "pickle": (_pickle, "pytorch_model.bin"),
    "garbage weights": (lambda d: (d / "model.safetensors").write_bytes(b"x" * 100), "cannot be read as safetensors"),
    "unknown architecture": (edit(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    "medusa": (edit(architectures=["MedusaModel"]), "a medusa head"),
    "p-eagle": (edit(architectures=["PeagleLlamaForCausalLM"]), "a peagle head"),
    "no architecture": (edit(architectures=None), "architectures is None"),
    "model type": (edit(model_type="gpt2"), "model_type is 'gpt2'"),
    "text for a number": (edit(hidden_size="64"), "hidden_size is '64'"),
    "true for a number": (edit(draft_vocab_size=True), "draft_vocab_size is True"),
    "transformers refuses": (edit(rms_norm_eps="small"), "rms_norm_eps"),
    "heads do not divide": (edit(num_key_value_heads=3), "multiple"),
    "rope type": (edit(rope_parameters={"rope_type": "longrope", "rope_theta": 1.0}), "longrope"),
    "part rotary": (edit(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "ids not numbers": (edit(eagle_aux_hidden_state_layer_ids=["1"]), "eagle_aux_hidden_state_layer_ids is ['1']"),
    "id 0": (edit(eagle_aux_hidden_state_layer_ids=[0, 1, 2]), "at least 1"),
    "ids unsorted": (edit(eagle_aux_hidden_state_layer_ids=[3, 1, 2]), "ascending"),
    "flag as text": (edit(norm_before_residual="false"), "norm_before_residual is 'false'"),
    "flag with no norm": (edit(fc_norm=True), "fc_norm.0.weight is missing"),
    "activation": (edit(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "quantised": (edit(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    "logit scale": (edit(logit_scale=0.5), "logit_scale is 0.5"),
    "mixed windows": (
        edit(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=4),
        "layers of different kinds",
    ),
    "shape": (edit(intermediate_size=99), "midlayer"),
    "missing tensor": (tensors(lambda t: t.pop("fc.weight")), "tensor fc.weight is missing"),
    "missing readout": (tensors(lambda t: t.pop("lm_head.weight")), "lm_head.weight is missing"),
    "unknown tensor": (add("verifier_norm.weight"), "unknown tensor verifier_norm.weight"),
    "bias without a place": (add("midlayer.self_attn.q_proj.bias"), "no place for layers.0.self_attn.q_proj.bias"),
    "norm without its flag": (add("input_norm.weight", (192,)), "no place for input_norm.weight"),
    "first layer twice": (add("layers.0.hidden_norm.weight", (64,)), "both midlayer. and layers.0."),
    "nan": (tensors(_one_nan), "norm.weight holds NaN"),
    "infinity": (tensors(_one_infinite), "fc.weight holds NaN or infinity"),
    "integers": (tensors(lambda t: t.update({"norm.weight": torch.ones(64, dtype=torch.int8)})), "of type int8"),
    "no d2t": (tensors(lambda t: t.pop("d2t")), "d2t is missing"),
    "d2t short": (tensors(lambda t: t.update({"d2t": torch.zeros(5, dtype=torch.int64)})), "of shape (5,)"),
    "d2t of floats": (tensors(lambda t: t.update({"d2t": t["d2t"].float()})), "d2t is float32"),
    "d2t out of range": (tensors(lambda t: t["d2t"].sub_(50)), "outside the target's vocabulary"),
    "d2t not offsets": (tensors(_absolute_ids), "these look like target ids"),
    "d2t repeats": (tensors(_twice), "two draft ids to one target id"),
    "t2d differs": (tensors(_other_t2d), "different draft vocabularies"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_an_error_everywhere(case: str, tmp_path: Path, tiny_target: Path) -> None:
    head = tmp_path / "head"
    write_head(head, tiny.random_head(head_for(tiny_target)), dtype=torch.float32)
    assert check_head(head, target_dir=tiny_target) == []
    breakage, message = UNREADABLE[case]
    breakage(head)
    problems = errors(check_head(head, target_dir=tiny_target))
    expected = "layers.0.mlp.gate_proj.weight has shape" if message == "midlayer" else message
    assert any(expected in problem for problem in problems), problems
    assert all(str(head) in problem for problem in problems)
    with pytest.raises(ValueError, match="not a usable head"):
        read_files(head)
    with pytest.raises(ValueError, match="refuse or misread"):
        _export(tmp_path / "out", head, tiny_target)
    assert not (tmp_path / "out").exists()


def _export(out: Path, head: Path, target: Path, *, to: Format = "vllm") -> dict[str, Any]:
    return export_head(
        out,
        head_dir=head,
        target_dir=target,
        dtype=torch.bfloat16,
        to=to,
        verifier="org/target",
        draft_tokens=2,
        card="# card\n",
    )


SGLANG_IDS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
SERVED: dict[str, tuple[Format, Breakage, str, str]] = {
    "fc too wide for vllm": ("vllm", edit(num_aux_hidden_states=2), "error", "vLLM makes fc for 2"),
    "bias": ("vllm", edit(bias=True), "error", "bias is true"),
    "keys left to defaults": (
        "vllm",
        edit(max_position_embeddings=None),
        "warning",
        "max_position_embeddings is missing",
    ),
    "residual flag missing": ("vllm", edit(norm_before_residual=None), "info", "norm_before_residual is missing"),
    "residual flag missing, speculators": (
        "speculators",
        edit(norm_before_residual=None),
        "warning",
        "norm_before_residual is missing",
    ),
    "no ids": (
        "vllm",
        edit(eagle_aux_hidden_state_layer_ids=None, eagle_config=None),
        "info",
        "names no captured layers",
    ),
    "ids for SGLang alone": (
        "vllm",
        edit(eagle_aux_hidden_state_layer_ids=None, eagle_config=SGLANG_IDS),
        "warning",
        "in eagle_config alone",
    ),
    "other ids for SGLang": (
        "vllm",
        edit(eagle_config=SGLANG_IDS),
        "info",
        "SGLang adds 1",
    ),
    "norm in two ways": (
        "vllm",
        edit(eagle_config={"norm_before_fc": False}, norm_before_fc=True),
        "warning",
        "norm_before_fc differs",
    ),
    "window without layer_types": ("vllm", edit(sliding_window=9), "info", "layer_types does not ask for it"),
    "speculators without a default": (
        "speculators",
        edit(layer__rms_norm_eps=None),
        "error",
        "rms_norm_eps is missing",
    ),
    "speculators without a count": ("speculators", edit(layer__num_aux_hidden_states=None), "ok", ""),
    "no verifier": ("speculators", edit(speculators_config={}), "warning", "no verifier"),
    "idle tensor": ("vllm", add("rotary_emb.inv_freq"), "info", "no use in a head"),
}


@pytest.mark.parametrize("case", SERVED)
def test_what_vllm_makes_of_it_has_its_severity(case: str, tmp_path: Path, tiny_target: Path) -> None:
    layout, breakage, severity, message = SERVED[case]
    write_head(tmp_path, tiny.random_head(head_for(tiny_target)), dtype=torch.float32, to=layout, verifier="org/target")
    assert check_head(tmp_path, target_dir=tiny_target) == []
    breakage(tmp_path)
    findings = check_head(tmp_path, target_dir=None)
    if severity == "ok":
        assert findings == []
        return
    assert [one.severity for one in findings if message in str(one)] == [severity], findings
    assert read_files(tmp_path) is not None


def test_a_count_other_than_three_must_be_said_to_vllm(tmp_path: Path, tiny_target: Path) -> None:
    """The speculators library itself names four ids and no count, and vLLM's Llama class then makes fc for three."""
    config = head_for(tiny_target, capture_layers=(1, 2, 3, 4))
    write_head(tmp_path, tiny.random_head(config), dtype=torch.float32, to="speculators", verifier="org/target")
    assert check_head(tmp_path, target_dir=tiny_target) == []
    edit(layer__num_aux_hidden_states=None)(tmp_path)
    assert "vLLM makes fc for 3" in "; ".join(errors(check_head(tmp_path, target_dir=None)))


def test_a_mapping_of_the_whole_vocabulary_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    write_head(tmp_path, tiny.random_head(head_for(tiny_target, draft_vocab_size=320)), dtype=torch.float32)
    tensors(lambda stored: stored.update({"d2t": torch.zeros(320, dtype=torch.int64)}))(tmp_path)
    assert "vLLM has no parameter for it" in "; ".join(errors(check_head(tmp_path, target_dir=None)))
    assert read_files(tmp_path).target_ids_D.tolist() == list(range(320))


EAGLE_CASES: dict[str, tuple[Breakage, str, str]] = {
    "bias": (edit(bias=True), "error", "fills those biases from nothing"),
    "layer types": (edit(layer_types=["full_attention"]), "error", "layer_types in an EAGLE head"),
    "first input norm": (add("layers.0.input_layernorm.weight", (64,)), "error", "layers.0.input_layernorm.weight"),
    "own readout": (add("lm_head.weight", (320, 64)), "error", "unknown tensor lm_head.weight"),
    "mapping": (add("d2t", (320,)), "error", "an EAGLE head with d2t"),
    "draft vocabulary": (edit(draft_vocab_size=7), "warning", "draft_vocab_size is 7"),
    "bias of zeros": (tensors(lambda t: t.update({"fc.bias": torch.zeros(64)})), "info", "fc.bias is zero"),
    "bias not zero": (add("fc.bias", (64,)), "error", "drops it: it drafts other tokens"),
}


@pytest.mark.parametrize("case", EAGLE_CASES)
def test_eagle_heads(case: str, tmp_path: Path, tiny_target: Path) -> None:
    write_head(tmp_path, tiny.random_head(eagle_for(tiny_target)), dtype=torch.float32)
    assert check_head(tmp_path, target_dir=tiny_target) == []
    breakage, severity, message = EAGLE_CASES[case]
    breakage(tmp_path)
    findings = check_head(tmp_path, target_dir=tiny_target)
    assert [one.severity for one in findings if message in str(one)] == [severity], findings


def test_a_repository_head_with_a_bias_can_be_read_but_not_served(tmp_path: Path, tiny_target: Path) -> None:
    config = eagle_for(tiny_target, fc_bias=True)
    write_head(tmp_path, tiny.random_head(config), dtype=torch.float32, to="eagle-repo")
    assert read_files(tmp_path).config == config
    assert any("fc.bias is not zero" in problem for problem in errors(check_head(tmp_path, target_dir=None)))


def test_a_head_of_another_size_does_not_fit_the_target(tmp_path: Path, tiny_target: Path) -> None:
    write_head(tmp_path, tiny.random_head(tiny.head_config()), dtype=torch.float32)
    problems = "; ".join(errors(check_head(tmp_path, target_dir=tiny_target)))
    assert "hidden states of size 32, and the target's are 64" in problems
    assert "vocabulary has 100 tokens, the target's 320" in problems


def eagle_of(target_config: Any) -> HeadConfig:
    return head_config_for_target(
        target_config, kind="eagle", draft_vocab_size=target_config.vocab_size, capture_layers=()
    )


def _beside_target(config: HeadConfig, directory: Path, target: Path) -> list[Finding]:
    write_head(directory, tiny.random_head(config), dtype=torch.float32)
    return check_head(directory, target_dir=target)


def test_layers_that_the_target_does_not_have(tmp_path: Path, tiny_target: Path) -> None:
    config = head_for(tiny_target)
    outside = replace(config, capture_layers=(2, 6, 9))
    findings = _beside_target(outside, tmp_path, tiny_target)
    assert [one.severity for one in findings] == ["error"]
    assert "captured layers [9] do not exist in a target of 6 layers" in findings[0].what


def test_default_layers_must_differ_in_the_target(tmp_path: Path, tiny_target: Path) -> None:
    config = replace(head_for(tiny_target), capture_layers=None)
    findings = _beside_target(config, tmp_path, tiny_target)  # 2, 3 and 3 of 6 layers
    assert "do not differ in a target of 6 layers" in "; ".join(errors(findings))


def test_another_rotation_and_a_shorter_context_are_told(tmp_path: Path, tiny_target: Path) -> None:
    changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "max_position_embeddings": 128}
    config = replace(head_for(tiny_target), **changes)
    findings = _beside_target(config, tmp_path, tiny_target)
    assert [(one.severity, one.what.partition(" ")[0]) for one in findings] == [
        ("warning", "the"),
        ("warning", "max_position_embeddings"),
    ]
    assert "stops drafting" in findings[1].consequence
    assert "500000.0" in findings[0].what
    assert "10000.0" in findings[0].what


def test_shared_and_own_embeddings_are_told(tmp_path: Path, tiny_target: Path) -> None:
    config = replace(head_for(tiny_target), own_embedding=True)
    (finding,) = _beside_target(config, tmp_path, tiny_target)
    assert (finding.severity, "keeps the head's own" in finding.consequence) == ("info", True)
    stored = load_file(tiny_target / "model.safetensors")["model.embed_tokens.weight"]
    tensors(lambda t: t.update({"embed_tokens.weight": stored.clone()}))(tmp_path)
    (finding,) = check_head(tmp_path, target_dir=tiny_target)
    assert "shares the target's" in finding.consequence


def test_a_type_other_than_the_targets_and_an_unknown_target_are_told(tmp_path: Path, tiny_target: Path) -> None:
    write_head(tmp_path / "head", tiny.random_head(head_for(tiny_target)), dtype=torch.float16)
    target = tmp_path / "target"
    target.mkdir()
    for path in tiny_target.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    edit(architectures=["GPT2LMHeadModel"])(target)
    findings = check_head(tmp_path / "head", target_dir=target)
    assert [one.severity for one in findings] == ["warning", "info"]
    assert "GPT2LMHeadModel" in findings[0].what
    assert "float16" in findings[1].what


def test_known_targets_include_the_usual_ones() -> None:
    usual = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GptOssForCausalLM"}
    assert usual <= EAGLE3_TARGETS
    assert not [name for name in EAGLE3_TARGETS if "Eagle" in name]


@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_export_writes_card_and_fingerprint(to: Format, tmp_path: Path, tiny_target: Path) -> None:
    head = tiny.random_head(head_for(tiny_target))
    write_head(tmp_path / "head", head, dtype=torch.float32)
    result = _export(tmp_path / "out", tmp_path / "head", tiny_target, to=to)
    assert (tmp_path / "out" / "README.md").read_text() == "# card\n"
    assert result["parameters"] == sum(parameter.numel() for parameter in head.parameters())
    assert result["bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert result["warnings"] == []
    files = read_files(tmp_path / "out")
    assert files.format == to
    assert {tensor.dtype for tensor in files.tensors.values()} == {torch.bfloat16}
    noted = ("org/target", ("LlamaForCausalLM",)) if to == "speculators" else (None, ())
    assert (files.verifier, files.verifier_architectures) == noted


def test_a_config_that_the_engine_would_refuse_is_not_written(tmp_path: Path) -> None:
    config = tiny.head_config(hidden_size=30)
    files = HeadFiles("vllm", config, tensors={"fc.weight": torch.ones(30, 90)}, target_ids_D=torch.arange(40))
    with pytest.raises(ValueError, match="not a multiple of the number of attention heads"):
        write_files(tmp_path / "head", files, to="vllm")
    assert not (tmp_path / "head").exists()


def test_a_biased_fc_leaves_in_the_repository_layout_only(tmp_path: Path, tiny_target: Path) -> None:
    target = load_target_config(tiny_target)
    config = head_config_for_target(
        target, kind="eagle", draft_vocab_size=target.vocab_size, capture_layers=(), fc_bias=True
    )
    write_head(tmp_path / "head", tiny.random_head(config), dtype=torch.float32, to="eagle-repo")
    with pytest.raises(ValueError, match=r"fc\.bias is not zero"):
        _export(tmp_path / "vllm", tmp_path / "head", tiny_target)
    exported = _export(tmp_path / "repo", tmp_path / "head", tiny_target, to="eagle-repo")
    assert any("fc.bias" in warning for warning in exported["warnings"])
    assert read_files(tmp_path / "repo").tensors["fc.bias"].any()


def test_a_window_that_the_target_hands_on_is_told_and_followed(tmp_path: Path) -> None:
    """vLLM gives layers without a window the target's, unless the target mixes kinds of attention."""
    for name, changes in (("sliding", {}), ("mixed", {"layer_types": ["full_attention", "sliding_attention"] * 2})):
        target = tmp_path / name
        config = MistralConfig if name == "sliding" else Qwen2Config
        config(**tiny.TARGET_SIZES, sliding_window=16, **changes).save_pretrained(target)
        values = load_target_config(target)
        window = 16 if name == "sliding" else None
        assert head_config_for_target(values, draft_vocab_size=8, capture_layers=(1, 2, 3)).window == window
        assert eagle_of(values).window == window
        own = head_config_for_target(values, draft_vocab_size=8, capture_layers=(1, 2, 3), sliding_window=4)
        assert own.window == 4
        write_head(tmp_path / f"head-{name}", tiny.random_head(eagle_of(values)), dtype=torch.float32)
        assert read_head(tmp_path / f"head-{name}", target_config=values).config.window == window
