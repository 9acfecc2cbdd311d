// Bells, posts and staged collectives between ranks that are threads, in whatever order they happen to run.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../../../hvdkit/transports/csrc/heartbeat.h"
#include "../../../hvdkit/transports/csrc/post.h"
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

// -- Post -------------------------------------------------------------------------------------------------------------

struct Letter {
    std::uint32_t tag;
    std::size_t nbytes;
    std::uint64_t seed;
};

constexpr std::size_t kDataRing = 512;
constexpr std::size_t kControlRing = 128;
constexpr std::size_t kLetterSizes[] = {0, 1, 15, 16, 17, 100, 495, 496, 497, 512, 1536, 2000};

std::size_t rings_bytes(std::size_t ranks) { return hvdkit::Post::bytes_needed(ranks, kDataRing, kControlRing); }

std::byte content(const Letter& letter, std::size_t i) { return static_cast<std::byte>(letter.seed + i * 7); }

// What one rank sends another: both know it, so that nobody has to tell.
std::vector<Letter> letters(std::uint64_t seed, std::size_t from, std::size_t to, std::size_t count) {
    Random random(seed * 1000 + from * 10 + to);
    std::vector<Letter> all;
    for (std::size_t n = 0; n < count; ++n) {
        all.push_back({static_cast<std::uint32_t>(random.number(0, 3)), random.one_of(kLetterSizes), random.bits()});
    }
    return all;
}

std::string control_payload(std::size_t from, std::size_t to, std::size_t number) {
    return std::string(number * 11 % 300, static_cast<char>('a' + (from + 3 * to + number) % 26));
}

class Correspondent {
 public:
    Correspondent(Node& node, std::uint64_t seed, std::size_t ranks, std::size_t me, std::size_t messages)
        : node_(node),
          overs_(reinterpret_cast<Counter*>(node.memory() + rings_bytes(ranks))),
          bell_(node.bell(me)),
          random_(seed + me),
          ranks_(ranks),
          me_(me),
          messages_(messages),
          post_(node.memory(), ranks, me, kDataRing, kControlRing, node.bells()),
          heard_(ranks, 0) {
        for (std::size_t peer = 0; peer < ranks; ++peer) {
            if (peer == me) continue;
            add(peer, false, letters(seed, me, peer, messages));
            add(peer, true, shuffled(letters(seed, peer, me, messages)));
        }
    }

    void run() {
        std::thread talker([this] { talk(); });  // as a training thread that sends while the engine drives
        while (!everybody_is_over()) {
            const std::uint32_t seen = bell_.count();
            const bool posted = post_some();
            const bool moved = post_.progress();
            listen();
            check_arrived();
            if (!over_ && over()) tell_over();
            if (!moved && !posted && !everybody_is_over()) sleep_at(bell_, seen, random_.number(0, 1) * 2e-6);
        }
        talker.join();
    }

 private:
    struct Queue {
        std::size_t peer;
        bool receives;
        std::vector<Letter> all;
        std::size_t posted = 0;
    };
    struct Open {
        Letter letter;
        bool receives;
        Buffer buffer;
        std::shared_ptr<hvdkit::Message> message;
    };

    void add(std::size_t peer, bool receives, std::vector<Letter> all) {
        queues_.push_back(Queue{peer, receives, std::move(all)});
    }

    // Another order of tags, and under each tag the order in which they are sent.
    std::vector<Letter> shuffled(std::vector<Letter> sent) {
        std::map<std::uint32_t, std::vector<Letter>> by_tag;
        std::vector<std::uint32_t> tags;
        for (auto letter = sent.rbegin(); letter != sent.rend(); ++letter) by_tag[letter->tag].push_back(*letter);
        for (const Letter& letter : sent) tags.push_back(letter.tag);
        for (std::size_t i = tags.size(); i > 1; --i) std::swap(tags[i - 1], tags[random_.number(0, i - 1)]);
        for (std::size_t i = 0; i < tags.size(); ++i) {
            sent[i] = by_tag[tags[i]].back();
            by_tag[tags[i]].pop_back();
        }
        return sent;
    }

    bool post_some() {
        bool any = false;
        for (Queue& queue : queues_) {
            for (std::size_t n = random_.number(0, 3); n > 0 && queue.posted < queue.all.size(); --n) {
                post_one(queue);
                any = true;
            }
            if (queue.posted < queue.all.size()) any = true;  // more to post: do not sleep
        }
        return any;
    }

    void post_one(Queue& queue) {
        const Letter letter = queue.all[queue.posted++];
        Open open{letter, queue.receives, Buffer(letter.nbytes, random_.number(0, 3)), nullptr};
        std::byte* const data = open.buffer.data();
        if (queue.receives) {
            open.message = post_.receive(queue.peer, letter.tag, data, letter.nbytes, nullptr);
        } else {
            for (std::size_t i = 0; i < letter.nbytes; ++i) data[i] = content(letter, i);
            open.message = post_.send(queue.peer, letter.tag, data, letter.nbytes, nullptr);
        }
        open_.push_back(std::move(open));
    }

    void check_arrived() {
        auto still_open = open_.begin();
        for (Open& open : open_) {
            if (!open.message->done.load()) {
                if (&*still_open != &open) *still_open = std::move(open);
                ++still_open;
                continue;
            }
            for (std::size_t i = 0; open.receives && i < open.letter.nbytes; ++i) {
                CHECK(open.buffer.data()[i] == content(open.letter, i));
            }
            for (std::size_t i = 0; !open.receives && i < open.letter.nbytes; ++i) open.buffer.data()[i] = std::byte{0};
        }
        open_.erase(still_open, open_.end());
    }

    void talk() {
        for (std::size_t number = 0; number < messages_; ++number) {
            for (std::size_t peer = 0; peer < ranks_; ++peer) {
                if (peer != me_) post_.send_control(peer, control_payload(me_, peer, number));
            }
            listen();
        }
        bell_.ring();
    }

    void listen() {
        const std::lock_guard<std::mutex> guard(listening_);
        post_.take_finished();
        for (const auto& [peer, payload] : post_.take_control()) {
            CHECK(payload == control_payload(peer, me_, heard_[peer]));
            ++heard_[peer];
        }
    }

    bool over() {
        const std::lock_guard<std::mutex> guard(listening_);
        for (const Queue& queue : queues_) {
            if (queue.posted < queue.all.size() || heard_[queue.peer] < messages_) return false;
        }
        return open_.empty();
    }

    // Others may still need this rank to send what did not fit into a ring.
    void tell_over() {
        over_ = true;
        overs_[me_].set(1);
        for (std::size_t peer = 0; peer < ranks_; ++peer) node_.bell(peer).ring();
    }

    bool everybody_is_over() const {
        for (std::size_t rank = 0; rank < ranks_; ++rank) {
            if (overs_[rank].get() == 0) return false;
        }
        return true;
    }

    Node& node_;
    Counter* overs_;  // behind the rings
    Bell& bell_;
    bool over_ = false;
    Random random_;
    std::size_t ranks_;
    std::size_t me_;
    std::size_t messages_;
    hvdkit::Post post_;
    std::mutex listening_;  // both threads do
    std::vector<std::size_t> heard_;
    std::vector<Queue> queues_;
    std::vector<Open> open_;
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
    hvdkit::convert(plan.dtype, buffer.data(), DType::float32, reinterpret_cast<std::byte*>(numbers.data()), plan.count);
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

void run_posts(std::uint64_t seed, std::size_t ranks, std::size_t messages) {
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
