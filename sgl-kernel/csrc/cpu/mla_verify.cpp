// SPDX-License-Identifier: Apache-2.0
// kdtree_mla_verify on the CPU: checks, cuts the work into tasks, runs the kernel that fits the CPU, merges the splits.
#include "mla_verify.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "../attention/kdtree_mla/schema.h"
#include "view.h"

namespace kdtree {
namespace {

struct Variant {
  const char* name;
  VerifyKernel kernel;
};

// The best kernel this CPU runs. KDTREE_CPU_ISA=avx2 takes the older one, to test it on a newer CPU.
Variant choose_variant() {
  const char* wanted = std::getenv("KDTREE_CPU_ISA");
  const bool avx2_only = wanted != nullptr && std::string(wanted) == "avx2";
  TORCH_CHECK(wanted == nullptr || avx2_only, "KDTREE_CPU_ISA must be avx2 or unset, is '", wanted, "'");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bf16");
  if (avx512 && !avx2_only) return {"avx512_bf16", verify_avx512_bf16};
  TORCH_CHECK(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"),
              "kdtree_mla_verify needs a CPU with AVX2, FMA and F16C");
  return {"avx2", verify_avx2};
}

const Variant& variant() {
  static const Variant chosen = choose_variant();
  return chosen;
}

Storage storage_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return Storage::fp32;
    case at::kBFloat16: return Storage::bf16;
    case at::kHalf: return Storage::fp16;
    default: TORCH_CHECK(false, "kdtree_mla_verify: q must be bfloat16, float16 or float32 on the CPU, is ", type);
  }
}

