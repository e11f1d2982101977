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

// Where all tiles of 64 rows fit the multiprocessors at once. Of two head dims the larger counts; those between 128 and 192 keep their row.
struct small_rule {
  int least, head_dim;  // more than, at most
  int configuration;
  const char* reason;
};

constexpr small_rule small_rules_sm90[] = {
    {0, 64, 7, "few query rows: 64x128 tiles on twice the multiprocessors (5.8 against 8.7 us, eight heads of 512 keys)"},
    {64, 128, 8, "few query rows: 64x128 tiles on twice the multiprocessors (8.0 against 10.1 us, eight heads of 512 keys)"},
    {192, 256, 9, "few query rows: 64x64 tiles on twice the multiprocessors (10.9 against 14.0 us, eight heads of 512 keys)"},
};

// Few query rows against many keys: CTAs share a tile's keys. Measured on an H200 with inputs in no cache, in microseconds; of the numbers of ranges
// that make whole waves of CTAs, or as many CTAs as saturate the memory, the one whose time is least is taken. The cpu machine's are in blocks.
struct split_rule {
  int head_dim;       // largest of both head dims
  int configuration;  // row of the machine's split table
  double block;       // a CTA alone, for a block of keys
  double memory;      // the memory, for a block of keys
  double around;      // to begin and to end a range
  double combine;     // forward_combine
  double range;       // and more for each range
  double part_bytes;  // of parts, written and read in a microsecond
  const char* reason;
};

constexpr split_rule split_rules_sm90[] = {
    {64, 0, 0.80, 0.0078, 1.5, 2.4, 0.15, 5e6, "few query rows, many keys: CTAs share a tile's keys, 64x128 tiles"},
    {128, 1, 1.05, 0.016, 1.5, 2.4, 0.15, 5e6, "few query rows, many keys: CTAs share a tile's keys, 64x128 tiles"},
    {256, 2, 0.92, 0.0155, 1.5, 2.4, 0.15, 5e6, "few query rows, many keys: CTAs share a tile's keys, 64x64 tiles"},
};

constexpr split_rule split_rules_cpu[] = {
    {64, 0, 1, 0, 1, 1, 0, 1e9, "few query rows, many keys: threads share a tile's keys"},
    {128, 1, 1, 0, 1, 1, 0, 1e9, "few query rows, many keys: threads share a tile's keys"},
    {256, 2, 1, 0, 1, 1, 0, 1e9, "few query rows, many keys: threads share a tile's keys"},
};

constexpr int64_t few_rows = 64;       // a tile of one consumer
constexpr int64_t most_ranges = 2048;  // of all tiles together: their workspace is at most 135 MB at head_dim 256
constexpr int most_waves = 8;          // beyond, no number of ranges saves anything

constexpr int64_t any_length = int64_t(1) << 40;

constexpr forward_rule rules_sm90[] = {
    {64, 64, true, any_length, 0, "head_dim <= 64: three consumers share K and V over 192 rows"},
    {64, 64, false, any_length, 0, "head_dim <= 64: three consumers share K and V over 192 rows"},
    {96, 96, true, any_length, 1, "head_dim <= 96: 192x96 tiles"},
    {96, 96, false, any_length, 1, "head_dim <= 96: 192x96 tiles"},
    {128, 128, true, 2048, 3, "head_dim <= 128, short masked rows: 128x128 tiles start sooner (476 against 425 TFLOP/s at 1k)"},
    {128, 128, true, any_length, 2, "head_dim <= 128: 192x80 tiles, three consumers (759 against 708 TFLOP/s at 16k)"},
    {128, 128, false, 2048, 3, "head_dim <= 128, short rows: 128x128 tiles start sooner (552 against 479 TFLOP/s at 512)"},
    {128, 128, false, any_length, 2, "head_dim <= 128: 192x80 tiles, three consumers (764 against 739 TFLOP/s at 16k)"},
    {192, 128, true, any_length, 4, "head_dim <= 192, value_dim <= 128: 192x80 tiles (578 against 560 TFLOP/s at 2k)"},
    {192, 128, false, any_length, 4, "head_dim <= 192, value_dim <= 128: 192x80 tiles (602 against 578 TFLOP/s at 2k)"},
    {192, 192, true, any_length, 5, "head_dim <= 192: 128x96 tiles, the next query loads early (587 against 549 TFLOP/s at 2k)"},
    {192, 192, false, any_length, 5, "head_dim <= 192: 128x96 tiles, the next query loads early (731 against 712 TFLOP/s at 2k)"},
    {256, 256, true, any_length, 6, "head_dim <= 256, masked: 128x64 tiles, the next query loads early (624 against 571 TFLOP/s at 2k)"},
    {256, 256, false, any_length, 6, "head_dim <= 256: 128x64 tiles, the next query loads early (692 against 677 TFLOP/s at 2k, level from 8k)"},
};

