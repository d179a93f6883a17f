/* Blocks taken apart 32 elements at a time, in 256-bit registers: what the AVX2 level and the float paths of the AVX-512 level share.
 * Layouts are those of quant.h.
 */
#ifndef RETRIEVALD_KERNELS_AVX2_CODES_H
#define RETRIEVALD_KERNELS_AVX2_CODES_H

#include "quant.h"

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE bool is_super(const eng_type t)
{
    return t >= ENG_Q2_K;
}

INLINE bool has_min(const eng_type t)
{
    return t == ENG_Q4_1 || t == ENG_Q5_1 || t == ENG_Q2_K || t == ENG_Q4_K || t == ENG_Q5_K;
}

/* Whether its scales are for 16 elements. */
INLINE bool has_halves(const eng_type t)
{
    return t == ENG_Q2_K || t == ENG_Q3_K || t == ENG_Q6_K;
}

/* Bits of a code that is not signed. */
INLINE int code_bits(const eng_type t)
{
    return t == ENG_Q2_K ? 2 : t == ENG_Q3_K ? 3 : t == ENG_Q5_0 || t == ENG_Q5_1 || t == ENG_Q5_K ? 5 : t == ENG_Q6_K ? 6 : 4;
}

/* Whether load_codes gives signed codes. */
INLINE bool is_signed(const eng_type t)
{
    return t == ENG_Q8_0 || t == ENG_IQ4_NL || t == ENG_IQ4_XS;
}

/* For a line of keys or values at p, which are read once, from memory as a rule: asks for what comes next, early into the second cache, which
 * can wait for three times as many lines as the first, then into the first. The hardware's own prefetchers stop at page ends. Never faults. */
INLINE void prefetch_rows(const char *p)
{
    _mm_prefetch(p + 8192, _MM_HINT_T1);
    _mm_prefetch(p + 1024, _MM_HINT_T0);
}

/* What unsigned codes are above the values they stand for. */
INLINE int offset_of(const eng_type t)
{
    return t == ENG_Q4_0 ? 8 : t == ENG_Q5_0 ? 16 : t == ENG_Q3_K ? 4 : t == ENG_Q6_K ? 32 : 0;
}

INLINE size_t block_bytes(const eng_type t)
{
    return t == ENG_Q8_0     ? sizeof(eng_q8_0)
           : t == ENG_Q4_0   ? sizeof(eng_q4_0)
           : t == ENG_Q4_1   ? sizeof(eng_q4_1)
           : t == ENG_Q5_0   ? sizeof(eng_q5_0)
           : t == ENG_Q5_1   ? sizeof(eng_q5_1)
           : t == ENG_IQ4_NL ? sizeof(eng_iq4_nl)
           : t == ENG_Q2_K   ? sizeof(eng_q2_k)
           : t == ENG_Q3_K   ? sizeof(eng_q3_k)
           : t == ENG_Q4_K   ? sizeof(eng_q4_k)
           : t == ENG_Q5_K   ? sizeof(eng_q5_k)
           : t == ENG_Q6_K   ? sizeof(eng_q6_k)
           : t == ENG_IQ4_XS ? sizeof(eng_iq4_xs)
           : t == ENG_F32    ? sizeof(float)
                             : sizeof(uint16_t);
}

/* The block that holds element i of a row. */
INLINE const char *block_at(const eng_type t, const void *row, size_t i)
{
    return (const char *)row + i / (is_super(t) ? 256 : 32) * block_bytes(t);
}

INLINE uint16_t get16(const void *p)
{
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

INLINE uint32_t get32(const void *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

INLINE __m256 f16_all(uint16_t h)
{
    return _mm256_cvtph_ps(_mm_set1_epi16((short)h));
}

/* Asks for the next stretch of weights, `bytes` of it; rows follow each other in memory. Never faults. Two steps: far ahead into the second
 * cache, which may wait for more lines at a time than the first, and near ahead into the first. The hardware's own prefetchers stop at
 * page ends. */
INLINE void prefetch_ahead(const char *p, size_t bytes)
{
    enum { FAR = 16384, NEAR = 3072 };
    for (size_t i = 0; i < bytes; i += 64) {
        _mm_prefetch(p + FAR + i, _MM_HINT_T1);
        _mm_prefetch(p + NEAR + i, _MM_HINT_T0);
    }
}

/* ---- codes ------------------------------------------------------------------------------------------------------ */

INLINE __m256i load_bytes(const void *p)
{
    return _mm256_loadu_si256(p);
}

/* 32 nibbles of 16 bytes, low ones first. */
INLINE __m256i load_nibbles32(const void *p)
{
    __m128i v = _mm_loadu_si128(p);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), _mm256_set1_epi8(15));
}

