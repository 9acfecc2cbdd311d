// A part of a memory file, mapped into this process.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

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

    // Gives the memory behind the whole pages of this part back to the system: all who map it see zeros. Does nothing
    // in a fork of the process that made this.
    void give_back(std::size_t begin, std::size_t nbytes);

    // A fork of this process does not get this mapping.
    void keep_from_forks();

    std::byte* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }

 private:
    std::byte* data_;
    std::size_t nbytes_;
    pid_t process_;
    bool kept_from_forks_ = false;
};

}  // namespace hvdkit
