// SPDX-License-Identifier: Apache-2.0
// What a device can run, asked once.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <stdexcept>

#include "launch.h"

namespace kdtree {
namespace {

struct Device {
  int arch;                     // of the code that it runs, such as 90
  std::array<int, 2> resident;  // blocks of the small and of the large tile at a time
};

[[noreturn]] void refuse(int index, const char* reason) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
  const std::string arch = std::to_string(major * 10 + minor);
  throw std::runtime_error("kdtree_mla_verify: no code for this GPU: it is sm_" + arch +
                           ", the library has " KDTREE_ARCHITECTURES " (" + reason +
                           "). Build it for this GPU: make kernels CUDA_ARCHITECTURES=" + arch);
}

Device ask(int index) {
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(index) != cudaSuccess) {
    const std::string reason = cudaGetErrorString(cudaGetLastError());
    throw std::runtime_error("kdtree_mla_verify: no CUDA device " + std::to_string(index) + ": " + reason);
  }
  struct Restore {
    int device;
    ~Restore() { cudaSetDevice(device); }
  } restore{before};
  KernelFacts facts;
  try {
    facts = facts_bf16();
    const KernelFacts other = facts_fp16();
    for (int i = 0; i < 2; ++i) facts.blocks_an_sm[i] = std::min(facts.blocks_an_sm[i], other.blocks_an_sm[i]);
  } catch (const std::runtime_error& error) {
    refuse(index, error.what());
  }
  int processors = 0;
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index);
  if (facts.blocks_an_sm[0] * facts.blocks_an_sm[1] * processors == 0) refuse(index, "a block does not fit it");
  return {facts.arch, {facts.blocks_an_sm[0] * processors, facts.blocks_an_sm[1] * processors}};
}

const Device& device(int index) {
  constexpr int kMaxDevices = 64;
  static std::array<std::once_flag, kMaxDevices> asked;
  static std::array<Device, kMaxDevices> devices;
  if (index < 0 || index >= kMaxDevices) {
    throw std::runtime_error("kdtree_mla_verify: no CUDA device " + std::to_string(index));
  }
  std::call_once(asked[index], [index] { devices[index] = ask(index); });
  return devices[index];
}

}  // namespace

Plan plan_for(int64_t heads, int64_t width, int index) { return make_plan(heads, width, device(index).resident); }

std::string variant_of(int index) { return "sm_" + std::to_string(device(index).arch); }

}  // namespace kdtree
