#include "segment.h"

#include "quant.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Arenas are mapped, not taken from the heap: they are large, come as zero pages, and go back to the system at once. */
static void *arena_new(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

static size_t align64(size_t n)
{
    return (n + 63) & ~(size_t)63;
}

size_t eng_kv_row_bytes(eng_kv_type t, uint32_t d)
{
    if (t == ENG_KV_Q8_0)
        return ((size_t)d + 31) / 32 * sizeof(eng_q8_0);
    return (size_t)d * (t == ENG_KV_F32 ? 4 : 2);
}

size_t eng_kv_bytes_per_token(const eng_kv_shape *s)
{
    return (size_t)s->n_layer * s->n_head_kv * (s->row_k + s->row_v);
}

static void layout(const eng_kv_shape *shape, uint32_t cap, size_t *ret_v_offset, size_t *ret_head_bytes, size_t *ret_bytes)
{
    *ret_v_offset = align64((size_t)cap * shape->row_k);
    *ret_head_bytes = *ret_v_offset + align64((size_t)cap * shape->row_v);
    *ret_bytes = *ret_head_bytes * shape->n_layer * shape->n_head_kv;
}

size_t eng_segment_kv_bytes(const eng_kv_shape *shape, uint32_t cap)
{
    size_t v_offset, head_bytes, bytes;
    layout(shape, cap, &v_offset, &head_bytes, &bytes);
    return bytes;
}

/* Of query_squares. */
static size_t square_bytes(const eng_kv_shape *h)
{
    return (size_t)h->n_layer * h->n_head_kv * h->head_dim * sizeof(float);
}

size_t eng_segment_bytes_for(const eng_kv_shape *shape, uint32_t cap)
{
    return eng_segment_kv_bytes(shape, cap) + (size_t)cap * sizeof(int32_t) + square_bytes(shape);
}

/* All but keys and values; no segment has 0 tokens. */
static int new_empty(const eng_kv_shape *shape, uint32_t start, uint32_t cap, bool exact, eng_segment **ret)
{
    eng_segment *s = cap ? calloc(1, sizeof *s) : NULL;
    if (!s)
        return cap ? -ENOMEM : -EINVAL;
    s->shape = shape;
    s->refs = 1;
    s->start = start;
    s->cap = cap;
    s->exact = exact;
    layout(shape, cap, &s->v_offset, &s->head_bytes, &s->kv_bytes);
    s->ids = malloc((size_t)cap * sizeof *s->ids);
    s->index = calloc((size_t)shape->n_layer * shape->n_head_kv, sizeof(idx_index *));
    s->codes = calloc((size_t)shape->n_layer * shape->n_head_kv, sizeof(idx_index *));
    s->cluster = calloc((size_t)shape->n_layer * shape->n_head_kv, sizeof(idx_index *));
    s->ivf = calloc((size_t)shape->n_layer * shape->n_head_kv, sizeof(idx_index *));
    s->members = calloc((size_t)shape->n_layer * shape->n_head_kv, sizeof(uint32_t *));
    s->query_squares = calloc(1, square_bytes(shape));
    *ret = s;
    if (s->ids && s->query_squares && s->index && s->codes && s->cluster && s->ivf && s->members)
        return 0;
    eng_segment_unref(s);
    return -ENOMEM;
}

static void set_parent(eng_segment *s, eng_segment *parent)
{
    s->parent = parent ? eng_segment_ref(parent) : NULL;
    s->tenant = parent ? parent->tenant : 0;
}

int eng_segment_new(const eng_kv_shape *shape, eng_segment *parent, uint32_t start, uint32_t cap, bool exact, eng_segment **ret)
{
    eng_segment *s;
    int r = new_empty(shape, start, cap, exact, &s);
    if (r < 0)
        return r;
    s->kv = arena_new(s->kv_bytes);
    if (!s->kv) {
        eng_segment_unref(s);
        return -ENOMEM;
    }
    set_parent(s, parent);
    *ret = s;
    return 0;
}

int eng_segment_new_mapped(const eng_kv_shape *shape, eng_segment *parent, uint32_t start, uint32_t n, bool exact, eng_mapping *map, eng_segment **ret)
{
    eng_segment *s;
    int r = new_empty(shape, start, n, exact, &s);
    if (r < 0) {
        eng_mapping_free(map);
        return r;
    }
    s->map = map;
    s->kv = eng_mapping_data(map);
    set_parent(s, parent);
    *ret = s;
    return 0;
}

static size_t code_bytes(const eng_segment *s)
{
    return s->code_stride * s->shape->n_layer * s->shape->n_head_kv;
}

void eng_segment_alloc_codes(eng_segment *s, size_t stride)
{
    if (s->code_memory)
        return;
    s->code_stride = stride;
    s->code_memory = stride ? arena_new(code_bytes(s)) : NULL;
}

void eng_segment_free_codes(eng_segment *s)
{
    for (size_t i = 0; s->codes && i < (size_t)s->shape->n_layer * s->shape->n_head_kv; i++) {
        idx_free(s->codes[i]);
        s->codes[i] = NULL;
    }
    if (s->code_memory)
        munmap(s->code_memory, code_bytes(s));
    s->code_memory = NULL;
}

eng_segment *eng_segment_ref(eng_segment *s)
{
    s->refs++;
    return s;
}

void eng_segment_unref(eng_segment *s)
{
    while (s && --s->refs == 0) { /* a loop: chains may be long */
        eng_segment *parent = s->parent;
        if (s->map)
            eng_mapping_free(s->map);
        else if (s->kv)
            munmap(s->kv, s->kv_bytes);
        for (size_t i = 0; i < (size_t)s->shape->n_layer * s->shape->n_head_kv; i++) {
            if (s->index)
                idx_free(s->index[i]);
            if (s->cluster)
                idx_free(s->cluster[i]);
            if (s->ivf)
                idx_free(s->ivf[i]);
            if (s->members)
                free(s->members[i]);
        }
        eng_segment_free_codes(s);
        eng_segment_free_queries(s);
        free(s->index);
        free(s->codes);
        free(s->cluster);
        free(s->ivf);
        free(s->members);
        free(s->replaces);
        free(s->ids);
        free(s->query_squares);
        free(s);
        s = parent;
    }
}

bool eng_segment_has(const eng_segment *s, idx_index *const *all)
{
    for (uint32_t i = 0; i < s->shape->n_layer * s->shape->n_head_kv; i++)
        if (!all[i] && !eng_kv_window(s->shape, i / s->shape->n_head_kv))
            return false;
    return true;
}

bool eng_segment_estimates_graphs(const eng_segment *s)
{
    for (uint32_t i = 0; i < s->shape->n_layer * s->shape->n_head_kv; i++)
        if (!s->members[i] && !eng_kv_window(s->shape, i / s->shape->n_head_kv))
            return false;
    return eng_segment_has(s, s->index);
}

bool eng_segment_note_members(eng_segment *s, uint32_t item)
{
    s->members[item] = malloc(s->n * sizeof *s->members[item]);
    if (s->members[item])
        idx_codes_members(s->cluster[item], s->members[item]);
    return s->members[item];
}

static size_t query_bytes(const eng_segment *s)
{
    const eng_kv_shape *h = s->shape;
    return (size_t)h->n_layer * h->n_head_kv * s->m_cap * h->group * h->head_dim * sizeof(uint16_t);
}

static uint32_t layers_before(const eng_kv_shape *h, uint32_t layer)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < layer; i++)
        n += !eng_kv_window(h, i);
    return n;
}

