/* What the GPU's queues do, on tracks of their own (trace.h). Spans are marked by timed events, and turned into the host's time where a call ends: when the GPU was at
 * the call's first mark is known, since a traced call waits for that one. Untraced, a mark costs a branch.
 */
#include "gpu_layers_private.h"

#include "trace.h"

#include <errno.h>
#include <stdlib.h>

typedef struct {
    gpu_event *begin, *end;
    const char *name;
    uint32_t layer;
    gpu_queue queue;
} span;

struct gpul_trace {
    eng_trace_track *tracks[GPU_QUEUES];
    gpu_event *base;
    uint64_t base_ns;
    span *spans;        /* those of other calls keep their events */
    uint32_t n, cap, made;
};

int gpul_trace_open(eng_gpu *u)
{
    static const char *const names[GPU_QUEUES] = {[GPU_COMPUTE] = "gpu compute", [GPU_TO_DEVICE] = "gpu to device", [GPU_TO_HOST] = "gpu to host"};
    if (!eng_trace_mine)
        return 0;
    struct gpul_trace *t = u->trace = calloc(1, sizeof *t);
    int r = t ? gpu_event_new(u->g, true, &t->base) : -ENOMEM;
    for (int i = 0; i < GPU_QUEUES && r == 0; i++)
        r = eng_trace_track_new(names[i], &t->tracks[i]);
    return r;
}

void gpul_trace_close(eng_gpu *u)
{
    struct gpul_trace *t = u->trace;
    if (!t)
        return;
    for (uint32_t i = 0; i < t->made; i++) {
        gpu_event_free(u->g, t->spans[i].begin);
        gpu_event_free(u->g, t->spans[i].end);
    }
    gpu_event_free(u->g, t->base);
    free(t->spans);
    free(t);
    u->trace = NULL;
}

void gpul_trace_start(eng_gpu *u)
{
    struct gpul_trace *t = u->trace;
    if (!t)
        return;
    t->n = 0;
    gpu_record(u->g, t->base, GPU_COMPUTE);
    gpu_finish(u->g, t->base);
    t->base_ns = eng_now_ns();
}

/* The next span, with events. NULL: there is no memory for it, and it is left out. */
static span *next_span(eng_gpu *u)
{
    struct gpul_trace *t = u->trace;
    if (t->n == t->cap) {
        uint32_t cap = t->cap * 2 + 256;
        span *more = realloc(t->spans, cap * sizeof *more);
        if (!more)
            return NULL;
        t->spans = more;
        t->cap = cap;
    }
    span *s = &t->spans[t->n];
    if (t->n == t->made) {
        *s = (span){0};
        if (gpu_event_new(u->g, true, &s->begin) < 0)
            return NULL;
        if (gpu_event_new(u->g, true, &s->end) < 0) {
            gpu_event_free(u->g, s->begin);
            return NULL;
        }
        t->made++;
    }
    t->n++;
    return s;
}

uint32_t gpul_mark_begin(eng_gpu *u, gpu_queue q, const char *name, uint32_t layer)
{
    span *s = u->trace ? next_span(u) : NULL;
    if (!s)
        return 0;
    s->name = name;
    s->layer = layer;
    s->queue = q;
    gpu_record(u->g, s->begin, q);
    return u->trace->n;
}

void gpul_mark_end(eng_gpu *u, uint32_t mark)
{
    if (mark)
        gpu_record(u->g, u->trace->spans[mark - 1].end, u->trace->spans[mark - 1].queue);
}

void gpul_trace_end(eng_gpu *u)
{
    struct gpul_trace *t = u->trace;
    if (!t || gpu_drain(u->g) < 0)
        return;
    for (uint32_t i = 0; i < t->n; i++) {
        const span *s = &t->spans[i];
        double begin, end;
        if (gpu_elapsed(u->g, t->base, s->begin, &begin) < 0 || gpu_elapsed(u->g, t->base, s->end, &end) < 0)
            return;
        eng_trace_add(t->tracks[s->queue], s->name, "layer", s->layer, t->base_ns + (uint64_t)(begin > 0 ? begin * 1e6 : 0), t->base_ns + (uint64_t)(end > 0 ? end * 1e6 : 0));
    }
    t->n = 0;
}
