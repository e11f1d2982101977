// The tile vocabulary of the machine this translation unit is compiled for. See README.md in this folder.
#pragma once
#include "core/defines.h"
#include "core/execution.h"
#include "core/odd.h"
#include "core/shapes.h"
#if KITTENS_SM90
#include "sm90/machine.cuh"
#else
#include "cpu/machine.h"
#endif
