// The binding of windows, cells, bells, message rings and staged collectives, each of which keeps the window it lies in
// alive, of the last resort, and of the heartbeat.
#include "module.h"

#include <pybind11/stl.h>

#include <optional>
#include <system_error>
#include <tuple>

#include "../../arena/csrc/arena.h"
#include "../../kernels/csrc/arguments.h"
#include "handles.h"
#include "heartbeat.h"
#include "in_place.h"
#include "last_resort.h"
#include "message_rings.h"
#include "staged.h"
#include "window.h"

namespace py = pybind11;

namespace hvdkit {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

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

std::unique_ptr<Heartbeat> make_heartbeat(Window* window, std::size_t offset, std::size_t ranks, std::size_t me,
                                          std::vector<Heartbeat::Connection> connections, double seconds) {
    if (me >= ranks) throw py::index_error("Heartbeat: me: no such rank");
    for (const auto& [socket, rank] : connections) {
        if (rank >= ranks) throw py::index_error("Heartbeat: connections: no such rank");
    }
    if (!(seconds > 0.0)) throw py::value_error("Heartbeat: seconds: expected more than zero");
    auto* const counters =
        window == nullptr ? nullptr : reinterpret_cast<Counter*>(within(*window, offset, ranks * sizeof(Counter)));
    return std::make_unique<Heartbeat>(counters, ranks, me, std::move(connections), seconds);
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

bool progress(MessageRings& rings) {
    std::vector<std::shared_ptr<Message>> finished;
    bool moved = false;
    {
        const py::gil_scoped_release unlocked;
        moved = rings.progress();
        finished = rings.take_finished();
    }
    for (const auto& message : finished) message->keep.reset();  // receives from any peer are listed elsewhere too
    return moved;  // and the owners of the buffers are given back here, under the interpreter's lock
}

py::list take_control(MessageRings& rings) {
    py::list messages;
    for (const auto& [peer, payload] : rings.take_control()) messages.append(py::make_tuple(peer, py::bytes(payload)));
    return messages;
}

Staged make_staged(Area& area, int mode, py::handle array, py::handle op, py::handle scale,
                   std::vector<std::pair<std::size_t, std::size_t>> shares, py::handle source,
                   std::vector<bool> past_cache, bool measure, py::handle out) {
    constexpr const char* function = "Staged";
    const Array data = array_argument(function, "array", array, Access::write);
    const Scale at_last = scale_argument(function, "scale", scale, data.dtype);
    const Array from = source.is_none() ? data : array_argument(function, "source", source, Access::read);
    if (from.dtype != data.dtype) throw py::type_error("Staged: source: expected the dtype of array");
    check_pair(function, data, from);
    if (mode < 0 || mode > 4) throw py::value_error("Staged: mode: expected 0 to 4");
    if (shares.size() != area.ranks()) throw py::value_error("Staged: shares: expected one for each rank");
    for (const auto& [begin, end] : shares) {
        if (begin > end || end > data.count) throw py::value_error("Staged: shares: expected runs of the array");
    }
    if (mode == static_cast<int>(Mode::exchange)) {
        for (const auto& [begin, end] : shares) {
            if (end - begin != shares[0].second - shares[0].first) {
                throw py::value_error("Staged: shares: expected equal ones for an exchange");
            }
        }
        if (from.data == data.data && data.count > 0) throw py::value_error("Staged: source: expected other memory");
    }
    if (!past_cache.empty() && past_cache.size() != area.ranks()) {
        throw py::value_error("Staged: past_cache: expected one for each rank, or none");
    }
    std::byte* own = nullptr;
    if (!out.is_none()) {
        const Array part = array_argument(function, "out", out, Access::write);
        const auto [begin, end] = shares[area.me()];
        if (part.dtype != data.dtype || part.count != end - begin) {
            throw py::value_error("Staged: out: expected an array of this rank's share");
        }
        own = part.data;
    }
    return Staged(area, static_cast<Mode>(mode), data.dtype, op_argument(function, op), at_last, data.data, data.count,
                  std::move(shares), from.data, std::move(past_cache), measure, own);
}

// What each rank has: its region of the window; its arena, which for this rank is the process's own.
InPlace make_in_place(Window& window, std::size_t table_offset, std::size_t me,
                      const std::vector<std::tuple<int, std::size_t, std::optional<std::size_t>>>& slots,
                      const std::vector<std::size_t>& regions, std::size_t region_bytes,
                      const std::vector<Window*>& arenas) {
    if (me >= regions.size() || arenas.size() != regions.size()) {
        throw py::value_error("InPlace: expected a region and an arena, or None, for each rank");
    }
    std::vector<InPlaceSlot> places;
    for (const auto& [number, elements, offset] : slots) {
        if (number < 0 || number > static_cast<int>(DType::float64)) throw py::value_error("InPlace: no such dtype");
        const auto dtype = static_cast<DType>(number);
        if (offset && *offset + elements * size_of(dtype) > region_bytes) {
            throw py::value_error("InPlace: slots: expected places inside of a region");
        }
        places.push_back({dtype, elements, offset});
    }
    std::vector<Mapped> mapped_regions;
    for (const std::size_t offset : regions) {
        mapped_regions.push_back({within(window, offset, region_bytes), region_bytes});
    }
    std::vector<Mapped> mapped_arenas;
    for (std::size_t rank = 0; rank < arenas.size(); ++rank) {
        if (arenas[rank] == nullptr) {
            mapped_arenas.push_back({});
        } else if (rank == me) {
            mapped_arenas.push_back({Arena::process().base(), arenas[rank]->nbytes()});
        } else {
            mapped_arenas.push_back({arenas[rank]->data(), arenas[rank]->nbytes()});
        }
    }
    std::byte* const table = within(window, table_offset, InPlace::table_bytes(regions.size(), slots.size()));
    return InPlace(reinterpret_cast<std::atomic<std::uint64_t>*>(table), me, std::move(places),
                   std::move(mapped_regions), std::move(mapped_arenas));
}

void run_in_place(const InPlace& in_place, int direction, const std::vector<std::size_t>& members,
                  const std::vector<std::size_t>& offsets, std::size_t begin, std::size_t end, py::handle op,
                  py::handle scale, const std::vector<bool>& absent, py::handle flat) {
    constexpr const char* function = "InPlace.run";
    if (direction < 0 || direction > 2) throw py::value_error("InPlace.run: direction: expected 0 to 2");
    if (offsets.size() != members.size()) throw py::value_error("InPlace.run: offsets: expected one for each member");
    if (absent.size() != in_place.ranks()) throw py::value_error("InPlace.run: absent: expected one for each rank");
    std::byte* data = nullptr;
    if (!flat.is_none()) {
        const Array array = array_argument(function, "flat", flat, Access::write);
        if (begin > end || array.count < end - begin) throw py::value_error("InPlace.run: flat: too short");
        data = array.data;
        for (const std::size_t member : members) {
            if (member < in_place.slots().size() && in_place.slots()[member].dtype != array.dtype) {
                throw py::type_error("InPlace.run: flat: expected the dtype of the slots");
            }
        }
    } else if (direction != 0) {
        throw py::value_error("InPlace.run: flat: expected an array");
    }
    Scale at_last;
    for (const std::size_t member : members) {
        if (member >= in_place.slots().size()) throw py::index_error("InPlace.run: no such slot");
        if (member == members.front())
            at_last = scale_argument(function, "scale", scale, in_place.slots()[member].dtype);
    }
    const Op how = op_argument(function, op);
    const py::gil_scoped_release unlocked;
    in_place.run(static_cast<InPlace::Direction>(direction), members, offsets, begin, end, how, at_last, absent, data);
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
        .def("give_back", &Window::give_back, py::arg("begin"), py::arg("nbytes"), Unlocked())
        .def("keep_from_forks", &Window::keep_from_forks)
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
    py::class_<Message, std::shared_ptr<Message>>(module, "Message", py::dynamic_attr())
        .def("done",
             [](const Message& message) {
                 if (!message.done.load()) return false;
                 if (message.wrong_bytes.load() >= 0) {
                     throw std::runtime_error("local rank " + std::to_string(message.source.load()) + " sent " +
                                              std::to_string(message.wrong_bytes.load()) +
                                              " bytes where another number was expected");
                 }
                 return true;
             })
        .def("wrong_bytes", [](const Message& message) { return message.wrong_bytes.load(); })
        .def("source", [](const Message& message) { return message.source.load(); });
    py::class_<MessageRings>(module, "MessageRings")
        .def_static("bytes_needed", &MessageRings::bytes_needed)
        .def(py::init([](Window& window, std::size_t offset, std::size_t ranks, std::size_t me, std::size_t data,
                         std::size_t control, const std::vector<BellHandle*>& bells) {
                 std::byte* const base = within(window, offset, MessageRings::bytes_needed(ranks, data, control));
                 return std::make_unique<MessageRings>(base, ranks, me, data, control, bells_of(bells));
             }),
             py::keep_alive<1, 2>(), py::keep_alive<1, 8>())
        .def("send",
             [](MessageRings& rings, std::size_t peer, std::uint64_t tag, py::buffer buffer) {
                 return post_message(
                     [&](std::byte* data, std::size_t nbytes, std::shared_ptr<void> owner) {
                         return rings.send(peer, tag, data, nbytes, std::move(owner));
                     },
                     std::move(buffer), false);
             })
        .def("receive",
             [](MessageRings& rings, std::size_t peer, std::uint64_t tag, py::buffer buffer) {
                 return post_message(
                     [&](std::byte* data, std::size_t nbytes, std::shared_ptr<void> owner) {
                         return rings.receive(peer, tag, data, nbytes, std::move(owner));
                     },
                     std::move(buffer), true);
             })
        .def("receive_any",
             [](MessageRings& rings, const std::vector<std::size_t>& peers, std::uint64_t tag, py::buffer buffer) {
                 return post_message(
                     [&](std::byte* data, std::size_t nbytes, std::shared_ptr<void> owner) {
                         return rings.receive_any(peers, tag, data, nbytes, std::move(owner));
                     },
                     std::move(buffer), true);
             })
        .def("withdraw",
             [](MessageRings& rings, Message& receive) {
                 bool is_withdrawn = false;
                 {
                     const py::gil_scoped_release unlocked;
                     is_withdrawn = rings.withdraw(receive);
                 }
                 if (is_withdrawn) receive.keep.reset();
                 return is_withdrawn;
             })
        .def("send_control", &MessageRings::send_control, Unlocked())
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
        .def("line_seconds", &Area::line_seconds);
    py::class_<Staged>(module, "Staged")
        .def(py::init(&make_staged), py::arg("area"), py::arg("mode"), py::arg("array"), py::arg("op"),
             py::arg("scale"), py::arg("shares"), py::arg("source") = py::none(),
             py::arg("past_cache") = std::vector<bool>(), py::arg("measure") = false, py::arg("out") = py::none(),
             py::keep_alive<1, 2>(), py::keep_alive<1, 4>(), py::keep_alive<1, 8>(), py::keep_alive<1, 11>())
        .def("stage", &Staged::stage, Unlocked())
        .def("advance", &Staged::advance, py::arg("spin_seconds"), Unlocked())
        .def("awaited", &Staged::awaited);
    py::class_<InPlace>(module, "InPlace")
        .def_static("table_bytes", &InPlace::table_bytes, py::arg("ranks"), py::arg("slots"))
        .def(py::init(&make_in_place), py::arg("window"), py::arg("table_offset"), py::arg("me"), py::arg("slots"),
             py::arg("regions"), py::arg("region_bytes"), py::arg("arenas"), py::keep_alive<1, 2>(),
             py::keep_alive<1, 8>())
        .def(
            "offer",
            [](InPlace& in_place, std::size_t slot, int where, std::uint64_t offset) {
                if (slot >= in_place.slots().size()) throw py::index_error("InPlace.offer: no such slot");
                if (where < 0 || where > 3) throw py::value_error("InPlace.offer: where: expected 0 to 3");
                in_place.offer(slot, static_cast<Where>(where), offset);
            },
            py::arg("slot"), py::arg("where"), py::arg("offset") = 0)
        .def(
            "staged",
            [](const InPlace& in_place, const std::vector<std::size_t>& members, const std::vector<bool>& absent) {
                if (absent.size() != in_place.ranks())
                    throw py::value_error("InPlace.staged: absent: one for each rank");
                std::vector<std::size_t> found;
                for (const std::size_t slot : members) {
                    if (slot >= in_place.slots().size()) throw py::index_error("InPlace.staged: no such slot");
                    if (in_place.is_staged(slot, absent)) found.push_back(slot);
                }
                return found;
            },
            py::arg("members"), py::arg("absent"))
        .def("run", &run_in_place, py::arg("direction"), py::arg("members"), py::arg("offsets"), py::arg("begin"),
             py::arg("end"), py::arg("op"), py::arg("scale"), py::arg("absent"), py::arg("flat") = py::none());
    py::class_<LastResort>(module, "LastResort")
        .def(py::init<double, std::string>())
        .def("cancel", &LastResort::cancel, Unlocked());
    py::class_<Heartbeat>(module, "Heartbeat")
        .def(py::init(&make_heartbeat), py::arg("window").none(true), py::arg("offset"), py::arg("ranks"),
             py::arg("me"), py::arg("connections"), py::arg("seconds"), py::keep_alive<1, 2>())
        .def("count",
             [](const Heartbeat& heartbeat, std::size_t rank) {
                 if (rank >= heartbeat.ranks()) throw py::index_error("Heartbeat: count: no such rank");
                 return heartbeat.count(rank);
             })
        .def("stop", &Heartbeat::stop, Unlocked());
    bind_turns(module);
}

}  // namespace hvdkit
