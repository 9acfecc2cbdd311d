// The import table of libc10: found by what the dynamic loader knows of it, entries checked before any is changed.
#include "hook.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "arena.h"

namespace hvdkit {
namespace {

#if defined(__x86_64__)
constexpr bool kKnown = true;
constexpr bool is_import(unsigned long type) {
    return type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT || type == R_X86_64_64;
}
#elif defined(__aarch64__)
constexpr bool kKnown = true;
constexpr bool is_import(unsigned long type) {
    return type == R_AARCH64_JUMP_SLOT || type == R_AARCH64_GLOB_DAT || type == R_AARCH64_ABS64;
}
#else
constexpr bool kKnown = false;
constexpr bool is_import(unsigned long) { return false; }
#endif

// The number of the backward pass that the calling thread is in, -1 outside: torch::autograd's own function.
constexpr const char* kTaskName = "_ZN5torch8autograd25get_current_graph_task_idEv";

using Allocate = int (*)(void**, std::size_t, std::size_t);
using Release = void (*)(void*);
using Task = int (*)();

// What the entries held before; set before any entry is changed, never changed afterwards.
Allocate original_allocate = nullptr;
Release original_release = nullptr;
Task current_task = nullptr;
thread_local bool serves_always = false;

// Smaller ones are not looked at: most allocations are, and a block takes whole pages.
constexpr std::size_t kSmallest = 32 * 1024;

int arena_memalign(void** out, std::size_t alignment, std::size_t nbytes) {
    if (nbytes >= kSmallest && (serves_always || current_task() != -1)) {
        void* const block = Arena::process().allocate(alignment, nbytes);
        if (block != nullptr) {
            *out = block;
            return 0;
        }
    }
    return original_allocate(out, alignment, nbytes);
}

void arena_free(void* address) {
    if (Arena::process().contains(address)) {
        Arena::process().free(address);
    } else {
        original_release(address);
    }
}

struct Import {
    void** entry;
    bool releases;
};

struct Library {
    std::string path;
    std::vector<Import> imports;
    std::uintptr_t begin = ~std::uintptr_t{0};  // of its segments
    std::uintptr_t end = 0;
    std::uintptr_t sealed_begin = 0;  // what the loader has made read-only
    std::uintptr_t sealed_end = 0;
};

const char* base_name(const char* path) {
    const char* const slash = std::strrchr(path, '/');
    return slash == nullptr ? path : slash + 1;
}

std::uintptr_t absolute(const dl_phdr_info* info, std::uintptr_t pointer) {
    // glibc has relocated the pointers of the dynamic section, other loaders have not.
    return pointer < info->dlpi_addr ? info->dlpi_addr + pointer : pointer;
}

void read_imports(const dl_phdr_info* info, const ElfW(Dyn) * dynamic, Library* library) {
    const ElfW(Rela) * tables[2] = {nullptr, nullptr};
    std::size_t bytes[2] = {0, 0};
    const ElfW(Sym)* symbols = nullptr;
    const char* names = nullptr;
    for (; dynamic->d_tag != DT_NULL; ++dynamic) {
        const std::uintptr_t at = absolute(info, dynamic->d_un.d_ptr);
        switch (dynamic->d_tag) {
            case DT_JMPREL:
                tables[0] = reinterpret_cast<const ElfW(Rela)*>(at);
                break;
            case DT_PLTRELSZ:
                bytes[0] = dynamic->d_un.d_val;
                break;
            case DT_RELA:
                tables[1] = reinterpret_cast<const ElfW(Rela)*>(at);
                break;
            case DT_RELASZ:
                bytes[1] = dynamic->d_un.d_val;
                break;
            case DT_SYMTAB:
                symbols = reinterpret_cast<const ElfW(Sym)*>(at);
                break;
            case DT_STRTAB:
                names = reinterpret_cast<const char*>(at);
                break;
            default:
                break;
        }
    }
    if (symbols == nullptr || names == nullptr) return;
    for (int table = 0; table < 2; ++table) {
        for (std::size_t i = 0; tables[table] != nullptr && i < bytes[table] / sizeof(ElfW(Rela)); ++i) {
            const ElfW(Rela) & entry = tables[table][i];
            if (!is_import(ELF64_R_TYPE(entry.r_info)) || entry.r_addend != 0) continue;
            const char* const name = names + symbols[ELF64_R_SYM(entry.r_info)].st_name;
            const bool releases = std::strcmp(name, "free") == 0;
            if (releases || std::strcmp(name, "posix_memalign") == 0) {
                library->imports.push_back({reinterpret_cast<void**>(info->dlpi_addr + entry.r_offset), releases});
            }
        }
    }
}

int visit(dl_phdr_info* info, std::size_t, void* data) {
    auto* const library = static_cast<Library*>(data);
    if (std::strcmp(base_name(info->dlpi_name), "libc10.so") != 0) return 0;
    library->path = info->dlpi_name;
    const ElfW(Dyn)* dynamic = nullptr;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr) & header = info->dlpi_phdr[i];
        const std::uintptr_t begin = info->dlpi_addr + header.p_vaddr;
        if (header.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(begin);
        if (header.p_type == PT_LOAD) {
            library->begin = std::min(library->begin, begin);
            library->end = std::max(library->end, begin + header.p_memsz);
        }
        if (header.p_type == PT_GNU_RELRO) {
            library->sealed_begin = begin;
            library->sealed_end = begin + header.p_memsz;
        }
    }
    if (dynamic != nullptr) read_imports(info, dynamic, library);
    return 1;
}

std::string file_of(void* function) {
    Dl_info found{};
    return dladdr(function, &found) != 0 && found.dli_fname != nullptr ? base_name(found.dli_fname) : "something else";
}

// Another allocator, a sanitizer or a profiler may stand in the place of the C library; what it does is not known here.
std::string why_not_original(const Library& library, const char* name, bool releases, void* original) {
    for (const Import& import : library.imports) {
        if (import.releases != releases) continue;
        void* found = *import.entry;
        const auto address = reinterpret_cast<std::uintptr_t>(found);
        // Not called yet, an entry leads into the library itself, from where the loader looks the function up.
        if (address >= library.begin && address < library.end) found = dlsym(RTLD_DEFAULT, name);
        if (found != original) return std::string(name) + " comes from " + file_of(found) + ", not from the C library";
    }
    return "";
}

std::string replace(const Library& library, const Import& import, void* function) {
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto entry = reinterpret_cast<std::uintptr_t>(import.entry);
    void* const first = reinterpret_cast<void*>(entry / page * page);
    if (mprotect(first, page, PROT_READ | PROT_WRITE) != 0) {
        return std::string("the import table cannot be written: ") + std::strerror(errno);
    }
    __atomic_store_n(import.entry, function, __ATOMIC_RELEASE);
    if (entry >= library.sealed_begin && entry < library.sealed_end) mprotect(first, page, PROT_READ);
    return "";
}

}  // namespace

