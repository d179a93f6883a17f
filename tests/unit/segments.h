/* Segments whose rows tell which token, layer and head they belong to. */
#ifndef RETRIEVALD_TESTS_SEGMENTS_H
#define RETRIEVALD_TESTS_SEGMENTS_H

#include "segment.h"
#include "support.h"

#include <string.h>

static const eng_kv_shape shape = {2, 2, 2, 16, ENG_KV_F16, ENG_KV_F16, 32, 32, NULL};

static inline eng_segment *segment_of(const eng_kv_shape *kv, eng_segment *parent, uint32_t start, const int32_t *ids, uint32_t n, bool exact)
{
    eng_segment *s;
    ck_assert_int_eq(eng_segment_new(kv, parent, start, n, exact, &s), 0);
    memcpy(s->ids, ids, n * sizeof *ids);
    s->n = n;
    for (uint32_t l = 0; l < kv->n_layer; l++)
        for (uint32_t h = 0; h < kv->n_head_kv; h++)
            for (uint32_t i = 0; i < n; i++) {
                memset(eng_segment_k(s, l, h, i), (int)(ids[i] + 7 * l + h) & 255, kv->row_k);
                memset(eng_segment_v(s, l, h, i), (int)(ids[i] + 7 * l + h + 3) & 255, kv->row_v);
            }
    return s;
}

static inline eng_segment *segment(eng_segment *parent, uint32_t start, const int32_t *ids, uint32_t n, bool exact)
{
    return segment_of(&shape, parent, start, ids, n, exact);
}

/* One assertion for all rows: Check keeps a record of each that passes. */
static inline void check_rows(const eng_view *v, const int32_t *ids, uint32_t n)
{
    uint32_t good = 0;
    for (uint32_t pos = 0; pos < n && good == pos; pos++) {
        const eng_span *sp = &v->spans[eng_view_find(v, pos)];
        uint32_t row = pos - sp->seg->start;
        bool ok = sp->lo <= pos && pos < sp->hi && sp->seg->ids[row] == ids[pos];
        for (uint32_t l = 0; l < shape.n_layer; l++)
            for (uint32_t h = 0; h < shape.n_head_kv; h++)
                ok = ok && eng_segment_k(sp->seg, l, h, row)[5] == ((ids[pos] + 7 * l + h) & 255) &&
                     eng_segment_v(sp->seg, l, h, row)[31] == ((ids[pos] + 7 * l + h + 3) & 255);
        good += ok;
    }
    ck_assert_msg(good == n, "row %u of %u is another token's", good, n);
}

#endif
