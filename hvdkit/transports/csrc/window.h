// A part of a memory file, mapped into this process.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace hvdkit {

// Python's mmap would duplicate the descriptor, and closing a duplicate drops the process's locks on the file.
class Window {
 public:
    // Throws std::system_error where the memory cannot be mapped.
    Window(int descriptor, std::uint64_t offset, std::size_t nbytes);
    ~Window();
    Window(const Window&) = delete;
    Window& operator=(const Window&) = delete;

    // Brings pages in at once, which costs a fraction of one page fault each. Throws std::system_error where there is
    // not enough memory; later touches would then be fatal. False: kernels before 5.14 cannot do it.
    bool populate(std::size_t begin, std::size_t nbytes);

    // When this window goes, so does the memory behind the whole pages of this part of it: others that map it see
    // zeros. Not where it goes in a fork of the process that made it.
    void give_back_at_end(std::size_t begin, std::size_t nbytes);

    std::byte* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }

 private:
    std::byte* data_;
    std::size_t nbytes_;
    pid_t process_;
    std::vector<std::pair<std::size_t, std::size_t>> given_back_;
};

}  // namespace hvdkit
