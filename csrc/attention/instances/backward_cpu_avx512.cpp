// The backward kernels of the cpu machine for AVX-512 F, BW, DQ and VL (setup.py passes the flags).
#define KITTENS_MACHINE cpu_avx512
#include "backward_cpu.h"

namespace kittens_torch {

backward_launcher backward_cpu_avx512(element_type type, int configuration) {
  return backward_on_cpu(type, configuration);
}

}  // namespace kittens_torch
