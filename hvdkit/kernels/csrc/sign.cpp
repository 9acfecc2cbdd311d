// sign and unsign: one bit an element with one scale a block.
#include <algorithm>
#include <vector>

#include "codecs.h"
#include "vectors.h"

namespace hvdkit {
namespace {

using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

constexpr std::size_t kLanes = 16;

HVDKIT_INLINE uint32_t is_positive(float value) { return ~bits<uint32_t>(value) >> 31; }

// Lane j adds the magnitudes of elements j, j + 16, ... and each bit says a sign. Versions for wide vectors do whole
// groups of 16 and return how many elements those were.
template <bool kResidual>
HVDKIT_INLINE void add_and_pack(std::byte* packed, float* lanes, const std::byte* values, const std::byte* residual,
                                std::size_t begin, std::size_t count) {
    for (std::size_t group = begin; group < count; group += 8) {
        uint32_t word = 0;
        for (std::size_t i = group; i < std::min(count, group + 8); ++i) {
            const float value = element<true, kResidual>(values, residual, i);
            lanes[i % kLanes] += bits<float>(magnitude_word(value));
            word |= is_positive(value) << (i % 8);
        }
        store<uint8_t>(packed, group / 8, static_cast<uint8_t>(word));
    }
}

HVDKIT_INLINE float decoded_sign(uint32_t positive, float magnitude) {
    return bits<float>(bits<uint32_t>(magnitude) ^ ((positive ^ 1u) << 31));
}

template <bool kAccumulate>
HVDKIT_INLINE void unpack(std::byte* out, const std::byte* packed, std::size_t begin, std::size_t count,
                          float magnitude) {
    for (std::size_t i = begin; i < count; ++i) {
        const float decoded = decoded_sign(load<uint8_t>(packed, i / 8) >> (i % 8) & 1u, magnitude);
        store<float>(out, i, kAccumulate ? load<float>(out, i) + decoded : decoded);
    }
}

#if defined(HVDKIT_WIDE)

template <bool kResidual>
HVDKIT_AVX2 std::size_t add_and_pack_avx2(std::byte* packed, float* lanes, const std::byte* values,
                                          const std::byte* residual, std::size_t count) {
    const auto* const in = reinterpret_cast<const float*>(values);
    const auto* const before = reinterpret_cast<const float*>(residual);
    const __m256 sign_bit = _mm256_set1_ps(-0.0f);
    __m256 low_lanes = _mm256_setzero_ps(), high_lanes = _mm256_setzero_ps();
    std::size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        __m256 low = _mm256_loadu_ps(in + i), high = _mm256_loadu_ps(in + i + 8);
        if constexpr (kResidual) {
            low = _mm256_add_ps(low, _mm256_loadu_ps(before + i));
            high = _mm256_add_ps(high, _mm256_loadu_ps(before + i + 8));
        }
        low_lanes = _mm256_add_ps(low_lanes, _mm256_andnot_ps(sign_bit, low));
        high_lanes = _mm256_add_ps(high_lanes, _mm256_andnot_ps(sign_bit, high));
        const int negative = _mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8;
        store<uint16_t>(packed, i / kLanes, static_cast<uint16_t>(~negative));
    }
    _mm256_storeu_ps(lanes, low_lanes);
    _mm256_storeu_ps(lanes + 8, high_lanes);
    return i;
}

template <bool kResidual>
HVDKIT_AVX512 std::size_t add_and_pack_avx512(std::byte* packed, float* lanes, const std::byte* values,
                                              const std::byte* residual, std::size_t count) {
    const auto* const in = reinterpret_cast<const float*>(values);
    const auto* const before = reinterpret_cast<const float*>(residual);
    __m512 sums = _mm512_setzero_ps();
    std::size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        __m512 now = _mm512_loadu_ps(in + i);
        if constexpr (kResidual) now = _mm512_add_ps(now, _mm512_loadu_ps(before + i));
        sums = _mm512_add_ps(sums, _mm512_abs_ps(now));
        const __mmask16 positive = _mm512_cmpge_epi32_mask(_mm512_castps_si512(now), _mm512_setzero_si512());
        store<uint16_t>(packed, i / kLanes, static_cast<uint16_t>(positive));
    }
    _mm512_storeu_ps(lanes, sums);
    return i;
}

template <bool kAccumulate>
HVDKIT_AVX2 std::size_t unpack_avx2(std::byte* out, const std::byte* packed, std::size_t count, float magnitude) {
    auto* const to = reinterpret_cast<float*>(out);
    const __m256 negative = _mm256_set1_ps(-magnitude), positive = _mm256_set1_ps(magnitude);
    const __m256i places = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);  // bit k shifted to the sign's place
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m256i word = _mm256_set1_epi32(load<uint8_t>(packed, i / 8));
        const __m256 chooser = _mm256_castsi256_ps(_mm256_sllv_epi32(word, places));
        __m256 decoded = _mm256_blendv_ps(negative, positive, chooser);
        if constexpr (kAccumulate) decoded = _mm256_add_ps(_mm256_loadu_ps(to + i), decoded);
        _mm256_storeu_ps(to + i, decoded);
    }
    return i;
}

