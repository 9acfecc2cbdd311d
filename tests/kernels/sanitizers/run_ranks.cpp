// Bells, posts and staged collectives between ranks that are threads, in whatever order they happen to run.
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../../../hvdkit/transports/csrc/heartbeat.h"
#include "../../../hvdkit/transports/csrc/message_rings.h"
#include "../../../hvdkit/transports/csrc/shared.h"
#include "../../../hvdkit/transports/csrc/staged.h"
#include "check.h"

namespace {

using hvdkit::Bell;
using hvdkit::Counter;
using hvdkit::DType;
using hvdkit::kLine;
using hvdkit::Op;

constexpr double kSleepSeconds = 20.0;  // longer than anything takes, unless a ring was lost

// Zeros on a cache line that end where memory ends, and a bell for each rank: as ranks find them in a new window.
class Node {
 public:
    Node(std::size_t ranks, std::size_t nbytes)
        : memory_(static_cast<std::byte*>(std::aligned_alloc(kLine, std::max(kLine, nbytes / kLine * kLine))),
                  &std::free),
          bells_(ranks) {
        CHECK(nbytes % kLine == 0);
        std::memset(memory_.get(), 0, nbytes);
    }
    std::byte* memory() { return memory_.get(); }
    Bell& bell(std::size_t rank) { return bells_[rank]; }
    std::vector<Bell*> bells() {
        std::vector<Bell*> all;
        for (Bell& bell : bells_) all.push_back(&bell);
        return all;
    }

 private:
    std::unique_ptr<std::byte, void (*)(void*)> memory_;
    std::vector<Bell> bells_;
};

void on_every_rank(std::size_t ranks, const std::function<void(std::size_t)>& program) {
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < ranks; ++rank) threads.emplace_back(program, rank);
    for (std::thread& thread : threads) thread.join();
}

void sleep_at(Bell& bell, std::uint32_t seen, double spin_seconds) {
    const double began = hvdkit::monotonic_seconds();
    bell.sleep(seen, kSleepSeconds, spin_seconds);
    CHECK(hvdkit::monotonic_seconds() - began < kSleepSeconds / 2);
}

// -- MessageRings
// -------------------------------------------------------------------------------------------------------------

constexpr std::size_t kDataRing = 512;
constexpr std::size_t kControlRing = 128;
constexpr std::size_t kLetterSizes[] = {0, 1, 15, 16, 17, 100, 495, 496, 497, 512, 1536, 2000};

std::size_t rings_bytes(std::size_t ranks) {
    return hvdkit::MessageRings::bytes_needed(ranks, kDataRing, kControlRing);
}

struct Letter {
    std::size_t peer;
    std::uint32_t tag;
    bool receives;
    Buffer buffer;
    std::shared_ptr<hvdkit::Message> message;
};

// What one rank sends another under a tag: both know it, so that nobody has to tell.
std::byte content(std::size_t from, std::size_t to, std::uint32_t tag, std::size_t i) {
    return static_cast<std::byte>(from + 3 * to + tag + i * 7);
}

std::string control_payload(std::size_t from, std::size_t to, std::size_t number) {
    return std::string(number * 11 % 300, static_cast<char>('a' + (from + 3 * to + number) % 26));
}

class Correspondent {
 public:
    Correspondent(Node& node, std::uint64_t seed, std::size_t ranks, std::size_t me, std::size_t messages)
        : node_(node),
          overs_(reinterpret_cast<Counter*>(node.memory() + rings_bytes(ranks))),
          random_(seed + me),
          ranks_(ranks),
          me_(me),
          messages_(messages),
          post_(node.memory(), ranks, me, kDataRing, kControlRing, node.bells()),
          heard_(ranks, 0) {
        for (std::size_t peer = 0; peer < ranks; ++peer) {
            for (std::uint32_t tag = 0; peer != me && tag < messages; ++tag) {
                const std::size_t nbytes = kLetterSizes[(tag * 5 + seed) % std::size(kLetterSizes)];
                for (const bool receives : {false, true}) {
                    letters_.push_back({peer, tag, receives, Buffer(nbytes, random_.number(0, 3)), nullptr});
                }
            }
        }
        for (std::size_t i = letters_.size(); i > 1; --i)
            std::swap(letters_[i - 1], letters_[random_.number(0, i - 1)]);
    }

