// Every kernel, over dtypes, odd sizes and addresses, special values and any bit pattern, in place and apart.
#include <cstring>
#include <limits>
#include <vector>

#include "../../../hvdkit/kernels/csrc/kernels.h"
#include "check.h"

namespace {

using hvdkit::DType;
using hvdkit::Op;
using hvdkit::size_of;

constexpr DType kDTypes[] = {DType::boolean,  DType::uint8,   DType::int8,   DType::uint16, DType::int16,
                             DType::uint32,   DType::int32,   DType::uint64, DType::int64,  DType::float16,
                             DType::bfloat16, DType::float32, DType::float64};
constexpr DType kFloats[] = {DType::float16, DType::bfloat16, DType::float32, DType::float64};
constexpr Op kOps[] = {Op::sum, Op::min, Op::max, Op::product};
constexpr std::size_t kSizes[] = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 2047, 2048, 2049, 4099};
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kScales[] = {1.0,  0.5,    1.0 / 3,   0.0,        -1.5,
                              1e30, -1e300, kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()};
constexpr std::int64_t kDivisors[] = {1, 2, 3, 49, 4096, (1 << 24) - 1, hvdkit::kLargestDivisor};
constexpr double kSpecial[] = {
    0.0,     -0.0,    1.0,  -1.0,    kInfinity, -kInfinity,   std::numeric_limits<double>::quiet_NaN(),
    65504.0, 65520.0, 6e-8, 2.98e-8, 1e-45,     3.4028235e38, 1e308,
    2049.0};

// Any bit pattern, special numbers, or small ones. A bool may be any byte too: kernels take it as one.
void fill(Random& random, DType dtype, Buffer& buffer, std::size_t count) {
    for (std::size_t i = 0; i < buffer.nbytes(); ++i) buffer.data()[i] = static_cast<std::byte>(random.bits());
    const bool floating = hvdkit::is_half(dtype) || dtype == DType::float32 || dtype == DType::float64;
    if (!floating || random.number(0, 2) == 0) return;
    const bool special = random.number(0, 1) == 0;
    std::vector<double> values(count);
    for (double& value : values) value = special ? random.one_of(kSpecial) : static_cast<double>(random.number(0, 9));
    hvdkit::convert(dtype, buffer.data(), DType::float64, reinterpret_cast<std::byte*>(values.data()), count);
}

bool same(const Buffer& one, const Buffer& other) {
    return one.nbytes() == 0 || std::memcmp(one.data(), other.data(), one.nbytes()) == 0;
}

void run_reduce(Random& random, DType dtype, Op op) {
    const std::size_t count = random.one_of(kSizes);
    const std::size_t source_count = random.number(1, 6);
    const bool widens = hvdkit::is_half(dtype) && random.number(0, 2) == 0;
    const DType into = widens ? DType::float32 : dtype;
    hvdkit::Scale scale;
    if (dtype != DType::boolean) scale = {random.one_of(kScales), random.one_of(kDivisors)};
    std::vector<Buffer> sources;
    for (std::size_t k = 0; k < source_count; ++k) {
        sources.emplace_back(count * size_of(dtype), random.number(0, 9));
        fill(random, dtype, sources.back(), count);
    }
    std::vector<Buffer> apart;
    for (std::size_t d = random.number(1, 4); d > 0; --d)
        apart.emplace_back(count * size_of(into), random.number(0, 9));
    hvdkit::Reduction reduction{dtype, into, op, scale, count, {}, {}};
    for (const Buffer& source : sources) reduction.sources.push_back(source.data());
    for (Buffer& destination : apart) reduction.destinations.push_back(destination.data());
    hvdkit::reduce(reduction);
    for (const Buffer& destination : apart) CHECK(same(destination, apart.front()));
    if (widens) return;
    // The same where the destinations are sources, as with buckets in shared memory.
    reduction.destinations.clear();
    const std::size_t destination_count = random.number(1, source_count);
    for (std::size_t d = 0; d < destination_count; ++d) reduction.destinations.push_back(sources[d].data());
    hvdkit::reduce(reduction);
    for (std::size_t d = 0; d < destination_count; ++d) CHECK(same(sources[d], sources.front()));
    if (!hvdkit::is_half(dtype) && dtype != DType::float32 && dtype != DType::float64) {
        CHECK(same(sources.front(), apart.front()));  // of floats, the bits of a NaN may depend on the way
    }
}

void run_convert(Random& random, DType from, DType to) {
    const std::size_t count = random.one_of(kSizes);
    Buffer source(count * size_of(from), random.number(0, 9));
    Buffer destination(count * size_of(to), random.number(0, 9));
    fill(random, from, source, count);
    hvdkit::convert(to, destination.data(), from, source.data(), count);
    if (size_of(from) != size_of(to)) return;
    hvdkit::convert(to, source.data(), from, source.data(), count);
    CHECK(same(source, destination));
}

}  // namespace

void run_kernels(std::uint64_t seed, std::size_t rounds) {
    Random random(seed);
    for (std::size_t round = 0; round < rounds; ++round) {
        for (const DType dtype : kDTypes) {
            for (const Op op : kOps) run_reduce(random, dtype, op);
        }
        for (const DType from : kFloats) {
            for (const DType to : kFloats) run_convert(random, from, to);
        }
    }
}
