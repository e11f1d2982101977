// Where the compiled backward kernels are found. A launcher is null where there is no such kernel. The modified class (modifiers.h) has kernels and,
// on the GPU, a table of its own.
#pragma once
#include "../backward_params.h"

namespace kittens_torch {

// A row of backward_rows_sm90, or of backward_rows_modified_sm90, on the GPU (bfloat16, float16).
backward_launcher find_backward_sm90(element_type, int configuration, bool modified);

// A row of backward_rows_cpu on the fastest instruction set of this processor; every element type.
backward_launcher find_backward_cpu(element_type, int configuration, bool modified);

// The same rows, what users run on the GPU, on the checked cpu machine (bfloat16, float16, float32).
backward_launcher find_backward_checked(element_type, int configuration, bool modified);

// One instruction set each, every element type (AMX: bfloat16). Callers make sure that the processor has it.
backward_launcher backward_cpu_generic(element_type, int configuration, bool modified);
backward_launcher backward_cpu_avx2(element_type, int configuration, bool modified);
backward_launcher backward_cpu_avx512(element_type, int configuration, bool modified);
backward_launcher backward_cpu_amx(element_type, int configuration, bool modified);

}  // namespace kittens_torch
