// Collectives of a node's ranks on tensors that live anywhere: through chunks in shared memory that
// stay in the cache, or go past it to readers that share none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "../../kernels/csrc/kernels.h"
#include "shared.h"

namespace hvdkit {

// Memory that the ranks of one group of a node share. Each rank has ``depth`` slots of ``slot_bytes`` in which it puts
// chunks for the others to read, three counters of the chunks it has put there, reduced, and is through with, and a
// trail: lines that it writes so that others can time what reading them takes.
class Area {
 public:
    static std::size_t bytes_needed(std::size_t ranks, std::size_t depth, std::size_t slot_bytes);

    // ``base``: that many bytes of shared memory, zeros at first. ``bells``: of the group's ranks.
    Area(std::byte* base, std::size_t ranks, std::size_t me, std::size_t depth, std::size_t slot_bytes,
         std::vector<Bell*> bells);

    std::size_t ranks() const { return ranks_; }
    std::size_t me() const { return me_; }
    std::size_t depth() const { return depth_; }
    std::size_t slot_bytes() const { return slot_bytes_; }
    std::byte* slot(std::size_t rank, std::uint64_t chunk) const;
    // Each rank's, by what it counts: 0 chunks put into a slot, 1 reduced, 2 done with.
    Counter& counter(std::size_t rank, std::size_t which) const;
    // Each rank's, by a number that leads to one of its lines whatever it is: it comes from another process.
    Counter& trail(std::size_t rank, std::uint64_t line) const;
    void ring_others() const;

    // Writes this rank's trail: its lines are in this rank's cache alone now.
    void leave_trail();
    // Reads the trail of one other rank, the next one each time, and keeps what it took.
    void follow_trail();
    // For each rank, the seconds in which this one read a line that it had just written: the lesser of the last two
    // times, since this rank may have been interrupted in one of them. 0 until there are two.
    std::vector<double> line_seconds() const;

    // Where this rank's slots begin, from ``base`` on, and how many bytes they are.
    std::pair<std::size_t, std::size_t> own_slots() const;
    // Whether the others are through with all that this rank has been through: nobody will look into its slots.
    bool left_by_others() const;

    std::uint64_t chunks = 0;  // of all operations so far: the same number on all ranks between two operations

 private:
    std::byte* base_;
    std::size_t ranks_;
    std::size_t me_;
    std::size_t depth_;
    std::size_t slot_bytes_;
    std::vector<Bell*> bells_;
    std::size_t followed_ = 0;
    std::vector<std::pair<double, double>> line_seconds_;  // the last two times of each rank
};

enum class Mode {
    allreduce = 0,       // every rank's share is reduced by that rank and handed to all
    reduce_scatter = 1,  // only the first half of that
    allgather = 2,       // only the second half
    whole = 3,           // everyone reduces everything: one exchange instead of two, for what fits into a slot
    exchange = 4,        // every rank's share of each rank's source goes to that rank, into the share of its sender
};

// One operation in place on this rank's ``data``, or out of ``source`` into it. All ranks of the area run the same
// operations in the same order, one at a time. ``shares``: for each rank the elements (begin, end) that are its own;
// other elements than these are left alone. Sums run in rank order. ``past_cache``: for each rank, whether what it
// reads is written past the cache, into memory; empty if nothing is. ``measure``: read a trail on the way, on all
// ranks. ``own``: where this rank's share goes in a reduce_scatter, if not to its place in ``data``.
class Staged {
 public:
    Staged(Area& area, Mode mode, DType dtype, Op op, Scale scale, std::byte* data, std::size_t count,
           std::vector<std::pair<std::size_t, std::size_t>> shares, const std::byte* source = nullptr,
           std::vector<bool> past_cache = {}, bool measure = false, std::byte* own = nullptr);

    // Puts the first chunk into this rank's slot, if that is free, and reads nothing of other ranks.
    void stage() {
        if (staged_ == 0) try_stage();
    }

    // Goes on as far as the others are; gives up after ``spin_seconds`` without progress. True when all is done.
    bool advance(double spin_seconds);

    // The ranks that this one waits for since ``advance`` gave up: each of them could go on.
    std::vector<std::size_t> awaited() const;

 private:
    bool try_stage();
    bool try_reduce();
    bool try_gather();
    void stage_into_slot(std::uint64_t chunk);
    void reduce_share(std::uint64_t chunk);
    void reduce_whole(std::uint64_t chunk);
    void take_shares(std::uint64_t chunk);
    void gather_shares(std::uint64_t chunk);
    void measure_once();
    bool others_reached(std::size_t which, std::uint64_t number) const;
    // The part of a rank's share that travels in a chunk: its first element and how many.
    std::pair<std::size_t, std::size_t> piece(std::size_t rank, std::uint64_t chunk) const;
    void count(std::size_t which, std::uint64_t done);

    Area& area_;
    Mode mode_;
    DType dtype_;
    Op op_;
    Scale scale_;
    std::byte* data_;
    const std::byte* source_;
    std::byte* own_;  // this rank's share
    std::size_t count_;
    bool streams_;  // the result goes past the cache: in place its lines were just read, so there it would cost
    std::vector<std::pair<std::size_t, std::size_t>> shares_;
    std::vector<bool> past_cache_;
    bool all_past_cache_;  // what all others read: so if most of them read from memory
    bool measure_;
    std::vector<std::byte> scratch_;
    std::size_t item_;
    std::size_t piece_bytes_;
    std::uint64_t base_;    // the area's chunks before this operation
    std::uint64_t chunks_;  // of this operation
    std::uint64_t staged_ = 0;
    std::uint64_t reduced_ = 0;
    std::uint64_t gathered_ = 0;
};

}  // namespace hvdkit
