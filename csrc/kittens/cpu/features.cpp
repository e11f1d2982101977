#include "features.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kittens {
namespace {

#if defined(__x86_64__)
struct registers {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

registers cpuid(uint32_t leaf) {
  registers r;
  __get_cpuid_count(leaf, 0, &r.a, &r.b, &r.c, &r.d);
  return r;
}

// What the system saves and restores when it switches threads: without it, the instructions fault.
uint64_t saved_state() {
  if (!(cpuid(1).c >> 27 & 1)) return 0;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

bool has(uint64_t value, uint64_t bits) { return (value & bits) == bits; }

// Linux lets a process use the tile registers only after it has asked.
bool amx_is_permitted() {
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

bool detect(cpu_flavour flavour) {
  constexpr uint32_t fma = 1u << 12, f16c = 1u << 29;                                     // leaf 1, ecx
  constexpr uint32_t avx2 = 1u << 5, avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // leaf 7, ebx: f, dq, bw, vl
  constexpr uint32_t amx = 1u << 22 | 1u << 24;                                           // leaf 7, edx: bf16, tile
  constexpr uint64_t avx_state = 0x6, avx512_state = 0xe6, amx_state = 0x60000;
  const uint64_t state = saved_state();
  switch (flavour) {
    case cpu_flavour::generic:
      return true;
    case cpu_flavour::avx2:
      return has(state, avx_state) && has(cpuid(1).c, fma | f16c) && has(cpuid(7).b, avx2);
    case cpu_flavour::avx512:
      return detect(cpu_flavour::avx2) && has(state, avx512_state) && has(cpuid(7).b, avx512);
    case cpu_flavour::amx:
      return detect(cpu_flavour::avx512) && has(state, amx_state) && has(cpuid(7).d, amx) && amx_is_permitted();
  }
  return false;
}
#else
bool detect(cpu_flavour flavour) { return flavour == cpu_flavour::generic; }
#endif

}  // namespace

const char* name(cpu_flavour flavour) {
  constexpr const char* names[cpu_flavours] = {"generic", "avx2", "avx512", "amx"};
  return names[static_cast<int>(flavour)];
}

bool is_compiled(cpu_flavour flavour) {
#if defined(__x86_64__)
  return static_cast<int>(flavour) < cpu_flavours;
#else
  return flavour == cpu_flavour::generic;
#endif
}

bool runs_here(cpu_flavour flavour) {
  static const bool runs[cpu_flavours] = {detect(cpu_flavour::generic), detect(cpu_flavour::avx2),
                                          detect(cpu_flavour::avx512), detect(cpu_flavour::amx)};
  return runs[static_cast<int>(flavour)];
}

cpu_flavour fastest_cpu_flavour() {
  for (int i = cpu_flavours - 1; i > 0; i--)
    if (runs_here(static_cast<cpu_flavour>(i))) return static_cast<cpu_flavour>(i);
  return cpu_flavour::generic;
}

}  // namespace kittens
