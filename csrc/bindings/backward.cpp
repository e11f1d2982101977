// The backward operators: checks, copies of what a kernel cannot take, gradients, workspace, plan, launch.
#include "backward.h"

#include <array>

#include "../attention/instances/backward.h"
#include "../attention/plan.h"
#include "machine.h"
#include "modifiers.h"

namespace kittens_torch {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t most_values = int64_t(1) << 31;  // tiles, and rows of the workspace

// A call's tensors and settings, the same for every machine.
struct backward_call {
  const std::optional<Tensor>&grad_output, &grad_logsumexp;
  const Tensor &query, &key, &value, &output, &logsumexp;
  double scale;
  int64_t corner, window_left, window_right;
  bool need_query, need_key, need_value, deterministic;
  int64_t configuration;
  const modifier_inputs* modifiers = nullptr;  // of the ops with modifiers
  bool need_bias = false;

  score_modifiers given() const { return modifiers ? modifiers_of(*modifiers, query, key) : score_modifiers{}; }
  ScalarType real() const { return query.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }
  backward_request request(const score_modifiers& m) const {
    backward_request r{need_query, need_key || need_value, deterministic, need_bias, {}, scale, m.mask_has_vectors() && !m.beyond_mask()};
    for (int d = 0; need_bias && d < 4; d++) r.bias_apart[d] = modifiers->bias->size(d) != 1;
    return r;
  }
};

using gradients_of_call = std::array<Tensor, 4>;  // of query, key, value and bias

// The kernels step through a tile of a modifier with 32-bit strides.
void check_steps(const char* name, const int64_t (&strides)[4]) {
  for (int d = 2; d < 4; d++)
    check(strides[d] < window_open && strides[d] > -window_open, name, ": its stride ", strides[d], " in dimension ", d, " must be below 2^30");
}

void check_shape(const char* name, const Tensor& t, const Tensor& like, ScalarType type, const shape4& sizes, int dims) {
  bool same = t.dim() == dims;
  for (int d = 0; d < dims; d++) same = same && t.size(d) == sizes[d];
  if (!same) {
    std::string expected;
    for (int d = 0; d < dims; d++) expected += (d ? ", " : "(") + std::to_string(sizes[d]);
    check(false, name, " must have shape ", expected, "), got ", shape_text{t});
  }
  check(t.scalar_type() == type, name, ": its dtype must be that of the forward's ", dims == 4 ? "output" : "logsumexp");
  check(t.is_on_device_of(like), name, " must be on the query's device");
}

void check_call(const backward_call& c) {
  check_inputs(c.query, c.key, c.value, c.scale, c.corner, c.window_left, c.window_right);
  const shape4 sizes{c.query.size(0), c.query.size(1), c.query.size(2), c.value.size(3)};
  check_shape("output", c.output, c.query, c.query.scalar_type(), sizes, 4);
  check_shape("logsumexp", c.logsumexp, c.query, c.real(), sizes, 3);
  if (c.grad_output) check_shape("grad_output", *c.grad_output, c.query, c.query.scalar_type(), sizes, 4);
  if (c.grad_logsumexp) check_shape("grad_logsumexp", *c.grad_logsumexp, c.query, c.real(), sizes, 3);
  if (c.modifiers) modifiers_of(*c.modifiers, c.query, c.key);
  check(!c.need_bias || c.modifiers->bias != nullptr, "need_bias: there is no bias");
}

void check_plan(const backward_plan& plan, int64_t configuration) {
  check(plan.configuration >= 0, "configuration ", configuration, ": ", plan.reason);
  check(plan.key_tiles < most_values && plan.query_tiles < most_values && plan.bias_tiles < most_values, "the problem has ", plan.query_tiles,
        ", ", plan.key_tiles, " and ", plan.bias_tiles, " tiles; less than 2^31 are allowed");
  check(plan.query_rows < most_values, "the problem has ", plan.query_rows, " query rows of all heads, counted in whole steps; less than 2^31 are allowed");
}

// Like its input in dtype and layout; empty where it is not asked for.
Tensor make_gradient(const Tensor& like, bool needed) {
  if (!needed) return empty_contiguous({0}, like.scalar_type(), like);
  const shape4 strides = strides_in_order_of(like, like.sizes(), 4);
  return empty_strided(like.sizes().data(), strides.data(), 4, like.scalar_type(), like);
}

// A gradient as the kernel writes it: in place, or through memory that TMA can write.
struct kernel_output {
  const Tensor* gradient = nullptr;
  kernel_input written{};
  bool direct = true;  // else written.copy is copied to the gradient

