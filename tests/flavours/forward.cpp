// The forward kernels of one instruction set, whichever the plan would choose.
#include <vector>

#include "attention/instances/forward.h"

#include "kittens/cpu/features.h"

using namespace kittens_torch;

extern "C" bool flavour_runs(int flavour) { return kittens::runs_here(static_cast<kittens::cpu_flavour>(flavour)); }

// query, output (heads, length_q, head_dim), key and value (heads, length_k, head_dim); causal from the lower right. With
// a mask, bool (length_q, length_k), by the kernels that modify scores, whose soft cap is 2.
extern "C" const char* flavour_forward(int flavour, int type, int configuration, int heads, int length_q, int length_k,
                                       int head_dim, void* query, void* key, void* value, void* output,
                                       void* logsumexp, const unsigned char* mask) {
  constexpr forward_launcher (*find_modified[])(element_type, int) = {
      modified_forward_cpu_generic, modified_forward_cpu_avx2, modified_forward_cpu_avx512, modified_forward_cpu_amx};
  constexpr forward_launcher (*find[])(element_type, int) = {forward_cpu_generic, forward_cpu_avx2, forward_cpu_avx512,
                                                             forward_cpu_amx};
  const auto view = [&](void* data, int64_t length) {
    return kittens::tensor_view{
        data, {1, heads, length, head_dim}, {heads * length * head_dim, length * head_dim, head_dim, 1}};
  };
  std::vector<unsigned char> tiles, seen;
  std::vector<tile_range> ranges;
  forward_arguments a{};
  a.query = view(query, length_q);
  a.key = view(key, length_k);
  a.value = view(value, length_k);
  a.output = view(output, length_q);
  a.logsumexp = logsumexp;
  a.type = static_cast<element_type>(type);
  a.configuration = configuration;
  a.grid = 1;
  a.scale = 0.125;
  a.mask = make_interval(2, -1, -1, length_q, length_k);
  if (mask) {
    a.modifiers.mask = mask;
    a.modifiers.mask_stride[2] = length_k;
    a.modifiers.mask_stride[3] = 1;
    a.modifiers.softcap = 2;
    a.classes.row_tiles = (length_q + class_tile - 1) / class_tile;
    a.classes.key_tiles = (length_k + class_tile - 1) / class_tile;
    tiles.resize(a.classes.plane_bytes());
    ranges.resize(a.classes.row_tiles);
    seen.resize(length_k);
    a.classes.tiles = tiles.data();
    a.classes.transposed = tiles.data() + tiles.size() / 2;
    a.classes.ranges = ranges.data();
    a.classes.seen = seen.data();
    a.classes.seen_stride[2] = 1;
    const mask_to_classify known{mask, {0, 0, length_k, 1}, 1, 1, length_q, length_k, a.mask};
    if (const char* error = classify_tiles_cpu(known, a.classes, {})) return error;
  }
  const forward_launcher launch = (mask ? find_modified : find)[flavour](a.type, configuration);
  return launch ? launch(a, {}) : "no kernel";
}
