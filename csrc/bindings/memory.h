// Tensors from torch's allocator, and the layouts that kernels take.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <array>

#include "../kittens/core/shapes.h"
#include "checks.h"

namespace kittens_torch {

inline Tensor empty_strided(const int64_t* sizes, const int64_t* strides, int64_t dims, torch::headeronly::ScalarType type, const Tensor& like) {
  const int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes, strides, code, like.device_type(), like.get_device_index(), &handle));
  return Tensor(handle);
}

inline Tensor empty_contiguous(std::initializer_list<int64_t> sizes, torch::headeronly::ScalarType type, const Tensor& like) {
  std::array<int64_t, 4> strides{};
  int64_t stride = 1;
  for (int i = static_cast<int>(sizes.size()) - 1; i >= 0; i--) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes.begin()[i], 1);
  }
  return empty_strided(sizes.begin(), strides.data(), static_cast<int64_t>(sizes.size()), type, like);
}

// The first rows and columns of a tensor of 4 dimensions: a view.
inline Tensor with_sizes(const Tensor& t, const shape4& sizes) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_as_strided(t.get(), sizes.data(), t.strides().data(), &handle));
  return Tensor(handle);
}

// Dense strides for (batch, head, row, column) in the order in which `like` keeps its first `ordered` dimensions; what remains is innermost. A
// dimension of size 1 or stride 0 says nothing about the order and goes outermost; if what remains is in natural order, the strides are contiguous.
inline shape4 strides_in_order_of(const Tensor& like, const shape4& sizes, int ordered = 3) {
  std::array<int, 4> order{0, 1, 2, 3};
  const auto key = [&](int d) { return like.size(d) == 1 || like.stride(d) == 0 ? INT64_MAX : like.stride(d); };
  std::stable_sort(order.begin(), order.begin() + ordered, [&](int a, int b) { return key(a) > key(b); });
  std::array<int, 4> ranked;
  int n = 0;
  for (int i = 0; i < ordered; i++)
    if (key(order[i]) != INT64_MAX) ranked[n++] = order[i];
  if (std::is_sorted(ranked.begin(), ranked.begin() + n)) order = {0, 1, 2, 3};
  shape4 strides;
  int64_t stride = 1;
  for (int i = 3; i >= 0; i--) {
    strides[order[i]] = stride;
    stride *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return strides;
}

inline kittens::tensor_view view_of(const Tensor& t, const shape4& strides) {
  kittens::tensor_view v{t.data_ptr(), {}, {}};
  for (int d = 0; d < 4; d++) {
    v.size[d] = t.size(d);
    v.stride[d] = strides[d];
  }
  return v;
}

}  // namespace kittens_torch
