// SPDX-License-Identifier: Apache-2.0
// The ops of draft trees on CUDA, bound through torch's stable ABI.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "../stable_view.h"
#include "tree_params.h"
#include "tree_schema.h"

namespace kdtree {
namespace {

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(data_pointer(tensor));
}

void check_device(const char* op, const Tensor& first, std::initializer_list<const Tensor*> others) {
  for (const Tensor* tensor : others) {
    require_for(op, tensor->is_cuda() && tensor->get_device_index() == first.get_device_index(),
                "all tensors must be on one device, cuda:", first.get_device_index());
  }
}

void build_tree_meta(const Tensor& log_probs,
                     const Tensor& token_ids,
                     const Tensor& roots,
                     bool /*spine*/,
                     double min_log_prob,
                     const Tensor& tokens,
                     const Tensor& parents,
                     const Tensor& depths,
                     const Tensor& tree_mask,
                     const Tensor& next_token,
                     const Tensor& next_sibling,
                     const Tensor& counts) {
  check_arguments(BuildArguments{view(log_probs), view(token_ids), view(roots), min_log_prob, view(tokens),
                                 view(parents), view(depths), view(tree_mask), view(next_token), view(next_sibling),
                                 view(counts)});
}

void build_tree_cuda(const Tensor& log_probs,
                     const Tensor& token_ids,
                     const Tensor& roots,
                     bool spine,
                     double min_log_prob,
                     const Tensor& tokens,
                     const Tensor& parents,
                     const Tensor& depths,
                     const Tensor& tree_mask,
                     const Tensor& next_token,
                     const Tensor& next_sibling,
                     const Tensor& counts) {
  build_tree_meta(log_probs, token_ids, roots, spine, min_log_prob, tokens, parents, depths, tree_mask, next_token,
                  next_sibling, counts);
  check_device("kdtree_build_tree", tokens,
               {&log_probs, &token_ids, &roots, &parents, &depths, &tree_mask, &next_token, &next_sibling, &counts});
  if (roots.size(0) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(tokens.get_device_index());
  BuildParams params{};
  params.log_probs = data<const float>(log_probs);
  params.token_ids = data<const int64_t>(token_ids);
  params.roots = data<const int64_t>(roots);
  params.spine = spine;
  params.min_log_prob = min_log_prob;
  params.tokens = data<int64_t>(tokens);
  params.parents = data<int32_t>(parents);
  params.depths = data<int32_t>(depths);
  params.tree_mask = data<uint32_t>(tree_mask);
  params.next_token = data<int64_t>(next_token);
  params.next_sibling = data<int64_t>(next_sibling);
  params.counts = data<int32_t>(counts);
  params.batch = static_cast<int32_t>(roots.size(0));
  params.positions = static_cast<int32_t>(log_probs.size(1));
  params.top_k = static_cast<int32_t>(log_probs.size(2));
  params.width = static_cast<int32_t>(tokens.size(1));
  params.words = static_cast<int32_t>(tree_mask.size(1));
  launch_build_tree(params, current_stream(tokens.get_device_index()));
}

void accept_meta(const Tensor& tokens,
                 const Tensor& next_token,
                 const Tensor& next_sibling,
                 const Tensor& drawn,
                 const Tensor& paths,
                 const Tensor& counts,
                 const Tensor& bonus) {
  check_arguments(AcceptArguments{view(tokens), view(next_token), view(next_sibling), view(drawn), view(paths),
                                  view(counts), view(bonus)});
}

void accept_cuda(const Tensor& tokens,
                 const Tensor& next_token,
                 const Tensor& next_sibling,
                 const Tensor& drawn,
                 const Tensor& paths,
                 const Tensor& counts,
                 const Tensor& bonus) {
  accept_meta(tokens, next_token, next_sibling, drawn, paths, counts, bonus);
  check_device("kdtree_accept", tokens, {&next_token, &next_sibling, &drawn, &paths, &counts, &bonus});
  if (tokens.size(0) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(tokens.get_device_index());
  const AcceptParams params{data<const int64_t>(tokens),
                            data<const int64_t>(next_token),
                            data<const int64_t>(next_sibling),
                            data<const int64_t>(drawn),
                            data<int32_t>(paths),
                            data<int32_t>(counts),
                            data<int64_t>(bonus),
                            static_cast<int32_t>(tokens.size(0)),
                            static_cast<int32_t>(tokens.size(1)),
                            static_cast<int32_t>(paths.size(1))};
  launch_accept(params, current_stream(tokens.get_device_index()));
}

void top_k_meta(const Tensor& logits,
                int64_t /*first_id*/,
                const Tensor& log_probs,
                const Tensor& token_ids,
                const Tensor& normalisers) {
  check_arguments(TopKArguments{view(logits), view(log_probs), view(token_ids), view(normalisers)});
}

void top_k_cuda(const Tensor& logits,
                int64_t first_id,
                const Tensor& log_probs,
                const Tensor& token_ids,
                const Tensor& normalisers) {
  top_k_meta(logits, first_id, log_probs, token_ids, normalisers);
  check_device("kdtree_top_k", logits, {&log_probs, &token_ids, &normalisers});
  if (logits.size(0) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const TopKParams params{data_pointer(logits),
                          first_id,
                          data<float>(log_probs),
                          data<int64_t>(token_ids),
                          data<float>(normalisers),
                          static_cast<int32_t>(logits.size(0)),
                          static_cast<int32_t>(logits.size(1)),
                          static_cast<int32_t>(log_probs.size(1))};
  const Type type = view(logits).type;
  const LogitType logit_type = type == Type::fp32   ? LogitType::fp32
                               : type == Type::bf16 ? LogitType::bf16
                                                    : LogitType::fp16;
  launch_top_k(logit_type, params, current_stream(logits.get_device_index()));
}

void move_rows_meta(
    const Tensor& caches, int64_t row_bytes, const Tensor& slots, const Tensor& paths, const Tensor& counts) {
  check_arguments(MoveArguments{view(caches), row_bytes, view(slots), view(paths), view(counts)});
}

void move_rows_cuda(
    const Tensor& caches, int64_t row_bytes, const Tensor& slots, const Tensor& paths, const Tensor& counts) {
  move_rows_meta(caches, row_bytes, slots, paths, counts);
  check_device("kdtree_move_rows", slots, {&caches, &paths, &counts});
  if (slots.size(0) == 0 || caches.size(0) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(slots.get_device_index());
  const MoveParams params{
      data<const int64_t>(caches),         data<const int64_t>(slots),           data<const int32_t>(paths),
      data<const int32_t>(counts),         static_cast<int32_t>(caches.size(0)), static_cast<int32_t>(slots.size(0)),
      static_cast<int32_t>(slots.size(1)), static_cast<int32_t>(paths.size(1)),  static_cast<int32_t>(row_bytes)};
  launch_move_rows(params, current_stream(slots.get_device_index()));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def(kBuildTreeSchema);
  m.def(kAcceptSchema);
  m.def(kTopKSchema);
  m.def(kMoveRowsSchema);
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CUDA, m) {
  m.impl("kdtree_build_tree", TORCH_BOX(&build_tree_cuda));
  m.impl("kdtree_accept", TORCH_BOX(&accept_cuda));
  m.impl("kdtree_top_k", TORCH_BOX(&top_k_cuda));
  m.impl("kdtree_move_rows", TORCH_BOX(&move_rows_cuda));
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, Meta, m) {
  m.impl("kdtree_build_tree", TORCH_BOX(&build_tree_meta));
  m.impl("kdtree_accept", TORCH_BOX(&accept_meta));
  m.impl("kdtree_top_k", TORCH_BOX(&top_k_meta));
  m.impl("kdtree_move_rows", TORCH_BOX(&move_rows_meta));
}

}  // namespace kdtree
