/* Block formats of GGUF tensors: their sizes, and plain C that turns a row into float32 (the oracle of every kernel). */
#ifndef RETRIEVALD_QUANT_H
#define RETRIEVALD_QUANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Every type we compute with: first the plain ones, then blocks of 32, then blocks of 256 with scales inside. */
#define ENG_EACH_PLAIN_TYPE(X) X(F32) X(F16) X(BF16)
#define ENG_EACH_SMALL_TYPE(X) X(Q8_0) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(IQ4_NL)
#define ENG_EACH_SUPER_TYPE(X) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_XS)
#define ENG_EACH_BLOCK_TYPE(X) ENG_EACH_SMALL_TYPE(X) ENG_EACH_SUPER_TYPE(X)
#define ENG_EACH_TYPE(X) ENG_EACH_PLAIN_TYPE(X) ENG_EACH_BLOCK_TYPE(X)

/* Dense numbering (not the file's numbers). */
typedef enum {
    ENG_F32,
    ENG_F16,
    ENG_BF16,
    ENG_Q8_0,
    ENG_Q4_0,
    ENG_Q4_1,
    ENG_Q5_0,
    ENG_Q5_1,
    ENG_IQ4_NL,
    ENG_Q2_K,
    ENG_Q3_K,
    ENG_Q4_K,
    ENG_Q5_K,
    ENG_Q6_K,
    ENG_IQ4_XS,
    ENG_TYPE_COUNT
} eng_type;

/* Elements and bytes of one block. */
typedef struct {
    const char *name;       /* "Q4_1" */
    uint32_t file_id;       /* ggml_type */
    uint32_t block, bytes;
} eng_type_info;

extern const eng_type_info eng_types[ENG_TYPE_COUNT];

int eng_type_from_file(uint32_t file_id, eng_type *ret);   /* -ENOTSUP */
const char *eng_type_file_name(uint32_t file_id);          /* "Q5_K", also of types we lack; NULL: no such type */

/* Blocks, little-endian as in the file. d, m: f16. Two codes in a byte of q[16]: the low nibbles are elements 0..15. */
typedef struct { uint16_t d; int8_t q[32]; } eng_q8_0;                 /* x = d q */
typedef struct { uint16_t d; uint8_t q[16]; } eng_q4_0;                /* x = d (q - 8) */
typedef struct { uint16_t d, m; uint8_t q[16]; } eng_q4_1;             /* x = d q + m */
typedef struct { uint16_t d; uint8_t h[4], q[16]; } eng_q5_0;          /* x = d (q - 16); bit i of h: the fifth of element i */
typedef struct { uint16_t d, m; uint8_t h[4], q[16]; } eng_q5_1;       /* x = d q + m */
typedef struct { uint16_t d; uint8_t q[16]; } eng_iq4_nl;              /* x = d eng_iq4_values[q] */

/* Super-blocks of 256: scales s (and minima t where there is an m) for parts of 32 elements (Q4_K, Q5_K, IQ4_XS) or 16; quant.c has their
 * packing. The code of element 32 j + l, l < 32, from its low bits up: */
typedef struct { uint8_t s[16], q[64]; uint16_t d, m; } eng_q2_k;         /* x = d s q - m t; bits 2 (j % 4) .. of q[32 (j / 4) + l] */
typedef struct { uint8_t h[32], q[64], s[12]; uint16_t d; } eng_q3_k;     /* x = d (s - 32) (q - 4); as Q2_K, then bit j of h[l] */
typedef struct { uint16_t d, m; uint8_t s[12], q[128]; } eng_q4_k;        /* x = d s q - m t; bits 4 (j % 2) .. of q[32 (j / 2) + l] */
typedef struct { uint16_t d, m; uint8_t s[12], h[32], q[128]; } eng_q5_k; /* as Q4_K, then bit j of h[l] */
/* x = d s (q - 32); bits 4 (j % 4 / 2) .. of q[64 (j / 4) + 32 (j % 2) + l], then bits 2 (j % 4) .. of h[32 (j / 4) + l] */
typedef struct { uint8_t q[128], h[64]; int8_t s[16]; uint16_t d; } eng_q6_k;
typedef struct { uint16_t d, h; uint8_t s[4], q[128]; } eng_iq4_xs;       /* x = d (s - 32) eng_iq4_values[q]; q[16j ..] as IQ4_NL's */

extern const int8_t eng_iq4_values[16];

/* A block taken apart: x[i] = d[i / 16] q[i], or with a minimum d[i / 16] q[i] + m[i / 16]. d q is exact, so either rounds once at most. */
typedef struct {
    int8_t q[256];
    float d[16], m[16];
} eng_codes;

bool eng_type_has_min(eng_type type);
int eng_type_bits(eng_type type);    /* of a code: q below is in [0, 2^bits) of types with a minimum, else in [-2^bits / 2, 2^bits / 2) */
size_t eng_type_part(eng_type type); /* elements that share a scale: 16 or 32; of a type with blocks */
void eng_unpack(eng_type type, const void *block, eng_codes *ret); /* one block of a type with blocks */

float eng_f16_to_f32(uint16_t h);
uint16_t eng_f32_to_f16(float f);   /* round to nearest even */
float eng_bf16_to_f32(uint16_t h);
uint16_t eng_f32_to_bf16(float f);  /* round to nearest even, NaN stays NaN */

/* n elements (a multiple of the type's block) of a row. */
void eng_dequantize(eng_type type, const void *row, float *out, size_t n);

#endif
