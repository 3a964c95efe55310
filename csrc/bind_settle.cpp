#include "bind.h"

namespace sparseloco {

void bind_settle(nb::module_&) {}

}  // namespace sparseloco
