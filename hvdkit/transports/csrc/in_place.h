// Gradients of a node's ranks, reduced where they lie: each rank's own blocks of memory, which all of them map.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../../kernels/csrc/kernels.h"

namespace hvdkit {

// One tensor of a plan. A small one has a place in each rank's region, from ``region_offset`` on.
struct InPlaceSlot {
    DType dtype;
    std::size_t elements;
    std::optional<std::size_t> region_offset;
};

// Memory of one rank that this process maps; null where it cannot.
struct Mapped {
    std::byte* base = nullptr;
    std::size_t nbytes = 0;
};

// Where a rank has its gradient for this step.
enum class Where : std::uint64_t {
    elsewhere = 0,  // in memory of its own: chunks of it go through memory that ranks share
    arena = 1,      // at an offset of its arena
    region = 2,     // in its region
    zeros = 3,      // nowhere: it contributes zeros and wants no result
};

class InPlace {
 public:
    // ``table``: a number for each rank and slot, in shared memory. Each rank writes its own before it says that it is
    // ready, and others read it after that.
    InPlace(std::atomic<std::uint64_t>* table, std::size_t me, std::vector<InPlaceSlot> slots,
            std::vector<Mapped> regions, std::vector<Mapped> arenas);

    static std::size_t table_bytes(std::size_t ranks, std::size_t slots);
    std::size_t ranks() const { return regions_.size(); }
    const std::vector<InPlaceSlot>& slots() const { return slots_; }

    // This rank's gradient of a slot lies there; ``offset`` (bytes) is that in its arena.
    void offer(std::size_t slot, Where where, std::uint64_t offset);

    // Whether some rank has its gradient of a slot where others do not reach it. ``absent``: ranks that contribute
    // zeros whatever they have written. What a rank has written is looked at before it is believed.
    bool is_staged(std::size_t slot, const std::vector<bool>& absent) const;

    enum class Direction {
        all = 0,     // every rank's gradient is replaced by the reduction
        gather = 1,  // the reduction goes into ``flat``
        spread = 2,  // every rank's gradient is replaced by ``flat``
    };

    // Elements ``begin`` to ``end`` of a bucket in which ``members`` begin at ``offsets``, without those of slots that
    // are staged. ``flat`` has room for these elements.
    void run(Direction direction, const std::vector<std::size_t>& members, const std::vector<std::size_t>& offsets,
             std::size_t begin, std::size_t end, Op op, Scale scale, const std::vector<bool>& absent,
             std::byte* flat) const;

 private:
    struct Place {
        Where where;
        std::byte* data;
    };
    Place place(std::size_t rank, std::size_t slot) const;
    void run_slot(Direction direction, std::size_t slot, std::size_t first, std::size_t count, Op op, Scale scale,
                  const std::vector<bool>& absent, std::byte* flat) const;

    std::atomic<std::uint64_t>* table_;
    std::size_t me_;
    std::vector<InPlaceSlot> slots_;
    std::vector<Mapped> regions_;
    std::vector<Mapped> arenas_;
};

}  // namespace hvdkit
