/* Device and pinned memory, shared memory, and what happens when a wrong address is touched.
 *
 * Addresses come from two ranges, each used once, so that what was freed faults for ever. An allocation ends at a page that faults, or up to 255 bytes before
 * (for its alignment); these bytes are poisoned under the address sanitizer, else looked at after each kernel. Device memory can be touched only while the
 * emulator runs kernels and copies.
 */
#include "simt.h"
#include "state.h"

#include <elf.h>
#include <link.h>
#include <map>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

enum : size_t { PAGE = 4096, ALIGN = 256, RANGE = (size_t)256 << 30, FILL = (size_t)64 << 20, NEAR = 256 };
enum : unsigned char { GARBAGE = 0xff }; /* NaN in each float type, -1 in integers */

struct allocation {
    char *page; /* first; size of all: pages */
    size_t pages, bytes;
};

/* One of the two kinds of memory. */
static struct range {
    char *base, *next;
    std::map<uintptr_t, allocation> live; /* by address */
    size_t used;
} ranges[3];

static bool is_open;
static int empty_file = -1;

static char *reserve(size_t bytes)
{
    void *p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("emulated GPU: mmap");
        abort();
    }
    return (char *)p;
}

/* Makes [p, p + bytes) of a range fault for good, even where mprotect opens it: a file that ends before it. */
static void close_for_good(range &r, char *p, size_t bytes)
{
    if (empty_file < 0)
        empty_file = memfd_create("emulated GPU: beside allocations", MFD_CLOEXEC);
    if (mmap(p, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, empty_file, p - r.base) == MAP_FAILED) {
        perror("emulated GPU: mmap");
        abort();
    }
}

static void protect(char *p, size_t bytes, int how)
{
    if (mprotect(p, bytes, how) < 0) {
        perror("emulated GPU: mprotect");
        abort();
    }
}

/* The bytes of an allocation's pages that are not its own: f(where, how many), before and behind. */
template <class F> static void each_margin(uintptr_t address, const allocation &a, F f)
{
    char *p = (char *)address;
    f(a.page, (size_t)(p - a.page));
    f(p + a.bytes, (size_t)(a.page + a.pages - (p + a.bytes)));
}

void *simt_memory_new(simt_kind kind, size_t bytes)
{
    range &r = ranges[kind];
    if (!r.base)
        r.base = r.next = reserve(RANGE);
    if (r.next == r.base)
        close_for_good(r, r.base, PAGE);
    size_t rounded = (bytes + ALIGN - 1) & ~(ALIGN - 1), pages = (rounded + PAGE - 1) & ~(PAGE - 1);
    if (bytes > RANGE || r.next + pages + 2 * PAGE > r.base + RANGE)
        return nullptr;
    allocation a = {r.next + PAGE, pages, bytes};
    r.next = a.page + pages;
    protect(a.page, pages, PROT_READ | PROT_WRITE);
    close_for_good(r, r.next, PAGE);
    char *p = a.page + pages - rounded;
    memset(p, GARBAGE, bytes < FILL ? bytes : FILL);
    each_margin((uintptr_t)p, a, [](char *at, size_t n) {
        memset(at, GARBAGE, n);
        ASAN_POISON_MEMORY_REGION(at, n);
    });
    if (kind == SIMT_DEVICE && !is_open)
        protect(a.page, pages, PROT_NONE);
    r.live[(uintptr_t)p] = a;
    r.used += bytes;
    return p;
}

static void release(range &r, const allocation &a)
{
    ASAN_UNPOISON_MEMORY_REGION(a.page, a.pages);
    close_for_good(r, a.page, a.pages);
}

bool simt_memory_free(simt_kind kind, void *p)
{
    range &r = ranges[kind];
    auto found = r.live.find((uintptr_t)p);
    if (found == r.live.end())
        return false;
    simt_memory_check();
    r.used -= found->second.bytes;
    release(r, found->second);
    r.live.erase(found);
    return true;
}

static bool inside(const range &r, const void *p)
{
    return r.base && (const char *)p >= r.base && (const char *)p < r.base + RANGE;
}

simt_kind simt_memory_kind(const void *p, size_t bytes, const char *what)
{
    for (simt_kind kind : {SIMT_DEVICE, SIMT_PINNED}) {
        const range &r = ranges[kind];
        if (!inside(r, p))
            continue;
        auto next = r.live.upper_bound((uintptr_t)p);
        if (next == r.live.begin() || (uintptr_t)p > std::prev(next)->first + std::prev(next)->second.bytes)
            simt_fault("%s: %p is %s", what, p, simt_memory_tell(p));
        else if ((uintptr_t)p - std::prev(next)->first + bytes > std::prev(next)->second.bytes)
            simt_fault("%s: %zu bytes at %p, %zu into an allocation of %zu", what, bytes, p, (size_t)((uintptr_t)p - std::prev(next)->first),
                       std::prev(next)->second.bytes);
        return kind;
    }
    return SIMT_PAGEABLE;
}

