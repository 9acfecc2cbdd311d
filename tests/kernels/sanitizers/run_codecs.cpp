// Every kernel of codecs, over sizes, addresses, blocks and any bit pattern; with and without values and residual.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "../../../hvdkit/kernels/csrc/codecs.h"
#include "check.h"

namespace {

constexpr std::size_t kSizes[] = {0, 1, 2, 7, 15, 16, 17, 31, 33, 255, 511, 512, 513, 1025, 2047, 2048, 2049, 4099};
constexpr float kSpecial[] = {0.0f,
                              -0.0f,
                              1.0f,
                              -1.0f,
                              1e-45f,
                              3.4028235e38f,
                              -3.4028235e38f,
                              std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()};

std::size_t parts(std::size_t count, std::size_t size) { return (count + size - 1) / size; }

Buffer bytes(Random& random, std::size_t nbytes) {
    Buffer buffer(nbytes, random.number(0, 9));
    for (std::size_t i = 0; i < nbytes; ++i) buffer.data()[i] = static_cast<std::byte>(random.bits());
    return buffer;
}

// Any bit pattern, special numbers, or small ones, of which the last are exact in sums.
Buffer floats(Random& random, std::size_t count, bool small) {
    Buffer buffer = bytes(random, count * sizeof(float));
    const std::size_t kind = small ? 2 : random.number(0, 2);
    for (std::size_t i = 0; kind > 0 && i < count; ++i) {
        const float number = static_cast<float>(random.number(0, 18)) - 9.0f;
        hvdkit::store<float>(buffer.data(), i, kind == 1 ? random.one_of(kSpecial) : number);
    }
    return buffer;
}

std::byte* maybe(bool there, Buffer& buffer) { return there ? buffer.data() : nullptr; }

void run_quantise(Random& random, int bits) {
    const std::size_t count = random.one_of(kSizes);
    const std::size_t block = 16 * random.number(1, 200);
    Buffer values = floats(random, count, false), residual = floats(random, count, false);
    Buffer codes = bytes(random, parts(count * static_cast<std::size_t>(bits), 8));
    Buffer scales = bytes(random, parts(count, block) * sizeof(float));
    Buffer out = floats(random, count, false);
    std::optional<std::uint32_t> seed;
    if (random.number(0, 1) == 0) seed = static_cast<std::uint32_t>(random.bits());
    std::byte* const left = maybe(random.number(0, 1) == 0, residual);
    hvdkit::quantise(codes.data(), scales.data(), values.data(), left, count, bits, block, seed);
    hvdkit::dequantise(out.data(), codes.data(), scales.data(), count, bits, block, 0.5f, random.number(0, 1) == 0);
    const Buffer any = bytes(random, codes.nbytes());
    hvdkit::dequantise(out.data(), any.data(), scales.data(), count, bits, block, 1e30f, false);
}

void run_sign(Random& random) {
    const std::size_t count = random.one_of(kSizes);
    const std::size_t block = 512 * random.number(1, 4);
    Buffer values = floats(random, count, false), residual = floats(random, count, false);
    Buffer packed = bytes(random, parts(count, 8));
    Buffer scales = bytes(random, parts(count, block) * sizeof(float));
    Buffer out = floats(random, count, false);
    hvdkit::sign(packed.data(), scales.data(), values.data(), maybe(random.number(0, 1) == 0, residual), count, block);
    hvdkit::unsign(out.data(), packed.data(), scales.data(), count, block, 0.5f, random.number(0, 1) == 0);
}

void run_select(Random& random) {
    const std::size_t count = random.one_of(kSizes);
    const std::size_t capacity = random.number(0, 1) == 0 ? random.number(0, count) : count + random.number(0, 20);
    const bool small = random.number(0, 2) > 0;
    const std::size_t given = random.number(0, 2);
    Buffer values = floats(random, count, small), residual = floats(random, count, small);
    Buffer indices = bytes(random, capacity * sizeof(std::uint32_t)), picked = bytes(random, capacity * sizeof(float));
    std::vector<float> whole(count);
    for (std::size_t i = 0; i < count; ++i) {
        const float value = given == 1 ? 0.0f : hvdkit::load<float>(values.data(), i);
        whole[i] = value + (given == 2 ? 0.0f : hvdkit::load<float>(residual.data(), i));
    }
    std::byte* const left = maybe(given != 2, residual);
    const float threshold = static_cast<float>(random.number(0, 18));
    const hvdkit::Selected selected =
        hvdkit::select(indices.data(), picked.data(), capacity, maybe(given != 1, values), left, count, threshold);
    CHECK(selected.emitted == std::min(selected.found, capacity));
    for (Buffer* const one : {&indices, &picked}) {  // what is behind them may be anything
        std::fill(one->data() + selected.emitted * sizeof(float), one->data() + one->nbytes(), std::byte{0});
    }
    CHECK(!hvdkit::first_bad_index(indices.data(), selected.emitted, count));
    if (!small || left == nullptr) return;
    hvdkit::scatter_add(left, indices.data(), picked.data(), selected.emitted, 1.0f);
    for (std::size_t i = 0; i < count; ++i) CHECK(hvdkit::load<float>(left, i) == whole[i]);
    const hvdkit::Pairs pairs{indices.data(), picked.data(), selected.emitted};
    hvdkit::sum_pairs(left, count, {pairs, pairs}, hvdkit::Scale{1.0, 2});
    for (std::size_t k = 0; k < selected.emitted; ++k) {
        const std::size_t i = hvdkit::load<std::uint32_t>(indices.data(), k);
        CHECK(hvdkit::load<float>(left, i) == hvdkit::load<float>(picked.data(), k));
    }
}

void run_the_rest(Random& random) {
    const std::size_t count = random.one_of(kSizes);
    Buffer values = floats(random, count, false), residual = floats(random, count, false);
    Buffer gradient = floats(random, count, false);
    const std::size_t stride = random.number(0, 3) == 0 ? random.number(1, 0xFFFFFFFFu) : random.number(1, 70);
    Buffer sample = bytes(random, parts(count, stride) * sizeof(float));
    const std::size_t given = random.number(0, 2);
    hvdkit::abs_sample(sample.data(), maybe(given != 1, values), maybe(given != 2, residual), count, stride,
                       static_cast<std::uint32_t>(random.bits()));
    hvdkit::momentum(values.data(), residual.data(), gradient.data(), count, 0.9f);
    Buffer any = bytes(random, random.number(0, 300));
    const std::uint64_t before = hvdkit::checksum(any.data(), any.nbytes());
    if (any.nbytes() == 0) return;
    any.data()[random.number(0, any.nbytes() - 1)] ^= std::byte{16};
    CHECK(hvdkit::checksum(any.data(), any.nbytes()) != before);
}

void run_low_rank(Random& random) {
    const std::size_t rows = random.number(1, 40), cols = random.number(1, 600), rank = random.number(1, 6);
    Buffer matrix = floats(random, rows * cols, true), gradient = floats(random, rows * cols, true);
    Buffer right = floats(random, rank * cols, true), left = floats(random, rank * rows, true);
    Buffer again = floats(random, rank * rows, true), out = floats(random, rows * cols, true);
    CHECK(hvdkit::add_and_project(left.data(), matrix.data(), gradient.data(), right.data(), rows, cols, rank));
    hvdkit::project(again.data(), matrix.data(), right.data(), rows, cols, rank);
    CHECK(std::memcmp(left.data(), again.data(), left.nbytes()) == 0);
    hvdkit::orthonormalise(left.data(), rows, rank);
    hvdkit::project_back(right.data(), matrix.data(), left.data(), rows, cols, rank);
    hvdkit::reconstruct(maybe(random.number(0, 3) > 0, out), matrix.data(), left.data(), right.data(), rows, cols, rank,
                        0.5f);
}

}  // namespace

void run_codecs(std::uint64_t seed, std::size_t rounds) {
    Random random(seed);
    for (std::size_t round = 0; round < 10 * rounds; ++round) {
        run_quantise(random, 8);
        run_quantise(random, 4);
        run_sign(random);
        run_select(random);
        run_the_rest(random);
        run_low_rank(random);
    }
}
