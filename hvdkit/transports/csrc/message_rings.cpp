// Frames on rings: a message travels as frames of 16 bytes of header and a part of the payload, padded to 16 bytes.
#include "message_rings.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace hvdkit {
namespace {

struct FrameHeader {
    std::uint64_t tag;
    std::uint64_t nbytes : 16;  // of payload in this frame
    std::uint64_t total : 48;   // of the message
};
static_assert(sizeof(FrameHeader) == 16);

constexpr std::size_t kAlign = sizeof(FrameHeader);
// The receiver can begin to copy a message while the sender still writes the rest.
constexpr std::size_t kLargestFrame = 32 * 1024;  // and the length of a frame has 16 bits

std::size_t padded(std::size_t nbytes) { return (nbytes + kAlign - 1) / kAlign * kAlign; }

std::byte* bytes_of(RingHead* head) { return reinterpret_cast<std::byte*>(head + 1); }

}  // namespace

std::size_t MessageRings::bytes_needed(std::size_t ranks, std::size_t data_capacity, std::size_t control_capacity) {
    return ranks * ranks * (2 * sizeof(RingHead) + data_capacity + control_capacity);
}

MessageRings::MessageRings(std::byte* base, std::size_t ranks, std::size_t me, std::size_t data_capacity,
                           std::size_t control_capacity, std::vector<Bell*> bells)
    : base_(base),
      ranks_(ranks),
      me_(me),
      data_capacity_(data_capacity),
      control_capacity_(control_capacity),
      bells_(std::move(bells)),
      peers_(ranks) {
    for (std::size_t peer = 0; peer < ranks_; ++peer) {
        peers_[peer].data = Lane{head(me_, peer, false), head(peer, me_, false), data_capacity_, {}, {}};
        peers_[peer].control = Lane{head(me_, peer, true), head(peer, me_, true), control_capacity_, {}, {}};
    }
}

RingHead* MessageRings::head(std::size_t from, std::size_t to, bool control) const {
    const std::size_t pair_bytes = 2 * sizeof(RingHead) + data_capacity_ + control_capacity_;
    std::byte* const pair = base_ + (from * ranks_ + to) * pair_bytes;
    return reinterpret_cast<RingHead*>(control ? pair + sizeof(RingHead) + data_capacity_ : pair);
}

std::shared_ptr<Message> MessageRings::send(std::size_t peer, std::uint64_t tag, const std::byte* data,
                                            std::size_t nbytes, std::shared_ptr<void> keep) {
    const std::lock_guard<std::mutex> guard(mutex_);
    auto message = std::make_shared<Message>();
    message->keep = std::move(keep);
    Lane& lane = peers_[peer].data;
    lane.outgoing.push_back(Outgoing{tag, data, nbytes, 0, message, {}});
    if (push(lane)) bells_[peer]->ring();
    return message;
}

void MessageRings::send_control(std::size_t peer, std::string payload) {
    const std::lock_guard<std::mutex> guard(mutex_);
    Lane& lane = peers_[peer].control;
    const std::size_t nbytes = payload.size();
    lane.outgoing.push_back(Outgoing{0, nullptr, nbytes, 0, nullptr, std::move(payload)});
    if (push(lane)) bells_[peer]->ring();
}

std::shared_ptr<Message> MessageRings::receive(std::size_t peer, std::uint64_t tag, std::byte* data, std::size_t nbytes,
                                               std::shared_ptr<void> keep) {
    // Before the lock: where this throws, the owner is given back, which may have to wait for whoever wants the lock.
    auto message = std::make_shared<Message>();
    message->keep = std::move(keep);
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!receive_early(peer, tag, data, nbytes, message)) {
        peers_[peer].posted[tag].push_back(Incoming{data, nbytes, message});
    }
    return message;
}

std::shared_ptr<Message> MessageRings::receive_any(const std::vector<std::size_t>& peers, std::uint64_t tag,
                                                   std::byte* data, std::size_t nbytes, std::shared_ptr<void> keep) {
    auto message = std::make_shared<Message>();
    message->keep = std::move(keep);
    const std::lock_guard<std::mutex> guard(mutex_);
    for (const std::size_t peer : peers) {
        if (receive_early(peer, tag, data, nbytes, message)) return message;
    }
    for (const std::size_t peer : peers) peers_[peer].posted[tag].push_back(Incoming{data, nbytes, message});
    return message;
}

// Takes a message that is here already, or of which a part is.
bool MessageRings::receive_early(std::size_t peer, std::uint64_t tag, std::byte* data, std::size_t nbytes,
                                 const std::shared_ptr<Message>& message) {
    Peer& from = peers_[peer];
    const auto early = from.early.find(tag);
    if (early != from.early.end()) {
        const std::string payload = std::move(early->second.front());
        early->second.pop_front();
        if (early->second.empty()) from.early.erase(early);
        claim(*message, peer, payload.size(), nbytes);
        if (payload.size() == nbytes && nbytes > 0) std::memcpy(data, payload.data(), nbytes);
        message->done.store(true);
        finished_.push_back(message);
        return true;
    }
    Arriving& arriving = from.data.arriving;
    if (arriving.active && arriving.tag == tag && arriving.message == nullptr) {
        // Its first part is here already, in memory of ours; go on in the buffer that now waits for it.
        claim(*message, peer, arriving.total, nbytes);
        arriving.message = message;
        if (arriving.total == nbytes) {
            if (arriving.got > 0) std::memcpy(data, arriving.early.data(), arriving.got);
            arriving.data = data;
            arriving.early.clear();
        }
        return true;
    }
    return false;
}

bool MessageRings::withdraw(Message& receive) {
    const std::lock_guard<std::mutex> guard(mutex_);
    return !std::exchange(receive.claimed, true);
}

