# SPDX-License-Identifier: Apache-2.0
"""The backend's forward modes, each against the oracle, without a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from kdtree_spec import oracle
from sglang_kdtree.attention import backend as backend_module
from sglang_kdtree.attention import support, tree_mask
from sglang_kdtree.attention.backend import KDTreeMLABackend
from sglang_kdtree.attention.support import UnsupportedError, check_supported
from sglang_kdtree.speculative.algorithm import DDTreeAlgorithm
from sglang_kdtree.speculative.verify_input import DDTreeVerifyInput

HEADS = 4
SCALE = 192**-0.5
WIDTH = 6  # draft tokens of the speculative tests


class Pool:
    """A KV pool of one layer."""

    def __init__(self, slots: int) -> None:
        self.buffer = torch.full((slots, 1, 576), float("nan"))

    def set_kv_buffer(self, layer: Any, location: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.buffer[location.loc] = k

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.buffer


def make_runner(**changes: Any) -> SimpleNamespace:
    hf_config = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], index_topk=None)
    config = SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=HEADS, hf_config=hf_config)
    rng = np.random.default_rng(0)
    table = torch.from_numpy(rng.permutation(8 * 600).reshape(8, 600).astype(np.int32))
    runner = {
        "model_config": config,
        "use_mla_backend": True,
        "device": "cpu",
        "dtype": torch.float32,
        "kv_cache_dtype": torch.float32,
        "is_draft_worker": False,
        "spec_algorithm": None,
        "token_to_kv_pool": Pool(8 * 600),
        "req_to_token_pool": SimpleNamespace(req_to_token=table, size=8),
        "kv_index_translator": SimpleNamespace(is_translating=False),
    }
    return SimpleNamespace(**(runner | changes))


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    parallel = SimpleNamespace(tp_rank=0, tp_size=1, attn_tp_size=1, dcp_enabled=False)
    monkeypatch.setattr(backend_module, "get_parallel", lambda: parallel)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    monkeypatch.setattr(backend_module, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=WIDTH))
    return parallel


@dataclass
class Step:
    """One forward step: `news[b]` tokens behind `prefixes[b]` cached ones, for requests in table rows `rows`."""

    mode: ForwardMode
    prefixes: list[int]
    news: list[int]
    spec_info: Any = None
    rows: list[int] = field(default_factory=lambda: [5, 0, 3, 7])

    def batch(self, runner: SimpleNamespace) -> SimpleNamespace:
        rows = torch.tensor(self.rows[: len(self.prefixes)])
        table = runner.req_to_token_pool.req_to_token
        written = [table[r, p : p + n] for r, p, n in zip(rows, self.prefixes, self.news, strict=True)]
        # Upstream counts a verified tree's tokens in out_cache_loc only.
        counted = [0] * len(self.news) if self.mode.is_target_verify() else self.news
        seq_lens = torch.tensor(self.prefixes) + torch.tensor(counted)
        return SimpleNamespace(
            forward_mode=self.mode,
            batch_size=len(rows),
            req_pool_indices=rows,
            seq_lens=seq_lens,
            extend_seq_lens_cpu=self.news,
            extend_prefix_lens_cpu=self.prefixes,
            out_cache_loc=torch.cat(written).long(),
            spec_info=self.spec_info,
        )


LAYER = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, qk_head_dim=576, v_head_dim=512, scaling=SCALE)


def run_absorbed(step: Step, mask: np.ndarray | None = None) -> None:
    """Run the step through the backend, compare with the oracle on what the pool then holds. mask: per request
    [news, news], for steps in which all requests have as many new tokens."""
    torch.manual_seed(0)
    runner = make_runner()
    table, pool = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool
    for row, prefix in zip(step.rows, step.prefixes, strict=False):
        pool.buffer[table[row, :prefix].long()] = torch.randn(prefix, 1, 576)
    tokens = sum(step.news)
    q, k = torch.randn(tokens, HEADS * 576), torch.randn(tokens, 1, 576)
    batch = step.batch(runner)
    backend = KDTreeMLABackend(runner)
    backend.init_forward_metadata(batch)
    out = backend.forward(q, k, k[..., :512], LAYER, batch)
    assert out.shape == (tokens, HEADS * 512)
    first = 0
    for b, (prefix, new) in enumerate(zip(step.prefixes, step.news, strict=True)):
        rows = slice(first, first + new)
        assert torch.equal(pool.buffer[table[step.rows[b], prefix : prefix + new].long()], k[rows])
        want, _ = oracle.mla_verify(
            q[rows].view(new, HEADS, 576).double().numpy(),
            pool.buffer.double().numpy(),
            table.numpy(),
            np.array([step.rows[b]]),
            1,
            np.array([prefix]),
            None if mask is None else mask[b],
            SCALE,
        )
        np.testing.assert_allclose(out[rows].view(new, HEADS, 512).double().numpy(), want, rtol=1e-4, atol=1e-5)
        first += new


def trees(batch: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.stack(
        [oracle.ancestor_mask([-1] + [int(rng.integers(0, i)) for i in range(1, WIDTH)]) for _ in range(batch)]
    )


def verify_info(mask: torch.Tensor | None, topk: int = -1, requests: int = 3) -> SimpleNamespace:
    tokens = torch.zeros(requests * WIDTH, dtype=torch.int64)
    return SimpleNamespace(draft_token_num=WIDTH, custom_mask=mask, tree_topk=topk, draft_token=tokens)


def full_mask(masks: np.ndarray, prefixes: list[int]) -> torch.Tensor:
    """Upstream's FULL_MASK: each row begins with the request's whole prefix."""
    rows = [np.concatenate([np.ones((WIDTH, p), np.bool_), m], 1).ravel() for p, m in zip(prefixes, masks, strict=True)]
    return torch.from_numpy(np.concatenate(rows))


def test_decode() -> None:
    run_absorbed(Step(ForwardMode.DECODE, [0, 1, 130, 40], [1, 1, 1, 1]))


def test_chunk_behind_a_cached_prefix() -> None:
    run_absorbed(Step(ForwardMode.EXTEND, [64, 3], [20, 7]))


def test_chunk_longer_than_one_call_of_the_op() -> None:
    run_absorbed(Step(ForwardMode.EXTEND, [10, 0, 5], [300, 513, 256]))


def test_mixed_chunk_and_decode() -> None:
    run_absorbed(Step(ForwardMode.MIXED, [0, 77, 12], [33, 1, 1]))


def test_draft_extend() -> None:
    run_absorbed(Step(ForwardMode.DRAFT_EXTEND_V2, [31, 9, 100], [WIDTH] * 3))


def test_verify_chain_without_mask() -> None:
    run_absorbed(Step(ForwardMode.TARGET_VERIFY, [31, 0, 100], [WIDTH] * 3, verify_info(None)))


def test_verify_chain_with_topk_1_ignores_the_mask_that_says_the_same() -> None:
    chains = torch.ones(3, WIDTH, WIDTH, dtype=torch.bool).tril().flatten()
    run_absorbed(Step(ForwardMode.TARGET_VERIFY, [31, 0, 100], [WIDTH] * 3, verify_info(chains, topk=1)))


@pytest.mark.parametrize("layout", ["QLEN_ONLY", "FULL_MASK"])
@pytest.mark.parametrize("prefixes", [[31, 0, 100], [0, 0, 0]])
def test_verify_trees_in_both_mask_layouts(layout: str, prefixes: list[int]) -> None:
    masks = trees(3)
    flat = torch.from_numpy(masks).flatten() if layout == "QLEN_ONLY" else full_mask(masks, prefixes)
    run_absorbed(Step(ForwardMode.TARGET_VERIFY, prefixes, [WIDTH] * 3, verify_info(flat)), masks)


def test_verify_trees_from_the_offered_buffer() -> None:
    """A draft stage hands the whole buffer on, which is larger than the batch needs: still QLEN_ONLY."""
    masks = trees(2)
    runner = make_runner()
    backend = KDTreeMLABackend(runner)
    backend.verify_mask.buffer[: masks.size] = torch.from_numpy(masks).flatten()
    spec_info = verify_info(backend.verify_mask.buffer, requests=2)
    backend.init_forward_metadata(Step(ForwardMode.TARGET_VERIFY, [31, 4], [WIDTH] * 2, spec_info).batch(runner))
    packed = oracle.pack_tree_mask(masks.reshape(-1, WIDTH))
    np.testing.assert_array_equal(backend.forward_metadata.calls[0].mask.numpy(), packed)


class Graph:
    """The life of a captured graph, on the CPU: what upstream's runner calls, with its static buffers. A replay runs
    the recorded metadata again, on the same tensors."""

    BATCH = 4

    def __init__(
        self, mode: ForwardMode, tokens_a_request: int, captured_spec: SimpleNamespace | None, algorithm: Any = None
    ) -> None:
        self.runner = make_runner(spec_algorithm=algorithm)
        self.mode, self.width = mode, tokens_a_request
        self.backend = KDTreeMLABackend(self.runner)
        self.backend.init_cuda_graph_state(self.BATCH, self.BATCH * tokens_a_request)
        self.seq_lens = torch.full((self.BATCH,), self.backend.get_cuda_graph_seq_len_fill_value())
        self.table_rows = torch.zeros(self.BATCH, dtype=torch.int64)
        self.captured = self.view(captured_spec)
        self.backend.init_forward_metadata_out_graph(self.captured, in_capture=True)
        self.backend.init_forward_metadata_in_graph(self.captured)
        self.mask = self.backend.forward_metadata.calls[0].mask

    def view(self, spec: SimpleNamespace | None) -> SimpleNamespace:
        return SimpleNamespace(
            forward_mode=self.mode,
            req_pool_indices=self.table_rows,
            seq_lens=self.seq_lens,
            input_ids=torch.zeros(self.BATCH * self.width),
            out_cache_loc=torch.zeros(self.BATCH * self.width, dtype=torch.int64),
            spec_info=spec,
        )

    def replay(self, rows: list[int], seq_lens: list[int], spec: SimpleNamespace | None) -> torch.Tensor:
        """Replays for real requests; the rest of the batch is padding. Returns out [BATCH, width, heads, 512]."""
        self.seq_lens.fill_(self.backend.get_cuda_graph_seq_len_fill_value())
        self.table_rows.zero_()
        self.seq_lens[: len(rows)] = torch.tensor(seq_lens)
        self.table_rows[: len(rows)] = torch.tensor(rows)
        self.backend.init_forward_metadata_out_graph(self.view(spec))
        self.backend.init_forward_metadata_in_graph(self.captured)
        assert len(self.backend.forward_metadata.calls) == 1
        mask = self.backend.forward_metadata.calls[0].mask
        assert (mask is None) == (self.mask is None)
        assert mask is None or mask.data_ptr() == self.mask.data_ptr()
        torch.manual_seed(1)
        self.runner.token_to_kv_pool.buffer = torch.randn(8 * 600, 1, 576)
        self.q = torch.randn(self.BATCH * self.width, HEADS * 576)
        out = self.backend.forward(self.q, None, None, LAYER, self.captured, save_kv_cache=False)
        return out.view(self.BATCH, self.width, HEADS, 512)

    def check(self, out: torch.Tensor, rows: list[int], prefixes: list[int], masks: np.ndarray | None) -> None:
        requests = len(rows)
        want, _ = oracle.mla_verify(
            self.q.view(-1, HEADS, 576)[: requests * self.width].double().numpy(),
            self.runner.token_to_kv_pool.buffer.double().numpy(),
            self.runner.req_to_token_pool.req_to_token.numpy(),
            np.array(rows),
            1,
            np.array(prefixes),
            None if masks is None else masks.reshape(-1, self.width),
            SCALE,
        )
        got = out[:requests].reshape(-1, HEADS, 512).double().numpy()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        assert torch.isfinite(out).all()


def test_graph_of_decode_follows_lengths_and_rows() -> None:
    graph = Graph(ForwardMode.DECODE, 1, None)
    for rows, prefixes in (([5, 2, 7], [100, 0, 33]), ([1], [7]), ([0, 1, 2, 3], [1, 2, 3, 4])):
        graph.check(graph.replay(rows, [p + 1 for p in prefixes], None), rows, prefixes, None)


@pytest.mark.parametrize("layout", ["QLEN_ONLY", "FULL_MASK", "offered buffer"])
def test_graph_of_tree_verify_follows_masks_of_fewer_requests(layout: str) -> None:
    captured = verify_info(torch.ones(Graph.BATCH * (1 + WIDTH) * WIDTH, dtype=torch.bool))
    captured.draft_token = None  # upstream's dummy
    graph = Graph(ForwardMode.TARGET_VERIFY, WIDTH, captured)
    # WIDTH committed tokens and one request: a FULL_MASK as long as two requests' QLEN_ONLY.
    for rows, prefixes in (([5, 2, 7], [100, 0, 33]), ([1], [WIDTH]), ([0, 1, 2, 3], [1, 2, 3, 4])):
        masks = trees(len(rows))
        flat = torch.from_numpy(masks).flatten()
        if layout == "FULL_MASK":
            flat = full_mask(masks, prefixes)
        elif layout == "offered buffer":
            graph.backend.verify_mask.buffer[: len(flat)] = flat
            flat = graph.backend.verify_mask.buffer
        spec = verify_info(flat, requests=len(rows))
        graph.check(graph.replay(rows, prefixes, spec), rows, prefixes, masks)


def test_graph_of_a_chain_has_no_mask_whatever_the_last_tree_was() -> None:
    graph = Graph(ForwardMode.TARGET_VERIFY, WIDTH, verify_info(None))
    graph.backend.verify_mask.buffer.fill_(False)
    for rows, prefixes in (([5, 2, 7], [100, 0, 33]), ([1], [7])):
        graph.check(graph.replay(rows, prefixes, verify_info(None)), rows, prefixes, None)


def dflash_dummy() -> DFlashVerifyInput:
    """What upstream captures a DFlash family's verify graph with, whatever is verified in it later: its mask is a
    buffer, as our backend's class is none of those that are known to need none."""
    mask = torch.ones(Graph.BATCH * (1 + WIDTH) * WIDTH, dtype=torch.bool)
    return DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=WIDTH, custom_mask=mask)


