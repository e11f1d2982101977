// One way to refuse: a Python RuntimeError whose text names the argument, its value and what is allowed.
#pragma once
#include <torch/headeronly/util/Exception.h>

#include <sstream>
#include <stdexcept>
#include <string>

#include "tensor.h"

namespace kittens_torch {

// The shape of a tensor, made a text only where it is printed.
struct shape_text {
  const Tensor& tensor;
};

inline std::ostream& operator<<(std::ostream& stream, const shape_text& shape) {
  int64_t* sizes = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(shape.tensor.get(), &sizes));
  stream << "(";
  for (int64_t i = 0; i < shape.tensor.dim(); i++) stream << (i ? ", " : "") << sizes[i];
  return stream << ")";
}

template <class... Parts> [[noreturn, gnu::noinline, gnu::cold]] void refuse(const Parts&... parts) {
  std::ostringstream stream;
  (stream << "kittens_torch: " << ... << parts);
  throw std::runtime_error(stream.str());
}

// Throws with the parts joined unless the condition holds.
template <class... Parts> void check(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]]
    refuse(parts...);
}

}  // namespace kittens_torch
