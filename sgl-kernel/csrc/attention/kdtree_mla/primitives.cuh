// SPDX-License-Identifier: Apache-2.0
// The instructions that the kernels are made of: mma.sync, ldmatrix, cp.async, warp and block exchange. All of them
// exist from sm_80 on, so the code that runs on sm_90 is the code that runs on sm_120. Shared memory is addressed by
// byte.
//
// Without nvcc the same functions come from an emulator, with which the tests run these kernels on a CPU.
#pragma once

#ifndef __CUDACC__
#include "emulator.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#define KDTREE_DEVICE __device__ __forceinline__
#define KDTREE_KERNEL(threads, blocks_an_sm) __global__ void __launch_bounds__(threads, blocks_an_sm)

namespace kdtree {

struct bf16 {};
struct fp16 {};

KDTREE_DEVICE int thread_index() { return threadIdx.x; }
KDTREE_DEVICE int lane_index() { return threadIdx.x % 32; }
KDTREE_DEVICE int block_index() { return blockIdx.x; }
KDTREE_DEVICE int block_count() { return gridDim.x; }

// The same value in every lane, told to the compiler, so that it may keep it in a uniform register.
KDTREE_DEVICE int warp_index() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }

template <class V>
KDTREE_DEVICE V shuffle(V value, int lane) {
  return __shfl_sync(~0u, value, lane);
}
template <class V>
KDTREE_DEVICE V shuffle_up(V value, int distance) {
  return __shfl_up_sync(~0u, value, distance);
}
template <class V>
KDTREE_DEVICE V shuffle_xor(V value, int mask) {
  return __shfl_xor_sync(~0u, value, mask);
}
KDTREE_DEVICE uint32_t ballot(bool flag) { return __ballot_sync(~0u, flag); }
KDTREE_DEVICE int first_set_bit(uint32_t word) { return __ffs(word) - 1; }
KDTREE_DEVICE int count_bits(uint32_t word) { return __popc(word); }
KDTREE_DEVICE uint32_t float_bits(float value) { return __float_as_uint(value); }
KDTREE_DEVICE float bits_float(uint32_t bits) { return __uint_as_float(bits); }
KDTREE_DEVICE int fetch_add(int* shared, int value) { return atomicAdd(shared, value); }

KDTREE_DEVICE void warp_barrier() { __syncwarp(); }
KDTREE_DEVICE void barrier() { __syncthreads(); }
KDTREE_DEVICE bool barrier_or(bool flag) { return __syncthreads_or(flag); }
// Barrier `id` (1 to 15) of `threads` threads of the block.
KDTREE_DEVICE void barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

KDTREE_DEVICE uint32_t shared_memory() {
  extern __shared__ __align__(128) unsigned char bytes[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(bytes));
}

// What stands `offset` bytes from the start of shared memory, for what is not worth an address of its own kind.
template <class V>
KDTREE_DEVICE V* shared_pointer(int offset) {
  extern __shared__ __align__(128) unsigned char bytes[];
  return reinterpret_cast<V*>(bytes + offset);
}

KDTREE_DEVICE void store_shared(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
KDTREE_DEVICE void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
KDTREE_DEVICE void store_shared(uint32_t address, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}
KDTREE_DEVICE float load_shared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
KDTREE_DEVICE void load_shared(uint32_t address, float (&v)[4]) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(address)
               : "memory");
}

// Copies 16 bytes to shared memory in the background, or writes 16 zeros if not `valid`.
KDTREE_DEVICE void copy_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
               "r"(valid ? 16 : 0)
               : "memory");
}
KDTREE_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the last `pending` groups of this thread's copies are under way.
template <int pending>
KDTREE_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Four 8x8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
KDTREE_DEVICE void load_matrices(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
KDTREE_DEVICE void load_matrices_transposed(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// c += a b: a is 16 x 16, b is 16 x 8, c is 16 x 8 in fp32.
KDTREE_DEVICE void multiply_add(bf16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
KDTREE_DEVICE void multiply_add(fp16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two values rounded to nearest even, the first in the low half.
KDTREE_DEVICE uint32_t pack(bf16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
KDTREE_DEVICE uint32_t pack(fp16, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

KDTREE_DEVICE float unpack(bf16, uint16_t bits) { return __uint_as_float(uint32_t{bits} << 16); }
KDTREE_DEVICE float unpack(fp16, uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

KDTREE_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Bits [shift, shift + 32) of high:low.
KDTREE_DEVICE uint32_t funnel_right(uint32_t low, uint32_t high, uint32_t shift) {
  return __funnelshift_r(low, high, shift);
}

}  // namespace kdtree
#endif
