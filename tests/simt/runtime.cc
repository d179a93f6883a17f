/* The emulated runtime: streams and events whose work is done as late as CUDA allows (emu_order), copies, the device and its end. Calls of several host
 * threads take their turn. */
#include "cuda_runtime.h"
#include "emu.h"
#include "queue.h"
#include "state.h"

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdio.h>
#include <stdlib.h>
#include <string>
#include <vector>

/* Work of a stream, numbered from 0; done: so much of it is. */
struct work {
    std::function<void()> run;
    uint64_t stream; /* a wait for another stream's work up to `until`: its number, which no other stream gets; 0: none */
    uint64_t until;
};
struct CUstream_st {
    uint64_t number, done;
    std::deque<work> queue;
    uint64_t end() const { return done + queue.size(); }
};
struct CUevent_st {
    uint64_t stream, until; /* 0, 0: never recorded */
    bool timed;
    double at;              /* ms, when it happened; 0: not yet */
};

emu_options emu_now;

static double now_ms()
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static struct emulation {
    std::recursive_mutex lock;
    bool ready;
    uint64_t random;
    std::map<uint64_t, CUstream_st *> streams; /* by number */
    uint64_t n_streams;
    std::set<CUevent_st *> events;
    std::map<const void *, int> shared_most; /* cudaFuncSetAttribute */
    std::map<std::string, uint64_t> kernels;
    emu_counts counts;
    cudaError_t last;
    bool lost, told;
    std::string fault;
    long calls_left;
    uint64_t asked;
} &emu = *new emulation(); /* for as long as the program is */

uint64_t emu_random() /* xorshift64* */
{
    emu.random ^= emu.random >> 12;
    emu.random ^= emu.random << 25;
    emu.random ^= emu.random >> 27;
    return emu.random * 0x2545f4914f6cdd1dull >> 11;
}

/* ---- for tests -------------------------------------------------------------------------------------------------------------- */

emu_options emu_defaults()
{
    emu_options o = {};
    o.n_devices = 1;
    o.driver = CUDART_VERSION;
    o.major = 8;
    o.memory = o.pinned = (size_t)4 << 30;
    o.lose_after = -1;
    o.asks = 1;
    o.guard = true;
    const char *order = getenv("EMU_ORDER"), *seed = getenv("EMU_SEED");
    if (order)
        o.order = strcmp(order, "eager") == 0 ? EMU_EAGER : strcmp(order, "random") == 0 ? EMU_RANDOM : EMU_LATE;
    if (seed)
        o.seed = strtoull(seed, nullptr, 0);
    return o;
}

void emu_reset(const emu_options *o)
{
    std::lock_guard<std::recursive_mutex> guard(emu.lock);
    emu_now = o ? *o : emu_defaults();
    for (auto &x : emu.streams)
        delete x.second;
    for (CUevent_st *e : emu.events)
        delete e;
    emu.streams.clear();
    emu.events.clear();
    emu.shared_most.clear();
    emu.kernels.clear();
    emu.counts = {};
    emu.last = cudaSuccess;
    emu.lost = emu.told = false;
    emu.fault.clear();
    emu.calls_left = emu_now.lose_after;
    emu.asked = 0;
    emu.random = emu_now.seed * 0x9e3779b97f4a7c15ull + 0x6a09e667f3bcc909ull;
    if (!emu.random)
        emu.random = 1;
    emu.ready = true;
    simt_memory_open(false);
    simt_memory_reset();
}

bool emu_caught(const char *text)
{
    if (!emu_now.catch_faults)
        return false;
    if (emu.fault.empty() || emu.told) {
        emu.fault = text;
        emu.told = false;
    }
    emu.lost = true;
    return true;
}

const char *emu_fault()
{
    emu.told = true;
    return emu.fault.c_str();
}

emu_counts emu_counted()
{
    std::lock_guard<std::recursive_mutex> guard(emu.lock);
    emu_counts r = emu.counts;
    r.device_bytes = simt_memory_used(SIMT_DEVICE);
    r.pinned_bytes = simt_memory_used(SIMT_PINNED);
    r.streams = emu.streams.size();
    r.events = emu.events.size();
    r.pending = 0;
    for (auto &x : emu.streams)
        r.pending += x.second->queue.size();
    return r;
}

