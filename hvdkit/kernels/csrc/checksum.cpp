// checksum: whether bytes are the same, at the speed of memory.
#include <algorithm>

#include "codecs.h"

namespace hvdkit {
namespace {

using std::uint64_t;

constexpr std::size_t kLanes = 8;
constexpr std::size_t kStep = kLanes * sizeof(std::uint32_t);

// Two lanes: a vector of 16 bytes, which every processor of 64 bits has.
typedef uint64_t Pair __attribute__((vector_size(16)));

// Words of 32 bits in lanes of 64: how often a word counts in ``weighted`` then differs from one word of a lane to the
// next by less than 2**32, and so no difference of two words can be multiplied to 2**64, which is nothing.
class Lanes {
 public:
    HVDKIT_INLINE void add(const std::byte* step) {
        const Pair low_half = {0xFFFFFFFFu, 0xFFFFFFFFu};
        for (std::size_t k = 0; k < 2; ++k) {
            Pair words;
            std::memcpy(&words, step + k * sizeof(words), sizeof(words));
            sums_[k] += words & low_half;
            sums_[k + 2] += words >> 32;
        }
        for (std::size_t k = 0; k < 4; ++k) weighted_[k] += sums_[k];
    }

    uint64_t folded(uint64_t hash) const {
        for (std::size_t k = 0; k < 4; ++k) {
            for (std::size_t half = 0; half < 2; ++half) {
                hash = (hash ^ sums_[k][half]) * 0x9E3779B97F4A7C15u;
                hash ^= hash >> 32;
                hash = (hash ^ weighted_[k][half]) * 0xC2B2AE3D27D4EB4Fu;
                hash ^= hash >> 29;
            }
        }
        return hash;
    }

 private:
    Pair sums_[4] = {};
    Pair weighted_[4] = {};
};

}  // namespace

uint64_t checksum(const std::byte* data, std::size_t nbytes) {
    Lanes lanes;
    std::size_t done = 0;
    for (; done + kStep <= nbytes; done += kStep) lanes.add(data + done);
    if (done < nbytes) {
        std::byte last[kStep] = {};
        std::memcpy(last, data + done, nbytes - done);
        lanes.add(last);
    }
    return lanes.folded(nbytes);
}

}  // namespace hvdkit
