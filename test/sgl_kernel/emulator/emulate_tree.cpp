// SPDX-License-Identifier: Apache-2.0
// Runs the tree kernels' source on the CPU; called from test_tree_emulated.py through ctypes.
#include <exception>
#include <string>

#include "move_rows_kernel.cuh"
#include "top_k_kernel.cuh"
#include "tree_kernels.cuh"

namespace {

thread_local std::string last_error;

template <class Kernel>
const char* run(int blocks, int threads, int shared_bytes, uint64_t seed, const Kernel& kernel) {
  try {
    kdtree::emulator::Block block(threads, shared_bytes, seed);
    for (int i = 0; i < blocks; ++i) block.run(i, blocks, kernel);
    return nullptr;
  } catch (const std::exception& error) {
    last_error = error.what();
    return last_error.c_str();
  }
}

}  // namespace

extern "C" {

// Null, or what went wrong.
const char* run_build_tree(const kdtree::BuildParams* params, uint64_t seed) {
  const int bytes = kdtree::TreeStorage(params->width, params->words).bytes;
  return run(params->batch, kdtree::kTreeThreads, bytes, seed, [&] { kdtree::build_tree_kernel(*params); });
}

const char* run_accept(const kdtree::AcceptParams* params, uint64_t seed) {
  const int blocks = (params->batch + kdtree::kTreeThreads - 1) / kdtree::kTreeThreads;
  return run(blocks, kdtree::kTreeThreads, 0, seed, [&] { kdtree::accept_kernel(*params); });
}

const char* run_top_k(int type, const kdtree::TopKParams* params, uint64_t seed) {
  return run(params->rows, kdtree::kTopKThreads, kdtree::TopKStorage::bytes, seed, [&] {
    switch (static_cast<kdtree::LogitType>(type)) {
      case kdtree::LogitType::fp32: return kdtree::top_k_kernel<kdtree::fp32>(*params);
      case kdtree::LogitType::bf16: return kdtree::top_k_kernel<kdtree::bf16>(*params);
      case kdtree::LogitType::fp16: return kdtree::top_k_kernel<kdtree::fp16>(*params);
    }
  });
}

const char* run_move_rows(const kdtree::MoveParams* params, uint64_t seed) {
  return run(params->layers * params->batch, kdtree::kMoveThreads, 0, seed, [&] { kdtree::move_rows_kernel(*params); });
}
}
