// Stage, reduce, gather: a pipeline over chunks in which each rank goes ahead as far as the others' counters allow.
#include "staged.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../../kernels/csrc/stream.h"

namespace hvdkit {
namespace {

constexpr std::size_t kCounters = 3;
enum Which : std::size_t { staged_chunks = 0, reduced_chunks = 1, finished_chunks = 2 };

// Enough lines that the clock's own time is small beside theirs. Each tells which is next, so that the processor cannot
// read several at once, and they follow each other in an order that it does not foresee.
constexpr std::size_t kTrail = 16;
constexpr std::size_t kStride = 7;  // has no divisor in common with kTrail: the trail passes every line

void copy(std::byte* to, const std::byte* from, std::size_t nbytes, bool past_cache) {
    if (nbytes == 0) return;
    if (past_cache) {
        stream_copy(to, from, nbytes);
    } else {
        std::memcpy(to, from, nbytes);
    }
}

}  // namespace

std::size_t Area::bytes_needed(std::size_t ranks, std::size_t depth, std::size_t slot_bytes) {
    return ranks * ((kCounters + kTrail) * sizeof(Counter) + depth * slot_bytes);
}

Area::Area(std::byte* base, std::size_t ranks, std::size_t me, std::size_t depth, std::size_t slot_bytes,
           std::vector<Bell*> bells)
    : base_(base),
      ranks_(ranks),
      me_(me),
      depth_(depth),
      slot_bytes_(slot_bytes),
      bells_(std::move(bells)),
      line_seconds_(ranks) {}

std::byte* Area::slot(std::size_t rank, std::uint64_t chunk) const {
    std::byte* const slots = base_ + ranks_ * (kCounters + kTrail) * sizeof(Counter);
    return slots + (rank * depth_ + chunk % depth_) * slot_bytes_;
}

Counter& Area::counter(std::size_t rank, std::size_t which) const {
    return reinterpret_cast<Counter*>(base_)[rank * kCounters + which];
}

Counter& Area::trail(std::size_t rank, std::uint64_t line) const {
    return reinterpret_cast<Counter*>(base_)[ranks_ * kCounters + rank * kTrail + line % kTrail];
}

void Area::ring_others() const {
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
        if (rank != me_) bells_[rank]->ring();
    }
}

void Area::leave_trail() {
    for (std::size_t line = 0; line < kTrail; ++line) trail(me_, line).set(line + kStride);
}

void Area::follow_trail() {
    if (ranks_ < 2) return;
    const std::size_t rank = (me_ + 1 + followed_++ % (ranks_ - 1)) % ranks_;
    const double begin = monotonic_seconds();
    std::uint64_t line = 0;
    for (std::size_t step = 0; step < kTrail; ++step) line = trail(rank, line).get();
    line_seconds_[rank] = {line_seconds_[rank].second, (monotonic_seconds() - begin) / kTrail};
}

std::vector<double> Area::line_seconds() const {
    std::vector<double> seconds;
    for (const auto& [before, last] : line_seconds_) seconds.push_back(std::min(before, last));
    return seconds;
}

std::pair<std::size_t, std::size_t> Area::own_slots() const {
    return {static_cast<std::size_t>(slot(me_, 0) - base_), depth_ * slot_bytes_};
}

bool Area::left_by_others() const {
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
        if (rank != me_ && counter(rank, finished_chunks).get() < chunks) return false;
    }
    return true;
}

