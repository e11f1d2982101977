// What the forward instances of the cpu machine share: a row of forward_rows_cpu as a launcher.
#pragma once
#include "../launch_forward.h"
#include "forward.h"

namespace kittens_torch {
inline namespace KITTENS_MACHINE {

template <class T, int... Row> forward_launcher forward_on_cpu(int configuration, std::integer_sequence<int, Row...>) {
  constexpr forward_launcher launchers[] = {&launch_forward<forward_config<T, forward_rows_cpu, Row, mask_class::interval>>...};
  return configuration >= 0 && configuration < forward_count_cpu ? launchers[configuration] : nullptr;
}

template <class T> forward_launcher forward_on_cpu(int configuration) {
  return forward_on_cpu<T>(configuration, std::make_integer_sequence<int, forward_count_cpu>{});
}

inline forward_launcher forward_on_cpu(element_type type, int configuration) {
  switch (type) {
    case element_type::bfloat16:
      return forward_on_cpu<kittens::bf16>(configuration);
    case element_type::float16:
      return forward_on_cpu<kittens::fp16>(configuration);
    case element_type::float32:
      return forward_on_cpu<float>(configuration);
    case element_type::float64:
      return forward_on_cpu<double>(configuration);
  }
  return nullptr;
}

template <class T> forward_launcher split_forward_on_cpu(int configuration) {
  return find_split_launcher<T, forward_rows_cpu_split, forward_count_cpu_split>(configuration);
}

inline forward_launcher split_forward_on_cpu(element_type type, int configuration) {
  switch (type) {
    case element_type::bfloat16:
      return split_forward_on_cpu<kittens::bf16>(configuration);
    case element_type::float16:
      return split_forward_on_cpu<kittens::fp16>(configuration);
    case element_type::float32:
      return split_forward_on_cpu<float>(configuration);
    case element_type::float64:
      return split_forward_on_cpu<double>(configuration);
  }
  return nullptr;
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens_torch
