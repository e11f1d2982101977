// The forward kernels with modifiers that run on the GPU, on the checked cpu machine.
#define KITTENS_MACHINE checked
#define KITTENS_CHECKED 1
#include "../launch_forward.h"
#include "forward.h"

namespace kittens_torch {

forward_launcher find_modified_forward_checked(element_type type, int configuration) {
  switch (type) {
    case element_type::bfloat16:
      return find_modified_launcher<kittens::bf16, forward_rows_sm90_modified, forward_count_sm90_modified>(configuration);
    case element_type::float16:
      return find_modified_launcher<kittens::fp16, forward_rows_sm90_modified, forward_count_sm90_modified>(configuration);
    case element_type::float32:
      return find_modified_launcher<float, forward_rows_sm90_modified, forward_count_sm90_modified>(configuration);
    case element_type::float64:
      break;
  }
  return nullptr;
}

}  // namespace kittens_torch