Staged::Staged(Area& area, Mode mode, DType dtype, Op op, Scale scale, std::byte* data, std::size_t count,
               std::vector<std::pair<std::size_t, std::size_t>> shares, const std::byte* source,
               std::vector<bool> past_cache, bool measure, std::byte* own)
    : area_(area),
      mode_(mode),
      dtype_(dtype),
      op_(op),
      scale_(scale),
      data_(data),
      source_(source != nullptr ? source : data),
      own_(own),
      count_(count),
      streams_((own != nullptr || source_ != data) && count * size_of(dtype) >= kStreamBytes),
      shares_(std::move(shares)),
      past_cache_(std::move(past_cache)),
      measure_(measure),
      item_(size_of(dtype)),
      piece_bytes_(area.slot_bytes() / area.ranks() / kLine * kLine),
      base_(area.chunks) {
    if (mode == Mode::whole) {
        if (count * item_ > area.slot_bytes()) throw std::invalid_argument("the tensor does not fit into a slot");
        chunks_ = 1;
    } else {
        std::size_t longest = 0;
        for (const auto& [begin, end] : shares_) longest = std::max(longest, end - begin);
        chunks_ = (longest * item_ + piece_bytes_ - 1) / piece_bytes_;
    }
    area_.chunks += chunks_;
    if (own_ == nullptr && !shares_.empty()) own_ = data + shares_[area.me()].first * item_;
    past_cache_.resize(area.ranks());
    all_past_cache_ = 2 * std::count(past_cache_.begin(), past_cache_.end(), true) > std::ptrdiff_t(area.ranks() - 1);
    if (all_past_cache_ && mode == Mode::allreduce && streams_) scratch_.resize(piece_bytes_);
    // Written before the first chunk is told of, so that who sees that chunk sees these lines.
    if (measure_) area_.leave_trail();
}

bool Staged::advance(double spin_seconds) {
    double idle_since = 0.0;
    while (gathered_ < chunks_) {
        bool moved = try_gather();
        moved |= try_reduce();
        moved |= try_stage();
        if (moved) {
            idle_since = 0.0;
            continue;
        }
        const double now = monotonic_seconds();
        if (idle_since == 0.0) idle_since = now;
        if (now - idle_since >= spin_seconds) return false;
        for (int i = 0; i < 16; ++i) relax();
    }
    return true;
}

bool Staged::try_stage() {
    if (staged_ == chunks_) return false;
    const std::uint64_t number = base_ + staged_ + 1;
    // The slot holds a chunk of ``depth`` ago, which all others must be through with.
    if (number > area_.depth() && !others_reached(finished_chunks, number - area_.depth())) return false;
    stage_into_slot(staged_);
    count(staged_chunks, ++staged_);
    if (mode_ == Mode::allgather) count(reduced_chunks, ++reduced_);
    area_.ring_others();
    return true;
}

bool Staged::try_reduce() {
    if (reduced_ == staged_ || !others_reached(staged_chunks, base_ + reduced_ + 1)) return false;
    measure_once();
    if (mode_ == Mode::whole) {
        reduce_whole(reduced_);
    } else if (mode_ == Mode::exchange) {
        take_shares(reduced_);
    } else {
        reduce_share(reduced_);
    }
    count(reduced_chunks, ++reduced_);
    if (mode_ != Mode::allreduce) count(finished_chunks, ++gathered_);
    area_.ring_others();
    return true;
}

bool Staged::try_gather() {
    if (gathered_ == reduced_ || !others_reached(reduced_chunks, base_ + gathered_ + 1)) return false;
    measure_once();
    gather_shares(gathered_);
    count(finished_chunks, ++gathered_);
    area_.ring_others();
    return true;
}

void Staged::stage_into_slot(std::uint64_t chunk) {
    std::byte* const slot = area_.slot(area_.me(), base_ + chunk);
    if (mode_ == Mode::whole) {
        if (count_ > 0) std::memcpy(slot, source_, count_ * item_);
        return;
    }
    for (std::size_t rank = 0; rank < area_.ranks(); ++rank) {
        const bool mine = rank == area_.me();
        if (mine != (mode_ == Mode::allgather)) continue;
        const auto [begin, length] = piece(rank, chunk);
        copy(slot + rank * piece_bytes_, source_ + begin * item_, length * item_,
             mine ? all_past_cache_ : past_cache_[rank]);
    }
}

