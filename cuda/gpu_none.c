/* The GPU of a machine, or a build, that has none. */
#include "gpu.h"

#include <errno.h>
#include <stdio.h>

int gpu_open(int index, gpu_context **ret, char *err, size_t errlen)
{
    (void)ret;
    snprintf(err, errlen, "device %d: this build has no GPU support", index);
    return -ENODEV;
}

void gpu_close(gpu_context *g)
{
    (void)g;
}