constexpr forward_rule rules_sm90_modified[] = {
    {64, 64, true, any_length, 0, "head_dim <= 64, modified scores: 128x128 tiles"},
    {128, 128, true, any_length, 1, "head_dim <= 128, modified scores: 128x128 tiles"},
    {128, 128, true, any_length, 2, "head_dim <= 128, modified scores, a soft cap: 128x128 tiles"},
    {256, 256, true, any_length, 3, "head_dim <= 256, modified scores: 128x64 tiles"},
};

constexpr forward_rule rules_cpu[] = {
    {64, 64, true, any_length, 0, "head_dim <= 64"},
    {128, 128, true, any_length, 1, "head_dim <= 128"},
    {256, 256, true, any_length, 2, "head_dim <= 256"},
};

// Where the cpu machine takes a plain call of the drop-in instead of torch's own kernel. Beside each rule torch's time over ours, lowest and
// highest of float32 and bfloat16, head_dim 64 and 128, 8 to 96 heads: a Xeon with AVX-512 and AMX (1, 4 and 16 threads), an EPYC with AVX2
// (1 and 2 threads), torch 2.11 and 2.13. Shorter calls cost us a fixed time per tile; head dims between 64 and 128 are padded.
struct cpu_rule {
  kittens::cpu_flavour flavour;  // at least
  bool masked;
  int threads;       // at least
  int64_t shortest;  // least length_q and length_k
  const char* reason;
};

constexpr cpu_rule cpu_rules[] = {
    {kittens::cpu_flavour::avx2, true, 1, 256, "faster than torch's kernel, which visits masked blocks (measured 1.00 to 3.2 x)"},
    {kittens::cpu_flavour::avx512, false, 4, 256, "faster than torch's kernel (measured 1.04 to 1.94 x)"},
};

const cpu_rule* find_cpu_rule(const forward_problem& p, bool masked) {
  const bool measured = (p.type == element_type::float32 || p.type == element_type::bfloat16) && p.head_dim == p.value_dim &&
                        (p.head_dim == 64 || p.head_dim == 128);
  for (const cpu_rule& rule : cpu_rules)
    if (measured && p.flavour >= rule.flavour && masked == rule.masked && p.processors >= rule.threads && p.length_q >= rule.shortest &&
        p.length_k >= rule.shortest)
      return &rule;
  return nullptr;
}

struct backward_rule {
  int head_dim, value_dim;  // largest it takes
  int configuration;
  const char* reason;
};

constexpr backward_rule backward_rules_sm90[] = {
    {64, 64, 0, "head_dim <= 64: 128 keys, steps of 128 queries"},
    {128, 128, 1, "head_dim <= 128: 128 keys, steps of 64 queries"},
    {192, 128, 2, "head_dim <= 192, value_dim <= 128: 64 keys, a warpgroup for each gradient"},
    {192, 192, 3, "head_dim <= 192: 64 keys, a warpgroup for each gradient"},
    {256, 256, 4, "head_dim <= 256: 64 keys, a warpgroup for each gradient"},
};

