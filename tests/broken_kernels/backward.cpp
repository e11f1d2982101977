// The backward kernels on the checked machine, in three small configurations: what the test breaks by changing them.
#define KITTENS_MACHINE checked
#define KITTENS_CHECKED 1
#include <vector>

#include "attention/launch_backward.h"

namespace kittens_torch {

inline constexpr backward_row small_rows[] = {{128, 128, false, 64, 2, 2, 1, 64, 2, 2},
                                              {128, 128, true, 64, 2, 1, 0, 64, 2, 2},
                                              {128, 128, false, 64, 2, 2, 1, 64, 2, 2, true, true}};

}  // namespace kittens_torch

// query, output and their gradients (heads, length_q, 128); key, value and theirs (heads, length_k, 128); causal from the
// lower right; one CTA takes every tile. dQ is summed in query_sum by the first and the last, which
// folds: `rows` has room for its terms. Row 3 is the last one, in order, on two CTAs.
extern "C" const char* backward_run(unsigned seed, int row, int heads, int length_q, int length_k, float* query,
                                    float* key, float* value, float* output, float* grad_output, float* logsumexp,
                                    float* grad_query, float* grad_key, float* grad_value, float* rows,
                                    float* query_sum) {
  using namespace kittens_torch;
  const auto view = [&](float* data, int64_t length) {
    return kittens::tensor_view{data, {1, heads, length, 128}, {heads * length * 128, length * 128, 128, 1}};
  };
  backward_arguments a{};
  a.query = view(query, length_q);
  a.key = view(key, length_k);
  a.value = view(value, length_k);
  a.output = view(output, length_q);
  a.grad_output = view(grad_output, length_q);
  a.grad_query = view(grad_query, length_q);
  a.grad_key = view(grad_key, length_k);
  a.grad_value = view(grad_value, length_k);
  a.logsumexp = logsumexp;
  a.padded_q = (length_q + 63) / 64 * 64;
  const bool in_order = row == 3, folds = row >= 2;
  a.logsumexp2 = folds ? nullptr : rows;
  a.delta = folds ? nullptr : rows + heads * a.padded_q;
  a.terms = folds ? rows : nullptr;
  a.query_sum = query_sum;
  a.type = element_type::float32;
  a.key_grid = a.query_grid = 1;
  a.scale = 0.125;
  a.mask = make_interval(2, -1, -1, length_q, length_k);
  kittens::tile_counter counter{};
  std::vector<int> turns(heads * a.padded_q / 64);
  if (in_order) {
    a.query_turns = turns.data();
    a.key_counter = &counter;
    a.key_grid = 2;
  }
  kittens::execution execution;
  execution.seed = seed;
  return row == 0   ? launch_backward<backward_config<float, small_rows, 0>>(a, execution)
         : row == 1 ? launch_backward<backward_config<float, small_rows, 1>>(a, execution)
                    : launch_backward<backward_config<float, small_rows, 2>>(a, execution);
}