def test_graph_of_a_dflash_chain_has_no_mask() -> None:
    graph = Graph(ForwardMode.TARGET_VERIFY, WIDTH, dflash_dummy(), SpeculativeAlgorithm.DFLASH)
    assert graph.mask is None
    tokens = torch.zeros(3 * WIDTH, dtype=torch.int64)
    chain = DFlashVerifyInput(draft_token=tokens, positions=tokens, draft_token_num=WIDTH, custom_mask=None)
    rows, prefixes = [5, 2, 7], [100, 0, 33]
    graph.check(graph.replay(rows, prefixes, chain), rows, prefixes, None)


def test_graph_of_ddtree_follows_packed_masks() -> None:
    algorithm = DDTreeAlgorithm("DDTREE", lambda _: object)
    graph = Graph(ForwardMode.TARGET_VERIFY, WIDTH, dflash_dummy(), algorithm)
    for rows, prefixes in (([5, 2, 7], [100, 0, 33]), ([1], [WIDTH]), ([0, 1, 2, 3], [1, 2, 3, 4])):
        masks = trees(len(rows))
        packed = torch.from_numpy(oracle.pack_tree_mask(masks.reshape(-1, WIDTH)))
        tokens = torch.zeros(len(rows) * WIDTH, dtype=torch.int64)
        spec = DDTreeVerifyInput(
            draft_token=tokens, positions=tokens, draft_token_num=WIDTH, custom_mask=None, packed_mask=packed
        )
        graph.check(graph.replay(rows, prefixes, spec), rows, prefixes, masks)


