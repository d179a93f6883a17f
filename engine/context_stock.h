/* What is there at the start: catalog, folder and mirror are made to agree. */
#ifndef RETRIEVALD_CONTEXT_STOCK_H
#define RETRIEVALD_CONTEXT_STOCK_H

#include "context_folder.h"
#include "context_mirror.h"

typedef struct {
    eng_catalog *catalog;
    const eng_folder *folder;
    const eng_segment_owner *owner;
    eng_mirror *mirror; /* empty; filled */
    uint64_t *misses;   /* [ENG_MISS_COUNT], added to */
    void (*log)(void *ctx, int level, const char *text);
    void *log_ctx;
} eng_stock;

/* -EBADMSG: the catalog cannot be right; with a new one all is read from the files. */
int eng_stock_take(const eng_stock *s);

#endif