constexpr backward_rule backward_rules_sm90_modified[] = {
    {64, 64, 4, "head_dim <= 64, a bool mask alone: 128 keys, steps of 128 queries"},
    {128, 128, 5, "head_dim <= 128, a bool mask alone: 128 keys, steps of 64 queries"},
    {64, 64, 0, "head_dim <= 64: 128 keys, steps of 64 queries"},
    {128, 128, 1, "head_dim <= 128: 128 keys, steps of 64 queries"},
    {128, 128, 2, "head_dim <= 128, a soft cap: 64 keys, a warpgroup for each gradient"},
    {256, 256, 3, "head_dim <= 256: 64 keys, a warpgroup for each gradient"},
};

constexpr backward_rule backward_rules_cpu[] = {
    {64, 64, 0, "head_dim <= 64: steps of 128 queries"},
    {128, 128, 1, "head_dim <= 128: steps of 64 queries"},
    {256, 256, 2, "head_dim <= 256: steps of 64 queries"},
};

// Rows for calls that a bool mask alone modifies take no others, and whole tiles of keys.
bool takes(const backward_row& row, const forward_problem& p, bool mask_alone) {
  return !row.mask_alone || (mask_alone && p.length_k % row.block_k() == 0);
}

template <int N, int Rows>
const backward_rule* find_rule(const backward_rule (&rules)[N], const backward_row (&rows)[Rows], const forward_problem& p, bool mask_alone = false) {
  for (const backward_rule& rule : rules) {
    const backward_row& row = rows[rule.configuration];
    if (p.head_dim <= rule.head_dim && p.value_dim <= rule.value_dim && (row.takes_softcap || !p.softcap) && takes(row, p, mask_alone))
      return &rule;
  }
  return nullptr;
}

// Keys that a query row sees, on average over rows that lie evenly.
int64_t visible_keys(const interval_mask& mask, int64_t length_q) {
  constexpr int samples = 16;
  int64_t sum = 0;
  for (int i = 0; i < samples; i++) {
    const int row = static_cast<int>((2 * i + 1) * length_q / (2 * samples));
    sum += std::max(mask.end_key(row) - mask.first_key(row), 0);
  }
  return sum / samples;
}

int64_t element_bytes(element_type type) {
  return type == element_type::float64 ? 8 : type == element_type::float32 ? 4 : 2;
}

template <int N, int Rows>
const forward_rule* find_rule(const forward_rule (&rules)[N], const forward_row (&rows)[Rows], const forward_problem& p, bool interval) {
  for (const forward_rule& rule : rules)
    if (p.head_dim <= rule.head_dim && p.value_dim <= rule.value_dim && interval == rule.interval && p.length_k <= rule.longest &&
        (rows[rule.configuration].takes_softcap || !p.softcap))
      return &rule;
  return nullptr;
}

const small_rule* find_small_rule(const forward_problem& p) {
  const int64_t tiles = (p.length_q + 63) / 64 * p.heads * p.batch, larger = std::max(p.head_dim, p.value_dim);
  for (const small_rule& rule : small_rules_sm90)
    if (larger > rule.least && larger <= rule.head_dim && (tiles <= p.processors || p.length_q <= few_rows)) return &rule;
  return nullptr;
}

template <int N> const split_rule* find_rule(const split_rule (&rules)[N], const forward_problem& p) {
  for (const split_rule& rule : rules)
    if (std::max(p.head_dim, p.value_dim) <= rule.head_dim) return &rule;
  return nullptr;
}

struct split_work {
  int64_t tiles, blocks;  // tiles, and blocks of keys of the one that sees most
  int64_t read;           // blocks of keys that are read from memory: those of a key head come to all its tiles from the second-level cache
  double part_bytes;      // of one range of all tiles, written and read
  int processors;
};

// Microseconds of a call with so many ranges; 0: without.
double split_time(const split_rule& rule, const split_work& w, int64_t splits) {
  const int64_t ranges = std::max<int64_t>(splits, 1), waves = (w.tiles * ranges + w.processors - 1) / w.processors;
  const double compute = waves * ((w.blocks + ranges - 1) / ranges * rule.block + rule.around), memory = w.read * rule.memory + rule.around;
  // Neither hides the other wholly.
  const double time = std::max(compute, memory) + std::min(compute, memory) / 8;
  return splits == 0 ? time : time + rule.combine + splits * (rule.range + w.part_bytes / rule.part_bytes);
}

