// SPDX-License-Identifier: Apache-2.0
// Two loops that measure what a GPU can do: mma.sync m16n8k16 in bf16 on registers alone, and reading device memory.
#include <cstdint>

namespace {

constexpr int kThreads = 256;
constexpr int kChains = 16;  // independent products a warp has under way

__global__ void __launch_bounds__(kThreads) mma_loop(float* sink, int iterations) {
  float c[kChains][4] = {};
  // Small varied values: the rate of the tensor cores falls with the power that the data takes.
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) a[i] = 0x3c003a00u + threadIdx.x * 0x00030005u + i * 0x00110007u;
  for (int i = 0; i < 2; ++i) b[i] = 0x3b00bc00u + threadIdx.x * 0x00050003u + i * 0x00130009u;
  for (int n = 0; n < iterations; ++n) {
#pragma unroll
    for (int i = 0; i < kChains; ++i) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }
  float sum = 0;
  for (int i = 0; i < kChains; ++i) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
  sink[blockIdx.x * kThreads + threadIdx.x] = sum;
}

__global__ void __launch_bounds__(1024) read_loop(const uint4* from, int64_t count, uint32_t* sink) {
  uint32_t sum = 0;
  const int64_t step = int64_t{gridDim.x} * 1024;
#pragma unroll 8
  for (int64_t i = int64_t{blockIdx.x} * 1024 + threadIdx.x; i < count; i += step) {
    const uint4 v = __ldcs(from + i);
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345678u) *sink = sum;  // never on random data, but the compiler cannot know
}

}  // namespace

// `sink`: fp32 [blocks * 256]. Operations: blocks * 8 warps * iterations * 16 products * 4096.
extern "C" int launch_mma_loop(float* sink, int blocks, int iterations, cudaStream_t stream) {
  mma_loop<<<blocks, kThreads, 0, stream>>>(sink, iterations);
  return cudaGetLastError();
}

extern "C" int launch_read_loop(const void* from, int64_t bytes, int blocks, uint32_t* sink, cudaStream_t stream) {
  read_loop<<<blocks, 1024, 0, stream>>>(static_cast<const uint4*>(from), bytes / 16, sink);
  return cudaGetLastError();
}
