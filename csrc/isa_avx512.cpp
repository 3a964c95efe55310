#define ISA_AVX512
#define ISA_NAMESPACE avx512
#include "isa.inl"

namespace sparseloco {
const Kernels avx512_kernels = {"avx512", avx512::max_magnitude};
}