// Ranges that a tile's keys are best divided into; 0: best not at all.
int best_splits(const split_rule& rule, const split_work& w) {
  int64_t best = 0;
  double least = split_time(rule, w, 0);
  const auto consider = [&](int64_t most) {
    most = std::min(most, w.blocks);
    if (most < 2) return;
    const int64_t longest = (w.blocks + most - 1) / most, splits = (w.blocks + longest - 1) / longest;
    const double time = split_time(rule, w, splits);
    if (time >= least) return;
    least = time;
    best = splits;
  };
  if (rule.memory > 0) consider(static_cast<int64_t>(rule.block / rule.memory / w.tiles + 1));
  for (int64_t waves = 1; waves <= most_waves; waves++) consider(waves * w.processors / w.tiles);
  return static_cast<int>(best);
}

// The row that is asked for, or that of the rule; false, and the reason, where there is none.
template <class Plan, class Rule, int N>
bool choose_row(Plan& plan, const decltype(Plan::row) (&rows)[N], const Rule* rule, const forward_problem& p, int configuration) {
  plan.configuration = -1;
  if (configuration >= N) {
    plan.reason = "the configuration table has no such row";
    return false;
  }
  if (configuration < 0 && !rule) {
    plan.reason = "head_dim and value_dim must be at most 256";
    return false;
  }
  const int chosen = configuration >= 0 ? configuration : rule->configuration;
  if (p.head_dim > rows[chosen].head_dim || p.value_dim > rows[chosen].value_dim) {
    plan.row = rows[chosen];
    plan.reason = "the row of the configuration table takes smaller head dimensions";
    return false;
  }
  if (p.softcap && !rows[chosen].takes_softcap) {
    plan.row = rows[chosen];
    plan.reason = "this row of the table takes no soft cap";
    return false;
  }
  plan.configuration = chosen;
  plan.row = rows[chosen];
  plan.reason = configuration >= 0 ? "asked for" : rule->reason;
  return true;
}

void set_tiles(forward_plan& plan, const forward_problem& p) {
  const int64_t row_tiles = (p.length_q + plan.row.block_m - 1) / plan.row.block_m;
  plan.tiles = row_tiles * p.heads * p.batch;
  plan.grid = static_cast<int>(std::clamp<int64_t>(plan.tiles * std::max(plan.splits, 1), 1, std::max(p.processors, 1)));
  plan.shared_bytes = forward_tile_bytes(plan.row, static_cast<int>(element_bytes(p.type)), plan.splits > 0);
}

void say_who_is_faster(forward_plan& plan, const forward_problem& p) {
  const cpu_rule* faster = find_cpu_rule(p, !is_open(plan.mask));
  plan.prefer_torch = !faster;
  plan.reason = faster ? faster->reason
                       : "attention(...) runs here; a plain call of the drop-in goes to torch, whose CPU kernel is faster or was not measured "
                         "against ours";
}

// With one query row a head: the query heads of a key head as its rows.
forward_problem join_heads(forward_plan& plan, const forward_problem& problem, bool may) {
  forward_problem p = problem;
  plan.heads_as_rows = may && !p.modified && p.length_q == 1 && p.heads > p.heads_k;
  if (plan.heads_as_rows) {
    p.length_q = p.heads / p.heads_k;
    p.heads = p.heads_k;
  }
  return p;
}

