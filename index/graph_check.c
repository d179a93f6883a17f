/* Layout and validation of the arena. Every byte may come from a damaged or hostile file. */
#include "private.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(idx_header) == 64, "the header is written as it stands");

size_t idx_arena_bytes(uint32_t n, uint32_t n_entries, uint64_t n_links)
{
    if (!n || n > IDX_MAX_ROWS || !n_entries || n_entries > IDX_MAX_ENTRIES || n_entries > n || n_links > UINT32_MAX)
        return 0;
    return sizeof(idx_header) + ((size_t)n_entries + (size_t)n + 1 + (size_t)n_links) * 4;
}

void idx_index_bind(idx_index *ix, uint8_t *arena, size_t bytes)
{
    ix->bytes = bytes;
    ix->arena = arena;
    ix->header = (const idx_header *)(const void *)arena;
    if (ix->header->kind != IDX_GRAPH) {
        size_t at[IDX_CODE_PARTS];
        idx_codes_layout((idx_kind)ix->header->kind, ix->header->narrow, ix->header->n, ix->header->dim, ix->header->n_clusters, at);
        ix->entries = ix->first = ix->links = NULL;
        ix->code.n_runs = idx_codes_runs(ix->header->n);
        ix->code.n_blocks = (ix->header->n + IDX_BLOCK - 1) / IDX_BLOCK;
        ix->code.quads = (ix->header->dim + 3) / 4;
        ix->code.block_bytes = (size_t)(ix->header->narrow ? (ix->header->dim + 7) / 8 : ix->code.quads) * 64;
        ix->code.mean = (const float *)(const void *)(arena + at[0]);
        ix->code.unit = ix->code.mean + idx_dim_pad(ix->header->dim);
        ix->code.first = (const uint32_t *)(const void *)(arena + at[1]);
        ix->code.run = (const uint32_t *)(const void *)(arena + at[2]);
        ix->code.at = (const uint32_t *)(const void *)(arena + at[3]);
        ix->code.ids = (const uint16_t *)(const void *)(arena + at[4]);
        ix->code.scale = (const float *)(const void *)(arena + at[5]);
        ix->code.sums = (const float *)(const void *)(arena + at[6]);
        ix->code.codes = arena + at[7];
        ix->code.cent_scale = (const float *)(const void *)(arena + at[8]);
        ix->code.spread = (const float *)(const void *)(arena + at[9]);
        ix->code.cent_codes = arena + at[10];
        return;
    }
    ix->entries = (const uint32_t *)(const void *)(arena + sizeof(idx_header));
    ix->first = ix->entries + ix->header->n_entries;
    ix->links = ix->first + ix->header->n + 1;
}

int idx_bad(char *err, size_t errlen, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (err && errlen)
        vsnprintf(err, errlen, format, args);
    va_end(args);
    return -EBADMSG;
}

static int check_header(const idx_header *h, size_t bytes, uint32_t n, uint32_t dim, char *err, size_t errlen)
{
    static const float zero;
    if (h->magic != IDX_MAGIC)
        return idx_bad(err, errlen, "not an index");
    if (h->version != IDX_VERSION)
        return idx_bad(err, errlen, "index version %u, this program knows %d", h->version, IDX_VERSION);
    if (h->kind > IDX_IVF)
        return idx_bad(err, errlen, "unknown index kind %u", h->kind);
    if (h->n != n || h->dim != dim)
        return idx_bad(err, errlen, "index is for %u keys of %u dimensions, not %u of %u", h->n, h->dim, n, dim);
    bool lists = h->kind == IDX_CLUSTER || h->kind == IDX_IVF;
    if (lists ? !(h->margin >= 0 && h->margin < INFINITY) : memcmp(&h->margin, &zero, sizeof zero) != 0)
        return idx_bad(err, errlen, "damaged index header");
    if (h->kind != IDX_GRAPH) {
        size_t at[IDX_CODE_PARTS], need = idx_codes_layout((idx_kind)h->kind, h->narrow, h->n, h->dim, h->n_clusters, at);
        if (!(h->noise >= 0 && h->noise < INFINITY))
            return idx_bad(err, errlen, "damaged index header");
        if (h->max_degree || h->spare || h->n_links || h->reserved || h->narrow > (h->kind == IDX_FLAT))
            return idx_bad(err, errlen, "damaged index header");
        if (!need || h->bytes != need || bytes != need)
            return idx_bad(err, errlen, "index has %zu bytes, its counts need %zu", bytes, need);
        return 0;
    }
    if (memcmp(&h->noise, &zero, sizeof zero) != 0 || !h->max_degree || h->max_degree > IDX_MAX_DEGREE ||
        h->reserved || h->narrow)
        return idx_bad(err, errlen, "damaged index header");
    if (!h->spare || h->spare > IDX_MAX_SPARE)
        return idx_bad(err, errlen, "search width out of bounds");
    size_t expected = idx_arena_bytes(h->n, h->n_entries, h->n_links);
    if (!expected || h->bytes != expected || bytes != expected)
        return idx_bad(err, errlen, "index has %zu bytes, its counts need %zu", bytes, expected);
    return 0;
}

