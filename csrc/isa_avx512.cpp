#if defined(__GNUC__) && !defined(__clang__)
// The compiler's own headers use a variable before it is set, on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define ISA_AVX512
#define ISA_NAMESPACE avx512
#include "isa.inl"

namespace sparseloco {
const Kernels avx512_kernels = {
    "avx512",
    {avx512::max_magnitude, avx512::ef_pass, avx512::encode},
    {avx512::check_gaps, avx512::unpack_gaps},
    {avx512::settle, avx512::apply},
    {avx512::digest_row},
};
}
