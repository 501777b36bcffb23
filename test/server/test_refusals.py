# SPDX-License-Identifier: Apache-2.0
"""What is not served is refused at start-up: the server ends with a non-zero status and a message that says what to
change."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from server import ROOT, TINY_DRAFTER, TINY_MODEL, Server
from sglang_kdtree import vendored


def refusal(server: Server) -> str:
    """Start a server that must not start; its log."""
    server.start()
    try:
        assert server.wait_exit(timeout=120) != 0
    finally:
        server.stop()
    return re.sub(r"\s+", " ", server.log_text())


def model_with(folder: Path, **changes: Any) -> Path:
    """The tiny model's folder with another config and no weights."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_MODEL / name, folder)
    config = json.loads((TINY_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


DUMMY = ("--load-format", "dummy", "--max-total-tokens", "4096")


def test_model_without_mla(tmp_path: Path) -> None:
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 64, "rope_scaling": None}
    model = model_with(tmp_path / "llama", **llama)
    log = refusal(Server(tmp_path / "log", *DUMMY, model=model))
    assert "kdtree_mla serves models with MLA attention" in log
    assert "LlamaForCausalLM has none. Use another --attention-backend" in log


def test_other_head_dimensions(tmp_path: Path) -> None:
    model = model_with(tmp_path / "narrow", kv_lora_rank=256)
    log = refusal(Server(tmp_path / "log", *DUMMY, model=model))
    assert "kdtree_mla serves kv_lora_rank 512 with qk_rope_head_dim 64; DeepseekV3ForCausalLM has 256 and 64" in log
    assert "Use another --attention-backend" in log


def test_kv_cache_of_another_type_than_the_model(tmp_path: Path) -> None:
    log = refusal(Server(tmp_path / "log", *DUMMY, "--kv-cache-dtype", "bfloat16"))
    assert "kdtree_mla needs the KV cache in the model's type torch.float32, not torch.bfloat16" in log
    assert "Use --kv-cache-dtype auto" in log


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("fp8_e5m2", "--kv-cache-dtype fp8_e5m2 is not supported on CPU"),
        ("fp8_e4m3", "CPU FP8 KV cache is only supported for MHA"),  # upstream's word, before ours is asked
    ],
)
def test_fp8_kv_cache(tmp_path: Path, dtype: str, message: str) -> None:
    assert message in refusal(Server(tmp_path / "log", *DUMMY, "--kv-cache-dtype", dtype))


def test_ranks_that_do_not_divide_the_heads(tmp_path: Path) -> None:
    log = refusal(Server(tmp_path / "log", *DUMMY, tp=3))
    assert "4 attention heads over 3 TP ranks" in log and "Change --tp-size to a divisor of 4" in log


def test_extension_not_loaded_in_the_process(tmp_path: Path) -> None:
    log = refusal(Server(tmp_path / "log", env={"SGLANG_PLUGINS": "some_other"}))
    assert "argument --attention-backend: invalid choice: 'kdtree_mla'" in log


def hard_linked(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, copy_function=lambda a, b: Path(b).hardlink_to(a))
    return target


def rewrite(path: Path, text: str) -> None:
    path.unlink()  # a hard link: the original must not change
    path.write_text(text)


def test_incomplete_vendored_tree(tmp_path: Path) -> None:
    package = hard_linked(ROOT / "python" / "sglang", tmp_path / "sglang")
    lost = package / "srt" / "models" / "phi.py"
    lost.unlink()
    log = refusal(Server(tmp_path / "log", env={"PYTHONPATH": str(tmp_path)}))
    assert f"the vendored tree is incomplete or edited: {lost}. Run `make clean-vendor vendor`" in log
    assert "invalid choice: 'kdtree_mla'" in log
    assert log.index("kdtree_mla is not available: the vendored tree") > log.index("invalid choice")


def test_stale_vendored_tree(tmp_path: Path) -> None:
    package = hard_linked(ROOT / "python" / "sglang", tmp_path / "sglang")
    stamp = json.loads((package / vendored.STAMP).read_text())
    older = {"version": "0.5.22", "wheel": "sglang-0.5.22.whl", "sha256": "0" * 64}
    rewrite(package / vendored.STAMP, json.dumps(stamp | older))
    log = refusal(Server(tmp_path / "log", env={"PYTHONPATH": str(tmp_path)}))
    assert f"{package} is stale: it holds sglang 0.5.22" in log and "wants 0.5.23. Run `make vendor`" in log


def test_missing_vendored_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendored, "package_path", lambda package: None)
    with pytest.raises(vendored.VendoredTreeError, match=r"the vendored tree of sglang is missing\. Run `make vendor`"):
        vendored.check()


def test_another_sglang_than_the_vendored_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vendored, "package_path", lambda package: tmp_path)
    with pytest.raises(vendored.VendoredTreeError, match="was not laid out by `make vendor`"):
        vendored.check()


def test_kernel_library_that_does_not_load(tmp_path: Path) -> None:
    package = hard_linked(ROOT / "sgl-kernel" / "python" / "sgl_kernel", tmp_path / "sgl_kernel")
    library = package / "common_ops.abi3.so"
    rewrite(library, "not a library")
    log = refusal(Server(tmp_path / "log", env={"PYTHONPATH": str(tmp_path)}))
    assert f"the kernel library {library} does not load" in log
    assert "invalid ELF header" in log or "file too short" in log
    assert "Run `make kernels`" in log


def test_kernel_library_without_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from sglang_kdtree import plugin

    monkeypatch.setattr(torch.ops, "sgl_kernel", object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(plugin.KernelLibraryError, match="has no op kdtree_mla_verify: it is upstream's"):
        plugin.load_kernels()


def ddtree(drafter: Path, *flags: str) -> tuple[str, ...]:
    return (*DUMMY, "--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(drafter), *flags)


def test_trees_without_the_backend(tmp_path: Path) -> None:
    log = refusal(Server(tmp_path / "log", *ddtree(TINY_DRAFTER), backend=("--attention-backend", "triton")))
    assert "DDTREE verifies trees with kdtree_mla alone. Use --attention-backend kdtree_mla." in log


def test_a_tree_of_one_node(tmp_path: Path) -> None:
    log = refusal(Server(tmp_path / "log", *ddtree(TINY_DRAFTER, "--speculative-num-draft-tokens", "1")))
    assert "DDTREE verifies 2 to 256 tokens a request" in log and "Change --speculative-num-draft-tokens" in log


def test_drafter_of_another_vocabulary(tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(TINY_DRAFTER, drafter)
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"vocab_size": 4096}))
    log = refusal(Server(tmp_path / "log", *ddtree(drafter)))
    assert "the drafter's vocabulary has 4096 tokens and the target's 2048" in log
    assert "Set --speculative-draft-model-path to a drafter of this target" in log
