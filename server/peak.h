/* What the machine's memory gives, beside which a benchmark puts what it used. */
#ifndef RETRIEVALD_SERVER_PEAK_H
#define RETRIEVALD_SERVER_PEAK_H

#include <stdint.h>

/* Bytes a second that n_threads read from memory, the best of several passes; takes some tenths of a second. 0: no memory to try with. */
double srv_peak_read(uint32_t n_threads);

#endif
