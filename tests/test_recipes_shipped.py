"""The shipped recipes, without weights: schema, the plan in their headers, and heads that vLLM can read, at reduced width."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eyas.heads.config import default_capture_layers, load_target_config
from eyas.heads.formats.check import check_head
from eyas.heads.formats.export import export_head
from eyas.heads.formats.write import working_layout, write_head
from eyas.heads.initialise import new_head
from eyas.heads.serving import engine_environment, speculative_config
from eyas.heads.target import load_target_pieces
from eyas.recipes.load import load_recipe, shipped_recipes, with_values
from eyas.recipes.packaged_targets import packaged_targets
from eyas.recipes.run import Run
from eyas.recipes.schema import Recipe
from eyas.recipes.sources import expand, presets
from eyas.recipes.train_stages import head_plan, require_head_possible
from eyas.train.start import planned_config
from tests import shipped_plans, tiny
from tests.test_docs import check_command, commands_of

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


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_recipe_is_named_as_its_file_and_says_what_it_needs(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    text = "\n".join(shipped_plans.header(name))
    assert len(shipped_plans.header(name)[0]) < 132
    assert "# Prerequisites:" in text
    for source in (*recipe.data.sources, *recipe.data.guard.sources):
        assert source.preset is None or (source.preset in presets() and expand(source))


@pytest.mark.parametrize("name", shipped_recipes())
def test_numbers_are_written_as_editors_read_them_too(name: str) -> None:
    """200_000 is a number to PyYAML, and text to YAML 1.2."""
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    assert not re.findall(r": \d+_\d", text)


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_commands_of_a_header_parse(name: str, tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    small.write_text("name: small\ntarget: {model: org/name}\ndata: {conversations: chats.jsonl}\n")
    plain = [re.sub(r"^# *([A-Z0-9][\w ]*: +)?", "    ", line) for line in shipped_plans.header(name)]
    found = [words for words, _ in commands_of("\n".join(plain))]
    assert any(name in word for words in found for word in words), "a header has a command with its recipe"
    for words in found:
        check_command(words, small_recipe=small)


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_a_header_has_what_the_plan_says(name: str) -> None:
    assert shipped_plans.figures(name) == shipped_plans.planned(name), "run `python -m tests.shipped_plans`"
    assert not [line for line in shipped_plans.planned(name) if "NOT fit" in line]
    assert "not measured here" in shipped_plans.headed(name, "Expected tau")


def test_the_page_has_the_table_of_the_recipes_as_they_are() -> None:
    page = shipped_plans.PAGE.read_text(encoding="utf-8")
    assert shipped_plans.with_table(page) == page, "run `python -m tests.shipped_plans`"
    unnamed = [name for name in shipped_recipes() if f"`{name}`" not in page]
    assert unnamed == []


def test_the_recipes_that_were_asked_for_are_there() -> None:
    heads = {(load_recipe(name).target.model, load_recipe(name).head.kind) for name in GPU_RECIPES}
    assert {(model, "eagle3") for model in packaged_targets()} <= heads
    modes = {
        (recipe.head.kind, recipe.features.mode)
        for recipe in map(load_recipe, GPU_RECIPES)
        if recipe.target.model == "meta-llama/Llama-3.1-8B-Instruct"
    }
    assert modes == {("eagle", "offline"), ("eagle", "online"), ("eagle3", "offline"), ("eagle3", "online")}


def test_the_harness_check_is_the_protocol_of_vllms_own_test() -> None:
    """tests/v1/spec_decode/test_acceptance_length.py of vLLM: 80 prompts, 256 tokens, three drafts, greedy."""
    score = load_recipe("llama-3.1-8b-published-head").score
    assert (score.draft_lengths, score.max_tokens, score.temperatures) == ((3,), 256, (0.0,))
    prompts = score.prompt_sets["mt_bench"]
    assert (prompts.requests, prompts.turns) == (80, "first")
    assert score.min_requests == 80, "every cell asks them all"
    assert "2.60" in shipped_plans.headed("llama-3.1-8b-published-head", "Expected tau")


def test_the_long_recipes_measure_what_the_evidence_recipe_does() -> None:
    evidence = load_recipe("smollm2-135m-evidence-cpu").score
    for kind in ("eagle", "eagle3"):
        assert load_recipe(f"smollm2-135m-{kind}-long-cpu").score == evidence
    made = load_recipe("smollm2-135m-eagle3-long-cpu").run_directory / "regenerate" / "conversations.jsonl"
    assert load_recipe("smollm2-135m-eagle-long-cpu").data.conversations == str(made)


@pytest.mark.parametrize("model", packaged_targets())
def test_packaged_targets_hold_a_config_and_no_weights(model: str) -> None:
    directory = packaged_targets()[model]
    assert [path.name for path in directory.iterdir()] == ["config.json"]
    assert f"`{directory.name}`" in (directory.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_a_head_can_be_made_exported_and_read(name: str, exported: dict[str, tuple[Path, Path]]) -> None:
    target_dir, head_dir = exported[name]
    problems = [str(each) for each in check_head(head_dir, target_dir=target_dir) if each.severity != "info"]
    assert problems == []


PARSE = """
import json, sys
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

for case in json.loads(sys.argv[1]):
    target = ModelConfig(model=case["target"], tokenizer=case["target"], dtype="float32", max_model_len=256)
    parsed = SpeculativeConfig(
        **case["speculative"], target_model_config=target, target_parallel_config=ParallelConfig()
    )
    draft = parsed.draft_model_config
    print(json.dumps([case["name"], parsed.method, draft.architectures, draft.hf_config.num_hidden_layers]))
"""


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
    assert [(name, method, layers) for name, method, _, layers in parsed] == [
        (name, load_recipe(name).head.kind, 1) for name in GPU_RECIPES
    ]
