// SPDX-License-Identifier: Apache-2.0
// The small ops that SGLang's speculative decoding calls on the CPU, through the wrappers in sgl_kernel/speculative.py
// and sgl_kernel/kvcacheio.py. Index tensors may be int32 or int64; outputs are written in place. A tree is given as in
// SGLang: node 0 is the root, retrive_next_token is a node's first child and retrive_next_sibling the next child of the
// same parent (-1: none); retrive_index is the node's row in the flattened batch.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>
#include <vector>

namespace kdtree {
namespace {

#define SPEC_CHECK(ok, ...) TORCH_CHECK(ok, __func__, ": ", __VA_ARGS__)

// Reads and writes of an index tensor of either integer type (bool for masks), flattened. Ops here handle a few
// hundred values, so a switch a value costs nothing that could be measured.
class Ints {
 public:
  Ints(const at::Tensor& t, const char* name) : data_(t.data_ptr()), type_(t.scalar_type()), size_(t.numel()) {
    TORCH_CHECK(type_ == at::kLong || type_ == at::kInt || type_ == at::kBool, name,
                " must be int32, int64 or bool, is ", type_);
    TORCH_CHECK(t.is_contiguous(), name, " must be contiguous, has strides ", t.strides());
    name_ = name;
  }
  int64_t operator[](int64_t i) const {
    check(i);
    switch (type_) {
      case at::kLong: return static_cast<const int64_t*>(data_)[i];
      case at::kInt: return static_cast<const int32_t*>(data_)[i];
      default: return static_cast<const bool*>(data_)[i];
    }
  }
  void set(int64_t i, int64_t value) {
    check(i);
    switch (type_) {
      case at::kLong: static_cast<int64_t*>(data_)[i] = value; break;
      case at::kInt: static_cast<int32_t*>(data_)[i] = static_cast<int32_t>(value); break;
      default: static_cast<bool*>(data_)[i] = value != 0;
    }
  }
  int64_t size() const { return size_; }

