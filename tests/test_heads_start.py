"""How a head starts from its target, and how it drafts for one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.heads.config import head_config_for_target, load_target_config
from eyas.heads.drafting import chain_statistics, leading_hits, simulate_chains
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.formats.write import write_head
from eyas.heads.head import DraftHead
from eyas.heads.initialise import HeadStart, new_head, require_start
from eyas.heads.prediction import acceptance_predictor
from eyas.heads.target import HiddenStateCapture, load_target_model, load_target_pieces
from tests import tiny


def _head_for(target: Path, *, seed: int = 0) -> DraftHead:
    config = head_config_for_target(
        load_target_config(target), draft_vocab_size=128, capture_layers=tiny.CAPTURE_LAYERS
    )
    return tiny.random_head(config, seed=seed)


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
        start=HeadStart(final_norm="target"),
        seed=0,
    )
    assert isinstance(head, Eagle3Head)
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, -64:] = torch.eye(64)
        for projection in (
            head.layers[0].self_attn.q_proj,
            head.layers[0].self_attn.k_proj,
            head.layers[0].self_attn.v_proj,
        ):
            assert torch.equal(projection.weight[:, :64], projection.weight[:, 64:])
            projection.weight[:, :64] = 0.0
            projection.weight[:, 64:] *= 2.0
    capture = HiddenStateCapture(load_target_model(tiny_target, dtype=torch.float32), capture_layers=layers)
    captured_BTX, last_BTH = capture(torch.arange(3, 20)[None])
    from eyas.heads.chain import Chains

    with torch.inference_mode():
        output_TH = Chains(
            head,
            states_TX=captured_BTX[0],
            embedding_TH=head.embed(torch.arange(4, 21), embedding_VH=pieces.embedding_VH),
            slots_S=torch.arange(17),
            lengths=[17],
        ).outputs_SH
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


def test_an_eagle_head_starts_by_passing_the_feature_through(tiny_target: Path) -> None:
    target = load_target_config(tiny_target)
    config = head_config_for_target(target, kind="eagle", draft_vocab_size=target.vocab_size, capture_layers=())
    head = new_head(
        config,
        draft_to_target_D=torch.arange(target.vocab_size),
        pieces=load_target_pieces(tiny_target),
        target_dir=tiny_target,
        num_target_layers=target.num_hidden_layers,
        start=HeadStart(),
        seed=0,
    )
    off_identity = head.fc.weight[:, target.hidden_size :] - torch.eye(target.hidden_size)
    assert float(off_identity.abs().max().detach()) < 0.1
    with pytest.raises(ValueError, match=r"init\.layer=target is for EAGLE-3"):
        require_start(config, target_dir=tiny_target, num_target_layers=6, start=HeadStart(layer="target"))
