// The binding of the arena.
#pragma once

#include <pybind11/pybind11.h>

namespace hvdkit {

void bind_arena(pybind11::module_& module);

}  // namespace hvdkit
