"""Heads of the shipped recipes, without weights: made, exported and read by vLLM at reduced width, and their shapes at full width."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eyas.heads.build import build_head
from eyas.heads.config import default_capture_layers, load_target_config
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.formats.check import check_head
from eyas.heads.formats.export import export_head
from eyas.heads.formats.write import working_layout, write_head
from eyas.heads.initialise import new_head
from eyas.heads.serving import engine_environment, speculative_config
from eyas.heads.target import load_target_pieces
from eyas.recipes.load import load_recipe, with_values
from eyas.recipes.packaged_targets import packaged_targets
from eyas.recipes.run import Run, plan_run
from eyas.recipes.schema import Recipe
from eyas.recipes.train_stages import head_plan, head_sizes, require_head_possible
from eyas.train.start import planned_config
from tests import shipped_plans, tiny

GPU_RECIPES = shipped_plans.gpu_recipes()
NARROW: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": tiny.VOCAB_SIZE,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""What a published config keeps when it is made narrow: everything but these, as far as it has them."""


def narrow_target(directory: Path, model: str) -> Path:
    """A random target of a published config's architecture, narrow, with a tokenizer."""
    values = json.loads((packaged_targets()[model] / "config.json").read_text())
    values |= {name: value for name, value in NARROW.items() if name in values}
    values.pop("quantization_config", None)
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][: values["num_hidden_layers"]]
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(values))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(directory)
    tiny.write_tokenizer(directory)
    return directory


def narrow_recipe(name: str) -> Recipe:
    """A recipe with the widths that it states made narrow, and every other choice as it is."""
    recipe = load_recipe(name)
    changes = {"draft_vocab_size": 64, "intermediate_size": 160}
    stated = recipe.head.model_dump()
    narrowed = {field: value for field, value in changes.items() if isinstance(stated[field], int)}
    return with_values(recipe, {"head": narrowed} if narrowed else {})


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Of every GPU recipe a narrow target, and a head with its starting weights, exported: name -> (target, head)."""
    root = tmp_path_factory.mktemp("shipped")
    return {name: _export(root / name, narrow_recipe(name)) for name in GPU_RECIPES}


def _export(root: Path, recipe: Recipe) -> tuple[Path, Path]:
    target_dir = narrow_target(root / "target", recipe.target.model)
    run = Run(recipe=recipe, run_dir=root, target_dir=target_dir, target_fingerprint="narrow")
    require_head_possible(run)
    plan, target = head_plan(recipe), load_target_config(target_dir)
    layers = () if plan.kind == "eagle" else default_capture_layers(target.num_hidden_layers)
    size = plan.draft_vocab_size if isinstance(plan.draft_vocab_size, int) else target.vocab_size
    config = planned_config(plan, target=target, capture_layers=layers, draft_vocab_size=size)
    head = new_head(
        config,
        draft_to_target_D=torch.arange(size) * (target.vocab_size // size),
        pieces=load_target_pieces(target_dir),
        target_dir=target_dir,
        num_target_layers=target.num_hidden_layers,
        start=plan.start,
        seed=0,
    )
    (root / "head").mkdir()
    write_head(
        root / "head",
        head,
        dtype=torch.float32,
        to=working_layout(config),
        verifier="narrow",
        verifier_dir=target_dir,
        draft_tokens=recipe.score.main_draft_length,
    )
    export_head(
        root / "export",
        head_dir=root / "head",
        target_dir=target_dir,
        dtype=torch.bfloat16,
        to=recipe.export.format,
        verifier=recipe.target.model,
        draft_tokens=recipe.score.main_draft_length,
        card="# narrow",
    )
    return target_dir, root / "export"


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_a_head_can_be_made_exported_and_read(name: str, exported: dict[str, tuple[Path, Path]]) -> None:
    target_dir, head_dir = exported[name]
    problems = [str(each) for each in check_head(head_dir, target_dir=target_dir) if each.severity != "info"]
    assert problems == []


WIDTHS = {
    "gpt-oss-120b-eagle3": (2880, 64 * 64, 8 * 64, 17280),
    "gpt-oss-20b-eagle3": (2880, 64 * 64, 8 * 64, 17280),
    "llama-3.1-8b-eagle3": (4096, 32 * 128, 8 * 128, 14336),
    "llama-3.1-8b-eagle3-online": (4096, 32 * 128, 8 * 128, 14336),
    "llama-3.3-70b-eagle3": (8192, 64 * 128, 8 * 128, 28672),
    "mistral-small-24b-eagle3": (5120, 32 * 128, 8 * 128, 32768),
    "qwen3-30b-a3b-eagle3": (2048, 32 * 128, 4 * 128, 6144),
    "qwen3-8b-eagle3": (4096, 32 * 128, 8 * 128, 12288),
}
"""Of the EAGLE-3 recipes: hidden size, queries, keys, MLP; of gpt-oss the MLP of SpecForge's heads."""


