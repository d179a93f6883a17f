#include "segment_file_private.h"

#include "fault.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <xxhash.h>

/* ---- ids --------------------------------------------------------------------------------------------------------- */

eng_segment_id eng_segment_id_of(const eng_segment_head *h, const int32_t *ids)
{
    struct {
        XXH128_canonical_t ids;
        uint64_t rest[6];
    } all = {.rest = {h->start, h->tenant, h->fingerprint, h->type_k, h->type_v, h->exact}};
    XXH128_canonicalFromHash(&all.ids, XXH3_128bits(ids, ((size_t)h->start + h->n) * sizeof *ids));
    XXH128_canonical_t text;
    XXH128_canonicalFromHash(&text, XXH3_128bits(&all, sizeof all));
    eng_segment_id id;
    memcpy(id.b, text.digest, sizeof id.b);
    return id;
}

void eng_segment_id_text(const eng_segment_id *id, char ret[ENG_SEGMENT_NAME])
{
    for (size_t i = 0; i < sizeof id->b; i++)
        snprintf(ret + 2 * i, 3, "%02x", id->b[i]);
}

bool eng_segment_id_parse(const char *s, eng_segment_id *ret)
{
    static const char digits[] = "0123456789abcdef";
    eng_segment_id id = {0};
    for (size_t i = 0; i < 2 * sizeof id.b; i++) {
        const char *d = s[i] ? strchr(digits, s[i]) : NULL;
        if (!d)
            return false;
        id.b[i / 2] = (uint8_t)(id.b[i / 2] << 4 | (d - digits));
    }
    if (s[2 * sizeof id.b])
        return false;
    *ret = id;
    return true;
}

/* ---- layout ------------------------------------------------------------------------------------------------------ */

static uint64_t round_up(uint64_t n, uint64_t to)
{
    return (n + to - 1) / to * to;
}

uint64_t eng_segment_lay_out(seg_section *s, uint32_t n, uint32_t *ret_blocks, uint32_t *ret_head)
{
    uint64_t blocks = 0;
    for (uint32_t i = 0; i < n; i++)
        blocks += seg_block_count(&s[i]);
    uint64_t head = sizeof(seg_disk_head) + (uint64_t)n * sizeof *s + blocks * sizeof(uint64_t), at = head;
    for (uint32_t i = 0; i < n; i++) {
        s[i].offset = round_up(at, s[i].kind == SEG_KV ? SEG_PAGE : 64);
        at = s[i].offset + s[i].bytes;
    }
    *ret_blocks = (uint32_t)blocks;
    *ret_head = (uint32_t)head;
    return at;
}

unsigned eng_segment_storable(const eng_segment *s)
{
    unsigned parts = s->kept ? ENG_STORE_QUERIES : 0;
    for (uint32_t kind = SEG_CODES; kind <= SEG_GRAPH; kind++)
        parts |= eng_segment_has(s, seg_indexes(s, kind)) ? ENG_STORE_CODES << (kind - SEG_CODES) : 0;
    return parts;
}

/* Section n of a kind for each head that has it, if it is wanted. The number of all. */
static uint32_t list_indexes(const eng_segment *s, uint32_t kind, unsigned parts, uint32_t n, seg_section *ret)
{
    idx_index *const *all = seg_indexes(s, kind);
    for (uint32_t i = 0; i < seg_head_count(s->shape->n_layer, s->shape->n_head_kv) && (parts & ENG_STORE_CODES << (kind - SEG_CODES)); i++)
        if (all[i]) {
            size_t bytes;
            idx_arena(all[i], &bytes);
            ret[n++] = (seg_section){.kind = kind, .item = i, .bytes = bytes};
        }
    return n;
}

/* The sections of a segment, not yet laid out. */
static uint32_t list_sections(const eng_segment *s, unsigned parts, seg_section *ret)
{
    uint32_t n = 2;
    ret[0] = (seg_section){.kind = SEG_IDS, .bytes = (uint64_t)s->n * sizeof *s->ids};
    ret[1] = (seg_section){.kind = SEG_KV, .bytes = s->kv_bytes};
    for (uint32_t kind = SEG_CODES; kind <= SEG_GRAPH; kind++)
        n = list_indexes(s, kind, parts, n, ret);
    if (!(parts & ENG_STORE_QUERIES))
        return n;
    ret[n++] = (seg_section){.kind = SEG_QUERY_ROWS, .bytes = (uint64_t)s->m * sizeof *s->query_row};
    for (uint32_t i = 0; i < seg_head_count(s->shape->n_layer, s->shape->n_head_kv); i++)
        if (!eng_kv_window(s->shape, i / s->shape->n_head_kv))
            ret[n++] = (seg_section){.kind = SEG_QUERIES, .item = i, .bytes = eng_segment_kept_bytes(s)};
    return n;
}

