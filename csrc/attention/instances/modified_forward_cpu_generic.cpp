// The forward kernels with modifiers of the cpu machine for any processor.
#define KITTENS_MACHINE cpu_generic
#include "modified_forward_cpu.h"

namespace kittens_torch {

forward_launcher modified_forward_cpu_generic(element_type type, int configuration) {
  return modified_forward_on_cpu(type, configuration);
}

}  // namespace kittens_torch
