"""The three layouts of a head directory: round trips without a lost bit, and what each cannot express."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import LlamaConfig

from eyas.heads.config import HeadConfig
from eyas.heads.formats.files import FLOATS, FORMATS, Format, HeadFiles, expected_shapes
from eyas.heads.formats.read import read_files, read_head
from eyas.heads.formats.write import write_files, write_head
from tests import tiny

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "linear", "rope_theta": 500000.0, "factor": 2.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
]


@st.composite
def configs(draw: st.DrawFn) -> HeadConfig:
    """Any head whose sizes the engine's config class accepts."""
    heads = draw(st.sampled_from([1, 2, 4]))
    hidden = heads * draw(st.sampled_from([4, 8]))
    vocab = draw(st.integers(8, 24))
    fields: dict[str, Any] = {
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "intermediate_size": draw(st.integers(1, 9)),
        "num_layers": draw(st.sampled_from([1, 1, 2])),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([count for count in (1, 2, 4) if heads % count == 0])),
        "head_dim": draw(st.sampled_from([hidden // heads, 6])),
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
        "rope_parameters": draw(st.sampled_from(ROPES)),
        "max_position_embeddings": draw(st.sampled_from([64, 256])),
        "attention_bias": draw(st.booleans()),
        "own_embedding": draw(st.booleans()),
    }
    if draw(st.integers(0, 3)) == 0:
        return HeadConfig(**fields, kind="eagle", capture_layers=(), fc_bias=draw(st.booleans()))
    switches = {
        name: draw(st.booleans()) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    if fields["own_embedding"]:
        fields["target_hidden_size"] = draw(st.sampled_from([hidden, 5]))
    fields["draft_vocab_size"] = draw(st.integers(1, vocab))
    return HeadConfig(
        **fields,
        **switches,
        layer=draw(st.sampled_from(["llama", "qwen3"])),
        capture_layers=draw(st.sampled_from([None, (1,), (2, 4, 6), (2, 3, 4), (1, 2, 3, 9)])),
        sliding_window=draw(st.sampled_from([None, 7])),
    )


@st.composite
def head_files(draw: st.DrawFn) -> HeadFiles:
    """A head with weights of every stored type, subnormal and negative zero included."""
    config = draw(configs())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtypes = draw(st.sampled_from([(dtype,) for dtype in FLOATS] + [FLOATS]))
    tensors = {}
    for index, (name, shape) in enumerate(expected_shapes(config).items()):
        tensors[name] = torch.randn(shape, generator=generator).to(dtypes[index % len(dtypes)])
        tensors[name].view(-1)[0] = -0.0
    ids_D = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    return HeadFiles(
        format="vllm",
        config=config,
        tensors=tensors,
        target_ids_D=ids_D,
        verifier=draw(st.sampled_from([None, "org/target"])),
        draft_tokens=draw(st.integers(1, 9)),
        verifier_architectures=("LlamaForCausalLM",),
    )


def expressible(config: HeadConfig, to: Format) -> bool:
    """What the layouts can hold, said independently of the writers."""
    if to == "vllm":
        return not config.fc_bias
    flags = [config.norm_before_residual, config.norm_before_fc, config.fc_norm, config.norm_output]
    if to == "speculators":
        same_width = config.hidden_size == config.target_hidden_size
        return config.kind == "eagle3" and same_width and not (config.norm_before_fc and config.fc_norm)
    plain = not any([*flags, config.attention_bias, config.sliding_window]) and config.layer == "llama"
    plain = plain and config.rope_parameters in ROPES[:3]
    if config.kind == "eagle":
        return plain and config.head_dim * config.num_attention_heads == config.hidden_size
    return plain and config.num_layers == 1 and config.capture_layers in (None, (2, 3, 4))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equality that tells -0.0 from 0.0 and one float type from another."""
    kind = torch.int32 if one.element_size() == 4 else torch.int16
    return one.dtype == other.dtype and torch.equal(one.view(kind), other.view(kind))


@pytest.mark.parametrize("to", FORMATS)
@given(files=head_files())
def test_round_trips_are_bit_exact_or_refused(to: Format, files: HeadFiles) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        if not expressible(files.config, to):
            with pytest.raises(ValueError, match=r"--to (vllm|eagle-repo)"):
                write_files(directory, files, to=to)
            assert not list(directory.iterdir())
            return
        write_files(directory, files, to=to)
        again = read_files(directory)
    config = files.config
    if to == "eagle-repo" and config.kind == "eagle3":
        config = replace(config, capture_layers=None)
    assert again.config == config
    assert again.format == to
    assert torch.equal(again.target_ids_D, files.target_ids_D)
    assert set(again.tensors) == set(files.tensors)
    assert all(same_bits(again.tensors[name], tensor) for name, tensor in files.tensors.items())
    if to == "speculators":
        assert (again.verifier, again.draft_tokens) == (files.verifier, files.draft_tokens)
        assert again.verifier_architectures == files.verifier_architectures


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_a_written_head_reads_back_as_the_same_module(variant: str, tmp_path: Path) -> None:
    head = tiny.random_head(tiny.head_config(**tiny.VARIANTS[variant]))
    to: Format = "eagle-repo" if head.config.fc_bias and not head.config.attention_bias else "vllm"
    if head.config.fc_bias and to == "vllm":
        with pytest.raises(ValueError, match="fc has a bias"):
            write_head(tmp_path, head, dtype=torch.float32)
        return
    write_head(tmp_path, head, dtype=torch.float32, to=to)
    again = read_head(tmp_path)
    assert again.config == head.config
    assert torch.equal(again.draft_to_target_D, head.draft_to_target_D)
    for (name, ours), (_, theirs) in zip(head.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_vllm_files_name_everything_that_has_a_default(tmp_path: Path) -> None:
    head = tiny.random_head(tiny.head_config(capture_layers=(1, 4), norm_before_fc=True))
    write_head(tmp_path, head, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4]
    assert config["num_aux_hidden_states"] == 2  # vLLM's Llama class does not count the ids
    assert config["eagle_config"] == {  # SGLang adds 1 to these
        "eagle_aux_hidden_state_layer_ids": [0, 3],
        "use_aux_hidden_state": True,
        "norm_before_fc": True,
    }
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert [config[name] for name in flags] == [False, True, False, False]
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["d2t"] + torch.arange(40), head.draft_to_target_D)
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == head.draft_to_target_D.tolist()
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert "midlayer.hidden_norm.weight" in tensors
    assert not [name for name in tensors if name.startswith(("layers.0.", "embed_tokens"))]


@pytest.mark.parametrize("to", FORMATS)
def test_a_whole_vocabulary_has_no_mapping(to: Format, tmp_path: Path) -> None:
    write_head(
        tmp_path,
        tiny.random_head(tiny.head_config(draft_vocab_size=100, capture_layers=(2, 3, 4))),
        dtype=torch.float32,
        to=to,
    )
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))
    assert read_files(tmp_path).target_ids_D.tolist() == list(range(100))


def test_speculators_files_keep_the_names_of_the_layers(tmp_path: Path) -> None:
    head = tiny.random_head(tiny.head_config(num_layers=2, layer="qwen3"))
    write_head(tmp_path, head, dtype=torch.float32, to="speculators", verifier="org/target", draft_tokens=5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["norm_before_residual"] is False  # vLLM's default here is true
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"layers.0.hidden_norm.weight", "layers.1.input_layernorm.weight"} <= names


def test_the_repository_says_bias_only_to_deny_it(tmp_path: Path) -> None:
    for bias in (True, False):
        directory = tmp_path / str(bias)
        config = tiny.head_config(**tiny.EAGLE, fc_bias=bias, head_dim=8)
        write_head(directory, tiny.random_head(config), dtype=torch.float32, to="eagle-repo")
        written = json.loads((directory / "config.json").read_text())
        assert written.get("bias", True) is bias
        assert written["architectures"] == ["LlamaForCausalLM"]


def test_captured_layers_that_the_files_leave_open_come_from_the_target(tmp_path: Path) -> None:
    head = tiny.random_head(tiny.head_config(capture_layers=(2, 5, 7)))
    write_head(tmp_path, head, dtype=torch.float32, to="eagle-repo")
    assert read_files(tmp_path).config.capture_layers is None
    with pytest.raises(ValueError, match="name the target"):
        read_head(tmp_path)
    assert read_head(tmp_path, target_config=LlamaConfig(num_hidden_layers=10)).config == head.config


def test_a_draft_vocabulary_out_of_order_is_sorted_with_its_readout(tmp_path: Path) -> None:
    head = tiny.random_head(tiny.head_config())
    write_head(tmp_path, head, dtype=torch.float32)
    files = read_files(tmp_path)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    tensors = {**files.tensors, "lm_head.weight": files.tensors["lm_head.weight"][order]}
    shuffled = replace(files, tensors=tensors, target_ids_D=files.target_ids_D[order])
    write_files(tmp_path / "shuffled", shuffled, to="vllm")
    assert torch.equal(read_files(tmp_path / "shuffled").target_ids_D, shuffled.target_ids_D)
    again = read_head(tmp_path / "shuffled")
    assert torch.equal(again.draft_to_target_D, head.draft_to_target_D)
    assert torch.equal(again.get_parameter("lm_head.weight"), head.get_parameter("lm_head.weight"))
