// SPDX-License-Identifier: Apache-2.0
// Launches the kernels of draft trees.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "move_rows_kernel.cuh"
#include "top_k_kernel.cuh"
#include "tree_kernels.cuh"

namespace kdtree {
namespace {

void check_launch(const char* op) {
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) throw std::runtime_error(std::string(op) + ": launch: " + cudaGetErrorString(status));
}

}  // namespace

void launch_build_tree(const BuildParams& params, void* stream) {
  const int bytes = TreeStorage(params.width, params.words).bytes;
  build_tree_kernel<<<params.batch, kTreeThreads, bytes, static_cast<cudaStream_t>(stream)>>>(params);
  check_launch("kdtree_build_tree");
}

void launch_accept(const AcceptParams& params, void* stream) {
  const int blocks = (params.batch + kTreeThreads - 1) / kTreeThreads;
  accept_kernel<<<blocks, kTreeThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  check_launch("kdtree_accept");
}

void launch_top_k(LogitType type, const TopKParams& params, void* stream) {
  const auto kernel = type == LogitType::fp32   ? top_k_kernel<fp32>
                      : type == LogitType::bf16 ? top_k_kernel<bf16>
                                                : top_k_kernel<fp16>;
  kernel<<<params.rows, kTopKThreads, TopKStorage::bytes, static_cast<cudaStream_t>(stream)>>>(params);
  check_launch("kdtree_top_k");
}

void launch_move_rows(const MoveParams& params, void* stream) {
  move_rows_kernel<<<params.layers * params.batch, kMoveThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  check_launch("kdtree_move_rows");
}

}  // namespace kdtree
