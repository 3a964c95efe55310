// All kernels, compiled once per instruction set: included by isa_*.cpp, which define ISA_NAMESPACE.
#if defined(ISA_AVX512) || defined(ISA_AVX2)
#include <immintrin.h>
#endif

#include "kernels.h"
#include "passes.inl"
#if defined(ISA_AVX512)
#include "encode_avx512.inl"
#include "select_avx512.inl"
#elif defined(ISA_AVX2)
#include "encode_avx2.inl"
#include "select_avx2.inl"
#else
#include "encode_scalar.inl"
#include "select_scalar.inl"
#endif
#include "select.inl"
#include "encode_gaps.inl"
#include "encode.inl"
#include "gaps.inl"
#include "gaps_check.inl"
#include "lanes.inl"
#include "settle_sums.inl"
#include "settle_step.inl"
#include "settle_sparse.inl"
#include "settle.inl"
#include "digest.inl"