template <bool kAccumulate>
HVDKIT_AVX512 std::size_t unpack_avx512(std::byte* out, const std::byte* packed, std::size_t count, float magnitude) {
    auto* const to = reinterpret_cast<float*>(out);
    const __m512 negative = _mm512_set1_ps(-magnitude), positive = _mm512_set1_ps(magnitude);
    std::size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        __m512 decoded = _mm512_mask_mov_ps(negative, load<uint16_t>(packed, i / kLanes), positive);
        if constexpr (kAccumulate) decoded = _mm512_add_ps(_mm512_loadu_ps(to + i), decoded);
        _mm512_storeu_ps(to + i, decoded);
    }
    return i;
}

#endif

template <bool kResidual>
float sum_block([[maybe_unused]] Vectors with, std::byte* packed, const std::byte* values, const std::byte* residual,
                std::size_t count) {
    alignas(64) float lanes[kLanes] = {};
    std::size_t done = 0;
#if defined(HVDKIT_WIDE)
    if (with == Vectors::avx512) {
        done = add_and_pack_avx512<kResidual>(packed, lanes, values, residual, count);
    } else if (with == Vectors::avx2) {
        done = add_and_pack_avx2<kResidual>(packed, lanes, values, residual, count);
    }
#endif
    add_and_pack<kResidual>(packed, lanes, values, residual, done, count);
    for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
        for (std::size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    }
    return lanes[0];
}

template <bool kAccumulate>
void unsign_block([[maybe_unused]] Vectors with, std::byte* out, const std::byte* packed, std::size_t count,
                  float magnitude) {
    std::size_t done = 0;
#if defined(HVDKIT_WIDE)
    if (with == Vectors::avx512) {
        done = unpack_avx512<kAccumulate>(out, packed, count, magnitude);
    } else if (with == Vectors::avx2) {
        done = unpack_avx2<kAccumulate>(out, packed, count, magnitude);
    }
#endif
    unpack<kAccumulate>(out, packed, done, count, magnitude);
}

// Asked with 16 MiB of gradients, there and back.
Vectors for_signs() {
    static const Vectors chosen = [] {
        constexpr std::size_t kCount = 1u << 22;
        std::vector<float> values(kCount), residual(kCount);
        std::vector<uint8_t> packed(kCount / 8);
        for (std::size_t i = 0; i < kCount; ++i) values[i] = (i * 2654435761u & 64u) != 0 ? 1.0f : -1.0f;
        volatile float sum = 0.0f;  // or the compiler might leave it all out
        return quickest([&](Vectors with) {
            auto* const bits = reinterpret_cast<std::byte*>(packed.data());
            auto* const left = reinterpret_cast<std::byte*>(residual.data());
            sum = sum + sum_block<true>(with, bits, reinterpret_cast<const std::byte*>(values.data()), left, kCount);
            unsign_block<true>(with, left, bits, kCount, 0.0f);
        });
    }();
    return chosen;
}

}  // namespace

const char* vectors_for_signs() { return name_of(for_signs()); }

HVDKIT_CLONES void subtract_signs(std::byte* residual, const std::byte* values, std::size_t count, float scale) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) {
        const float value = element<true, true>(values, residual, i);
        store<float>(residual, i, value - decoded_sign(is_positive(value), scale));
    }
}

void sign(std::byte* packed, std::byte* scales, const std::byte* values, std::byte* residual, std::size_t count,
          std::size_t block) {
    for (std::size_t begin = 0; begin < count; begin += block) {
        const std::size_t step = std::min(block, count - begin);
        std::byte* const bits_of_block = packed + begin / 8;
        const std::byte* const in = values + begin * sizeof(float);
        std::byte* const left = residual == nullptr ? nullptr : residual + begin * sizeof(float);
        const float sum = residual == nullptr ? sum_block<false>(for_signs(), bits_of_block, in, left, step)
                                              : sum_block<true>(for_signs(), bits_of_block, in, left, step);
        const float scale = is_finite(sum) ? sum / static_cast<float>(step) : bits<float>(kQuietNan);
        store<float>(scales, begin / block, scale);
        if (!is_finite(scale)) {
            std::memset(bits_of_block, 0, (step + 7) / 8);
        } else if (residual != nullptr) {
            subtract_signs(left, in, step, scale);
        }
    }
}

void unsign(std::byte* out, const std::byte* packed, const std::byte* scales, std::size_t count, std::size_t block,
            float scale, bool accumulate) {
    for (std::size_t begin = 0; begin < count; begin += block) {
        const float magnitude = load<float>(scales, begin / block) * scale;
        const auto unsign_it = accumulate ? unsign_block<true> : unsign_block<false>;
        unsign_it(for_signs(), out + begin * sizeof(float), packed + begin / 8, std::min(block, count - begin),
                  magnitude);
    }
}

}  // namespace hvdkit
