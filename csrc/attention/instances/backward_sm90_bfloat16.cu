// Backward on Hopper, bfloat16: every row of both tables.
#include "../launch_backward.h"
#include "backward_sm90.h"

namespace kittens_torch {

backward_launcher backward_sm90_bfloat16(int configuration, bool modified) {
  return modified ? find_backward_launcher<kittens::bf16, backward_rows_modified_sm90, backward_count_modified_sm90, true>(configuration)
                  : find_backward_launcher<kittens::bf16, backward_rows_sm90, backward_count_sm90>(configuration);
}

}  // namespace kittens_torch
