// All kernels, compiled once per instruction set: included by isa_*.cpp, which define ISA_NAMESPACE.
#include "kernels.h"
#include "passes.inl"
#include "gaps.inl"
#include "gaps_check.inl"
#include "lanes.inl"
#include "settle_sums.inl"
#include "settle.inl"
#include "digest.inl"
