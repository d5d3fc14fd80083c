"""The vLLM head directory: round trip, and everything that the engine would refuse or misread."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.heads.config import head_config_for_target, load_target_config
from eyas.heads.drafting import chain_statistics, leading_hits, simulate_chains
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.formats.vllm import check_head, export_head, read_head, write_head
from eyas.heads.initialise import new_head
from eyas.heads.prediction import acceptance_predictor
from eyas.heads.target import HiddenStateCapture, load_target_model, load_target_pieces
from tests import tiny


def _head_for(target: Path, *, seed: int = 0) -> Eagle3Head:
    config = head_config_for_target(
        load_target_config(target), draft_vocab_size=128, capture_layers=tiny.CAPTURE_LAYERS
    )
    return tiny.random_head(config, seed=seed)


def test_a_written_head_reads_back(tmp_path: Path) -> None:
    head = tiny.random_head(tiny.head_config())
    write_head(tmp_path, head, dtype=torch.float32)
    again = read_head(tmp_path)
    assert again.config == head.config
    assert torch.equal(again.draft_to_target_D, head.draft_to_target_D)
    for (name, ours), (_, theirs) in zip(head.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_d2t_holds_offsets_and_t2d_the_same_vocabulary(tmp_path: Path) -> None:
    head = tiny.random_head(tiny.head_config())
    write_head(tmp_path, head, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["d2t"] + torch.arange(40), head.draft_to_target_D)
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == head.draft_to_target_D.tolist()
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert "embed_tokens.weight" not in tensors


def _edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            del config[key]
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def _edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"][0] = float("nan")


def _absolute_ids(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(tensors["d2t"].shape[0])


def _other_t2d(tensors: dict[str, torch.Tensor]) -> None:
    tensors["t2d"] = ~tensors["t2d"]


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors is missing"),
    "garbage weights": (lambda d: (d / "model.safetensors").write_bytes(b"x" * 100), "header"),
    "wrong architecture": (lambda d: _edit_config(d, architectures=["LlamaForCausalLM"]), "architectures"),
    "no layer ids": (lambda d: _edit_config(d, eagle_aux_hidden_state_layer_ids=None), "is missing"),
    "ids unsorted": (lambda d: _edit_config(d, eagle_aux_hidden_state_layer_ids=[3, 1, 2]), "ascending"),
    "residual variant": (lambda d: _edit_config(d, norm_before_residual=True), "norm_before_residual"),
    "two layers": (lambda d: _edit_config(d, num_hidden_layers=2), "one-layer"),
    "text for a number": (lambda d: _edit_config(d, hidden_size="64"), "must be of type int"),
    "shape": (lambda d: _edit_config(d, intermediate_size=99), "config.json implies"),
    "missing tensor": (lambda d: _edit_tensors(d, lambda t: t.pop("fc.weight")), "fc.weight is missing"),
    "unknown tensor": (lambda d: _edit_tensors(d, lambda t: t.update(x=torch.ones(1))), "does not know: x"),
    "nan": (lambda d: _edit_tensors(d, _nan), "NaN"),
    "no d2t": (lambda d: _edit_tensors(d, lambda t: t.pop("d2t")), "d2t is missing"),
    "d2t not offsets": (lambda d: _edit_tensors(d, _absolute_ids), "offsets"),
    "t2d differs": (lambda d: _edit_tensors(d, _other_t2d), "different draft vocabularies"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_directory_is_named(case: str, tmp_path: Path, tiny_target: Path) -> None:
    write_head(tmp_path, _head_for(tiny_target), dtype=torch.float32)
    assert check_head(tmp_path, target_dir=tiny_target) == []
    breakage, message = BROKEN[case]
    breakage(tmp_path)
    problems = check_head(tmp_path, target_dir=tiny_target)
    assert message in "; ".join(problems)
    with pytest.raises(ValueError, match="usable EAGLE-3 head"):
        read_head(tmp_path)
    with pytest.raises(ValueError, match="misread"):
        export_head(tmp_path / "out", head_dir=tmp_path, target_dir=tiny_target, dtype=torch.float32)
    assert not (tmp_path / "out").exists()


def test_a_head_of_another_size_does_not_fit_the_target(tmp_path: Path, tiny_target: Path) -> None:
    write_head(tmp_path, tiny.random_head(tiny.head_config()), dtype=torch.float32)
    problems = "; ".join(check_head(tmp_path, target_dir=tiny_target))
    assert "hidden size is 32, the target's 64" in problems
    assert "vocabulary has 100 tokens, the target's 320" in problems


def test_a_head_initialised_from_the_target_is_its_last_layer_run_early(tiny_target: Path) -> None:
    """Without random parts, and reading the feature alone, the head's step equals the target's last layer."""
    pieces = load_target_pieces(tiny_target)
    config = load_target_config(tiny_target)
    layers = (1, 2, config.num_hidden_layers - 1)
    head = new_head(
        head_config_for_target(config, draft_vocab_size=320, capture_layers=layers),
        draft_to_target_D=torch.arange(320),
        pieces=pieces,
        target_dir=tiny_target,
        num_target_layers=config.num_hidden_layers,
        from_target=True,
        seed=0,
    )
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, -64:] = torch.eye(64)
        for projection in (
            head.midlayer.self_attn.q_proj,
            head.midlayer.self_attn.k_proj,
            head.midlayer.self_attn.v_proj,
        ):
            assert torch.equal(projection.weight[:, :64], projection.weight[:, 64:])
            projection.weight[:, :64] = 0.0
            projection.weight[:, 64:] *= 2.0
    capture = HiddenStateCapture(load_target_model(tiny_target, dtype=torch.float32), capture_layers=layers)
    captured_BTX, last_BTH = capture(torch.arange(3, 20)[None])
    from eyas.train.batches import TrainingDocument
    from eyas.train.objective import trained_hidden_states

    document = TrainingDocument(
        next_ids_T=torch.arange(4, 21), captured_TX=captured_BTX[0], last_TH=last_BTH[0], slots=[torch.arange(17)]
    )
    with torch.inference_mode():
        (output_TH,) = trained_hidden_states(head, document, embedding_VH=pieces.embedding_VH, num_steps=1)
        normed_TH = head.norm(output_TH)
    torch.testing.assert_close(normed_TH, last_BTH[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.lm_head.weight, pieces.readout_VH)


def test_chains_jump_by_what_is_accepted() -> None:
    truth = torch.tensor([9, 9, 5, 6, 7, 8, 1, 2])
    slots = torch.arange(1, 6)  # prompt of two tokens: slot 1 proposes token 3
    drafts = torch.tensor([[6, 7, 0], [7, 8, 1], [0, 0, 0], [0, 0, 0], [2, 4, 4]])
    # slot 1: 6 7 right, then a miss -> 2, next slot 4: miss -> 0, slot 5: 2 right -> 1
    assert simulate_chains(drafts, truth_T=truth, slots_S=slots) == [2, 0, 1]
    statistics = chain_statistics([2, 0, 1], num_tokens=3)
    assert statistics.hits == (2, 1, 0)
    assert statistics.tau == pytest.approx(2.0)
    assert statistics.marginal == pytest.approx((2 / 3, 1 / 3, 0))
    assert chain_statistics([], num_tokens=3).tau == 1.0
    assert leading_hits([1, 2, 3], [1, 2]) == 2


def test_the_predictor_counts_what_a_chain_by_hand_counts(tmp_path: Path, tiny_target: Path) -> None:
    write_head(tmp_path, _head_for(tiny_target), dtype=torch.float32)
    predict = acceptance_predictor(
        tmp_path, target_dir=tiny_target, draft_length=3, dtype="float32", trust_remote_code=False
    )
    model = load_target_model(tiny_target, dtype=torch.float32)
    prompt = torch.arange(10, 20)[None]
    with torch.inference_mode():
        answer = model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=-1)[0].tolist()
    accepted = predict(answer, 10)
    # Every step but the last yields accepted + 1 of the 19 tokens that follow the first answer token.
    assert sum(accepted) + len(accepted) >= 19 > sum(accepted[:-1]) + len(accepted) - 1
    assert predict(answer[:11], 10) == []
