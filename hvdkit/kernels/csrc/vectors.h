// Which vector instructions a loop that is written in them may use.
#pragma once

// A build that shall run as an older processor does (tests have such ones) defines the widest vectors, in bits: 0, 256.
#ifndef HVDKIT_VECTOR_BITS
#define HVDKIT_VECTOR_BITS 512
#endif

#if defined(__x86_64__) && HVDKIT_VECTOR_BITS > 0
#define HVDKIT_WIDE
#include <immintrin.h>
#endif

#include <chrono>
#include <limits>

#define HVDKIT_AVX2 __attribute__((target("avx2")))
#define HVDKIT_AVX512 __attribute__((target("avx512f,popcnt")))

namespace hvdkit {

enum class Vectors { portable, avx2, avx512 };

inline const char* name_of(Vectors one) {
    return one == Vectors::avx512 ? "avx512" : one == Vectors::avx2 ? "avx2" : "portable";
}

// The widest that this processor has. The compiler's question also covers whether the system saves the registers.
inline Vectors vectors() {
#if defined(HVDKIT_WIDE)
    static const Vectors widest = [] {
        __builtin_cpu_init();
        const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("popcnt");
        if (HVDKIT_VECTOR_BITS >= 512 && has_avx512) return Vectors::avx512;
        if (__builtin_cpu_supports("avx2")) return Vectors::avx2;
        return Vectors::portable;
    }();
    return widest;
#else
    return Vectors::portable;
#endif
}

// With which of those that it has this processor does ``run(vectors)`` quickest: wider ones are not where memory is
// what takes time. All give the same bits. A narrower one must be quicker by a twentieth, since what is measured is
// short; what the compiler makes of a plain loop never is.
template <typename Run>
Vectors quickest(Run run) {
    constexpr int kTimes = 3;
    constexpr double kMargin = 0.95;
    Vectors best = vectors();
    double least = std::numeric_limits<double>::infinity();
    for (int one = static_cast<int>(vectors()); one >= static_cast<int>(Vectors::avx2); --one) {
        const auto candidate = static_cast<Vectors>(one);
        double seconds = std::numeric_limits<double>::infinity();
        for (int time = 0; time < kTimes; ++time) {
            const auto began = std::chrono::steady_clock::now();
            run(candidate);
            const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
            if (took.count() < seconds) seconds = took.count();
        }
        if (seconds < kMargin * least) {
            best = candidate;
            least = seconds;
        }
    }
    return best;
}

}  // namespace hvdkit
