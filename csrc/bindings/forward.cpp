// The forward operators: checks, copies of what a kernel cannot take, outputs, plan, launch.
#include "forward.h"

#include <cmath>
#include <limits>
#include <optional>

#include "../attention/instances/forward.h"
#include "../attention/plan.h"
#include "machine.h"
#include "memory.h"

namespace kittens_torch {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t longest = int64_t(1) << 29;        // positions and their sums stay within 32 bits
constexpr int64_t most_tiles = int64_t(1) << 31;
constexpr int64_t tma_alignment = 16;                // bytes: base addresses and strides of a tensor map

element_type type_of(const Tensor& t, bool cuda) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16: return element_type::bfloat16;
    case ScalarType::Half: return element_type::float16;
    case ScalarType::Float: check(!cuda, "query: float32 on CUDA has no kernel; bfloat16 and float16 have"); return element_type::float32;
    case ScalarType::Double: check(!cuda, "query: float64 on CUDA has no kernel; bfloat16 and float16 have"); return element_type::float64;
    default: check(false, "query: its dtype has no kernel; bfloat16, float16, and on the CPU float32 and float64 have");
  }
  return element_type::float32;
}

void check_inputs(const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t corner, int64_t window_left,
                  int64_t window_right) {
  check(query.dim() == 4 && key.dim() == 4 && value.dim() == 4, "query, key and value must have 4 dimensions (batch, head, row, column), got ",
        query.dim(), ", ", key.dim(), " and ", value.dim());
  check(query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type(),
        "query, key and value must have the same dtype");
  check(query.get_device_index() == key.get_device_index() && query.get_device_index() == value.get_device_index() &&
            query.is_cuda() == key.is_cuda() && query.is_cuda() == value.is_cuda(),
        "query, key and value must be on the same device");
  const int64_t heads = query.size(1), heads_k = key.size(1), head_dim = query.size(3), value_dim = value.size(3);
  check(key.size(0) == query.size(0) && value.size(0) == query.size(0), "key and value must have the query's batch size ", query.size(0),
        ", got ", key.size(0), " and ", value.size(0));
  check(value.size(1) == heads_k && value.size(2) == key.size(2), "value ", shape_text(value), " must have the heads and rows of key ",
        shape_text(key));
  check(heads_k > 0 ? heads % heads_k == 0 : heads == 0, "key: its ", heads_k, " heads must divide the query's ", heads);
  check(key.size(3) == head_dim, "key: its head_dim ", key.size(3), " must be the query's ", head_dim);
  check(head_dim >= 1 && head_dim <= 256 && value_dim >= 1 && value_dim <= 256, "head_dim ", head_dim, " and value_dim ", value_dim,
        " must be from 1 to 256");
  check(query.size(2) < longest && key.size(2) < longest, "lengths ", query.size(2), " and ", key.size(2), " must be below 2^29");
  check(std::isfinite(scale) && scale > 0, "scale must be finite and positive here, got ", scale);
  check(corner >= 0 && corner <= 2, "corner must be 0 (none), 1 (upper_left) or 2 (lower_right), got ", corner);
  check(window_left >= -1 && window_right >= -1, "window sides must be -1 (open) or a number of keys, got ", window_left, " and ",
        window_right);
}

// A tensor as a kernel sees it, and what keeps its memory alive.
struct kernel_input {
  Tensor tensor;
  kittens::tensor_view view;
};

// A dimension of size 1 is never stepped over; its stride may be anything, and TMA wants a multiple of 16 bytes.
shape4 usable_strides(const Tensor& t, int64_t element_bytes) {
  shape4 strides;
  for (int d = 0; d < 4; d++) strides[d] = d < 3 && t.size(d) == 1 ? tma_alignment / element_bytes * ((t.size(3) + 15) / 16 * 2) : t.stride(d);
  if (t.size(3) == 1) strides[3] = 1;
  return strides;
}

bool fits_tma(const Tensor& t, const shape4& strides, int64_t element_bytes) {
  if (strides[3] != 1 || reinterpret_cast<uintptr_t>(t.data_ptr()) % tma_alignment != 0) return false;
  for (int d = 0; d < 3; d++)
    if (strides[d] * element_bytes % tma_alignment != 0) return false;
  return true;
}

