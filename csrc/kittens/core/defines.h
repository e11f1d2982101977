// What every machine shares: function qualifiers, loop pragmas, and the namespace a translation unit's machine lives in.
//
// A translation unit is compiled for one machine. Its tile types and its kernels live in an inline namespace of that machine's name, so that
// the Hopper kernels and several flavours of the cpu machine link into one library without clashing.
#pragma once

#if defined(__CUDACC__)
#define KITTENS_MACHINE sm90
#define KITTENS_SM90 1
#define KITTENS_KERNEL __device__ __forceinline__
#define KITTENS_INLINE __device__ __forceinline__
#define KITTENS_LONG __device__ __forceinline__
#define KITTENS_HOST_DEVICE __host__ __device__ __forceinline__
#define KITTENS_UNROLL _Pragma("unroll")
#define KITTENS_NO_UNROLL _Pragma("unroll 1")
#else
#define KITTENS_SM90 0
#ifndef KITTENS_MACHINE
#define KITTENS_MACHINE cpu_generic  // or cpu_avx2, cpu_avx512, cpu_amx, checked: defined at the top of an instance file
#endif
#ifndef KITTENS_CHECKED
#define KITTENS_CHECKED 0
#endif
#define KITTENS_KERNEL inline
#define KITTENS_INLINE inline
#define KITTENS_LONG [[gnu::noinline]] inline  // several kernels have it: one copy keeps compile times down
#define KITTENS_HOST_DEVICE inline
#define KITTENS_UNROLL
#define KITTENS_NO_UNROLL
#endif
