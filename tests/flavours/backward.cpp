// The backward kernels of one instruction set, whichever the plan would choose.
#include "attention/instances/backward.h"

#include <vector>

#include "attention/backward_config.h"

using namespace kittens_torch;

// query, output and their gradients (heads, length_q, head_dim); key, value and theirs (heads, length_k, head_dim);
// causal from the lower right.
extern "C" const char* flavour_backward(int flavour, int type, int configuration, int heads, int length_q, int length_k,
                                        int head_dim, void* query, void* key, void* value, void* output,
                                        void* grad_output, void* logsumexp, void* grad_query, void* grad_key,
                                        void* grad_value) {
  constexpr backward_launcher (*find[])(element_type, int) = {backward_cpu_generic, backward_cpu_avx2,
                                                              backward_cpu_avx512, backward_cpu_amx};
  const auto view = [&](void* data, int64_t length) {
    return kittens::tensor_view{
        data, {1, heads, length, head_dim}, {heads * length * head_dim, length * head_dim, head_dim, 1}};
  };
  const int step = backward_rows_cpu[configuration].block_q;
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
  a.type = static_cast<element_type>(type);
  a.configuration = configuration;
  a.padded_q = (length_q + step - 1) / step * step;
  a.key_grid = a.query_grid = 1;
  a.scale = 0.125;
  a.mask = make_interval(2, -1, -1, length_q, length_k);
  std::vector<double> workspace(2 * heads * a.padded_q);  // of floats or doubles
  a.logsumexp2 = workspace.data();
  a.delta = workspace.data() + heads * a.padded_q;
  const backward_launcher launch = find[flavour](a.type, configuration);
  return launch ? launch(a, {}) : "no kernel";
}
