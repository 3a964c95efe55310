// The table of kernels of one instruction set. Every set must give the same bits.
#pragma once

#include "common.h"
#include "digest.h"
#include "encode.h"
#include "gaps.h"
#include "settle.h"

namespace sparseloco {

struct Kernels {
    const char* name;  // "scalar", "avx2", "avx512"
    EncodeKernels encode;
    GapKernels gaps;
    SettleKernels settle;
    DigestKernels digest;
};

extern const Kernels scalar_kernels;
#ifdef SPARSELOCO_X86
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

// The fastest set that this processor has, unless `select` chose another.
const Kernels& kernels();

// Chooses a set by name; false if this machine does not have it.
bool select(const char* name);

}  // namespace sparseloco
