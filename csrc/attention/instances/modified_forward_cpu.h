// What the forward instances with modifiers of the cpu machine share: a row of forward_rows_cpu as a launcher.
#pragma once
#include "../launch_forward.h"
#include "forward.h"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

inline forward_launcher modified_forward_on_cpu(element_type type, int configuration) {
  switch (type) {
    case element_type::bfloat16:
      return find_modified_launcher<kittens::bf16, forward_rows_cpu, forward_count_cpu>(configuration);
    case element_type::float16:
      return find_modified_launcher<kittens::fp16, forward_rows_cpu, forward_count_cpu>(configuration);
    case element_type::float32:
      return find_modified_launcher<float, forward_rows_cpu, forward_count_cpu>(configuration);
    case element_type::float64:
      return find_modified_launcher<double, forward_rows_cpu, forward_count_cpu>(configuration);
  }
  return nullptr;
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
