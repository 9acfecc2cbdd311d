// combine and rescale: the loops that each dtype does in its own arithmetic.
#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels.h"
#include "memory.h"

namespace hvdkit {
namespace {

// Integers wrap. Signed overflow is undefined, and uint16 * uint16 would overflow the int it is promoted to, so
// integers are added and multiplied as unsigned numbers of at least the width of int.
template <typename T>
struct Wrapping {
    using type = std::common_type_t<std::make_unsigned_t<T>, unsigned>;
};
template <>
struct Wrapping<float> {
    using type = float;
};
template <>
struct Wrapping<double> {
    using type = double;
};

template <typename T>
HVDKIT_INLINE T plus(T a, T b) {
    using W = typename Wrapping<T>::type;
    return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
}

template <typename T>
HVDKIT_INLINE T times(T a, T b) {
    using W = typename Wrapping<T>::type;
    return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
}

// A NaN wins; of equal values (-0.0 and 0.0) the later one. Bitwise "or" keeps the loop free of branches.
template <typename T>
HVDKIT_INLINE T minimum(T a, T b) {
    return (static_cast<int>(a < b) | static_cast<int>(a != a)) != 0 ? a : b;
}

template <typename T>
HVDKIT_INLINE T maximum(T a, T b) {
    return (static_cast<int>(a > b) | static_cast<int>(a != a)) != 0 ? a : b;
}

template <typename T, typename Function>
HVDKIT_INLINE void each(std::byte* out, const std::byte* a, const std::byte* b, std::size_t count, Function function) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) {
        store<T>(out, i, function(load<T>(a, i), load<T>(b, i)));
    }
}

template <typename T>
HVDKIT_INLINE void combine_as(Op op, std::byte* out, const std::byte* a, const std::byte* b, std::size_t count) {
    switch (op) {
        case Op::sum:
            return each<T>(out, a, b, count, [](T x, T y) HVDKIT_LAMBDA { return plus(x, y); });
        case Op::product:
            return each<T>(out, a, b, count, [](T x, T y) HVDKIT_LAMBDA { return times(x, y); });
        case Op::min:
            return each<T>(out, a, b, count, [](T x, T y) HVDKIT_LAMBDA { return minimum(x, y); });
        case Op::max:
            return each<T>(out, a, b, count, [](T x, T y) HVDKIT_LAMBDA { return maximum(x, y); });
    }
}

// How a real type is scaled; numpy_kernels.py has the rule.
template <typename T>
struct Rescaling {
    bool divides;
    T number;
};

template <typename T>
Rescaling<T> rescaling_of(Scale scale) {
    // Dividing by a power of two is multiplying by its reciprocal, which takes less time.
    const bool is_power_of_two = (scale.divisor & (scale.divisor - 1)) == 0;
    if (scale.factor == 1.0 && !is_power_of_two) return {true, static_cast<T>(scale.divisor)};
    return {false, static_cast<T>(scale.factor / static_cast<double>(scale.divisor))};
}

template <typename T, typename Function>
HVDKIT_INLINE void map(std::byte* out, const std::byte* in, std::size_t count, Function function) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) {
        store<T>(out, i, function(load<T>(in, i)));
    }
}

// As C truncates, and where C leaves it undefined: clamped, NaN to 0. The upper bound of 64 bits is no double, so
// compare with the power of two above it.
template <typename T>
HVDKIT_INLINE T truncated(double value) {
    constexpr double low = static_cast<double>(std::numeric_limits<T>::min());
    constexpr double above = 2.0 * static_cast<double>(T{1} << (std::numeric_limits<T>::digits - 1));
    if (value >= above) return std::numeric_limits<T>::max();
    if (value <= low) return std::numeric_limits<T>::min();
    return value == value ? static_cast<T>(value) : T{0};
}

// Toward zero, and exact. Up to 32 bits by way of double, for which processors have vectors: what is rounded there is
// less than what a quotient is away from the next integer.
template <typename T>
HVDKIT_INLINE T divided(T value, std::int64_t divisor) {
    if constexpr (sizeof(T) < sizeof(std::int64_t)) {
        return static_cast<T>(static_cast<double>(value) / static_cast<double>(divisor));
    } else {
        return static_cast<T>(value / static_cast<T>(divisor));
    }
}