/* Of one of a head. */
static size_t kept_query(const eng_kv_shape *h)
{
    return h->head_dim + sizeof(uint16_t);
}

size_t eng_segment_kept_bytes(const eng_segment *s)
{
    return (size_t)s->m * s->shape->group * kept_query(s->shape);
}

uint8_t *eng_segment_kept(const eng_segment *s, uint32_t layer, uint32_t head)
{
    return s->kept + ((size_t)layers_before(s->shape, layer) * s->shape->n_head_kv + head) * eng_segment_kept_bytes(s);
}

static size_t all_kept_bytes(const eng_segment *s)
{
    return (size_t)layers_before(s->shape, s->shape->n_layer) * s->shape->n_head_kv * eng_segment_kept_bytes(s);
}

size_t eng_segment_bytes(const eng_segment *s)
{
    size_t rows = s->query_row ? s->m_cap * sizeof *s->query_row : 0, kept = s->kept ? all_kept_bytes(s) : 0;
    return s->kv_bytes + (size_t)s->cap * sizeof *s->ids + s->index_bytes + square_bytes(s->shape) + rows + kept + (s->queries ? query_bytes(s) : 0);
}

int eng_segment_alloc_queries(eng_segment *s, uint32_t m_cap)
{
    s->m_cap = m_cap;
    s->m = 0;
    s->queries = arena_new(query_bytes(s));
    s->query_row = malloc((size_t)m_cap * sizeof *s->query_row);
    if (!s->queries || !s->query_row) {
        eng_segment_free_queries(s);
        return -ENOMEM;
    }
    return 0;
}

