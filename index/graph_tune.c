/* How wide a search must be depends on the head: it is measured, on training positions that the graph wasn't built from. */
#include "graph_build.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { TUNE_K = 100, TUNE_BEST = 16, TUNE_POSITIONS = 32 };

static const uint32_t levels[] = {64, 100, 160, 256, 400, 640, IDX_MAX_SPARE};
enum { N_LEVELS = sizeof levels / sizeof levels[0] };

/* The newest half of the positions is measured: decoding goes on from there. */
static uint32_t tune_step(const idx_builder *b)
{
    return b->train.m / 2 / TUNE_POSITIONS;
}

int idx_tune_new(idx_builder *b)
{
    if (tune_step(b) < 4 || b->keys.n < 4 * TUNE_K)
        return 0; /* too little to spare any */
    b->n_tune = TUNE_POSITIONS;
    b->tune_hits = calloc((size_t)b->n_tune * b->train.group * (1 + TUNE_K), 4);
    if (!b->tune_hits)
        return -ENOMEM;
    return idx_scratch_new(b->keys.n, b->keys.dim, b->train.group, TUNE_K, &b->tune_scratch);
}

bool idx_tune_owns(const idx_builder *b, uint32_t position, uint32_t *ret)
{
    uint32_t back = b->train.m - 1 - position, step = tune_step(b);
    if (!b->n_tune || back % step || back / step >= b->n_tune)
        return false;
    *ret = back / step;
    return true;
}

void idx_tune_take(idx_builder *b, uint32_t number)
{
    for (uint32_t h = 0; h < b->train.group; h++) {
        idx_top *t = &b->tops[h];
        uint32_t *hits = b->tune_hits + ((size_t)number * b->train.group + h) * (1 + TUNE_K);
        idx_top_finish(b->k, t, b->tmp);
        hits[0] = idx_select(t->ids, t->scores, t->n, TUNE_K);
        idx_select(t->ids, t->scores, hits[0], TUNE_BEST);
        memcpy(hits + 1, t->ids, (size_t)hits[0] * 4);
    }
}

/* One search of the finished graph, with the width of the level on trial. */
static void try_position(idx_builder *b, uint32_t number)
{
    uint32_t group = b->train.group, dim = b->keys.dim;
    size_t position = b->train.m - 1 - (size_t)number * tune_step(b);
    idx_rows rows = {b->train.q + position * group * dim, (size_t)dim * 2, group, dim, IDX_F16};
    b->k->widen(b->q, &rows, NULL, 0, group);
    for (uint32_t h = 1; h < group; h++)
        memmove(b->q + (size_t)h * dim, b->q + (size_t)h * b->dim_pad, (size_t)dim * sizeof *b->q);
    idx_query q = {.q = b->q, .group = group, .scale = 1, .budget = {.top_k = TUNE_K}};
    q.hi = b->train.pos[position] >= b->keys.n ? b->keys.n : b->train.pos[position] + 1;
    idx_hits *found;
    if (idx_search(b->result, &b->keys, &q, b->tune_scratch, &found, NULL) < 0)
        return;
    for (uint32_t h = 0; h < group; h++) {
        const uint32_t *hits = b->tune_hits + ((size_t)number * group + h) * (1 + TUNE_K);
        b->generation++;
        for (uint32_t i = 0; i < found[h].n; i++)
            b->stamp[found[h].ids[i]] = b->generation;
        for (uint32_t i = 0; i < hits[0]; i++) {
            bool hit = b->stamp[hits[1 + i]] == b->generation;
            b->tune_missed += !hit;
            b->tune_missed_best += !hit && i < TUNE_BEST;
        }
        b->tune_of += hits[0];
        b->tune_of_best += hits[0] < TUNE_BEST ? hits[0] : TUNE_BEST;
    }
}

/* at: position on trial; sub: level. The best hits must not be lost (a random loss of 1 % of them shows in the next token), so the bar is
 * 99.9 % of the best 16 and 99.5 % of the best 100; and because decode queries drift from those of the prefill, one level more is taken
 * than the one that clears it. */
bool idx_tune(idx_builder *b)
{
    if (b->error || !b->n_tune)
        return true;
    idx_header *header = (idx_header *)(void *)b->result->arena;
    header->spare = levels[b->sub];
    if (b->at < b->n_tune) {
        try_position(b, (uint32_t)b->at++);
        return false;
    }
    bool good = b->tune_missed * 200 <= b->tune_of && b->tune_missed_best * 1000 <= b->tune_of_best;
    if (good || b->sub + 1 == N_LEVELS) {
        header->spare = levels[b->sub + 1 < N_LEVELS ? b->sub + 1 : b->sub];
        return true;
    }
    b->sub++;
    b->at = 0;
    b->tune_missed = b->tune_missed_best = b->tune_of = b->tune_of_best = 0;
    return false;
}
