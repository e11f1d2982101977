// The backward kernels with modifiers of the cpu machine for AMX: bfloat16 alone (setup.py passes the flags).
#define KITTENS_MACHINE cpu_amx
#include "modified_backward_cpu.h"

namespace kittens_torch {

backward_launcher modified_backward_cpu_amx(element_type type, int configuration) {
  return type == element_type::bfloat16 ? find_modified_backward_launcher<kittens::bf16, backward_rows_cpu, backward_count_cpu>(configuration) : nullptr;
}

}  // namespace kittens_torch
