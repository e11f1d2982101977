// The backward kernels with modifiers that run on the GPU, on the checked cpu machine.
#define KITTENS_MACHINE checked
#define KITTENS_CHECKED 1
#include "../launch_backward.h"
#include "backward.h"

namespace kittens_torch {

backward_launcher find_modified_backward_checked(element_type type, int configuration) {
  switch (type) {
    case element_type::bfloat16:
      return find_modified_backward_launcher<kittens::bf16, backward_rows_sm90_modified, backward_count_sm90_modified>(configuration);
    case element_type::float16:
      return find_modified_backward_launcher<kittens::fp16, backward_rows_sm90_modified, backward_count_sm90_modified>(configuration);
    case element_type::float32:
      return find_modified_backward_launcher<float, backward_rows_sm90_modified, backward_count_sm90_modified>(configuration);
    case element_type::float64:
      break;
  }
  return nullptr;
}

}  // namespace kittens_torch
