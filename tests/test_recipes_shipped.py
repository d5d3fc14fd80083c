"""The shipped recipes: their schema, the plans and commands in their headers, and settings that must go together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eyas.recipes.load import load_recipe, shipped_recipes
from eyas.recipes.packaged_targets import packaged_targets
from eyas.recipes.sources import expand, presets
from tests import shipped_plans
from tests.test_docs import check_command, commands_of

GPU_RECIPES = shipped_plans.gpu_recipes()


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


@pytest.mark.parametrize("name", [*GPU_RECIPES, "llama-3.1-8b-published-head"])
def test_a_header_has_what_the_plan_says(name: str) -> None:
    assert shipped_plans.figures(name) == shipped_plans.planned(name), "run `python -m tests.shipped_plans`"
    fits = [line for line in shipped_plans.planned(name) if line.startswith("score: ") and "per device: fits" in line]
    assert fits, "on the hardware that is named"
    assert not [line for line in shipped_plans.planned(name) if "NOT fit" in line]


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_a_header_claims_no_tau_of_its_own(name: str) -> None:
    assert "not measured here" in shipped_plans.headed(name, "Expected tau")


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_the_servers_of_a_header_are_as_many_and_as_busy_as_its_plan_says(name: str) -> None:
    """Every URL is a server of the loop above it, and each decodes what one engine of the recipe would."""
    generation, text = load_recipe(name).data.generation, "\n".join(shipped_plans.header(name))
    engines = 8 // generation.tensor_parallel_size
    if engines == 1:
        assert "vllm serve" not in text
        return
    assert generation.servers.concurrency == generation.batch_size
    ports = re.findall(r"http://localhost:(\d+)/v1", text)
    (devices,) = set(re.findall(r"for gpu in ([\d ]+);", text))
    assert ports == [f"800{gpu}" for gpu in devices.split()]
    assert len(set(ports)) == engines
    for option in (f"--max-num-seqs {generation.batch_size}", f"--max-model-len {generation.max_model_len}"):
        assert option in text
    assert f"{engines} engines answer" in text, "as the plan's hours have it"
    if load_recipe(name).features.mode == "offline":
        assert f"--extract-tasks {engines}" in shipped_plans.headed(name, "Cluster")


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
    assert score.lossless.requests == 0, "float32 engines need twice the memory, and MXFP4 has none"
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


def test_states_with_a_few_huge_channels_are_stored_with_range() -> None:
    """One scale for a token and layer: beside such a channel fp8 has few steps left for the others."""
    for name in GPU_RECIPES:
        recipe = load_recipe(name)
        if recipe.features.mode == "offline":
            wide = recipe.target.model.startswith("openai/gpt-oss")
            assert recipe.features.stored_as == ("bfloat16" if wide else "fp8"), name


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_the_stages_of_a_recipe_agree_from_day_to_day(name: str) -> None:
    """Of these targets gpt-oss and Mistral print today's date in their templates."""
    recipe = load_recipe(name)
    dated = recipe.target.model.startswith(("openai/", "mistralai/"))
    assert ("strftime_now" in recipe.data.template_options) == dated
    assert recipe.score.template_options is None, "as the data has it"


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_a_run_ends_with_its_schedule_and_feeds_every_process(name: str) -> None:
    train, data = load_recipe(name).train, load_recipe(name).data
    assert train.stop_after_evaluations is None, "a falling learning rate brings much of its tau at the end"
    if load_recipe(name).head.kind == "eagle3":
        assert train.ttt_warmup_share == 0
    processes = 16 if "70b" in name else 8
    assert train.batch_tokens // processes >= data.max_length, "a process would have no conversation in many a step"
