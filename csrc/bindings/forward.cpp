// The forward operators: checks, copies of what a kernel cannot take, outputs, plan, launch.
#include "forward.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "../attention/instances/forward.h"
#include "../attention/plan.h"
#include "inputs.h"
#include "machine.h"
#include "modifiers.h"

namespace kittens_torch {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t most_tiles = int64_t(1) << 31;

struct forward_outputs {
  Tensor output, logsumexp;
};

ScalarType real_of(const Tensor& query) { return query.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }

// into: the output, where the caller has made it and wants no logsumexp.
forward_outputs make_outputs(const Tensor& query, const Tensor& value, const Tensor* into) {
  if (into) return {into->borrow(), Tensor()};
  const shape4 sizes{query.size(0), query.size(1), query.size(2), value.size(3)}, strides = strides_in_order_of(query, sizes);
  return {empty_strided(sizes.data(), strides.data(), 4, query.scalar_type(), query),
          empty_contiguous({query.size(0), query.size(1), query.size(2)}, real_of(query), query)};
}

// Nothing to multiply: no output at all, or no key for any row.
bool settle_empty(const forward_outputs& out, const interval_mask& mask, const modifier_inputs* modified) {
  if (out.logsumexp.numel() == 0) return true;
  if (mask.length_k > 0) return false;
  zero(out.output);
  torch::stable::Tensor logsumexp = out.logsumexp.shared();
  if (modified && modified->sinks)
    torch::stable::copy_(logsumexp, torch::stable::unsqueeze(modified->sinks->shared(), 1));
  else
    torch::stable::fill_(logsumexp, -std::numeric_limits<double>::infinity());
  return true;
}

forward_arguments arguments_of(const kernel_input& query, const kernel_input& key, const kernel_input& value, const kernel_input& output,
                               const Tensor& logsumexp, const forward_problem& problem, const forward_plan& plan, double scale) {
  return {query.view, key.view, value.view, output.view, logsumexp.data_ptr(), problem.type, plan.configuration, plan.grid, scale, plan.mask, nullptr};
}

void check_plan(const forward_plan& plan, int64_t configuration) {
  check(plan.configuration >= 0, "configuration ", configuration, ": ", plan.reason);
  const int64_t tiles = plan.tiles * std::max(plan.splits, 1);
  check(tiles < most_tiles, "the problem has ", tiles, " row tiles, counted once for each range of their keys; less than 2^31 are allowed");
}

void check_splits(int64_t splits) { check(splits >= -1 && splits <= 1024, "splits must be from -1 to 1024, got ", splits); }

// The query heads of a key head as its rows, where each has one row.
kittens::tensor_view with_heads_as_rows(const kittens::tensor_view& t, int64_t heads) {
  const int64_t rows = t.size[1] / heads;
  return {t.data, {t.size[0], heads, rows, t.size[3]}, {t.stride[0], t.stride[1] * rows, t.stride[1], t.stride[3]}};
}

// What the launch of a plan with divided keys needs.
struct split_memory {
  Tensor parts, sinks;
};

// What the plan asks for beyond its row and grid.
split_memory arrange(forward_arguments& a, const forward_plan& plan, const Tensor& query, const modifier_inputs* modified) {
  split_memory memory;
  if (plan.heads_as_rows) {
    a.query = with_heads_as_rows(a.query, a.key.size[1]);
    a.output = with_heads_as_rows(a.output, a.key.size[1]);
  }
  if (plan.splits == 0) return memory;
  memory.parts = empty_contiguous({plan.workspace_values}, real_of(query), query);
  a.splits = plan.splits;
  a.parts = memory.parts.data_ptr();
  a.sinks_by_row = plan.heads_as_rows;
  if (plan.heads_as_rows && a.modifiers.sinks && a.modifiers.sink_stride != 1) {
    memory.sinks = empty_contiguous({modified->sinks->size(0)}, modified->sinks->scalar_type(), *modified->sinks);
    copy(memory.sinks, *modified->sinks);
    a.modifiers.sinks = memory.sinks.data_ptr();
  }
  return memory;
}

// As Python computes it, so that a default is the same number on every way here.
double scale_of(std::optional<double> scale, const Tensor& query) { return scale ? *scale : std::pow(static_cast<double>(query.size(3)), -0.5); }

void check_launch(const char* error) { check(error == nullptr, error ? error : ""); }

forward_result run_cpu(const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t corner, int64_t window_left,
                       int64_t window_right, int64_t configuration, int64_t splits, std::optional<int64_t> checked_seed,
                       const modifier_inputs* modified = nullptr, const Tensor* into = nullptr) {
  check_inputs(query, key, value, scale, corner, window_left, window_right);
  check_splits(splits);
  const auto machine = checked_seed ? machine_kind::sm90 : machine_kind::cpu;  // the checked machine runs the H200's configurations
  const int threads = checked_seed ? 2 : static_cast<int>(torch::stable::get_num_threads());
  forward_problem problem = problem_of(machine_kind::cpu, query, key, value, corner, window_left, window_right, threads);
  problem.machine = machine;
  const score_modifiers modifiers = modified ? modifiers_of(*modified, query, key) : score_modifiers{};
  describe(problem, modifiers);
  const forward_plan plan = plan_forward(problem, static_cast<int>(configuration), static_cast<int>(splits));
  check_plan(plan, configuration);
  forward_outputs out = make_outputs(query, value, into);
  if (!into && settle_empty(out, plan.mask, modified)) return {std::move(out.output), std::move(out.logsumexp)};

  kittens::tile_counter counter{};
  forward_arguments arguments = arguments_of(as_is(query), as_is(key), as_is(value), as_is(out.output), out.logsumexp, problem, plan, scale);
  arguments.modifiers = modifiers;
  const split_memory memory = arrange(arguments, plan, query, modified);
  if (plan.tiles > plan.grid && plan.splits == 0) arguments.counter = &counter;
  const kittens::execution execution = cpu_execution(static_cast<uint32_t>(checked_seed.value_or(0)));
  classified_mask known;
  if (modified) known = classify_mask(modifiers, *modified, with_every_key(plan.mask), query, key, execution);
  arguments.classes = known.classes;
  const forward_launcher launch = problem.modified ? checked_seed ? find_modified_forward_checked(problem.type, plan.configuration)
                                                                : find_modified_forward_cpu(problem.type, plan.configuration)
                                  : plan.splits > 0 ? checked_seed ? find_split_forward_checked(problem.type, plan.configuration)
                                                                : find_split_forward_cpu(problem.type, plan.configuration)
                                  : checked_seed ? find_forward_checked(problem.type, plan.configuration, plan.kind == mask_class::interval)
                                                 : find_forward_cpu(problem.type, plan.configuration);
  check(launch != nullptr, "query: its dtype is not compiled for this machine");
  check_launch(launch(arguments, execution));
  return {std::move(out.output), std::move(out.logsumexp)};
}

#ifdef KITTENS_CUDA

forward_result run_cuda(const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t corner, int64_t window_left,
                        int64_t window_right, int64_t configuration, int64_t splits, const modifier_inputs* modified = nullptr,
                        const Tensor* into = nullptr) {
  check_inputs(query, key, value, scale, corner, window_left, window_right);
  check_splits(splits);
  const int device = query.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  if (const char* error = kittens::use_device(device)) check(false, "device ", device, ": ", error);
  const int capability = kittens::compute_capability(device);
  check(capability == 90, "device ", device, " has compute capability ", capability / 10, ".", capability % 10,
        "; the kernels are for 9.0 (H100, H200)");
  forward_problem problem =
      problem_of(machine_kind::sm90, query, key, value, corner, window_left, window_right, kittens::multiprocessors(device));
  const score_modifiers modifiers = modified ? modifiers_of(*modified, query, key) : score_modifiers{};
  describe(problem, modifiers);
  const forward_plan plan = plan_forward(problem, static_cast<int>(configuration), static_cast<int>(splits));
  check_plan(plan, configuration);
  forward_outputs out = make_outputs(query, value, into);
  if (!into && settle_empty(out, plan.mask, modified)) return {std::move(out.output), std::move(out.logsumexp)};

  constexpr int64_t element_bytes = 2;
  const kernel_input q = input_for_tma(query, element_bytes), k = input_for_tma(key, element_bytes), v = input_for_tma(value, element_bytes);
  const shape4 output_strides = usable_strides(out.output, element_bytes);
  const bool direct = fits_tma(out.output, output_strides, element_bytes);
  const kernel_input o = direct ? kernel_input{view_of(out.output, output_strides)}
                                : aligned(out.output, out.output.sizes(), element_bytes);
  void* stream = current_stream(device);
  forward_arguments arguments = arguments_of(q, k, v, o, out.logsumexp, problem, plan, scale);
  arguments.modifiers = modifiers;
  const split_memory memory = arrange(arguments, plan, query, modified);
  if (plan.kind != mask_class::full && plan.tiles > plan.grid && plan.splits == 0) arguments.counter = kittens::pooled_counter(device, stream);
  classified_mask known;
  if (modified) known = classify_mask(modifiers, *modified, with_every_key(plan.mask), query, key, {stream});
  arguments.classes = known.classes;
  const forward_launcher launch = problem.modified ? find_modified_forward_sm90(problem.type, plan.configuration)
                                  : plan.splits > 0  ? find_split_forward_sm90(problem.type, plan.configuration)
                                           : find_forward_sm90(problem.type, plan.configuration, plan.kind == mask_class::interval);
  check(launch != nullptr, "configuration ", plan.configuration, " has no kernel");
  check_launch(launch(arguments, {stream}));
  if (!direct) copy(out.output, o.copy);
  return {std::move(out.output), std::move(out.logsumexp)};
}

#else

forward_result run_cuda(const Tensor&, const Tensor&, const Tensor&, double, int64_t, int64_t, int64_t, int64_t, int64_t,
                        const modifier_inputs* = nullptr, const Tensor* = nullptr) {
  check(false, "this build has no CUDA kernels: install with nvcc present (see README), or move the tensors to the CPU");
  return {};
}

#endif

}  // namespace