    void run() {
        std::thread talker([this] { talk(); });  // as a training thread that sends while the engine drives
        std::size_t posted = 0;
        bool over = false;
        while (!everybody_is_over()) {
            Bell& bell = node_.bell(me_);
            const std::uint32_t seen = bell.count();
            const bool posts = posted < letters_.size();
            for (std::size_t n = random_.number(0, 3); n > 0 && posted < letters_.size(); --n) post(letters_[posted++]);
            const bool moved = post_.progress();
            listen();
            if (!over && !posts && is_over()) {  // others may still need this rank to send what did not fit into a ring
                over = true;
                overs_[me_].set(1);
                for (std::size_t peer = 0; peer < ranks_; ++peer) node_.bell(peer).ring();
            }
            if (!moved && !posts && !everybody_is_over()) sleep_at(bell, seen, random_.number(0, 1) * 2e-6);
        }
        talker.join();
        for (const Letter& letter : letters_) {
            for (std::size_t i = 0; letter.receives && i < letter.buffer.nbytes(); ++i) {
                CHECK(letter.buffer.data()[i] == content(letter.peer, me_, letter.tag, i));
            }
        }
    }

 private:
    void post(Letter& letter) {
        std::byte* const data = letter.buffer.data();
        const std::size_t nbytes = letter.buffer.nbytes();
        if (letter.receives) {
            letter.message = post_.receive(letter.peer, letter.tag, data, nbytes, nullptr);
        } else {
            for (std::size_t i = 0; i < nbytes; ++i) data[i] = content(me_, letter.peer, letter.tag, i);
            letter.message = post_.send(letter.peer, letter.tag, data, nbytes, nullptr);
        }
    }

    void talk() {
        for (std::size_t number = 0; number < messages_; ++number) {
            for (std::size_t peer = 0; peer < ranks_; ++peer) {
                if (peer != me_) post_.send_control(peer, control_payload(me_, peer, number));
            }
            listen();
        }
        node_.bell(me_).ring();
    }

    void listen() {
        const std::lock_guard<std::mutex> guard(listening_);
        post_.take_finished();
        for (const auto& [peer, payload] : post_.take_control()) {
            CHECK(payload == control_payload(peer, me_, heard_[peer]));
            ++heard_[peer];
        }
    }

    bool is_over() {
        const std::lock_guard<std::mutex> guard(listening_);
        for (std::size_t peer = 0; peer < ranks_; ++peer) {
            if (peer != me_ && heard_[peer] < messages_) return false;
        }
        for (const Letter& letter : letters_) {
            if (!letter.message->done.load()) return false;
        }
        return true;
    }

    bool everybody_is_over() const {
        for (std::size_t rank = 0; rank < ranks_; ++rank) {
            if (overs_[rank].get() == 0) return false;
        }
        return true;
    }

    Node& node_;
    Counter* overs_;  // behind the rings
    Random random_;
    std::size_t ranks_;
    std::size_t me_;
    std::size_t messages_;
    hvdkit::MessageRings post_;
    std::mutex listening_;  // both threads do
    std::vector<std::size_t> heard_;
    std::vector<Letter> letters_;
};

// -- Staged -----------------------------------------------------------------------------------------------------------

struct Plan {
    hvdkit::Mode mode;
    DType dtype;
    Op op;
    std::size_t count;
    std::vector<std::pair<std::size_t, std::size_t>> shares;
};

constexpr std::size_t kSlotLines = 3;  // for each rank, in one slot
constexpr DType kStagedDTypes[] = {DType::float16, DType::bfloat16, DType::float32, DType::float64};
constexpr Op kOps[] = {Op::sum, Op::min, Op::max, Op::product};

Plan plan_of(std::uint64_t seed, std::size_t ranks, std::size_t number) {
    Random random(seed * 100000 + number);
    Plan plan{static_cast<hvdkit::Mode>(random.number(0, 3)), random.one_of(kStagedDTypes), random.one_of(kOps), 0, {}};
    const std::size_t item = hvdkit::size_of(plan.dtype);
    const std::size_t slot = ranks * kSlotLines * kLine;
    plan.count = random.number(0, plan.mode == hvdkit::Mode::whole ? slot / item : 6 * slot / item);
    std::vector<std::size_t> cuts;
    for (std::size_t i = 0; i < 2 * ranks; ++i) cuts.push_back(random.number(0, plan.count));
    std::sort(cuts.begin(), cuts.end());
    for (std::size_t rank = 0; rank < ranks; ++rank) plan.shares.emplace_back(cuts[2 * rank], cuts[2 * rank + 1]);
    return plan;
}

// Small whole numbers, the same wherever they are asked for.
Buffer values_of(const Plan& plan, std::size_t rank, std::size_t number, std::size_t offset) {
    Buffer buffer(plan.count * hvdkit::size_of(plan.dtype), offset);
    std::vector<float> numbers(plan.count);
    for (std::size_t i = 0; i < plan.count; ++i) numbers[i] = static_cast<float>((i * 5 + rank * 3 + number) % 4);
    hvdkit::convert(plan.dtype, buffer.data(), DType::float32, reinterpret_cast<std::byte*>(numbers.data()),
                    plan.count);
    return buffer;
}

