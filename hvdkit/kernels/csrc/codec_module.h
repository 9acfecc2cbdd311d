// Adds the kernels of codecs to the native module.
#pragma once

#include <pybind11/pybind11.h>

namespace hvdkit {

void bind_codecs(pybind11::module_& module);

}  // namespace hvdkit
