// The forward kernels with modifiers of the cpu machine for AVX-512 F, BW, DQ and VL (setup.py passes the flags).
#define KITTENS_MACHINE cpu_avx512
#include "modified_forward_cpu.h"

namespace kittens_torch {

forward_launcher modified_forward_cpu_avx512(element_type type, int configuration) {
  return modified_forward_on_cpu(type, configuration);
}

}  // namespace kittens_torch