std::string install_hooks() {
    if (!kKnown) return "this processor's import tables are not known";
    if (original_allocate != nullptr) return "";
    Library library;
    dl_iterate_phdr(visit, &library);
    if (library.path.empty()) return "PyTorch's libc10 is not loaded";
    std::size_t releasing = 0;
    for (const Import& import : library.imports) releasing += import.releases ? 1 : 0;
    if (releasing == 0 || releasing == library.imports.size()) {
        return "PyTorch's libc10 imports no posix_memalign and free";
    }
    void* const libc = dlopen("libc.so.6", RTLD_NOLOAD | RTLD_LAZY);
    if (libc == nullptr) return "the C library is not glibc";
    void* const allocate = dlsym(libc, "posix_memalign");
    void* const release = dlsym(libc, "free");
    std::string reason = why_not_original(library, "posix_memalign", false, allocate);
    if (reason.empty()) reason = why_not_original(library, "free", true, release);
    if (!reason.empty()) return reason;
    const std::string folder = library.path.substr(0, library.path.size() - std::strlen("libc10.so"));
    void* const torch = dlopen((folder + "libtorch_cpu.so").c_str(), RTLD_NOLOAD | RTLD_LAZY);
    void* const task = torch == nullptr ? nullptr : dlsym(torch, kTaskName);
    if (task == nullptr) return "this PyTorch does not say whether a thread is in a backward pass";
    current_task = reinterpret_cast<Task>(task);
    original_release = reinterpret_cast<Release>(release);
    original_allocate = reinterpret_cast<Allocate>(allocate);
    // Who frees must know the arena before anything is allocated there.
    for (const bool releases : {true, false}) {
        for (const Import& import : library.imports) {
            if (import.releases != releases || !reason.empty()) continue;
            reason =
                replace(library, import,
                        releases ? reinterpret_cast<void*>(&arena_free) : reinterpret_cast<void*>(&arena_memalign));
        }
    }
    return reason;
}

bool serve_this_thread(bool always) { return std::exchange(serves_always, always); }

}  // namespace hvdkit