/* 16 in byte i where bit i of h is set. */
INLINE __m256i fifth_bits(uint32_t h)
{
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201);
    __m256i v = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)h), spread), bit);
    return _mm256_and_si256(_mm256_cmpeq_epi8(v, bit), _mm256_set1_epi8(16));
}

INLINE __m256i iq4_values(__m256i q)
{
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)eng_iq4_values)), q);
}

/* (v >> shift) & mask in each byte. */
INLINE __m256i field(__m256i v, const int shift, const int mask)
{
    return _mm256_and_si256(_mm256_srli_epi16(v, shift), _mm256_set1_epi8((char)mask));
}

/* The codes of part j of a super-block. */
INLINE __m256i load_super_codes(const eng_type t, const char *block, const int j)
{
    if (t == ENG_Q2_K)
        return field(load_bytes(((const eng_q2_k *)block)->q + j / 4 * 32), j % 4 * 2, 3);
    if (t == ENG_Q3_K) {
        const eng_q3_k *b = (const void *)block;
        __m256i high = field(load_bytes(b->h), j, 1);
        return _mm256_or_si256(field(load_bytes(b->q + j / 4 * 32), j % 4 * 2, 3), _mm256_slli_epi16(high, 2));
    }
    if (t == ENG_Q4_K)
        return field(load_bytes(((const eng_q4_k *)block)->q + j / 2 * 32), j % 2 * 4, 15);
    if (t == ENG_Q5_K) {
        const eng_q5_k *b = (const void *)block;
        __m256i high = field(load_bytes(b->h), j, 1);
        return _mm256_or_si256(field(load_bytes(b->q + j / 2 * 32), j % 2 * 4, 15), _mm256_slli_epi16(high, 4));
    }
    if (t == ENG_Q6_K) {
        const eng_q6_k *b = (const void *)block;
        __m256i high = field(load_bytes(b->h + j / 4 * 32), j % 4 * 2, 3);
        return _mm256_or_si256(field(load_bytes(b->q + j / 4 * 64 + j % 2 * 32), j % 4 / 2 * 4, 15), _mm256_slli_epi16(high, 4));
    }
    return iq4_values(load_nibbles32(((const eng_iq4_xs *)block)->q + 16 * j));
}

/* Codes of the 32 elements of a block, or of part j of a super-block; see is_signed and offset_of. */
INLINE __m256i load_codes(const eng_type t, const char *block, const int j)
{
    switch (t) {
    case ENG_Q8_0:
        return load_bytes(block + offsetof(eng_q8_0, q));
    case ENG_Q4_0:
        return load_nibbles32(block + offsetof(eng_q4_0, q));
    case ENG_Q4_1:
        return load_nibbles32(block + offsetof(eng_q4_1, q));
    case ENG_Q5_0:
        return _mm256_or_si256(load_nibbles32(block + offsetof(eng_q5_0, q)), fifth_bits(get32(block + offsetof(eng_q5_0, h))));
    case ENG_Q5_1:
        return _mm256_or_si256(load_nibbles32(block + offsetof(eng_q5_1, q)), fifth_bits(get32(block + offsetof(eng_q5_1, h))));
    case ENG_IQ4_NL:
        return iq4_values(load_nibbles32(block + offsetof(eng_iq4_nl, q)));
    default:
        return load_super_codes(t, block, j);
    }
}

/* ---- scales of a super-block ------------------------------------------------------------------------------------ */

/* Q4_K, Q5_K: eight scales, then eight minima. */
INLINE __m128i unpack_scales_k(const uint8_t *s)
{
    __m128i v = _mm_loadu_si128((const void *)s); /* four bytes more than there are: the block goes on */
    __m128i low = _mm_and_si128(v, _mm_set1_epi8(63));
    __m128i high = _mm_and_si128(_mm_srlv_epi32(_mm_shuffle_epi32(v, 0xaa), _mm_setr_epi32(0, 4, 0, 0)), _mm_set1_epi8(15));
    high = _mm_or_si128(high, _mm_and_si128(_mm_srli_epi16(v, 2), _mm_set1_epi8(48)));
    return _mm_unpacklo_epi32(low, high);
}

