/* Which links a node gets, and their weights.
 *
 * RoarGraph (VLDB 2024, section 4) projects the graph of queries and their nearest keys to the keys: a query's hits are linked to its nearest one, pruned by distances between keys. Here a node is 16
 * successive keys, and what the queries say is kept as they say it: the weight of a link from node a to node b is the share of the training queries with hits in a that have hits in b, too. */
#include "graph_build.h"

#include <errno.h>
#include <stdlib.h>

enum {
    NODE_QUERIES = 256, /* a node that more queries have hits in is served by an even sample of them */
    NODE_PIECE = 4,     /* nodes a step */
};

int idx_link_new(idx_builder *b)
{
    size_t nodes = ((size_t)b->keys.n + IDX_BLOCK - 1) / IDX_BLOCK + 16;
    b->count = calloc(nodes, 4);
    b->met = idx_alloc(nodes, 4);
    b->met_count = idx_alloc(nodes, 4);
    return b->count && b->met && b->met_count ? 0 : -ENOMEM;
}

/* The nodes met by the queries of a node, and how often, to met and met_count; returns their number. *ret_used: how many queries. */
static uint32_t meet(idx_builder *b, uint32_t node, uint32_t *ret_used)
{
    uint32_t first = b->queries.first[node], n = b->queries.first[node + 1] - first, used = n < NODE_QUERIES ? n : NODE_QUERIES, n_met = 0;
    for (uint32_t i = 0; i < used; i++) {
        uint32_t query = b->queries.ids[first + (uint64_t)i * n / used];
        const uint32_t *hits = b->hits.ids + (size_t)query * b->hits.stride;
        for (uint32_t j = 0; j < b->hits.count[query]; j++) {
            b->met[n_met] = hits[j];
            n_met += !b->count[hits[j]]++;
        }
    }
    for (uint32_t i = 0; i < n_met; i++) {
        b->met_count[i] = b->met[i] == node ? 0 : (float)b->count[b->met[i]]; /* no link to itself */
        b->count[b->met[i]] = 0;
    }
    *ret_used = used;
    return n_met;
}

static int rising(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* at: next node; sub: its first link. */
bool idx_link(idx_builder *b)
{
    idx_index *ix = b->result;
    uint32_t nodes = ix->code.n_blocks, *first = (uint32_t *)(void *)(ix->arena + ((const uint8_t *)ix->first - ix->arena));
    uint32_t *links = (uint32_t *)(void *)(ix->arena + ((const uint8_t *)ix->links - ix->arena));
    for (uint32_t c = 0; c < NODE_PIECE && b->at < nodes; c++) {
        uint32_t node = (uint32_t)b->at++, used, n = idx_select(b->met, b->met_count, meet(b, node, &used), b->params.degree);
        first[node] = b->sub;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t weight = (uint32_t)(b->met_count[i] * IDX_LINK_ONE / (float)used + .5f);
            links[b->sub] = b->met[i] << 8 | weight;
            b->sub += weight > 0;
        }
        qsort(links + first[node], b->sub - first[node], sizeof *links, rising);
        first[node + 1] = b->sub;
    }
    return b->at == nodes;
}
