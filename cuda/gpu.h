/* cuda/: the GPU half. A build without the CUDA toolkit links gpu_none.c, where opening fails with -ENODEV and a reason; the engine
 * then serves from the CPU. Plain C, no global state, every call returns 0 or -errno.
 */
#ifndef RETRIEVALD_GPU_H
#define RETRIEVALD_GPU_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpu_context gpu_context;

/* Opens device `index`. -ENODEV when there is none or this build has no GPU support; the reason goes to err. */
int gpu_open(int index, gpu_context **ret, char *err, size_t errlen);
void gpu_close(gpu_context *g); /* NULL is fine */

#ifdef __cplusplus
}
#endif
#endif
