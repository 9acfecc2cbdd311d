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

#define HVDKIT_AVX2 __attribute__((target("avx2")))
#define HVDKIT_AVX512 __attribute__((target("avx512f,popcnt")))

namespace hvdkit {

enum class Vectors { portable, avx2, avx512 };

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

}  // namespace hvdkit
