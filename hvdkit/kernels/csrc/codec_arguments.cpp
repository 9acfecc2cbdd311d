// Checks of what is given to codec kernels.
#include "codec_arguments.h"

#include <cmath>

#include "memory.h"

namespace py = pybind11;

namespace hvdkit {
namespace {

std::string message(const char* function, const std::string& argument, const std::string& expected,
                    const std::string& got) {
    return std::string(function) + ": " + argument + ": expected " + expected + ", got " + got;
}

const char* name(DType dtype) {
    switch (dtype) {
        case DType::uint8:
            return "uint8";
        case DType::uint32:
            return "uint32";
        default:
            return "float32";
    }
}

// Nothing if it is negative or beyond 64 bits.
std::optional<std::uint64_t> number_of(const char* function, const char* argument, py::handle object) {
    if (!PyLong_Check(object.ptr())) {
        const std::string type = py::str(py::type::handle_of(object).attr("__name__"));
        throw py::type_error(message(function, argument, "an integer", type));
    }
    const unsigned long long number = PyLong_AsUnsignedLongLong(object.ptr());
    if (!PyErr_Occurred()) return number;
    PyErr_Clear();
    return std::nullopt;
}

bool overlap(const Array& one, const Array& other) {
    const auto begin = reinterpret_cast<std::uintptr_t>(one.data);
    const auto other_begin = reinterpret_cast<std::uintptr_t>(other.data);
    const auto end = begin + one.count * size_of(one.dtype);
    const auto other_end = other_begin + other.count * size_of(other.dtype);
    return begin < other_end && other_begin < end;
}

void check_dtype(const char* function, const Array& array, DType dtype) {
    if (array.dtype != dtype) {
        throw py::type_error(message(function, array.argument, name(dtype), py::str(array.numpy_dtype)));
    }
}

}  // namespace

Array typed_argument(const char* function, const char* argument, py::handle object, DType dtype, Access access) {
    Array array = array_argument(function, argument, object, access);
    check_dtype(function, array, dtype);
    return array;
}

std::vector<Array> typed_list_argument(const char* function, const char* argument, py::handle object, DType dtype) {
    std::vector<Array> arrays = array_list_argument(function, argument, object, Access::read);
    for (const Array& array : arrays) check_dtype(function, array, dtype);
    return arrays;
}

std::optional<Array> optional_floats(const char* function, const char* argument, py::handle object, Access access) {
    if (object.is_none()) return std::nullopt;
    return typed_argument(function, argument, object, DType::float32, access);
}

std::byte* data_of(const std::optional<Array>& array) { return array ? array->data : nullptr; }

Inputs inputs_argument(const char* function, py::handle values, py::handle residual, Access of_residual) {
    if (values.is_none() && residual.is_none()) {
        throw py::value_error(message(function, "values", "an array here or as residual", "None"));
    }
    Inputs inputs{optional_floats(function, "values", values, Access::read),
                  optional_floats(function, "residual", residual, of_residual)};
    if (inputs.values && inputs.residual) {
        check_count(function, *inputs.residual, inputs.values->count, "as in values");
    }
    return inputs;
}

std::uint64_t integer_argument(const char* function, const char* argument, py::handle object, std::uint64_t low,
                               std::uint64_t high) {
    const std::optional<std::uint64_t> number = number_of(function, argument, object);
    if (number && *number >= low && *number <= high) return *number;
    const std::string expected = "an integer from " + std::to_string(low) + " to " + std::to_string(high);
    throw py::value_error(message(function, argument, expected, py::repr(object)));
}

std::size_t block_argument(const char* function, py::handle object, std::size_t multiple) {
    const std::optional<std::uint64_t> number = number_of(function, "block", object);
    if (number && *number >= multiple && *number <= kLargestBlock && *number % multiple == 0) return *number;
    const std::string expected = "a multiple of " + std::to_string(multiple) + " from " + std::to_string(multiple) +
                                 " to " + std::to_string(kLargestBlock);
    throw py::value_error(message(function, "block", expected, py::repr(object)));
}

int bits_argument(const char* function, py::handle object) {
    const std::optional<std::uint64_t> number = number_of(function, "bits", object);
    if (number && (*number == 4 || *number == 8)) return static_cast<int>(*number);
    throw py::value_error(message(function, "bits", "4 or 8", py::repr(object)));
}

std::optional<std::uint32_t> seed_argument(const char* function, py::handle object) {
    if (object.is_none()) return std::nullopt;
    return static_cast<std::uint32_t>(integer_argument(function, "seed", object, 0, kLargestWord));
}

float threshold_argument(const char* function, double threshold) {
    const auto rounded = static_cast<float>(threshold);
    if (std::isfinite(rounded) && rounded >= 0.0f) return rounded;
    throw py::value_error(
        message(function, "threshold", "a finite float32 that is not negative", py::repr(py::float_(threshold))));
}

void check_count(const char* function, const Array& array, std::size_t count, const std::string& what) {
    if (array.count == count) return;
    const std::string expected = std::to_string(count) + " elements " + what;
    throw py::value_error(message(function, array.argument, expected, std::to_string(array.count)));
}

void check_as_many(const char* function, const char* argument, std::size_t count, std::size_t expected,
                   const std::string& other) {
    if (count == expected) return;
    const std::string arrays = std::to_string(expected) + " arrays as in " + other;
    throw py::value_error(message(function, argument, arrays, std::to_string(count)));
}

void check_places(const char* function, const Inputs& inputs) {
    if (inputs.count() <= kLargestWord) return;
    const Array& array = inputs.values ? *inputs.values : *inputs.residual;
    const std::string expected = "at most " + std::to_string(kLargestWord) + " elements";
    throw py::value_error(message(function, array.argument, expected, std::to_string(array.count)));
}

void throw_bad_index(const char* function, const Array& indices, std::size_t place, std::size_t count) {
    const std::uint32_t index = load<std::uint32_t>(indices.data, place);
    std::string got = std::to_string(index);
    if (place > 0) got += " after " + std::to_string(load<std::uint32_t>(indices.data, place - 1));
    const std::string expected = "ascending indices below " + std::to_string(count);
    throw py::value_error(message(function, indices.argument, expected, got));
}

Bytes bytes_argument(const char* function, const char* argument, py::handle object) {
    if (!py::isinstance<py::array>(object)) {
        const std::string type = py::str(py::type::handle_of(object).attr("__name__"));
        throw py::type_error(message(function, argument, "a numpy.ndarray", type));
    }
    const auto array = py::reinterpret_borrow<py::array>(object);
    if (array.dtype().attr("hasobject").cast<bool>()) {
        throw py::type_error(message(function, argument, "a dtype without objects", py::str(array.dtype())));
    }
    if ((array.flags() & py::array::c_style) == 0) {
        throw py::value_error(message(function, argument, "a contiguous array", "a strided one"));
    }
    return {static_cast<const std::byte*>(array.data()), static_cast<std::size_t>(array.nbytes())};
}

void check_all_apart(const char* function, const std::vector<const Array*>& written,
                     const std::vector<const Array*>& read) {
    for (std::size_t k = 0; k < written.size(); ++k) {
        std::vector<const Array*> others(written.begin(), written.begin() + static_cast<std::ptrdiff_t>(k));
        others.insert(others.end(), read.begin(), read.end());
        for (const Array* other : others) {
            if (!overlap(*written[k], *other)) continue;
            const std::string expected = "memory apart from that of " + other->argument;
            throw py::value_error(message(function, written[k]->argument, expected, "an overlap"));
        }
    }
}

}  // namespace hvdkit
