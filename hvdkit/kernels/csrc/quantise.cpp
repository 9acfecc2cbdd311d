// quantise and dequantise: integers of 8 or 4 bits with one scale a block.
#include <algorithm>
#include <limits>

#include "codecs.h"

namespace hvdkit {

using std::int32_t;
using std::int8_t;
using std::uint32_t;
using std::uint8_t;

// What is the same for all elements of a block.
struct Grid {
    float scale;
    float inverse;
    int32_t limit;
    int32_t zero;
};

namespace {

// Elements whose codes of 4 bits are held as bytes until they are packed, or after they were unpacked.
constexpr std::size_t kChunk = 2048;
constexpr int32_t kNibbleZero = 8;

// Adding it to a number below 2**22 leaves no bits of a fraction: the sum is rounded to an integer, ties to even, which
// stands in its lowest bits.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2**23
constexpr int32_t kRounderWord = 0x4B400000;

HVDKIT_INLINE int32_t nearest_integer(float value) { return bits<int32_t>(value + kRounder) - kRounderWord; }

HVDKIT_INLINE int32_t integer_below(float value) {
    const float sum = value + kRounder;
    return bits<int32_t>(sum) - kRounderWord - static_cast<int32_t>(sum - kRounder > value);
}

template <bool kResidual>
HVDKIT_INLINE uint32_t largest_of(const std::byte* values, const std::byte* residual, std::size_t count) {
    uint32_t largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
        largest = std::max(largest, magnitude_word(element<true, kResidual>(values, residual, i)));
    }
    return largest;
}

// An element is rounded to nearest without being clamped: a product of three roundings is too near to the limit.
template <bool kResidual>
HVDKIT_INLINE void round_each(std::byte* codes, const std::byte* values, std::byte* residual, std::size_t count,
                              const Grid& grid) {
    const Grid at = grid;
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) {
        const float value = element<true, kResidual>(values, residual, i);
        const int32_t code = nearest_integer(value * at.inverse);
        store<uint8_t>(codes, i, static_cast<uint8_t>(code + at.zero));
        if constexpr (kResidual) store<float>(residual, i, value - static_cast<float>(code) * at.scale);
    }
}

template <bool kResidual>
HVDKIT_INLINE void dither_each(std::byte* codes, const std::byte* values, std::byte* residual, std::size_t count,
                               const Grid& grid, uint32_t place, uint32_t seed) {
    const Grid at = grid;
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i, ++place) {  // a counter of 32 bits, as wide as the other vectors here
        const float value = element<true, kResidual>(values, residual, i);
        const uint32_t word = random_word(place, seed) >> 8;
        const float uniform = static_cast<float>(static_cast<int32_t>(word)) * 0x1p-24f;
        const int32_t below = integer_below(value * at.inverse + uniform);
        const int32_t code = std::min(std::max(below, -at.limit), at.limit);
        store<uint8_t>(codes, i, static_cast<uint8_t>(code + at.zero));
        if constexpr (kResidual) store<float>(residual, i, value - static_cast<float>(code) * at.scale);
    }
}

template <bool kAccumulate>
HVDKIT_INLINE void scale_each(std::byte* out, const std::byte* codes, std::size_t count, float block_scale,
                              float scale) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) {
        const float decoded = static_cast<float>(load<int8_t>(codes, i)) * block_scale * scale;
        store<float>(out, i, kAccumulate ? load<float>(out, i) + decoded : decoded);
    }
}

}  // namespace

// Clones must be plain functions with a name of their own: compilers do not clone templates reliably.

HVDKIT_CLONES uint32_t largest_magnitude(const std::byte* values, const std::byte* residual, std::size_t count) {
    return residual == nullptr ? largest_of<false>(values, residual, count) : largest_of<true>(values, residual, count);
}

HVDKIT_CLONES void round_to_codes(std::byte* codes, const std::byte* values, std::byte* residual, std::size_t count,
                                  const Grid& grid) {
    if (residual == nullptr) return round_each<false>(codes, values, residual, count, grid);
    round_each<true>(codes, values, residual, count, grid);
}

HVDKIT_CLONES void dither_to_codes(std::byte* codes, const std::byte* values, std::byte* residual, std::size_t count,
                                   const Grid& grid, uint32_t place, uint32_t seed) {
    if (residual == nullptr) return dither_each<false>(codes, values, residual, count, grid, place, seed);
    dither_each<true>(codes, values, residual, count, grid, place, seed);
}

HVDKIT_CLONES void scale_codes(std::byte* out, const std::byte* codes, std::size_t count, float block_scale,
                               float scale, bool accumulate) {
    if (!accumulate) return scale_each<false>(out, codes, count, block_scale, scale);
    scale_each<true>(out, codes, count, block_scale, scale);
}

