// What the parts of the driver share: checks that end the program, random numbers, buffers that end where memory ends.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <utility>

#define CHECK(CONDITION)                                                             \
    do {                                                                             \
        if (!(CONDITION)) {                                                          \
            std::fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #CONDITION); \
            std::abort();                                                            \
        }                                                                            \
    } while (false)

class Random {
 public:
    explicit Random(std::uint64_t seed) : engine_(seed) {}
    // From ``low`` to ``high``, both included.
    std::size_t number(std::size_t low, std::size_t high) {
        return std::uniform_int_distribution<std::size_t>(low, high)(engine_);
    }
    std::uint64_t bits() { return engine_(); }
    template <typename Items>
    auto& one_of(Items& items) {
        return items[number(0, std::size(items) - 1)];
    }

 private:
    std::mt19937_64 engine_;
};

// One number for all that buffers held in the end (FNV-1a of words), so that processors can be compared. Of a NaN only
// counts that it is one: processors make different ones.
inline std::uint64_t& digested() {
    static thread_local std::uint64_t so_far = 0xCBF29CE484222325u;
    return so_far;
}

inline void digest(const std::byte* data, std::size_t nbytes) {
    for (std::size_t done = 0; done < nbytes; done += sizeof(std::uint32_t)) {
        std::uint32_t word = 0;
        std::memcpy(&word, data + done, std::min(sizeof(word), nbytes - done));
        if ((word & 0x7FFFFFFFu) > 0x7F800000u) word = 0x7FC00000u;
        digested() = (digested() ^ word) * 0x100000001B3u;
    }
}

// ``nbytes`` that begin ``offset`` bytes after an aligned address and end at the end of what was allocated, so that
// the sanitizer sees one byte too many.
class Buffer {
 public:
    explicit Buffer(std::size_t nbytes, std::size_t offset = 0)
        : memory_(new std::byte[offset + nbytes]()), data_(memory_.get() + offset), nbytes_(nbytes) {}
    ~Buffer() {
        if (data_ != nullptr) digest(data_, nbytes_);
    }
    Buffer(Buffer&& other) noexcept
        : memory_(std::move(other.memory_)), data_(std::exchange(other.data_, nullptr)), nbytes_(other.nbytes_) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(memory_, other.memory_);
        std::swap(data_, other.data_);
        std::swap(nbytes_, other.nbytes_);
        return *this;
    }
    std::byte* data() { return data_; }
    const std::byte* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }

 private:
    std::unique_ptr<std::byte[]> memory_;
    std::byte* data_;
    std::size_t nbytes_;
};

// MessageRings, Staged and Heartbeat, with their bells, with ``ranks`` threads as ranks.
void run_message_rings(std::uint64_t seed, std::size_t ranks, std::size_t messages);
void run_staged(std::uint64_t seed, std::size_t ranks, std::size_t operations);
// Heartbeats that share counters, and are connected.
void run_heartbeats(std::size_t ranks, std::size_t rounds);

// The arena with threads that free each other's blocks.
void run_arena(std::uint64_t seed, std::size_t rounds);

// Every kernel on random arguments, those of codecs apart.
void run_kernels(std::uint64_t seed, std::size_t rounds);
void run_codecs(std::uint64_t seed, std::size_t rounds);
