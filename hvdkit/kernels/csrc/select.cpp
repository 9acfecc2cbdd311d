// select: which elements are sent, and what of them stays for later.
#include <algorithm>
#include <cstring>
#include <vector>

#include "codecs.h"
#include "vectors.h"

namespace hvdkit {
namespace {

using std::uint32_t;

// Elements that are looked at together; most groups have none that is found.
constexpr std::size_t kGroup = 16;

// Where the next found element goes, and the counts so far.
struct Sink {
    std::byte* indices;
    std::byte* picked;
    std::size_t capacity;
    Selected so_far;
};

// True of a NaN too.
HVDKIT_INLINE bool is_found(float value, float threshold) { return !(bits<float>(magnitude_word(value)) <= threshold); }

// Takes the found element ``i``, if there is room, and returns what becomes of the residual. ``kept`` is that for a
// value that is not finite.
HVDKIT_INLINE float take(Sink& sink, std::size_t i, float value, float kept) {
    Selected& so_far = sink.so_far;
    ++so_far.found;
    const bool finite = is_finite(value);
    if (so_far.emitted == sink.capacity) return finite ? value : kept;
    store<uint32_t>(sink.indices, so_far.emitted, static_cast<uint32_t>(i));
    store<float>(sink.picked, so_far.emitted, value);
    ++so_far.emitted;
    return finite ? 0.0f : kept;
}

template <bool kValues, bool kResidual>
HVDKIT_INLINE void select_each(Sink& sink, const std::byte* values, std::byte* residual, std::size_t begin,
                               std::size_t end, float threshold) {
    for (std::size_t i = begin; i < end; ++i) {
        const float value = element<kValues, kResidual>(values, residual, i);
        float left = value;
        if (is_found(value, threshold)) {
            const float kept = kValues && kResidual ? load<float>(residual, i) : 0.0f;
            left = take(sink, i, value, kept);
        }
        if constexpr (kResidual) store<float>(residual, i, left);
    }
}

template <bool kValues, bool kResidual>
void select_portable(Sink& sink, const std::byte* values, std::byte* residual, std::size_t count, float threshold) {
    std::size_t i = 0;
    for (; i + kGroup <= count; i += kGroup) {
        alignas(64) float group[kGroup];
        uint32_t any = 0;
        for (std::size_t j = 0; j < kGroup; ++j) {
            group[j] = element<kValues, kResidual>(values, residual, i + j);
            any |= static_cast<uint32_t>(is_found(group[j], threshold));
        }
        if (any != 0) {
            select_each<kValues, kResidual>(sink, values, residual, i, i + kGroup, threshold);
        } else if constexpr (kValues && kResidual) {
            std::memcpy(residual + i * sizeof(float), group, sizeof(group));
        }
    }
    select_each<kValues, kResidual>(sink, values, residual, i, count, threshold);
}

#if defined(HVDKIT_WIDE)

template <bool kValues, bool kResidual>
HVDKIT_AVX2 void select_avx2(Sink& sink, const std::byte* values, std::byte* residual, std::size_t count,
                             float threshold) {
    const auto* const in = reinterpret_cast<const float*>(values);
    auto* const left = reinterpret_cast<float*>(residual);
    const __m256 sign_bit = _mm256_set1_ps(-0.0f), least = _mm256_set1_ps(threshold);
    alignas(32) float group[kGroup];
    alignas(32) float kept[kGroup] = {};
    std::size_t i = 0;
    for (; i + kGroup <= count; i += kGroup) {
        const __m256 low_in = kValues ? _mm256_loadu_ps(in + i) : _mm256_setzero_ps();
        const __m256 high_in = kValues ? _mm256_loadu_ps(in + i + 8) : _mm256_setzero_ps();
        const __m256 low_left = kResidual ? _mm256_loadu_ps(left + i) : _mm256_setzero_ps();
        const __m256 high_left = kResidual ? _mm256_loadu_ps(left + i + 8) : _mm256_setzero_ps();
        const bool both = kValues && kResidual;
        const __m256 low = both ? _mm256_add_ps(low_in, low_left) : kValues ? low_in : low_left;
        const __m256 high = both ? _mm256_add_ps(high_in, high_left) : kValues ? high_in : high_left;
        const __m256 low_found = _mm256_cmp_ps(_mm256_andnot_ps(sign_bit, low), least, _CMP_NLE_UQ);
        const __m256 high_found = _mm256_cmp_ps(_mm256_andnot_ps(sign_bit, high), least, _CMP_NLE_UQ);
        if constexpr (both) {
            _mm256_storeu_ps(left + i, low);
            _mm256_storeu_ps(left + i + 8, high);
        }
        auto found = static_cast<unsigned>(_mm256_movemask_ps(low_found) | _mm256_movemask_ps(high_found) << 8);
        if (found == 0) continue;
        _mm256_store_ps(group, low);
        _mm256_store_ps(group + 8, high);
        if constexpr (both) {
            _mm256_store_ps(kept, low_left);
            _mm256_store_ps(kept + 8, high_left);
        }
        for (; found != 0; found &= found - 1) {
            const auto j = static_cast<std::size_t>(__builtin_ctz(found));
            const float rest = take(sink, i + j, group[j], kept[j]);
            if constexpr (kResidual) store<float>(residual, i + j, rest);
        }
    }
    select_each<kValues, kResidual>(sink, values, residual, i, count, threshold);
}

// The lowest ``count`` of the bits that are set.
HVDKIT_INLINE unsigned lowest_bits(unsigned word, std::size_t count) {
    unsigned lowest = 0;
    for (; count > 0 && word != 0; --count, word &= word - 1) lowest |= word & (0u - word);
    return lowest;
}

// Compressed in the register: compressing into memory is microcode on some processors. A store of the whole register
// writes beyond what was compressed, so it is only used where there is room for it.
template <bool kValues, bool kResidual>
HVDKIT_AVX512 void select_avx512(Sink& sink, const std::byte* values, std::byte* residual, std::size_t count,
                                 float threshold) {
    const auto* const in = reinterpret_cast<const float*>(values);
    auto* const left = reinterpret_cast<float*>(residual);
    const __m512 least = _mm512_set1_ps(threshold);
    const __m512i infinity = _mm512_set1_epi32(static_cast<int>(kInfinity));
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    Selected so_far = sink.so_far;
    std::size_t i = 0;
    for (; i + kGroup <= count; i += kGroup) {
        const __m512 old = kResidual ? _mm512_loadu_ps(left + i) : _mm512_setzero_ps();
        const __m512 fresh = kValues ? _mm512_loadu_ps(in + i) : _mm512_setzero_ps();
        const bool both = kValues && kResidual;
        const __m512 now = both ? _mm512_add_ps(fresh, old) : kValues ? fresh : old;
        const __m512 size = _mm512_abs_ps(now);
        const unsigned found = _mm512_cmp_ps_mask(size, least, _CMP_NLE_UQ);
        if (found == 0) {
            if constexpr (both) _mm512_storeu_ps(left + i, now);
            continue;
        }
        const auto found_count = static_cast<std::size_t>(__builtin_popcount(found));
        const std::size_t room = sink.capacity - so_far.emitted;
        const unsigned taken = found_count <= room ? found : lowest_bits(found, room);
        const auto taken_count = static_cast<std::size_t>(__builtin_popcount(taken));
        if (taken != 0) {
            const auto mask = static_cast<__mmask16>(taken);
            const __m512i places =
                _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(static_cast<uint32_t>(i))), steps);
            const __m512 packed = _mm512_maskz_compress_ps(mask, now);
            const __m512i packed_places = _mm512_maskz_compress_epi32(mask, places);
            std::byte* const to = sink.picked + so_far.emitted * sizeof(float);
            std::byte* const to_places = sink.indices + so_far.emitted * sizeof(uint32_t);
            if (room >= kGroup) {
                _mm512_storeu_ps(to, packed);
                _mm512_storeu_si512(to_places, packed_places);
            } else {
                const auto lowest = static_cast<__mmask16>((1u << taken_count) - 1u);
                _mm512_mask_storeu_ps(to, lowest, packed);
                _mm512_mask_storeu_epi32(to_places, lowest, packed_places);
            }
        }
        if constexpr (kResidual) {
            const __mmask16 special = _mm512_cmpge_epi32_mask(_mm512_castps_si512(size), infinity);
            const __m512 rest = _mm512_mask_mov_ps(now, static_cast<__mmask16>(taken), _mm512_setzero_ps());
            _mm512_storeu_ps(left + i, _mm512_mask_mov_ps(rest, special, both ? old : _mm512_setzero_ps()));
        }
        so_far.found += found_count;
        so_far.emitted += taken_count;
    }
    sink.so_far = so_far;
    select_each<kValues, kResidual>(sink, values, residual, i, count, threshold);
}

