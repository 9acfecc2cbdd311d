// The binding of windows, cells, bells, post and staged collectives, each of which keeps the window it lies in alive,
// and of the last resort.
#include "module.h"

#include <pybind11/stl.h>

#include <system_error>

#include "../../kernels/csrc/arguments.h"
#include "last_resort.h"
#include "post.h"
#include "staged.h"
#include "window.h"

namespace py = pybind11;

namespace hvdkit {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

std::byte* within(Window& window, std::size_t offset, std::size_t nbytes) {
    if (offset % kLine != 0 || offset > window.nbytes() || nbytes > window.nbytes() - offset) {
        throw py::value_error("expected a place on a cache line inside the window");
    }
    return window.data() + offset;
}

// Counters of which each is written by one rank.
class Cells {
 public:
    Cells(Window& window, std::size_t offset, std::size_t count)
        : cells_(reinterpret_cast<Counter*>(within(window, offset, count * sizeof(Counter)))), count_(count) {}
    std::uint64_t get(std::size_t index) const { return at(index).get(); }
    void set(std::size_t index, std::uint64_t number) { at(index).set(number); }

 private:
    Counter& at(std::size_t index) const {
        if (index >= count_) throw py::index_error("no such cell");
        return cells_[index];
    }
    Counter* cells_;
    std::size_t count_;
};

// A bell in a window, or one in memory of this process alone.
class BellHandle {
 public:
    BellHandle() : own_(std::make_unique<Bell>()), bell_(own_.get()) {}
    BellHandle(Window& window, std::size_t offset)
        : bell_(reinterpret_cast<Bell*>(within(window, offset, sizeof(Bell)))) {}
    Bell* get() const { return bell_; }

 private:
    std::unique_ptr<Bell> own_;
    Bell* bell_;
};

std::vector<Bell*> bells_of(const std::vector<BellHandle*>& handles) {
    std::vector<Bell*> bells;
    for (const BellHandle* handle : handles) bells.push_back(handle->get());
    return bells;
}

std::shared_ptr<void> keep(py::object object) {
    auto* const held = new py::object(std::move(object));
    return {held, [](void* pointer) {
                const py::gil_scoped_acquire locked;
                delete static_cast<py::object*>(pointer);
            }};
}

template <typename Posting>
std::shared_ptr<Message> post_message(Posting posting, py::buffer buffer, bool writable) {
    const py::buffer_info info = buffer.request(writable);
    auto* const data = static_cast<std::byte*>(info.ptr);
    const auto nbytes = static_cast<std::size_t>(info.size * info.itemsize);
    auto owner = keep(std::move(buffer));
    const py::gil_scoped_release unlocked;
    return posting(data, nbytes, std::move(owner));
}

bool progress(Post& post) {
    std::vector<std::shared_ptr<Message>> finished;
    bool moved = false;
    {
        const py::gil_scoped_release unlocked;
        moved = post.progress();
        finished = post.take_finished();
    }
    return moved;  // and the owners of the buffers are given back here, under the interpreter's lock
}

py::list take_control(Post& post) {
    py::list messages;
    for (const auto& [peer, payload] : post.take_control()) messages.append(py::make_tuple(peer, py::bytes(payload)));
    return messages;
}

Staged make_staged(Area& area, int mode, py::handle array, py::handle op, double scale,
                   std::vector<std::pair<std::size_t, std::size_t>> shares, py::handle source,
                   std::vector<bool> past_cache, bool measure) {
    constexpr const char* function = "Staged";
    const Array data = array_argument(function, "array", array, Access::write);
    check_scale(function, "scale", data.dtype, scale);
    const Array from = source.is_none() ? data : array_argument(function, "source", source, Access::read);
    if (from.dtype != data.dtype) throw py::type_error("Staged: source: expected the dtype of array");
    check_pair(function, data, from);
    if (mode < 0 || mode > 3) throw py::value_error("Staged: mode: expected 0 to 3");
    if (shares.size() != area.ranks()) throw py::value_error("Staged: shares: expected one for each rank");
    for (const auto& [begin, end] : shares) {
        if (begin > end || end > data.count) throw py::value_error("Staged: shares: expected runs of the array");
    }
    if (!past_cache.empty() && past_cache.size() != area.ranks()) {
        throw py::value_error("Staged: past_cache: expected one for each rank, or none");
    }
    return Staged(area, static_cast<Mode>(mode), data.dtype, op_argument(function, op), scale, data.data, data.count,
                  std::move(shares), from.data, std::move(past_cache), measure);
}

}  // namespace

