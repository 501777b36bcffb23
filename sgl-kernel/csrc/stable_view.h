// SPDX-License-Identifier: Apache-2.0
// Views of the tensors of torch's stable ABI, and what else that ABI gives a CUDA op.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "tensor_view.h"

namespace kdtree {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline TensorView view(const Tensor& tensor) {
  const auto type = [&] {
    switch (tensor.scalar_type()) {
      case ScalarType::BFloat16: return Type::bf16;
      case ScalarType::Half: return Type::fp16;
      case ScalarType::Float: return Type::fp32;
      case ScalarType::Int: return Type::int32;
      case ScalarType::Long: return Type::int64;
      case ScalarType::Byte: return Type::uint8;
      default: return Type::other;
    }
  }();
  return TensorView::of(tensor, type);
}

inline std::optional<TensorView> view(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? std::optional(view(*tensor)) : std::nullopt;
}

inline void* data_pointer(const Tensor& tensor) {
  void* data = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
  return data;
}

// A cudaStream_t.
inline void* current_stream(int device) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

}  // namespace kdtree
