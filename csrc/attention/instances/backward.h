// Where the compiled backward kernels are found. A launcher is null where there is no such kernel.
#pragma once
#include "../backward_params.h"

namespace kittens_torch {

// A row of backward_rows_sm90 on the GPU (bfloat16, float16).
backward_launcher find_backward_sm90(element_type, int configuration);

// A row of backward_rows_cpu on the fastest instruction set of this processor; every element type.
backward_launcher find_backward_cpu(element_type, int configuration);

// A row of backward_rows_sm90, what users run on the GPU, on the checked cpu machine (bfloat16, float16, float32).
backward_launcher find_backward_checked(element_type, int configuration);

// The same of the modified class (modifiers.h): rows of backward_rows_sm90_modified, of backward_rows_cpu, and the former on the checked machine.
backward_launcher find_modified_backward_sm90(element_type, int configuration);
backward_launcher find_modified_backward_cpu(element_type, int configuration);
backward_launcher find_modified_backward_checked(element_type, int configuration);

// One instruction set each, every element type (AMX: bfloat16). Callers make sure that the processor has it.
backward_launcher backward_cpu_generic(element_type, int configuration);
backward_launcher backward_cpu_avx2(element_type, int configuration);
backward_launcher backward_cpu_avx512(element_type, int configuration);
backward_launcher backward_cpu_amx(element_type, int configuration);
backward_launcher modified_backward_cpu_generic(element_type, int configuration);
backward_launcher modified_backward_cpu_avx2(element_type, int configuration);
backward_launcher modified_backward_cpu_avx512(element_type, int configuration);
backward_launcher modified_backward_cpu_amx(element_type, int configuration);

}  // namespace kittens_torch