uint64_t emu_kernel_count(const char *name)
{
    std::lock_guard<std::recursive_mutex> guard(emu.lock);
    uint64_t n = 0;
    for (auto &[full, count] : emu.kernels) {
        std::string plain = full[0] == '(' ? full.substr(1, full.size() - 2) : full;
        if (plain == name || plain.substr(0, plain.find('<')) == name)
            n += count;
    }
    return n;
}

enum : size_t { CLOSED_ALWAYS = 8 << 20 }; /* so much device memory is closed to the host after each wait */

/* ---- order ------------------------------------------------------------------------------------------------------------------ */

static bool happened(uint64_t stream, uint64_t until)
{
    auto s = emu.streams.find(stream);
    return s == emu.streams.end() || s->second->done >= until;
}

static void run_until(uint64_t stream, uint64_t until);

static void run_one(CUstream_st *s)
{
    work w = std::move(s->queue.front());
    if (w.stream)
        run_until(w.stream, w.until);
    s->queue.pop_front();
    if (w.run && !emu.lost)
        w.run();
    s->done++;
}

/* What must be done before `until` works of a stream are, and no more. What one waits for was queued before it, so this ends. */
static void run_until(uint64_t stream, uint64_t until)
{
    while (!happened(stream, until))
        run_one(emu.streams[stream]);
}

/* The same, from outside: device memory can be touched meanwhile, and not by the host after it. Closing and opening much memory costs more than the work in
 * between: then it is done once in a while. */
static void finish(uint64_t stream, uint64_t until)
{
    if (!happened(stream, until)) {
        simt_memory_open(true);
        run_until(stream, until);
    }
    if (simt_memory_used(SIMT_DEVICE) < CLOSED_ALWAYS || emu_random() % 16 == 0)
        simt_memory_open(false);
}

/* EMU_RANDOM: some of what may be done now: a few works of any stream, or now and then one stream's as far as they go, which is then far ahead of the others.
 * Here and in enqueue, device memory stays open until the host waits for something: it costs more than the work. */
static void stir()
{
    enum : uint64_t { FEW = 4, FAR = 64, SELDOM = 8 };
    if (emu_now.order != EMU_RANDOM || emu.streams.empty())
        return;
    simt_memory_open(true);
    bool far = emu_random() % SELDOM == 0;
    CUstream_st *stream = nullptr;
    for (uint64_t n = emu_random() % (far ? FAR : FEW); n > 0; n--) {
        if (!stream || !far) {
            auto s = emu.streams.begin();
            std::advance(s, (long)(emu_random() % emu.streams.size()));
            stream = s->second;
        }
        if (!stream->queue.empty() && (!stream->queue.front().stream || happened(stream->queue.front().stream, stream->queue.front().until)))
            run_one(stream);
    }
}

static void enqueue(CUstream_st *s, work w)
{
    s->queue.push_back(std::move(w));
    if (emu_now.order == EMU_EAGER) {
        simt_memory_open(true);
        run_until(s->number, s->end());
    }
}

static cudaError_t fail(cudaError_t e)
{
    if (e != cudaSuccess)
        emu.last = e;
    return e;
}

/* Every call of the runtime begins so: its turn, the device's end, other work that goes on meanwhile. */
static cudaError_t enter()
{
    if (!emu.ready)
        emu_reset(nullptr);
    emu.counts.calls++;
    if (!emu.lost && emu.calls_left >= 0 && emu.calls_left-- == 0)
        emu.lost = true;
    if (!emu.lost)
        stir();
    return emu.lost ? fail(cudaErrorLaunchFailure) : cudaSuccess;
}
#define ENTER                                                                                                                              \
    std::lock_guard<std::recursive_mutex> guard(emu.lock);                                                                                 \
    if (enter() != cudaSuccess)                                                                                                            \
    return cudaErrorLaunchFailure

static cudaError_t after()
{
    return emu.lost ? fail(cudaErrorLaunchFailure) : cudaSuccess;
}

static bool is_stream(cudaStream_t s)
{
    for (auto &x : emu.streams)
        if (x.second == s)
            return true;
    simt_fault("a stream that there is not: the null stream, or one that was destroyed");
    return false;
}

