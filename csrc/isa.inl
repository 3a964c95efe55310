// All kernels, compiled once per instruction set: included by isa_*.cpp, which define ISA_NAMESPACE.
#include "kernels.h"
#include "passes.inl"
