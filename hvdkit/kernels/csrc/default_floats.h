// How the processor computes while a kernel runs. What every rank computes for itself must be the same on all of them,
// and a script may have had its thread flush subnormal numbers to zero (torch.set_flush_denormal), as TensorFlow's do.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace hvdkit {

// While it lives, this thread rounds to nearest, keeps subnormal numbers and traps nothing; then it is set as before.
class DefaultFloats {
 public:
    DefaultFloats() : before_(read()) {
        if (before_ != kDefault) write(kDefault);
        barrier();
    }
    ~DefaultFloats() {
        barrier();
        if (before_ != kDefault) write(before_);
    }
    DefaultFloats(const DefaultFloats&) = delete;
    DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
    // Compilers take arithmetic for independent of this state, but move none of it past what may change its operands.
    static void barrier() { __asm__ volatile("" ::: "memory"); }

#if defined(__x86_64__)
    using State = std::uint32_t;
    static constexpr State kDefault = 0x1F80;  // all exceptions masked, as a process starts
    static constexpr State kFlags = 0x3F;      // exceptions that happened: no part of how it computes
    static State read() { return _mm_getcsr() & ~kFlags; }
    static void write(State state) { _mm_setcsr(state | (_mm_getcsr() & kFlags)); }
#elif defined(__aarch64__)
    using State = std::uint64_t;
    static constexpr State kDefault = 0;
    static State read() {
        State state;
        __asm__ volatile("mrs %0, fpcr" : "=r"(state));
        return state;
    }
    static void write(State state) { __asm__ volatile("msr fpcr, %0" : : "r"(state)); }
#else
    using State = int;
    static constexpr State kDefault = 0;
    static State read() { return kDefault; }
    static void write(State) {}
#endif

    State before_;
};

}  // namespace hvdkit
