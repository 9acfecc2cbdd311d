// Reductions and conversions of flat buffers, without Python: what they mean is told in numpy_kernels.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hvdkit {

// The order of DTYPES in dtypes.py.
enum class DType {
    boolean,
    uint8,
    int8,
    uint16,
    int16,
    uint32,
    int32,
    uint64,
    int64,
    float16,
    bfloat16,
    float32,
    float64,
};

// The numbers of ReduceOp in reduce_op.py.
enum class Op { sum = 1, min = 3, max = 4, product = 5 };

std::size_t size_of(DType dtype);

inline bool is_half(DType dtype) { return dtype == DType::float16 || dtype == DType::bfloat16; }

// Elements that are worked on at a time: an accumulator and one widened source in float32 stay in the first cache.
constexpr std::size_t kBlock = 2048;

// The factor and the divisor of a result, as in class Scale of reduce_op.py.
struct Scale {
    double factor = 1.0;
    std::int64_t divisor = 1;  // 1 to kLargestDivisor

    bool is_one() const { return factor == 1.0 && divisor == 1; }
};
constexpr std::int64_t kLargestDivisor = std::int64_t{1} << 24;

// Buffers of all functions below may begin at any address. An output is the same memory as an input, or apart from it.

struct Reduction {
    DType source_dtype;
    DType destination_dtype;  // source_dtype, or float32 where that is a half
    Op op;
    Scale scale;
    std::size_t count;
    std::vector<std::byte*> destinations;  // each apart from the others
    std::vector<const std::byte*> sources;
};

void reduce(const Reduction& reduction);

void convert(DType destination_dtype, std::byte* destination, DType source_dtype, const std::byte* source,
             std::size_t count);

// out[i] = a[i] op b[i], in the dtype's own arithmetic. Not for halves: they have none.
void combine(DType dtype, Op op, std::byte* out, const std::byte* a, const std::byte* b, std::size_t count);

// outs[d][i] = scale * (ins[0][i] + ins[1][i] + ...), one pass over memory. Only for float32 and float64, and up to
// kFusedSources inputs and kFusedOutputs outputs.
constexpr std::size_t kFusedSources = 4;
constexpr std::size_t kFusedOutputs = 2;
void fused_sum(DType dtype, std::byte* const* outs, std::size_t out_count, const std::byte* const* ins,
               std::size_t in_count, Scale scale, std::size_t count);

// out[i] = scale * in[i]. Not for halves and bool.
void rescale(DType dtype, std::byte* out, const std::byte* in, Scale scale, std::size_t count);

// Any floating dtype to float32; float64 is rounded to odd, so that rounding it again to a half rounds only once.
void widen(DType dtype, float* out, const std::byte* in, std::size_t count);

// float32 to a half, to nearest, ties to even.
void narrow(DType dtype, std::byte* out, const float* in, std::size_t count);

}  // namespace hvdkit
