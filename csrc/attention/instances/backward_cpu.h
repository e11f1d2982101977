// What the backward instances of the cpu machine share: a row of backward_rows_cpu as a launcher.
#pragma once
#include "../launch_backward.h"
#include "backward.h"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

template <class T> backward_launcher backward_on_cpu(int configuration, bool modified) {
  return modified ? find_backward_launcher<T, backward_rows_cpu, backward_count_cpu, true>(configuration)
                  : find_backward_launcher<T, backward_rows_cpu, backward_count_cpu>(configuration);
}

inline backward_launcher backward_on_cpu(element_type type, int configuration, bool modified) {
  switch (type) {
    case element_type::bfloat16:
      return backward_on_cpu<kittens::bf16>(configuration, modified);
    case element_type::float16:
      return backward_on_cpu<kittens::fp16>(configuration, modified);
    case element_type::float32:
      return backward_on_cpu<float>(configuration, modified);
    case element_type::float64:
      return backward_on_cpu<double>(configuration, modified);
  }
  return nullptr;
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