// Memory with rows that start on 16 bytes, in the order of `like`; the tensor is its first `columns` columns.
kernel_input aligned(const Tensor& like, const shape4& sizes, int64_t element_bytes) {
  const int64_t step = tma_alignment / element_bytes;
  shape4 padded = sizes;
  padded[3] = (sizes[3] + step - 1) / step * step;
  const shape4 strides = strides_in_order_of(like, padded);
  Tensor whole = empty_strided(padded.data(), strides.data(), 4, like.scalar_type(), like);
  Tensor part = padded[3] == sizes[3] ? whole : torch::stable::narrow(whole, 3, 0, sizes[3]);
  return {part, view_of(part, usable_strides(part, element_bytes))};
}

kernel_input input_for_tma(const Tensor& t, int64_t element_bytes) {
  const shape4 strides = usable_strides(t, element_bytes);
  if (fits_tma(t, strides, element_bytes)) return {t, view_of(t, strides)};
  kernel_input copy = aligned(t, {t.size(0), t.size(1), t.size(2), t.size(3)}, element_bytes);
  torch::stable::copy_(copy.tensor, t);
  return copy;
}

kernel_input as_is(const Tensor& t) { return {t, view_of(t, {t.stride(0), t.stride(1), t.stride(2), t.stride(3)})}; }

struct forward_outputs {
  Tensor output, logsumexp;
};

forward_outputs make_outputs(const Tensor& query, const Tensor& value) {
  const shape4 sizes{query.size(0), query.size(1), query.size(2), value.size(3)}, strides = strides_in_order_of(query, sizes);
  const ScalarType real = query.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  return {empty_strided(sizes.data(), strides.data(), 4, query.scalar_type(), query),
          empty_contiguous({query.size(0), query.size(1), query.size(2)}, real, query)};
}

forward_problem problem_of(machine_kind machine, const Tensor& query, const Tensor& key, const Tensor& value, int64_t corner,
                           int64_t window_left, int64_t window_right, int processors) {
  const auto side = [](int64_t n) { return static_cast<int>(n < window_open ? n : -1); };
  return {machine,       type_of(query, machine == machine_kind::sm90),
          query.size(0), query.size(1),
          key.size(1),   query.size(2),
          key.size(2),   query.size(3),
          value.size(3), static_cast<int>(corner),
          side(window_left), side(window_right),
          processors};
}

// Nothing to multiply: no output at all, or no key for any row.
bool settle_empty(const forward_outputs& out, const interval_mask& mask) {
  if (out.logsumexp.numel() == 0) return true;
  if (mask.length_k > 0) return false;
  Tensor output = out.output, logsumexp = out.logsumexp;
  torch::stable::zero_(output);
  torch::stable::fill_(logsumexp, -std::numeric_limits<double>::infinity());
  return true;
}

forward_arguments arguments_of(const kernel_input& query, const kernel_input& key, const kernel_input& value, const kernel_input& output,
                               const Tensor& logsumexp, const forward_problem& problem, const forward_plan& plan, double scale) {
  return {query.view, key.view, value.view, output.view, logsumexp.data_ptr(), problem.type, plan.configuration, plan.grid, scale, plan.mask, nullptr};
}

void check_plan(const forward_plan& plan, int64_t configuration) {
  check(plan.configuration >= 0, "configuration ", configuration, ": ", plan.reason);
  check(plan.tiles < most_tiles, "the problem has ", plan.tiles, " row tiles; less than 2^31 are allowed");
}

void check_launch(const char* error) { check(error == nullptr, error ? error : ""); }

