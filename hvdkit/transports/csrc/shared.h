// What lies in memory that several processes map: counters that one rank writes and all read, and bells to sleep at.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hvdkit {

constexpr std::size_t kLine = 64;

// One cache line each, so that ranks do not take lines from each other.
struct alignas(kLine) Counter {
    std::atomic<std::uint64_t> value;

    std::uint64_t get() const { return value.load(std::memory_order_acquire); }
    void set(std::uint64_t number) { value.store(number, std::memory_order_release); }
};

// An event counter (Reed and Kanodia, 1979) on a futex: who finds nothing to do reads it, looks once more, and sleeps
// unless it was rung since. Ringing costs no system call while nobody sleeps.
struct alignas(kLine) Bell {
    std::atomic<std::uint32_t> rings;
    std::atomic<std::uint32_t> sleepers;

    std::uint32_t count() const { return rings.load(std::memory_order_acquire); }
    void ring();
    // Returns when the bell was rung since ``count()`` was ``seen``, or after ``seconds``. Looks for ``spin_seconds``
    // without giving up the processor first.
    void sleep(std::uint32_t seen, double seconds, double spin_seconds);
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free,
              "only atomics without locks work between processes");

// Tells the processor that this is a loop which waits.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

double monotonic_seconds();

}  // namespace hvdkit
