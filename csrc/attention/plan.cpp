#include "plan.h"

#include <algorithm>

namespace kittens_torch {
namespace {

// The first rule that fits is taken. Lengths are keys per query row.
struct forward_rule {
  int head_dim, value_dim;  // largest it takes
  bool interval;            // for masked problems
  int64_t longest;          // largest length_k
  int configuration;
  const char* reason;
};

constexpr int64_t any_length = int64_t(1) << 40;

constexpr forward_rule rules_sm90[] = {
    {64, 64, true, any_length, 0, "head_dim <= 64: three consumers share K and V over 192 rows"},
    {64, 64, false, any_length, 0, "head_dim <= 64: three consumers share K and V over 192 rows"},
    {96, 96, true, any_length, 1, "head_dim <= 96: 192x96 tiles"},
    {96, 96, false, any_length, 1, "head_dim <= 96: 192x96 tiles"},
    {128, 128, true, 1024, 3, "head_dim <= 128, short masked rows: 128x128 tiles start sooner (463 against 416 TFLOP/s at 1k)"},
    {128, 128, true, any_length, 2, "head_dim <= 128: 192x80 tiles, three consumers (759 against 708 TFLOP/s at 16k)"},
    {128, 128, false, 4096, 3, "head_dim <= 128, short rows: 128x128 tiles start sooner (552 against 479 TFLOP/s at 512)"},
    {128, 128, false, any_length, 2, "head_dim <= 128: 192x80 tiles, three consumers (764 against 739 TFLOP/s at 16k)"},
    {192, 128, true, any_length, 4, "head_dim <= 192, value_dim <= 128: 128x112 tiles"},
    {192, 128, false, any_length, 4, "head_dim <= 192, value_dim <= 128: 128x112 tiles"},
    {192, 192, true, any_length, 5, "head_dim <= 192: 128x96 tiles"},
    {192, 192, false, any_length, 5, "head_dim <= 192: 128x96 tiles"},
    {256, 256, true, any_length, 6, "head_dim <= 256: 128x80 tiles"},
    {256, 256, false, any_length, 6, "head_dim <= 256: 128x80 tiles"},
};

constexpr forward_rule rules_cpu[] = {
    {64, 64, true, any_length, 0, "head_dim <= 64; a plain call of the drop-in goes to torch, whose CPU kernel is expected to be as fast"},
    {128, 128, true, any_length, 1, "head_dim <= 128; a plain call of the drop-in goes to torch, whose CPU kernel is expected to be as fast"},
    {256, 256, true, any_length, 2, "head_dim <= 256; a plain call of the drop-in goes to torch, whose CPU kernel is expected to be as fast"},
};

int64_t element_bytes(element_type type) {
  return type == element_type::float64 ? 8 : type == element_type::float32 ? 4 : 2;
}

template <int N> const forward_rule* find_rule(const forward_rule (&rules)[N], const forward_problem& p, bool interval) {
  for (const forward_rule& rule : rules)
    if (p.head_dim <= rule.head_dim && p.value_dim <= rule.value_dim && interval == rule.interval && p.length_k <= rule.longest) return &rule;
  return nullptr;
}

}  // namespace

forward_plan plan_forward(const forward_problem& p, int configuration) {
  const bool sm90 = p.machine == machine_kind::sm90;
  forward_plan plan{};
  plan.kernel = sm90 ? "forward_sm90" : "forward_cpu";
  plan.mask = make_interval(p.corner, p.window_left, p.window_right, static_cast<int>(p.length_q), static_cast<int>(p.length_k));
  plan.interval = !sm90 || !is_open(plan.mask);
  plan.configuration = -1;
  plan.prefer_torch = !sm90;
  const forward_rule* rule = sm90 ? find_rule(rules_sm90, p, plan.interval) : find_rule(rules_cpu, p, plan.interval);
  if (configuration >= 0) {
    const int count = sm90 ? forward_count_sm90 : forward_count_cpu;
    if (configuration >= count) {
      plan.reason = "the configuration table has no such row";
      return plan;
    }
    plan.configuration = configuration;
    plan.reason = "asked for";
  } else if (rule) {
    plan.configuration = rule->configuration;
    plan.reason = rule->reason;
  } else {
    plan.reason = "head_dim and value_dim must be at most 256";
    return plan;
  }
  plan.row = sm90 ? forward_rows_sm90[plan.configuration] : forward_rows_cpu[plan.configuration];
  if (p.head_dim > plan.row.head_dim || p.value_dim > plan.row.value_dim) {
    plan.configuration = -1;
    plan.reason = "the row of the configuration table takes smaller head dimensions";
    return plan;
  }
  const int64_t row_tiles = (p.length_q + plan.row.block_m - 1) / plan.row.block_m;
  plan.tiles = row_tiles * p.heads * p.batch;
  plan.grid = static_cast<int>(std::clamp<int64_t>(plan.tiles, 1, std::max(p.processors, 1)));
  plan.shared_bytes = forward_tile_bytes(plan.row, static_cast<int>(element_bytes(p.type)));
  return plan;
}

}  // namespace kittens_torch