void Staged::reduce_share(std::uint64_t chunk) {
    const std::size_t me = area_.me();
    const auto [begin, length] = piece(me, chunk);
    if (length == 0) return;
    std::byte* const own = own_ + (begin - shares_[me].first) * item_;
    std::byte* const shared = area_.slot(me, base_ + chunk) + me * piece_bytes_;
    Reduction reduction{dtype_, dtype_, op_, scale_, length, {}, {}};
    // Where the result is put first, and where it is copied to from there: past the cache only copies go.
    const bool share = mode_ == Mode::allreduce;
    if (share && !all_past_cache_) reduction.destinations.push_back(shared);
    if (!share || !streams_) reduction.destinations.push_back(own);
    if (reduction.destinations.empty()) reduction.destinations.push_back(scratch_.data());
    const std::byte* const result = reduction.destinations.front();
    for (std::size_t rank = 0; rank < area_.ranks(); ++rank) {
        reduction.sources.push_back(rank == me ? source_ + begin * item_
                                               : area_.slot(rank, base_ + chunk) + me * piece_bytes_);
    }
    reduce(reduction);
    if (share && all_past_cache_) stream_copy(shared, result, length * item_);
    if (share && streams_) stream_copy(own, result, length * item_);
}

void Staged::reduce_whole(std::uint64_t chunk) {
    if (count_ == 0) return;
    Reduction reduction{dtype_, dtype_, op_, scale_, count_, {data_}, {}};
    for (std::size_t rank = 0; rank < area_.ranks(); ++rank) {
        reduction.sources.push_back(rank == area_.me() ? source_ : area_.slot(rank, base_ + chunk));
    }
    reduce(reduction);
}

void Staged::take_shares(std::uint64_t chunk) {
    const std::size_t me = area_.me();
    const auto [first, length] = piece(me, chunk);
    const std::size_t offset = first - shares_[me].first;
    for (std::size_t rank = 0; rank < area_.ranks(); ++rank) {
        const std::byte* const from =
            rank == me ? source_ + first * item_ : area_.slot(rank, base_ + chunk) + me * piece_bytes_;
        copy(data_ + (shares_[rank].first + offset) * item_, from, length * item_, streams_);
    }
}

void Staged::gather_shares(std::uint64_t chunk) {
    for (std::size_t rank = 0; rank < area_.ranks(); ++rank) {
        if (rank == area_.me()) continue;
        const auto [begin, length] = piece(rank, chunk);
        const std::byte* const reduced = area_.slot(rank, base_ + chunk) + rank * piece_bytes_;
        copy(data_ + begin * item_, reduced, length * item_, streams_);
    }
}

void Staged::measure_once() {
    if (measure_) area_.follow_trail();
    measure_ = false;
}

bool Staged::others_reached(std::size_t which, std::uint64_t number) const {
    for (std::size_t rank = 0; rank < area_.ranks(); ++rank) {
        if (rank != area_.me() && area_.counter(rank, which).get() < number) return false;
    }
    return true;
}

std::pair<std::size_t, std::size_t> Staged::piece(std::size_t rank, std::uint64_t chunk) const {
    const auto [begin, end] = shares_[rank];
    const std::size_t elements = piece_bytes_ / item_;
    const std::size_t first = std::min(end, begin + chunk * elements);
    return {first, std::min(elements, end - first)};
}

void Staged::count(std::size_t which, std::uint64_t done) { area_.counter(area_.me(), which).set(base_ + done); }

std::vector<std::size_t> Staged::awaited() const {
    // Steps that lack nothing but the others' part, so that whoever is behind can go on by itself: a rank that has not
    // reduced because it, too, lacks a third one's part is not named.
    const std::uint64_t number = base_ + staged_ + 1;
    const bool to_stage = staged_ < chunks_ && number > area_.depth() && number <= base_ + gathered_ + area_.depth();
    const bool to_reduce = reduced_ < staged_;
    const bool to_gather = gathered_ < reduced_;
    std::vector<std::size_t> behind;
    for (std::size_t rank = 0; rank < area_.ranks(); ++rank) {
        if (rank == area_.me()) continue;
        const bool slot_taken = to_stage && area_.counter(rank, finished_chunks).get() < number - area_.depth();
        const bool not_staged = to_reduce && area_.counter(rank, staged_chunks).get() < base_ + reduced_ + 1;
        const bool not_reduced = to_gather && area_.counter(rank, reduced_chunks).get() < base_ + gathered_ + 1;
        if (slot_taken || not_staged || not_reduced) behind.push_back(rank);
    }
    return behind;
}

}  // namespace hvdkit