// Whether the call is one of few rows whose keys are worth dividing, or was asked to be divided; the plan is then complete, or says what is wrong.
bool plan_split(forward_plan& plan, const forward_problem& problem, int configuration, int splits) {
  const bool sm90 = problem.machine == machine_kind::sm90;
  if (problem.modified || splits == 0 || (splits < 0 && configuration >= 0) || plan.mask.length_k <= 0) return false;
  const forward_problem p = join_heads(plan, problem, true);
  const split_rule* rule = sm90 ? find_rule(split_rules_sm90, p) : find_rule(split_rules_cpu, p);
  const int64_t row_tiles = (p.length_q + few_rows - 1) / few_rows, tiles = row_tiles * p.heads * p.batch;
  const int processors = std::max(p.processors, 1);
  if (splits < 0) {
    if (!rule || tiles == 0 || (p.length_q > few_rows && (!sm90 || tiles > processors))) return false;
    const int block_n = (sm90 ? forward_rows_sm90_split : forward_rows_cpu_split)[rule->configuration].block_n;
    const int first_of_last = static_cast<int>((row_tiles - 1) * few_rows), last = static_cast<int>(problem.length_q - 1);
    const int64_t keys = plan.heads_as_rows ? plan.mask.length_k : std::max(plan.mask.end_key(last) - plan.mask.first_key(first_of_last), 1);
    const int64_t blocks = (keys + block_n - 1) / block_n;
    const double part_bytes = 2.0 * element_bytes(element_type::float32) * tiles * std::min(p.length_q, few_rows) * p.value_dim;
    splits = best_splits(*rule, {tiles, blocks, p.batch * p.heads_k * blocks, part_bytes, processors});
    // Rows of one head with a sink each: only forward_combine knows such.
    if (splits == 0 && plan.heads_as_rows && p.sinks) splits = 1;
    if (splits == 0 || splits * tiles > most_ranges) return false;
  }
  plan.kernel = sm90 ? "split_forward_sm90" : "split_forward_cpu";
  plan.kind = mask_class::interval;
  const bool chosen = sm90 ? choose_row(plan, forward_rows_sm90_split, rule, p, configuration)
                           : choose_row(plan, forward_rows_cpu_split, rule, p, configuration);
  if (!chosen) return true;
  plan.splits = splits;
  plan.workspace_values = splits * tiles * 64 * (plan.row.value_dim + 1);
  if (!sm90) plan.prefer_torch = true;
  set_tiles(plan, p);
  return true;
}

}  // namespace

forward_plan plan_forward(const forward_problem& problem, int configuration, int splits) {
  const bool sm90 = problem.machine == machine_kind::sm90;
  forward_plan plan{};
  plan.mask = make_interval(problem.corner, problem.window_left, problem.window_right, static_cast<int>(problem.length_q),
                            static_cast<int>(problem.length_k));
  if (!problem.modified && problem.length_q == 1) plan.mask.left = plan.mask.right = window_open;  // it sees all keys that are left
  plan.kind = problem.modified ? mask_class::modified : sm90 && is_open(plan.mask) ? mask_class::full : mask_class::interval;
  if (plan_split(plan, problem, configuration, splits)) return plan;
  const forward_problem p = join_heads(plan, problem, configuration < 0 && !problem.sinks);
  plan.kernel = p.modified ? (sm90 ? "modified_forward_sm90" : "modified_forward_cpu") : sm90 ? "forward_sm90" : "forward_cpu";
  const bool interval = plan.kind != mask_class::full;
  const small_rule* small = sm90 && !p.modified ? find_small_rule(p) : nullptr;
  if (small && configuration < 0) configuration = small->configuration;
  const bool chosen =
      !sm90 ? choose_row(plan, forward_rows_cpu, find_rule(rules_cpu, forward_rows_cpu, p, interval), p, configuration)
      : p.modified
          ? choose_row(plan, forward_rows_sm90_modified, find_rule(rules_sm90_modified, forward_rows_sm90_modified, p, interval), p, configuration)
          : choose_row(plan, forward_rows_sm90, find_rule(rules_sm90, forward_rows_sm90, p, interval), p, configuration);
  if (!chosen) return plan;
  if (small && small->configuration == configuration) plan.reason = small->reason;
  if (!sm90 && configuration < 0 && !p.modified) say_who_is_faster(plan, problem);
  set_tiles(plan, p);
  return plan;
}

// Beyond, the logsumexp over the scale, or 3e38 times it, may leave the range of floats: where a kernel folds it needs both.
constexpr double least_folded_scale = 1e-20, most_folded_scale = 1e20;

