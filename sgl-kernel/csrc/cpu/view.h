// SPDX-License-Identifier: Apache-2.0
// Views of ATen's tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "../tensor_view.h"

namespace kdtree {

inline TensorView view(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16: return TensorView::of(tensor, Type::bf16);
    case at::kHalf: return TensorView::of(tensor, Type::fp16);
    case at::kFloat: return TensorView::of(tensor, Type::fp32);
    case at::kInt: return TensorView::of(tensor, Type::int32);
    case at::kLong: return TensorView::of(tensor, Type::int64);
    case at::kByte: return TensorView::of(tensor, Type::uint8);
    default: return TensorView::of(tensor, Type::other);
  }
}

inline std::optional<TensorView> view(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? std::optional(view(*tensor)) : std::nullopt;
}

}  // namespace kdtree
