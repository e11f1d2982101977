// Forward with divided keys on Hopper, float16: every row of the table.
#include "../launch_forward.h"
#include "forward_sm90.h"

namespace kittens_torch {

forward_launcher split_forward_sm90_float16(int configuration) {
  return find_split_launcher<kittens::fp16, forward_rows_sm90_split, forward_count_sm90_split>(configuration);
}

}  // namespace kittens_torch
