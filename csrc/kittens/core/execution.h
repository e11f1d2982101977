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

// Whether a kernel promises to touch global memory only behind cta.await_earlier_launches(). On the GPU its CTAs then take over the
// multiprocessors that the launch before leaves, and set up their barriers meanwhile: 0.5 to 1 us a launch (calls of 6 and of 31 us in a graph).
template <class Kernel> constexpr bool starts_early() {
  if constexpr (requires { Kernel::starts_early; })
    return Kernel::starts_early;
  else
    return false;
}

// Threads of warpgroup 0 that a kernel has run at the same time, each alone: cta.elect(0), cta.elect(1) ...
template <class Kernel> constexpr int elected_threads() {
  if constexpr (requires { Kernel::elected; })
    return Kernel::elected;
  else
    return 1;
}

// Hands out tile numbers to CTAs as they become free. Both are zero when a kernel starts; the last CTA to retire makes them zero again.
struct tile_counter {
  int next, retired;
};

}  // namespace kittens