void eng_segment_free_queries(eng_segment *s)
{
    if (s->queries)
        munmap(s->queries, query_bytes(s));
    free(s->query_row);
    free(s->kept);
    s->queries = NULL;
    s->kept = NULL;
    s->query_row = NULL;
    s->m = s->m_cap = 0;
}

int eng_segment_alloc_kept(eng_segment *s, uint32_t m)
{
    s->m = s->m_cap = m;
    s->kept = malloc(all_kept_bytes(s) + 1);
    s->query_row = malloc((size_t)m * sizeof *s->query_row);
    if (s->kept && s->query_row)
        return 0;
    eng_segment_free_queries(s);
    return -ENOMEM;
}

/* One query of d elements to its codes and, behind them, its scale. */
static void thin_query(const uint16_t *q, uint32_t d, uint8_t *to)
{
    float most = 0;
    for (uint32_t j = 0; j < d; j++) {
        float x = fabsf(eng_f16_to_f32(q[j]));
        most = x > most ? x : most;
    }
    uint16_t scale = eng_f32_to_f16(most / 127 * (1 + 0x1p-10f)); /* so that rounding it down is no overflow */
    float unit = eng_f16_to_f32(scale);
    bool good = unit > 0 && unit < INFINITY;
    for (uint32_t j = 0; j < d; j++)
        to[j] = (uint8_t)(good ? (int8_t)lrintf(fmaxf(fminf(eng_f16_to_f32(q[j]) / unit, 127), -127)) : 0);
    memcpy(to + d, &scale, sizeof scale);
}

void eng_segment_thin_queries(eng_segment *s)
{
    const eng_kv_shape *h = s->shape;
    uint32_t m = s->n / (ENG_KEYS_PER_KEPT_QUERY * h->group), of = s->m, *rows = s->query_row;
    if (!s->queries)
        return;
    m = m < of ? m : of;
    uint16_t *queries = s->queries;
    size_t bytes = query_bytes(s), per = (size_t)h->group * h->head_dim;
    uint32_t cap = s->m_cap;
    s->queries = NULL;
    s->query_row = NULL;
    if (!m || eng_segment_alloc_kept(s, m) < 0)
        eng_segment_free_queries(s);
    for (uint32_t layer = 0; layer < h->n_layer && s->kept; layer++)
        for (uint32_t item = 0; item < h->n_head_kv * m && !eng_kv_window(h, layer); item++) {
            const uint16_t *q = queries + (((size_t)layer * h->n_head_kv + item / m) * cap + (uint32_t)((uint64_t)(item % m) * of / m)) * per;
            uint8_t *to = eng_segment_kept(s, layer, item / m) + (size_t)(item % m) * h->group * kept_query(h);
            for (uint32_t g = 0; g < h->group; g++, q += h->head_dim, to += kept_query(h))
                thin_query(q, h->head_dim, to);
        }
    for (uint32_t i = 0; i < m && s->kept; i++)
        s->query_row[i] = rows[(uint64_t)i * of / m];
    munmap(queries, bytes);
    free(rows);
}

