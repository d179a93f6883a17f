/* The emulated GPU, for tests: how it is, what it saw. See README.md. */
#ifndef RETRIEVALD_EMU_H
#define RETRIEVALD_EMU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* When queued work is done. Right programs give the same answers in each. */
typedef enum {
    EMU_LATE,  /* when the host waits for it or for what it comes before, and no more than that */
    EMU_EAGER, /* at once */
    EMU_RANDOM /* any time that the queues and events allow, drawn from the seed */
} emu_order;

typedef struct {
    int n_devices;           /* 1 */
    int driver;              /* CUDA version it knows, as 13000; less than the runtime's: "insufficient driver"; 0: none */
    int major, minor;        /* 8, 0 */
    size_t memory;           /* 4 GiB */
    size_t pinned;           /* most that can be pinned: 4 GiB */
    long lose_after;         /* the device fails for ever at the call after so many; -1: never */
    uint64_t asks;           /* so often an event says that it has not happened before it does: 1 */
    emu_order order;
    uint64_t seed;           /* of the order of threads, blocks and work */
    bool guard;              /* true: device memory faults in host code too. It has its price: pages change hands around everything the device does */
    bool catch_faults;       /* keep the first fault for emu_fault instead of aborting. The device is lost then */
} emu_options;
emu_options emu_defaults(void); /* order and seed from $EMU_ORDER (late, eager, random) and $EMU_SEED, if set */

/* A new device, everything of the last one is gone. NULL: defaults. Without a call there is one of the defaults. */
void emu_reset(const emu_options *o);
/* What was caught, "" when nothing was; the next call tells of later ones. */
const char *emu_fault(void);

/* Since emu_reset. */
typedef struct {
    uint64_t calls;                                    /* of the runtime */
    uint64_t syncs_device, syncs_stream, syncs_event;  /* the host waited for: everything, a stream, an event */
    uint64_t kernels, products;                        /* launches; calls of cuBLAS */
    uint64_t copies_in, copies_out, copies_inside;     /* host to device, device to host, device to device */
    uint64_t bytes_in, bytes_out, bytes_inside;
    uint64_t copies_waited;                            /* of these, with pageable memory: the host had to wait for its end, or for the staging */
    uint64_t allocations;                              /* of device and pinned memory */
    size_t device_bytes, pinned_bytes, streams, events; /* now */
    size_t pending;                                    /* works queued and not done, now */
} emu_counts;
emu_counts emu_counted(void);
/* Launches of a kernel; of all instances of a template when name has no <. */
uint64_t emu_kernel_count(const char *name);

#ifdef __cplusplus
}
#endif
#endif