/* Q3_K: sixteen scales, their offset of 32 taken away. */
INLINE __m128i unpack_scales_q3_k(const uint8_t *s)
{
    __m128i v = _mm_loadu_si128((const void *)(s - 4)); /* dwords 1..3: four bytes less than it could be, which are the block's own */
    __m128i low = _mm_and_si128(_mm_srlv_epi32(_mm_shuffle_epi32(v, 0x99), _mm_setr_epi32(0, 0, 4, 4)), _mm_set1_epi8(15));
    __m128i high = _mm_and_si128(_mm_srlv_epi32(_mm_shuffle_epi32(v, 0xff), _mm_setr_epi32(0, 2, 4, 6)), _mm_set1_epi8(3));
    return _mm_sub_epi8(_mm_or_si128(low, _mm_slli_epi16(high, 4)), _mm_set1_epi8(32));
}

/* IQ4_XS: eight scales as dwords, their offset of 32 taken away. */
INLINE __m256i unpack_scales_iq4_xs(const eng_iq4_xs *b)
{
    __m256i low = _mm256_srlv_epi32(_mm256_set1_epi32((int)get32(b->s)), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(b->h), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
    low = _mm256_and_si256(low, _mm256_set1_epi32(15));
    high = _mm256_slli_epi32(_mm256_and_si256(high, _mm256_set1_epi32(3)), 4);
    return _mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32));
}

/* The d s and minus m t of a super-block's 8 parts of 32, or 16 of 16. */
typedef struct {
    __m256 d[2], m[2];
} super_scales;

INLINE __m256 low_bytes_to_f32(__m128i b)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b));
}

INLINE super_scales load_scales(const eng_type t, const char *block)
{
    const __m256 minus = _mm256_set1_ps(-0.0f);
    super_scales o;
    o.d[1] = o.m[0] = o.m[1] = _mm256_setzero_ps();
    if (t == ENG_IQ4_XS) {
        const eng_iq4_xs *b = (const void *)block;
        o.d[0] = _mm256_mul_ps(f16_all(b->d), _mm256_cvtepi32_ps(unpack_scales_iq4_xs(b)));
    } else if (t == ENG_Q4_K || t == ENG_Q5_K) { /* the same layout up to the codes */
        const eng_q4_k *b = (const void *)block;
        __m128i s = unpack_scales_k(b->s);
        o.d[0] = _mm256_mul_ps(f16_all(b->d), low_bytes_to_f32(s));
        o.m[0] = _mm256_xor_ps(minus, _mm256_mul_ps(f16_all(b->m), low_bytes_to_f32(_mm_srli_si128(s, 8))));
    } else {
        const eng_q2_k *b2 = (const void *)block;
        const eng_q3_k *b3 = (const void *)block;
        const eng_q6_k *b6 = (const void *)block;
        __m128i s =
            t == ENG_Q3_K ? unpack_scales_q3_k(b3->s) : _mm_loadu_si128((const void *)(t == ENG_Q2_K ? b2->s : (const void *)b6->s));
        __m256 d = f16_all(t == ENG_Q2_K ? b2->d : t == ENG_Q3_K ? b3->d : b6->d);
        if (t == ENG_Q2_K) {
            __m256 m = _mm256_xor_ps(minus, f16_all(b2->m));
            __m128i high = _mm_and_si128(_mm_srli_epi16(s, 4), _mm_set1_epi8(15));
            s = _mm_and_si128(s, _mm_set1_epi8(15));
            o.m[0] = _mm256_mul_ps(m, low_bytes_to_f32(high));
            o.m[1] = _mm256_mul_ps(m, low_bytes_to_f32(_mm_srli_si128(high, 8)));
        }
        o.d[0] = _mm256_mul_ps(d, low_bytes_to_f32(s));
        o.d[1] = _mm256_mul_ps(d, low_bytes_to_f32(_mm_srli_si128(s, 8)));
    }
    return o;
}

/* Scales in memory, to be read one by one. */
typedef struct {
    _Alignas(32) float d[16];
    _Alignas(32) float m[16];
} stored_scales;

INLINE void store_scales(const eng_type t, const char *block, stored_scales *out)
{
    super_scales s = load_scales(t, block);
    _mm256_store_ps(out->d, s.d[0]);
    if (has_halves(t))
        _mm256_store_ps(out->d + 8, s.d[1]);
    if (has_min(t)) {
        _mm256_store_ps(out->m, s.m[0]);
        if (has_halves(t))
            _mm256_store_ps(out->m + 8, s.m[1]);
    }
}

#endif
