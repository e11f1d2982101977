#ifdef KITTENS_CUDA

#include "backward_sm90.h"

#include "backward.h"

namespace kittens_torch {

backward_launcher find_backward_sm90(element_type type, int configuration) {
  return type == element_type::bfloat16 ? backward_sm90_bfloat16(configuration) : backward_sm90_float16(configuration);
}

backward_launcher find_modified_backward_sm90(element_type type, int configuration) {
  return type == element_type::bfloat16 ? modified_backward_sm90_bfloat16(configuration) : modified_backward_sm90_float16(configuration);
}

}  // namespace kittens_torch

#endif
