// SPDX-License-Identifier: Apache-2.0
// Launches the kernels of one data type; verify_bf16.cu and verify_fp16.cu are this file's two uses.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "combine_kernel.cuh"
#include "launch.h"
#include "verify_kernel.cuh"

namespace kdtree {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or the next caller would be told
  throw std::runtime_error(std::string("kdtree_mla_verify: ") + what + ": " + cudaGetErrorString(status));
}

// More shared memory than 48 KB must be asked for, once a kernel and device.
template <class T, class Tile>
void allow_shared_memory() {
  constexpr int kMaxDevices = 64;
  static bool allowed[kMaxDevices] = {};
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (device < kMaxDevices && allowed[device]) return;
  check_cuda(
      cudaFuncSetAttribute(verify_kernel<T, Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes),
      "shared memory of verify_kernel");
  if (device < kMaxDevices) allowed[device] = true;
}

template <class T, class Tile>
int blocks_an_sm() {
  allow_shared_memory<T, Tile>();
  int blocks = 0;
  check_cuda(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, verify_kernel<T, Tile>, kThreads, Tile::kSharedBytes),
      "occupancy of verify_kernel");
  return blocks;
}

template <class T>
KernelFacts facts() {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, verify_kernel<T, LargeTile>), "attributes of verify_kernel");
  return {attributes.binaryVersion, {blocks_an_sm<T, SmallTile>(), blocks_an_sm<T, LargeTile>()}};
}

template <class T, class Tile>
void launch_verify(const VerifyParams& params, const Plan& plan, cudaStream_t stream) {
  allow_shared_memory<T, Tile>();
  verify_kernel<T, Tile><<<plan.blocks, kThreads, Tile::kSharedBytes, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of verify_kernel");
}

template <class T, int kRowWarps>
void launch_combine(const VerifyParams& params, const Plan& plan, cudaStream_t stream) {
  constexpr int kRows = kWarps / kRowWarps;
  const int64_t blocks = (int64_t{params.batch} * params.rows + kRows - 1) / kRows;
  combine_kernel<T, kRowWarps>
      <<<blocks, kCombineThreads, combine_shared_bytes(kRowWarps), stream>>>(params, plan.rows_a_block);
  check_cuda(cudaGetLastError(), "launch of combine_kernel");
}

template <class T>
void launch(const VerifyParams& params, const Plan& plan, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (plan.small_tile) {
    launch_verify<T, SmallTile>(params, plan, stream);
  } else {
    launch_verify<T, LargeTile>(params, plan, stream);
  }
  if (plan.row_warps(params.batch) == 1) {
    launch_combine<T, 1>(params, plan, stream);
  } else {
    launch_combine<T, Plan::kManyRowWarps>(params, plan, stream);
  }
}

}  // namespace kdtree