bool MessageRings::progress() {
    const std::lock_guard<std::mutex> guard(mutex_);
    bool moved = false;
    for (std::size_t peer = 0; peer < ranks_; ++peer) {
        if (peer == me_) continue;
        Peer& other = peers_[peer];
        moved |= pull(peer, other.control, true);
        moved |= pull(peer, other.data, false);
        bool wrote = push(other.control);
        wrote |= push(other.data);
        if (wrote) bells_[peer]->ring();
        moved |= wrote;
    }
    return moved;
}

bool MessageRings::push(Lane& lane) {
    bool wrote = false;
    while (!lane.outgoing.empty()) {
        Outgoing& message = lane.outgoing.front();
        const std::uint64_t written = lane.out->written.load(std::memory_order_relaxed);
        std::size_t room = lane.capacity - (written - lane.out->read.load(std::memory_order_acquire));
        const std::size_t place = written % lane.capacity;
        if (room < 2 * kAlign) {
            lane.out->starved.store(1, std::memory_order_seq_cst);
            room = lane.capacity - (written - lane.out->read.load(std::memory_order_seq_cst));
            if (room < 2 * kAlign) return wrote;
        }
        // A frame does not wrap around; where only a header fits before the end, it travels alone.
        const std::size_t fits = std::min({room, lane.capacity - place, kAlign + kLargestFrame}) - kAlign;
        const std::size_t part = std::min(fits, message.nbytes - message.sent);
        const std::byte* const payload =
            message.message != nullptr ? message.data : reinterpret_cast<const std::byte*>(message.payload.data());
        std::byte* const frame = bytes_of(lane.out) + place;
        const FrameHeader header{message.tag, part, message.nbytes};
        std::memcpy(frame, &header, sizeof(header));
        if (part > 0) std::memcpy(frame + kAlign, payload + message.sent, part);
        lane.out->written.store(written + kAlign + padded(part), std::memory_order_seq_cst);
        message.sent += part;
        wrote = true;
        if (message.sent == message.nbytes) {
            if (message.message != nullptr) {
                message.message->done.store(true);
                finished_.push_back(message.message);
            }
            lane.outgoing.pop_front();
        }
    }
    return wrote;
}

bool MessageRings::pull(std::size_t from, Lane& lane, bool control) {
    bool moved = false;
    std::uint64_t read = lane.in->read.load(std::memory_order_relaxed);
    while (read != lane.in->written.load(std::memory_order_acquire)) {
        const std::byte* const frame = bytes_of(lane.in) + read % lane.capacity;
        FrameHeader header;
        std::memcpy(&header, frame, sizeof(header));
        Arriving& arriving = lane.arriving;
        if (!arriving.active) {
            arriving.tag = header.tag;
            arriving.total = header.total;
            arriving.got = 0;
            begin(from, arriving, control);
        }
        const std::size_t left = lane.capacity - read % lane.capacity - kAlign;
        if (header.nbytes > left || header.total != arriving.total || arriving.got + header.nbytes > arriving.total) {
            throw std::runtime_error("the memory shared with local rank " + std::to_string(from) + " is damaged");
        }
        if (header.nbytes > 0) std::memcpy(arriving.data + arriving.got, frame + kAlign, header.nbytes);
        arriving.got += header.nbytes;
        read += kAlign + padded(header.nbytes);
        lane.in->read.store(read, std::memory_order_seq_cst);
        moved = true;
        if (arriving.got == arriving.total) end(from, arriving, control);
    }
    if (moved && lane.in->starved.exchange(0, std::memory_order_seq_cst) != 0) bells_[from]->ring();
    return moved;
}

void MessageRings::begin(std::size_t from, Arriving& arriving, bool control) {
    auto& posted = peers_[from].posted;
    auto waiting = control ? posted.end() : posted.find(arriving.tag);
    // Receives from any peer may have got the message of another one.
    while (waiting != posted.end() && waiting->second.front().message->claimed) {
        waiting->second.pop_front();
        if (waiting->second.empty()) {
            posted.erase(waiting);
            waiting = posted.end();
        }
    }
    if (waiting != posted.end()) {
        const Incoming receive = waiting->second.front();
        waiting->second.pop_front();
        if (waiting->second.empty()) posted.erase(waiting);
        claim(*receive.message, from, arriving.total, receive.nbytes);
        if (receive.nbytes == arriving.total) {
            arriving.data = receive.data;
            arriving.active = true;
        } else {
            begin_early(arriving);  // its bytes go there, and are not used
        }
        arriving.message = receive.message;
        return;
    }
    begin_early(arriving);
}

void MessageRings::begin_early(Arriving& arriving) {
    arriving.early.resize(arriving.total);
    arriving.data = reinterpret_cast<std::byte*>(arriving.early.data());
    arriving.active = true;
}

void MessageRings::end(std::size_t from, Arriving& arriving, bool control) {
    if (arriving.message != nullptr) {
        arriving.message->done.store(true);
        finished_.push_back(std::move(arriving.message));
    } else if (control) {
        control_.emplace_back(from, std::move(arriving.early));
    } else {
        peers_[from].early[arriving.tag].push_back(std::move(arriving.early));
    }
    arriving = Arriving{};
}

void MessageRings::claim(Message& receive, std::size_t from, std::size_t came, std::size_t expected) {
    receive.claimed = true;
    receive.source.store(static_cast<int>(from));
    if (came != expected) receive.wrong_bytes.store(static_cast<std::int64_t>(came));
}

std::vector<std::pair<std::size_t, std::string>> MessageRings::take_control() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return std::exchange(control_, {});
}

std::vector<std::shared_ptr<Message>> MessageRings::take_finished() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return std::exchange(finished_, {});
}

}  // namespace hvdkit
