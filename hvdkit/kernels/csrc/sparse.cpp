// What stands around a selection: its values added to a tensor, a sample to guess a threshold from, and the momentum
// that is gathered before it.
#include <algorithm>
#include <cstring>
#include <limits>

#include "codecs.h"

namespace hvdkit {
namespace {

using std::uint32_t;

// How many elements a place in memory is asked for before it is needed: enough to cover the way to memory.
constexpr std::size_t kAhead = 32;

template <bool kValues, bool kResidual>
void sample_from(std::byte* sample, const std::byte* values, const std::byte* residual, std::size_t count,
                 std::size_t stride, uint32_t seed) {
    const std::size_t strata = (count + stride - 1) / stride;
    std::size_t places[kAhead];
    for (std::size_t j = 0; j < strata + kAhead; ++j) {
        if (j >= kAhead) {
            const uint32_t word = magnitude_word(element<kValues, kResidual>(values, residual, places[j % kAhead]));
            store<uint32_t>(sample, j - kAhead, std::min(word, kInfinity));
        }
        if (j < strata) {
            const std::size_t begin = j * stride;
            const std::size_t random = random_word(static_cast<uint32_t>(j), seed) % stride;
            const std::size_t place = begin + random % std::min(stride, count - begin);
            places[j % kAhead] = place;
            if constexpr (kValues) __builtin_prefetch(values + place * sizeof(float));
            if constexpr (kResidual) __builtin_prefetch(residual + place * sizeof(float));
        }
    }
}

}  // namespace

// Clones must be plain functions with a name of their own: compilers do not clone templates reliably.

HVDKIT_CLONES bool is_ascending(const std::byte* indices, std::size_t count) {
    uint32_t bad = 0;
    for (std::size_t k = 1; k < count; ++k) {
        bad |= static_cast<uint32_t>(load<uint32_t>(indices, k) <= load<uint32_t>(indices, k - 1));
    }
    return bad == 0;
}

HVDKIT_CLONES bool gather_momentum(std::byte* velocity, std::byte* accumulated, const std::byte* gradient,
                                   std::size_t count, float factor) {
    uint32_t largest = 0;
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) {
        const float now = load<float>(gradient, i);
        const float old_velocity = load<float>(velocity, i);
        const float old_accumulated = load<float>(accumulated, i);
        const float new_velocity = factor * old_velocity + now;
        const float new_accumulated = old_accumulated + new_velocity;
        const bool finite = is_finite(now);
        store<float>(velocity, i, finite ? new_velocity : old_velocity);
        store<float>(accumulated, i, finite ? new_accumulated : old_accumulated);
        largest = std::max(largest, magnitude_word(now));
    }
    return largest < kInfinity;
}

std::optional<std::size_t> first_bad_index(const std::byte* indices, std::size_t index_count, std::size_t count) {
    if (index_count == 0) return std::nullopt;
    if (is_ascending(indices, index_count) && load<uint32_t>(indices, index_count - 1) < count) return std::nullopt;
    std::size_t k = 0;
    while (load<uint32_t>(indices, k) < count &&
           (k == 0 || load<uint32_t>(indices, k) > load<uint32_t>(indices, k - 1))) {
        ++k;
    }
    return k;
}

void scatter_add(std::byte* out, const std::byte* indices, const std::byte* values, std::size_t index_count,
                 float scale) {
    for (std::size_t k = 0; k < index_count; ++k) {
        if (k + kAhead < index_count) {
            __builtin_prefetch(out + load<uint32_t>(indices, k + kAhead) * sizeof(float), 1);
        }
        const std::size_t i = load<uint32_t>(indices, k);
        store<float>(out, i, load<float>(out, i) + load<float>(values, k) * scale);
    }
}

void sum_pairs(std::byte* out, std::size_t count, const std::vector<Pairs>& pairs, Scale scale) {
    constexpr std::size_t block = 4096;  // elements: stays in the nearest cache, so memory is written once, not read
    alignas(64) std::byte sums[block * sizeof(float)];
    std::vector<std::size_t> next(pairs.size(), 0);
    for (std::size_t begin = 0; begin < count; begin += block) {
        const std::size_t step = std::min(block, count - begin);
        std::memset(sums, 0, step * sizeof(float));
        for (std::size_t p = 0; p < pairs.size(); ++p) {
            const Pairs& from = pairs[p];
            std::size_t k = next[p];
            for (; k < from.count && load<uint32_t>(from.indices, k) < begin + step; ++k) {
                const std::size_t i = load<uint32_t>(from.indices, k) - begin;
                store<float>(sums, i, load<float>(sums, i) + load<float>(from.values, k));
            }
            next[p] = k;
        }
        if (!scale.is_one()) rescale(DType::float32, sums, sums, scale, step);
        std::memcpy(out + begin * sizeof(float), sums, step * sizeof(float));
    }
}

void abs_sample(std::byte* sample, const std::byte* values, const std::byte* residual, std::size_t count,
                std::size_t stride, uint32_t seed) {
    if (values == nullptr) return sample_from<false, true>(sample, values, residual, count, stride, seed);
    if (residual == nullptr) return sample_from<true, false>(sample, values, residual, count, stride, seed);
    sample_from<true, true>(sample, values, residual, count, stride, seed);
}

bool momentum(std::byte* velocity, std::byte* accumulated, const std::byte* gradient, std::size_t count, float factor) {
    return gather_momentum(velocity, accumulated, gradient, count, factor);
}

}  // namespace hvdkit