  const Tensor& tensor() const { return direct ? *gradient : written.copy; }
  void finish() const {
    if (!direct) copy(*gradient, written.copy);
  }
};

kernel_output output_of(const Tensor& gradient, bool needed, bool cuda, int64_t element_bytes) {
  if (!needed) return {&gradient};
  if (!cuda) return {&gradient, as_is(gradient)};
  const shape4 strides = usable_strides(gradient, element_bytes);
  if (fits_tma(gradient, strides, element_bytes)) return {&gradient, {view_of(gradient, strides)}};
  return {&gradient, aligned(gradient, gradient.sizes(), element_bytes), false};
}

// Rows (batch, head, row) without gaps: the tensor's own, or those of a copy.
const void* dense_rows(const Tensor& t, Tensor& dense) {
  int64_t stride = 1;
  bool contiguous = true;
  for (int d = 2; d >= 0; d--) {
    contiguous = contiguous && (t.size(d) == 1 || t.stride(d) == stride);
    stride *= t.size(d);
  }
  if (contiguous) return t.data_ptr();
  dense = empty_contiguous({t.size(0), t.size(1), t.size(2)}, t.scalar_type(), t);
  copy(dense, t);
  return dense.data_ptr();
}

// Without a gradient of the output: one row of zeros, everywhere.
kernel_input no_gradient(const Tensor& output, int64_t element_bytes) {
  const int64_t step = tma_alignment / element_bytes;
  Tensor row = empty_contiguous({(output.size(3) + step - 1) / step * step}, output.scalar_type(), output);
  zero(row);
  kittens::tensor_view view = view_of(output, {0, 0, 0, 1});
  view.data = row.data_ptr();
  return {view, std::move(row)};
}

// Everything that a launch needs and that must live until it has been made.
class prepared_call {
 public:
  prepared_call(const backward_call& c, const forward_problem& problem, const backward_plan& plan, bool cuda)
      : c(c), plan(plan), element_bytes(problem.type == element_type::float64 ? 8 : problem.type == element_type::float32 ? 4 : 2),
        gradients{make_gradient(c.query, c.need_query), make_gradient(c.key, c.need_key), make_gradient(c.value, c.need_value)} {
    if (c.modifiers) gradients[3] = make_bias_gradient();
    if (settle_empty()) return;
    launches = c.need_query || c.need_key || c.need_value || c.need_bias;
    if (!launches) return;
    const auto input = [&](const Tensor& t) { return cuda ? input_for_tma(t, element_bytes) : as_is(t); };
    inputs[0] = input(c.query);
    inputs[1] = input(c.key);
    inputs[2] = input(c.value);
    inputs[3] = input(c.output);
    inputs[4] = c.grad_output ? input(*c.grad_output) : no_gradient(c.output, element_bytes);
    const void* logsumexp_rows = dense_rows(c.logsumexp, logsumexp);
    const void* grad_logsumexp_rows = c.grad_logsumexp ? dense_rows(*c.grad_logsumexp, grad_logsumexp) : nullptr;
    for (int i = 0; i < 3; i++) outputs[i] = output_of(gradients[i], needed(i), cuda, element_bytes);
    // Keys that no row sees belong to no tile.
    if (plan.mask.length_k < c.key.size(2)) {
      for (int i = 1; i < 3; i++)
        if (needed(i)) zero(outputs[i].tensor());
      if (c.need_bias) zero(gradients[3]);
    }
    workspace = empty_contiguous({plan.workspace_values}, c.real(), c.query);
    const int64_t real_bytes = c.real() == ScalarType::Double ? 8 : 4;
    char* memory = static_cast<char*>(workspace.data_ptr());
    char* vectors = memory + (plan.folds ? 4 * plan.query_rows * real_bytes : 0);
    arguments = {inputs[0].view,
                 inputs[1].view,
                 inputs[2].view,
                 inputs[3].view,
                 inputs[4].view,
                 outputs[0].written.view,
                 outputs[1].written.view,
                 outputs[2].written.view,
                 logsumexp_rows,
                 grad_logsumexp_rows,
                 plan.vectors ? vectors : nullptr,
                 plan.vectors ? vectors + plan.query_rows * real_bytes : nullptr,
                 plan.sums_query ? memory + (plan.workspace_values - plan.turns - plan.query_sum_values) * real_bytes : nullptr,
                 problem.type,
                 plan.configuration,
                 static_cast<int>(plan.padded_q),
                 plan.key_grid,
                 plan.query_grid,
                 c.scale,
                 plan.mask,
                 nullptr,
                 nullptr};
    if (c.modifiers) {
      arguments.modifiers = modifiers_of(*c.modifiers, c.query, c.key);
      check_steps("mask", arguments.modifiers.mask_stride);
      check_steps("bias", arguments.modifiers.bias_stride);
      if (c.need_bias) arguments.grad_bias = as_is(gradients[3]).view;
      arguments.bias_grid = plan.bias_grid;
    }
    if (plan.folds) arguments.terms = memory;
    if (plan.in_order) arguments.query_turns = reinterpret_cast<int*>(memory + (plan.workspace_values - plan.turns) * real_bytes);
    cleared_bytes = static_cast<size_t>((plan.query_sum_values + plan.turns) * real_bytes);
  }

