// Where and how a kernel is launched.
#pragma once
#include <cstdint>

namespace kittens {

struct execution {
  void* stream = nullptr;  // sm90: the CUDA stream
  uint32_t seed = 0;       // checked cpu machine: order in which asynchronous work completes
  // cpu: calls body(context, index) for every index below count, on as many threads as the caller owns
  void (*parallel_for)(int64_t count, void (*body)(void* context, int64_t index), void* context) = nullptr;
};

// Hands out tile numbers to CTAs as they become free. Both are zero when a kernel starts; the last CTA to retire makes them zero again.
struct tile_counter {
  int next, retired;
};

}  // namespace kittens
