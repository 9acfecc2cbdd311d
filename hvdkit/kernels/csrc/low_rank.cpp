// Products of a matrix with the few vectors of its low-rank factors, in an order that no processor changes: all ranks
// compute them for themselves and must get the same bits. Factors lie vector by vector.
#include <algorithm>
#include <cmath>

#include "codecs.h"

namespace hvdkit {
namespace {

constexpr std::size_t kLanes = 16;
constexpr std::size_t kVectors = 4;    // of a factor that are worked on at a time
constexpr std::size_t kColumns = 512;  // of a row that are worked on at a time

template <typename T>
HVDKIT_INLINE T folded(T* lanes) {
    for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
        for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
}

}  // namespace

// Dot products of one row with up to kVectors vectors.
HVDKIT_CLONES void row_products(float* products, const std::byte* row, const std::byte* vectors, std::size_t cols,
                                std::size_t count) {
    alignas(64) float lanes[kVectors][kLanes] = {};
    const std::size_t whole = cols / kLanes * kLanes;
    if (count == kVectors) {
        for (std::size_t j = 0; j < whole; j += kLanes) {
            for (std::size_t k = 0; k < kVectors; ++k) {
                HVDKIT_ELEMENTWISE
                for (std::size_t lane = 0; lane < kLanes; ++lane) {
                    lanes[k][lane] += load<float>(row, j + lane) * load<float>(vectors, k * cols + j + lane);
                }
            }
        }
    } else {
        for (std::size_t k = 0; k < count; ++k) {
            for (std::size_t j = 0; j < whole; j += kLanes) {
                HVDKIT_ELEMENTWISE
                for (std::size_t lane = 0; lane < kLanes; ++lane) {
                    lanes[k][lane] += load<float>(row, j + lane) * load<float>(vectors, k * cols + j + lane);
                }
            }
        }
    }
    for (std::size_t k = 0; k < count; ++k) {
        for (std::size_t j = whole; j < cols; ++j) {
            lanes[k][j - whole] += load<float>(row, j) * load<float>(vectors, k * cols + j);
        }
        products[k] = folded(lanes[k]);
    }
}

HVDKIT_CLONES void add_multiple(std::byte* out, const std::byte* in, float factor, std::size_t count) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) store<float>(out, i, load<float>(out, i) + factor * load<float>(in, i));
}

HVDKIT_CLONES void set_multiple(std::byte* out, const std::byte* in, float factor, std::size_t count) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) store<float>(out, i, factor * load<float>(in, i));
}

// The same for kVectors rows, ``stride`` bytes apart, one after the other, in one pass over ``out``.
HVDKIT_CLONES void add_multiples(std::byte* out, const std::byte* rows, std::size_t stride, const float* factors,
                                 std::size_t count) {
    static_assert(kVectors == 4);
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) {
        float sum = load<float>(out, i) + factors[0] * load<float>(rows, i);
        sum = sum + factors[1] * load<float>(rows + stride, i);
        sum = sum + factors[2] * load<float>(rows + 2 * stride, i);
        store<float>(out, i, sum + factors[3] * load<float>(rows + 3 * stride, i));
    }
}

HVDKIT_CLONES void set_multiples(std::byte* out, const std::byte* rows, std::size_t stride, const float* factors,
                                 std::size_t count) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) {
        float sum = factors[0] * load<float>(rows, i) + factors[1] * load<float>(rows + stride, i);
        sum = sum + factors[2] * load<float>(rows + 2 * stride, i);
        store<float>(out, i, sum + factors[3] * load<float>(rows + 3 * stride, i));
    }
}

HVDKIT_CLONES void add_row(std::byte* out, const std::byte* in, std::size_t count) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) store<float>(out, i, load<float>(out, i) + load<float>(in, i));
}

HVDKIT_CLONES bool all_finite(const std::byte* values, std::size_t count) {
    std::uint32_t largest = 0;
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, magnitude_word(load<float>(values, i)));
    return largest < kInfinity;
}

HVDKIT_CLONES void take_away(std::byte* out, const std::byte* in, std::size_t count) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) store<float>(out, i, load<float>(out, i) - load<float>(in, i));
}

// The same of what was added before; a sum that was too large is forgotten.
HVDKIT_CLONES void take_back(std::byte* out, const std::byte* in, std::size_t count) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) {
        const float left = load<float>(out, i) - load<float>(in, i);
        store<float>(out, i, is_finite(left) ? left : 0.0f);
    }
}

HVDKIT_CLONES double dot_product(const std::byte* a, const std::byte* b, std::size_t count) {
    alignas(64) double lanes[kLanes] = {};
    const std::size_t whole = count / kLanes * kLanes;
    for (std::size_t i = 0; i < whole; i += kLanes) {
        HVDKIT_ELEMENTWISE
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            lanes[lane] +=
                static_cast<double>(load<float>(a, i + lane)) * static_cast<double>(load<float>(b, i + lane));
        }
    }
    for (std::size_t i = whole; i < count; ++i) {
        lanes[i - whole] += static_cast<double>(load<float>(a, i)) * static_cast<double>(load<float>(b, i));
    }
    return folded(lanes);
}

