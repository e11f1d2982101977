// The backward kernels that run on the GPU, on the checked cpu machine.
#define KITTENS_MACHINE checked
#define KITTENS_CHECKED 1
#include "../launch_backward.h"
#include "backward.h"

namespace kittens_torch {

template <class T> backward_launcher on_checked(int configuration, bool modified) {
  return modified ? find_backward_launcher<T, backward_rows_modified_sm90, backward_count_modified_sm90, true>(configuration)
                  : find_backward_launcher<T, backward_rows_sm90, backward_count_sm90>(configuration);
}

backward_launcher find_backward_checked(element_type type, int configuration, bool modified) {
  switch (type) {
    case element_type::bfloat16:
      return on_checked<kittens::bf16>(configuration, modified);
    case element_type::float16:
      return on_checked<kittens::fp16>(configuration, modified);
    case element_type::float32:
      return on_checked<float>(configuration, modified);
    case element_type::float64:
      break;
  }
  return nullptr;
}

}  // namespace kittens_torch