def test_graph_of_draft_extend_takes_the_prefix_from_the_extended_lengths() -> None:
    graph = Graph(ForwardMode.DRAFT_EXTEND_V2, WIDTH, None)
    extended = torch.full((Graph.BATCH,), WIDTH)
    graph.captured.spec_info = SimpleNamespace(extend_seq_lens_tensor=extended)
    rows, prefixes = [5, 2, 7], [100, 0, 33]
    graph.check(graph.replay(rows, [p + WIDTH for p in prefixes], None), rows, prefixes, None)


def test_no_graph_of_a_prefill() -> None:
    with pytest.raises(NotImplementedError, match="no CUDA graph of the forward mode EXTEND"):
        Graph(ForwardMode.EXTEND, WIDTH, None)


def test_idle_step_gives_an_empty_output() -> None:
    runner = make_runner()
    backend = KDTreeMLABackend(runner)
    batch = SimpleNamespace(forward_mode=ForwardMode.IDLE)
    backend.init_forward_metadata(batch)
    assert backend.forward(torch.empty(0, HEADS * 576), None, None, LAYER, batch).shape == (0, HEADS * 512)


def test_first_chunk_is_causal_multi_head_attention() -> None:
    torch.manual_seed(0)
    runner = make_runner()
    batch = Step(ForwardMode.EXTEND, [0, 0, 0], [5, 1, 80]).batch(runner)
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, qk_head_dim=192, v_head_dim=128, scaling=SCALE)
    q, k, v = torch.randn(86, HEADS * 192), torch.randn(86, HEADS, 192), torch.randn(86, HEADS, 128)
    backend = KDTreeMLABackend(runner)
    backend.init_forward_metadata(batch)
    out = backend.forward(q, k, v, layer, batch, save_kv_cache=False).view(86, HEADS, 128)
    first = 0
    for new in (5, 1, 80):
        rows = slice(first, first + new)
        scores = torch.einsum("ihd,jhd->hij", q.view(86, HEADS, 192)[rows].double(), k[rows].double()) * SCALE
        scores.masked_fill_(~torch.ones(new, new, dtype=torch.bool).tril(), -torch.inf)
        want = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[rows].double())
        torch.testing.assert_close(out[rows].double(), want, rtol=1e-4, atol=1e-5)
        first += new


