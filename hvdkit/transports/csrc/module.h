// Adds the memory that ranks share to the native module.
#pragma once

#include <pybind11/pybind11.h>

namespace hvdkit {

void bind_shared_memory(pybind11::module_& module);
void bind_turns(pybind11::module_& module);

}  // namespace hvdkit
