// The binding: checks arguments, lets go of the interpreter, runs a kernel.
#include "../../arena/csrc/module.h"

#include <pybind11/pybind11.h>

#include "../../transports/csrc/module.h"
#include "arguments.h"
#include "codec_module.h"
#include "default_floats.h"
#include "kernels.h"

namespace py = pybind11;

#ifdef HVDKIT_COVERAGE
extern "C" void __gcov_dump();
#endif

namespace hvdkit {
namespace {

void run(const char* function, const char* scale_name, const std::vector<Array>& destinations,
         const std::vector<Array>& sources, Op op, py::handle scale) {
    const Array& first = destinations.front();
    const DType dtype = sources.front().dtype;
    const Scale at_last = scale_argument(function, scale_name, scale, dtype);
    Reduction reduction{dtype, first.dtype, op, at_last, first.count, {}, {}};
    for (const Array& destination : destinations) {
        check_reduction_dtypes(function, destination, sources);
        for (const Array& source : sources) check_pair(function, destination, source);
        for (const Array& other : destinations) check_apart(function, destination, other);
        reduction.destinations.push_back(destination.data);
    }
    for (const Array& source : sources) reduction.sources.push_back(source.data);
    const py::gil_scoped_release unlocked;
    reduce(reduction);
}

void reduce_into(py::handle destination, py::handle sources, py::handle op, py::handle scale) {
    constexpr const char* function = "reduce_into";
    const bool several = py::isinstance<py::list>(destination) || py::isinstance<py::tuple>(destination);
    const std::vector<Array> into =
        several ? array_list_argument(function, "destination", destination, Access::write)
                : std::vector<Array>{array_argument(function, "destination", destination, Access::write)};
    const std::vector<Array> from = array_list_argument(function, "sources", sources, Access::read);
    run(function, "scale", into, from, op_argument(function, op), scale);
}

void scale_into(py::handle destination, py::handle source, py::handle factor) {
    constexpr const char* function = "scale_into";
    const Array into = array_argument(function, "destination", destination, Access::write);
    run(function, "factor", {into}, {array_argument(function, "source", source, Access::read)}, Op::sum, factor);
}

void convert_into(py::handle destination, py::handle source) {
    constexpr const char* function = "convert_into";
    const Array into = array_argument(function, "destination", destination, Access::write);
    const Array from = array_argument(function, "source", source, Access::read);
    check_float_dtype(function, into);
    check_float_dtype(function, from);
    check_pair(function, into, from);
    const py::gil_scoped_release unlocked;
    convert(into.dtype, into.data, from.dtype, from.data, into.count);
}

// For arithmetic of numpy's in a "with" statement.
class DefaultFloatsOfThread {
 public:
    void enter() { floats_.emplace(); }
    void exit(const py::args&) { floats_.reset(); }

 private:
    std::optional<DefaultFloats> floats_;
};

}  // namespace
}  // namespace hvdkit

PYBIND11_MODULE(_native, module) {
    module.doc() = "The kernels in C++, which their numpy twins explain, the memory that ranks share, and the arena.";
#ifdef HVDKIT_COVERAGE
    module.def("write_coverage", &__gcov_dump);  // for processes that end without the C library's clean-up
#endif
    module.def("reduce_into", &hvdkit::reduce_into, py::arg("destination"), py::arg("sources"), py::arg("op"),
               py::arg("scale") = 1.0);
    module.def("scale_into", &hvdkit::scale_into, py::arg("destination"), py::arg("source"), py::arg("factor"));
    module.def("convert_into", &hvdkit::convert_into, py::arg("destination"), py::arg("source"));
    py::class_<hvdkit::DefaultFloatsOfThread>(module, "DefaultFloats")
        .def(py::init<>())
        .def("__enter__", &hvdkit::DefaultFloatsOfThread::enter)
        .def("__exit__", &hvdkit::DefaultFloatsOfThread::exit);
    hvdkit::bind_codecs(module);
    hvdkit::bind_shared_memory(module);
    hvdkit::bind_arena(module);
}