forward_result forward_cpu(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<double> scale, int64_t corner,
                           int64_t window_left, int64_t window_right, int64_t configuration, int64_t splits) {
  return run_cpu(query, key, value, scale_of(scale, query), corner, window_left, window_right, configuration, splits, std::nullopt);
}

forward_result checked_forward(const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t corner, int64_t window_left,
                               int64_t window_right, int64_t configuration, int64_t seed, int64_t splits) {
  return run_cpu(query, key, value, scale, corner, window_left, window_right, configuration, splits, seed);
}

forward_result forward_cuda(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<double> scale, int64_t corner,
                            int64_t window_left, int64_t window_right, int64_t configuration, int64_t splits) {
  return run_cuda(query, key, value, scale_of(scale, query), corner, window_left, window_right, configuration, splits);
}

bool forward_in_place(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output, std::optional<double> scale, int64_t corner) {
  for (const Tensor* t : {&query, &key, &value, &output})
    if (t->dim() != 4 || t->numel() == 0) return false;
  if (!query.is_cuda()) {
    run_cpu(query, key, value, scale_of(scale, query), corner, -1, -1, -1, -1, std::nullopt, nullptr, &output);
    return true;
  }
  constexpr int64_t element_bytes = 2;
  for (const Tensor* t : {&query, &key, &value, &output})
    if (!fits_tma(*t, usable_strides(*t, element_bytes), element_bytes)) return false;
  run_cuda(query, key, value, scale_of(scale, query), corner, -1, -1, -1, -1, nullptr, &output);
  return true;
}

