// SPDX-License-Identifier: Apache-2.0
// The border between the bindings, which know torch, and the CUDA code, which does not.
#pragma once

#include <string>

#include "params.h"
#include "plan.h"

namespace kdtree {

// The plan of a shape on a device. Raises std::runtime_error where the library has no code for the device.
Plan plan_for(int64_t heads, int64_t width, int device);

// The device's code, such as "sm_90"; raises std::runtime_error where the library has none for it.
std::string variant_of(int device);

// What the kernels of a data type are on the current device. Raises std::runtime_error where there is no code for it.
struct KernelFacts {
  int arch;             // of the code, such as 90
  int blocks_an_sm[2];  // of the small and of the large tile
};
KernelFacts facts_bf16();
KernelFacts facts_fp16();

// Puts both kernels into a stream (cudaStream_t) of the current device. No allocation, no synchronisation.
void launch_bf16(const VerifyParams& params, const Plan& plan, void* stream);
void launch_fp16(const VerifyParams& params, const Plan& plan, void* stream);

}  // namespace kdtree
