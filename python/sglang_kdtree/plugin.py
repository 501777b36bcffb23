# SPDX-License-Identifier: Apache-2.0
"""How a process comes to have the backend.

SGLang calls `register` (entry point `kdtree`, group `sglang.srt.plugins`) before it parses arguments and again at the
start of every worker process. It logs an exception raised here and goes on; the name `kdtree_mla` is then no valid
choice, so start-up ends with an error instead of another backend.
"""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING

from sglang_kdtree import vendored

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

BACKEND = "kdtree_mla"
ALGORITHM = "DDTREE"
CUDA_LIBRARY = "kdtree_cuda.so"


class KernelLibraryError(RuntimeError):
    """The sgl_kernel library of this process is not the one that this fork builds."""


def load_kernels() -> None:
    """Load sgl_kernel and see that the process has the op; raises KernelLibraryError that names the file.

    On a machine without a GPU upstream's loader takes this fork's CPU library. With one it takes upstream's CUDA
    library for the GPU, and this fork's own is loaded beside it.
    """
    import torch

    package = vendored.package_path("sgl_kernel")
    if package is None:
        raise KernelLibraryError("the package sgl_kernel is not installed. Run `make vendor kernels`.")
    libraries = sorted(str(p) for p in package.glob("common_ops.*"))
    try:
        import sgl_kernel  # noqa: F401  (registers torch.ops.sgl_kernel)
    except ImportError as error:
        reason = str(error).strip()
        raise KernelLibraryError(
            f"the kernel library {', '.join(libraries) or package / 'common_ops.*'} does not load: {reason}\n"
            "Run `make kernels` with the torch that is installed here."
        ) from error
    if hasattr(torch.ops.sgl_kernel, "kdtree_mla_verify"):
        return
    library = package / CUDA_LIBRARY
    if not torch.cuda.is_available() or not library.exists():
        raise KernelLibraryError(
            f"the kernel library of {package} has no op kdtree_mla_verify: it is upstream's, not this fork's. "
            "Run `make kernels`, or install this fork's sglang-kernel wheel."
        )
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise KernelLibraryError(
            f"the kernel library {library} does not load: {error}\n"
            "Run `make kernels` with the torch that is installed here."
        ) from error


def create_backend(runner: ModelRunner) -> AttentionBackend:
    """The factory that SGLang calls for each model runner."""
    from sglang_kdtree.attention.backend import KDTreeMLABackend

    return KDTreeMLABackend(runner)


def register_algorithm() -> None:
    """Register DDTREE, and the attention of its drafter on the CPU."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    from sglang_kdtree.speculative import cpu_attention
    from sglang_kdtree.speculative.algorithm import DDTreeAlgorithm

    register_attention_backend(cpu_attention.NAME)(cpu_attention.create_backend)
    if get_spec(ALGORITHM) is not None:  # a process loads its plugins more than once
        return

    @SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=DDTreeAlgorithm)
    def create_worker(server_args: ServerArgs) -> type:
        from sglang_kdtree.speculative.worker import DDTreeWorker

        return DDTreeWorker


def register() -> None:
    """Entry point `kdtree`: register the attention backend and the speculative algorithm with SGLang."""
    try:
        vendored.check()
        load_kernels()
    except (vendored.VendoredTreeError, KernelLibraryError) as error:
        # Once more at the end, below argparse's pages of usage.
        atexit.register(print, f"kdtree_mla is not available: {error}", file=sys.stderr)
        raise
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(create_backend)
    register_algorithm()