template <bool on_gpu>
forward_result modified_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t corner, int64_t window_left, int64_t window_right,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& bias, const std::optional<Tensor>& key_lengths,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks, const std::optional<Tensor>& dropout_state, double dropout_p,
    double softcap, int64_t configuration, const std::optional<Tensor>& mask_tiles, const std::optional<Tensor>& mask_ranges,
    const std::optional<Tensor>& mask_seen) {
  const modifier_inputs modified{pointer_to(mask),       pointer_to(bias),        pointer_to(key_lengths), pointer_to(alibi_slopes),
                                 pointer_to(sinks),      pointer_to(dropout_state), dropout_p,             softcap,
                                 pointer_to(mask_tiles), pointer_to(mask_ranges), pointer_to(mask_seen)};
  if constexpr (on_gpu) return run_cuda(query, key, value, scale, corner, window_left, window_right, configuration, -1, &modified);
  return run_cpu(query, key, value, scale, corner, window_left, window_right, configuration, -1, std::nullopt, &modified);
}
template decltype(modified_forward<false>) modified_forward<false>;
template decltype(modified_forward<true>) modified_forward<true>;

forward_result checked_modified_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t corner, int64_t window_left, int64_t window_right,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& bias, const std::optional<Tensor>& key_lengths,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks, const std::optional<Tensor>& dropout_state, double dropout_p,
    double softcap, int64_t configuration, int64_t seed) {
  const modifier_inputs modified{pointer_to(mask),  pointer_to(bias),          pointer_to(key_lengths), pointer_to(alibi_slopes),
                                 pointer_to(sinks), pointer_to(dropout_state), dropout_p,               softcap};
  return run_cpu(query, key, value, scale, corner, window_left, window_right, configuration, -1, seed, &modified);
}

namespace {

mask_classes classes_of(const Tensor& mask, const Tensor& query, const Tensor& key, int64_t corner, int64_t window_left, int64_t window_right,
                        const kittens::execution& execution) {
  check_inputs(query, key, key, 1.0, corner, window_left, window_right);
  const forward_problem problem = problem_of(machine_kind::cpu, query, key, key, corner, window_left, window_right, 1);
  const interval_mask visible =
      make_interval(problem.corner, problem.window_left, problem.window_right, static_cast<int>(problem.length_q), static_cast<int>(problem.length_k));
  const modifier_inputs inputs{.mask = &mask};
  classified_mask known = classify_mask(modifiers_of(inputs, query, key), inputs, with_every_key(visible), query, key, execution);
  return {std::move(known.tiles), std::move(known.ranges), std::move(known.seen)};
}

}  // namespace

mask_classes classify_mask_cpu(const Tensor& mask, const Tensor& query, const Tensor& key, int64_t corner, int64_t window_left,
                               int64_t window_right) {
  return classes_of(mask, query, key, corner, window_left, window_right, cpu_execution(0));
}

mask_classes classify_mask_cuda(const Tensor& mask, const Tensor& query, const Tensor& key, int64_t corner, int64_t window_left,
                                int64_t window_right) {
#ifdef KITTENS_CUDA
  const int device = query.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  if (const char* error = kittens::use_device(device)) check(false, "device ", device, ": ", error);
  return classes_of(mask, query, key, corner, window_left, window_right, {current_stream(device)});
#else
  check(false, "this build has no CUDA kernels: install with nvcc present (see README), or move the tensors to the CPU");
  return {};
#endif
}

}  // namespace kittens_torch
