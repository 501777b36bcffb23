// SPDX-License-Identifier: Apache-2.0
// The functions of primitives.cuh on a CPU, so that the CUDA kernels' own source runs, and is tested, without a GPU.
//
// Every thread of a block is a fiber. A warp exchange (shuffle, ballot, ldmatrix, mma) waits for the warp's 32 lanes, a
// barrier for its threads; warps take turns in a random order, so a missing barrier gives different results for
// different seeds. Background copies behave as badly as the hardware may: the target is poisoned (NaN) when the copy is
// asked for, and the data land either at once or only when they are waited for. Shared memory starts poisoned, an
// address outside it or not aligned is an error, and so is a block that cannot go on.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define KDTREE_DEVICE inline
#define KDTREE_KERNEL(threads, blocks_an_sm) inline void

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }

namespace kdtree {

struct bf16 {};
struct fp16 {};

namespace emulator {

constexpr uint32_t kSharedBase = 1024;  // not 0, so that an offset in place of an address is found out
constexpr size_t kStackBytes = 128 * 1024;

struct Copy {
  uint32_t to;
  const void* from;  // null: zeros
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool done = true;
  bool waiting = false;
  int barrier_id = -1;  // that it waits at; -1: none
  int barrier_threads = 0;
  bool flag = false;                      // given to barrier_or
  const void* exchanged = nullptr;        // what it brings to its warp's exchange
  std::vector<std::vector<Copy>> groups;  // committed, oldest first
  std::vector<Copy> open;                 // not committed
};

class Block {
 public:
  Block(int threads, size_t shared_bytes, uint64_t seed) : fibers_(threads), shared_(shared_bytes), random_(seed) {}

  // Runs `body` in every thread.
  void run(int index, int count, const std::function<void()>& body) {
    index_ = index;
    count_ = count;
    body_ = &body;
    std::fill(shared_.begin(), shared_.end(), 0xff);
    current() = this;
    for (Fiber& fiber : fibers_) {
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = &scheduler_;
      makecontext(&fiber.context, &Block::enter, 0);
      fiber.done = fiber.waiting = false;
      fiber.barrier_id = -1;
      fiber.groups.clear();
      fiber.open.clear();
    }
    const int warps = static_cast<int>(fibers_.size()) / 32;
    for (int left = static_cast<int>(fibers_.size()); left > 0;) {
      // From a random warp on, the first that can run.
      const int first = static_cast<int>(random_() % warps);
      int ran = 0;
      for (int i = 0; i < warps && ran == 0; ++i) {
        const int warp = (first + i) % warps;
        for (int lane = 0; lane < 32; ++lane) {
          Fiber& fiber = fibers_[warp * 32 + lane];
          if (fiber.done || fiber.waiting) continue;
          thread_ = warp * 32 + lane;
          swapcontext(&scheduler_, &fiber.context);
          if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
          left -= fiber.done;
          ++ran;
        }
      }
      if (ran == 0 && left > 0) throw std::runtime_error("the block cannot go on: not all threads came to a barrier");
    }
  }

  static Block*& current() {
    static Block* block = nullptr;
    return block;
  }

  int thread() const { return thread_; }
  int threads() const { return static_cast<int>(fibers_.size()); }
  int index() const { return index_; }
  int count() const { return count_; }

  // Waits for the 32 lanes; then `all(values)` sees what each brought. Lane by lane the results go to `result`.
  template <class In, class Out, class Function>
  Out exchange(const In& in, Function&& result) {
    Fiber& self = fibers_[thread_];
    const int warp = thread_ / 32;
    self.exchanged = &in;
    wait_for(warp * 32, 32, -2, 32);
    const In* values[32];
    for (int lane = 0; lane < 32; ++lane) values[lane] = static_cast<const In*>(fibers_[warp * 32 + lane].exchanged);
    const Out out = result(values, thread_ % 32);
    wait_for(warp * 32, 32, -3, 32);  // nobody leaves before all have read
    return out;
  }

  bool barrier_or(int id, int threads, bool flag) {
    fibers_[thread_].flag = flag;
    wait_for(0, static_cast<int>(fibers_.size()), id, threads);
    return any_flag_[id];
  }

