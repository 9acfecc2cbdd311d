// The binding of the arena: functions, since there is one arena in a process.
#include "module.h"

#include <pybind11/stl.h>

#include "arena.h"
#include "hook.h"

namespace py = pybind11;

namespace hvdkit {

void bind_arena(py::module_& module) {
    py::module_ arena = module.def_submodule("arena", "Memory for gradients that other ranks of the node can map.");
    arena.def("open", [] { return Arena::process().open(); });
    arena.def("install_hooks", &install_hooks);
    arena.def("serve_this_thread", &serve_this_thread, py::arg("always"));
    arena.def("descriptor", [] { return Arena::process().descriptor(); });
    arena.def("add_size", [](std::size_t nbytes) { Arena::process().add_size(nbytes); });
    arena.def("remove_size", [](std::size_t nbytes) { Arena::process().remove_size(nbytes); });
    arena.def("contains",
              [](std::uintptr_t address) { return Arena::process().contains(reinterpret_cast<const void*>(address)); });
    arena.def("pin", [](std::uintptr_t address, std::size_t nbytes) { return Arena::process().pin(address, nbytes); });
    arena.def("unpin", [](const std::vector<std::int64_t>& offsets) {
        for (const std::int64_t offset : offsets) Arena::process().unpin(offset);
    });
    arena.def("make_private", [](const std::vector<std::int64_t>& offsets) {
        for (const std::int64_t offset : offsets) Arena::process().make_private(offset);
    });
    arena.def("end_step", [] { Arena::process().end_step(); });
    arena.def("trim", [] { Arena::process().trim(); });
    arena.def("counts", [] {
        const ArenaCounts counts = Arena::process().counts();
        return py::make_tuple(counts.served, counts.refused, counts.used, counts.populated);
    });
}

}  // namespace hvdkit