size_t simt_memory_used(simt_kind kind)
{
    return ranges[kind].used;
}

void simt_memory_open(bool device)
{
    device |= !emu_now.guard;
    if (device == is_open)
        return;
    is_open = device;
    const range &r = ranges[SIMT_DEVICE];
    if (r.next > r.base)
        protect(r.base, (size_t)(r.next + PAGE - r.base), device ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void simt_memory_check()
{
#ifndef __SANITIZE_ADDRESS__ /* which sees it when it happens */
    bool was_open = is_open;
    simt_memory_open(true);
    for (range &r : ranges)
        for (auto &[address, a] : r.live)
            each_margin(address, a, [&, address = address, bytes = a.bytes](char *at, size_t n) {
                bool behind = (uintptr_t)at > address;
                for (size_t i = behind || n < NEAR ? 0 : n - NEAR; i < (behind && n > NEAR ? NEAR : n); i++)
                    if ((unsigned char)at[i] != GARBAGE) {
                        at[i] = (char)GARBAGE;
                        simt_fault("something was written at %p, which is %s", (void *)(at + i), simt_memory_tell(at + i));
                    }
            });
    simt_memory_open(was_open);
#endif
}

static char told_text[160];

const char *simt_memory_tell(const void *p)
{
    char *const text = told_text;
    const size_t room = sizeof told_text;
    for (simt_kind kind : {SIMT_DEVICE, SIMT_PINNED}) {
        const range &r = ranges[kind];
        const char *name = kind == SIMT_DEVICE ? "device" : "pinned";
        if (!inside(r, p))
            continue;
        auto next = r.live.upper_bound((uintptr_t)p);
        if (next != r.live.begin()) {
            auto at = std::prev(next);
            size_t off = (uintptr_t)p - at->first;
            if (off < at->second.bytes) {
                snprintf(text, room, "%zu bytes into an allocation of %zu bytes of %s memory", off, at->second.bytes, name);
                return text;
            }
            if ((const char *)p < at->second.page + at->second.pages + PAGE) {
                snprintf(text, room, "%zu bytes behind an allocation of %zu bytes of %s memory", off - at->second.bytes, at->second.bytes, name);
                return text;
            }
        }
        if (next != r.live.end() && (const char *)p >= next->second.page - PAGE)
            snprintf(text, room, "%zu bytes before an allocation of %zu bytes of %s memory", (size_t)(next->first - (uintptr_t)p), next->second.bytes, name);
        else
            snprintf(text, room, "%s memory that is not allocated, or no more", name);
        return text;
    }
    return nullptr;
}

/* ---- shared memory ------------------------------------------------------------------------------------------------------ */

enum : size_t { SHARED_MOST = (size_t)256 << 10, SHARED_ALIGN = 128 };
static char *shared_base; /* a page that faults, SHARED_MOST, another one */

/* Static shared memory is variables of functions, which lie somewhere among the program's: the symbol table tells where. All that are local to a C++ function
 * and not constant are taken for it, so kernels and what is linked with them have no other `static` variables in functions. */
struct piece {
    char *p;
    size_t bytes;
};
static std::vector<piece> pieces;

static int find_base(struct dl_phdr_info *info, size_t, void *ret)
{
    *(uintptr_t *)ret = info->dlpi_addr; /* the program's comes first */
    return 1;
}

static void find_pieces()
{
    int fd = open("/proc/self/exe", O_RDONLY);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) < 0)
        abort();
    const char *file = (const char *)mmap(nullptr, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (file == MAP_FAILED)
        abort();
    uintptr_t base = 0;
    dl_iterate_phdr(find_base, &base);
    auto header = (const ElfW(Ehdr) *)file;
    auto sections = (const ElfW(Shdr) *)(file + header->e_shoff);
    for (size_t i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB)
            continue;
        auto symbols = (const ElfW(Sym) *)(file + sections[i].sh_offset);
        const char *names = file + sections[sections[i].sh_link].sh_offset;
        for (size_t k = 0; k < sections[i].sh_size / sizeof *symbols; k++) {
            const ElfW(Sym) &s = symbols[k];
            if (ELF64_ST_TYPE(s.st_info) == STT_OBJECT && strncmp(names + s.st_name, "_ZZ", 3) == 0 && s.st_shndx < header->e_shnum &&
                sections[s.st_shndx].sh_flags & SHF_WRITE && sections[s.st_shndx].sh_type == SHT_NOBITS)
                pieces.push_back({(char *)(base + s.st_value), s.st_size});
        }
    }
    munmap((void *)file, (size_t)st.st_size);
}

