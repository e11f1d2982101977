// The wgmma instruction for every width and element type: D (64 x N, float) = or += A (64 x 16) B (16 x N).
//
// Inline assembly wants its operands spelled out. The lists below grow by eight accumulators a line; a row of the table at the end makes one
// width. `ss` takes A from shared memory, `rs` from registers; transposed (MN-major) operands are template flags.
#pragma once
#include "types.cuh"

namespace kittens {
inline namespace KITTENS_MACHINE {

template <int N, class T> struct wgmma {
  static_assert(N % 16 == 0 && N >= 16 && N <= 256, "wgmma: N must be a multiple of 16 from 16 to 256");
};

// clang-format off
#define KITTENS_F8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define KITTENS_L8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KITTENS_L16 KITTENS_L8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define KITTENS_L24 KITTENS_L16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define KITTENS_L32 KITTENS_L24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define KITTENS_L40 KITTENS_L32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define KITTENS_L48 KITTENS_L40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define KITTENS_L56 KITTENS_L48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define KITTENS_L64 KITTENS_L56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define KITTENS_L72 KITTENS_L64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define KITTENS_L80 KITTENS_L72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define KITTENS_L88 KITTENS_L80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define KITTENS_L96 KITTENS_L88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define KITTENS_L104 KITTENS_L96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define KITTENS_L112 KITTENS_L104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define KITTENS_L120 KITTENS_L112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define KITTENS_L128 KITTENS_L120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define KITTENS_O8(d) KITTENS_F8(d, 0)
#define KITTENS_O16(d) KITTENS_O8(d), KITTENS_F8(d, 8)
#define KITTENS_O24(d) KITTENS_O16(d), KITTENS_F8(d, 16)
#define KITTENS_O32(d) KITTENS_O24(d), KITTENS_F8(d, 24)
#define KITTENS_O40(d) KITTENS_O32(d), KITTENS_F8(d, 32)
#define KITTENS_O48(d) KITTENS_O40(d), KITTENS_F8(d, 40)
#define KITTENS_O56(d) KITTENS_O48(d), KITTENS_F8(d, 48)
#define KITTENS_O64(d) KITTENS_O56(d), KITTENS_F8(d, 56)
#define KITTENS_O72(d) KITTENS_O64(d), KITTENS_F8(d, 64)
#define KITTENS_O80(d) KITTENS_O72(d), KITTENS_F8(d, 72)
#define KITTENS_O88(d) KITTENS_O80(d), KITTENS_F8(d, 80)
#define KITTENS_O96(d) KITTENS_O88(d), KITTENS_F8(d, 88)
#define KITTENS_O104(d) KITTENS_O96(d), KITTENS_F8(d, 96)
#define KITTENS_O112(d) KITTENS_O104(d), KITTENS_F8(d, 104)
#define KITTENS_O120(d) KITTENS_O112(d), KITTENS_F8(d, 112)
#define KITTENS_O128(d) KITTENS_O120(d), KITTENS_F8(d, 120)

// P0 to P6: the operands after the accumulators, by number.
#define KITTENS_WGMMA(N, R, TYPE, NAME, P0, P1, P2, P3, P4, P5, P6)                                                                    \
  template <> struct wgmma<N, TYPE> {                                                                                                  \
    template <int transpose_a, int transpose_b>                                                                                        \
    KITTENS_INLINE static void ss(float (&d)[R], uint64_t a, uint64_t b, int accumulate) {                                             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P2 ", 0;\n"                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" KITTENS_L##R "}, " P0 ", " P1                  \
                   ", p, 1, 1, " P3 ", " P4 ";\n}\n"                                                                                   \
                   : KITTENS_O##R(d) : "l"(a), "l"(b), "r"(accumulate), "n"(transpose_a), "n"(transpose_b));                           \
    }                                                                                                                                  \
    template <int transpose_b>                                                                                                         \
    KITTENS_INLINE static void rs(float (&d)[R], const uint32_t* a, uint64_t b, int accumulate) {                                      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P5 ", 0;\n"                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" KITTENS_L##R "}, {" P0 ", " P1 ", " P2 ", " P3 \
                   "}, " P4 ", p, 1, 1, " P6 ";\n}\n"                                                                                  \
                   : KITTENS_O##R(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(transpose_b));         \
    }                                                                                                                                  \
  };
#define KITTENS_WGMMA_TYPES(N, R, ...) KITTENS_WGMMA(N, R, bf16, "bf16", __VA_ARGS__) KITTENS_WGMMA(N, R, fp16, "f16", __VA_ARGS__)

KITTENS_WGMMA_TYPES(16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
KITTENS_WGMMA_TYPES(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
KITTENS_WGMMA_TYPES(48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
KITTENS_WGMMA_TYPES(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
KITTENS_WGMMA_TYPES(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
KITTENS_WGMMA_TYPES(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
KITTENS_WGMMA_TYPES(112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
KITTENS_WGMMA_TYPES(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
KITTENS_WGMMA_TYPES(144, 72, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
KITTENS_WGMMA_TYPES(160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
KITTENS_WGMMA_TYPES(176, 88, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
KITTENS_WGMMA_TYPES(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
KITTENS_WGMMA_TYPES(208, 104, "%104", "%105", "%106", "%107", "%108", "%109", "%110")
KITTENS_WGMMA_TYPES(224, 112, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
KITTENS_WGMMA_TYPES(240, 120, "%120", "%121", "%122", "%123", "%124", "%125", "%126")
KITTENS_WGMMA_TYPES(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

#undef KITTENS_WGMMA_TYPES
#undef KITTENS_WGMMA
// clang-format on

}  // namespace KITTENS_MACHINE
}  // namespace kittens
