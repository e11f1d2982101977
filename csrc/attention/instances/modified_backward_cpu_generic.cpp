// The backward kernels with modifiers of the cpu machine for any processor.
#define KITTENS_MACHINE cpu_generic
#include "modified_backward_cpu.h"

namespace kittens_torch {

backward_launcher modified_backward_cpu_generic(element_type type, int configuration) {
  return modified_backward_on_cpu(type, configuration);
}

}  // namespace kittens_torch
