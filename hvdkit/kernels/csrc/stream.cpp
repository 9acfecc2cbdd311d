// Non-temporal stores where the processor has them, an ordinary copy elsewhere.
#include "stream.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace hvdkit {

void stream_copy(std::byte* destination, const std::byte* source, std::size_t nbytes) {
    if (nbytes == 0) return;
#if defined(__x86_64__)
    constexpr std::size_t line = 64;
    const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(destination) % line;
    const std::size_t head = std::min(nbytes, misaligned == 0 ? 0 : line - misaligned);
    std::memcpy(destination, source, head);
    std::size_t done = head;
    for (; done + line <= nbytes; done += line) {
        const auto* const in = reinterpret_cast<const __m128i*>(source + done);
        auto* const out = reinterpret_cast<__m128i*>(destination + done);
        const __m128i first = _mm_loadu_si128(in);
        const __m128i second = _mm_loadu_si128(in + 1);
        const __m128i third = _mm_loadu_si128(in + 2);
        const __m128i fourth = _mm_loadu_si128(in + 3);
        _mm_stream_si128(out, first);
        _mm_stream_si128(out + 1, second);
        _mm_stream_si128(out + 2, third);
        _mm_stream_si128(out + 3, fourth);
    }
    std::memcpy(destination + done, source + done, nbytes - done);
    _mm_sfence();
#else
    std::memcpy(destination, source, nbytes);
#endif
}

}  // namespace hvdkit
