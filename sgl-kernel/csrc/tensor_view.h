// SPDX-License-Identifier: Apache-2.0
// What argument checks need to know of a tensor, from whichever of torch's ABIs it comes.
#pragma once

#include <array>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace kdtree {

enum class Type { bf16, fp16, fp32, int32, int64, uint8, other };

inline const char* name_of(Type type) {
  constexpr const char* names[] = {"bfloat16", "float16", "float32", "int32", "int64", "uint8", "another type"};
  return names[static_cast<int>(type)];
}

// What there is to know about a tensor of up to three dimensions, from whichever of torch's ABIs it comes.
struct TensorView {
  Type type;
  int64_t dims;
  std::array<int64_t, 3> sizes, strides;

  // Describes a tensor of ATen or of torch's stable ABI. A tensor of more dimensions keeps its number of them and the
  // first three sizes; no argument has so many, so the checks refuse it.
  template <class Tensor>
  static TensorView of(const Tensor& tensor, Type type) {
    TensorView view{type, tensor.dim(), {1, 1, 1}, {1, 1, 1}};
    for (int64_t i = 0; i < view.dims && i < 3; ++i) {
      view.sizes[i] = tensor.size(i);
      view.strides[i] = tensor.stride(i);
    }
    return view;
  }

  bool contiguous() const {
    int64_t expected = 1;
    for (int64_t i = dims - 1; i >= 0; --i) {
      if (sizes[i] != 1 && strides[i] != expected) return false;
      expected *= sizes[i];
    }
    return true;
  }
};

inline std::ostream& operator<<(std::ostream& out, const TensorView& view) {
  out << name_of(view.type) << " [";
  for (int64_t i = 0; i < view.dims; ++i) out << (i > 0 ? ", " : "") << (i < 3 ? std::to_string(view.sizes[i]) : "...");
  return out << "]" << (view.contiguous() ? "" : " (not contiguous)");
}

// Raises std::runtime_error (Python: RuntimeError) with the op's name and the parts of the message joined, unless ok.
template <class... Parts>
void require_for(const char* op, bool ok, const Parts&... parts) {
  if (ok) return;
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace kdtree
