// SPDX-License-Identifier: Apache-2.0
#include "launch.cuh"

namespace kdtree {

KernelFacts facts_fp16() { return facts<fp16>(); }

void launch_fp16(const VerifyParams& params, const Plan& plan, void* stream) { launch<fp16>(params, plan, stream); }

}  // namespace kdtree
