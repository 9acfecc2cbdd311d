// The binding of turns.
#include <pybind11/stl.h>

#include <cstring>
#include <optional>

#include "../../kernels/csrc/arguments.h"
#include "handles.h"
#include "module.h"
#include "turns.h"

namespace py = pybind11;

namespace hvdkit {
namespace {

using State = Turns::State;

// For so long, a rank that waits for others which come at the same moment keeps Python's lock.
constexpr double kMomentSeconds = 20e-6;

// What a rank reads of the parts of all ranks, from byte ``begin`` of each part.
struct Reading {
    enum class How { nothing = 0, reduce = 1, gather = 2, copy = 3 };
    How how;
    std::optional<Array> target;
    std::size_t begin;
    std::size_t root;
    Op op;
    Scale scale;

    std::size_t nbytes() const { return target ? target->count * size_of(target->dtype) : 0; }
};

Reading reading_of(const Turns& turns, int how, py::handle target, std::size_t begin, std::size_t root, py::handle op,
                   py::handle scale) {
    constexpr const char* function = "Turns";
    if (how < 0 || how > 3) throw py::value_error("Turns: reading: expected 0 to 3");
    Reading reading{static_cast<Reading::How>(how), {}, begin, root, Op::sum, {}};
    if (reading.how == Reading::How::nothing) return reading;
    reading.target = array_argument(function, "target", target, Access::write);
    const std::size_t nbytes = reading.nbytes();
    const std::size_t each = reading.how == Reading::How::gather ? nbytes / turns.ranks() : nbytes;
    if (reading.how == Reading::How::gather && nbytes % turns.ranks() != 0) {
        throw py::value_error("Turns: target: expected equal parts of all ranks");
    }
    if (begin > turns.most_bytes() || each > turns.most_bytes() - begin) {
        throw py::value_error("Turns: target: too large");
    }
    if (root >= turns.ranks()) throw py::index_error("Turns: root: no such rank");
    if (reading.how == Reading::How::reduce) {
        reading.op = op_argument(function, op);
        reading.scale = scale_argument(function, "scale", scale, reading.target->dtype);
    }
    return reading;
}

// Reads the parts of a complete turn, and finishes the turn.
void read_parts(Turns& turns, std::uint64_t turn, const Reading& reading) {
    if (reading.how == Reading::How::reduce) {
        Reduction reduction{reading.target->dtype, reading.target->dtype,  reading.op, reading.scale,
                            reading.target->count, {reading.target->data}, {}};
        for (std::size_t rank = 0; rank < turns.ranks(); ++rank) {
            reduction.sources.push_back(turns.part(turn, rank) + reading.begin);
        }
        reduce(reduction);
    } else if (reading.how == Reading::How::gather) {
        const std::size_t each = reading.nbytes() / turns.ranks();
        for (std::size_t rank = 0; rank < turns.ranks() && each > 0; ++rank) {
            std::memcpy(reading.target->data + rank * each, turns.part(turn, rank) + reading.begin, each);
        }
    } else if (reading.how == Reading::How::copy && reading.nbytes() > 0) {
        std::memcpy(reading.target->data, turns.part(turn, reading.root) + reading.begin, reading.nbytes());
    }
    turns.finish(turn);
}

State arrive(Turns& turns, std::uint64_t turn, const Turns::Words& words, py::handle source) {
    if (source.is_none()) return turns.arrive(turn, words, nullptr, 0);
    const Array array = array_argument("Turns", "source", source, Access::read);
    const std::size_t nbytes = array.count * size_of(array.dtype);
    if (nbytes > turns.most_bytes()) throw py::value_error("Turns: source: too large");
    return turns.arrive(turn, words, array.data, nbytes);
}

State wait(Turns& turns, std::uint64_t turn, double seconds) {
    const State state = turns.wait(turn, seconds < kMomentSeconds ? seconds : kMomentSeconds);
    if (state != State::open || seconds <= kMomentSeconds) return state;
    const py::gil_scoped_release unlocked;
    return turns.wait(turn, seconds);
}

int run(Turns& turns, std::uint64_t turn, const Turns::Words& words, py::handle source, py::handle target, int how,
        std::size_t begin, std::size_t root, py::handle op, py::handle scale, double seconds) {
    const Reading reading = reading_of(turns, how, target, begin, root, op, scale);
    State state = arrive(turns, turn, words, source);
    const double deadline = monotonic_seconds() + kMomentSeconds;
    while (state == State::busy && monotonic_seconds() < deadline) {
        relax();
        state = arrive(turns, turn, words, source);
    }
    if (state == State::open) state = wait(turns, turn, seconds);
    if (state != State::complete) return static_cast<int>(state);
    if (!turns.alike(turn)) return static_cast<int>(State::different);
    read_parts(turns, turn, reading);
    return static_cast<int>(state);
}

// The ranks that are behind, none as soon as none is, after ``seconds`` at the latest.
template <typename Behind>
std::vector<std::size_t> watched(Behind behind, double seconds) {
    const double deadline = monotonic_seconds() + seconds;
    while (true) {
        std::vector<std::size_t> ranks = behind();
        if (ranks.empty() || monotonic_seconds() > deadline) return ranks;
        relax();
    }
}

}  // namespace

void bind_turns(py::module_& module) {
    py::class_<Turns>(module, "Turns")
        .def_static("bytes_needed", &Turns::bytes_needed)
        .def(py::init([](Window& window, std::size_t offset, std::size_t ranks, std::size_t me, std::size_t most_bytes,
                         const std::vector<BellHandle*>& bells) {
                 std::byte* const base = within(window, offset, Turns::bytes_needed(ranks, most_bytes));
                 return std::make_unique<Turns>(base, ranks, me, most_bytes, bells_of(bells));
             }),
             py::keep_alive<1, 2>(), py::keep_alive<1, 7>())
        .def("most_bytes", &Turns::most_bytes)
        .def("run", &run, py::arg("turn"), py::arg("words"), py::arg("source"), py::arg("target"), py::arg("reading"),
             py::arg("begin"), py::arg("root"), py::arg("op"), py::arg("scale"), py::arg("seconds"))
        .def(
            "arrive",
            [](Turns& turns, std::uint64_t turn, const Turns::Words& words, py::handle source) {
                return static_cast<int>(arrive(turns, turn, words, source));
            },
            py::arg("turn"), py::arg("words"), py::arg("source"))
        .def(
            "wait",
            [](Turns& turns, std::uint64_t turn, double seconds) {
                const State state = wait(turns, turn, seconds);
                return static_cast<int>(state == State::complete && !turns.alike(turn) ? State::different : state);
            },
            py::arg("turn"), py::arg("seconds"))
        .def(
            "read",
            [](Turns& turns, std::uint64_t turn, py::handle target, int how, std::size_t begin, std::size_t root,
               py::handle op,
               py::handle scale) { read_parts(turns, turn, reading_of(turns, how, target, begin, root, op, scale)); },
            py::arg("turn"), py::arg("target"), py::arg("reading"), py::arg("begin"), py::arg("root"), py::arg("op"),
            py::arg("scale"))
        .def("words",
             [](const Turns& turns, std::uint64_t turn) {
                 std::vector<Turns::Words> words;
                 for (std::size_t rank = 0; rank < turns.ranks(); ++rank) words.push_back(turns.words(turn, rank));
                 return words;
             })
        .def(
            "absent",
            [](const Turns& turns, std::uint64_t turn, double seconds) {
                return watched([&] { return turns.absent(turn); }, seconds);
            },
            py::arg("turn"), py::arg("seconds"), py::call_guard<py::gil_scoped_release>())
        .def("finish", &Turns::finish)
        .def(
            "readers",
            [](const Turns& turns, std::uint64_t turn, double seconds) {
                return watched([&] { return turns.readers(turn); }, seconds);
            },
            py::arg("turn"), py::arg("seconds"), py::call_guard<py::gil_scoped_release>())
        .def("withdraw", &Turns::withdraw)
        .def("watch", &Turns::watch)
        .def("leave", &Turns::leave);
}

}  // namespace hvdkit