  // What is known of the mask's tiles; the result keeps it alive.
  classified_mask classify(const kittens::execution& execution) {
    if (!c.modifiers) return {};
    classified_mask known = classify_mask(arguments.modifiers, *c.modifiers, plan.mask, c.query, c.key, execution);
    arguments.classes = known.classes;
    return known;
  }

  gradients_of_call finish() {
    for (const kernel_output& output : outputs) output.finish();
    return std::move(gradients);
  }

  bool launches = false;
  backward_arguments arguments{};
  size_t cleared_bytes = 0;  // from query_sum on: the numbers of the turns lie behind it

 private:
  const backward_call& c;
  const backward_plan& plan;
  const int64_t element_bytes;
  gradients_of_call gradients;
  kernel_input inputs[5];
  Tensor logsumexp, grad_logsumexp, workspace;
  kernel_output outputs[3];

  bool needed(int i) const { return i == 0 ? c.need_query : i == 1 ? c.need_key : c.need_value; }

  // Nothing to multiply: no query row, or no key for any row.
  bool settle_empty() {
    if (c.logsumexp.numel() > 0 && plan.mask.length_k > 0) return false;
    for (int i = 0; i < (c.modifiers ? 4 : 3); i++) zero(gradients[i]);
    return true;
  }

  // In the bias's shape, contiguous; empty where it is not asked for.
  Tensor make_bias_gradient() const {
    if (!c.modifiers->bias) return empty_contiguous({0}, c.query.scalar_type(), c.query);
    const Tensor& bias = *c.modifiers->bias;
    if (!c.need_bias) return empty_contiguous({0}, bias.scalar_type(), bias);
    return empty_contiguous({bias.size(0), bias.size(1), bias.size(2), bias.size(3)}, bias.scalar_type(), bias);
  }
};

gradients_of_call run_cpu(const backward_call& c, std::optional<int64_t> checked_seed) {
  check_call(c);
  const score_modifiers modifiers = c.given();
  const int threads = checked_seed ? 2 : static_cast<int>(torch::stable::get_num_threads());
  forward_problem problem = problem_of(machine_kind::cpu, c.query, c.key, c.value, c.corner, c.window_left, c.window_right, threads);
  if (checked_seed) problem.machine = machine_kind::sm90;  // the checked machine runs the H200's configurations
  describe(problem, modifiers);
  const backward_plan plan = plan_backward(problem, c.request(modifiers), static_cast<int>(c.configuration));
  check_plan(plan, c.configuration);
  prepared_call call(c, problem, plan, false);
  if (!call.launches) return call.finish();
  kittens::tile_counter counters[2]{};
  if (plan.key_tiles > plan.key_grid || plan.in_order) call.arguments.key_counter = counters;
  if (plan.query_tiles > plan.query_grid) call.arguments.query_counter = counters + 1;
  if (call.cleared_bytes) __builtin_memset(call.arguments.query_sum, 0, call.cleared_bytes);
  const auto find = !problem.modified ? checked_seed ? find_backward_checked : find_backward_cpu
                    : checked_seed ? find_modified_backward_checked
                                   : find_modified_backward_cpu;
  const backward_launcher launch = find(problem.type, plan.configuration);
  check(launch != nullptr, "query: its dtype is not compiled for this machine");
  const kittens::execution execution = cpu_execution(static_cast<uint32_t>(checked_seed.value_or(0)));
  const classified_mask known = call.classify(execution);
  const char* error = launch(call.arguments, execution);
  check(error == nullptr, error ? error : "");
  return call.finish();
}

#ifdef KITTENS_CUDA

gradients_of_call run_cuda(const backward_call& c) {
  check_call(c);
  const int device = c.query.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  if (const char* error = kittens::use_device(device)) check(false, "device ", device, ": ", error);
  const int capability = kittens::compute_capability(device);
  check(capability == 90, "device ", device, " has compute capability ", capability / 10, ".", capability % 10,
        "; the kernels are for 9.0 (H100, H200)");
  forward_problem problem =
      problem_of(machine_kind::sm90, c.query, c.key, c.value, c.corner, c.window_left, c.window_right, kittens::multiprocessors(device));
  const score_modifiers modifiers = c.given();
  describe(problem, modifiers);
  const backward_plan plan = plan_backward(problem, c.request(modifiers), static_cast<int>(c.configuration));
  check_plan(plan, c.configuration);
  prepared_call call(c, problem, plan, true);
  if (!call.launches) return call.finish();

  void* stream = current_stream(device);
  backward_arguments& arguments = call.arguments;
  const bool unequal = !is_open(plan.mask) || problem.modified;  // the tiles' length, by a bool mask too (documents: 1.70 and 1.30 ms)
  if (plan.in_order || (unequal && plan.key_tiles > plan.key_grid)) arguments.key_counter = kittens::pooled_counter(device, stream);
  if (unequal && plan.query_tiles > plan.query_grid) arguments.query_counter = kittens::pooled_counter(device, stream);
  if (call.cleared_bytes)
    if (const char* error = kittens::clear_async(arguments.query_sum, call.cleared_bytes, stream)) check(false, "dQ's sums: ", error);
  const classified_mask known = call.classify({stream});
  const auto find = problem.modified ? find_modified_backward_sm90 : find_backward_sm90;
  const char* error = find(problem.type, plan.configuration)(arguments, {stream});
  check(error == nullptr, error ? error : "");
  return call.finish();
}

#endif

backward_result first_three(gradients_of_call g) { return {std::move(g[0]), std::move(g[1]), std::move(g[2])}; }
modified_backward_result all_four(gradients_of_call g) { return {std::move(g[0]), std::move(g[1]), std::move(g[2]), std::move(g[3])}; }

}  // namespace

