/* What the machine's memory gives, beside which a benchmark puts what it used. */
#ifndef RETRIEVALD_SERVER_PEAK_H
#define RETRIEVALD_SERVER_PEAK_H

#include <sched.h>
#include <stdint.h>

/* Bytes a second that n_threads read from memory, the best of several passes; takes some tenths of a second. 0: no memory to try with.
 * cpus: where they may run. An open engine keeps its caller, and with it what the caller starts, off the workers' cores; so these are to be
 * asked for before it is opened; none: not known. */
double srv_peak_read(uint32_t n_threads, const cpu_set_t *cpus);

#endif
