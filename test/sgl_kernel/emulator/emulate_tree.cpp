// SPDX-License-Identifier: Apache-2.0
// Runs the tree kernels' source on the CPU; called from test_tree_emulated.py through ctypes.
#include <exception>
#include <string>

#include "tree_kernels.cuh"

namespace {

thread_local std::string last_error;

template <class Kernel>
const char* run(int blocks, int shared_bytes, uint64_t seed, const Kernel& kernel) {
  try {
    kdtree::emulator::Block block(kdtree::kTreeThreads, shared_bytes, seed);
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
  return run(params->batch, bytes, seed, [&] { kdtree::build_tree_kernel(*params); });
}

const char* run_accept(const kdtree::AcceptParams* params, uint64_t seed) {
  const int blocks = (params->batch + kdtree::kTreeThreads - 1) / kdtree::kTreeThreads;
  return run(blocks, 0, seed, [&] { kdtree::accept_kernel(*params); });
}
}