// Shapes and types only: the CPU code takes the data from the tensors themselves.
VerifyArguments view_arguments(const at::Tensor& q,
                               const at::Tensor& kv_cache,
                               const at::Tensor& slot_table,
                               const at::Tensor& table_rows,
                               int64_t page,
                               const at::Tensor& prefix_lens,
                               const std::optional<at::Tensor>& tree_mask,
                               double sm_scale,
                               double k_scale,
                               const at::Tensor& out,
                               const std::optional<at::Tensor>& lse) {
  return {view(q),         view(kv_cache), view(slot_table), view(table_rows), page,      view(prefix_lens),
          view(tree_mask), sm_scale,       k_scale,          view(out),        view(lse), std::nullopt};
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float, Free>;

// Aligned for the kernels' vector loads.
Buffer make_buffer(int64_t floats) {
  const size_t bytes = (floats * sizeof(float) + 63) / 64 * 64;
  void* p = std::aligned_alloc(64, std::max<size_t>(bytes, 64));
  TORCH_CHECK(p != nullptr, "kdtree_mla_verify: out of memory (", bytes, " bytes)");
  return Buffer(static_cast<float*>(p));
}

// Whatever a split leaves behind: rows of output, peaks and sums.
struct Partials {
  explicit Partials(int64_t rows) : out(make_buffer(rows * kLatent)), peak(make_buffer(rows)), sum(make_buffer(rows)) {}
  Partial at(int64_t row) { return {out.get() + row * kLatent, peak.get() + row, sum.get() + row}; }
  Buffer out, peak, sum;
};

void* thread_scratch() {
  static thread_local const Buffer scratch = make_buffer(kScratchBytes / sizeof(float));
  return scratch.get();
}

// A request's keys, cut into splits of kSplitKeys; partial rows of split s start at first_partial + s * rows.
struct Request {
  int64_t prefix, keys, splits, first_partial;
  const int32_t* slots;
};

// Every slot must lie in the cache: a wrong table must end in an error, not in somebody else's memory.
void check_slots(const Request& request, int64_t index, int64_t page, int64_t cache_slots) {
  for (int64_t entry = 0; entry * page < request.keys; ++entry) {
    const int64_t last = std::min(page, request.keys - entry * page) - 1;
    const int64_t slot = static_cast<int64_t>(request.slots[entry]) * page;
    TORCH_CHECK(slot >= 0 && slot + last < cache_slots, "kdtree_mla_verify: request ", index, " has slot ", slot,
                " at position ", entry * page, "; kv_cache has slots 0 to ", cache_slots - 1);
  }
}

std::vector<Request> plan_requests(const at::Tensor& slot_table,
                                   const at::Tensor& table_rows,
                                   int64_t page,
                                   const at::Tensor& prefix_lens,
                                   int64_t width,
                                   int64_t rows,
                                   int64_t cache_slots) {
  const at::Tensor lens = prefix_lens.to(at::kLong).contiguous();
  const at::Tensor table_index = table_rows.contiguous();
  std::vector<Request> requests(table_rows.size(0));
  int64_t partial = 0;
  for (size_t b = 0; b < requests.size(); ++b) {
    Request& r = requests[b];
    const int64_t row = table_index.const_data_ptr<int64_t>()[b];
    r.prefix = lens.const_data_ptr<int64_t>()[b];
    r.keys = r.prefix < 0 ? 0 : r.prefix + width;
    TORCH_CHECK(row >= 0 && row < slot_table.size(0), "kdtree_mla_verify: table_rows[", b, "] is ", row,
                "; slot_table has ", slot_table.size(0), " rows");
    TORCH_CHECK(r.keys <= slot_table.size(1) * page, "kdtree_mla_verify: request ", b, " has ", r.prefix,
                " committed and ", width, " draft tokens; a row of slot_table holds ", slot_table.size(1) * page);
    r.slots = slot_table.const_data_ptr<int32_t>() + row * slot_table.stride(0);
    // The last split takes what is left over, half a split at most, so that no split is only a few keys.
    r.splits = r.keys == 0 ? 0 : std::max<int64_t>(1, (r.keys + kSplitKeys / 2 - 1) / kSplitKeys);
    r.first_partial = partial;
    partial += r.splits * rows;
    check_slots(r, b, page, cache_slots);
  }
  return requests;
}

// Merges a row's splits in their order: out = sum of 2^(peak - top) out, over the same sum of `sum`.
template <class T>
void merge_row(
    Partials& partials, const Request& request, int64_t rows, int64_t row, float k_scale, T* out, float* lse) {
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t s = 0; s < request.splits; ++s) {
    top = std::max(top, *partials.at(request.first_partial + s * rows + row).peak);
  }
  float total = 0.f;
  alignas(64) float merged[kLatent] = {};
  if (top > -std::numeric_limits<float>::infinity()) {
    for (int64_t s = 0; s < request.splits; ++s) {
      const Partial p = partials.at(request.first_partial + s * rows + row);
      const float weight = std::exp2(*p.peak - top);
      total += weight * *p.sum;
      for (int c = 0; c < kLatent; ++c) merged[c] += weight * p.out[c];
    }
  }
  const float norm = total > 0.f ? k_scale / total : 0.f;
  for (int c = 0; c < kLatent; ++c) out[c] = static_cast<T>(merged[c] * norm);
  if (lse != nullptr) *lse = total > 0.f ? (top + std::log2(total)) * 0.6931471805599453f : top;
}