static seg_section *new_sections(const eng_segment *s)
{
    return calloc(seg_max_sections(s->shape->n_layer, s->shape->n_head_kv), sizeof(seg_section));
}

eng_segment_head eng_segment_head_of(const eng_segment_owner *owner, const eng_segment *s, unsigned parts)
{
    const eng_kv_shape *h = s->shape;
    eng_segment_head head = {
        .tenant = s->tenant, .fingerprint = owner->fingerprint, .start = s->start, .n = s->n, .n_layer = h->n_layer,
        .n_head_kv = h->n_head_kv, .head_dim = h->head_dim, .type_k = h->type_k, .type_v = h->type_v, .exact = s->exact,
    };
    seg_section *sections = new_sections(s);
    uint32_t n_blocks, head_bytes;
    if (sections)
        head.bytes = eng_segment_lay_out(sections, list_sections(s, parts, sections), &n_blocks, &head_bytes);
    free(sections);
    return head;
}

/* ---- writing ----------------------------------------------------------------------------------------------------- */

static int write_at(int fd, const uint8_t *p, size_t n, uint64_t offset)
{
    while (n) {
        ssize_t done = pwrite(fd, p, n, (off_t)offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return done ? -errno : -EIO;
        p += done;
        n -= (size_t)done;
        offset += (uint64_t)done;
    }
    return 0;
}

static const uint8_t *section_data(const eng_segment *s, const seg_section *sec)
{
    size_t bytes;
    if (seg_is_index(sec->kind))
        return idx_arena(seg_indexes(s, sec->kind)[sec->item], &bytes);
    if (sec->kind == SEG_QUERY_ROWS)
        return (const uint8_t *)s->query_row;
    if (sec->kind == SEG_QUERIES)
        return eng_segment_kept(s, sec->item / s->shape->n_head_kv, sec->item % s->shape->n_head_kv);
    return sec->kind == SEG_IDS ? (const uint8_t *)s->ids : s->kv;
}

static int write_sections(int fd, const eng_segment *s, const seg_section *sections, uint32_t n, uint64_t *sums)
{
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *data = section_data(s, &sections[i]);
        for (uint32_t b = 0; b < seg_block_count(&sections[i]); b++) {
            const uint8_t *p = data + (size_t)b * SEG_BLOCK;
            size_t bytes = seg_block_bytes(&sections[i], b);
            *sums++ = XXH3_64bits(p, bytes);
            int r = write_at(fd, p, bytes, sections[i].offset + (uint64_t)b * SEG_BLOCK);
            if (r < 0)
                return r;
        }
        eng_fault_point("save:section");
    }
    return 0;
}

int eng_segment_write(int fd, const eng_segment_head *head, const eng_segment *s, unsigned parts)
{
    uint32_t n_blocks, head_bytes;
    uint8_t *bytes = NULL;
    seg_section *sections = new_sections(s);
    if (!sections)
        return -ENOMEM;
    uint32_t n = list_sections(s, parts, sections);
    uint64_t file_bytes = eng_segment_lay_out(sections, n, &n_blocks, &head_bytes);
    int r = -ENOMEM;
    if (!(bytes = calloc(1, head_bytes)))
        goto cleanup;
    /* Room first: a full disk says so before anything is written. Not every file system can. */
    if (fallocate(fd, 0, 0, (off_t)file_bytes) < 0 && errno != EOPNOTSUPP && errno != ENOSYS) {
        r = -errno;
        goto cleanup;
    }
    seg_disk_head *h = (seg_disk_head *)(void *)bytes;
    *h = (seg_disk_head){
        .version = seg_version_of(head->type_k, head->type_v, sections[n - 1].kind), .head_bytes = head_bytes, .id = head->id, .parent = head->parent, .tenant = head->tenant,
        .fingerprint = head->fingerprint, .start = head->start, .n = head->n, .n_layer = head->n_layer, .n_head_kv = head->n_head_kv,
        .head_dim = head->head_dim, .type_k = head->type_k, .type_v = head->type_v, .exact = head->exact, .file_bytes = file_bytes,
        .n_sections = n, .n_blocks = n_blocks, .created = head->created,
    };
    memcpy(h->magic, SEG_MAGIC, sizeof h->magic);
    memcpy(bytes + sizeof *h, sections, n * sizeof *sections);
    r = write_sections(fd, s, sections, n, (uint64_t *)(void *)(bytes + sizeof *h + n * sizeof *sections));
    if (r < 0)
        goto cleanup;
    h->checksum = XXH3_64bits(bytes, head_bytes);
    r = write_at(fd, bytes, head_bytes, 0);
cleanup:
    free(bytes);
    free(sections);
    return r;
}