template <typename T>
HVDKIT_INLINE void rescale_as(std::byte* out, const std::byte* in, Scale scale, std::size_t count) {
    if constexpr (std::is_floating_point_v<T>) {
        const Rescaling<T> rescaling = rescaling_of<T>(scale);
        const T number = rescaling.number;
        if (rescaling.divides) return map<T>(out, in, count, [=](T x) HVDKIT_LAMBDA { return x / number; });
        return map<T>(out, in, count, [=](T x) HVDKIT_LAMBDA { return x * number; });
    } else {
        const double factor = scale.factor;
        const double divisor = static_cast<double>(scale.divisor);
        const std::int64_t whole = scale.divisor;
        if (factor == 1.0) return map<T>(out, in, count, [=](T x) HVDKIT_LAMBDA { return divided(x, whole); });
        return map<T>(out, in, count,
                      [=](T x) HVDKIT_LAMBDA { return truncated<T>(static_cast<double>(x) * factor / divisor); });
    }
}

// All inputs of an element are read before any output is written: an output may be one of the inputs.
template <typename T, bool Over, std::size_t Outs, std::size_t Ins>
HVDKIT_INLINE void fused_as(std::byte* const* outs, const std::byte* const* ins, T number, std::size_t count) {
    std::byte* const out0 = outs[0];
    std::byte* const out1 = outs[Outs - 1];
    const std::byte* const in0 = ins[0];
    const std::byte* const in1 = ins[Ins > 1 ? 1 : 0];
    const std::byte* const in2 = ins[Ins > 2 ? 2 : 0];
    const std::byte* const in3 = ins[Ins > 3 ? 3 : 0];
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) {
        T sum = load<T>(in0, i);
        if constexpr (Ins > 1) sum = sum + load<T>(in1, i);
        if constexpr (Ins > 2) sum = sum + load<T>(in2, i);
        if constexpr (Ins > 3) sum = sum + load<T>(in3, i);
        sum = Over ? sum / number : sum * number;
        store<T>(out0, i, sum);
        if constexpr (Outs > 1) store<T>(out1, i, sum);
    }
}

}  // namespace

// Clones must be plain functions with a name of their own: compilers do not clone templates reliably.
#define HVDKIT_ARITHMETIC(T)                                                                                       \
    HVDKIT_CLONES void combine_##T(Op op, std::byte* out, const std::byte* a, const std::byte* b, std::size_t n) { \
        combine_as<T>(op, out, a, b, n);                                                                           \
    }                                                                                                              \
    HVDKIT_CLONES void rescale_##T(std::byte* out, const std::byte* in, Scale scale, std::size_t n) {              \
        rescale_as<T>(out, in, scale, n);                                                                          \
    }

using std::int16_t;
using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

HVDKIT_ARITHMETIC(uint8_t)
HVDKIT_ARITHMETIC(int8_t)
HVDKIT_ARITHMETIC(uint16_t)
HVDKIT_ARITHMETIC(int16_t)
HVDKIT_ARITHMETIC(uint32_t)
HVDKIT_ARITHMETIC(int32_t)
HVDKIT_ARITHMETIC(uint64_t)
HVDKIT_ARITHMETIC(int64_t)
HVDKIT_ARITHMETIC(float)
HVDKIT_ARITHMETIC(double)

HVDKIT_CLONES void combine_bool(Op op, std::byte* out, const std::byte* a, const std::byte* b, std::size_t n) {
    // As bytes, of which any but 0 is true: a C++ bool that came over a wire with another value is undefined.
    if (op == Op::sum || op == Op::max) {
        each<uint8_t>(out, a, b, n, [](uint8_t x, uint8_t y) HVDKIT_LAMBDA { return uint8_t((x | y) != 0); });
    } else {
        each<uint8_t>(out, a, b, n, [](uint8_t x, uint8_t y) HVDKIT_LAMBDA { return uint8_t((x != 0) & (y != 0)); });
    }
}

