// The Python face of the kernels: checks of types and shapes, then calls without the interpreter lock.
#include "bind.h"

NB_MODULE(_native, m) {
    using namespace sparseloco;
    m.doc() = "Native CPU kernels; use them through sparseloco.kernels.";
    m.def("instruction_set", [] { return std::string(kernels().name); }, "Name of the set in use.");
    m.def("select", [](const std::string& name) { return select(name.c_str()); }, nb::arg("name"),
          "Use the set of that name; False if this machine lacks it.");
    bind_encode(m);
    bind_settle(m);
}
