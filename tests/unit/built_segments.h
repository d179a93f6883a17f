/* Segments with what is built over their keys: those of one text are the same, byte by byte, however much is built. */
#ifndef RETRIEVALD_TESTS_BUILT_SEGMENTS_H
#define RETRIEVALD_TESTS_BUILT_SEGMENTS_H

#include "index_work.h"
#include "segments.h"

static inline void build_all(eng_pool *pool, eng_segment *s)
{
    eng_index_work *w;
    ck_assert_int_eq(eng_index_work_new(pool, &w), 0);
    ck_assert_int_eq(eng_index_work_add(w, s), 0);
    while (eng_index_work_run(w, UINT64_MAX, NULL))
        ;
    eng_index_work_free(w);
}

/* f16 numbers that can be clustered. */
static inline void fill_finite(uint16_t *to, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (uint16_t)(0x3400 | ((i + seed) * 2654435761u >> 20 & 0x83ff));
}

/* With codes, and with clusters and the queries that stay of those they are built from. */
static inline eng_segment *built_segment(eng_pool *pool, const int32_t *ids, uint32_t n, bool clusters)
{
    enum { QUERIES = 100 };
    eng_segment *s = segment(NULL, 0, ids, n, true);
    fill_finite((uint16_t *)(void *)s->kv, s->kv_bytes / 2, (uint32_t)ids[0]);
    if (clusters) {
        s->wants = ENG_WANT_CLUSTER;
        ck_assert_int_eq(eng_segment_alloc_queries(s, QUERIES), 0);
        fill_finite(s->queries, (size_t)QUERIES * s->shape->n_layer * s->shape->n_head_kv * s->shape->group * s->shape->head_dim, 1);
        for (; s->m < QUERIES; s->m++)
            s->query_row[s->m] = (s->m + 1) * n / QUERIES - 1;
    }
    build_all(pool, s);
    ck_assert(eng_segment_coded(s) && (!clusters || (eng_segment_has(s, s->cluster) && s->kept)));
    return s;
}

/* The same keys and values, codes, and clusters if there should be any, with their queries. */
static inline bool same_as_built(const eng_segment *s, const eng_segment *want, bool clusters)
{
    bool ok = s->n == want->n && !memcmp(s->ids, want->ids, s->n * sizeof *s->ids) && !memcmp(s->kv, want->kv, want->kv_bytes) && eng_segment_coded(s) &&
              eng_segment_has(s, s->cluster) == clusters && s->m == (clusters ? want->m : 0);
    for (uint32_t i = 0; ok && i < s->shape->n_layer * s->shape->n_head_kv; i++)
        for (int kind = 0; ok && kind <= clusters; kind++) {
            size_t a, b;
            const void *pa = idx_arena((kind ? s->cluster : s->codes)[i], &a), *pb = idx_arena((kind ? want->cluster : want->codes)[i], &b);
            ok = a == b && !memcmp(pa, pb, a);
        }
    return ok;
}

#endif
