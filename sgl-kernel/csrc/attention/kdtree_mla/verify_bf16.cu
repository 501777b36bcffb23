// SPDX-License-Identifier: Apache-2.0
#include "launch.cuh"

namespace kdtree {

KernelFacts facts_bf16() { return facts<bf16>(); }

void launch_bf16(const VerifyParams& params, const Plan& plan, void* stream) { launch<bf16>(params, plan, stream); }

}  // namespace kdtree
