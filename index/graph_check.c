/* Layout and validation of the arena. Every byte may come from a damaged or hostile file. */
#include "private.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(idx_header) == 64, "the header is written as it stands");

size_t idx_graph_layout(uint32_t n, uint32_t dim, uint32_t n_margins, uint64_t n_links, size_t ret_offset[IDX_GRAPH_PARTS])
{
    if (!n || n > IDX_MAX_ROWS || !dim || dim > IDX_MAX_DIM || n_margins > IDX_MAX_GROUP || n_links > UINT32_MAX)
        return 0;
    size_t nodes = ((size_t)n + IDX_BLOCK - 1) / IDX_BLOCK, padded = (nodes + IDX_BLOCK - 1) & ~(size_t)(IDX_BLOCK - 1), quads = (dim + 3) / 4, at = sizeof(idx_header);
    const size_t bytes[IDX_GRAPH_PARTS] = {
        2 * (size_t)idx_dim_pad(dim) * 4, (size_t)n_margins * 4, (nodes + 1) * 4, padded * 4, padded * 4, nodes * IDX_BLOCK * 4, padded * quads * 4, nodes * quads * 64, (size_t)n_links * 4};
    for (int i = 0; i < IDX_GRAPH_PARTS; i++) {
        ret_offset[i] = at;
        at += (bytes[i] + IDX_ALIGN - 1) / IDX_ALIGN * IDX_ALIGN;
    }
    return at;
}

size_t idx_graph_max_bytes(uint32_t n, uint32_t dim, uint32_t n_margins, uint32_t degree)
{
    size_t at[IDX_GRAPH_PARTS];
    return idx_graph_layout(n, dim, n_margins, ((uint64_t)n + IDX_BLOCK - 1) / IDX_BLOCK * degree, at);
}

static void bind_graph(idx_index *ix, uint8_t *arena)
{
    size_t at[IDX_GRAPH_PARTS];
    uint32_t n = ix->header->n, dim = ix->header->dim;
    idx_graph_layout(n, dim, ix->header->n_margins, 0, at);
    memset(&ix->code, 0, sizeof ix->code);
    ix->code.n_blocks = (n + IDX_BLOCK - 1) / IDX_BLOCK;
    ix->code.quads = (dim + 3) / 4;
    ix->code.block_bytes = (size_t)ix->code.quads * 64;
    ix->code.mean = (const float *)(const void *)(arena + at[0]);
    ix->code.unit = ix->code.mean + idx_dim_pad(dim);
    ix->margins = (const float *)(const void *)(arena + at[1]);
    ix->first = (const uint32_t *)(const void *)(arena + at[2]);
    ix->code.cent_scale = (const float *)(const void *)(arena + at[3]);
    ix->code.spread = (const float *)(const void *)(arena + at[4]);
    ix->code.scale = (const float *)(const void *)(arena + at[5]);
    ix->code.cent_codes = arena + at[6];
    ix->code.codes = arena + at[7];
    ix->links = (const uint32_t *)(const void *)(arena + at[8]);
}

