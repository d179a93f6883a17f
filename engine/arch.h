/* What an architecture is, as data: which tensors it has, where they go and what their shapes are, how it rotates, and which keys of
 * its metadata would change the computation in a way the forward pass does not know. model.c reads it. */
#ifndef RETRIEVALD_ARCH_H
#define RETRIEVALD_ARCH_H

#include "model.h"

/* A dimension by its meaning; model.c knows the number. */
typedef enum { DIM_ONE, DIM_EMBD, DIM_Q, DIM_KV, DIM_FF, DIM_VOCAB } eng_dim;

typedef struct {
    const char *name;   /* of a layer's tensor: after "blk.N." */
    eng_dim rows, cols; /* rows DIM_ONE: a vector kept as float32 (a const float * field), else a matrix (an eng_weight) */
    bool optional;
    size_t field; /* offset in eng_model or eng_layer */
} eng_tensor_role;

/* A number in the metadata that must be absent, or have the value with which it does nothing. */
typedef struct {
    const char *key; /* after "ARCH." */
    float neutral;
    const char *what; /* "mixtures of experts are" ... not supported */
} eng_neutral_key;

typedef struct {
    const char *name; /* general.architecture, and the prefix of its keys */
    eng_rope_pairs rope_pairs;
    const eng_tensor_role *top, *layer; /* the lists end with name NULL */
    const eng_neutral_key *neutral;
} eng_arch;

extern const eng_arch eng_arch_llama;

#endif