void kdtree_mla_verify_cpu(const at::Tensor& q_any,
                           const at::Tensor& kv_cache,
                           const at::Tensor& slot_table,
                           const at::Tensor& table_rows,
                           int64_t page,
                           const at::Tensor& prefix_lens,
                           const std::optional<at::Tensor>& tree_mask,
                           double sm_scale,
                           double k_scale,
                           at::Tensor out,
                           std::optional<at::Tensor> lse,
                           std::optional<at::Tensor> /*workspace*/) {
  const VerifyArguments arguments = view_arguments(q_any, kv_cache, slot_table, table_rows, page, prefix_lens,
                                                   tree_mask, sm_scale, k_scale, out, lse);
  check_arguments(arguments);
  const Storage storage = storage_of(q_any.scalar_type());
  const at::Tensor q = q_any.stride(2) == 1 ? q_any : q_any.contiguous();
  const int64_t batch = arguments.batch();
  if (batch == 0) return;
  const int64_t width = arguments.width();
  const int64_t heads = arguments.heads();
  const int64_t rows = width * heads;
  const int64_t bytes = q.element_size();
  const std::vector<Request> requests =
      plan_requests(slot_table, table_rows, page, prefix_lens, width, rows, kv_cache.size(0));

  // Blocks of rows as large as the kernel takes, so that a packed key tile serves many rows; smaller ones where threads
  // would idle. Neither how rows are cut nor who takes which place changes a bit of the result.
  int64_t splits = 0;
  for (const Request& r : requests) splits += r.splits;
  const int64_t threads = at::get_num_threads();
  const int64_t wanted = splits == 0 ? 1 : (2 * threads + splits - 1) / splits;
  const int64_t blocks = std::max((rows + kMaxBlockRows - 1) / kMaxBlockRows, std::min(wanted, rows / 32));
  const int64_t block_rows = (rows + blocks - 1) / blocks;

  struct Place {
    int64_t request, split, block, begin, end;
  };
  std::vector<Place> places;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t s = 0; s < requests[b].splits; ++s) {
      const int64_t end = s + 1 == requests[b].splits ? requests[b].keys : (s + 1) * kSplitKeys;
      for (int64_t block = 0; block * block_rows < rows; ++block) {
        places.push_back({b, s, block, s * kSplitKeys, end});
      }
    }
  }
  // Large places first, each taken by whichever thread is free: uneven requests keep all threads busy to the end.
  std::stable_sort(places.begin(), places.end(),
                   [](const Place& x, const Place& y) { return x.end - x.begin > y.end - y.begin; });
  std::atomic<size_t> next{0};
  Partials partials(splits * rows);
  const int64_t mask_stride = (width + 31) / 32;
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (size_t i = next++; i < places.size(); i = next++) {
      const auto [b, split, block, begin, end] = places[i];
      const Request& r = requests[b];
      VerifyTask task;
      task.query = static_cast<const char*>(q.const_data_ptr()) + b * width * q.stride(0) * bytes;
      task.query_token_stride = q.stride(0) * bytes;
      task.query_head_stride = q.stride(1) * bytes;
      task.kv = static_cast<const char*>(kv_cache.const_data_ptr());
      task.kv_stride = kv_cache.stride(0) * bytes;
      task.slots = r.slots;
      task.page = page;
      task.prefix = r.prefix;
      task.begin = begin;
      task.end = end;
      task.tree_mask = tree_mask.has_value() ? tree_mask->const_data_ptr<int32_t>() + b * width * mask_stride : nullptr;
      task.mask_stride = mask_stride;
      task.heads = static_cast<int>(heads);
      task.first_row = static_cast<int>(block * block_rows);
      task.rows = static_cast<int>(std::min(block_rows, rows - block * block_rows));
      task.scale = static_cast<float>(sm_scale * k_scale * 1.4426950408889634);
      Partial partial = partials.at(r.first_partial + split * rows + task.first_row);
      variant().kernel(storage, task, thread_scratch(), partial);
    }
  });
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, q.scalar_type(), "kdtree_mla_verify", [&] {
    at::parallel_for(0, batch * rows, 32, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        merge_row<scalar_t>(partials, requests[i / rows], rows, i % rows, static_cast<float>(k_scale),
                            out.mutable_data_ptr<scalar_t>() + i * kLatent,
                            lse.has_value() ? lse->mutable_data_ptr<float>() + i : nullptr);
      }
    });
  });
}

// The fake implementation: the op only writes its arguments, so checking them is all there is to do.
void kdtree_mla_verify_meta(const at::Tensor& q,
                            const at::Tensor& kv_cache,
                            const at::Tensor& slot_table,
                            const at::Tensor& table_rows,
                            int64_t page,
                            const at::Tensor& prefix_lens,
                            const std::optional<at::Tensor>& tree_mask,
                            double sm_scale,
                            double k_scale,
                            at::Tensor out,
                            std::optional<at::Tensor> lse,
                            std::optional<at::Tensor> /*workspace*/) {
  check_arguments(
      view_arguments(q, kv_cache, slot_table, table_rows, page, prefix_lens, tree_mask, sm_scale, k_scale, out, lse));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def(kVerifySchema);
  m.def("kdtree_mla_cpu_variant() -> str", [] { return std::string(variant().name); });
}

TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) { m.impl("kdtree_mla_verify", kdtree_mla_verify_cpu); }

TORCH_LIBRARY_IMPL(sgl_kernel, Meta, m) { m.impl("kdtree_mla_verify", kdtree_mla_verify_meta); }

}  // namespace kdtree
