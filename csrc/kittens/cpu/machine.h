// The cpu machine: the tile vocabulary on SIMD arrays and fibers, fast or checked (KITTENS_CHECKED).
#pragma once
#include "elements.h"
#include "simd.h"
#include "exp2.h"
#include "gemm.h"
#include "operands.h"
#include "types.h"
#include "mma.h"
#include "ops.h"
#include "barriers.h"
#include "memory.h"
#include "pipeline.h"
#include "launch.h"
