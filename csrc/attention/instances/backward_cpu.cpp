// Chooses among the instruction sets the backward kernels of the cpu machine were compiled for.
#include "../../kittens/cpu/features.h"
#include "backward.h"

namespace kittens_torch {

backward_launcher find_backward_cpu(element_type type, int configuration) {
#if defined(__x86_64__)
  using kittens::cpu_flavour;
  using kittens::runs_here;
  if (type == element_type::bfloat16 && runs_here(cpu_flavour::amx)) return backward_cpu_amx(type, configuration);
  if (runs_here(cpu_flavour::avx512)) return backward_cpu_avx512(type, configuration);
  if (runs_here(cpu_flavour::avx2)) return backward_cpu_avx2(type, configuration);
#endif
  return backward_cpu_generic(type, configuration);
}

backward_launcher find_modified_backward_cpu(element_type type, int configuration) {
#if defined(__x86_64__)
  using kittens::cpu_flavour;
  using kittens::runs_here;
  if (type == element_type::bfloat16 && runs_here(cpu_flavour::amx)) return modified_backward_cpu_amx(type, configuration);
  if (runs_here(cpu_flavour::avx512)) return modified_backward_cpu_avx512(type, configuration);
  if (runs_here(cpu_flavour::avx2)) return modified_backward_cpu_avx2(type, configuration);
#endif
  return modified_backward_cpu_generic(type, configuration);
}

}  // namespace kittens_torch
