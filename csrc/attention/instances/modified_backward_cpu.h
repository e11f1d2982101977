// What the backward instances with modifiers of the cpu machine share: a row of backward_rows_cpu as a launcher.
#pragma once
#include "../launch_backward.h"
#include "backward.h"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

inline backward_launcher modified_backward_on_cpu(element_type type, int configuration) {
  switch (type) {
    case element_type::bfloat16:
      return find_modified_backward_launcher<kittens::bf16, backward_rows_cpu, backward_count_cpu>(configuration);
    case element_type::float16:
      return find_modified_backward_launcher<kittens::fp16, backward_rows_cpu, backward_count_cpu>(configuration);
    case element_type::float32:
      return find_modified_backward_launcher<float, backward_rows_cpu, backward_count_cpu>(configuration);
    case element_type::float64:
      return find_modified_backward_launcher<double, backward_rows_cpu, backward_count_cpu>(configuration);
  }
  return nullptr;
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