forward_result run_cpu(const Tensor& query, const Tensor& key, const Tensor& value, double scale, int64_t corner, int64_t window_left,
                       int64_t window_right, int64_t configuration, std::optional<int64_t> checked_seed) {
  check_inputs(query, key, value, scale, corner, window_left, window_right);
  const auto machine = checked_seed ? machine_kind::sm90 : machine_kind::cpu;  // the checked machine runs the H200's configurations
  const int threads = checked_seed ? 2 : static_cast<int>(torch::stable::get_num_threads());
  forward_problem problem = problem_of(machine_kind::cpu, query, key, value, corner, window_left, window_right, threads);
  problem.machine = machine;
  const forward_plan plan = plan_forward(problem, static_cast<int>(configuration));
  check_plan(plan, configuration);
  const forward_outputs out = make_outputs(query, value);
  if (settle_empty(out, plan.mask)) return {out.output, out.logsumexp};

  kittens::tile_counter counter{};
  forward_arguments arguments = arguments_of(as_is(query), as_is(key), as_is(value), as_is(out.output), out.logsumexp, problem, plan, scale);
  if (plan.tiles > plan.grid) arguments.counter = &counter;
  const forward_launcher launch = checked_seed ? find_forward_checked(problem.type, plan.configuration, plan.interval)
                                               : find_forward_cpu(problem.type, plan.configuration);
  check(launch != nullptr, "query: its dtype is not compiled for this machine");
  check_launch(launch(arguments, cpu_execution(static_cast<uint32_t>(checked_seed.value_or(0)))));
  return {out.output, out.logsumexp};
}

}  // namespace

forward_result forward_cpu(Tensor query, Tensor key, Tensor value, double scale, int64_t corner, int64_t window_left, int64_t window_right,
                           int64_t configuration) {
  return run_cpu(query, key, value, scale, corner, window_left, window_right, configuration, std::nullopt);
}

forward_result checked_forward(Tensor query, Tensor key, Tensor value, double scale, int64_t corner, int64_t window_left, int64_t window_right,
                               int64_t configuration, int64_t seed) {
  return run_cpu(query, key, value, scale, corner, window_left, window_right, configuration, seed);
}

#ifdef KITTENS_CUDA

forward_result forward_cuda(Tensor query, Tensor key, Tensor value, double scale, int64_t corner, int64_t window_left, int64_t window_right,
                            int64_t configuration) {
  check_inputs(query, key, value, scale, corner, window_left, window_right);
  const int device = query.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  if (const char* error = kittens::use_device(device)) check(false, "device ", device, ": ", error);
  const int capability = kittens::compute_capability(device);
  check(capability == 90, "device ", device, " has compute capability ", capability / 10, ".", capability % 10,
        "; the kernels are for 9.0 (H100, H200)");
  const forward_problem problem =
      problem_of(machine_kind::sm90, query, key, value, corner, window_left, window_right, kittens::multiprocessors(device));
  const forward_plan plan = plan_forward(problem, static_cast<int>(configuration));
  check_plan(plan, configuration);
  const forward_outputs out = make_outputs(query, value);
  if (settle_empty(out, plan.mask)) return {out.output, out.logsumexp};

  constexpr int64_t element_bytes = 2;
  const kernel_input q = input_for_tma(query, element_bytes), k = input_for_tma(key, element_bytes), v = input_for_tma(value, element_bytes);
  const shape4 output_strides = usable_strides(out.output, element_bytes);
  const bool direct = fits_tma(out.output, output_strides, element_bytes);
  const kernel_input o = direct ? kernel_input{out.output, view_of(out.output, output_strides)}
                                : aligned(out.output, {query.size(0), query.size(1), query.size(2), value.size(3)}, element_bytes);
  void* stream = current_stream(device);
  forward_arguments arguments = arguments_of(q, k, v, o, out.logsumexp, problem, plan, scale);
  std::optional<Tensor> captured_counter;
  if (plan.interval && plan.tiles > plan.grid) {
    if (kittens::is_capturing(stream)) {
      captured_counter = empty_contiguous({2}, ScalarType::Int, query);
      arguments.counter = static_cast<kittens::tile_counter*>(captured_counter->data_ptr());
      if (const char* error = kittens::clear_async(arguments.counter, sizeof *arguments.counter, stream)) check(false, "tile counter: ", error);
    } else {
      arguments.counter = kittens::pooled_counter(device);
      check(arguments.counter != nullptr, "device ", device, " gives no tile counter");
    }
  }
  check_launch(find_forward_sm90(problem.type, plan.configuration, plan.interval)(arguments, {stream}));
  if (!direct) {
    Tensor output = out.output;
    torch::stable::copy_(output, o.tensor);
  }
  return {out.output, out.logsumexp};
}

#else

forward_result forward_cuda(Tensor, Tensor, Tensor, double, int64_t, int64_t, int64_t, int64_t) {
  check(false, "this build has no CUDA kernels: install with nvcc present (see README), or move the tensors to the CPU");
  return {Tensor(), Tensor()};
}

#endif

}  // namespace kittens_torch
