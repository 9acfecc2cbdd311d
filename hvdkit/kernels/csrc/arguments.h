// Python's arrays, checked: what is wrong names the function, the argument, what was expected and what came.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <vector>

#include "kernels.h"

namespace hvdkit {

struct Array {
    std::string argument;
    DType dtype;
    pybind11::dtype numpy_dtype;  // for messages only: its name costs more than a small reduction
    std::size_t count;
    std::byte* data;
};

enum class Access { read, write };

Array array_argument(const char* function, const std::string& argument, pybind11::handle object, Access access);
std::vector<Array> array_list_argument(const char* function, const std::string& argument, pybind11::handle object,
                                       Access access);
Op op_argument(const char* function, pybind11::handle object);

// Lengths agree, and no source overlaps the destination unless it is the destination.
void check_pair(const char* function, const Array& destination, const Array& source);

// Two destinations have no memory in common, and one dtype.
void check_apart(const char* function, const Array& destination, const Array& other);

// Sources share one dtype, which is the destination's; halves may also go to a float32 destination.
void check_reduction_dtypes(const char* function, const Array& destination, const std::vector<Array>& sources);

// A number, or a Scale of reduce_op.py: a tuple of factor and divisor. For bool arrays nothing but one.
Scale scale_argument(const char* function, const char* argument, pybind11::handle object, DType dtype);

void check_float_dtype(const char* function, const Array& array);

}  // namespace hvdkit