backward_result backward_cpu(
    const std::optional<Tensor>& grad_output, const std::optional<Tensor>& grad_logsumexp, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& logsumexp, double scale, int64_t corner, int64_t window_left, int64_t window_right,
    bool need_query, bool need_key, bool need_value, bool deterministic, int64_t configuration) {
  return first_three(run_cpu({grad_output, grad_logsumexp, query, key, value, output, logsumexp, scale, corner, window_left, window_right,
                              need_query, need_key, need_value, deterministic, configuration},
                             std::nullopt));
}

backward_result checked_backward(
    const std::optional<Tensor>& grad_output, const std::optional<Tensor>& grad_logsumexp, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& logsumexp, double scale, int64_t corner, int64_t window_left, int64_t window_right,
    bool need_query, bool need_key, bool need_value, bool deterministic, int64_t configuration, int64_t seed) {
  return first_three(run_cpu({grad_output, grad_logsumexp, query, key, value, output, logsumexp, scale, corner, window_left, window_right,
                              need_query, need_key, need_value, deterministic, configuration},
                             seed));
}

template <bool on_gpu>
modified_backward_result modified_backward(
    const std::optional<Tensor>& grad_output, const std::optional<Tensor>& grad_logsumexp, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& logsumexp, double scale, int64_t corner, int64_t window_left, int64_t window_right,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& bias, const std::optional<Tensor>& key_lengths,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& dropout_state, double dropout_p, double softcap, bool need_query,
    bool need_key, bool need_value, bool need_bias, bool deterministic, int64_t configuration,
    const std::optional<Tensor>& mask_tiles, const std::optional<Tensor>& mask_ranges, const std::optional<Tensor>& mask_seen) {
  const modifier_inputs modifiers{pointer_to(mask), pointer_to(bias),          pointer_to(key_lengths), pointer_to(alibi_slopes),
                                  nullptr,          pointer_to(dropout_state), dropout_p,               softcap,
                                  pointer_to(mask_tiles), pointer_to(mask_ranges), pointer_to(mask_seen)};
  const backward_call call{grad_output, grad_logsumexp, query, key, value, output, logsumexp, scale, corner, window_left, window_right,
                           need_query, need_key, need_value, deterministic, configuration, &modifiers, need_bias};
#ifdef KITTENS_CUDA
  if constexpr (on_gpu) return all_four(run_cuda(call));
#endif
  return all_four(run_cpu(call, std::nullopt));
}
template decltype(modified_backward<false>) modified_backward<false>;
#ifdef KITTENS_CUDA
template decltype(modified_backward<true>) modified_backward<true>;
#endif

