/* What kept segments are worth to a tier of the context cache, and what goes when there is no room: least recently used first, but not for just anything
 * (a segmented LRU with an admission rule by frequency, as in W-TinyLFU).
 *
 * A segment is worth the tokens of the context that ends with it, once for each use: what hurts is to read a long context again, and its last piece is
 * as needed as its first. Whenever four times the budget was offered to the tier, all worths halve, so what nobody asks for any more can go in the
 * end, however long it is. A new segment claims four times its own worth, and takes nothing that is worth more: among contexts of like length the last used
 * stay, one that is used again and again outlasts any number of others that are read once, and a short request takes nothing from a long context. Leaves go
 * before what they continue; what is in use or pinned does not go.
 *
 * What may claim no room becomes a guest: the last sixteenth of the budget is for those, the least recently used one goes first, and others stay out of it
 * unless one of them needs it by itself.
 */
#ifndef RETRIEVALD_WORTH_H
#define RETRIEVALD_WORTH_H

#include <stdbool.h>
#include <stdint.h>

enum {
    ENG_WORTH_ONE = 256, /* of a token, so that halves count */
    ENG_WORTH_USES = 16, /* more make no difference */
    ENG_WORTH_TURN = 4,  /* budgets */
    ENG_WORTH_GUESTS = 16,
};

/* After one more use, the first one included. end: tokens of the context up to the segment's last. */
static inline uint64_t eng_worth_used(uint64_t worth, uint32_t end)
{
    uint64_t one = (uint64_t)end * ENG_WORTH_ONE, most = one * ENG_WORTH_USES;
    return worth + one < most ? worth + one : most;
}

static inline uint64_t eng_worth_claim(uint64_t worth)
{
    return 4 * worth;
}

/* Counts `bytes` that were offered; whether worths are to be halved now. */
static inline bool eng_worth_turn(uint64_t *io_offered, uint64_t bytes, uint64_t limit)
{
    *io_offered += bytes;
    if (*io_offered / ENG_WORTH_TURN < limit)
        return false;
    *io_offered = 0;
    return true;
}

enum { ENG_KEPT_ROOT = UINT32_MAX };

typedef struct {
    uint64_t bytes, worth, used; /* used: larger is later */
    uint32_t parent;             /* its number, below this one's; ENG_KEPT_ROOT: none */
    uint32_t holds;              /* children, pins, users: it goes when there are none. Children that go are taken off */
    bool guest;
    bool gone;                   /* filled in */
} eng_kept;

typedef struct {
    uint64_t limit, bytes; /* of the tier; that are to fit */
    uint64_t claim;        /* UINT64_MAX: anything that is not held may go for it */
    bool guest;            /* filled in: it fits as a guest */
    uint64_t spare;        /* filled in: bytes that would fit beside it; where it does not fit, bytes that do. Guests' room is none of it */
} eng_room;

/* Chooses what goes of kept[0, n): victims[0, result), in that order. -1: there is no room. */
int64_t eng_worth_choose(eng_room *r, eng_kept *kept, uint32_t n, uint32_t *victims);

#endif
