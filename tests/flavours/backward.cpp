// The backward kernels of one instruction set, whichever the plan would choose.
#include "attention/instances/backward.h"

#include <vector>

#include "attention/backward_config.h"

using namespace kittens_torch;

// query, output and their gradients (heads, length_q, head_dim); key, value and theirs (heads, length_k, head_dim);
// causal from the lower right. With a mask, bool (length_q, length_k), by the kernels that modify scores, whose soft cap
// is 2; grad_bias is that of a bias of zeros, (1, 1, length_q, length_k) in the accumulators' type.
extern "C" const char* flavour_backward(int flavour, int type, int configuration, int heads, int length_q, int length_k,
                                        int head_dim, void* query, void* key, void* value, void* output,
                                        void* grad_output, void* logsumexp, void* grad_query, void* grad_key,
                                        void* grad_value, const unsigned char* mask, void* bias, void* grad_bias) {
  constexpr backward_launcher (*find_modified[])(element_type, int) = {
      modified_backward_cpu_generic, modified_backward_cpu_avx2, modified_backward_cpu_avx512,
      modified_backward_cpu_amx};
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
  if (mask) {
    a.modifiers.mask = mask;
    a.modifiers.bias = bias;
    a.modifiers.bias_is_real = true;
    a.modifiers.mask_stride[2] = a.modifiers.bias_stride[2] = length_k;
    a.modifiers.mask_stride[3] = a.modifiers.bias_stride[3] = 1;
    a.modifiers.softcap = 2;
    a.grad_bias = {grad_bias, {1, 1, length_q, length_k}, {0, 0, length_k, 1}};
    a.bias_grid = 1;
  }
  const backward_launcher launch = (mask ? find_modified : find)[flavour](a.type, configuration);
  return launch ? launch(a, {}) : "no kernel";
}