void eng_segment_load_query(const eng_segment *s, uint32_t layer, uint32_t head, uint32_t i, uint16_t *ret)
{
    const eng_kv_shape *h = s->shape;
    if (s->queries) {
        memcpy(ret, eng_segment_query(s, layer, head, i), (size_t)h->group * h->head_dim * sizeof *ret);
        return;
    }
    const uint8_t *from = eng_segment_kept(s, layer, head) + (size_t)i * h->group * kept_query(h);
    for (uint32_t g = 0; g < h->group; g++, from += kept_query(h)) {
        uint16_t scale;
        memcpy(&scale, from + h->head_dim, sizeof scale);
        float unit = eng_f16_to_f32(scale);
        for (uint32_t j = 0; j < h->head_dim; j++)
            ret[g * h->head_dim + j] = eng_f32_to_f16(fmaxf(fminf(unit * (int8_t)from[j], 65504), -65504)); /* f16's largest */
    }
}

int eng_segment_copy(const eng_segment *src, uint32_t lo, uint32_t hi, eng_segment *parent, bool exact, eng_segment **ret)
{
    const eng_kv_shape *h = src->shape;
    eng_segment *s;
    int r = eng_segment_new(h, parent, src->start + lo, hi - lo, exact, &s);
    if (r < 0)
        return r;
    s->n = hi - lo;
    s->tenant = src->tenant;
    memcpy(s->ids, src->ids + lo, (size_t)s->n * sizeof *s->ids);
    memcpy(s->query_squares, src->query_squares, square_bytes(h));
    for (uint32_t layer = 0; layer < h->n_layer; layer++)
        for (uint32_t head = 0; head < h->n_head_kv; head++) {
            memcpy(eng_segment_k(s, layer, head, 0), eng_segment_k(src, layer, head, lo), (size_t)s->n * h->row_k);
            memcpy(eng_segment_v(s, layer, head, 0), eng_segment_v(src, layer, head, lo), (size_t)s->n * h->row_v);
        }
    uint32_t m = src->queries && lo == 0 ? src->m : 0;
    while (m && src->query_row[m - 1] >= hi)
        m--;
    if (m && eng_segment_alloc_queries(s, m) == 0) { /* without them there will be codes alone: no reason to fail */
        s->m = m;
        s->wants = src->wants;
        memcpy(s->query_row, src->query_row, (size_t)s->m * sizeof *s->query_row);
        size_t per = (size_t)h->group * h->head_dim * sizeof(uint16_t);
        for (uint32_t layer = 0; layer < h->n_layer; layer++)
            for (uint32_t head = 0; head < h->n_head_kv; head++)
                memcpy(eng_segment_query(s, layer, head, 0), eng_segment_query(src, layer, head, 0), s->m * per);
    }
    *ret = s;
    return 0;
}

void eng_segment_shift(eng_segment *s, uint32_t n)
{
    const eng_kv_shape *h = s->shape;
    uint32_t left = s->n - n;
    memmove(s->ids, s->ids + n, (size_t)left * sizeof *s->ids);
    for (uint32_t layer = 0; layer < h->n_layer; layer++)
        for (uint32_t head = 0; head < h->n_head_kv; head++) {
            memmove(eng_segment_k(s, layer, head, 0), eng_segment_k(s, layer, head, n), (size_t)left * h->row_k);
            memmove(eng_segment_v(s, layer, head, 0), eng_segment_v(s, layer, head, n), (size_t)left * h->row_v);
        }
    s->start += n;
    s->n = left;
}

int eng_view_reserve(eng_view *v, uint32_t more)
{
    if (v->n_spans + more <= v->cap_spans)
        return 0;
    uint32_t cap = 2 * v->cap_spans + more;
    eng_span *p = realloc(v->spans, (size_t)cap * sizeof *p);
    if (!p)
        return -ENOMEM;
    v->spans = p;
    v->cap_spans = cap;
    return 0;
}

int eng_view_add(eng_view *v, eng_segment *seg, uint32_t lo, uint32_t hi)
{
    int r = eng_view_reserve(v, 1);
    if (r < 0)
        return r;
    v->spans[v->n_spans++] = (eng_span){eng_segment_ref(seg), lo, hi};
    return 0;
}

void eng_view_done(eng_view *v)
{
    for (uint32_t i = 0; i < v->n_spans; i++)
        eng_segment_unref(v->spans[i].seg);
    free(v->spans);
    *v = (eng_view){0};
}

uint32_t eng_view_find(const eng_view *v, uint32_t pos)
{
    uint32_t lo = 0, hi = v->n_spans - 1;
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        if (v->spans[mid].hi <= pos)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}
