// Backward on Hopper, float16: every row of the table.
#include "../launch_backward.h"
#include "backward_sm90.h"

namespace kittens_torch {

backward_launcher backward_sm90_float16(int configuration) {
  return find_backward_launcher<kittens::fp16, backward_rows_sm90, backward_count_sm90>(configuration);
}

}  // namespace kittens_torch