def test_every_eagle3_recipe_has_widths_known_by_hand() -> None:
    assert set(WIDTHS) == {name for name in GPU_RECIPES if load_recipe(name).head.kind == "eagle3"}


@pytest.mark.parametrize("name", WIDTHS)
def test_a_head_at_full_width_has_the_shapes_of_its_target(name: str) -> None:
    run, (hidden, queries, keys, mlp) = plan_run(load_recipe(name)), WIDTHS[name]
    target, plan = load_target_config(run.target_dir), head_plan(run.recipe)
    layers = default_capture_layers(target.num_hidden_layers)
    config = planned_config(plan, target=target, capture_layers=layers, draft_vocab_size=32000)
    with torch.device("meta"):
        head = build_head(config, draft_to_target_D=torch.arange(32000))
    assert isinstance(head, Eagle3Head)
    shapes = {each.rpartition(".")[0]: tuple(value.shape) for each, value in head.named_parameters() if value.ndim == 2}
    assert {each.rpartition(".")[2]: shape for each, shape in shapes.items()} == {
        "fc": (hidden, 3 * hidden),
        "q_proj": (queries, 2 * hidden),
        "k_proj": (keys, 2 * hidden),
        "v_proj": (keys, 2 * hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (mlp, hidden),
        "up_proj": (mlp, hidden),
        "down_proj": (hidden, mlp),
        "lm_head": (32000, hidden),
    }
    assert head_sizes(run)[1].total == sum(value.numel() for value in head.parameters())


PARSE = """
import json, sys
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.model_executor.models.interfaces import supports_eagle, supports_eagle3

for case in json.loads(sys.argv[1]):
    target = ModelConfig(model=case["target"], tokenizer=case["target"], dtype="float32", max_model_len=256)
    parsed = SpeculativeConfig(
        **case["speculative"], target_model_config=target, target_parallel_config=ParallelConfig()
    )
    draft = parsed.draft_model_config
    served, _ = target.registry.resolve_model_cls(target.architectures, model_config=target)
    drafter, _ = draft.registry.resolve_model_cls(draft.architectures, model_config=draft)
    gives_states = supports_eagle3(served) if parsed.method == "eagle3" else supports_eagle(served)
    print(json.dumps([case["name"], drafter.__name__, draft.hf_config.num_hidden_layers, gives_states]))
"""
DRAFTERS = {
    ("llama", "eagle"): "EagleLlamaForCausalLM",
    ("llama", "eagle3"): "Eagle3LlamaForCausalLM",
    ("qwen3", "eagle3"): "Eagle3Qwen3ForCausalLM",
}
"""Class of vLLM that runs a head with such layers, of such a kind."""


@pytest.mark.engine
def test_vllm_accepts_the_configuration_of_every_head(exported: dict[str, tuple[Path, Path]]) -> None:
    cases = [
        {
            "name": name,
            "target": str(target_dir),
            "speculative": speculative_config(
                head_dir,
                method=load_recipe(name).head.kind,
                num_speculative_tokens=load_recipe(name).score.draft_lengths[0],
            ),
        }
        for name, (target_dir, head_dir) in exported.items()
    ]
    done = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps(cases)],
        env=engine_environment(threads=1, kv_cache_gib=1),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    parsed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert parsed == [
        [name, DRAFTERS[load_recipe(name).head.layer, load_recipe(name).head.kind], 1, True] for name in GPU_RECIPES
    ]