// What must be at the end where ``result`` was at first.
Buffer result_of(const Plan& plan, std::size_t ranks, std::size_t me, std::size_t number, Buffer result) {
    std::vector<Buffer> all;
    for (std::size_t rank = 0; rank < ranks; ++rank) all.push_back(values_of(plan, rank, number, 0));
    const std::size_t item = hvdkit::size_of(plan.dtype);
    for (std::size_t owner = 0; owner < ranks; ++owner) {
        auto [begin, end] = plan.shares[owner];
        if (plan.mode == hvdkit::Mode::whole) begin = 0, end = plan.count;
        if (begin == end || (plan.mode == hvdkit::Mode::reduce_scatter && owner != me)) continue;
        if (plan.mode == hvdkit::Mode::allgather) {
            std::memcpy(result.data() + begin * item, all[owner].data() + begin * item, (end - begin) * item);
            continue;
        }
        hvdkit::Reduction reduction{plan.dtype, plan.dtype, plan.op, {}, end - begin, {result.data() + begin * item},
                                    {}};
        for (const Buffer& one : all) reduction.sources.push_back(one.data() + begin * item);
        hvdkit::reduce(reduction);
    }
    return result;
}

void run_one_staged(hvdkit::Area& area, Bell& bell, Random& random, const Plan& plan, std::size_t number) {
    // In place, or out of memory apart.
    const bool apart = plan.mode != hvdkit::Mode::allgather && random.number(0, 1) == 0;
    const Buffer source = values_of(plan, area.me(), number, random.number(0, 9));
    Buffer data = apart ? Buffer(source.nbytes(), random.number(0, 9)) : values_of(plan, area.me(), number, 0);
    Buffer first = apart ? Buffer(source.nbytes()) : values_of(plan, area.me(), number, 0);
    std::vector<bool> past_cache;
    for (std::size_t rank = 0; rank < area.ranks(); ++rank) past_cache.push_back(random.number(0, 1) == 1);
    hvdkit::Staged staged(area, plan.mode, plan.dtype, plan.op, {}, data.data(), plan.count, plan.shares,
                          apart ? source.data() : nullptr, past_cache, number % 2 == 0);
    while (true) {
        const std::uint32_t seen = bell.count();
        if (staged.advance(random.number(0, 1) * 2e-6)) break;
        for (const std::size_t rank : staged.awaited()) CHECK(rank < area.ranks() && rank != area.me());
        sleep_at(bell, seen, 0.0);
    }
    CHECK(staged.awaited().empty());
    const Buffer expected = result_of(plan, area.ranks(), area.me(), number, std::move(first));
    CHECK(data.nbytes() == 0 || std::memcmp(data.data(), expected.data(), data.nbytes()) == 0);
}

}  // namespace

void run_message_rings(std::uint64_t seed, std::size_t ranks, std::size_t messages) {
    Node node(ranks, rings_bytes(ranks) + ranks * sizeof(Counter));
    on_every_rank(ranks, [&](std::size_t me) { Correspondent(node, seed, ranks, me, messages).run(); });
}

void run_staged(std::uint64_t seed, std::size_t ranks, std::size_t operations) {
    const std::size_t slot_bytes = ranks * kSlotLines * kLine;
    const std::size_t depth = 1 + seed % 3;
    Node node(ranks, hvdkit::Area::bytes_needed(ranks, depth, slot_bytes));
    on_every_rank(ranks, [&](std::size_t me) {
        Random random(seed + me);
        hvdkit::Area area(node.memory(), ranks, me, depth, slot_bytes, node.bells());
        for (std::size_t number = 0; number < operations; ++number) {
            run_one_staged(area, node.bell(me), random, plan_of(seed, ranks, number), number);
        }
    });
}

void run_heartbeats(std::size_t ranks, std::size_t rounds) {
    constexpr double kPause = 1e-4;
    // A ring of nodes of one rank each, and one counter table for all of them.
    Node node(ranks, ranks * sizeof(Counter));
    auto* const counters = reinterpret_cast<Counter*>(node.memory());
    for (std::size_t round = 0; round < rounds; ++round) {
        std::vector<std::vector<hvdkit::Heartbeat::Connection>> connections(ranks);
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            const std::size_t next = (rank + 1) % ranks;
            int sockets[2];
            CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
            connections[rank].emplace_back(sockets[0], next);
            connections[next].emplace_back(sockets[1], rank);
        }
        on_every_rank(ranks, [&](std::size_t me) {
            hvdkit::Heartbeat heartbeat(round % 2 == 0 ? counters : nullptr, ranks, me, connections[me], kPause);
            const std::size_t other = (me + 1) % ranks;
            while (heartbeat.count(me) < 10 || heartbeat.count(other) == 0) std::this_thread::yield();
            if (me % 2 == 0) heartbeat.stop();  // the others' connections break while they beat
        });
    }
}