static bool is_event(cudaEvent_t e)
{
    if (emu.events.count(e))
        return true;
    simt_fault("an event that there is not, or that was destroyed");
    return false;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *ret, unsigned)
{
    ENTER;
    CUstream_st *s = new CUstream_st();
    s->number = ++emu.n_streams;
    emu.streams[s->number] = s;
    *ret = s;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    ENTER;
    if (!is_stream(s))
        return fail(cudaErrorInvalidResourceHandle);
    if (!s->queue.empty())
        simt_fault("a stream is destroyed before its last %zu pieces of work were waited for", s->queue.size());
    emu.streams.erase(s->number);
    delete s;
    return after();
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    ENTER;
    if (!is_stream(s))
        return fail(cudaErrorInvalidResourceHandle);
    emu.counts.syncs_stream++;
    finish(s->number, s->end());
    return after();
}

/* Asking makes it go on, sooner or later: the next answer may be another. "Not ready" is remembered like an error, as CUDA does. */
static cudaError_t query(uint64_t stream, uint64_t until)
{
    bool r = happened(stream, until);
    if (r || ++emu.asked >= emu_now.asks) {
        emu.asked = 0;
        finish(stream, until);
    }
    return emu.lost ? fail(cudaErrorLaunchFailure) : r ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaStreamQuery(cudaStream_t s)
{
    ENTER;
    return is_stream(s) ? query(s->number, s->end()) : fail(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned)
{
    ENTER;
    if (!is_stream(s) || !is_event(e))
        return fail(cudaErrorInvalidResourceHandle);
    if (e->stream)
        enqueue(s, {nullptr, e->stream, e->until});
    return after();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *ret, unsigned flags)
{
    ENTER;
    *ret = new CUevent_st();
    (*ret)->timed = !(flags & cudaEventDisableTiming);
    emu.events.insert(*ret);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    ENTER;
    if (!is_event(e))
        return fail(cudaErrorInvalidResourceHandle);
    emu.events.erase(e);
    delete e;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    ENTER;
    if (!is_stream(s) || !is_event(e))
        return fail(cudaErrorInvalidResourceHandle);
    if (e->timed) {
        e->at = 0;
        enqueue(s, {[e] { emu.events.count(e) ? void(e->at = now_ms()) : void(); }, 0, 0});
    }
    e->stream = s->number;
    e->until = s->end();
    return after();
}

cudaError_t cudaEventElapsedTime(float *ret, cudaEvent_t from, cudaEvent_t to)
{
    ENTER;
    if (!is_event(from) || !is_event(to) || !from->timed || !to->timed || !from->stream || !to->stream)
        return fail(cudaErrorInvalidResourceHandle);
    if (from->at == 0 || to->at == 0)
        return emu.lost ? fail(cudaErrorLaunchFailure) : cudaErrorNotReady;
    *ret = (float)(to->at - from->at);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    ENTER;
    if (!is_event(e))
        return fail(cudaErrorInvalidResourceHandle);
    emu.counts.syncs_event++;
    finish(e->stream, e->until);
    return after();
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    ENTER;
    return is_event(e) ? query(e->stream, e->until) : fail(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaDeviceSynchronize()
{
    ENTER;
    emu.counts.syncs_device++;
    for (auto &x : emu.streams)
        finish(x.first, x.second->end());
    return after();
}

/* ---- device ------------------------------------------------------------------------------------------------------------------- */

static size_t shared_opt_in()
{
    int cc = emu_now.major * 10 + emu_now.minor;
    return (size_t)(cc >= 90 ? 227 : cc == 80 || cc == 87 ? 163 : cc >= 80 ? 99 : 64) << 10;
}

cudaError_t cudaGetDeviceCount(int *n)
{
    ENTER;
    if (emu_now.driver < CUDART_VERSION)
        return fail(cudaErrorInsufficientDriver);
    if (!emu_now.n_devices)
        return fail(cudaErrorNoDevice);
    *n = emu_now.n_devices;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    ENTER;
    *version = emu_now.driver;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    ENTER;
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    ENTER;
    return device >= 0 && device < emu_now.n_devices ? cudaSuccess : fail(cudaErrorInvalidDevice);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int device)
{
    ENTER;
    if (device < 0 || device >= emu_now.n_devices)
        return fail(cudaErrorInvalidDevice);
    *prop = {};
    snprintf(prop->name, sizeof prop->name, "emulated GPU");
    prop->totalGlobalMem = emu_now.memory;
    prop->sharedMemPerBlock = 48 << 10;
    prop->sharedMemPerBlockOptin = shared_opt_in();
    prop->major = emu_now.major;
    prop->minor = emu_now.minor;
    prop->multiProcessorCount = 8;
    prop->maxThreadsPerBlock = SIMT_MAX_THREADS;
    prop->warpSize = SIMT_WARP;
    prop->l2CacheSize = 4 << 20;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr what, int device)
{
    cudaDeviceProp prop;
    cudaError_t r = cudaGetDeviceProperties(&prop, device);
    if (r == cudaSuccess)
        *value = what == cudaDevAttrMultiProcessorCount ? prop.multiProcessorCount : what == cudaDevAttrComputeCapabilityMajor ? prop.major
                 : what == cudaDevAttrComputeCapabilityMinor ? prop.minor : (int)prop.sharedMemPerBlockOptin;
    return r;
}

cudaError_t cudaGetLastError()
{
    ENTER;
    cudaError_t r = emu.last;
    emu.last = cudaSuccess;
    return r;
}

cudaError_t cudaPeekAtLastError()
{
    ENTER;
    return emu.last;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} error_texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
};

const char *cudaGetErrorString(cudaError_t error)
{
    for (auto &x : error_texts)
        if (x.error == error)
            return x.text;
    return "unknown error";
}

const char *cudaGetErrorName(cudaError_t error)
{
    for (auto &x : error_texts)
        if (x.error == error)
            return x.name;
    return "cudaErrorUnknown";
}

/* ---- memory ------------------------------------------------------------------------------------------------------------------- */

static cudaError_t allocate(simt_kind kind, void **p, size_t bytes, size_t most)
{
    void *r = bytes > most || simt_memory_used(kind) > most - bytes ? nullptr : simt_memory_new(kind, bytes);
    if (!r)
        return fail(cudaErrorMemoryAllocation);
    emu.counts.allocations++;
    *p = r;
    return cudaSuccess;
}

/* Of a lost device too, whose memory the program still gives back. */
static cudaError_t give_back(simt_kind kind, void *p)
{
    std::lock_guard<std::recursive_mutex> guard(emu.lock);
    cudaError_t r = enter();
    if (p && !simt_memory_free(kind, p)) {
        simt_fault("%s of %p, which it did not give", kind == SIMT_DEVICE ? "cudaFree" : "cudaFreeHost", p);
        return fail(cudaErrorInvalidValue);
    }
    return r;
}

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    ENTER;
    return allocate(SIMT_DEVICE, p, bytes, emu_now.memory);
}

cudaError_t cudaFree(void *p)
{
    return give_back(SIMT_DEVICE, p);
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned)
{
    ENTER;
    return allocate(SIMT_PINNED, p, bytes, emu_now.pinned);
}

cudaError_t cudaFreeHost(void *p)
{
    return give_back(SIMT_PINNED, p);
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total)
{
    ENTER;
    *total = emu_now.memory;
    *free = emu_now.memory - simt_memory_used(SIMT_DEVICE);
    return cudaSuccess;
}

/* ---- copies ------------------------------------------------------------------------------------------------------------------- */

static void count_copy(simt_kind to, simt_kind from, size_t bytes)
{
    bool in = to == SIMT_DEVICE && from != SIMT_DEVICE, out = from == SIMT_DEVICE && to != SIMT_DEVICE;
    (in ? emu.counts.copies_in : out ? emu.counts.copies_out : emu.counts.copies_inside)++;
    (in ? emu.counts.bytes_in : out ? emu.counts.bytes_out : emu.counts.bytes_inside) += bytes;
    emu.counts.copies_waited += to == SIMT_PAGEABLE || from == SIMT_PAGEABLE;
}

static bool kind_fits(cudaMemcpyKind kind, simt_kind to, simt_kind from)
{
    if (kind == cudaMemcpyDefault)
        return true;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    return to_device == (to == SIMT_DEVICE) && from_device == (from == SIMT_DEVICE);
}

/* As CUDA documents of cudaMemcpyAsync: a pageable source is read before the call returns, a pageable destination is written before it returns. */
cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t s)
{
    ENTER;
    if (!is_stream(s))
        return fail(cudaErrorInvalidResourceHandle);
    if (!width || !height)
        return cudaSuccess;
    if (width > dst_pitch || width > src_pitch)
        return fail(cudaErrorInvalidValue);
    simt_kind to = simt_memory_kind(dst, dst_pitch * (height - 1) + width, "a copy's destination");
    simt_kind from = simt_memory_kind(src, src_pitch * (height - 1) + width, "a copy's source");
    if (!kind_fits(kind, to, from)) {
        simt_fault("a copy's kind is %d, its destination %s and its source %s memory", (int)kind, to == SIMT_DEVICE ? "device" : "host",
                   from == SIMT_DEVICE ? "device" : "host");
        return fail(cudaErrorInvalidValue);
    }
    if (emu.lost)
        return after();
    count_copy(to, from, width * height);
    if (from == SIMT_PAGEABLE && to != SIMT_PAGEABLE) {
        auto staged = std::make_shared<std::vector<char>>(width * height);
        for (size_t i = 0; i < height; i++)
            memcpy(staged->data() + i * width, (const char *)src + i * src_pitch, width);
        enqueue(s, {[=] {
                        for (size_t i = 0; i < height; i++)
                            memcpy((char *)dst + i * dst_pitch, staged->data() + i * width, width);
                    }, 0, 0});
    } else {
        enqueue(s, {[=] {
                        for (size_t i = 0; i < height; i++)
                            memcpy((char *)dst + i * dst_pitch, (const char *)src + i * src_pitch, width);
                    }, 0, 0});
        if (to == SIMT_PAGEABLE)
            finish(s->number, s->end());
    }
    return after();
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, cudaStream_t s)
{
    return cudaMemcpy2DAsync(dst, bytes, src, bytes, bytes, 1, kind, s);
}

cudaError_t cudaMemsetAsync(void *p, int byte, size_t bytes, cudaStream_t s)
{
    ENTER;
    if (!is_stream(s))
        return fail(cudaErrorInvalidResourceHandle);
    if (simt_memory_kind(p, bytes, "cudaMemsetAsync") == SIMT_PAGEABLE) {
        simt_fault("cudaMemsetAsync of %p, which is the host's memory", p);
        return fail(cudaErrorInvalidValue);
    }
    enqueue(s, {[=] { memset(p, byte, bytes); }, 0, 0});
    return after();
}

/* ---- kernels ------------------------------------------------------------------------------------------------------------------ */

cudaError_t simt_func_set_attribute(const void *kernel, cudaFuncAttribute what, int value)
{
    ENTER;
    if (what != cudaFuncAttributeMaxDynamicSharedMemorySize)
        return cudaSuccess;
    if (value < 0 || (size_t)value > shared_opt_in())
        return fail(cudaErrorInvalidValue);
    emu.shared_most[kernel] = value;
    return cudaSuccess;
}

void simt_check_argument(const char *kernel, int number, const void *p)
{
    std::lock_guard<std::recursive_mutex> guard(emu.lock);
    if (p && simt_memory_kind(p, 0, kernel) == SIMT_PAGEABLE)
        simt_fault("kernel %s: argument %d points to %p, which is pageable memory of the host", kernel, number, p);
}

cudaError_t simt_queue(const simt_grid &g, cudaStream_t s)
{
    ENTER;
    if (!is_stream(s))
        return fail(cudaErrorInvalidResourceHandle);
    size_t n_threads = (size_t)g.block.x * g.block.y * g.block.z, n_blocks = (size_t)g.grid.x * g.grid.y * g.grid.z;
    if (!n_threads || n_threads > SIMT_MAX_THREADS || g.block.z > 64 || !n_blocks || g.grid.x > 0x7fffffffu || g.grid.y > 65535 || g.grid.z > 65535) {
        simt_fault("kernel %s: a grid of (%u,%u,%u) blocks of (%u,%u,%u) threads", g.name, g.grid.x, g.grid.y, g.grid.z, g.block.x, g.block.y, g.block.z);
        return fail(cudaErrorInvalidConfiguration);
    }
    auto most = emu.shared_most.find(g.kernel);
    size_t shared_most = most == emu.shared_most.end() ? (size_t)48 << 10 : (size_t)most->second;
    if (g.shared_bytes > shared_most) {
        simt_fault("kernel %s: %zu bytes of shared memory, and %zu is the most for it", g.name, g.shared_bytes, shared_most);
        return fail(cudaErrorInvalidValue);
    }
    emu.counts.kernels++;
    emu.kernels[g.name]++;
    enqueue(s, {[g] { simt_run(g); }, 0, 0});
    return after();
}

void emu_queue(cudaStream_t s, std::function<void()> run)
{
    std::lock_guard<std::recursive_mutex> guard(emu.lock);
    if (enter() != cudaSuccess || !is_stream(s))
        return;
    emu.counts.products++;
    enqueue(s, {std::move(run), 0, 0});
}