namespace {

void project_row(std::byte* left, const std::byte* row, std::size_t i, const std::byte* right, std::size_t rows,
                 std::size_t cols, std::size_t rank) {
    for (std::size_t k = 0; k < rank; k += kVectors) {
        const std::size_t count = std::min(kVectors, rank - k);
        float products[kVectors];
        row_products(products, row, right + k * cols * sizeof(float), cols, count);
        for (std::size_t one = 0; one < count; ++one) store<float>(left, (k + one) * rows + i, products[one]);
    }
}

}  // namespace

void project(std::byte* left, const std::byte* matrix, const std::byte* right, std::size_t rows, std::size_t cols,
             std::size_t rank) {
    for (std::size_t i = 0; i < rows; ++i) {
        project_row(left, matrix + i * cols * sizeof(float), i, right, rows, cols, rank);
    }
}

bool add_and_project(std::byte* left, std::byte* matrix, const std::byte* gradient, const std::byte* right,
                     std::size_t rows, std::size_t cols, std::size_t rank) {
    for (std::size_t i = 0; i < rows; ++i) {
        std::byte* const row = matrix + i * cols * sizeof(float);
        const std::byte* const added = gradient + i * cols * sizeof(float);
        if (!all_finite(added, cols)) {
            take_back(matrix, gradient, i * cols);
            return false;
        }
        add_row(row, added, cols);
        project_row(left, row, i, right, rows, cols, rank);
    }
    return true;
}

void project_back(std::byte* right, const std::byte* matrix, const std::byte* left, std::size_t rows, std::size_t cols,
                  std::size_t rank) {
    std::fill_n(right, rank * cols * sizeof(float), std::byte{0});
    // So many columns at a time that those of all vectors stay in the first cache.
    const std::size_t step = std::max<std::size_t>(kLanes, 8 * kColumns / rank / kLanes * kLanes);
    for (std::size_t j = 0; j < cols; j += step) {
        const std::size_t count = std::min(step, cols - j);
        std::size_t i = 0;
        for (; i + kVectors <= rows; i += kVectors) {
            const std::byte* const first = matrix + (i * cols + j) * sizeof(float);
            for (std::size_t k = 0; k < rank; ++k) {
                float factors[kVectors];
                for (std::size_t one = 0; one < kVectors; ++one) factors[one] = load<float>(left, k * rows + i + one);
                add_multiples(right + (k * cols + j) * sizeof(float), first, cols * sizeof(float), factors, count);
            }
        }
        for (; i < rows; ++i) {
            const std::byte* const row = matrix + (i * cols + j) * sizeof(float);
            for (std::size_t k = 0; k < rank; ++k) {
                add_multiple(right + (k * cols + j) * sizeof(float), row, load<float>(left, k * rows + i), count);
            }
        }
    }
}

void orthonormalise(std::byte* vectors, std::size_t length, std::size_t rank) {
    for (std::size_t k = 0; k < rank; ++k) {
        std::byte* const vector = vectors + k * length * sizeof(float);
        const double before = std::sqrt(dot_product(vector, vector, length));
        for (std::size_t l = 0; l < k; ++l) {
            const std::byte* const earlier = vectors + l * length * sizeof(float);
            add_multiple(vector, earlier, static_cast<float>(-dot_product(earlier, vector, length)), length);
        }
        const double norm = std::sqrt(dot_product(vector, vector, length));
        // What is left of a vector that depends on the earlier ones is rounding.
        const double factor = norm > 1e-6 * before && norm > 1e-30 ? 1.0 / norm : 0.0;
        set_multiple(vector, vector, static_cast<float>(factor), length);
    }
}

void reconstruct(std::byte* out, std::byte* matrix, const std::byte* left, const std::byte* right, std::size_t rows,
                 std::size_t cols, std::size_t rank, float scale) {
    alignas(64) std::byte block[kColumns * sizeof(float)];
    for (std::size_t i = 0; i < rows; ++i) {
        float factors[kVectors];
        for (std::size_t k = 0; k < std::min(kVectors, rank); ++k) factors[k] = load<float>(left, k * rows + i);
        for (std::size_t j = 0; j < cols; j += kColumns) {
            const std::size_t count = std::min(kColumns, cols - j);
            const std::byte* const first = right + j * sizeof(float);
            std::size_t done = 1;
            if (rank < kVectors) {
                set_multiple(block, first, factors[0], count);
            } else {
                set_multiples(block, first, cols * sizeof(float), factors, count);
                done = kVectors;
            }
            for (std::size_t k = done; k < rank; ++k) {
                add_multiple(block, right + (k * cols + j) * sizeof(float), load<float>(left, k * rows + i), count);
            }
            const std::size_t offset = (i * cols + j) * sizeof(float);
            if (matrix != nullptr) take_away(matrix + offset, block, count);
            if (out != nullptr) set_multiple(out + offset, block, scale, count);
        }
    }
}

}  // namespace hvdkit
