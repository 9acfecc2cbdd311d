// widen and narrow: float16 and bfloat16 to float32 and back, rounded as numpy and ml_dtypes round.
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "kernels.h"
#include "memory.h"

namespace hvdkit {
namespace {

using std::uint16_t;
using std::uint32_t;

// Why the names below say "bits": a half is only ever 16 bits in memory, never a value of its own type.

HVDKIT_INLINE float float_of_bfloat16(uint16_t half_bits) {
    return bits<float>(static_cast<uint32_t>(half_bits) << 16);
}

HVDKIT_INLINE uint16_t bfloat16_of_float(float value) {
    const uint32_t word = bits<uint32_t>(value);
    const uint32_t rounded = (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16;
    const uint32_t nan = (word >> 16) | 0x0040u;  // rounding could carry a NaN into infinity
    return static_cast<uint16_t>(value == value ? rounded : nan);
}

// After Fabian Giesen, "half-precision float conversion": the exponent is moved by a multiplication, which also makes
// subnormal numbers normal.
HVDKIT_INLINE float float_of_float16(uint16_t half_bits) {
    const uint32_t sign = static_cast<uint32_t>(half_bits & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(half_bits & 0x7FFFu) << 13;
    const float moved = bits<float>(magnitude) * bits<float>(0x77800000u);  // 2**112
    const uint32_t finite = bits<uint32_t>(moved);
    const uint32_t word = magnitude >= 0x0F800000u ? (magnitude | 0x7F800000u) : finite;
    return bits<float>(word | sign);
}

// After the same: for what becomes subnormal, adding 0.5 lets the processor's adder do the rounding.
HVDKIT_INLINE uint16_t float16_of_float(float value) {
    const uint32_t word = bits<uint32_t>(value);
    const uint32_t sign = (word >> 16) & 0x8000u;
    const uint32_t magnitude = word & 0x7FFFFFFFu;
    const uint32_t normal = (magnitude - 0x38000000u + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t subnormal = bits<uint32_t>(bits<float>(magnitude) + 0.5f) - 0x3F000000u;
    const uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    return static_cast<uint16_t>((magnitude >= 0x47800000u ? special : finite) | sign);
}

#if defined(__x86_64__)
bool has_f16c() {
    // Compilers learnt the name "f16c" late; "avx2" also asks whether the system saves the wide registers.
    __builtin_cpu_init();
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
}

__attribute__((target("avx,f16c"))) std::size_t widen_float16_f16c(float* out, const std::byte* in, std::size_t count) {
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 2 * i));
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
    }
    return i;
}

__attribute__((target("avx,f16c"))) std::size_t narrow_float16_f16c(std::byte* out, const float* in,
                                                                    std::size_t count) {
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i), halves);
    }
    return i;
}

const bool use_f16c = HVDKIT_F16C != 0 && has_f16c();
#endif

}  // namespace

HVDKIT_CLONES void widen_float16(float* out, const std::byte* in, std::size_t count) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) out[i] = float_of_float16(load<uint16_t>(in, i));
}

HVDKIT_CLONES void narrow_float16(std::byte* out, const float* in, std::size_t count) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) store<uint16_t>(out, i, float16_of_float(in[i]));
}

HVDKIT_CLONES void widen_bfloat16(float* out, const std::byte* in, std::size_t count) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) out[i] = float_of_bfloat16(load<uint16_t>(in, i));
}

HVDKIT_CLONES void narrow_bfloat16(std::byte* out, const float* in, std::size_t count) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) store<uint16_t>(out, i, bfloat16_of_float(in[i]));
}

// Round to odd (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008): truncate, and set the last
// bit if anything was lost. A later rounding to fewer bits then sees which side of a tie the value was on.
HVDKIT_CLONES void widen_float64(float* out, const std::byte* in, std::size_t count) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) {
        const double value = load<double>(in, i);
        const float nearest = static_cast<float>(value);
        const double back = static_cast<double>(nearest);
        const uint32_t word = bits<uint32_t>(nearest);
        // Away from zero: one step back. A magnitude's bits count like an integer, whatever its sign.
        const double size = value < 0.0 ? -value : value;
        const double back_size = back < 0.0 ? -back : back;
        const uint32_t truncated = back_size > size ? word - 1u : word;
        out[i] = bits<float>(((back != value) & (value == value)) ? (truncated | 1u) : word);
    }
}

void widen(DType dtype, float* out, const std::byte* in, std::size_t count) {
    switch (dtype) {
        case DType::float16: {
            std::size_t done = 0;
#if defined(__x86_64__)
            if (use_f16c) done = widen_float16_f16c(out, in, count);
#endif
            return widen_float16(out + done, in + 2 * done, count - done);
        }
        case DType::bfloat16:
            return widen_bfloat16(out, in, count);
        case DType::float64:
            return widen_float64(out, in, count);
        default:
            std::memcpy(out, in, count * sizeof(float));
    }
}

void narrow(DType dtype, std::byte* out, const float* in, std::size_t count) {
    if (dtype == DType::bfloat16) return narrow_bfloat16(out, in, count);
    std::size_t done = 0;
#if defined(__x86_64__)
    if (use_f16c) done = narrow_float16_f16c(out, in, count);
#endif
    narrow_float16(out + 2 * done, in + done, count - done);
}

}  // namespace hvdkit