void bind_shared_memory(py::module_& module) {
    py::register_local_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const std::system_error& error) {
            errno = error.code().value();
            PyErr_SetFromErrno(PyExc_OSError);
        }
    });
    py::class_<Window>(module, "Window", py::buffer_protocol())
        .def(py::init<int, std::uint64_t, std::size_t>(), py::arg("descriptor"), py::arg("offset"), py::arg("nbytes"))
        .def("populate", &Window::populate, py::arg("begin"), py::arg("nbytes"), Unlocked())
        .def_property_readonly("nbytes", &Window::nbytes)
        .def("give_back_at_end", &Window::give_back_at_end, py::arg("begin"), py::arg("nbytes"))
        .def_buffer([](Window& window) {
            return py::buffer_info(reinterpret_cast<std::uint8_t*>(window.data()),
                                   static_cast<py::ssize_t>(window.nbytes()));
        });
    py::class_<Cells>(module, "Cells")
        .def(py::init<Window&, std::size_t, std::size_t>(), py::keep_alive<1, 2>())
        .def("get", &Cells::get)
        .def("set", &Cells::set);
    py::class_<BellHandle>(module, "Bell")
        .def(py::init<>())
        .def(py::init<Window&, std::size_t>(), py::keep_alive<1, 2>())
        .def("count", [](const BellHandle& bell) { return bell.get()->count(); })
        .def("ring", [](const BellHandle& bell) { bell.get()->ring(); })
        .def(
            "sleep",
            [](const BellHandle& bell, std::uint32_t seen, double seconds, double spin) {
                bell.get()->sleep(seen, seconds, spin);
            },
            py::arg("seen"), py::arg("seconds"), py::arg("spin_seconds") = 0.0, Unlocked());
    py::class_<Message, std::shared_ptr<Message>>(module, "Message", py::dynamic_attr()).def("done", [](Message& one) {
        return one.done.load();
    });
    py::class_<Post>(module, "Post")
        .def_static("bytes_needed", &Post::bytes_needed)
        .def(py::init([](Window& window, std::size_t offset, std::size_t ranks, std::size_t me, std::size_t data,
                         std::size_t control, const std::vector<BellHandle*>& bells) {
                 std::byte* const base = within(window, offset, Post::bytes_needed(ranks, data, control));
                 return std::make_unique<Post>(base, ranks, me, data, control, bells_of(bells));
             }),
             py::keep_alive<1, 2>(), py::keep_alive<1, 8>())
        .def("send",
             [](Post& post, std::size_t peer, std::uint32_t tag, py::buffer buffer) {
                 return post_message(
                     [&](std::byte* data, std::size_t nbytes, std::shared_ptr<void> owner) {
                         return post.send(peer, tag, data, nbytes, std::move(owner));
                     },
                     std::move(buffer), false);
             })
        .def("receive",
             [](Post& post, std::size_t peer, std::uint32_t tag, py::buffer buffer) {
                 return post_message(
                     [&](std::byte* data, std::size_t nbytes, std::shared_ptr<void> owner) {
                         return post.receive(peer, tag, data, nbytes, std::move(owner));
                     },
                     std::move(buffer), true);
             })
        .def("send_control", &Post::send_control, Unlocked())
        .def("progress", &progress)
        .def("take_control", &take_control);
    py::class_<Area>(module, "Area")
        .def_static("bytes_needed", &Area::bytes_needed)
        .def(py::init([](Window& window, std::size_t offset, std::size_t ranks, std::size_t me, std::size_t depth,
                         std::size_t slot_bytes, const std::vector<BellHandle*>& bells) {
                 std::byte* const base = within(window, offset, Area::bytes_needed(ranks, depth, slot_bytes));
                 return std::make_unique<Area>(base, ranks, me, depth, slot_bytes, bells_of(bells));
             }),
             py::keep_alive<1, 2>(), py::keep_alive<1, 8>())
        .def("own_slots", &Area::own_slots)
        .def("left_by_others", &Area::left_by_others)
        .def("line_seconds", &Area::line_seconds)
        .def_property_readonly("slot_bytes", &Area::slot_bytes);
    py::class_<Staged>(module, "Staged")
        .def(py::init(&make_staged), py::arg("area"), py::arg("mode"), py::arg("array"), py::arg("op"),
             py::arg("scale"), py::arg("shares"), py::arg("source") = py::none(),
             py::arg("past_cache") = std::vector<bool>(), py::arg("measure") = false, py::keep_alive<1, 2>(),
             py::keep_alive<1, 4>(), py::keep_alive<1, 8>())
        .def("advance", &Staged::advance, py::arg("spin_seconds"), Unlocked())
        .def("awaited", &Staged::awaited);
    py::class_<LastResort>(module, "LastResort")
        .def(py::init<double, std::string>())
        .def("cancel", &LastResort::cancel, Unlocked());
}

}  // namespace hvdkit
