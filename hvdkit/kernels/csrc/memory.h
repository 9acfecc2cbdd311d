// Reading and writing single values and bit patterns at any address, which compilers turn into plain moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "platform.h"

namespace hvdkit {

template <typename T>
HVDKIT_INLINE T load(const std::byte* base, std::size_t index) {
    T value;
    std::memcpy(&value, base + index * sizeof(T), sizeof(T));
    return value;
}

template <typename T>
HVDKIT_INLINE void store(std::byte* base, std::size_t index, T value) {
    std::memcpy(base + index * sizeof(T), &value, sizeof(T));
}

template <typename T>
HVDKIT_INLINE bool is_aligned(const std::byte* address) {
    return reinterpret_cast<std::uintptr_t>(address) % alignof(T) == 0;
}

template <typename To, typename From>
HVDKIT_INLINE To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

}  // namespace hvdkit
