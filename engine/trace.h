/* What the engine's threads and a GPU's queues did and when, as a file for trace viewers (Perfetto, chrome://tracing): the Trace Event Format's complete
 * events and thread names (Google, "Trace Event Format", 2016), one track a thread and one a queue.
 *
 * A thread is traced once it has attached itself, and so are those that it starts for the engine. Without a trace an event costs one load and one branch;
 * with one, two readings of the clock and forty bytes of the track's ring, which was allocated when the track was made. A full ring forgets its oldest
 * events, which are counted.
 *
 * Threads: a track is written by one thread at a time. eng_trace_write may be called by any thread while others go on: it leaves out what is overwritten
 * meanwhile. Functions marked [any] may be called by any thread.
 */
#ifndef RETRIEVALD_TRACE_H
#define RETRIEVALD_TRACE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "clock.h"

typedef struct eng_trace eng_trace;
typedef struct eng_trace_track eng_trace_track;

enum { ENG_TRACE_EVENTS = 1 << 17 }; /* that a track holds */

/* Creates the file, or takes one that is empty or an older trace. Anything else under that name is refused and stays as it is. -errno. */
int eng_trace_open(const char *path, eng_trace **ret, char *err, size_t errlen);

/* Everything that the tracks hold, in place of what the file held. [any] -errno. ret_events, ret_forgotten: how many are in it, and are not; may be NULL. */
int eng_trace_write(eng_trace *t, uint64_t *ret_events, uint64_t *ret_forgotten, char *err, size_t errlen);

/* After all threads of its tracks have ended or left. NULL is fine. Writes nothing. */
void eng_trace_free(eng_trace *t);

/* The calling thread's events go to a new track from now on. A NULL trace: as before. -ENOMEM. Leaving makes it untraced. */
int eng_trace_attach(eng_trace *t, const char *name);
void eng_trace_leave(void);

/* A new track in the calling thread's trace, for a thread that it is about to start, which then calls eng_trace_use, or for a GPU's queue. *ret is NULL
 * where the caller is not traced. The trace owns it. -ENOMEM. */
int eng_trace_track_new(const char *name, eng_trace_track **ret);
void eng_trace_use(eng_trace_track *k);

/* An event from begin_ns to end_ns of eng_now_ns. A NULL track: nothing. Texts are constants, of characters that JSON takes as they are; what: the meaning
 * of n, as "layer"; NULL: n has none. */
void eng_trace_add(eng_trace_track *k, const char *name, const char *what, int64_t n, uint64_t begin_ns, uint64_t end_ns);

/* ---- what the calling thread does: uint64_t t = eng_trace_begin(); ...; eng_trace_end(t, "layer", "layer", 3); ------------------------------------- */

extern _Thread_local eng_trace_track *eng_trace_mine; /* NULL: not traced */

static inline uint64_t eng_trace_begin(void)
{
    return __builtin_expect(eng_trace_mine != NULL, 0) ? eng_now_ns() : 0;
}

static inline void eng_trace_end(uint64_t begin_ns, const char *name, const char *what, int64_t n)
{
    if (__builtin_expect(begin_ns != 0, 0))
        eng_trace_add(eng_trace_mine, name, what, n, begin_ns, eng_now_ns());
}

#endif