backward_plan plan_backward(const forward_problem& p, const backward_request& request, int configuration) {
  const bool sm90 = p.machine == machine_kind::sm90;
  backward_plan plan{};
  plan.kernel = sm90 ? "backward_sm90" : "backward_cpu";
  plan.mask = make_interval(p.corner, p.window_left, p.window_right, static_cast<int>(p.length_q), static_cast<int>(p.length_k));
  const bool may_fold = request.scale >= least_folded_scale && request.scale <= most_folded_scale;
  // dQ is summed, in any order, by a kernel that folds.
  const bool mask_alone = request.mask_alone && request.need_query && request.need_keys && !request.deterministic && may_fold && is_open(plan.mask);
  const bool chosen =
      !sm90 ? choose_row(plan, backward_rows_cpu, find_rule(backward_rules_cpu, backward_rows_cpu, p), p, configuration)
      : p.modified
          ? choose_row(plan, backward_rows_sm90_modified, find_rule(backward_rules_sm90_modified, backward_rows_sm90_modified, p, mask_alone), p,
                       configuration)
          : choose_row(plan, backward_rows_sm90, find_rule(backward_rules_sm90, backward_rows_sm90, p), p, configuration);
  if (!chosen) return plan;
  if (!takes(plan.row, p, mask_alone)) {
    plan.configuration = -1;
    plan.reason = "this row of the table takes a bool mask alone, all gradients but in no fixed order, and a multiple of 128 keys";
    return plan;
  }
  if (p.modified && plan.mask.length_k > 0) plan.mask = with_every_key(plan.mask);
  const auto ceiling = [](int64_t n, int64_t step) { return (n + step - 1) / step; };
  const auto grid_of = [&](int64_t tiles) { return static_cast<int>(std::clamp<int64_t>(tiles, 1, std::max(p.processors, 1))); };
  const bool folds = plan.row.folds && may_fold;
  plan.sums_query = plan.row.sums_query() && (folds || !plan.row.folds) && request.need_query && request.need_keys &&
                    (configuration >= 0 || visible_keys(plan.mask, p.length_q) >= plan.row.sums_from);
  plan.in_order = plan.sums_query && request.deterministic;
  plan.padded_q = ceiling(p.length_q, plan.row.block_q) * plan.row.block_q;
  plan.key_tiles = ceiling(plan.mask.length_k, plan.row.block_k()) * p.heads_k * p.batch;
  plan.query_tiles = ceiling(p.length_q, plan.row.block_m) * p.heads * p.batch;
  plan.key_grid = grid_of(plan.key_tiles);
  plan.query_grid = grid_of(plan.query_tiles);
  plan.folds = folds && request.need_keys;
  plan.vectors = !plan.folds || (request.need_query && !plan.sums_query);
  plan.query_rows = p.batch * p.heads * plan.padded_q;
  plan.query_sum_values = plan.sums_query ? plan.query_rows * plan.row.head_dim : 0;
  plan.turns = plan.in_order ? plan.query_rows / plan.row.block_q : 0;
  plan.workspace_values = ((plan.folds ? 4 : 0) + (plan.vectors ? 2 : 0)) * plan.query_rows + plan.query_sum_values + plan.turns;
  const int bytes = static_cast<int>(element_bytes(p.type));
  plan.shared_bytes = request.need_keys ? backward_key_bytes(plan.row, bytes, plan.sums_query, plan.folds) : 0;
  if (request.need_bias) {
    const bool* apart = request.bias_apart;
    plan.bias_tiles = (apart[0] ? p.batch : 1) * (apart[1] ? p.heads : 1) * (apart[2] ? ceiling(p.length_q, plan.row.block_m) : 1) *
                      (apart[3] ? ceiling(plan.mask.length_k, plan.row.block_n) : 1);
    plan.bias_grid = grid_of(plan.bias_tiles);
    plan.shared_bytes = std::max<int64_t>(plan.shared_bytes, backward_bias_bytes(plan.row, bytes));
  }
  if (request.need_query && !plan.sums_query) plan.shared_bytes = std::max<int64_t>(plan.shared_bytes, backward_query_bytes(plan.row, bytes));
  return plan;
}

}  // namespace kittens_torch
