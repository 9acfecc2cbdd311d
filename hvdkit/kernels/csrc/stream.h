// Copies past the cache, for large results that nobody reads soon.
#pragma once

#include <cstddef>

namespace hvdkit {

// From this size on a result is not in any cache when it is read, and writing past the cache saves reading its lines
// first: measured, half the time of an ordinary copy into memory that is not cached.
constexpr std::size_t kStreamBytes = 16 * 1024 * 1024;

// Like memcpy. Both may begin at any address; the result is visible to other threads when it returns.
void stream_copy(std::byte* destination, const std::byte* source, std::size_t nbytes);

}  // namespace hvdkit