def test_offers_a_qlen_only_mask_to_the_draft_stage() -> None:
    mask = KDTreeMLABackend(make_runner()).verify_mask
    assert mask.mode == TreeMaskMode.QLEN_ONLY and mask.buffer.numel() == 8 * WIDTH * WIDTH and mask.fits(8)
    assert KDTreeMLABackend(make_runner(is_draft_worker=True)).verify_mask is None


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 200])
def test_packed_words_equal_the_oracles(width: int) -> None:
    mask = np.random.default_rng(width).random((7, width)) < 0.5
    np.testing.assert_array_equal(tree_mask.pack(torch.from_numpy(mask)).numpy(), oracle.pack_tree_mask(mask))


def test_mask_too_short_for_the_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="too short for 3 requests of 6 draft tokens: expected 108"):
        tree_mask.qlen_only(torch.ones(100, dtype=torch.bool), torch.tensor([1, 2, 3]), 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "on cpu serves a KV cache in bfloat16, float16, float32, not float8"),
        ({"device": "cuda", "dtype": torch.bfloat16}, "on cuda serves a KV cache in bfloat16, float16, not float32"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "Remove --enable-unified-memory"),
    ],
)
def test_unsupported_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_supported(make_runner(**changes))


def test_an_installation_without_a_kernel_for_the_device_is_refused() -> None:
    runner = make_runner(device="cuda", dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"no kdtree_mla kernel for the device cuda.*change --device"):
        check_supported(runner)


def test_sparse_attention_and_context_parallelism_are_refused(one_rank: SimpleNamespace) -> None:
    runner = make_runner()
    runner.model_config.hf_config.index_topk = 2048
    with pytest.raises(UnsupportedError, match="sparse attention"):
        check_supported(runner)
    one_rank.dcp_enabled = True
    with pytest.raises(UnsupportedError, match="Remove --dcp-size"):
        check_supported(make_runner())


def test_more_heads_a_rank_than_the_op_takes_are_refused() -> None:
    runner = make_runner()
    runner.model_config.num_attention_heads = 256
    with pytest.raises(UnsupportedError, match=f"at most {support.MAX_HEADS}"):
        check_supported(runner)
