// Runs the native code under a sanitizer: ``driver kernels|arena|ranks SEED ROUNDS``. Ends with 0 if nothing was found.
// Or on another processor: ``driver codecs SEED ROUNDS`` prints a number that is the same on all of them.
#include <cstdlib>
#include <cstring>

#include "check.h"

int main(int count, char** arguments) {
    CHECK(count == 4);
    const std::uint64_t seed = std::strtoull(arguments[2], nullptr, 10);
    const std::size_t rounds = std::strtoull(arguments[3], nullptr, 10);
    if (std::strcmp(arguments[1], "kernels") == 0) {
        run_kernels(seed, rounds);
        run_codecs(seed, rounds);
    } else if (std::strcmp(arguments[1], "codecs") == 0) {
        run_codecs(seed, rounds);
        std::printf("%016llx\n", static_cast<unsigned long long>(digested()));
    } else if (std::strcmp(arguments[1], "arena") == 0) {
        run_arena(seed, rounds);
    } else {
        for (std::size_t ranks = 1; ranks <= 4; ++ranks) {
            run_message_rings(seed + ranks, ranks, rounds);
            run_staged(seed + ranks, ranks, rounds);
            run_heartbeats(ranks, 5);
        }
    }
    std::puts("nothing found");
    return 0;
}
