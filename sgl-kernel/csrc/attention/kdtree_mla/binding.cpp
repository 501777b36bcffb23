// SPDX-License-Identifier: Apache-2.0
// The op on CUDA, bound through torch's stable ABI, so that one library serves several versions of torch.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "../../stable_view.h"
#include "launch.h"
#include "schema.h"

namespace kdtree {
namespace {

VerifyArguments view_arguments(const Tensor& q,
                               const Tensor& kv_cache,
                               const Tensor& slot_table,
                               const Tensor& table_rows,
                               int64_t page,
                               const Tensor& prefix_lens,
                               const std::optional<Tensor>& tree_mask,
                               double sm_scale,
                               double k_scale,
                               const Tensor& out,
                               const std::optional<Tensor>& lse,
                               const std::optional<Tensor>& workspace) {
  return {view(q),         view(kv_cache), view(slot_table), view(table_rows), page,      view(prefix_lens),
          view(tree_mask), sm_scale,       k_scale,          view(out),        view(lse), view(workspace)};
}

// What the CUDA kernels ask beyond the schema: types that they have, and alignment for their loads.
void check_cuda_arguments(const VerifyArguments& a) {
  require(a.q.type == Type::bf16 || a.q.type == Type::fp16, "q must be bfloat16 or float16 on CUDA, is ", a.q);
  require(a.q.strides[2] == 1 && a.q.strides[1] % 2 == 0 && a.q.strides[0] % 2 == 0,
          "q must have a contiguous last dimension and even strides on CUDA, has strides ", a.q.strides[0], ", ",
          a.q.strides[1], ", ", a.q.strides[2]);
  require(a.kv_cache.strides[0] % 8 == 0, "kv_cache must have rows at multiples of 16 bytes on CUDA, has stride ",
          a.kv_cache.strides[0]);
  require(a.page <= std::numeric_limits<int32_t>::max(), "page is too large: ", a.page);
  require(a.table_rows.contiguous() && a.prefix_lens.contiguous(),
          "table_rows and prefix_lens must be contiguous on CUDA");
  require(std::isfinite(a.sm_scale) && std::isfinite(a.k_scale), "sm_scale and k_scale must be finite");
}

void check_workspace(const VerifyArguments& a, const Plan& plan) {
  if (plan.workspace_bytes() == 0) return;
  require(a.workspace.has_value(), "workspace must be uint8 [", plan.workspace_bytes(), "] on CUDA, is None");
  require(a.workspace->dims == 1 && a.workspace->type == Type::uint8 && a.workspace->contiguous() &&
              a.workspace->sizes[0] >= plan.workspace_bytes(),
          "workspace must be contiguous uint8 of at least ", plan.workspace_bytes(), " bytes, is ", *a.workspace);
}

template <class T>
T* pointer(const Tensor& tensor, const char* name, size_t alignment) {
  void* data = data_pointer(tensor);
  require(reinterpret_cast<uintptr_t>(data) % alignment == 0, name, " must start at a multiple of ", alignment,
          " bytes on CUDA");
  return static_cast<T*>(data);
}

void verify_cuda(const Tensor& q,
                 const Tensor& kv_cache,
                 const Tensor& slot_table,
                 const Tensor& table_rows,
                 int64_t page,
                 const Tensor& prefix_lens,
                 const std::optional<Tensor>& tree_mask,
                 double sm_scale,
                 double k_scale,
                 const Tensor& out,
                 const std::optional<Tensor>& lse,
                 const std::optional<Tensor>& workspace) {
  const VerifyArguments a = view_arguments(q, kv_cache, slot_table, table_rows, page, prefix_lens, tree_mask, sm_scale,
                                           k_scale, out, lse, workspace);
  check_arguments(a);
  check_cuda_arguments(a);
  const int device = q.get_device_index();
  const auto here = [&](const Tensor& tensor, const char* name) {
    require(tensor.is_cuda() && tensor.get_device_index() == device, name, " must be on q's device, cuda:", device);
  };
  here(kv_cache, "kv_cache");
  here(slot_table, "slot_table");
  here(table_rows, "table_rows");
  here(prefix_lens, "prefix_lens");
  here(out, "out");
  if (tree_mask.has_value()) here(*tree_mask, "tree_mask");
  if (lse.has_value()) here(*lse, "lse");
  if (workspace.has_value()) here(*workspace, "workspace");
  if (a.batch() == 0) return;

  const torch::stable::accelerator::DeviceGuard guard(device);
  const Plan plan = plan_for(a.heads(), a.width(), device);
  check_workspace(a, plan);
  VerifyParams params{};
  params.q = pointer<const void>(q, "q", 4);
  params.q_token_stride = a.q.strides[0];
  params.q_head_stride = a.q.strides[1];
  params.kv = pointer<const char>(kv_cache, "kv_cache", 16);
  params.kv_stride_bytes = a.kv_cache.strides[0] * 2;
  params.slot_table = pointer<const int32_t>(slot_table, "slot_table", 4);
  params.slot_table_stride = a.slot_table.strides[0];
  params.table_rows = pointer<const int64_t>(table_rows, "table_rows", 8);
  params.page = static_cast<int32_t>(page);
  params.prefix_lens = pointer<const void>(prefix_lens, "prefix_lens", 4);
  params.prefix_lens_are_64_bit = a.prefix_lens.type == Type::int64;
  if (tree_mask.has_value()) {
    params.tree_mask = pointer<const uint32_t>(*tree_mask, "tree_mask", 4);
    params.mask_words = static_cast<int32_t>(a.tree_mask->sizes[1]);
  }
  params.scale_log2 = static_cast<float>(sm_scale * k_scale * 1.4426950408889634);
  params.k_scale = static_cast<float>(k_scale);
  params.out = pointer<void>(out, "out", 8);
  params.lse = lse.has_value() ? pointer<float>(*lse, "lse", 4) : nullptr;
  params.batch = static_cast<int32_t>(a.batch());
  params.width = static_cast<int32_t>(a.width());
  params.heads = static_cast<int32_t>(a.heads());
  params.rows = params.width * params.heads;
  params.row_blocks = plan.row_blocks;
  params.groups = plan.groups;
  if (plan.workspace_bytes() > 0) {
    params.partial_out = pointer<float>(*workspace, "workspace", 16);
    params.partial_sum = params.partial_out + plan.partial_rows() * kLatent;
    params.partial_peak = params.partial_sum + plan.partial_rows();
  }
  (a.q.type == Type::bf16 ? launch_bf16 : launch_fp16)(params, plan, current_stream(device));
}

// The fake implementation: the op only writes its arguments, so checking them is all there is to do.
void verify_meta(const Tensor& q,
                 const Tensor& kv_cache,
                 const Tensor& slot_table,
                 const Tensor& table_rows,
                 int64_t page,
                 const Tensor& prefix_lens,
                 const std::optional<Tensor>& tree_mask,
                 double sm_scale,
                 double k_scale,
                 const Tensor& out,
                 const std::optional<Tensor>& lse,
                 const std::optional<Tensor>& workspace) {
  const VerifyArguments a = view_arguments(q, kv_cache, slot_table, table_rows, page, prefix_lens, tree_mask, sm_scale,
                                           k_scale, out, lse, workspace);
  check_arguments(a);
  check_cuda_arguments(a);
}

void check_shape(int64_t heads, int64_t width) {
  require(heads >= 1 && heads <= kMaxHeads, "heads must be 1 to ", kMaxHeads, ", is ", heads);
  require(width >= 1 && width <= kMaxWidth, "width must be 1 to ", kMaxWidth, ", is ", width);
}

int64_t workspace_bytes(int64_t heads, int64_t width, int64_t device) {
  check_shape(heads, width);
  return plan_for(heads, width, static_cast<int>(device)).workspace_bytes();
}

// How a shape is cut on a device that runs so many blocks of the small and of the large tile at a time.
std::vector<int64_t> plan(int64_t heads, int64_t width, int64_t small_blocks, int64_t large_blocks) {
  check_shape(heads, width);
  require(small_blocks >= 1 && large_blocks >= 1, "a device must run at least one block at a time");
  const Plan plan = make_plan(heads, width, {static_cast<int>(small_blocks), static_cast<int>(large_blocks)});
  return {plan.rows_a_block,
          plan.row_blocks,
          plan.groups,
          plan.blocks,
          plan.workspace_bytes(),
          plan.small_tile ? SmallTile::kSharedBytes : LargeTile::kSharedBytes,
          plan.small_tile ? SmallTile::kSharedTraffic : LargeTile::kSharedTraffic};
}

std::string cuda_variant(int64_t device) { return variant_of(static_cast<int>(device)); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def(kVerifySchema);
  m.def("kdtree_mla_workspace_bytes(int heads, int width, int device) -> int");
  m.def("kdtree_mla_cuda_variant(int device) -> str");
  // Rows a block, row blocks, groups, blocks, bytes of workspace, of shared memory, and through it for a tile of keys.
  m.def("kdtree_mla_plan(int heads, int width, int small_blocks, int large_blocks) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CUDA, m) { m.impl("kdtree_mla_verify", TORCH_BOX(&verify_cuda)); }

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, Meta, m) { m.impl("kdtree_mla_verify", TORCH_BOX(&verify_meta)); }

// No tensor says for which device these are.
STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CompositeExplicitAutograd, m) {
  m.impl("kdtree_mla_workspace_bytes", TORCH_BOX(&workspace_bytes));
  m.impl("kdtree_mla_plan", TORCH_BOX(&plan));
  m.impl("kdtree_mla_cuda_variant", TORCH_BOX(&cuda_variant));
}

}  // namespace kdtree
