#include "bind.h"

namespace sparseloco {

void bind_encode(nb::module_&) {}

}  // namespace sparseloco
