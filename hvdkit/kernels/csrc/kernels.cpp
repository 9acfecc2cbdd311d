// reduce and convert: which loops run over which block, so that halves meet in float32 and are rounded once.
#include "kernels.h"

#include <algorithm>

#include "default_floats.h"
#include "memory.h"

namespace hvdkit {
namespace {

std::byte* as_bytes(float* block) { return reinterpret_cast<std::byte*>(block); }

// What the first destination holds goes to the others, out of the cache.
void copy_to_others(const Reduction& reduction, std::size_t known, std::size_t offset, std::size_t nbytes) {
    for (std::size_t d = known; d < reduction.destinations.size(); ++d) {
        std::memcpy(reduction.destinations[d] + offset, reduction.destinations.front() + offset, nbytes);
    }
}

void reduce_half_block(const Reduction& reduction, std::size_t begin, std::size_t count) {
    alignas(64) float accumulator[kBlock];
    alignas(64) float widened[kBlock];
    const std::size_t offset = begin * sizeof(std::uint16_t);
    widen(reduction.source_dtype, accumulator, reduction.sources.front() + offset, count);
    for (std::size_t k = 1; k < reduction.sources.size(); ++k) {
        widen(reduction.source_dtype, widened, reduction.sources[k] + offset, count);
        combine(DType::float32, reduction.op, as_bytes(accumulator), as_bytes(accumulator), as_bytes(widened), count);
    }
    if (!reduction.scale.is_one()) {
        rescale(DType::float32, as_bytes(accumulator), as_bytes(accumulator), reduction.scale, count);
    }
    std::byte* const destination = reduction.destinations.front();
    if (reduction.destination_dtype == DType::float32) {
        std::memcpy(destination + begin * sizeof(float), accumulator, count * sizeof(float));
        copy_to_others(reduction, 1, begin * sizeof(float), count * sizeof(float));
    } else {
        narrow(reduction.destination_dtype, destination + offset, accumulator, count);
        copy_to_others(reduction, 1, offset, count * sizeof(std::uint16_t));
    }
}

// Destinations are written only by the last step: until then they may still be sources that have to be read.
void reduce_plain_block(const Reduction& reduction, std::size_t begin, std::size_t count) {
    alignas(64) std::byte accumulator[kBlock * sizeof(double)];
    const DType dtype = reduction.source_dtype;
    const std::size_t offset = begin * size_of(dtype);
    const std::size_t last = reduction.sources.size() - 1;
    std::byte* const destination = reduction.destinations.front() + offset;
    const bool scaled = !reduction.scale.is_one();
    const std::byte* sum = reduction.sources.front() + offset;
    for (std::size_t k = 1; k <= last; ++k) {
        std::byte* const out = k == last && !scaled ? destination : accumulator;
        combine(dtype, reduction.op, out, sum, reduction.sources[k] + offset, count);
        sum = out;
    }
    if (scaled) {
        rescale(dtype, destination, sum, reduction.scale, count);
    } else if (last == 0 && dtype == DType::boolean) {
        combine(dtype, Op::max, destination, sum, sum, count);  // any byte but 0 becomes 1
    } else if (sum != destination) {
        std::memcpy(destination, sum, count * size_of(dtype));
    }
    copy_to_others(reduction, 1, offset, count * size_of(dtype));
}

void reduce_fused_block(const Reduction& reduction, std::size_t begin, std::size_t count) {
    const std::size_t offset = begin * size_of(reduction.source_dtype);
    const std::size_t outputs = std::min(kFusedOutputs, reduction.destinations.size());
    std::byte* outs[kFusedOutputs];
    const std::byte* ins[kFusedSources];
    for (std::size_t d = 0; d < outputs; ++d) outs[d] = reduction.destinations[d] + offset;
    for (std::size_t k = 0; k < reduction.sources.size(); ++k) ins[k] = reduction.sources[k] + offset;
    fused_sum(reduction.source_dtype, outs, outputs, ins, reduction.sources.size(), reduction.scale, count);
    copy_to_others(reduction, outputs, offset, count * size_of(reduction.source_dtype));
}

bool can_fuse(const Reduction& reduction) {
    const bool plain_copy = reduction.sources.size() == 1 && reduction.scale.is_one();  // memcpy keeps every NaN's bits
    const bool real = reduction.source_dtype == DType::float32 || reduction.source_dtype == DType::float64;
    return real && reduction.op == Op::sum && reduction.sources.size() <= kFusedSources && !plain_copy;
}

}  // namespace

std::size_t size_of(DType dtype) {
    switch (dtype) {
        case DType::boolean:
        case DType::uint8:
        case DType::int8:
            return 1;
        case DType::uint16:
        case DType::int16:
        case DType::float16:
        case DType::bfloat16:
            return 2;
        case DType::uint32:
        case DType::int32:
        case DType::float32:
            return 4;
        case DType::uint64:
        case DType::int64:
        case DType::float64:
            return 8;
    }
    return 0;
}

void reduce(const Reduction& reduction) {
    const DefaultFloats floats;
    const auto reduce_block = is_half(reduction.source_dtype) ? reduce_half_block
                              : can_fuse(reduction)           ? reduce_fused_block
                                                              : reduce_plain_block;
    // With all outputs fused there is nothing to keep in the cache from one loop to the next.
    const bool whole = reduce_block == reduce_fused_block && reduction.destinations.size() <= kFusedOutputs;
    const std::size_t block = whole ? std::max<std::size_t>(reduction.count, 1) : kBlock;
    for (std::size_t begin = 0; begin < reduction.count; begin += block) {
        reduce_block(reduction, begin, std::min(block, reduction.count - begin));
    }
}

HVDKIT_CLONES void double_of_float(std::byte* out, const float* in, std::size_t count) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) store<double>(out, i, static_cast<double>(in[i]));
}

HVDKIT_CLONES void float_of_double(std::byte* out, const std::byte* in, std::size_t count) {
    HVDKIT_ELEMENTWISE
    for (std::size_t i = 0; i < count; ++i) store<float>(out, i, static_cast<float>(load<double>(in, i)));
}

void convert(DType destination_dtype, std::byte* destination, DType source_dtype, const std::byte* source,
             std::size_t count) {
    const DefaultFloats floats;
    const std::size_t source_size = size_of(source_dtype);
    const std::size_t destination_size = size_of(destination_dtype);
    if (destination_dtype == source_dtype) {
        if (destination != source && count > 0) std::memcpy(destination, source, count * source_size);
        return;
    }
    if (destination_dtype == DType::float32 && source_dtype == DType::float64) {
        return float_of_double(destination, source, count);
    }
    if (destination_dtype == DType::float32 && is_aligned<float>(destination)) {
        return widen(source_dtype, reinterpret_cast<float*>(destination), source, count);
    }
    if (source_dtype == DType::float32 && is_half(destination_dtype) && is_aligned<float>(source)) {
        return narrow(destination_dtype, destination, reinterpret_cast<const float*>(source), count);
    }
    alignas(64) float block[kBlock];
    for (std::size_t begin = 0; begin < count; begin += kBlock) {
        const std::size_t step = std::min(kBlock, count - begin);
        std::byte* const out = destination + begin * destination_size;
        widen(source_dtype, block, source + begin * source_size, step);
        if (destination_dtype == DType::float64) {
            double_of_float(out, block, step);
        } else if (destination_dtype == DType::float32) {
            std::memcpy(out, block, step * sizeof(float));
        } else {
            narrow(destination_dtype, out, block, step);
        }
    }
}

}  // namespace hvdkit