  unsigned char* at(uint32_t address, size_t bytes) {
    if (address < kSharedBase || address - kSharedBase + bytes > shared_.size() || address % bytes != 0) {
      throw std::runtime_error("shared memory: bad address " +
                               std::to_string(static_cast<int64_t>(address) - kSharedBase) + " for " +
                               std::to_string(bytes) + " bytes of " + std::to_string(shared_.size()));
    }
    return shared_.data() + (address - kSharedBase);
  }

  void copy_async(uint32_t to, const void* from) {
    std::memset(at(to, 16), 0xff, 16);
    fibers_[thread_].open.push_back({to, from});
  }

  void commit_copies() {
    Fiber& self = fibers_[thread_];
    if (random_() % 2 == 0) {
      for (const Copy& copy : self.open) land(copy);
      self.open.clear();
    }
    self.groups.push_back(std::move(self.open));
    self.open.clear();
  }

  void wait_copies(size_t pending) {
    Fiber& self = fibers_[thread_];
    while (self.groups.size() > pending) {
      for (const Copy& copy : self.groups.front()) land(copy);
      self.groups.erase(self.groups.begin());
    }
  }

 private:
  static void enter() {
    Block& block = *current();
    try {
      (*block.body_)();
    } catch (...) {
      block.error_ = std::current_exception();
    }
    block.fibers_[block.thread_].done = true;
  }

  void land(const Copy& copy) {
    if (copy.from == nullptr) {
      std::memset(at(copy.to, 16), 0, 16);
    } else {
      std::memcpy(at(copy.to, 16), copy.from, 16);
    }
  }

  // Until `threads` of the fibers [first, first + count) wait with this id.
  void wait_for(int first, int count, int id, int threads) {
    Fiber& self = fibers_[thread_];
    self.waiting = true;
    self.barrier_id = id;
    int here = 0;
    for (int i = first; i < first + count; ++i) here += fibers_[i].waiting && fibers_[i].barrier_id == id;
    if (here == threads) {
      bool any = false;
      for (int i = first; i < first + count; ++i) {
        Fiber& fiber = fibers_[i];
        if (!fiber.waiting || fiber.barrier_id != id) continue;
        any |= fiber.flag;
        fiber.waiting = false;
        fiber.barrier_id = -1;
      }
      if (id >= 0) any_flag_[id] = any;
    }
    if (self.waiting) swapcontext(&self.context, &scheduler_);
  }

