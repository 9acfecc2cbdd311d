// Has PyTorch's allocations of gradients served from the arena: two functions in one library's import table.
#pragma once

#include <string>

namespace hvdkit {

// Replaces posix_memalign and free in the import table of libc10, PyTorch's library that allocates tensors; nothing
// else in the process is touched. Once, for the life of the process. Returns why that cannot be, and has then changed
// nothing; nothing where it is done.
std::string install_hooks();

// Whether this thread's allocations of the arena's sizes are served outside of backward passes too. Returns whether
// they were.
bool serve_this_thread(bool always);

}  // namespace hvdkit
