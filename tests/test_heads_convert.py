"""`eyas convert` and `eyas check` as commands: bits kept, refusals in one line, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from eyas.heads.config import head_config_for_target, load_target_config
from eyas.heads.formats.read import read_files
from eyas.heads.formats.write import convert_head, write_head
from eyas.recipes.cli import app
from eyas.recipes.head_commands import Layout
from tests import tiny

runner = CliRunner()


def eyas(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command run in this process."""
    result = runner.invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def write(directory: Path, **changes: Any) -> Path:
    """A small EAGLE-3 head in vLLM's layout, in bfloat16."""
    write_head(directory, tiny.random_head(tiny.head_config(**changes)), dtype=torch.bfloat16)
    return directory


def test_round_the_layouts_and_back_every_file_is_the_same(tmp_path: Path) -> None:
    source = write(tmp_path / "0", norm_before_residual=True, capture_layers=(1, 4), num_layers=2)
    assert eyas("convert", source, tmp_path / "1", "--to", "speculators", "--target", "org/target")[0] == 0
    assert eyas("convert", tmp_path / "1", tmp_path / "2", "--to", "vllm")[0] == 0
    assert eyas("convert", tmp_path / "2", tmp_path / "3", "--to", "speculators", "--target", "org/target")[0] == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "2" / name).read_bytes() == (source / name).read_bytes()
        assert (tmp_path / "3" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()


def test_verifier_and_draft_tokens_survive(tmp_path: Path) -> None:
    head = tiny.random_head(tiny.head_config())
    write_head(tmp_path / "a", head, dtype=torch.float32, to="speculators", verifier="org/target", draft_tokens=7)
    files = convert_head(tmp_path / "a", tmp_path / "b", to="speculators", target=None)
    assert (files.verifier, files.draft_tokens) == ("org/target", 7)
    assert (tmp_path / "b" / "config.json").read_bytes() == (tmp_path / "a" / "config.json").read_bytes()


def test_a_target_directory_names_the_captured_layers_and_the_verifier(tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path / "target", num_layers=8)
    config = head_config_for_target(load_target_config(target), draft_vocab_size=64, capture_layers=(2, 4, 5))
    write_head(tmp_path / "repo", tiny.random_head(config), dtype=torch.float32, to="eagle-repo")
    code, shown, _ = eyas("convert", tmp_path / "repo", tmp_path / "out", "--to", "speculators", "--target", target)
    assert code == 0, shown
    files = read_files(tmp_path / "out")
    assert files.config == config
    assert (files.verifier, files.verifier_architectures) == (str(target), ("LlamaForCausalLM",))
    assert eyas("check", tmp_path / "out", "--target", target)[1].strip().endswith("0 errors, 0 warnings")


def test_the_wrong_target_is_told_with_exit_2(tmp_path: Path, tiny_target: Path) -> None:
    source = write(tmp_path / "head")
    code, shown, _ = eyas("convert", source, tmp_path / "out", "--to", "vllm", "--target", tiny_target)
    assert code == 2
    assert "hidden states of size 32" in shown


def test_a_used_destination_is_refused_and_untouched(tmp_path: Path) -> None:
    source = write(tmp_path / "head")
    used = tmp_path / "used"
    used.mkdir()
    (used / "precious").write_text("x")
    code, _, stderr = eyas("convert", source, used, "--to", "vllm")
    assert (code, stderr) == (
        2,
        f"error: {used} exists and is not empty; name another directory or remove it\n",
    )
    assert [path.name for path in used.iterdir()] == ["precious"]
    assert eyas("convert", source, source, "--to", "speculators")[0] == 2


@pytest.mark.parametrize(
    ("changes", "to", "message"),
    [
        ({"capture_layers": (1, 3)}, "eagle-repo", "always reads 2, L//2 and L-3"),
        ({"norm_output": True, "capture_layers": (2, 3, 4)}, "eagle-repo", "no norm_output"),
        ({"num_layers": 2, "capture_layers": (2, 3, 4)}, "eagle-repo", "no num_layers=2"),
        ({"layer": "qwen3", "capture_layers": (2, 3, 4)}, "eagle-repo", "no layer=qwen3"),
        ({"norm_before_fc": True, "fc_norm": True}, "speculators", "norm_before_fc together with fc_norm"),
        ({"target_hidden_size": 48, "own_embedding": True}, "speculators", "hidden size 32 differs"),
        (tiny.EAGLE, "speculators", "only EAGLE-3"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(changes: dict[str, Any], to: str, message: str, tmp_path: Path) -> None:
    code, _, stderr = eyas("convert", write(tmp_path / "head", **changes), tmp_path / "out", "--to", to)
    assert code == 2
    assert message in stderr
    assert "--to vllm" in stderr
    assert stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_bias_of_fc_goes_to_vllm_only_if_it_is_zero(tmp_path: Path) -> None:
    source = tmp_path / "repo"
    config = tiny.head_config(**tiny.EAGLE, fc_bias=True, head_dim=8)
    write_head(source, tiny.random_head(config), dtype=torch.float32, to="eagle-repo")
    code, _, stderr = eyas("convert", source, tmp_path / "out", "--to", "vllm")
    assert (code, "fc has a bias" in stderr) == (2, True)
    assert eyas("convert", source, tmp_path / "copy", "--to", "eagle-repo")[0] == 0
    stored = load_file(source / "model.safetensors")
    save_file({**stored, "fc.bias": torch.zeros(32)}, source / "model.safetensors")
    assert eyas("convert", source, tmp_path / "out", "--to", "vllm")[0] == 0
    assert "fc.bias" not in load_file(tmp_path / "out" / "model.safetensors")
    assert read_files(tmp_path / "out").config.fc_bias is False


def test_several_weight_files_are_read_as_one(tmp_path: Path) -> None:
    source = write(tmp_path / "head")
    stored = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for index, (name, tensor) in enumerate(sorted(stored.items())):
        parts["ab"[index % 2] + ".safetensors"][name] = tensor
    for name, part in parts.items():
        save_file(part, source / name)
    index_file = source / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": {name: file for file, part in parts.items() for name in part}}))
    assert set(read_files(source).tensors) == {name.replace("midlayer.", "layers.0.") for name in stored} - {
        "d2t",
        "t2d",
    }
    index_file.write_text(json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(ValueError, match="outside its directory"):
        read_files(source)


def test_check_names_severity_consequence_and_mend(tmp_path: Path) -> None:
    source = write(tmp_path / "head")
    code, shown, _ = eyas("check", source)
    assert (code, shown) == (
        0,
        f"{source}: eagle3 head, vllm layout: 0 errors, 0 warnings (not checked against a target: --target)\n",
    )
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_aux_hidden_states": 2, "sliding_window": 4}))
    code, shown, _ = eyas("check", source)
    assert code == 2
    assert [line.partition(":")[0].strip() for line in shown.splitlines()[:-1]] == [
        *("error", "consequence", "mend"),
        *("info", "consequence", "mend"),
    ]
    assert shown.splitlines()[-1].startswith(f"{source}: eagle3 head, vllm layout: 1 errors, 0 warnings")


def test_check_of_no_head_says_so(tmp_path: Path) -> None:
    code, shown, _ = eyas("check", tmp_path / "nothing")
    assert code == 2
    assert "config.json is missing" in shown
    assert "no readable head" in shown


def test_the_command_knows_the_layouts() -> None:
    from eyas.heads.formats.files import FORMATS

    assert tuple(layout.value for layout in Layout) == FORMATS