 private:
  void check(int64_t i) const {
    TORCH_CHECK_INDEX(i >= 0 && i < size_, name_, ": index ", i, " out of range, it has ", size_, " values");
  }
  void* data_;
  at::ScalarType type_;
  int64_t size_;
  const char* name_;
};

#define INTS(name) Ints name##_(name, #name)

// req_to_token[row b, start .. end) <- consecutive values of out_cache_loc.
void assign_req_to_token_pool_cpu(const at::Tensor& req_pool_indices,
                                  at::Tensor req_to_token,
                                  const at::Tensor& start_offset,
                                  const at::Tensor& end_offset,
                                  const at::Tensor& out_cache_loc,
                                  int64_t pool_len) {
  INTS(req_pool_indices);
  INTS(req_to_token);
  INTS(start_offset);
  INTS(end_offset);
  INTS(out_cache_loc);
  int64_t next = 0;
  for (int64_t b = 0; b < req_pool_indices_.size(); ++b) {
    for (int64_t i = start_offset_[b]; i < end_offset_[b]; ++i) {
      req_to_token_.set(req_pool_indices_[b] * pool_len + i, out_cache_loc_[next++]);
    }
  }
}

// out_cache_loc <- req_to_token[row b, start .. end), request after request.
void assign_extend_cache_locs_cpu(const at::Tensor& req_pool_indices,
                                  const at::Tensor& req_to_token,
                                  const at::Tensor& start_offset,
                                  const at::Tensor& end_offset,
                                  at::Tensor out_cache_loc,
                                  int64_t pool_len) {
  INTS(req_pool_indices);
  INTS(req_to_token);
  INTS(start_offset);
  INTS(end_offset);
  INTS(out_cache_loc);
  int64_t next = 0;
  for (int64_t b = 0; b < req_pool_indices_.size(); ++b) {
    for (int64_t i = start_offset_[b]; i < end_offset_[b]; ++i) {
      out_cache_loc_.set(next++, req_to_token_[req_pool_indices_[b] * pool_len + i]);
    }
  }
}

// out_cache_loc[b] <- the topk * num_steps slots from seq_len on.
void assign_draft_cache_locs_contiguous_cpu(const at::Tensor& req_pool_indices,
                                            const at::Tensor& req_to_token,
                                            const at::Tensor& seq_lens,
                                            at::Tensor out_cache_loc,
                                            int64_t pool_len,
                                            int64_t topk,
                                            int64_t num_steps) {
  INTS(req_pool_indices);
  INTS(req_to_token);
  INTS(seq_lens);
  INTS(out_cache_loc);
  const int64_t count = topk * num_steps;
  for (int64_t b = 0; b < req_pool_indices_.size(); ++b) {
    for (int64_t i = 0; i < count; ++i) {
      out_cache_loc_.set(b * count + i, req_to_token_[req_pool_indices_[b] * pool_len + seq_lens_[b] + i]);
    }
  }
}

// A slot table with a row a draft branch: the committed slots of its request, then the branch's own num_steps slots.
at::Tensor build_draft_decode_metadata_cpu(const at::Tensor& req_to_token,
                                           const at::Tensor& req_pool_indices,
                                           const at::Tensor& seq_lens,
                                           int64_t topk,
                                           int64_t num_steps,
                                           int64_t pool_len) {
  INTS(req_to_token);
  INTS(req_pool_indices);
  INTS(seq_lens);
  const int64_t batch = req_pool_indices_.size();
  at::Tensor table = at::empty({batch * topk, pool_len}, req_to_token.options());
  table.zero_();
  INTS(table);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t from = req_pool_indices_[b] * pool_len;
    const int64_t prefix = seq_lens_[b];
    for (int64_t k = 0; k < topk; ++k) {
      const int64_t to = (b * topk + k) * pool_len;
      for (int64_t i = 0; i < prefix; ++i) table_.set(to + i, req_to_token_[from + i]);
      for (int64_t i = 0; i < num_steps; ++i) {
        table_.set(to + prefix + i, req_to_token_[from + prefix + k * num_steps + i]);
      }
    }
  }
  return table;
}

// Positions, tree mask and child links of EAGLE trees from the draft's choices. selected_index[b, i - 1] is node i's
// index among all scored candidates; candidate c hangs below entry c / topk of parent_list (0: the root).
// tree_mask_mode 0: rows as long as the request's context plus the tree; 1: the tree's columns only.
void build_tree_kernel_efficient_cpu(const at::Tensor& parent_list,
                                     const at::Tensor& selected_index,
                                     const at::Tensor& verified_seq_len,
                                     at::Tensor tree_mask,
                                     at::Tensor positions,
                                     at::Tensor retrive_index,
                                     at::Tensor retrive_next_token,
                                     at::Tensor retrive_next_sibling,
                                     int64_t topk,
                                     int64_t depth,
                                     int64_t draft_token_num,
                                     int64_t tree_mask_mode) {
  SPEC_CHECK(tree_mask_mode == 0 || tree_mask_mode == 1, "tree_mask_mode must be 0 (FULL_MASK) or 1 (QLEN_ONLY), is ",
             tree_mask_mode);
  INTS(parent_list);
  INTS(selected_index);
  INTS(verified_seq_len);
  INTS(tree_mask);
  INTS(positions);
  INTS(retrive_index);
  INTS(retrive_next_token);
  INTS(retrive_next_sibling);
  const int64_t batch = verified_seq_len_.size();
  const int64_t n = draft_token_num;
  const int64_t parents_a_row = batch == 0 ? 0 : parent_list_.size() / batch;
  std::vector<int64_t> parent(n);
  int64_t mask_row = 0;  // where the next mask row starts
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t prefix = verified_seq_len_[b];
    parent[0] = -1;
    for (int64_t i = 1; i < n; ++i) {
      const int64_t entry = selected_index_[b * (n - 1) + i - 1] / topk;
      parent[i] = 0;
      if (entry != 0) {
        const int64_t candidate = parent_list_[b * parents_a_row + entry];
        parent[i] = -1;
        for (int64_t j = 1; j < n && parent[i] < 0; ++j) {
          if (selected_index_[b * (n - 1) + j - 1] == candidate) parent[i] = j;
        }
      }
    }
    for (int64_t i = n - 1; i >= 0; --i) {
      retrive_index_.set(b * n + i, b * n + i);
      // From the last node to the first, so that a list of children is in ascending order. A node whose parent was
      // not selected hangs nowhere: it can't be accepted.
      if (i > 0 && parent[i] >= 0) {
        const int64_t first = retrive_next_token_[b * n + parent[i]];
        if (first != -1) retrive_next_sibling_.set(b * n + i, first);
        retrive_next_token_.set(b * n + parent[i], i);
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      const int64_t tree = mask_row + (tree_mask_mode == 0 ? prefix : 0);
      for (int64_t j = 0; j < n; ++j) tree_mask_.set(tree + j, j == 0);
      int64_t level = 0;
      for (int64_t node = i; node > 0 && level < depth; node = parent[node]) {
        tree_mask_.set(tree + node, 1);
        ++level;
      }
      positions_.set(b * n + i, prefix + level);
      mask_row = tree + n;
    }
  }
}

// Positions and child links of any tree from its ancestor mask [batch, n, n]: a node's parent is its last ancestor.
void reconstruct_indices_from_tree_mask_cpu(const at::Tensor& tree_mask,
                                            const at::Tensor& verified_seq_len,
                                            at::Tensor positions,
                                            at::Tensor retrive_index,
                                            at::Tensor retrive_next_token,
                                            at::Tensor retrive_next_sibling,
                                            int64_t batch_size,
                                            int64_t draft_token_num) {
  INTS(tree_mask);
  INTS(verified_seq_len);
  INTS(positions);
  INTS(retrive_index);
  INTS(retrive_next_token);
  INTS(retrive_next_sibling);
  const int64_t n = draft_token_num;
  for (int64_t b = 0; b < batch_size; ++b) {
    std::vector<int64_t> next_child(n, -1);  // of a parent, among the nodes seen so far
    for (int64_t i = n - 1; i >= 0; --i) {
      int64_t parent = -1;
      int64_t level = 0;
      for (int64_t j = 0; j < i; ++j) {
        if (tree_mask_[(b * n + i) * n + j]) {
          parent = j;
          ++level;
        }
      }
      positions_.set(b * n + i, verified_seq_len_[b] + level);
      retrive_index_.set(b * n + i, b * n + i);
      retrive_next_token_.set(b * n + i, next_child[i]);
      retrive_next_sibling_.set(b * n + i, parent < 0 ? -1 : next_child[parent]);
      if (parent >= 0) next_child[parent] = i;
    }
  }
}

// The greedy accept walk: from the root, to the child whose token is the target's choice, until there is none.
// accept_index[b] gets the rows walked (the root first), accept_token_num[b] their number less the root, and predicts
// the target's choice at each of them. A walk is no longer than accept_index is wide.
void verify_tree_greedy_cpu(at::Tensor predicts,
                            at::Tensor accept_index,
                            at::Tensor accept_token_num,
                            const at::Tensor& candidates,
                            const at::Tensor& retrive_index,
                            const at::Tensor& retrive_next_token,
                            const at::Tensor& retrive_next_sibling,
                            const at::Tensor& target_predict) {
  SPEC_CHECK(candidates.dim() == 2 && accept_index.dim() == 2, "candidates and accept_index must be 2-D, are ",
             candidates.sizes(), " and ", accept_index.sizes());
  INTS(predicts);
  INTS(accept_index);
  INTS(accept_token_num);
  INTS(candidates);
  INTS(retrive_index);
  INTS(retrive_next_token);
  INTS(retrive_next_sibling);
  INTS(target_predict);
  const int64_t n = candidates.size(1);
  const int64_t steps = accept_index.size(1);
  for (int64_t b = 0; b < candidates.size(0); ++b) {
    int64_t node = 0;
    int64_t accepted = 0;
    int64_t row = retrive_index_[b * n];
    accept_index_.set(b * steps, row);
    for (;;) {
      const int64_t token = target_predict_[row];
      predicts_.set(row, token);
      if (accepted + 1 >= steps) break;
      int64_t child = retrive_next_token_[b * n + node];
      while (child != -1 && candidates_[b * n + child] != token) child = retrive_next_sibling_[b * n + child];
      if (child == -1) break;
      node = child;
      row = retrive_index_[b * n + node];
      accept_index_.set(b * steps + ++accepted, row);
    }
    accept_token_num_.set(b, accepted);
  }
}

// The slots of the accepted rows, compacted: skips the -1 of accept_index.
void fill_accept_out_cache_loc_cpu(const at::Tensor& accept_index,
                                   const at::Tensor& out_cache_loc,
                                   at::Tensor accept_out_cache_loc) {
  INTS(accept_index);
  INTS(out_cache_loc);
  INTS(accept_out_cache_loc);
  int64_t next = 0;
  for (int64_t i = 0; i < accept_index_.size(); ++i) {
    if (accept_index_[i] > -1) accept_out_cache_loc_.set(next++, out_cache_loc_[accept_index_[i]]);
  }
}

// The last accepted token of each request.
void fill_bonus_tokens_cpu(const at::Tensor& accept_tokens,
                           const at::Tensor& accept_lens,
                           at::Tensor bonus_tokens,
                           int64_t accept_stride) {
  INTS(accept_tokens);
  INTS(accept_lens);
  INTS(bonus_tokens);
  for (int64_t b = 0; b < accept_lens_.size(); ++b) {
    bonus_tokens_.set(b, accept_tokens_[b * accept_stride + accept_lens_[b] - 1]);
  }
}

// Shifts each request's tokens left by one and puts topk_index[b] at its end, or at row select_index[b].
void rotate_input_ids_cpu(at::Tensor input_ids,
                          const at::Tensor& extend_start_loc,
                          const at::Tensor& extend_seq_lens,
                          const at::Tensor& topk_index,
                          const std::optional<at::Tensor>& select_index) {
  INTS(input_ids);
  INTS(extend_start_loc);
  INTS(extend_seq_lens);
  INTS(topk_index);
  for (int64_t b = 0; b < extend_seq_lens_.size(); ++b) {
    const int64_t start = extend_start_loc_[b];
    const int64_t count = extend_seq_lens_[b];
    if (count == 0) continue;
    for (int64_t i = 0; i + 1 < count; ++i) input_ids_.set(start + i, input_ids_[start + i + 1]);
    const int64_t last = select_index.has_value() ? Ints(*select_index, "select_index")[b] : start + count - 1;
    input_ids_.set(last, topk_index_[b]);
  }
}

// Row tgt_loc[i] <- row src_loc[i] in every buffer (address data_ptrs[l], strides[l] bytes a row). Reads all rows
// before it writes any, so sources and targets may overlap.
void copy_all_layer_kv_cache_cpu(const at::Tensor& data_ptrs,
                                 const at::Tensor& strides,
                                 const at::Tensor& tgt_loc,
                                 const at::Tensor& src_loc) {
  SPEC_CHECK(data_ptrs.scalar_type() == at::kUInt64 && data_ptrs.is_contiguous(),
             "data_ptrs must be contiguous uint64, is ", data_ptrs.scalar_type());
  SPEC_CHECK(tgt_loc.numel() == src_loc.numel(), "tgt_loc and src_loc must be of one length, are ", tgt_loc.numel(),
             " and ", src_loc.numel());
  INTS(strides);
  INTS(tgt_loc);
  INTS(src_loc);
  const auto* pointers = static_cast<const uint64_t*>(data_ptrs.const_data_ptr());
  at::parallel_for(0, data_ptrs.numel(), 1, [&](int64_t begin, int64_t end) {
    std::vector<char> rows;
    for (int64_t l = begin; l < end; ++l) {
      char* buffer = reinterpret_cast<char*>(pointers[l]);
      const int64_t stride = strides_[l];
      rows.resize(src_loc_.size() * stride);
      for (int64_t i = 0; i < src_loc_.size(); ++i) {
        std::memcpy(rows.data() + i * stride, buffer + src_loc_[i] * stride, stride);
      }
      for (int64_t i = 0; i < tgt_loc_.size(); ++i) {
        std::memcpy(buffer + tgt_loc_[i] * stride, rows.data() + i * stride, stride);
      }
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def(
      "assign_req_to_token_pool_cpu(Tensor req_pool_indices, Tensor(a!) req_to_token, Tensor start_offset, "
      "Tensor end_offset, Tensor out_cache_loc, int pool_len) -> ()");
  m.def(
      "assign_extend_cache_locs_cpu(Tensor req_pool_indices, Tensor req_to_token, Tensor start_offset, "
      "Tensor end_offset, Tensor(a!) out_cache_loc, int pool_len) -> ()");
  m.def(
      "assign_draft_cache_locs_contiguous_cpu(Tensor req_pool_indices, Tensor req_to_token, Tensor seq_lens, "
      "Tensor(a!) out_cache_loc, int pool_len, int topk, int num_steps) -> ()");
  m.def(
      "build_draft_decode_metadata_cpu(Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, int topk, "
      "int num_steps, int pool_len) -> Tensor");
  m.def(
      "build_tree_kernel_efficient_cpu(Tensor parent_list, Tensor selected_index, Tensor verified_seq_len, "
      "Tensor(a!) tree_mask, Tensor(b!) positions, Tensor(c!) retrive_index, Tensor(d!) retrive_next_token, "
      "Tensor(e!) retrive_next_sibling, int topk, int depth, int draft_token_num, int tree_mask_mode) -> ()");
  m.def(
      "reconstruct_indices_from_tree_mask_cpu(Tensor tree_mask, Tensor verified_seq_len, Tensor(a!) positions, "
      "Tensor(b!) retrive_index, Tensor(c!) retrive_next_token, Tensor(d!) retrive_next_sibling, int batch_size, "
      "int draft_token_num) -> ()");
  m.def(
      "verify_tree_greedy_cpu(Tensor(a!) predicts, Tensor(b!) accept_index, Tensor(c!) accept_token_num, "
      "Tensor candidates, Tensor retrive_index, Tensor retrive_next_token, Tensor retrive_next_sibling, "
      "Tensor target_predict) -> ()");
  m.def(
      "fill_accept_out_cache_loc_cpu(Tensor accept_index, Tensor out_cache_loc, Tensor(a!) accept_out_cache_loc) -> "
      "()");
  m.def(
      "fill_bonus_tokens_cpu(Tensor accept_tokens, Tensor accept_lens, Tensor(a!) bonus_tokens, int accept_stride) -> "
      "()");
  m.def(
      "rotate_input_ids_cpu(Tensor(a!) input_ids, Tensor extend_start_loc, Tensor extend_seq_lens, Tensor topk_index, "
      "Tensor? select_index=None) -> ()");
  m.def("copy_all_layer_kv_cache_cpu(Tensor data_ptrs, Tensor strides, Tensor tgt_loc, Tensor src_loc) -> ()");
}

TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) {
  m.impl("assign_req_to_token_pool_cpu", assign_req_to_token_pool_cpu);
  m.impl("assign_extend_cache_locs_cpu", assign_extend_cache_locs_cpu);
  m.impl("assign_draft_cache_locs_contiguous_cpu", assign_draft_cache_locs_contiguous_cpu);
  m.impl("build_draft_decode_metadata_cpu", build_draft_decode_metadata_cpu);
  m.impl("build_tree_kernel_efficient_cpu", build_tree_kernel_efficient_cpu);
  m.impl("reconstruct_indices_from_tree_mask_cpu", reconstruct_indices_from_tree_mask_cpu);
  m.impl("verify_tree_greedy_cpu", verify_tree_greedy_cpu);
  m.impl("fill_accept_out_cache_loc_cpu", fill_accept_out_cache_loc_cpu);
  m.impl("fill_bonus_tokens_cpu", fill_bonus_tokens_cpu);
  m.impl("rotate_input_ids_cpu", rotate_input_ids_cpu);
  m.impl("copy_all_layer_kv_cache_cpu", copy_all_layer_kv_cache_cpu);
}

}  // namespace kdtree
