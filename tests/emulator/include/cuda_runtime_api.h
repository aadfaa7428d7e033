// What the streaming kernels' host headers include; see cuda_runtime.h.
#pragma once

#include <cuda_runtime.h>