static int check_ids(const idx_index *ix, char *err, size_t errlen)
{
    const idx_header *h = ix->header;
    for (uint32_t i = 0; i < h->n_entries; i++)
        if (ix->entries[i] >= h->n)
            return idx_bad(err, errlen, "entry point %u is node %u of %u", i, ix->entries[i], h->n);
    if (ix->first[0] != 0 || ix->first[h->n] != h->n_links)
        return idx_bad(err, errlen, "link table doesn't span the links");
    for (uint32_t i = 0; i < h->n; i++)
        if (ix->first[i + 1] < ix->first[i] || ix->first[i + 1] - ix->first[i] > h->max_degree)
            return idx_bad(err, errlen, "bad degree of node %u", i);
    for (uint64_t i = 0; i < h->n_links; i++)
        if (ix->links[i] >= h->n)
            return idx_bad(err, errlen, "link to node %u of %u", ix->links[i], h->n);
    return 0;
}

/* Only after check_ids(). */
static int check_reach(const idx_index *ix, char *err, size_t errlen)
{
    uint32_t n = ix->header->n, head = 0, tail = 0;
    uint32_t *queue = idx_alloc(n, 4);
    uint8_t *seen = calloc(n, 1);
    int r = 0;
    if (!queue || !seen) {
        r = -ENOMEM;
        goto cleanup;
    }
    for (uint32_t i = 0; i < ix->header->n_entries; i++) {
        uint32_t id = ix->entries[i];
        if (!seen[id]) {
            seen[id] = 1;
            queue[tail++] = id;
        }
    }
    while (head < tail) {
        uint32_t id = queue[head++];
        for (uint32_t i = ix->first[id]; i < ix->first[id + 1]; i++) {
            uint32_t to = ix->links[i];
            if (!seen[to]) {
                seen[to] = 1;
                queue[tail++] = to;
            }
        }
    }
    if (tail < n)
        r = idx_bad(err, errlen, "%u of %u keys can't be reached", n - tail, n);
cleanup:
    free(queue);
    free(seen);
    return r;
}

int idx_check(const idx_index *ix, char *err, size_t errlen)
{
    int r = check_header(ix->header, ix->bytes, ix->header->n, ix->header->dim, err, errlen);
    if (!r && ix->header->kind != IDX_GRAPH)
        return idx_codes_check(ix, err, errlen);
    if (!r)
        r = check_ids(ix, err, errlen);
    if (!r)
        r = check_reach(ix, err, errlen);
    return r;
}

int idx_load(const void *arena, size_t bytes, uint32_t n, uint32_t dim, void *memory, idx_index **ret, char *err, size_t errlen)
{
    idx_header h;
    if (bytes < sizeof h)
        return idx_bad(err, errlen, "index is cut short");
    memcpy(&h, arena, sizeof h);
    int r = check_header(&h, bytes, n, dim, err, errlen);
    if (r < 0)
        return r;
    idx_index *ix = calloc(1, sizeof *ix);
    uint8_t *own = memory ? memory : idx_alloc(bytes, 1);
    if (!own || !ix) {
        if (!memory)
            free(own);
        free(ix);
        return -ENOMEM;
    }
    if (own != arena)
        memcpy(own, arena, bytes);
    idx_index_bind(ix, own, bytes);
    ix->borrowed = memory != NULL;
    r = idx_check(ix, err, errlen);
    if (r < 0) {
        idx_free(ix);
        return r;
    }
    *ret = ix;
    return 0;
}
