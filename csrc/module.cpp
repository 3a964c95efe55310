// The Python face of the kernels: checks of types and shapes, then calls without the interpreter lock.
#include <cstdlib>

#include "bind.h"

NB_MODULE(_native, m) {
    using namespace sparseloco;
    m.doc() = "Native CPU kernels; use them through sparseloco.kernels.";
    m.def("instruction_set", [] { return std::string(kernels().name); }, "Name of the set in use.");
    m.def("select", [](const std::string& name) { return select(name.c_str()); }, nb::arg("name"),
          "Use the set of that name; False if this machine lacks it.");
    // Here because the Python layer of the kernels does not read the environment.
    m.def("setting", [](const std::string& name) {
        const char* value = std::getenv(name.c_str());
        return std::string(value ? value : "");
    }, nb::arg("name"), "An environment variable; empty if it is not set.");
    bind_encode(m);
    bind_settle(m);
}