#define HVDKIT_DISPATCH(DTYPE, NAME, ...)        \
    switch (DTYPE) {                             \
        case DType::uint8:                       \
            return NAME##_uint8_t(__VA_ARGS__);  \
        case DType::int8:                        \
            return NAME##_int8_t(__VA_ARGS__);   \
        case DType::uint16:                      \
            return NAME##_uint16_t(__VA_ARGS__); \
        case DType::int16:                       \
            return NAME##_int16_t(__VA_ARGS__);  \
        case DType::uint32:                      \
            return NAME##_uint32_t(__VA_ARGS__); \
        case DType::int32:                       \
            return NAME##_int32_t(__VA_ARGS__);  \
        case DType::uint64:                      \
            return NAME##_uint64_t(__VA_ARGS__); \
        case DType::int64:                       \
            return NAME##_int64_t(__VA_ARGS__);  \
        case DType::float32:                     \
            return NAME##_float(__VA_ARGS__);    \
        case DType::float64:                     \
            return NAME##_double(__VA_ARGS__);   \
        case DType::boolean:                     \
        case DType::float16:                     \
        case DType::bfloat16:                    \
            break;                               \
    }

#define HVDKIT_FUSED_ONE(T, NAME, OVER, OUTS, INS)                                                                \
    HVDKIT_CLONES void NAME##_##T##_##OUTS##_##INS(std::byte* const* outs, const std::byte* const* ins, T number, \
                                                   std::size_t count) {                                           \
        fused_as<T, OVER, OUTS, INS>(outs, ins, number, count);                                                   \
    }
#define HVDKIT_FUSED(T, OUTS, INS)               \
    HVDKIT_FUSED_ONE(T, times, false, OUTS, INS) \
    HVDKIT_FUSED_ONE(T, over, true, OUTS, INS)
#define HVDKIT_FUSED_ALL(T) \
    HVDKIT_FUSED(T, 1, 1)   \
    HVDKIT_FUSED(T, 1, 2)   \
    HVDKIT_FUSED(T, 1, 3)   \
    HVDKIT_FUSED(T, 1, 4)   \
    HVDKIT_FUSED(T, 2, 1)   \
    HVDKIT_FUSED(T, 2, 2)   \
    HVDKIT_FUSED(T, 2, 3)   \
    HVDKIT_FUSED(T, 2, 4)

HVDKIT_FUSED_ALL(float)
HVDKIT_FUSED_ALL(double)

template <typename T>
using Fused = void (*)(std::byte* const*, const std::byte* const*, T, std::size_t);
template <typename T>
using FusedTable = Fused<T>[kFusedOutputs][kFusedSources];

#define HVDKIT_FUSED_TABLE(T, NAME)                                               \
    {                                                                             \
        {NAME##_##T##_1_1, NAME##_##T##_1_2, NAME##_##T##_1_3, NAME##_##T##_1_4}, \
        {NAME##_##T##_2_1, NAME##_##T##_2_2, NAME##_##T##_2_3, NAME##_##T##_2_4}, \
    }

template <typename T>
void run_fused(const FusedTable<T>& times, const FusedTable<T>& over, std::byte* const* outs, std::size_t out_count,
               const std::byte* const* ins, std::size_t in_count, Scale scale, std::size_t count) {
    const Rescaling<T> rescaling = rescaling_of<T>(scale);
    const auto& table = rescaling.divides ? over : times;
    table[out_count - 1][in_count - 1](outs, ins, rescaling.number, count);
}

void fused_sum(DType dtype, std::byte* const* outs, std::size_t out_count, const std::byte* const* ins,
               std::size_t in_count, Scale scale, std::size_t count) {
    static constexpr FusedTable<float> float_times = HVDKIT_FUSED_TABLE(float, times);
    static constexpr FusedTable<float> float_over = HVDKIT_FUSED_TABLE(float, over);
    static constexpr FusedTable<double> double_times = HVDKIT_FUSED_TABLE(double, times);
    static constexpr FusedTable<double> double_over = HVDKIT_FUSED_TABLE(double, over);
    if (dtype == DType::float64)
        return run_fused(double_times, double_over, outs, out_count, ins, in_count, scale, count);
    run_fused(float_times, float_over, outs, out_count, ins, in_count, scale, count);
}

void combine(DType dtype, Op op, std::byte* out, const std::byte* a, const std::byte* b, std::size_t count) {
    if (dtype == DType::boolean) return combine_bool(op, out, a, b, count);
    HVDKIT_DISPATCH(dtype, combine, op, out, a, b, count)
}

void rescale(DType dtype, std::byte* out, const std::byte* in, Scale scale, std::size_t count) {
    HVDKIT_DISPATCH(dtype, rescale, out, in, scale, count)
}

}  // namespace hvdkit
