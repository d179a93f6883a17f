#include "kernels.h"

void eng_kernels_avx2(eng_kernels *k)
{
    k->name = "avx2";
}
