// The cpu machine: the tile vocabulary on SIMD arrays and fibers, fast or checked (KITTENS_CHECKED).
#pragma once
#include "barriers.h"
#include "elements.h"
#include "exp2.h"
#include "gemm.h"
#include "launch.h"
#include "memory.h"
#include "mma.h"
#include "operands.h"
#include "ops.h"
#include "pipeline.h"
#include "simd.h"
#include "types.h"
