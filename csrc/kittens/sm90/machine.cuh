// The Hopper machine: the tile vocabulary on wgmma, TMA and mbarriers. Compiled for sm_90a.
#pragma once
#include "types.cuh"
#include "barriers.cuh"
#include "copies.cuh"
#include "pipeline.cuh"
#include "turnstile.cuh"
#include "mma.cuh"
#include "terms.cuh"
#include "elementwise.cuh"
#include "launch.cuh"
