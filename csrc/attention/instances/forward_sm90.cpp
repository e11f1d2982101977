#ifdef KITTENS_CUDA

#include "forward_sm90.h"

#include "forward.h"

namespace kittens_torch {

forward_launcher find_forward_sm90(element_type type, int configuration, bool interval) {
  return type == element_type::bfloat16 ? forward_sm90_bfloat16(configuration, interval) : forward_sm90_float16(configuration, interval);
}

forward_launcher find_split_forward_sm90(element_type type, int configuration) {
  return type == element_type::bfloat16 ? split_forward_sm90_bfloat16(configuration) : split_forward_sm90_float16(configuration);
}

forward_launcher find_modified_forward_sm90(element_type type, int configuration) {
  return type == element_type::bfloat16 ? modified_forward_sm90_bfloat16(configuration) : modified_forward_sm90_float16(configuration);
}

}  // namespace kittens_torch

#endif