// out[i] = in[2 i] | in[2 i + 1] << 4, for bytes below 16.
HVDKIT_CLONES void pack_nibbles(std::byte* out, const std::byte* in, std::size_t pairs) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < pairs; ++i) {
        store<uint8_t>(out, i, static_cast<uint8_t>(load<uint8_t>(in, 2 * i) | load<uint8_t>(in, 2 * i + 1) << 4));
    }
}

HVDKIT_CLONES void unpack_nibbles(std::byte* out, const std::byte* in, std::size_t pairs) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < pairs; ++i) {
        const uint8_t pair = load<uint8_t>(in, i);
        store<int8_t>(out, 2 * i, static_cast<int8_t>((pair & 15) - kNibbleZero));
        store<int8_t>(out, 2 * i + 1, static_cast<int8_t>((pair >> 4) - kNibbleZero));
    }
}

namespace {

struct Task {
    std::byte* codes;
    const std::byte* values;
    std::byte* residual;
    int bits;
    std::optional<uint32_t> seed;
};

std::byte* advanced(std::byte* base, std::size_t nbytes) { return base == nullptr ? nullptr : base + nbytes; }

void to_codes(const Task& task, std::byte* codes, std::size_t begin, std::size_t count, const Grid& grid) {
    const std::byte* const values = task.values + begin * sizeof(float);
    std::byte* const residual = advanced(task.residual, begin * sizeof(float));
    if (task.seed) {
        dither_to_codes(codes, values, residual, count, grid, static_cast<uint32_t>(begin), *task.seed);
    } else {
        round_to_codes(codes, values, residual, count, grid);
    }
}

void to_nibbles(const Task& task, std::size_t begin, std::size_t count, const Grid& grid) {
    alignas(64) std::byte chunk[kChunk];
    for (std::size_t done = 0; done < count; done += kChunk) {
        const std::size_t step = std::min(kChunk, count - done);
        to_codes(task, chunk, begin + done, step, grid);
        if (step % 2 != 0) chunk[step] = static_cast<std::byte>(kNibbleZero);
        pack_nibbles(task.codes + (begin + done) / 2, chunk, (step + 1) / 2);
    }
}

void all_zero(const Task& task, std::size_t begin, std::size_t count) {
    if (task.bits == 8) {
        std::memset(task.codes + begin, 0, count);
    } else {
        std::memset(task.codes + begin / 2, kNibbleZero | kNibbleZero << 4, (count + 1) / 2);
    }
}

// Returns the scale of the block.
float quantise_block(const Task& task, std::size_t begin, std::size_t count) {
    std::byte* const residual = advanced(task.residual, begin * sizeof(float));
    const uint32_t largest = largest_magnitude(task.values + begin * sizeof(float), residual, count);
    const int32_t limit = task.bits == 8 ? 127 : 7;
    const float scale = bits<float>(largest) / static_cast<float>(limit);
    // Of the largest float32 there is, the quotient is rounded up so that decoding it would overflow.
    if (largest >= kInfinity || !is_finite(static_cast<float>(limit) * scale)) {
        all_zero(task, begin, count);
        return bits<float>(kQuietNan);
    }
    // A block that is too small for an inverse: multiplied by 0, every element becomes code 0 and stays in the
    // residual.
    const bool small = scale < std::numeric_limits<float>::min();
    const Grid grid{small ? 0.0f : scale, small ? 0.0f : 1.0f / scale, limit, task.bits == 8 ? 0 : kNibbleZero};
    if (task.bits == 8) {
        to_codes(task, task.codes + begin, begin, count, grid);
    } else {
        to_nibbles(task, begin, count, grid);
    }
    return grid.scale;
}

}  // namespace

void quantise(std::byte* codes, std::byte* scales, const std::byte* values, std::byte* residual, std::size_t count,
              int bits, std::size_t block, std::optional<uint32_t> seed) {
    const Task task{codes, values, residual, bits, seed};
    for (std::size_t begin = 0; begin < count; begin += block) {
        store<float>(scales, begin / block, quantise_block(task, begin, std::min(block, count - begin)));
    }
}

void dequantise(std::byte* out, const std::byte* codes, const std::byte* scales, std::size_t count, int bits,
                std::size_t block, float scale, bool accumulate) {
    alignas(64) std::byte chunk[kChunk];
    for (std::size_t begin = 0; begin < count; begin += block) {
        const float block_scale = load<float>(scales, begin / block);
        const std::size_t end = std::min(count, begin + block);
        for (std::size_t done = begin; done < end; done += kChunk) {
            const std::size_t step = std::min(kChunk, end - done);
            if (bits == 4) unpack_nibbles(chunk, codes + done / 2, (step + 1) / 2);
            const std::byte* const from = bits == 4 ? chunk : codes + done;
            scale_codes(out + done * sizeof(float), from, step, block_scale, scale, accumulate);
        }
    }
}

}  // namespace hvdkit
