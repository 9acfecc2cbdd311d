// The binding of codec kernels: checks arguments, lets go of the interpreter, runs a kernel.
#include "codec_module.h"

#include <algorithm>

#include "codec_arguments.h"
#include "codecs.h"
#include "default_floats.h"

namespace py = pybind11;

namespace hvdkit {
namespace {

// While a kernel runs.
struct Running {
    py::gil_scoped_release unlocked;
    DefaultFloats floats;
};

std::size_t parts(std::size_t count, std::size_t size) { return (count + size - 1) / size; }

std::string for_elements(std::size_t count, const std::string& how) {
    return "for " + std::to_string(count) + " elements " + how;
}

std::string in_blocks(std::size_t count, std::size_t block) {
    return for_elements(count, "in blocks of " + std::to_string(block));
}

// Appends what is there.
std::vector<const Array*> with(std::vector<const Array*> arrays, const std::optional<Array>& more) {
    if (more) arrays.push_back(&*more);
    return arrays;
}

void quantise_into(py::handle codes, py::handle scales, py::handle values, py::handle residual, py::handle bits,
                   py::handle block, py::handle seed) {
    constexpr const char* function = "quantise_into";
    const Array into = typed_argument(function, "codes", codes, DType::uint8, Access::write);
    const Array scales_into = typed_argument(function, "scales", scales, DType::float32, Access::write);
    const Array from = typed_argument(function, "values", values, DType::float32, Access::read);
    const std::optional<Array> left = optional_floats(function, "residual", residual, Access::write);
    const int width = bits_argument(function, bits);
    const std::size_t size = block_argument(function, block, 16);
    const std::optional<std::uint32_t> counter = seed_argument(function, seed);
    const std::string of_bits = for_elements(from.count, "of " + std::to_string(width) + " bits");
    check_count(function, into, parts(from.count, static_cast<std::size_t>(8 / width)), of_bits);
    check_count(function, scales_into, parts(from.count, size), in_blocks(from.count, size));
    if (left) check_count(function, *left, from.count, "as in values");
    check_all_apart(function, with({&into, &scales_into}, left), {&from});
    const Running running;
    quantise(into.data, scales_into.data, from.data, data_of(left), from.count, width, size, counter);
}

void dequantise_into(py::handle out, py::handle codes, py::handle scales, py::handle bits, py::handle block,
                     double scale, bool accumulate) {
    constexpr const char* function = "dequantise_into";
    const Array into = typed_argument(function, "out", out, DType::float32, Access::write);
    const Array from = typed_argument(function, "codes", codes, DType::uint8, Access::read);
    const Array scales_from = typed_argument(function, "scales", scales, DType::float32, Access::read);
    const int width = bits_argument(function, bits);
    const std::size_t size = block_argument(function, block, 16);
    const std::string of_bits = for_elements(into.count, "of " + std::to_string(width) + " bits");
    check_count(function, from, parts(into.count, static_cast<std::size_t>(8 / width)), of_bits);
    check_count(function, scales_from, parts(into.count, size), in_blocks(into.count, size));
    check_all_apart(function, {&into}, {&from, &scales_from});
    const Running running;
    dequantise(into.data, from.data, scales_from.data, into.count, width, size, static_cast<float>(scale), accumulate);
}

void sign_into(py::handle packed, py::handle scales, py::handle values, py::handle residual, py::handle block) {
    constexpr const char* function = "sign_into";
    const Array into = typed_argument(function, "packed", packed, DType::uint8, Access::write);
    const Array scales_into = typed_argument(function, "scales", scales, DType::float32, Access::write);
    const Array from = typed_argument(function, "values", values, DType::float32, Access::read);
    const std::optional<Array> left = optional_floats(function, "residual", residual, Access::write);
    const std::size_t size = block_argument(function, block, 512);
    check_count(function, into, parts(from.count, 8), for_elements(from.count, "of 1 bit"));
    check_count(function, scales_into, parts(from.count, size), in_blocks(from.count, size));
    if (left) check_count(function, *left, from.count, "as in values");
    check_all_apart(function, with({&into, &scales_into}, left), {&from});
    const Running running;
    sign(into.data, scales_into.data, from.data, data_of(left), from.count, size);
}

void unsign_into(py::handle out, py::handle packed, py::handle scales, py::handle block, double scale,
                 bool accumulate) {
    constexpr const char* function = "unsign_into";
    const Array into = typed_argument(function, "out", out, DType::float32, Access::write);
    const Array from = typed_argument(function, "packed", packed, DType::uint8, Access::read);
    const Array scales_from = typed_argument(function, "scales", scales, DType::float32, Access::read);
    const std::size_t size = block_argument(function, block, 512);
    check_count(function, from, parts(into.count, 8), for_elements(into.count, "of 1 bit"));
    check_count(function, scales_from, parts(into.count, size), in_blocks(into.count, size));
    check_all_apart(function, {&into}, {&from, &scales_from});
    const Running running;
    unsign(into.data, from.data, scales_from.data, into.count, size, static_cast<float>(scale), accumulate);
}

py::tuple select_into(py::handle indices, py::handle picked, py::handle values, py::handle residual, double threshold) {
    constexpr const char* function = "select_into";
    const Array places = typed_argument(function, "indices", indices, DType::uint32, Access::write);
    const Array into = typed_argument(function, "picked", picked, DType::float32, Access::write);
    const Inputs inputs = inputs_argument(function, values, residual, Access::write);
    const float least = threshold_argument(function, threshold);
    check_count(function, into, places.count, "as in indices");
    check_places(function, inputs);
    check_all_apart(function, with({&places, &into}, inputs.residual), with({}, inputs.values));
    Selected selected{};
    {
        const Running running;
        selected = select(places.data, into.data, places.count, data_of(inputs.values), data_of(inputs.residual),
                          inputs.count(), least);
    }
    return py::make_tuple(selected.emitted, selected.found);
}

void scatter_add_into(py::handle out, py::handle indices, py::handle values, double scale) {
    constexpr const char* function = "scatter_add_into";
    const Array into = typed_argument(function, "out", out, DType::float32, Access::write);
    const Array places = typed_argument(function, "indices", indices, DType::uint32, Access::read);
    const Array from = typed_argument(function, "values", values, DType::float32, Access::read);
    check_count(function, from, places.count, "as in indices");
    check_all_apart(function, {&into}, {&places, &from});
    std::optional<std::size_t> bad;
    {
        const Running running;
        bad = first_bad_index(places.data, places.count, into.count);
        if (!bad) scatter_add(into.data, places.data, from.data, places.count, static_cast<float>(scale));
    }
    if (bad) throw_bad_index(function, places, *bad, into.count);
}

void sum_pairs_into(py::handle out, py::handle indices, py::handle values, py::handle scale) {
    constexpr const char* function = "sum_pairs_into";
    const Array into = typed_argument(function, "out", out, DType::float32, Access::write);
    const std::vector<Array> places = typed_list_argument(function, "indices", indices, DType::uint32);
    const std::vector<Array> from = typed_list_argument(function, "values", values, DType::float32);
    const Scale at_last = scale_argument(function, "scale", scale, DType::float32);
    check_as_many(function, "values", from.size(), places.size(), "indices");
    std::vector<Pairs> pairs;
    for (std::size_t k = 0; k < places.size(); ++k) {
        check_count(function, from[k], places[k].count, "as in " + places[k].argument);
        check_all_apart(function, {&into}, {&places[k], &from[k]});
        pairs.push_back({places[k].data, from[k].data, places[k].count});
    }
    std::optional<std::size_t> bad;
    std::size_t whose = 0;
    {
        const Running running;
        for (; whose < pairs.size() && !bad; ++whose) {
            bad = first_bad_index(pairs[whose].indices, pairs[whose].count, into.count);
        }
        if (!bad) sum_pairs(into.data, into.count, pairs, at_last);
    }
    if (bad) throw_bad_index(function, places[whose - 1], *bad, into.count);
}

void abs_sample_into(py::handle sample, py::handle values, py::handle residual, py::handle stride, py::handle seed) {
    constexpr const char* function = "abs_sample_into";
    const Array into = typed_argument(function, "sample", sample, DType::float32, Access::write);
    const Inputs inputs = inputs_argument(function, values, residual, Access::read);
    const std::size_t step = integer_argument(function, "stride", stride, 1, kLargestWord);
    const auto counter = static_cast<std::uint32_t>(integer_argument(function, "seed", seed, 0, kLargestWord));
    const std::string with_stride = for_elements(inputs.count(), "with a stride of " + std::to_string(step));
    check_count(function, into, parts(inputs.count(), step), with_stride);
    check_all_apart(function, {&into}, with(with({}, inputs.values), inputs.residual));
    const Running running;
    abs_sample(into.data, data_of(inputs.values), data_of(inputs.residual), inputs.count(), step, counter);
}

std::uint64_t checksum_of(py::handle array) {
    const Bytes bytes = bytes_argument("checksum", "array", array);
    const Running running;
    return checksum(bytes.data, bytes.nbytes);
}

bool momentum_into(py::handle velocity, py::handle accumulated, py::handle gradient, double factor) {
    constexpr const char* function = "momentum_into";
    const Array moving = typed_argument(function, "velocity", velocity, DType::float32, Access::write);
    const Array sum = typed_argument(function, "accumulated", accumulated, DType::float32, Access::write);
    const Array from = typed_argument(function, "gradient", gradient, DType::float32, Access::read);
    check_count(function, sum, moving.count, "as in velocity");
    check_count(function, from, moving.count, "as in velocity");
    check_all_apart(function, {&moving, &sum}, {&from});
    const Running running;
    return momentum(moving.data, sum.data, from.data, moving.count, static_cast<float>(factor));
}

// The rows, columns and vectors of a low-rank product.
struct Product {
    std::size_t rows, cols, rank;
};

Product product_argument(const char* function, const Array& left, const Array& right, py::handle rows,
                         py::handle cols) {
    const auto height = static_cast<std::size_t>(integer_argument(function, "rows", rows, 1, kLargestWord));
    const auto width = static_cast<std::size_t>(integer_argument(function, "cols", cols, 1, kLargestWord));
    const std::size_t rank = std::max<std::size_t>(1, left.count / height);
    const std::string vectors = "for " + std::to_string(rank) + " vectors";
    check_count(function, left, rank * height, vectors);
    check_count(function, right, rank * width, vectors);
    return {height, width, rank};
}

std::string of_shape(const Product& product) {
    return "in " + std::to_string(product.rows) + " rows of " + std::to_string(product.cols);
}

void project_into(py::handle left, py::handle matrix, py::handle right, py::handle rows, py::handle cols) {
    constexpr const char* function = "project_into";
    const Array into = typed_argument(function, "left", left, DType::float32, Access::write);
    const Array from = typed_argument(function, "matrix", matrix, DType::float32, Access::read);
    const Array vectors = typed_argument(function, "right", right, DType::float32, Access::read);
    const Product product = product_argument(function, into, vectors, rows, cols);
    check_count(function, from, product.rows * product.cols, of_shape(product));
    check_all_apart(function, {&into}, {&from, &vectors});
    const Running running;
    project(into.data, from.data, vectors.data, product.rows, product.cols, product.rank);
}

bool add_and_project_into(py::handle left, py::handle matrix, py::handle gradient, py::handle right, py::handle rows,
                          py::handle cols) {
    constexpr const char* function = "add_and_project_into";
    const Array into = typed_argument(function, "left", left, DType::float32, Access::write);
    const Array sum = typed_argument(function, "matrix", matrix, DType::float32, Access::write);
    const Array from = typed_argument(function, "gradient", gradient, DType::float32, Access::read);
    const Array vectors = typed_argument(function, "right", right, DType::float32, Access::read);
    const Product product = product_argument(function, into, vectors, rows, cols);
    check_count(function, sum, product.rows * product.cols, of_shape(product));
    check_count(function, from, product.rows * product.cols, of_shape(product));
    check_all_apart(function, {&into, &sum}, {&from, &vectors});
    const Running running;
    return add_and_project(into.data, sum.data, from.data, vectors.data, product.rows, product.cols, product.rank);
}

void project_back_into(py::handle right, py::handle matrix, py::handle left, py::handle rows, py::handle cols) {
    constexpr const char* function = "project_back_into";
    const Array into = typed_argument(function, "right", right, DType::float32, Access::write);
    const Array from = typed_argument(function, "matrix", matrix, DType::float32, Access::read);
    const Array vectors = typed_argument(function, "left", left, DType::float32, Access::read);
    const Product product = product_argument(function, vectors, into, rows, cols);
    check_count(function, from, product.rows * product.cols, of_shape(product));
    check_all_apart(function, {&into}, {&from, &vectors});
    const Running running;
    project_back(into.data, from.data, vectors.data, product.rows, product.cols, product.rank);
}

void orthonormalise_vectors(py::handle vectors, py::handle length) {
    constexpr const char* function = "orthonormalise";
    const Array all = typed_argument(function, "vectors", vectors, DType::float32, Access::write);
    const auto each = static_cast<std::size_t>(integer_argument(function, "length", length, 1, kLargestWord));
    check_count(function, all, parts(all.count, each) * each, "in vectors of " + std::to_string(each));
    const Running running;
    orthonormalise(all.data, each, all.count / each);
}

void reconstruct_into(py::handle out, py::handle matrix, py::handle left, py::handle right, py::handle rows,
                      py::handle cols, double scale) {
    constexpr const char* function = "reconstruct_into";
    const std::optional<Array> into = optional_floats(function, "out", out, Access::write);
    const std::optional<Array> from = optional_floats(function, "matrix", matrix, Access::write);
    const Array left_vectors = typed_argument(function, "left", left, DType::float32, Access::read);
    const Array right_vectors = typed_argument(function, "right", right, DType::float32, Access::read);
    const Product product = product_argument(function, left_vectors, right_vectors, rows, cols);
    for (const auto& one : {into, from}) {
        if (one) check_count(function, *one, product.rows * product.cols, of_shape(product));
    }
    check_all_apart(function, with(with({}, into), from), {&left_vectors, &right_vectors});
    const Running running;
    reconstruct(data_of(into), data_of(from), left_vectors.data, right_vectors.data, product.rows, product.cols,
                product.rank, static_cast<float>(scale));
}

}  // namespace

void bind_codecs(py::module_& module) {
    using py::arg;
    module.def("quantise_into", &quantise_into, arg("codes"), arg("scales"), arg("values"), arg("residual"),
               arg("bits"), arg("block"), arg("seed") = py::none());
    module.def("dequantise_into", &dequantise_into, arg("out"), arg("codes"), arg("scales"), arg("bits"), arg("block"),
               arg("scale") = 1.0, arg("accumulate") = false);
    module.def("sign_into", &sign_into, arg("packed"), arg("scales"), arg("values"), arg("residual"), arg("block"));
    module.def("unsign_into", &unsign_into, arg("out"), arg("packed"), arg("scales"), arg("block"), arg("scale") = 1.0,
               arg("accumulate") = false);
    module.def(
        "instructions",
        [] {
            pybind11::dict chosen;
            chosen["select"] = vectors_for_selecting();
            chosen["sign"] = vectors_for_signs();
            return chosen;
        },
        "With which vector instructions loops that are written in several ways run: the quickest, measured once.");
    module.def("select_into", &select_into, arg("indices"), arg("picked"), arg("values"), arg("residual"),
               arg("threshold"));
    module.def("scatter_add_into", &scatter_add_into, arg("out"), arg("indices"), arg("values"), arg("scale") = 1.0);
    module.def("sum_pairs_into", &sum_pairs_into, arg("out"), arg("indices"), arg("values"), arg("scale") = 1.0);
    module.def("abs_sample_into", &abs_sample_into, arg("sample"), arg("values"), arg("residual"), arg("stride"),
               arg("seed"));
    module.def("checksum", &checksum_of, arg("array"));
    module.def("project_into", &project_into, arg("left"), arg("matrix"), arg("right"), arg("rows"), arg("cols"));
    module.def("add_and_project_into", &add_and_project_into, arg("left"), arg("matrix"), arg("gradient"), arg("right"),
               arg("rows"), arg("cols"));
    module.def("project_back_into", &project_back_into, arg("right"), arg("matrix"), arg("left"), arg("rows"),
               arg("cols"));
    module.def("orthonormalise", &orthonormalise_vectors, arg("vectors"), arg("length"));
    module.def("reconstruct_into", &reconstruct_into, arg("out"), arg("matrix"), arg("left"), arg("right"), arg("rows"),
               arg("cols"), arg("scale") = 1.0);
    module.def("momentum_into", &momentum_into, arg("velocity"), arg("accumulated"), arg("gradient"), arg("momentum"));
}

}  // namespace hvdkit
