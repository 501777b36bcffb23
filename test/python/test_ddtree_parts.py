# SPDX-License-Identifier: Apache-2.0
"""The parts of DDTREE that need no server: settings, refusals, what is drawn after a node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_kdtree.speculative import algorithm, sampling
from sglang_kdtree.speculative.options import TreeOptions
from sglang_kdtree.speculative.requests import refuse_unserved


def settings(**changes: Any) -> SimpleNamespace:
    served = {
        "attention_backend": "kdtree_mla",
        "decode_attention_backend": None,
        "prefill_attention_backend": None,
        "speculative_draft_model_path": "drafter",
        "speculative_num_draft_tokens": 16,
        "speculative_draft_attention_backend": None,
        "speculative_dflash_block_size": 16,
        "enable_dp_attention": False,
        "disaggregation_mode": "null",
        "pp_size": 1,
        "enable_two_batch_overlap": False,
        "speculative_use_rejection_sampling": False,
        "speculative_draft_window_size": None,
        "speculative_adaptive": False,
        "enable_lora": None,
        "device": "cpu",
        "max_running_requests": None,
    }
    return SimpleNamespace(**(served | changes))


def ddtree() -> algorithm.DDTreeAlgorithm:
    return algorithm.DDTreeAlgorithm("DDTREE", lambda _: object)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_backend": "triton"}, "Use --attention-backend kdtree_mla"),
        ({"attention_backend": None}, "Use --attention-backend kdtree_mla"),
        ({"decode_attention_backend": "triton"}, "Use --attention-backend kdtree_mla"),
        ({"prefill_attention_backend": "triton"}, "Use --attention-backend kdtree_mla"),
        ({"speculative_draft_model_path": None}, "Set --speculative-draft-model-path"),
        ({"speculative_num_draft_tokens": 1}, "not 1. Change --speculative-num-draft-tokens"),
        ({"speculative_num_draft_tokens": 257}, "not 257. Change --speculative-num-draft-tokens"),
        ({"speculative_dflash_block_size": 1}, "not 1. Change --speculative-dflash-block-size"),
        (
            {"speculative_draft_attention_backend": "kdtree_mla"},
            "Change --speculative-draft-attention-backend to one of",
        ),
        ({"enable_dp_attention": True}, "--enable-dp-attention. Remove it"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode. Remove it"),
        ({"pp_size": 2}, "--pp-size. Remove it"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap. Remove it"),
        ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling. Remove it"),
        ({"speculative_draft_window_size": 512}, "--speculative-draft-window-size. Remove it"),
        ({"speculative_adaptive": True}, "--speculative-adaptive. Remove it"),
        ({"enable_lora": True}, "--enable-lora. Remove it"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        ddtree().handle_server_args(settings(**changes))
    assert message in str(refused.value)


def test_settings_that_are_filled_in() -> None:
    args = settings(speculative_num_draft_tokens=None, device="cuda")
    ddtree().handle_server_args(args)
    assert args.speculative_num_draft_tokens == 16
    assert args.speculative_draft_attention_backend == "triton"
    assert (args.speculative_num_steps, args.speculative_eagle_topk, args.max_running_requests) == (1, 1, 48)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("KDTREE_BRANCHING", "-1", "KDTREE_BRANCHING must be a whole number, 0 for no limit, is '-1'"),
        ("KDTREE_BRANCHING", "wide", "KDTREE_BRANCHING must be a whole number"),
        ("KDTREE_SPINE", "yes", "KDTREE_SPINE must be 0 or 1, is 'yes'"),
        ("KDTREE_MIN_PROB", "1", "KDTREE_MIN_PROB must be a probability below 1, is '1'"),
        ("KDTREE_MIN_PROB", "nan", "KDTREE_MIN_PROB must be"),
    ],
)
def test_bad_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        ddtree().handle_server_args(settings())


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TreeOptions.from_environment() == TreeOptions()
    assert TreeOptions().min_log_prob == -torch.inf
    for name, value in {"BRANCHING": "3", "SPINE": "1", "MIN_PROB": "0.5"}.items():
        monkeypatch.setenv(f"KDTREE_{name}", value)
    options = TreeOptions.from_environment()
    assert options == TreeOptions(branching=3, spine=True, min_prob=0.5)
    assert options.min_log_prob == pytest.approx(-0.6931, abs=1e-4)


def drafter(**changes: Any) -> tuple[SimpleNamespace, SimpleNamespace, SimpleNamespace]:
    """A drafter's runner, its target's and its config, that fit; `changes` to any of their fields by name."""
    values = {"vocab_size": 100, "hidden_size": 8, "is_domino": False, "candidate_selector": None, "added": 0}
    values |= {"weight": torch.zeros(100, 8)} | changes
    head = SimpleNamespace(weight=values["weight"], shard_indices=SimpleNamespace(num_added_elements=values["added"]))
    target = SimpleNamespace(
        model=SimpleNamespace(lm_head=head), model_config=SimpleNamespace(vocab_size=100, hidden_size=8)
    )
    runner = SimpleNamespace(
        model=SimpleNamespace(candidate_selector=values["candidate_selector"], lilicorr=None),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(vocab_size=values["vocab_size"]), hidden_size=values["hidden_size"]
        ),
    )
    return runner, target, SimpleNamespace(is_domino=values["is_domino"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 200}, "the drafter's vocabulary has 200 tokens and the target's 100"),
        ({"hidden_size": 16}, "the drafter's hidden size is 16 and the target's 8"),
        ({"is_domino": True}, "a plain DFlash drafter"),
        ({"candidate_selector": object()}, "a plain DFlash drafter"),
        ({"weight": torch.zeros(100, 8, dtype=torch.int8)}, "this target's is quantized"),
        ({"weight": torch.zeros(100, 8).to(torch.float8_e4m3fn)}, "this target's is quantized"),
        ({"added": 4}, "whose vocabulary was extended"),
    ],
)
def test_drafters_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    algorithm.check_drafter(*drafter())
    with pytest.raises(ValueError) as refused:
        algorithm.check_drafter(*drafter(**changes))
    assert message in str(refused.value)


def test_mask_token() -> None:
    tokenizer = SimpleNamespace(get_vocab=lambda: {"<|MASK|>": 7})
    named = SimpleNamespace(mask_token="<|MASK|>", mask_token_id=None)
    assert algorithm.mask_token_of(named, tokenizer, 100) == 7
    assert algorithm.mask_token_of(SimpleNamespace(mask_token="", mask_token_id=5), None, 100) == 5
    for config, given in ((named, None), (SimpleNamespace(mask_token="x", mask_token_id=100), tokenizer)):
        with pytest.raises(ValueError, match="not in the target's vocabulary of 100 tokens"):
            algorithm.mask_token_of(config, given, 100)


def request(**changes: Any) -> SimpleNamespace:
    params = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    fields = {"return_hidden_states": False, "return_sampling_mask": False, "to_finish": None, "eos_token_ids": {1}}
    fields |= {"origin_input_ids": [3, 4, 5], "tokenizer": None}
    sampling_params = SimpleNamespace(
        stop_token_ids=changes.pop("stop_token_ids", None),
        **(params | {k: changes.pop(k) for k in list(changes) if k in params}),
    )
    return SimpleNamespace(sampling_params=sampling_params, finished=lambda: False, **(fields | changes))


def test_requests_that_a_tree_cannot_serve() -> None:
    bad = [request(frequency_penalty=0.5), request(presence_penalty=-1.0), request(repetition_penalty=1.1)]
    bad += [request(return_hidden_states=True), request(return_sampling_mask=True)]
    good = request(min_new_tokens=5)
    refuse_unserved([*bad, good])
    assert good.to_finish is None
    for req in bad:
        assert req.to_finish.status_code == 400 and "DDTREE does not serve" in req.to_finish.message


def test_min_new_tokens_forbids_stops_by_depth() -> None:
    """Three prompt tokens, two committed outputs: the root is output 3, a node of depth d is output 3 + d."""
    reqs = [request(min_new_tokens=5, stop_token_ids={2}), request()]
    batch = SimpleNamespace(reqs=reqs, seq_lens=torch.tensor([5, 9]))
    depths = torch.tensor([[0, 1, 2, 1], [0, 1, 2, 3]], dtype=torch.int32)
    logits = torch.zeros(2, 4, 6)
    sampling.forbid_early_stops(logits, batch, depths)
    assert logits[0, :, 1].tolist() == logits[0, :, 2].tolist() == [-torch.inf, -torch.inf, 0.0, -torch.inf]
    logits[0, :, 1:3] = 0
    assert not logits.any()
