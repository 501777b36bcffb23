// SPDX-License-Identifier: Apache-2.0
// Runs the CUDA kernels' source on the CPU; called from test_cuda_kernels_emulated.py through ctypes.
#include <exception>
#include <string>

#include "combine_kernel.cuh"
#include "plan.h"
#include "verify_kernel.cuh"

namespace {

using namespace kdtree;

thread_local std::string last_error;

template <class T, class Tile>
void verify(const VerifyParams& params, const Plan& plan, uint64_t seed) {
  emulator::Block block(kThreads, Tile::kSharedBytes, seed);
  for (int i = 0; i < plan.blocks; ++i) block.run(i, plan.blocks, [&] { verify_kernel<T, Tile>(params); });
}

template <class T, int kRowWarps>
void combine(const VerifyParams& params, const Plan& plan, uint64_t seed) {
  emulator::Block block(kCombineThreads, combine_shared_bytes(kRowWarps), seed);
  const int rows_a_block = kWarps / kRowWarps;
  const int blocks = (params.batch * params.rows + rows_a_block - 1) / rows_a_block;
  for (int i = 0; i < blocks; ++i) {
    block.run(i, blocks, [&] { combine_kernel<T, kRowWarps>(params, plan.rows_a_block); });
  }
}

template <class T>
void both(const VerifyParams& params, const Plan& plan, uint64_t seed) {
  if (plan.small_tile) {
    verify<T, SmallTile>(params, plan, seed);
  } else {
    verify<T, LargeTile>(params, plan, seed);
  }
  if (plan.row_warps(params.batch) == 1) {
    combine<T, 1>(params, plan, seed);
  } else {
    combine<T, Plan::kManyRowWarps>(params, plan, seed);
  }
}

}  // namespace

extern "C" {

int64_t workspace_bytes(int64_t heads, int64_t width, int resident) {
  return make_plan(heads, width, {resident, resident}).workspace_bytes();
}

// As VerifyParams, with what follows from the plan filled in. Null, or what went wrong.
const char* run_verify(VerifyParams* params, int fp16_type, int resident, float* workspace, uint64_t seed) {
  try {
    const Plan plan = make_plan(params->heads, params->width, {resident, resident});
    params->rows = params->heads * params->width;
    params->row_blocks = plan.row_blocks;
    params->groups = plan.groups;
    params->partial_out = workspace;
    params->partial_sum = workspace + plan.partial_rows() * kLatent;
    params->partial_peak = params->partial_sum + plan.partial_rows();
    if (fp16_type != 0) {
      both<fp16>(*params, plan, seed);
    } else {
      both<bf16>(*params, plan, seed);
    }
    return nullptr;
  } catch (const std::exception& error) {
    last_error = error.what();
    return last_error.c_str();
  }
}
}
