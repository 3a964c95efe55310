#define ISA_SCALAR
#define ISA_NAMESPACE scalar
#include "isa.inl"

namespace sparseloco {
const Kernels scalar_kernels = {
    "scalar",
    {scalar::max_magnitude, scalar::ef_pass, scalar::encode},
    {scalar::check_gaps, scalar::unpack_gaps},
    {scalar::settle, scalar::apply},
    {scalar::digest_row},
};
}
