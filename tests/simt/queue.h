/* For what is not a kernel, but done in a stream like one (blas.cc). */
#ifndef RETRIEVALD_SIMT_QUEUE_H
#define RETRIEVALD_SIMT_QUEUE_H

#include "cuda_runtime.h"

void emu_queue(cudaStream_t stream, std::function<void()> run);

#endif
