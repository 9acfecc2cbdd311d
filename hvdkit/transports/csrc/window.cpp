// Mapping and populating memory files.
#include "window.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace hvdkit {
namespace {

std::size_t page() {
    static const auto nbytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return nbytes;
}

}  // namespace

Window::Window(int descriptor, std::uint64_t offset, std::size_t nbytes) : nbytes_(nbytes), process_(getpid()) {
    void* const mapped =
        mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, static_cast<off_t>(offset));
    if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    data_ = static_cast<std::byte*>(mapped);
    madvise(mapped, nbytes, MADV_HUGEPAGE);  // where the system allows it for shared memory; else nothing is lost
}

Window::~Window() {
    // A fork that did not get the mapping may have something else at these addresses.
    if (!kept_from_forks_ || getpid() == process_) munmap(data_, nbytes_);
}

void Window::give_back(std::size_t begin, std::size_t nbytes) {
    if (getpid() != process_) return;  // a fork that lets go of its copies: the memory is its parent's
    const std::size_t first = (begin + page() - 1) / page() * page();
    const std::size_t last = (begin + nbytes) / page() * page();
    if (first < last && madvise(data_ + first, last - first, MADV_REMOVE) != 0) {
        throw std::system_error(errno, std::generic_category(), "madvise");
    }
}

void Window::keep_from_forks() {
    if (madvise(data_, nbytes_, MADV_DONTFORK) != 0) {
        throw std::system_error(errno, std::generic_category(), "madvise");
    }
    kept_from_forks_ = true;
}

bool Window::populate(std::size_t begin, std::size_t nbytes) {
    const std::size_t first = begin / page() * page();
    if (madvise(data_ + first, begin + nbytes - first, MADV_POPULATE_WRITE) == 0) return true;
    if (errno == EINVAL) return false;
    throw std::system_error(errno, std::generic_category(), "madvise");
}

}  // namespace hvdkit