/* Not through memset, which the sanitizer would look at: sizes may have its red zones in them. */
__attribute__((no_sanitize("address"), optimize("no-tree-loop-distribute-patterns"))) static void spoil(char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (char)GARBAGE;
}

static char *shared_end; /* of the launch's dynamic memory: which begins at a multiple of SHARED_ALIGN, so up to there before the page that faults */

unsigned char *simt_shared_new(size_t bytes)
{
    if (!shared_base) {
        shared_base = reserve(SHARED_MOST + 2 * PAGE);
        protect(shared_base + PAGE, SHARED_MOST, PROT_READ | PROT_WRITE);
        find_pieces();
    }
    for (const piece &x : pieces)
        spoil(x.p, x.bytes);
    char *end = shared_base + PAGE + SHARED_MOST, *p = end - ((bytes + SHARED_ALIGN - 1) & ~(SHARED_ALIGN - 1));
    ASAN_UNPOISON_MEMORY_REGION(shared_base + PAGE, SHARED_MOST);
    spoil(p, (size_t)(end - p));
    shared_end = p + bytes;
    ASAN_POISON_MEMORY_REGION(p + bytes, (size_t)(end - p - bytes));
    ASAN_POISON_MEMORY_REGION(shared_base + PAGE, (size_t)(p - shared_base - PAGE));
    return (unsigned char *)p;
}

bool simt_memory_place(const void *p, simt_place *ret)
{
    for (simt_kind kind : {SIMT_DEVICE, SIMT_PINNED}) {
        const range &r = ranges[kind];
        if (!inside(r, p))
            continue;
        auto next = r.live.upper_bound((uintptr_t)p);
        if (next == r.live.begin())
            return false;
        *ret = {std::prev(next)->first, std::prev(next)->first + std::prev(next)->second.bytes, -1};
        return (uintptr_t)p < ret->end;
    }
    const char *at = (const char *)p;
    if (at >= (char *)simt_dynamic && at < shared_end) {
        *ret = {(uintptr_t)simt_dynamic, (uintptr_t)shared_end, at - (shared_base + PAGE)};
        return true;
    }
    long before = SHARED_MOST;
    for (const piece &x : pieces) {
        if (at >= x.p && at < x.p + x.bytes) {
            *ret = {(uintptr_t)x.p, (uintptr_t)x.p + x.bytes, before + (at - x.p)};
            return true;
        }
        before += (long)x.bytes;
    }
    return false;
}

bool simt_shared_check()
{
#ifndef __SANITIZE_ADDRESS__
    for (const char *p = shared_end; p < shared_base + PAGE + SHARED_MOST; p++)
        if ((unsigned char)*p != GARBAGE) {
            simt_fault("something was written %zu bytes behind the block's shared memory", (size_t)(p - shared_end));
            return false;
        }
#endif
    return true;
}

/* ---- addresses that fault ------------------------------------------------------------------------------------------------- */

static bool watching;
static struct sigaction before[2];

static void on_fault(int signal, siginfo_t *info, void *)
{
    const void *p = info->si_addr;
    const char *told = simt_memory_tell(p);
    if (!told && shared_base && (const char *)p >= shared_base && (const char *)p < shared_base + SHARED_MOST + 2 * PAGE)
        told = "outside of the block's shared memory";
    if (simt_runs_here()) {
        simt_fault("touches %p, which is %s", p, told ? told : "no memory of the device");
    } else if (told) {
        fprintf(stderr, "emulated GPU: the host touches %p, which is %s\n", p, told);
        abort();
    }
    sigaction(signal, &before[signal == SIGBUS], nullptr); /* it happens again */
}

void simt_memory_reset()
{
    for (range &r : ranges) {
        for (auto &x : r.live)
            ASAN_UNPOISON_MEMORY_REGION(x.second.page, x.second.pages);
        if (r.base && mmap(r.base, (size_t)(r.next + PAGE - r.base), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
            abort();
        r.live.clear();
        r.used = 0;
        r.next = r.base;
    }
    if (watching)
        return;
    watching = true;
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before[0]);
    sigaction(SIGBUS, &action, &before[1]);
}