modified_backward_result checked_modified_backward(
    const std::optional<Tensor>& grad_output, const std::optional<Tensor>& grad_logsumexp, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& logsumexp, double scale, int64_t corner, int64_t window_left, int64_t window_right,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& bias, const std::optional<Tensor>& key_lengths,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& dropout_state, double dropout_p, double softcap, bool need_query,
    bool need_key, bool need_value, bool need_bias, bool deterministic, int64_t configuration, int64_t seed) {
  const modifier_inputs modifiers{pointer_to(mask), pointer_to(bias),          pointer_to(key_lengths), pointer_to(alibi_slopes),
                                  nullptr,          pointer_to(dropout_state), dropout_p,               softcap};
  return all_four(run_cpu({grad_output, grad_logsumexp, query, key, value, output, logsumexp, scale, corner, window_left, window_right,
                   need_query, need_key, need_value, deterministic, configuration, &modifiers, need_bias}, seed));
}

#ifdef KITTENS_CUDA

backward_result backward_cuda(
    const std::optional<Tensor>& grad_output, const std::optional<Tensor>& grad_logsumexp, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& logsumexp, double scale, int64_t corner, int64_t window_left, int64_t window_right,
    bool need_query, bool need_key, bool need_value, bool deterministic, int64_t configuration) {
  return first_three(run_cuda({grad_output, grad_logsumexp, query, key, value, output, logsumexp, scale, corner, window_left, window_right,
                               need_query, need_key, need_value, deterministic, configuration}));
}

#endif

}  // namespace kittens_torch
