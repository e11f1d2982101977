// The forward kernels of the cpu machine for any processor.
#define KITTENS_MACHINE cpu_generic
#include "forward_cpu.h"

namespace kittens_torch {

forward_launcher forward_cpu_generic(element_type type, int configuration) {
  return forward_on_cpu(type, configuration);
}

forward_launcher split_forward_cpu_generic(element_type type, int configuration) { return split_forward_on_cpu(type, configuration); }

}  // namespace kittens_torch
