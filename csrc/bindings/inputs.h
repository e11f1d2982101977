// The operators' query, key and value: what is allowed, and how a kernel sees a tensor.
#pragma once
#include <cmath>

#include "../attention/plan.h"
#include "memory.h"

namespace kittens_torch {

inline constexpr int64_t longest = int64_t(1) << 29;  // positions and their sums stay within 32 bits
inline constexpr int64_t tma_alignment = 16;          // bytes: base addresses and strides of a tensor map

inline element_type type_of(const Tensor& t, bool cuda) {
  using torch::headeronly::ScalarType;
  switch (t.scalar_type()) {
    case ScalarType::BFloat16: return element_type::bfloat16;
    case ScalarType::Half: return element_type::float16;
    case ScalarType::Float: check(!cuda, "query: float32 on CUDA has no kernel; bfloat16 and float16 have"); return element_type::float32;
    case ScalarType::Double: check(!cuda, "query: float64 on CUDA has no kernel; bfloat16 and float16 have"); return element_type::float64;
    default: check(false, "query: its dtype has no kernel; bfloat16, float16, and on the CPU float32 and float64 have");
  }
  return element_type::float32;
}

inline void check_inputs(const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t corner, int64_t window_left,
                         int64_t window_right) {
  check(query.dim() == 4 && key.dim() == 4 && value.dim() == 4, "query, key and value must have 4 dimensions (batch, head, row, column), got ",
        query.dim(), ", ", key.dim(), " and ", value.dim());
  check(query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type(),
        "query, key and value must have the same dtype");
  check(query.is_on_device_of(key) && query.is_on_device_of(value), "query, key and value must be on the same device");
  const int64_t heads = query.size(1), heads_k = key.size(1), head_dim = query.size(3), value_dim = value.size(3);
  check(key.size(0) == query.size(0) && value.size(0) == query.size(0), "key and value must have the query's batch size ", query.size(0),
        ", got ", key.size(0), " and ", value.size(0));
  check(value.size(1) == heads_k && value.size(2) == key.size(2), "value ", shape_text{value}, " must have the heads and rows of key ",
        shape_text{key});
  check(heads_k > 0 ? heads % heads_k == 0 : heads == 0, "key: its ", heads_k, " heads must divide the query's ", heads);
  check(key.size(3) == head_dim, "key: its head_dim ", key.size(3), " must be the query's ", head_dim);
  check(head_dim >= 1 && head_dim <= 256 && value_dim >= 1 && value_dim <= 256, "head_dim ", head_dim, " and value_dim ", value_dim,
        " must be from 1 to 256");
  check(query.size(2) < longest && key.size(2) < longest, "lengths ", query.size(2), " and ", key.size(2), " must be below 2^29");
  check(std::isfinite(scale) && scale > 0, "scale must be finite and positive here, got ", scale);
  check(corner >= 0 && corner <= 2, "corner must be 0 (none), 1 (upper_left) or 2 (lower_right), got ", corner);
  check(window_left >= -1 && window_right >= -1, "window sides must be -1 (open) or a number of keys, got ", window_left, " and ",
        window_right);
}

// A tensor as a kernel sees it, and the memory of the copy, where it is one.
struct kernel_input {
  kittens::tensor_view view;
  Tensor copy{};
};

// A dimension of size 1 is never stepped over; its stride may be anything, and TMA wants a multiple of 16 bytes.
inline shape4 usable_strides(const Tensor& t, int64_t element_bytes) {
  shape4 strides;
  for (int d = 0; d < 4; d++) strides[d] = d < 3 && t.size(d) == 1 ? tma_alignment / element_bytes * ((t.size(3) + 15) / 16 * 2) : t.stride(d);
  if (t.size(3) == 1) strides[3] = 1;
  return strides;
}

inline bool fits_tma(const Tensor& t, const shape4& strides, int64_t element_bytes) {
  if (strides[3] != 1 || reinterpret_cast<uintptr_t>(t.data_ptr()) % tma_alignment != 0) return false;
  for (int d = 0; d < 3; d++)
    if (strides[d] * element_bytes % tma_alignment != 0) return false;
  return true;
}

// Memory with rows that start on 16 bytes, in the order of `like`; the tensor is its first `columns` columns.
inline kernel_input aligned(const Tensor& like, const shape4& sizes, int64_t element_bytes) {
  const int64_t step = tma_alignment / element_bytes;
  shape4 padded = sizes;
  padded[3] = (sizes[3] + step - 1) / step * step;
  const shape4 strides = strides_in_order_of(like, padded);
  Tensor part = empty_strided(padded.data(), strides.data(), 4, like.scalar_type(), like);
  if (padded[3] != sizes[3]) part = with_sizes(part, sizes);
  return {view_of(part, usable_strides(part, element_bytes)), std::move(part)};
}

inline kernel_input input_for_tma(const Tensor& t, int64_t element_bytes) {
  const shape4 strides = usable_strides(t, element_bytes);
  if (fits_tma(t, strides, element_bytes)) return {view_of(t, strides)};
  kernel_input input = aligned(t, t.sizes(), element_bytes);
  copy(input.copy, t);
  return input;
}

inline kernel_input as_is(const Tensor& t) { return {view_of(t, t.strides())}; }

inline forward_problem problem_of(machine_kind machine, const Tensor& query, const Tensor& key, const Tensor& value, int64_t corner,
                                  int64_t window_left, int64_t window_right, int processors) {
  const auto side = [](int64_t n) { return static_cast<int>(n < window_open ? n : -1); };
  return {machine,       type_of(query, machine == machine_kind::sm90),
          query.size(0), query.size(1),
          key.size(1),   query.size(2),
          key.size(2),   query.size(3),
          value.size(3), static_cast<int>(corner),
          side(window_left), side(window_right),
          processors};
}

}  // namespace kittens_torch
