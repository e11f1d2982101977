// What the backward instances of the cpu machine share: a row of backward_rows_cpu as a launcher.
#pragma once
#include "../launch_backward.h"
#include "backward.h"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

template <class T> backward_launcher backward_on_cpu(int configuration) {
  if (configuration < 0 || configuration >= backward_count_cpu) return nullptr;
  return find_backward_launcher<T, backward_rows_cpu, backward_count_cpu>(configuration);
}

inline backward_launcher backward_on_cpu(element_type type, int configuration) {
  switch (type) {
    case element_type::bfloat16:
      return backward_on_cpu<kittens::bf16>(configuration);
    case element_type::float16:
      return backward_on_cpu<kittens::fp16>(configuration);
    case element_type::float32:
      return backward_on_cpu<float>(configuration);
    case element_type::float64:
      return backward_on_cpu<double>(configuration);
  }
  return nullptr;
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