  std::vector<Fiber> fibers_;
  std::vector<unsigned char> shared_;
  std::mt19937_64 random_;
  ucontext_t scheduler_;
  const std::function<void()>* body_ = nullptr;
  std::exception_ptr error_;
  int thread_ = 0, index_ = 0, count_ = 0;
  bool any_flag_[16] = {};
};

inline Block& block() { return *Block::current(); }

inline float from_16_bit(bf16, uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
inline float from_16_bit(fp16, uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}
inline uint16_t to_16_bit(bf16, float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}
inline uint16_t to_16_bit(fp16, float value) {
  const _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

template <class T>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct In {
    uint32_t a[4], b[2];
  };
  const In in{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  struct Out {
    float sum[4];
  };
  // PTX ISA, fragments of mma.m16n8k16: a lane has rows lane / 4 (+ 8) of a and c, column lane / 4 of b.
  const Out out = block().exchange<In, Out>(in, [](const In* const(&lanes)[32], int lane) {
    Out sums{};
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      for (int k = 0; k < 16; ++k) {
        const int holder = k % 8 / 2, shift = k % 2 * 16;
        const uint32_t left = lanes[row % 8 * 4 + holder]->a[row / 8 + k / 8 * 2] >> shift;
        const uint32_t right = lanes[column * 4 + holder]->b[k / 8] >> shift;
        sums.sum[i] += from_16_bit(T{}, static_cast<uint16_t>(left)) * from_16_bit(T{}, static_cast<uint16_t>(right));
      }
    }
    return sums;
  });
  for (int i = 0; i < 4; ++i) c[i] += out.sum[i];
}

inline void load_matrices(uint32_t (&m)[4], uint32_t address, bool transposed) {
  struct Out {
    uint32_t m[4];
  };
  const Out out = block().exchange<uint32_t, Out>(address, [&](const uint32_t* const(&lanes)[32], int lane) {
    Out words{};
    for (int i = 0; i < 4; ++i) {
      for (int half = 0; half < 2; ++half) {
        int row = lane / 4, column = lane % 4 * 2 + half;
        if (transposed) std::swap(row, column);
        uint16_t value;
        std::memcpy(&value, block().at(*lanes[i * 8 + row], 16) + column * 2, 2);
        words.m[i] |= uint32_t{value} << (16 * half);
      }
    }
    return words;
  });
  for (int i = 0; i < 4; ++i) m[i] = out.m[i];
}

}  // namespace emulator

inline int thread_index() { return emulator::block().thread(); }
inline int lane_index() { return thread_index() % 32; }
inline int warp_index() { return thread_index() / 32; }
inline int block_index() { return emulator::block().index(); }
inline int block_count() { return emulator::block().count(); }

template <class V>
V shuffle(V value, int from) {
  return emulator::block().exchange<V, V>(value, [&](const V* const(&lanes)[32], int) { return *lanes[from]; });
}
template <class V>
V shuffle_up(V value, int distance) {
  return emulator::block().exchange<V, V>(
      value, [&](const V* const(&lanes)[32], int lane) { return *lanes[lane < distance ? lane : lane - distance]; });
}
template <class V>
V shuffle_xor(V value, int mask) {
  return emulator::block().exchange<V, V>(value,
                                          [&](const V* const(&lanes)[32], int lane) { return *lanes[lane ^ mask]; });
}
inline uint32_t ballot(bool flag) {
  return emulator::block().exchange<bool, uint32_t>(flag, [](const bool* const(&lanes)[32], int) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= uint32_t{*lanes[i]} << i;
    return bits;
  });
}
inline int first_set_bit(uint32_t word) { return __builtin_ctz(word); }
inline int count_bits(uint32_t word) { return __builtin_popcount(word); }
inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline int fetch_add(int* shared, int value) { return std::exchange(*shared, *shared + value); }

inline void barrier() { emulator::block().barrier_or(0, emulator::block().threads(), false); }
inline bool barrier_or(bool flag) { return emulator::block().barrier_or(0, emulator::block().threads(), flag); }
inline void barrier(int id, int threads) { emulator::block().barrier_or(id, threads, false); }

inline void warp_barrier() { ballot(false); }

inline uint32_t shared_memory() { return emulator::kSharedBase; }
template <class V>
V* shared_pointer(int offset) {
  return reinterpret_cast<V*>(emulator::block().at(emulator::kSharedBase + offset, sizeof(V)));
}
template <class V>
void store_shared(uint32_t address, const V& value) {
  std::memcpy(emulator::block().at(address, sizeof(V)), &value, sizeof(V));
}
inline float load_shared(uint32_t address) {
  float value;
  std::memcpy(&value, emulator::block().at(address, 4), 4);
  return value;
}
inline void load_shared(uint32_t address, float (&v)[4]) { std::memcpy(v, emulator::block().at(address, 16), 16); }

inline void copy_async(uint32_t to, const void* from, bool valid) {
  emulator::block().copy_async(to, valid ? from : nullptr);
}
inline void commit_copies() { emulator::block().commit_copies(); }
template <int pending>
void wait_copies() {
  emulator::block().wait_copies(pending);
}

inline void load_matrices(uint32_t (&m)[4], uint32_t address) { emulator::load_matrices(m, address, false); }
inline void load_matrices_transposed(uint32_t (&m)[4], uint32_t address) { emulator::load_matrices(m, address, true); }

template <class T>
void multiply_add(T, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulator::multiply_add<T>(c, a, b0, b1);
}

template <class T>
uint32_t pack(T, float low, float high) {
  return emulator::to_16_bit(T{}, low) | uint32_t{emulator::to_16_bit(T{}, high)} << 16;
}

template <class T>
float unpack(T, uint16_t bits) {
  return emulator::from_16_bit(T{}, bits);
}

inline float exp2_fast(float x) { return std::exp2(x); }
inline uint32_t funnel_right(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift & 31));
}

using std::fmaxf;
using std::log2f;

}  // namespace kdtree