void idx_index_bind(idx_index *ix, uint8_t *arena, size_t bytes)
{
    ix->bytes = bytes;
    ix->arena = arena;
    ix->header = (const idx_header *)(const void *)arena;
    if (ix->header->kind != IDX_GRAPH) {
        size_t at[IDX_CODE_PARTS];
        idx_codes_layout((idx_kind)ix->header->kind, ix->header->narrow, ix->header->n, ix->header->dim, ix->header->n_clusters, at);
        ix->first = ix->links = NULL;
        ix->margins = NULL;
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
    bind_graph(ix, arena);
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
    if (h->kind != IDX_FLAT ? !(h->margin >= 0 && h->margin < INFINITY) : memcmp(&h->margin, &zero, sizeof zero) != 0)
        return idx_bad(err, errlen, "damaged index header");
    if (!(h->noise >= 0 && h->noise < INFINITY) || h->reserved || h->narrow > (h->kind == IDX_FLAT))
        return idx_bad(err, errlen, "damaged index header");
    if (h->kind != IDX_GRAPH) {
        size_t at[IDX_CODE_PARTS], need = idx_codes_layout((idx_kind)h->kind, h->narrow, h->n, h->dim, h->n_clusters, at);
        if (h->max_degree || h->n_margins || h->n_links)
            return idx_bad(err, errlen, "damaged index header");
        if (!need || h->bytes != need || bytes != need)
            return idx_bad(err, errlen, "index has %zu bytes, its counts need %zu", bytes, need);
        return 0;
    }
    size_t at[IDX_GRAPH_PARTS], need = idx_graph_layout(h->n, h->dim, h->n_margins, h->n_links, at);
    if (h->n_clusters || !h->max_degree || h->max_degree > IDX_MAX_DEGREE)
        return idx_bad(err, errlen, "damaged index header");
    if (!need || h->bytes != need || bytes != need)
        return idx_bad(err, errlen, "index has %zu bytes, its counts need %zu", bytes, need);
    return 0;
}

/* Links in rising order, which makes two to one node, or one to itself, easy to see. */
static int check_links(const idx_index *ix, char *err, size_t errlen)
{
    uint32_t nodes = ix->code.n_blocks, degree = ix->header->max_degree;
    if (ix->first[0] != 0 || ix->first[nodes] != ix->header->n_links)
        return idx_bad(err, errlen, "link table doesn't span the links");
    for (uint32_t i = 0; i < nodes; i++)
        if (ix->first[i + 1] < ix->first[i] || ix->first[i + 1] - ix->first[i] > degree)
            return idx_bad(err, errlen, "bad degree of node %u", i);
    for (uint32_t i = 0; i < nodes; i++)
        for (uint32_t l = ix->first[i]; l < ix->first[i + 1]; l++) {
            uint32_t to = idx_link_to(ix->links[l]);
            if (to >= nodes || to == i || !idx_link_weight(ix->links[l]) || (l > ix->first[i] && to <= idx_link_to(ix->links[l - 1])))
                return idx_bad(err, errlen, "bad link of node %u to node %u of %u", i, to, nodes);
        }
    return 0;
}

static int check_numbers(const idx_index *ix, char *err, size_t errlen)
{
    for (uint32_t j = 0; j < idx_dim_pad(ix->header->dim); j++)
        if (!isfinite(ix->code.mean[j]) || !(ix->code.unit[j] > 0 && ix->code.unit[j] < INFINITY))
            return idx_bad(err, errlen, "bad mean or unit of dimension %u", j);
    for (uint32_t i = 0; i < ix->header->n_margins; i++)
        if (!(ix->margins[i] >= 0 && ix->margins[i] < INFINITY))
            return idx_bad(err, errlen, "bad margin of head %u", i);
    for (uint32_t i = 0; i < ix->code.n_blocks; i++)
        if (!(ix->code.cent_scale[i] >= 0 && ix->code.cent_scale[i] < INFINITY) || !(ix->code.spread[i] >= 0 && ix->code.spread[i] < INFINITY))
            return idx_bad(err, errlen, "bad mean of node %u", i);
    for (size_t i = 0; i < (size_t)ix->code.n_blocks * IDX_BLOCK; i++)
        if (ix->code.scale[i] < 0 || isinf(ix->code.scale[i]))
            return idx_bad(err, errlen, "bad scale of key %zu", i);
    return 0;
}

int idx_check(const idx_index *ix, char *err, size_t errlen)
{
    int r = check_header(ix->header, ix->bytes, ix->header->n, ix->header->dim, err, errlen);
    if (!r && ix->header->kind != IDX_GRAPH)
        return idx_codes_check(ix, err, errlen);
    if (!r)
        r = check_links(ix, err, errlen);
    return r ? r : check_numbers(ix, err, errlen);
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
