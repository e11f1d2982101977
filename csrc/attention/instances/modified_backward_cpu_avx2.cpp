// The backward kernels with modifiers of the cpu machine for AVX2, FMA and F16C (setup.py passes the flags).
#define KITTENS_MACHINE cpu_avx2
#include "modified_backward_cpu.h"

namespace kittens_torch {

backward_launcher modified_backward_cpu_avx2(element_type type, int configuration) {
  return modified_backward_on_cpu(type, configuration);
}

}  // namespace kittens_torch
