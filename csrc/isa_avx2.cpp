#define ISA_AVX2
#define ISA_NAMESPACE avx2
#include "isa.inl"

namespace sparseloco {
const Kernels avx2_kernels = {
    "avx2",
    {avx2::max_magnitude, avx2::ef_pass, avx2::encode},
    {avx2::check_gaps, avx2::unpack_gaps},
    {avx2::settle, avx2::apply},
    {avx2::digest_row},
};
}
