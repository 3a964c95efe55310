#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 warns of its own header (its bug 105593)
#endif
#define ISA_AVX512
#define ISA_NAMESPACE avx512
#include "isa.inl"

namespace sparseloco {
const Kernels avx512_kernels = {
    "avx512",
    {avx512::max_magnitude, avx512::ef_pass, avx512::encode},
};
}
