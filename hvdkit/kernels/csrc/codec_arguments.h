// The arguments of codec kernels, checked.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "arguments.h"

namespace hvdkit {

constexpr std::uint64_t kLargestBlock = std::uint64_t{1} << 30;
constexpr std::uint64_t kLargestWord = 0xFFFFFFFFu;

Array typed_argument(const char* function, const char* argument, pybind11::handle object, DType dtype, Access access);

// At least one, to be read.
std::vector<Array> typed_list_argument(const char* function, const char* argument, pybind11::handle object,
                                       DType dtype);

// None is nothing.
std::optional<Array> optional_floats(const char* function, const char* argument, pybind11::handle object,
                                     Access access);

// The data of what may be nothing.
std::byte* data_of(const std::optional<Array>& array);

// Values and residual, of which one may be None: their number of elements is the same.
struct Inputs {
    std::optional<Array> values;
    std::optional<Array> residual;
    std::size_t count() const { return values ? values->count : residual->count; }
};
Inputs inputs_argument(const char* function, pybind11::handle values, pybind11::handle residual, Access of_residual);

std::uint64_t integer_argument(const char* function, const char* argument, pybind11::handle object, std::uint64_t low,
                               std::uint64_t high);
std::size_t block_argument(const char* function, pybind11::handle object, std::size_t multiple);
int bits_argument(const char* function, pybind11::handle object);
std::optional<std::uint32_t> seed_argument(const char* function, pybind11::handle object);

// A number that is finite and not negative as a float32.
float threshold_argument(const char* function, double threshold);

// ``what`` tells why there must be so many elements.
void check_count(const char* function, const Array& array, std::size_t count, const std::string& what);

// One list of arrays has as many as another.
void check_as_many(const char* function, const char* argument, std::size_t count, std::size_t expected,
                   const std::string& other);

// A position must fit in 32 bits.
void check_places(const char* function, const Inputs& inputs);

[[noreturn]] void throw_bad_index(const char* function, const Array& indices, std::size_t place, std::size_t count);

struct Bytes {
    const std::byte* data;
    std::size_t nbytes;
};

// A contiguous array of any shape and any dtype but object, whose bytes are addresses.
Bytes bytes_argument(const char* function, const char* argument, pybind11::handle object);

// What is written has no memory in common with any other argument.
void check_all_apart(const char* function, const std::vector<const Array*>& written,
                     const std::vector<const Array*>& read);

}  // namespace hvdkit
