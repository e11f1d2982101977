// The backward kernels of the cpu machine for any processor.
#define KITTENS_MACHINE cpu_generic
#include "backward_cpu.h"

namespace kittens_torch {

backward_launcher backward_cpu_generic(element_type type, int configuration) {
  return backward_on_cpu(type, configuration);
}

}  // namespace kittens_torch
