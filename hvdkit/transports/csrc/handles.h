// What several bindings share: places in windows, and bells as Python holds them.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "shared.h"
#include "window.h"

namespace hvdkit {

inline std::byte* within(Window& window, std::size_t offset, std::size_t nbytes) {
    if (offset % kLine != 0 || offset > window.nbytes() || nbytes > window.nbytes() - offset) {
        throw pybind11::value_error("expected a place on a cache line inside the window");
    }
    return window.data() + offset;
}

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

inline std::vector<Bell*> bells_of(const std::vector<BellHandle*>& handles) {
    std::vector<Bell*> bells;
    for (const BellHandle* handle : handles) bells.push_back(handle->get());
    return bells;
}

}  // namespace hvdkit
