/* Block formats of GGUF tensors: their sizes, and plain C that turns a row into float32 (the oracle of every kernel). */
#ifndef RETRIEVALD_QUANT_H
#define RETRIEVALD_QUANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Dense numbering of the types we compute with (not the file's numbers). */
typedef enum { ENG_F32, ENG_F16, ENG_BF16, ENG_Q8_0, ENG_Q4_0, ENG_Q4_1, ENG_TYPE_COUNT } eng_type;

/* Elements and bytes of one block. */
typedef struct {
    const char *name;       /* "Q4_1" */
    uint32_t file_id;       /* ggml_type */
    uint32_t block, bytes;
} eng_type_info;

extern const eng_type_info eng_types[ENG_TYPE_COUNT];

int eng_type_from_file(uint32_t file_id, eng_type *ret);   /* -ENOTSUP */
const char *eng_type_file_name(uint32_t file_id);          /* "Q5_K", also of types we lack; NULL: no such type */

/* Blocks, little-endian as in the file. d, m: f16. */
typedef struct { uint16_t d; int8_t q[32]; } eng_q8_0;                 /* x = d q */
typedef struct { uint16_t d; uint8_t q[16]; } eng_q4_0;                /* x = d (q - 8); low nibbles are elements 0..15 */
typedef struct { uint16_t d, m; uint8_t q[16]; } eng_q4_1;             /* x = d q + m */

float eng_f16_to_f32(uint16_t h);
uint16_t eng_f32_to_f16(float f);   /* round to nearest even */
float eng_bf16_to_f32(uint16_t h);
uint16_t eng_f32_to_bf16(float f);  /* round to nearest even, NaN stays NaN */

/* n elements (a multiple of the type's block) of a row. */
void eng_dequantize(eng_type type, const void *row, float *out, size_t n);

#endif
