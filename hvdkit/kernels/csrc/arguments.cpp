// Python's arrays, checked.
#include "arguments.h"

#include <utility>

namespace py = pybind11;

namespace hvdkit {
namespace {

std::string message(const char* function, const std::string& argument, const std::string& expected,
                    const std::string& got) {
    return std::string(function) + ": " + argument + ": expected " + expected + ", got " + got;
}

std::string type_name(py::handle object) { return py::str(py::type::handle_of(object).attr("__name__")); }

std::string name(const Array& array) { return py::str(array.numpy_dtype); }

// ml_dtypes registers bfloat16 with numpy, which gives it a number that holds for the life of the process.
int bfloat16_number() {
    static const int number =
        py::dtype::from_args(py::module_::import("ml_dtypes").attr("bfloat16")).attr("num").cast<int>();
    return number;
}

std::optional<DType> dtype_of(const py::dtype& dtype) {
    if (dtype.byteorder() == '>') return std::nullopt;
    const auto size = dtype.itemsize();
    switch (dtype.kind()) {
        case 'b':
            return DType::boolean;
        case 'u':
            return size == 1 ? DType::uint8 : size == 2 ? DType::uint16 : size == 4 ? DType::uint32 : DType::uint64;
        case 'i':
            return size == 1 ? DType::int8 : size == 2 ? DType::int16 : size == 4 ? DType::int32 : DType::int64;
        case 'f':
            if (size == 2) return DType::float16;
            if (size == 4) return DType::float32;
            if (size == 8) return DType::float64;
            return std::nullopt;
        default:
            if (dtype.num() == bfloat16_number()) return DType::bfloat16;
            return std::nullopt;
    }
}

}  // namespace

Array array_argument(const char* function, const std::string& argument, py::handle object, Access access) {
    if (!py::isinstance<py::array>(object)) {
        throw py::type_error(message(function, argument, "a numpy.ndarray", type_name(object)));
    }
    const auto array = py::reinterpret_borrow<py::array>(object);
    py::dtype numpy_dtype = array.dtype();
    const std::optional<DType> dtype = dtype_of(numpy_dtype);
    if (!dtype)
        throw py::type_error(message(function, argument, "a dtype that the kernels know", py::str(numpy_dtype)));
    if (array.ndim() != 1) {
        throw py::value_error(
            message(function, argument, "a flat array", std::to_string(array.ndim()) + " dimensions"));
    }
    if ((array.flags() & py::array::c_style) == 0) {
        throw py::value_error(message(function, argument, "a contiguous array", "a strided one"));
    }
    if (access == Access::write && !array.writeable()) {
        throw py::value_error(message(function, argument, "a writable array", "a read-only one"));
    }
    auto* const data = static_cast<std::byte*>(const_cast<void*>(array.data()));
    return {argument, *dtype, std::move(numpy_dtype), static_cast<std::size_t>(array.size()), data};
}

std::vector<Array> array_list_argument(const char* function, const std::string& argument, py::handle object,
                                       Access access) {
    if (!py::isinstance<py::list>(object) && !py::isinstance<py::tuple>(object)) {
        throw py::type_error(message(function, argument, "a list or tuple of arrays", type_name(object)));
    }
    const auto sequence = py::reinterpret_borrow<py::sequence>(object);
    if (sequence.size() == 0) throw py::value_error(message(function, argument, "at least one array", "none"));
    std::vector<Array> arrays;
    arrays.reserve(sequence.size());
    for (std::size_t k = 0; k < sequence.size(); ++k) {
        const std::string element = argument + "[" + std::to_string(k) + "]";
        arrays.push_back(array_argument(function, element, sequence[k], access));
    }
    return arrays;
}

Op op_argument(const char* function, py::handle object) {
    if (PyLong_Check(object.ptr())) {
        const long number = PyLong_AsLong(object.ptr());
        if (number == 1 || number == 3 || number == 4 || number == 5) return static_cast<Op>(number);
        PyErr_Clear();  // of a number that no long holds
    }
    throw py::value_error(message(function, "op", "SUM, MIN, MAX or PRODUCT", py::repr(object)));
}

void check_pair(const char* function, const Array& destination, const Array& source) {
    if (source.count != destination.count) {
        throw py::value_error(message(function, source.argument,
                                      std::to_string(destination.count) + " elements as in destination",
                                      std::to_string(source.count)));
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(destination.data);
    const auto source_begin = reinterpret_cast<std::uintptr_t>(source.data);
    const auto end = begin + destination.count * size_of(destination.dtype);
    const auto source_end = source_begin + source.count * size_of(source.dtype);
    const bool same = begin == source_begin && end == source_end;
    if (!same && begin < source_end && source_begin < end) {
        throw py::value_error(message(function, source.argument, "the destination's own memory or memory apart from it",
                                      "a partial overlap"));
    }
}

void check_apart(const char* function, const Array& destination, const Array& other) {
    if (&destination == &other) return;
    if (destination.dtype != other.dtype) {
        throw py::type_error(
            message(function, other.argument, name(destination) + " as in " + destination.argument, name(other)));
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(destination.data);
    const auto other_begin = reinterpret_cast<std::uintptr_t>(other.data);
    const auto end = begin + destination.count * size_of(destination.dtype);
    const auto other_end = other_begin + other.count * size_of(other.dtype);
    if (begin < other_end && other_begin < end) {
        throw py::value_error(
            message(function, other.argument, "memory apart from that of " + destination.argument, "an overlap"));
    }
}

void check_reduction_dtypes(const char* function, const Array& destination, const std::vector<Array>& sources) {
    const Array& first = sources.front();
    for (const Array& source : sources) {
        if (source.dtype != first.dtype) {
            throw py::type_error(
                message(function, source.argument, name(first) + " as in " + first.argument, name(source)));
        }
    }
    const bool mixed = is_half(first.dtype) && destination.dtype == DType::float32;
    if (destination.dtype != first.dtype && !mixed) {
        const std::string expected =
            name(first) + (is_half(first.dtype) ? " or float32" : "") + " for sources of " + name(first);
        throw py::type_error(message(function, destination.argument, expected, name(destination)));
    }
}

Scale scale_argument(const char* function, const char* argument, py::handle object, DType dtype) {
    const bool pair = PyTuple_Check(object.ptr()) && PyTuple_GET_SIZE(object.ptr()) == 2;
    Scale scale;
    scale.factor = PyFloat_AsDouble(pair ? PyTuple_GET_ITEM(object.ptr(), 0) : object.ptr());
    int beyond = 0;
    if (pair && PyErr_Occurred() == nullptr) {
        scale.divisor = PyLong_AsLongLongAndOverflow(PyTuple_GET_ITEM(object.ptr(), 1), &beyond);
    }
    if (PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        throw py::type_error(message(function, argument, "a number or a Scale", py::repr(object)));
    }
    if (beyond != 0 || scale.divisor < 1 || scale.divisor > kLargestDivisor) {
        const std::string expected = "a divisor from 1 to " + std::to_string(kLargestDivisor);
        throw py::value_error(
            message(function, argument, expected, py::str(py::handle(PyTuple_GET_ITEM(object.ptr(), 1)))));
    }
    if (dtype == DType::boolean && !scale.is_one()) {
        throw py::value_error(message(function, argument, "1.0 for bool arrays", py::repr(object)));
    }
    return scale;
}

void check_float_dtype(const char* function, const Array& array) {
    if (!is_half(array.dtype) && array.dtype != DType::float32 && array.dtype != DType::float64) {
        throw py::type_error(message(function, array.argument, "float16, bfloat16, float32 or float64", name(array)));
    }
}

}  // namespace hvdkit
