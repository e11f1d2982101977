// Chooses among the instruction sets the forward kernels of the cpu machine were compiled for.
#include "../../kittens/cpu/features.h"
#include "forward.h"

namespace kittens_torch {

forward_launcher find_forward_cpu(element_type type, int configuration) {
#if defined(__x86_64__)
  using kittens::cpu_flavour;
  using kittens::runs_here;
  if (type == element_type::bfloat16 && runs_here(cpu_flavour::amx)) return forward_cpu_amx(type, configuration);
  if (runs_here(cpu_flavour::avx512)) return forward_cpu_avx512(type, configuration);
  if (runs_here(cpu_flavour::avx2)) return forward_cpu_avx2(type, configuration);
#endif
  return forward_cpu_generic(type, configuration);
}

forward_launcher find_split_forward_cpu(element_type type, int configuration) {
#if defined(__x86_64__)
  using kittens::cpu_flavour;
  using kittens::runs_here;
  if (type == element_type::bfloat16 && runs_here(cpu_flavour::amx)) return split_forward_cpu_amx(type, configuration);
  if (runs_here(cpu_flavour::avx512)) return split_forward_cpu_avx512(type, configuration);
  if (runs_here(cpu_flavour::avx2)) return split_forward_cpu_avx2(type, configuration);
#endif
  return split_forward_cpu_generic(type, configuration);
}

forward_launcher find_modified_forward_cpu(element_type type, int configuration) {
#if defined(__x86_64__)
  using kittens::cpu_flavour;
  using kittens::runs_here;
  if (type == element_type::bfloat16 && runs_here(cpu_flavour::amx)) return modified_forward_cpu_amx(type, configuration);
  if (runs_here(cpu_flavour::avx512)) return modified_forward_cpu_avx512(type, configuration);
  if (runs_here(cpu_flavour::avx2)) return modified_forward_cpu_avx2(type, configuration);
#endif
  return modified_forward_cpu_generic(type, configuration);
}

}  // namespace kittens_torch
