/* NumPy's .npy files (format 1.0 to 3.0): arrays of f16, f32 or int32, little-endian, C order. Every byte of the file is checked. */
#ifndef RETRIEVALD_SERVER_NPY_H
#define RETRIEVALD_SERVER_NPY_H

#include <stddef.h>
#include <stdint.h>

typedef enum { SRV_NPY_F16, SRV_NPY_F32, SRV_NPY_I32 } srv_npy_type;
enum { SRV_NPY_MAX_DIMS = 3 };

typedef struct {
    srv_npy_type type;
    uint32_t n_dims, dims[SRV_NPY_MAX_DIMS];
    void *data; /* 64-byte aligned */
} srv_npy;

/* Reads a whole file. -errno with a sentence that names it. Free it with srv_npy_free(). */
int srv_npy_read(const char *path, srv_npy *ret, char *err, size_t errlen);
void srv_npy_free(srv_npy *a); /* all zeros are fine */

/* Writes an array of a->type and a->dims, format 1.0, in place of what is there. -errno with a sentence that names it. */
int srv_npy_write(const char *path, const srv_npy *a, char *err, size_t errlen);

#endif
