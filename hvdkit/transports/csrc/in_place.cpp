// One pass over all ranks' gradients: every element is read once from each rank and written once to each.
#include "in_place.h"

#include <algorithm>
#include <array>

#include "shared.h"

namespace hvdkit {
namespace {

constexpr int kWhereBits = 2;

// What a rank that has no gradient is read from: so many bytes of it at a time.
constexpr std::size_t kZeroBytes = 32 * 1024;
alignas(kLine) constexpr std::array<std::byte, kZeroBytes> kZeros{};

}  // namespace

InPlace::InPlace(std::atomic<std::uint64_t>* table, std::size_t me, std::vector<InPlaceSlot> slots,
                 std::vector<Mapped> regions, std::vector<Mapped> arenas)
    : table_(table), me_(me), slots_(std::move(slots)), regions_(std::move(regions)), arenas_(std::move(arenas)) {}

std::size_t InPlace::table_bytes(std::size_t ranks, std::size_t slots) {
    // Each rank's part on cache lines of its own.
    return ranks * ((slots * sizeof(std::uint64_t) + kLine - 1) / kLine * kLine);
}

void InPlace::offer(std::size_t slot, Where where, std::uint64_t offset) {
    const std::size_t stride = table_bytes(1, slots_.size()) / sizeof(std::uint64_t);
    table_[me_ * stride + slot].store(offset << kWhereBits | static_cast<std::uint64_t>(where),
                                      std::memory_order_relaxed);
}

InPlace::Place InPlace::place(std::size_t rank, std::size_t slot) const {
    const std::size_t stride = table_bytes(1, slots_.size()) / sizeof(std::uint64_t);
    const std::uint64_t told = table_[rank * stride + slot].load(std::memory_order_relaxed);
    const auto where = static_cast<Where>(told & ((1U << kWhereBits) - 1));
    const InPlaceSlot& one = slots_[slot];
    const std::size_t nbytes = one.elements * size_of(one.dtype);
    if (where == Where::zeros) return {where, nullptr};
    if (where == Where::region && one.region_offset) return {where, regions_[rank].base + *one.region_offset};
    const std::uint64_t offset = told >> kWhereBits;
    const Mapped& arena = arenas_[rank];
    const bool inside = offset <= arena.nbytes && nbytes <= arena.nbytes - offset;
    if (where == Where::arena && arena.base != nullptr && inside) return {where, arena.base + offset};
    return {Where::elsewhere, nullptr};
}

bool InPlace::is_staged(std::size_t slot, const std::vector<bool>& absent) const {
    // All ranks must come to the same answer, so it follows from what was written and from what all of them map.
    for (std::size_t rank = 0; rank < ranks(); ++rank) {
        if (!absent[rank] && place(rank, slot).where == Where::elsewhere) return true;
    }
    return false;
}

void InPlace::run(Direction direction, const std::vector<std::size_t>& members, const std::vector<std::size_t>& offsets,
                  std::size_t begin, std::size_t end, Op op, Scale scale, const std::vector<bool>& absent,
                  std::byte* flat) const {
    for (std::size_t i = 0; i < members.size(); ++i) {
        const InPlaceSlot& slot = slots_[members[i]];
        const std::size_t first = std::max(begin, offsets[i]);
        const std::size_t last = std::min(end, offsets[i] + slot.elements);
        if (first >= last || is_staged(members[i], absent)) continue;
        std::byte* const part = flat == nullptr ? nullptr : flat + (first - begin) * size_of(slot.dtype);
        run_slot(direction, members[i], first - offsets[i], last - first, op, scale, absent, part);
    }
}

void InPlace::run_slot(Direction direction, std::size_t slot, std::size_t first, std::size_t count, Op op, Scale scale,
                       const std::vector<bool>& absent, std::byte* flat) const {
    const DType dtype = slots_[slot].dtype;
    const std::size_t item = size_of(dtype);
    std::vector<std::byte*> data;  // by rank; null for zeros
    bool all = true;
    for (std::size_t rank = 0; rank < ranks(); ++rank) {
        std::byte* const base = absent[rank] ? nullptr : place(rank, slot).data;
        data.push_back(base == nullptr ? nullptr : base + first * item);
        all = all && base != nullptr;
    }
    const std::size_t step = all || direction == Direction::spread ? count : kZeroBytes / item;
    Reduction reduction{dtype, dtype, op, scale, 0, {}, {}};
    for (std::size_t done = 0; done < count; done += step) {
        reduction.count = std::min(step, count - done);
        reduction.destinations.clear();
        reduction.sources.clear();
        if (direction == Direction::spread) {
            reduction.sources.push_back(flat + done * item);
        } else {
            for (std::byte* const one : data) {
                reduction.sources.push_back(one == nullptr ? kZeros.data() : one + done * item);
            }
        }
        if (direction == Direction::gather) {
            reduction.destinations.push_back(flat + done * item);
        } else {
            for (std::byte* const one : data) {
                if (one != nullptr) reduction.destinations.push_back(one + done * item);
            }
        }
        if (!reduction.destinations.empty()) reduce(reduction);
    }
}

}  // namespace hvdkit
