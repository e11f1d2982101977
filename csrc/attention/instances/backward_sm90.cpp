#ifdef KITTENS_CUDA

#include "backward_sm90.h"

#include "backward.h"

namespace kittens_torch {

backward_launcher find_backward_sm90(element_type type, int configuration, bool modified) {
  return type == element_type::bfloat16 ? backward_sm90_bfloat16(configuration, modified) : backward_sm90_float16(configuration, modified);
}

}  // namespace kittens_torch

#endif
