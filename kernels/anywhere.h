// PAT_ANYWHERE: of functions that the GPU runs, and that a host compiler can check.
#pragma once

#ifdef __CUDACC__
#define PAT_ANYWHERE __host__ __device__ __forceinline__
#else
#define PAT_ANYWHERE inline
#endif
