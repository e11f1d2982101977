// The forward kernels that run on the GPU, on the checked cpu machine.
#define KITTENS_MACHINE checked
#define KITTENS_CHECKED 1
#include "../launch_forward.h"
#include "forward.h"

namespace kittens_torch {

forward_launcher find_forward_checked(element_type type, int configuration, bool interval) {
  if (configuration < 0 || configuration >= forward_count_sm90) return nullptr;
  switch (type) {
    case element_type::bfloat16:
      return find_forward_launcher<kittens::bf16, forward_rows_sm90, forward_count_sm90>(configuration, interval);
    case element_type::float16:
      return find_forward_launcher<kittens::fp16, forward_rows_sm90, forward_count_sm90>(configuration, interval);
    case element_type::float32:
      return find_forward_launcher<float, forward_rows_sm90, forward_count_sm90>(configuration, interval);
    case element_type::float64:
      break;
  }
  return nullptr;
}

forward_launcher find_split_forward_checked(element_type type, int configuration) {
  switch (type) {
    case element_type::bfloat16:
      return find_split_launcher<kittens::bf16, forward_rows_sm90_split, forward_count_sm90_split>(configuration);
    case element_type::float16:
      return find_split_launcher<kittens::fp16, forward_rows_sm90_split, forward_count_sm90_split>(configuration);
    case element_type::float32:
      return find_split_launcher<float, forward_rows_sm90_split, forward_count_sm90_split>(configuration);
    case element_type::float64:
      break;
  }
  return nullptr;
}

}  // namespace kittens_torch
