"""The model card: what it must say, and that its front matter and commands are well formed."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
import yaml

from eyas.heads.card import model_card
from tests import tiny

HELDOUT: dict[str, Any] = {
    "heldout_tau": 2.34567,
    "heldout_marginal": [0.7, 0.4, 0.25],
    "heldout_drafts": 1234,
    "heldout_conversations": 56,
    "chain_length": 3,
    "draft_coverage_heldout": 0.9876,
    "estimator": "chains",
}


def card(**changes: Any) -> str:
    fields: dict[str, Any] = {
        "name": "smol-eagle3",
        "base_model": "org/target",
        "revision": None,
        "config": tiny.head_config(),
        "data_fingerprint": "ab12",
        "training": {"steps": 400, "learning rate": 0.0003, "loss": "kl", "dtype": None},
        "heldout": HELDOUT,
        "coverage": 0.99123,
        "to": "vllm",
        "draft_tokens": 3,
    }
    return model_card(**{**fields, **changes})


def test_front_matter_is_yaml_whatever_the_name() -> None:
    text = card(base_model='org/a: "b"')
    matter = yaml.safe_load(text.split("---")[1])
    assert matter["base_model"] == 'org/a: "b"'
    assert matter["tags"] == ["speculative-decoding", "eagle3", "draft-model", "eyas"]


def test_it_says_what_was_trained_and_measured() -> None:
    text = card()
    for expected in (
        "EAGLE-3 (arXiv 2503.01840)",
        "| data fingerprint | `ab12` |",
        "| steps | 400 |",
        "| learning rate | 0.0003 |",
        "40 of 100 tokens, which are 99.12% of those in answers",
        "after layers 1, 2, 3",
        "| tau | 2.346 |",
        "| accepted at position 3 | 0.250 |",
        "| conversations | 56 |",
        "Acceptance is no claim about speed",
    ):
        assert expected in text, expected
    definition = next(line for line in text.splitlines() if line.startswith("tau is"))
    for word in ("bonus token included", "step-weighted", "prefix-joint", "greedy", "of length 3"):
        assert word in definition


def test_missing_measurements_are_not_invented() -> None:
    text = card(heldout={}, coverage=None)
    assert "Not measured." in text
    assert "tau is" not in text
    assert "40 of 100 tokens |" in text


@pytest.mark.parametrize(("changes", "method", "algorithm"), [({}, "eagle3", "EAGLE3"), (tiny.EAGLE, "eagle", "EAGLE")])
def test_the_commands_can_be_pasted(changes: dict[str, Any], method: str, algorithm: str) -> None:
    text = card(config=tiny.head_config(**changes), draft_tokens=5)
    text = text.replace("\\\n", "")  # continued lines
    vllm, sglang = (shlex.split(block) for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL))
    assert vllm[:4] == ["vllm", "serve", "org/target", "--speculative-config"]
    served = json.loads(vllm[4])
    assert (served["method"], served["num_speculative_tokens"]) == (method, 5)
    options = dict(zip(sglang[3::2], sglang[4::2], strict=True))
    assert options["--speculative-algorithm"] == algorithm
    assert (options["--speculative-num-steps"], options["--speculative-num-draft-tokens"]) == ("5", "6")
    assert options["--speculative-eagle-topk"] == "1"
    assert "SGLang (not tested here)" in text


def test_a_cell_never_breaks_the_table() -> None:
    assert "| note | a\\|b c |" in card(training={"note": "a|b\nc"})


def test_a_target_without_a_hub_id_is_not_named_as_one() -> None:
    text = card(base_model="/models/smol")
    assert "base_model" not in yaml.safe_load(text.split("---")[1])
    assert "vllm serve TARGET_DIRECTORY" in text
    assert "`/models/smol`" in text


def test_what_no_server_reads_is_not_offered() -> None:
    biased = card(config=tiny.head_config(**tiny.EAGLE, fc_bias=True), to="eagle-repo")
    assert "vllm serve" not in biased
    assert "the EAGLE repository's own code only" in biased
    assert "sglang" not in card(to="speculators")
    assert "LlamaForCausalLMEagle" in card(config=tiny.head_config(**tiny.EAGLE))


def test_variants_and_revision_are_told() -> None:
    text = card(config=tiny.head_config(fc_norm=True, norm_output=True, sliding_window=9), revision="v2")
    assert "as EAGLE-3.1" in text
    assert "sliding window of 9 tokens" in text
    assert "`org/target` at v2" in text