#endif

template <bool kValues, bool kResidual>
void select_with([[maybe_unused]] Vectors with, Sink& sink, const std::byte* values, std::byte* residual,
                 std::size_t count, float threshold) {
#if defined(HVDKIT_WIDE)
    if (with == Vectors::avx512) {
        return select_avx512<kValues, kResidual>(sink, values, residual, count, threshold);
    }
    if (with == Vectors::avx2) return select_avx2<kValues, kResidual>(sink, values, residual, count, threshold);
#endif
    select_portable<kValues, kResidual>(sink, values, residual, count, threshold);
}

// Asked with 16 MiB of gradients of which one in a hundred is found, as top-k mostly does.
Vectors for_selecting() {
    static const Vectors chosen = [] {
        constexpr std::size_t kCount = 1u << 22;
        std::vector<float> values(kCount), residual(kCount), picked(kCount);
        std::vector<uint32_t> indices(kCount);
        for (std::size_t i = 0; i < kCount; ++i) values[i] = (i * 2654435761u % 100 == 0) ? 2.0f : 0.5f;
        return quickest([&](Vectors with) {
            std::fill(residual.begin(), residual.end(), 0.0f);
            Sink sink{reinterpret_cast<std::byte*>(indices.data()),
                      reinterpret_cast<std::byte*>(picked.data()),
                      kCount,
                      {0, 0}};
            select_with<true, true>(with, sink, reinterpret_cast<const std::byte*>(values.data()),
                                    reinterpret_cast<std::byte*>(residual.data()), kCount, 1.0f);
        });
    }();
    return chosen;
}

template <bool kValues, bool kResidual>
void select_from(Sink& sink, const std::byte* values, std::byte* residual, std::size_t count, float threshold) {
    select_with<kValues, kResidual>(for_selecting(), sink, values, residual, count, threshold);
}

}  // namespace

const char* vectors_for_selecting() { return name_of(for_selecting()); }

Selected select(std::byte* indices, std::byte* picked, std::size_t capacity, const std::byte* values,
                std::byte* residual, std::size_t count, float threshold) {
    Sink sink{indices, picked, capacity, {0, 0}};
    if (values == nullptr) {
        select_from<false, true>(sink, values, residual, count, threshold);
    } else if (residual == nullptr) {
        select_from<true, false>(sink, values, residual, count, threshold);
    } else {
        select_from<true, true>(sink, values, residual, count, threshold);
    }
    return sink.so_far;
}

}  // namespace hvdkit
