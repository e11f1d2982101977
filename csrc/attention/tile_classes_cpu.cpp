// The classes of a mask's tiles, on the cpu.
#include <algorithm>

#include "tile_classes.h"

namespace kittens_torch {
namespace {

struct strips {
  mask_to_classify m;
  tile_classes classes;
  bool collects_seen;
};

// One row of tiles, or of padding.
void classify_strip(void* context, int64_t strip) {
  const auto& [m, classes, collects_seen] = *static_cast<const strips*>(context);
  const int padded_rows = padded_classes(classes.row_tiles), row_tile = static_cast<int>(strip % padded_rows);
  const int64_t plane = strip / padded_rows;
  const int first_row = row_tile * class_tile, end_row = std::min(first_row + class_tile, m.rows);
  const unsigned char* mask = m.mask + plane / m.heads * m.stride[0] + plane % m.heads * m.stride[1];
  unsigned char* seen = classes.seen + plane * m.keys;
  tile_range range{classes.key_tiles, 0};
  for (int tile = 0; tile < padded_classes(classes.key_tiles); tile++) {
    const int first_key = tile * class_tile, end_key = std::min(first_key + class_tile, m.keys);
    bool shows = false, hides = false;
    for (int row = first_row; row < end_row; row++)
      for (int key = first_key; key < end_key; key++) {
        const bool visible = mask[row * m.stride[2] + key * m.stride[3]] != 0;
        shows |= visible;
        hides |= !visible;
        if (collects_seen && visible && m.visible.visible(row, key)) __atomic_store_n(seen + key, 1, __ATOMIC_RELAXED);
      }
    classes.set(plane, row_tile, tile, (shows ? tile_shows : 0) | (hides ? tile_hides : 0));
    if (shows) range = {std::min(range.first, tile), tile + 1};
  }
  if (row_tile < classes.row_tiles) classes.ranges[plane * classes.row_tiles + row_tile] = range.end > 0 ? range : tile_range{0, 0};
}

}  // namespace

const char* classify_tiles_cpu(const mask_to_classify& m, const tile_classes& classes, const kittens::execution& execution) {
  strips all{m, classes, m.rows > 1};
  const int64_t count = int64_t(m.batch) * m.heads * padded_classes(classes.row_tiles);
  if (execution.parallel_for) {
    execution.parallel_for(count, &classify_strip, &all);
  } else {
    for (int64_t strip = 0; strip < count; strip++) classify_strip(&all, strip);
  }
  return nullptr;
}

}  // namespace kittens_torch
