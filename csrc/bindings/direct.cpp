// The forward op without torch's dispatcher: tensors by their memory, the output made by the caller.
#include "direct.h"

#include "forward.h"
#include "memory.h"

namespace kittens_torch {
namespace {

Tensor borrow(const direct_tensor& t) {
  using torch::headeronly::ScalarType;
  constexpr ScalarType types[] = {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float, ScalarType::Double};
  const bool cuda = t.cuda_device >= 0;
  return Tensor::borrowed(t.data, 4, t.sizes, t.strides, types[t.type], cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(), t.cuda_device);
}

}  // namespace
}  // namespace kittens_torch

extern "C" {

[[gnu::visibility("default")]] bool kittens_torch_direct_layout(const direct_tensor& query, const direct_tensor& value, int64_t (&strides)[4]) {
  using namespace kittens_torch;
  const Tensor q = borrow(query);
  const shape4 sizes{q.size(0), q.size(1), q.size(2), value.sizes[3]}, wanted = strides_in_order_of(q, sizes);
  std::copy(wanted.begin(), wanted.end(), strides);
  bool same = sizes[3] == q.size(3);
  for (int d = 0; d < 4; d++) same = same && (q.size(d) == 1 || wanted[d] == q.stride(d));
  return same;
}

[[gnu::visibility("default")]] bool kittens_torch_direct_forward(const direct_tensor& query, const direct_tensor& key, const direct_tensor& value,
                                                                 const direct_tensor& output, double scale, int64_t corner) {
  using namespace kittens_torch;
  try {
    return forward_in_place(borrow(query), borrow(key), borrow(value), borrow(output), scale == 0 ? std::nullopt : std::optional(scale), corner);
  } catch (const std::exception&) {
    return false;  // the op meets the same, and says it
  }
}
}
