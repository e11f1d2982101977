// From the host to a running grid.
#pragma once
#include <new>

#include "pipeline.h"

namespace kittens {
inline namespace KITTENS_MACHINE {

template <class Kernel> struct kernel_functions {
  static void body(const void* params, void* shared, int warpgroup, int thread, int index, int count) {
    Kernel::run(*static_cast<const typename Kernel::params*>(params), *static_cast<typename Kernel::shared*>(shared),
                cta{warpgroup, index, count, thread});
  }
  static void construct(void* shared) { ::new (shared) typename Kernel::shared; }
};

// Runs Kernel::run(params, shared, cta) with Kernel::warpgroups warpgroups on `grid` CTAs. Returns null or an error
// text.
template <class Kernel>
KITTENS_INLINE const char* launch(const typename Kernel::params& params, int grid, const execution& execution) {
  static_assert(Kernel::warpgroups >= 1 && Kernel::warpgroups <= 4, "launch: a CTA has 1 to 4 warpgroups");
  constexpr int elected = elected_threads<Kernel>();
  static_assert(elected >= 1 && elected <= 4, "launch: each thread that runs alone has a warp of warpgroup 0");
  using functions = kernel_functions<Kernel>;
  runtime::kernel_entry entry{&functions::body,   &functions::construct,           nullptr,        nullptr,
                              Kernel::warpgroups, elected, sizeof(typename Kernel::shared), KITTENS_CHECKED,
                              starts_early<Kernel>()};
#if defined(__AMX_BF16__)
  entry.enter = &amx::enter;
  entry.leave = &amx::leave;
#endif
  return runtime::launch(entry, &params, grid, execution);
}

}  // namespace KITTENS_MACHINE
}  // namespace kittens
