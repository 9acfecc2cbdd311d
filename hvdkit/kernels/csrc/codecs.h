// The loops of codecs over flat buffers of float32, without Python: what they mean is told in numpy_codecs.py,
// numpy_sparse.py and numpy_kernels.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace hvdkit {

// Buffers of all functions below may begin at any address; what is written is apart from what is only read. A residual
// or a buffer of values that is not there is a null pointer: what counts as element i is then the other one's alone.

constexpr std::uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr std::uint32_t kInfinity = 0x7F800000u;
constexpr std::uint32_t kQuietNan = 0x7FC00000u;

HVDKIT_INLINE std::uint32_t magnitude_word(float value) { return bits<std::uint32_t>(value) & kMagnitude; }
HVDKIT_INLINE bool is_finite(float value) { return magnitude_word(value) < kInfinity; }

template <bool kValues, bool kResidual>
HVDKIT_INLINE float element(const std::byte* values, const std::byte* residual, std::size_t i) {
    static_assert(kValues || kResidual);
    if constexpr (kValues && kResidual) return load<float>(values, i) + load<float>(residual, i);
    return load<float>(kValues ? values : residual, i);
}

// A random number for each place: the finaliser "lowbias32" of Chris Wellons, "Prospecting for Hash Functions" (2018),
// on a counter that begins where the seed says.
HVDKIT_INLINE std::uint32_t random_word(std::uint32_t place, std::uint32_t seed) {
    std::uint32_t word = place + seed * 0x9E3779B9u;
    word ^= word >> 16;
    word *= 0x7FEB352Du;
    word ^= word >> 15;
    word *= 0x846CA68Bu;
    word ^= word >> 16;
    return word;
}

// ``bits`` is 8 or 4, ``block`` a multiple of 16.
void quantise(std::byte* codes, std::byte* scales, const std::byte* values, std::byte* residual, std::size_t count,
              int bits, std::size_t block, std::optional<std::uint32_t> seed);
void dequantise(std::byte* out, const std::byte* codes, const std::byte* scales, std::size_t count, int bits,
                std::size_t block, float scale, bool accumulate);

// ``block`` is a multiple of 512.
void sign(std::byte* packed, std::byte* scales, const std::byte* values, std::byte* residual, std::size_t count,
          std::size_t block);
void unsign(std::byte* out, const std::byte* packed, const std::byte* scales, std::size_t count, std::size_t block,
            float scale, bool accumulate);

struct Selected {
    std::size_t emitted;
    std::size_t found;
};

// ``indices`` and ``picked`` hold ``capacity`` elements. At least one of values and residual is there.
Selected select(std::byte* indices, std::byte* picked, std::size_t capacity, const std::byte* values,
                std::byte* residual, std::size_t count, float threshold);

// The instructions with which loops written in several ways run here.
const char* vectors_for_selecting();
const char* vectors_for_signs();

// The first place in ``indices`` that is not ascending or not below ``count``.
std::optional<std::size_t> first_bad_index(const std::byte* indices, std::size_t index_count, std::size_t count);
void scatter_add(std::byte* out, const std::byte* indices, const std::byte* values, std::size_t index_count,
                 float scale);

// Elements at ascending places, from one rank.
struct Pairs {
    const std::byte* indices;
    const std::byte* values;
    std::size_t count;
};
void sum_pairs(std::byte* out, std::size_t count, const std::vector<Pairs>& pairs, Scale scale);

// One element of each ``stride`` goes to ``sample``; the last of them may be short. At least one of values and
// residual is there.
void abs_sample(std::byte* sample, const std::byte* values, const std::byte* residual, std::size_t count,
                std::size_t stride, std::uint32_t seed);

std::uint64_t checksum(const std::byte* data, std::size_t nbytes);

// Low rank: a matrix of ``rows`` rows, and ``rank`` vectors as long as a column (left) and as a row (right).
void project(std::byte* left, const std::byte* matrix, const std::byte* right, std::size_t rows, std::size_t cols,
             std::size_t rank);
// ``matrix`` += ``gradient`` before it. False where that is not finite: ``matrix`` is as before then, but for rounding.
bool add_and_project(std::byte* left, std::byte* matrix, const std::byte* gradient, const std::byte* right,
                     std::size_t rows, std::size_t cols, std::size_t rank);
void project_back(std::byte* right, const std::byte* matrix, const std::byte* left, std::size_t rows, std::size_t cols,
                  std::size_t rank);
void orthonormalise(std::byte* vectors, std::size_t length, std::size_t rank);
// ``matrix`` and ``out`` may be null.
void reconstruct(std::byte* out, std::byte* matrix, const std::byte* left, const std::byte* right, std::size_t rows,
                 std::size_t cols, std::size_t rank, float scale);

// Whether all of ``gradient`` was finite.
bool momentum(std::byte* velocity, std::byte* accumulated, const std::byte* gradient, std::size_t count, float factor);

}  // namespace hvdkit
