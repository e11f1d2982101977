// Little kernels on the tile vocabulary that are right, unless they are told to have one named defect. They run on the
// checked machine.
#pragma once
#define KITTENS_MACHINE checked
#define KITTENS_CHECKED 1
#include <cstring>

#include "kittens/kittens.h"

struct defect {
  const char* name;
  bool is(const char* other) const { return std::strcmp(name, other) == 0; }
};

inline kittens::tensor_view matrix(float* data, int64_t rows, int64_t columns) {
  return {data, {1, 1, rows, columns}, {rows * columns, rows * columns, columns, 1}};
}

template <class Kernel> const char* run_checked(const typename Kernel::params& params, unsigned seed) {
  kittens::execution execution;
  execution.seed = seed;
  return kittens::launch<Kernel>(params, 1, execution);
}
