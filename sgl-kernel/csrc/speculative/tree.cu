// SPDX-License-Identifier: Apache-2.0
// Launches the kernels of draft trees.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

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

}  // namespace kdtree
